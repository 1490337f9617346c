"""Tables and edgelists from files: what is embedded, and what a user brings."""

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

from datamodules.csv_reading import DELIMITERS, CsvFile
from datamodules.sources.base import TABLES, list_tables, make_source
from zoo.errors import Kpnn2Error, ZooError, listed
from zoo.graph import AdjacencySpec, parse_adjacency
from zoo.lookalikes import appearance, refuse_look_alikes, spelt

if TYPE_CHECKING:
    TableLike: TypeAlias = str | pd.DataFrame
else:
    TableLike = str  # of a class in the signature, the command line would read the file as that class's own config
_FORMATS = (*DELIMITERS, ".parquet", ".h5ad")
_UNPACK = {".gz": "gunzip", ".bz2": "bunzip2", ".xz": "unxz", ".zst": "unzstd", ".zip": "unzip"}
_WORKBOOKS = (".xlsx", ".xlsm", ".xls", ".ods")
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
        frame = _read_frame(_existing(edges, "data.edges", (*DELIMITERS, ".parquet")), "data.edges", None)
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
    if path.suffix.lower() == ".parquet":
        return _named_columns(_read_parquet(path, argument), argument, str(path))
    file = CsvFile(path, argument)
    file.refuse_other_delimiter()
    file.refuse_same_columns()
    return file.texts() if as_text is None else file.numbers(as_text)


def _optional(module: str, argument: str, path: Path) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise ZooError(f"{argument}: reading {path} needs {package}; pip install 'damcha-zoo[bio]'") from None


def _read_parquet(path: Path, argument: str) -> pd.DataFrame:
    reader = _optional("pyarrow.parquet", argument, path)
    try:
        table = reader.read_table(path)
    except ValueError as error:  # pyarrow's own are ValueErrors
        reason = " ".join(str(error).split())
        raise ZooError(f"{argument}: {path} is no readable Parquet ({reason}); write it again") from None
    except OSError as error:
        reason = error.strerror or " ".join(str(error).split())
        raise ZooError(f"{argument}: {path} can't be read ({reason}); check file and permissions") from None
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
