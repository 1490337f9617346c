"""What the columns of a table become: measurements."""

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from datamodules.table_files import Table
from zoo.errors import ZooError, listed
from zoo.graph import AdjacencySpec
from zoo.lookalikes import look_alikes, refuse_look_alikes

_DECIMAL_COMMA = re.compile(r"[+-]?(\d+|\d{1,3}([.'\s]\d{3})+),\d+")


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
