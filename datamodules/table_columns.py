"""What the columns of a table become: measurements and splits."""

import math
import re
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from datamodules.base import SPLITS
from datamodules.table_files import Table
from zoo.errors import ZooError, listed
from zoo.graph import AdjacencySpec
from zoo.lookalikes import look_alikes, refuse_look_alikes, spelt

_DECIMAL_COMMA = re.compile(r"[+-]?(\d+|\d{1,3}([.'\s]\d{3})+),\d+")
_FOLDS = 20  # groups are dealt into so many folds, of which shares of the rows are made


# ---------------------------------------------------------------------- measurements


def match_columns(
    table: Table, others: Sequence[str], spec: AdjacencySpec, ignore_unmatched: bool, allow_unmeasured: bool
) -> list[str | None]:
    """For each input node, its column; None where there is none and that is allowed. What is left out is said.

    Raises:
        ZooError: listing the columns without an input node and the input nodes without a column, unless allowed, and
            always if no column has one, or one only looks like a node or another column that is used.
    """
    inputs, there = set(spec.input_nodes), set(table.columns)
    _refuse_alike(table, inputs | set(others))
    unmatched = [column for column in table.columns if column not in inputs and column not in set(others)]
    unmeasured = [node for node in spec.input_nodes if node not in there]
    found = []
    if unmatched and not ignore_unmatched:
        within = sorted(set(unmatched) & set(spec.nodes))
        inner = f" ({listed(within)}: edges enter there, so it is no input)" if within else ""
        found.append(
            f"{len(unmatched)} columns have no input node: {listed(unmatched)}{inner}; rename or drop them, add edges "
            "from them, or set data.unmatched_columns to ignore"
        )
    if len(unmeasured) == len(spec.input_nodes):
        found.append(f"no column is named as an input node, such as {listed(unmeasured)}; rename columns")
    elif unmeasured and not allow_unmeasured:
        found.append(
            f"{len(unmeasured)} input nodes have no column: {listed(unmeasured)}; add columns of these names, or set "
            "data.unmeasured_nodes to missing"
        )
    if found:
        raise ZooError(f"{table.argument}: {table.name}: {'. And '.join(found)}")
    if unmatched:
        rank_zero_info(f"data.unmatched_columns: {len(unmatched)} columns ignored: {listed(unmatched)}")
    if unmeasured:
        rank_zero_info(f"data.unmeasured_nodes: {len(unmeasured)} input nodes missing: {listed(unmeasured)}")
    return [node if node in there else None for node in spec.input_nodes]


def _refuse_alike(table: Table, used: set[str]) -> None:
    """A reader can't tell which of two columns is meant, or that a column isn't the node it seems to be."""
    for group in look_alikes([*used, *table.columns, *table.about.columns]):
        if not used.isdisjoint(group):
            refuse_look_alikes(sorted(group), f"{table.argument}: {table.name}: names of columns and input nodes")


def has_decimal_comma(text: str) -> bool:
    """Whether a text is a number as spreadsheets in many languages write it: 1,5 or 1.234,5."""
    return _DECIMAL_COMMA.fullmatch(text.strip()) is not None


def column_of_numbers(values: "pd.Series[Any]", where: str, row_ids: Sequence[str]) -> np.ndarray:
    """A column in float64, NaN where nothing was measured.

    Raises:
        ZooError: naming column and row, for text, dates, complex and infinite numbers.
    """
    if values.dtype.kind in "Mmc":
        raise ZooError(f"{where}: column {values.name!r} has {values.dtype} values; they must be real numbers")
    plain = values.astype(object) if isinstance(values.dtype, pd.CategoricalDtype) else values
    numbers = pd.to_numeric(plain, errors="coerce").to_numpy(dtype=np.float64, na_value=np.nan)
    strange = np.flatnonzero(np.isnan(numbers) & values.notna().to_numpy())
    if strange.size:
        cell = plain.iloc[strange[0]]
        advice = "mend that cell (empty if not measured) or drop the column"
        if isinstance(cell, str) and has_decimal_comma(cell):
            advice = "write numbers with a decimal point, and nothing between thousands"
        raise ZooError(
            f"{where}: column {values.name!r} has {cell!r} in row {row_ids[strange[0]]!r}; it must hold numbers, so "
            f"{advice}"
        )
    infinite = np.flatnonzero(np.isinf(numbers))
    if infinite.size:
        raise ZooError(
            f"{where}: column {values.name!r} is infinite in row {row_ids[infinite[0]]!r}; give a number there, or "
            "leave it empty if not measured"
        )
    return numbers


def mean_and_std(numbers: np.ndarray) -> tuple[float, float]:
    """Of the measured numbers; the standard deviation of a constant is 1, and numbers too large have none (inf)."""
    measured = numbers[~np.isnan(numbers)]
    if measured.min() == measured.max():  # rounding would leave a constant a tiny deviation
        return float(measured[0]), 1.0
    try:
        # Exact sums: an identity is compared bit by bit, on whatever machine and in whatever order of rows.
        mean = math.fsum(measured.tolist()) / len(measured)
        with np.errstate(over="ignore", under="ignore"):
            squares = (measured - mean) ** 2
        return mean, math.sqrt(math.fsum(squares.tolist()) / len(measured)) or 1.0
    except OverflowError:
        return math.inf, math.inf


def standardise(
    table: Table,
    columns: Sequence[str | None],
    row_ids: Sequence[str],
    fitted: Sequence[tuple[float, float]] | None = None,
    training: np.ndarray | None = None,
    fit: bool = True,
) -> tuple[Tensor, list[tuple[float, float]]]:
    """Measurements (rows, columns) in float32, and the (mean, standard deviation) that each was standardised by.

    Args:
        table: where the columns are.
        columns: for each input node its column, or None: NaN in every row.
        row_ids: names of the rows, for errors.
        fitted: mean and standard deviation of each column, if they are known.
        training: a mask of the rows to take them of, if not.
        fit: False leaves numbers as they are if nothing is known.

    Raises:
        ZooError: naming the column, if what it holds is no number, too large, or nothing at all in the training rows.
    """
    frame = table.take([column for column in columns if column is not None])
    values = np.full((len(table), len(columns)), np.nan, dtype=np.float32)
    scales: list[tuple[float, float]] = []
    for j, column in enumerate(columns):
        mean, std = (0.0, 1.0) if fitted is None else fitted[j]
        if column is not None:
            # One column at a time: a float64 copy of the whole table may not fit.
            numbers = column_of_numbers(frame[column], f"{table.argument}: {table.name}", row_ids)
            if fitted is None and training is not None:
                _check_measured(numbers, training, column, table)
                if fit:
                    mean, std = mean_and_std(numbers[training])
            with np.errstate(over="ignore", invalid="ignore"):
                values[:, j] = (numbers - mean) / std
            if not np.isfinite([mean, std]).all() or np.isinf(values[:, j]).any():
                raise ZooError(
                    f"{table.argument}: {table.name}: column {column!r} has numbers too large for float32; give it in "
                    "a larger unit"
                )
        scales.append((mean, std))
    return torch.from_numpy(values), scales


def _check_measured(numbers: np.ndarray, training: np.ndarray, column: str, table: Table) -> None:
    if np.isnan(numbers[training]).all():
        which = "row" if np.isnan(numbers).all() else "row of the training split"
        raise ZooError(
            f"{table.argument}: {table.name}: column {column!r} has no number in any {which}; drop it and set "
            "data.unmeasured_nodes to missing"
        )


# ---------------------------------------------------------------------- splits


def split_rows(
    n: int,
    val_fraction: float,
    test_fraction: float,
    seed: int,
    classes: np.ndarray | None = None,
    groups: np.ndarray | None = None,
) -> np.ndarray:
    """0, 1 or 2 (train, val, test) for each of n rows.

    Args:
        n: number of rows.
        val_fraction: share of the rows, or of the groups, in val.
        test_fraction: share in test.
        seed: decides which.
        classes: class numbers (n,), kept at about the same share in every split.
        groups: group names (n,), each of which goes into one split whole.

    Raises:
        ZooError: if there are too few rows, groups, or rows of a class.
    """
    if groups is not None:
        return _split_groups(n, val_fraction, test_fraction, seed, classes, groups)
    splits = np.zeros(n, dtype=np.uint8)
    rest = np.arange(n)
    for number, name, share in ((2, "test_fraction", test_fraction), (1, "val_fraction", val_fraction)):
        held_out = _hold_out(rest, max(1, round(n * share)), seed, classes, f"data.{name}: got {share}")
        splits[held_out] = number
        rest = np.setdiff1d(rest, held_out)
    return splits


def _hold_out(rows: np.ndarray, n_held_out: int, seed: int, classes: np.ndarray | None, argument: str) -> np.ndarray:
    from sklearn.model_selection import train_test_split

    if classes is not None:
        _, inverse, counts = np.unique(classes[rows], return_inverse=True, return_counts=True)
        rows = rows[counts[inverse] > 1]  # the last row of a class stays in training
    least = 1 if classes is None else len(np.unique(classes[rows]))
    if not least <= n_held_out <= len(rows) - least:
        kinds = "" if classes is None else f" of {least} classes"
        raise ZooError(
            f"{argument}, which makes {n_held_out} of {len(rows)} rows{kinds}; at least {least} must be held out and "
            "as many left, so give more rows, another share, or data.split_column"
        )
    stratify = None if classes is None else classes[rows]
    _, held_out = train_test_split(rows, test_size=n_held_out, random_state=seed, stratify=stratify)
    return np.asarray(held_out)


def _split_groups(
    n: int, val_fraction: float, test_fraction: float, seed: int, classes: np.ndarray | None, groups: np.ndarray
) -> np.ndarray:
    from sklearn.model_selection import GroupShuffleSplit, StratifiedGroupKFold

    n_groups = len(np.unique(groups))
    n_folds = min(_FOLDS, n_groups) if classes is None else min(_FOLDS, n_groups, int(np.bincount(classes).max()))
    if n_folds < 3:
        raise ZooError(
            f"data.group_column: got {n_groups} groups in {n} rows; three splits need 3 groups, and 3 rows of a "
            "class, so give more or set data.split_column"
        )
    splits = np.zeros(n, dtype=np.uint8)
    if classes is None:
        n_test = min(max(1, round(n_groups * test_fraction)), n_groups - 2)
        n_val = min(max(1, round(n_groups * val_fraction)), n_groups - 1 - n_test)
        rest = np.arange(n)
        for number, size in ((2, n_test), (1, n_val)):
            shuffle = GroupShuffleSplit(n_splits=1, test_size=size, random_state=seed)
            kept, held_out = next(shuffle.split(rest, groups=groups[rest]))
            splits[rest[held_out]] = number
            rest = rest[kept]
        return splits
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a class rarer than there are folds
        folds = [
            held_out
            for _, held_out in StratifiedGroupKFold(n_folds, shuffle=True, random_state=seed).split(
                np.zeros(n), classes, groups
            )
        ]
    # A group too large for a held-out split goes to training with its fold; a fold may also have come out empty.
    folds = sorted((fold for fold in folds if len(fold)), key=lambda fold: len(fold) > 2 * n / n_folds)
    n_test = min(max(1, round(n_folds * test_fraction)), len(folds) - 2)
    n_val = min(max(1, round(n_folds * val_fraction)), len(folds) - 1 - n_test)
    if n_test < 1 or n_val < 1:
        raise ZooError(
            "data.group_column: the groups are too unequal to be split; merge small ones or set data.split_column"
        )
    for number, chosen in ((2, folds[:n_test]), (1, folds[n_test : n_test + n_val])):
        splits[np.concatenate(chosen)] = number
    return splits


def splits_of_column(values: "pd.Series[Any]", row_ids: Sequence[str]) -> np.ndarray:
    """Splits as a column gives them: train, val or test in every row.

    Raises:
        ZooError: naming row and value, if it is anything else.
    """
    unknown = np.flatnonzero(~values.isin(SPLITS))
    if unknown.size:
        value = values.iloc[unknown[0]]
        shown = spelt(value) if isinstance(value, str) else repr(value)
        raise ZooError(
            f"data.split_column: column {values.name!r} has {shown} in row {row_ids[unknown[0]]!r}; every row must "
            "have train, val or test"
        )
    return np.array([SPLITS.index(value) for value in values], dtype=np.uint8)
