"""A CSV file that names pictures and their labels: read as the text it is, or refused by what is wrong with it."""

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pandas as pd

from datamodules.csv_reading import CsvFile
from datamodules.folders import files_below
from datamodules.splits import SPLITS
from zoo.errors import ZooError, listed
from zoo.lookalikes import appearance, refuse_look_alikes, spelt

_COLUMNS = ("path", "label", "split")


def read_labels(labels: str) -> pd.DataFrame:
    """The columns path, label and, if there is one, split; every cell is text, without the blanks around it.

    Raises:
        ZooError: if there is no such file, it is no CSV in UTF-8, lacks a column or has it twice, has no rows, cells
            too many or too few, empty cells, labels that only look the same, or other splits than train, val and test.
    """
    file = CsvFile(Path(os.path.expanduser(labels)), "data.labels", delimiter=",")
    file.refuse_other_delimiter()
    table = file.texts()  # a class may well be called NA, or 001
    header = [name.strip() for name in file.header]
    _refuse_header(labels, header, table.empty)
    table = table.iloc[:, [header.index(name) for name in _COLUMNS if name in header]].copy()
    table.columns = [name for name in _COLUMNS if name in header]
    for name in table:
        table[name] = table[name].str.strip()
        _refuse_cells(labels, table[name], ~table[name].isin(SPLITS) if name == "split" else table[name] == "")
    refuse_look_alikes(table["label"], f"data.labels: {labels}: labels")
    return table


def _refuse_header(labels: str, header: Sequence[str], empty: bool) -> None:
    for name in _COLUMNS:
        same = [column for column in header if column == name]
        if len(same) > 1:
            raise ZooError(f"data.labels: {labels} has {len(same)} columns {name!r}; leave the one that is meant")
    refuse_look_alikes(
        (name for name in header if appearance(name) in _COLUMNS),
        f"data.labels: {labels}: columns",
        advice="leave the one that is meant",
    )
    lacking = [name for name in ("path", "label") if name not in header]
    if lacking or empty:
        columns = ", ".join(map(spelt, header[:5])) + (", ..." if len(header) > 5 else "")
        what = f"no column {listed(lacking)} (it has {columns})" if lacking else "no rows"
        raise ZooError(
            f"data.labels: {labels} has {what}; give it a row a picture with the columns path, label and, if you like, "
            "split"
        )


def _refuse_cells(labels: str, cells: "pd.Series[Any]", bad: "pd.Series[Any]") -> None:
    if bad.any():
        rule = "must be train, val or test in every row" if cells.name == "split" else "may not be empty"
        rows = [int(row) + 1 for row in cells.index[bad]]
        raise ZooError(
            f"data.labels: {labels}: column {cells.name!r} has {spelt(cells[bad].iloc[0])} in row {listed(rows)} below "
            f"the header; it {rule}"
        )


def refuse_missing(labels: str, path: str, missing: Sequence[str], suffixes: Sequence[str]) -> None:
    """Raise ZooError for files that a CSV names and that aren't there, and say which are there under another spelling.

    Args:
        labels: the CSV file.
        path: the folder it is for.
        missing: paths of the files that aren't there, as the CSV has them.
        suffixes: of pictures.
    """
    if not missing:
        return
    there: dict[str, str] = {}
    with suppress(OSError):  # then there is no advice on spelling
        for name in files_below(os.path.expanduser(path), suffixes):
            for key in (_key(name), _key(os.path.splitext(name)[0])):
                there.setdefault(key, name)
    meant = {name: there[key] for name in missing if (key := _key(name)) in there}
    found = f"data.labels: {labels} names {len(missing)} files that aren't below {path}: {listed(missing)}"
    if meant:
        first, file = next(iter(meant.items()))
        raise ZooError(
            f"{found}; {len(meant)} of them are there in another spelling, such as {spelt(file)} for {spelt(first)}: "
            "write paths as the files are called"
        )
    raise ZooError(f"{found}; paths are relative to data.path, or absolute")


def _key(name: str) -> str:
    """The same for a name with slashes or backslashes, in any case and any spelling of its letters."""
    return appearance(os.path.normpath(name.replace("\\", "/"))).casefold()
