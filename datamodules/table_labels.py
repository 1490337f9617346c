"""Labels of a table: the text they are, what kind of problem they pose, and the numbers they become."""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd
from lightning.pytorch.utilities import rank_zero_info

from datamodules.table_columns import column_of_numbers, has_decimal_comma
from zoo.errors import ZooError, listed
from zoo.lookalikes import appearance, look_alikes, refuse_look_alikes

Problem = Literal["binary", "multiclass", "multilabel", "regression"]
_FEW_CLASSES = 50  # integers with more values than this may be counts: the user says which
_EXACT = 1 << 53  # larger floats are all whole, and count nothing
_ASK = "say which with data.problem: binary, multiclass, multilabel or regression, or name another label"

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
_CODE = re.compile(r"[+-]?0\d.*", re.ASCII)  # a number would lose its leading zeros
_WHOLE = re.compile(r"0|-?[1-9]\d*", re.ASCII)
_INFINITE = re.compile(r"[+-]?inf(inity)?", re.IGNORECASE)
_FLAGS = {"0": 0, "1": 1, "0.0": 0, "1.0": 1, "false": 0, "true": 1}
_NO_VALUE = frozenset({"na", "n/a", "#n/a", "<na>", "nan", "none", "null", "-", "?", "."})  # what others mean by them


@dataclass(frozen=True)
class Labels:
    """Labels as numbers.

    ``target`` holds class numbers (rows,) in int64, flags (rows, columns) in float32, or values (rows,) in float64;
    ``classes`` the names they count, none for multilabel and regression.
    """

    problem: Problem
    target: np.ndarray
    classes: list[str]


# ---------------------------------------------------------------------- what is written there


def _inferred(values: "pd.Series[Any]") -> str:
    return pd.api.types.infer_dtype(values.astype(object), skipna=True)


def _is_text(values: "pd.Series[Any]") -> bool:
    return _inferred(values) == "string"


def kind_of(values: "pd.Series[Any]") -> str:
    """What a column holds: boolean, integer, float, whole float (1.0, 2.0) or text, or pandas' word for other things.

    Texts are taken for numbers only where a number would be written back as the same text: 001 and 1E1 are text.
    """
    inferred = _inferred(values)
    if inferred == "string":
        return _kind_of_texts([text.strip() for text in values.dropna().unique()])
    if inferred not in ("floating", "mixed-integer-float"):
        return inferred
    numbers = values.dropna().astype(np.float64).to_numpy()
    return "whole float" if (np.abs(numbers) < _EXACT).all() and not np.mod(numbers, 1).any() else "float"


def _kind_of_texts(texts: Sequence[str]) -> str:
    if all(map(_WHOLE.fullmatch, texts)):
        return "integer"
    if any(_CODE.fullmatch(text) or not _NUMBER.fullmatch(text) for text in texts):
        return "text"
    if not all(float(text).is_integer() for text in texts):
        return "float"
    return "text" if "e" in "".join(texts).lower() else "whole float"


def _flag(value: object) -> int | None:
    """0 or 1, as numbers, booleans or the texts of either; None for anything else."""
    if isinstance(value, str):
        return _FLAGS.get(value.strip().lower())
    number = isinstance(value, (bool, int, float, np.bool_, np.integer, np.floating))
    return int(value) if number and value in (0, 1) else None


def _are_flags(values: "pd.Series[Any]") -> bool:
    return all(_flag(value) is not None for value in values.unique())


def _as_class(value: object) -> str:
    """A class by name: a text as it stands; the numbers 1 and 1.0 are one, whatever a file made of it."""
    if isinstance(value, (float, np.floating)) and float(value).is_integer():
        return str(int(value))
    return str(value)


def sort_classes(names: Iterable[str]) -> list[str]:
    """Classes in order: whole numbers by size, everything else as text."""
    names = list(names)
    if all(re.fullmatch(r"-?\d+", name) for name in names):
        return sorted(names, key=lambda name: (int(name), name))
    return sorted(names)


def refuse_missing_labels(labels: pd.DataFrame, row_ids: Sequence[str], missing: Collection[str] = ("",)) -> None:
    """Raise ZooError, naming column and rows, if a label is missing.

    Args:
        labels: the label columns.
        row_ids: names of the rows, for errors.
        missing: the texts that mean no label, apart from what a file itself marks as missing.
    """
    looks = set(map(appearance, missing))
    for name in labels.columns:
        values = labels[name].astype(object)
        odd = next((value for value in values if isinstance(value, (bytes, list, tuple, dict, set, np.ndarray))), None)
        if odd is not None:
            raise ZooError(
                f"data.label: column {name!r} holds values of type {type(odd).__name__}; a label is text or a number"
            )
        absent = [value for value in values.dropna().unique() if appearance(_as_class(value)) in looks]
        rows = np.flatnonzero(values.isna() | values.isin(absent))
        if rows.size:
            shown = listed([row_ids[row] for row in rows.tolist()])
            texts = f" (as no label counts what is in data.missing_labels: {listed(list(missing))})" if missing else ""
            raise ZooError(
                f"data.label: column {name!r} is empty in {rows.size} rows: {shown}; fill in or drop them{texts}"
            )


# ---------------------------------------------------------------------- what they pose


def decide_problem(labels: pd.DataFrame) -> Problem:
    """What kind of problem the label columns pose, where that is beyond doubt.

    Raises:
        ZooError: where it isn't, asking for data.problem.
    """
    if len(labels.columns) > 1:
        odd = [name for name in labels.columns if not _are_flags(labels[name])]
        if odd:
            raise ZooError(
                f"data.problem: got auto, but the label columns {listed(odd)} hold more than 0 and 1; {_ASK}"
            )
        return "multilabel"
    values = labels.iloc[:, 0]
    kind, n = kind_of(values), values.nunique()
    if kind == "float" or (kind == "whole float" and n > _FEW_CLASSES):
        return "regression"
    if kind == "text":
        _refuse_doubtful_texts(values)
    if kind in ("text", "boolean", "integer", "whole float") and n == 2:
        return "binary"
    if kind in ("text", "integer") and 3 <= n <= _FEW_CLASSES:
        return "multiclass"
    raise ZooError(f"data.problem: got auto, but column {values.name!r} has {n} different {kind} values; {_ASK}")


def _refuse_doubtful_texts(values: "pd.Series[Any]") -> None:
    """Numbers and flags that one cell makes texts of would be classes by mistake."""
    texts = sort_classes(values.unique())
    numbers = [text for text in texts if _NUMBER.fullmatch(text.strip())]
    others = [text for text in texts if text not in numbers and _flag(text) is None]
    if not others:
        return
    if all(map(has_decimal_comma, others)):
        raise ZooError(
            f"data.problem: got auto, but column {values.name!r} has {others[0]!r}, as numbers with a decimal comma "
            "are written; write them with a point, or say with data.problem that they are classes"
        )
    fractions = any(not float(text).is_integer() for text in numbers)
    if len(others) < len(texts) and (fractions or all(map(is_word_for_nothing, others))):
        kept = [text for text in texts if text not in others]
        raise ZooError(
            f"data.problem: got auto, but column {values.name!r} holds {listed(kept, 2)} and {listed(others)}; if that "
            f"means no label, name it in data.missing_labels; else {_ASK}"
        )


def is_word_for_nothing(text: str) -> bool:
    """Whether many programs write this for a missing value."""
    return text.strip().lower() in _NO_VALUE


# ---------------------------------------------------------------------- what they become


def encode_labels(
    labels: pd.DataFrame, problem: Problem, row_ids: Sequence[str], known: Sequence[str] | None = None
) -> Labels:
    """Labels as numbers.

    Args:
        labels: one column, or several for multilabel, with no label missing.
        problem: what they are labels of.
        row_ids: names of the rows, for errors.
        known: the classes in their order, where a checkpoint has set them.

    Raises:
        ZooError: naming column and row or class, if a label is unknown, only looks like another or is none of this
            problem.
    """
    if problem == "multilabel":
        for name in labels.columns:
            if not _are_flags(labels[name]):
                raise ZooError(
                    f"data.label: column {name!r} holds more than 0 and 1; multilabel needs 0 and 1, or true and false"
                )
        flags = np.array([[_flag(value) for value in labels[name]] for name in labels.columns], dtype=np.float32).T
        return Labels(problem, flags, [])
    if len(labels.columns) != 1:
        raise ZooError(f"data.label: got {listed(list(labels.columns))}; {problem} takes one column, so name one")
    values = labels.iloc[:, 0]
    if problem == "regression":
        return Labels(problem, _numbers(values, row_ids), [])
    if not _is_text(values) and kind_of(values) == "float":
        raise ZooError(f"data.problem: got {problem}, but column {values.name!r} holds fractions; {_ASK}")
    names = [_as_class(value) for value in values]
    if known is None:
        _refuse_twins(names, values.name, row_ids)
        classes = sort_classes(set(names))
    else:
        names = _in_known_spelling(names, known)
        classes = list(known)
    unknown = sort_classes(set(names) - set(classes))
    if unknown:
        for name in unknown:
            where = f"data.label: classes of column {values.name!r} and of the checkpoint"
            refuse_look_alikes([*classes, name], where)
        raise ZooError(
            f"data.label: column {values.name!r} has the classes {listed(unknown)}, which the checkpoint doesn't know "
            f"(it knows {listed(classes)}); rename or drop those rows"
        )
    if len(classes) < 2 or (problem == "binary" and len(classes) > 2):
        wanted = "exactly 2" if problem == "binary" else "at least 2"
        raise ZooError(
            f"data.problem: {problem} needs {wanted} classes, but column {values.name!r} has {len(classes)}: "
            f"{listed(classes)}; {_ASK}"
        )
    place = {name: i for i, name in enumerate(classes)}
    return Labels(problem, np.array([place[name] for name in names], dtype=np.int64), classes)


def _numbers(values: "pd.Series[Any]", row_ids: Sequence[str]) -> np.ndarray:
    """A regression's labels in float64; of texts the nearest number, as a file of numbers is read."""
    if not _is_text(values):
        if kind_of(values) not in ("integer", "float", "whole float"):
            raise ZooError(
                f"data.problem: got regression, but column {values.name!r} has {kind_of(values)} values; {_ASK}"
            )
        return column_of_numbers(values, "data.label", row_ids)
    texts = [text.strip() for text in values]
    odd = [row for row, text in enumerate(texts) if not (_NUMBER.fullmatch(text) or _INFINITE.fullmatch(text))]
    if len(odd) == len(texts) and not any(map(has_decimal_comma, texts)):
        raise ZooError(f"data.problem: got regression, but column {values.name!r} has text values; {_ASK}")
    if odd:
        text = values.iloc[odd[0]]
        advice = "mend that cell, or name it in data.missing_labels if it means no label"
        if has_decimal_comma(text):
            advice = "write numbers with a decimal point, and nothing between thousands"
        raise ZooError(
            f"data.label: column {values.name!r} has {text!r} in row {row_ids[odd[0]]!r}, which is no number; {advice}"
        )
    return column_of_numbers(pd.Series(list(map(float, texts)), name=values.name), "data.label", row_ids)


def _refuse_twins(names: Sequence[str], column: object, row_ids: Sequence[str]) -> None:
    """Two spellings of one class would be two classes."""
    different = list(dict.fromkeys(names))
    where = f"data.label: classes of column {column!r}"
    if alike := look_alikes(different):
        refuse_look_alikes(different, where, advice=f"give both one spelling, in {_rows_of(alike[0], names, row_ids)}")
    numbers: dict[float, list[str]] = {}
    for name in different:
        if _NUMBER.fullmatch(name) and not _CODE.fullmatch(name) and "e" not in name.lower():
            numbers.setdefault(float(name), []).append(name)
    for group in numbers.values():
        if len(group) > 1:
            raise ZooError(
                f"{where} are one number in several spellings: {listed(group)}, in {_rows_of(group, names, row_ids)}; "
                "give it one"
            )


def _rows_of(group: Sequence[str], names: Sequence[str], row_ids: Sequence[str]) -> str:
    return f"rows {listed([row_ids[names.index(name)] for name in group])}"


def _in_known_spelling(names: Sequence[str], known: Sequence[str]) -> list[str]:
    """Labels as a checkpoint spells them, where only the format of the number or boolean differs: 001 is its 1.

    A checkpoint may be of a table that kept numbers as such, or of a time when a text was read as one.
    """
    meant: dict[object, list[str]] = {}
    for name in known:
        meant.setdefault(_meaning(name), []).append(name)
    there = set(names)
    taken = {}
    for name in there - set(known):
        match meant.get(_meaning(name)):
            case [one] if one not in there:
                taken[name] = one
    often = Counter(taken.values())
    taken = {name: one for name, one in taken.items() if often[one] == 1}  # two labels of the table stay two
    if taken:
        ours = sort_classes(taken)
        rank_zero_info(
            f"data.label: {listed(ours)} taken as the checkpoint's classes {listed([taken[name] for name in ours])}"
        )
    return [taken.get(name, name) for name in names]


def _meaning(name: str) -> object:
    bare = name.strip()
    if _NUMBER.fullmatch(bare):
        return float(bare)
    return bare.lower() if bare.lower() in ("true", "false") else name
