"""Tables and edgelists from files: what is embedded, and what a user brings."""

import codecs
import csv
import hashlib
import importlib
import os
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pandas as pd

from datamodules.sources.base import TABLES, list_tables, make_source
from zoo.errors import Kpnn2Error, ZooError, listed
from zoo.graph import AdjacencySpec, parse_adjacency
from zoo.lookalikes import appearance, refuse_look_alikes, spelt

if TYPE_CHECKING:
    TableLike: TypeAlias = str | pd.DataFrame
else:
    TableLike = str  # of a class in the signature, the command line would read the file as that class's own config
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_FORMATS = (*_DELIMITERS, ".parquet", ".h5ad")
_UNPACK = {".gz": "gunzip", ".bz2": "bunzip2", ".xz": "unxz", ".zst": "unzstd", ".zip": "unzip"}
_WORKBOOKS = (".xlsx", ".xlsm", ".xls", ".ods")
_FIRST_BYTES = {  # of files that are no text, whatever their name says
    b"\x1f\x8b": ".gz",
    b"BZh": ".bz2",
    b"\xfd7zXZ\0": ".xz",
    b"\x28\xb5\x2f\xfd": ".zst",
    b"PK\x03\x04": ".xlsx",
    b"\xd0\xcf\x11\xe0": ".xls",
    b"PAR1": ".parquet",
    b"\x89HDF": ".h5ad",
}
IN_MEMORY = "<DataFrame>"  # what a checkpoint's settings say in place of a DataFrame


# ---------------------------------------------------------------------- reading


@dataclass(frozen=True)
class Table:
    """A table as it was read: what is known about its rows, and how to get measurements by column.

    ``about`` has the columns that may be label, id, split or group, ``columns`` names those that may be measurements.
    In most tables they are the same; in an .h5ad they are obs and the names of var.
    """

    argument: str
    name: str
    sha256: str
    about: pd.DataFrame
    columns: list[str]
    take: Callable[[list[str]], pd.DataFrame]
    row_names: list[str] | None

    def __len__(self) -> int:
        return len(self.about)

    def require(self, argument: str, column: str) -> "pd.Series[Any]":
        """A column of ``about``; refused by the name of the argument that asks for it, if there is none."""
        if column not in self.about.columns:
            alike = [name for name in self.about.columns if appearance(name) == appearance(column)]
            if alike:
                raise ZooError(
                    f"{argument}: got {spelt(column)}, but {self.name} has {' and '.join(map(spelt, alike))}, which "
                    "only looks the same; give both one spelling"
                )
            raise ZooError(
                f"{argument}: got {column!r}, but {self.name} has the columns {listed(list(self.about.columns))}; name "
                "one of them"
            )
        return self.about[column]

    def row_ids(self, column: str | None) -> list[str]:
        """A name for each row: of a column, or the table's own, or its number from 0.

        Raises:
            ZooError: if a row has no name, or two have the same, or names that look the same.
        """
        if column is None and self.row_names is None:
            return list(map(str, range(len(self))))
        if column is None:
            names = self.row_names or []
        else:
            values = self.require("data.id_column", column)
            empty = np.flatnonzero(values.isna() | (values.astype(object) == ""))
            if empty.size:
                raise ZooError(f"data.id_column: {self.name} has no {column!r} in row {empty[0]}; give every row one")
            names = list(map(str, values))
        if len(set(names)) < len(names):
            again = sorted(name for name, count in Counter(names).items() if count > 1)
            raise ZooError(
                f"data.id_column: {self.name} has more than one row named {listed(again)}; name a column whose values "
                "are all different"
            )
        refuse_look_alikes(names, f"data.id_column: names of rows in {self.name}", advice="give them different names")
        return names


def read_table(
    features: TableLike | Path, argument: str, as_text: Sequence[str | None] = (), title: str | None = None
) -> Table:
    """Read a table from a file, a DataFrame, or a source by name.

    Args:
        features: a .csv, .tsv, .parquet or .h5ad file, a DataFrame, or a name of ``list_tables()``.
        argument: what errors call it.
        as_text: columns of a .csv or .tsv that are taken as they stand: labels, ids, groups and splits, in which 007
            and NA are text.
        title: what a named table is called.

    Raises:
        ZooError: if there is no such file, it can't be read, is empty, or has two columns of one name.
    """
    if isinstance(features, str) and is_table_name(features):
        source = make_source(TABLES, features, argument=argument)
        features, title = source.read().table, source.shown
    if isinstance(features, pd.DataFrame):
        name = title or "DataFrame"
        frame = _named_columns(features, argument, f"the table {title}" if title else "the DataFrame")
        if frame.index.name is not None and frame.index.name in as_text and frame.index.name not in frame.columns:
            frame = frame.reset_index()
        table = _plain_table(frame, argument, name, hashlib.sha256(_canonical_csv(frame)).hexdigest())
    else:
        path = _existing(features, argument, _FORMATS)
        with open(path, "rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        name = title or path.name
        if path.suffix.lower() == ".h5ad":
            table = _read_h5ad(path, argument, name, sha256)
        else:
            table = _plain_table(_read_frame(path, argument, as_text), argument, name, sha256)
    if not len(table):
        raise ZooError(f"{argument}: {table.name} has no rows; give a table with at least one")
    return table


def read_edges(edges: TableLike | Path) -> AdjacencySpec:
    """Read a graph from a file or a DataFrame with columns source and target.

    Raises:
        ZooError: if there is no such file, it can't be read, or it is no graph.
    """
    if isinstance(edges, pd.DataFrame):
        frame = edges
    else:
        # names are taken as they stand: "NA" and "007" may well be nodes
        frame = _read_frame(_existing(edges, "data.edges", (*_DELIMITERS, ".parquet")), "data.edges", None)
    try:
        return parse_adjacency(frame)
    except Kpnn2Error as error:
        where = "" if isinstance(edges, pd.DataFrame) else f"{edges}: "
        raise Kpnn2Error(f"data.edges: {where}{error}") from None


def is_table_name(given: str) -> bool:
    """Whether a text is the name of a table, and no file."""
    return not Path(given).suffix and given.isidentifier() and given in list_tables()


def _existing(name: str | Path, argument: str, formats: Sequence[str]) -> Path:
    if name == IN_MEMORY:
        raise ZooError(
            f"{argument}: this checkpoint's table was a DataFrame, which it doesn't hold; name a file with {argument}"
        )
    path = Path(name).expanduser()
    if not os.path.isfile(path):  # Path.is_file raises for a name too long
        raise ZooError(f"{argument}: there is no file {name}; check the path")
    if path.suffix.lower() not in formats:
        raise ZooError(f"{argument}: got {name}; must be a {', '.join(formats)} file, so {_how_to_convert(path)}")
    return path


def _how_to_convert(path: Path) -> str:
    suffix = path.suffix.lower()
    if suffix in _UNPACK:
        return f"unpack it: {_UNPACK[suffix]} {path.name}"
    if suffix in _WORKBOOKS:
        return "save the sheet as CSV (UTF-8, separated by commas), or with pandas.read_excel(...).to_csv(...)"
    if suffix in (".txt", ".tab", ".dat", ""):
        return "rename it to .csv if commas separate its fields, to .tsv if tabs do"
    return "convert it to one"


def _plain_table(frame: pd.DataFrame, argument: str, name: str, sha256: str) -> Table:
    return Table(argument, name, sha256, frame, list(frame.columns), lambda columns: frame[columns], None)


def _canonical_csv(frame: pd.DataFrame) -> bytes:
    """The same bytes whatever the order of columns."""
    text: str = frame[sorted(frame.columns)].to_csv(index=False, lineterminator="\n")
    return text.encode()


def _named_columns(frame: pd.DataFrame, argument: str, where: str) -> pd.DataFrame:
    names = pd.Index(list(map(str, frame.columns)), dtype=object)
    if names.has_duplicates:
        again = sorted(set(names[names.duplicated()]))
        raise ZooError(f"{argument}: {where} has more than one column {listed(again)}; rename or drop one of each")
    return frame.set_axis(names, axis=1)


def _read_frame(path: Path, argument: str, as_text: Sequence[str | None] | None) -> pd.DataFrame:
    """A .csv, .tsv or .parquet file; ``as_text`` None leaves every cell of the first two as it stands."""
    try:
        if path.suffix.lower() == ".parquet":
            return _named_columns(_read_parquet(path, argument), argument, str(path))
        header = _check_rows(path, argument)
        options: dict[str, Any] = {"dtype": str, "keep_default_na": False}
        if as_text is not None:
            # a converter, unlike a dtype, sees every cell, also those that pandas takes for missing values
            options = {"converters": {i: str for i, name in enumerate(header) if name in as_text}, "low_memory": False}
            options["float_precision"] = "round_trip"  # the default is off in the last bit of one number in many
        delimiter = _DELIMITERS[path.suffix.lower()]
        return pd.read_csv(
            path, sep=delimiter, encoding="utf-8-sig", index_col=False, header=0, names=header, **options
        )
    except UnicodeDecodeError:
        # an error of a stream counts from the start of its last block
        raise ZooError(
            f"{argument}: {path} has bytes that are no UTF-8, the first at offset {_first_odd_byte(path)}; convert it "
            "(iconv -f CP1252 -t UTF-8 if it is of Windows)"
        ) from None
    except (csv.Error, ValueError) as error:  # pandas' and pyarrow's own errors are ValueErrors
        kind = {".csv": "CSV", ".tsv": "TSV"}.get(path.suffix.lower(), "Parquet")
        reason = " ".join(str(error).split())
        raise ZooError(f"{argument}: {path} is no readable {kind} ({reason}); write it again") from None
    except OSError as error:
        reason = error.strerror or " ".join(str(error).split())
        raise ZooError(f"{argument}: {path} can't be read ({reason}); check file and permissions") from None


def _first_odd_byte(path: Path) -> int:
    try:
        path.read_bytes().decode()
    except UnicodeDecodeError as error:
        return error.start
    raise ValueError(f"{path} changed while it was read")


def _check_rows(path: Path, argument: str) -> list[str]:
    """The header of a .csv or .tsv. Pandas renames columns of one name and fills short rows; here they are refused.

    A column without a name gets pandas' own one for it.
    """
    _check_bytes(path, argument)
    delimiter = _DELIMITERS[path.suffix.lower()]
    with open(path, encoding="utf-8-sig", newline="") as file:
        first = file.readline().rstrip("\r\n")
        if delimiter not in first:
            _check_delimiter(first, path, argument)
        file.seek(0)
        rows = csv.reader(file, delimiter=delimiter, strict=True)
        header = next(rows, [])
        if not header:
            raise ZooError(f"{argument}: {path} is empty; give a table with a header and rows")
        header = [name or f"Unnamed: {i}" for i, name in enumerate(header)]
        _named_columns(pd.DataFrame(columns=header), argument, str(path))
        for row in rows:
            if row and len(row) != len(header):
                if any(";" in name for name in header):
                    _check_delimiter(";", path, argument)
                raise ZooError(
                    f"{argument}: {path} line {rows.line_num} has {len(row)} fields, but the header has {len(header)}; "
                    "mend that line"
                )
    return header


def _check_bytes(path: Path, argument: str) -> None:
    """Refuse what is no text in UTF-8 from its first bytes on, with what to do about each."""
    with open(path, "rb") as file:
        head = file.read(1 << 12)
    kind = next((kind for first, kind in _FIRST_BYTES.items() if head.startswith(first)), None)
    if kind is not None and not _is_text(head):  # a column may well be named PAR1
        advice = f"rename it to {kind}" if kind in _FORMATS else _how_to_convert(path.with_suffix(kind))
        raise ZooError(f"{argument}: {path} is no text, but a {kind} file by its first bytes; {advice}")
    wide = "UTF-16" if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else None
    if wide is None and 4 * head.count(0) > len(head):  # of a letter's two bytes the zero is the second or the first
        wide = "UTF-16LE" if head.index(0) % 2 else "UTF-16BE"
    if wide:
        raise ZooError(
            f"{argument}: {path} is no UTF-8, but {wide}; convert it "
            f"(iconv -f {wide} -t UTF-8 {path.name} > NEW{path.suffix})"
        )
    if (zero := _first_zero(path)) is not None:  # pandas would end the cell there
        raise ZooError(f"{argument}: {path} has a byte of zero at offset {zero}; take it out (tr -d '\\000')")


def _is_text(head: bytes) -> bool:
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)  # the last character may go on
    except UnicodeDecodeError:
        return False
    return 0 not in head


def _first_zero(path: Path) -> int | None:
    with open(path, "rb") as file:
        start = 0
        while block := file.read(1 << 20):
            if 0 in block:
                return start + block.index(0)
            start += len(block)
    return None


def _check_delimiter(header: str, path: Path, argument: str) -> None:
    """Refuse a header that another character than the format's own separates."""
    found = next((delimiter for delimiter in ";\t,|" if delimiter in header), None)
    if found == ";":
        raise ZooError(
            f"{argument}: {path} is separated by ';', as spreadsheets write where a comma is the decimal mark; save it "
            f"with '{_DELIMITERS[path.suffix.lower()]}' and decimal points: pandas.read_csv({path.name!r}, sep=';', "
            "decimal=',', dtype={'LABEL': str}).to_csv('NEW.csv', index=False)"
        )
    if found:
        right = next((suffix for suffix, delimiter in _DELIMITERS.items() if delimiter == found), None)
        advice = f"rename it to {right}" if right else "separate it by commas"
        raise ZooError(f"{argument}: {path} is separated by {found!r}; {advice}")


def _optional(module: str, argument: str, path: Path) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise ZooError(f"{argument}: reading {path} needs {package}; pip install 'damcha-zoo[bio]'") from None


def _read_parquet(path: Path, argument: str) -> pd.DataFrame:
    table = _optional("pyarrow.parquet", argument, path).read_table(path)
    _named_columns(pd.DataFrame(columns=table.column_names), argument, str(path))
    frame = table.to_pandas()
    return frame if isinstance(frame.index, pd.RangeIndex) else frame.reset_index()


def _read_h5ad(path: Path, argument: str, name: str, sha256: str) -> Table:
    anndata = _optional("anndata", argument, path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about how the file's maker stored what isn't used here
            data = anndata.read_h5ad(path)
    except Exception as error:  # whatever HDF5 and anndata meet in a damaged file
        reason = (" ".join(str(error).split()) or type(error).__name__)[:200]
        raise ZooError(f"{argument}: {path} is no readable .h5ad ({reason}); write it again") from None
    if data.X is None:
        raise ZooError(f"{argument}: {path} has no X; store the measurements there")
    columns = list(_named_columns(pd.DataFrame(columns=data.var_names), argument, f"{path} (var)").columns)
    place = {column: i for i, column in enumerate(columns)}

    def take(chosen: list[str]) -> pd.DataFrame:
        values = data.X[:, [place[column] for column in chosen]]
        return pd.DataFrame(values.toarray() if hasattr(values, "toarray") else np.asarray(values), columns=chosen)

    about = _named_columns(data.obs, argument, f"{path} (obs)")
    return Table(argument, name, sha256, about, columns, take, list(map(str, data.obs_names)))
