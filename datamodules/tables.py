"""Tables whose columns are nodes of a graph: read, matched by name, split, and scaled by the training rows alone."""

import csv
import hashlib
import importlib
import importlib.util
import math
import os
import re
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import lightning.pytorch as pl
import numpy as np
import pandas as pd
import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from datamodules.loaders import ResumableLoader, ShuffledSampler
from zoo.errors import CheckpointMismatchError, Kpnn2Error, ZooError, listed
from zoo.graph import AdjacencySpec, parse_adjacency
from zoo.identity import digest, read_checkpoint, read_claim

if TYPE_CHECKING:
    TableLike: TypeAlias = str | pd.DataFrame
else:
    TableLike = str  # of a class in the signature, the command line would read the file as that class's own config
Problem = Literal["binary", "multiclass", "multilabel", "regression"]

SPLITS = ("train", "val", "test")
PBMC = "pbmc68k_reduced"  # as a name for data.features: the table that the scanpy package carries
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_FORMATS = (*_DELIMITERS, ".parquet", ".h5ad")
_IN_MEMORY = "<DataFrame>"  # what a checkpoint's settings say in place of a DataFrame
_FEW_CLASSES = 50  # integers with more values than this may be counts: the user says which
_FOLDS = 20  # groups are dealt into so many folds, of which shares of the rows are made


# ---------------------------------------------------------------------- what is embedded


def breast_cancer_table() -> pd.DataFrame:
    """Scikit-learn's breast cancer table: 569 rows, 30 named measurements and the column "diagnosis" as text."""
    from sklearn.datasets import load_breast_cancer

    data = load_breast_cancer(as_frame=True)
    names = np.array(data.target_names, dtype=object)
    return data.data.assign(diagnosis=names[data.target])


def breast_cancer_edges() -> pd.DataFrame:
    """The graph in that table's column names: "worst radius" -> "radius" -> "size" -> "diagnosis", and so on."""
    groups = {
        "size": ("radius", "perimeter", "area"),
        "shape": ("compactness", "concavity", "concave points", "symmetry", "fractal dimension"),
        "surface": ("texture", "smoothness"),
    }
    edges = [(group, "diagnosis") for group in groups]
    for group, features in groups.items():
        for feature in features:
            edges += [(feature, group)]
            edges += [(column, feature) for column in (f"mean {feature}", f"{feature} error", f"worst {feature}")]
    return pd.DataFrame(edges, columns=["source", "target"])


def pbmc_file() -> Path:
    """The 700 blood cells that the scanpy package carries, without importing it, which takes seconds.

    Raises:
        ZooError: if scanpy isn't installed, or has no such file.
    """
    found = importlib.util.find_spec("scanpy")
    if found is None or not found.submodule_search_locations:
        raise ZooError(
            f"data.features: got {PBMC}, which comes with the scanpy package, and that isn't installed; "
            "pip install 'damcha-zoo[bio]'"
        )
    path = Path(found.submodule_search_locations[0], "datasets", f"10x_{PBMC}.h5ad")
    if not path.is_file():
        raise ZooError(f"data.features: this version of scanpy has no {path}; pip install 'damcha-zoo[bio]'")
    return path


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
            raise ZooError(
                f"{argument}: got {column!r}, but {self.name} has the columns {listed(list(self.about.columns))}; name "
                "one of them"
            )
        return self.about[column]

    def row_ids(self, column: str | None) -> list[str]:
        """A name for each row: of a column, or the table's own, or its number from 0.

        Raises:
            ZooError: if a row has no name, or two have the same.
        """
        if column is None:
            names = list(map(str, range(len(self)))) if self.row_names is None else self.row_names
        else:
            values = self.require("data.id_column", column)
            if values.isna().any():
                row = int(np.flatnonzero(values.isna())[0])
                raise ZooError(f"data.id_column: {self.name} has no {column!r} in row {row}; give every row one")
            names = list(map(str, values))
        if len(set(names)) < len(names):
            again = sorted(name for name, count in Counter(names).items() if count > 1)
            raise ZooError(
                f"data.id_column: {self.name} has more than one row named {listed(again)}; name a column whose values "
                "are all different"
            )
        return names


def read_table(features: TableLike | None, argument: str, as_text: Sequence[str | None] = ()) -> Table:
    """Read a table from a file or a DataFrame; None is the embedded one.

    Args:
        features: a .csv, .tsv, .parquet or .h5ad file, ``pbmc68k_reduced``, a DataFrame, or None.
        argument: what errors call it.
        as_text: columns of a .csv or .tsv that aren't to become numbers, such as ids with leading zeros.

    Raises:
        ZooError: if there is no such file, it can't be read, is empty, or has two columns of one name.
    """
    if features is None or isinstance(features, pd.DataFrame):
        name = "breast-cancer" if features is None else "DataFrame"
        frame = _named_columns(breast_cancer_table() if features is None else features, argument, "the DataFrame")
        if frame.index.name is not None and frame.index.name in as_text:
            frame = frame.reset_index()
        table = _plain_table(frame, argument, name, hashlib.sha256(_canonical_csv(frame)).hexdigest())
    else:
        path = pbmc_file() if features == PBMC else _existing(features, argument, _FORMATS)
        with open(path, "rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        name = PBMC if features == PBMC else path.name
        if path.suffix.lower() == ".h5ad":
            table = _read_h5ad(path, argument, name, sha256)
        else:
            table = _plain_table(_read_frame(path, argument, as_text), argument, name, sha256)
    if not len(table):
        raise ZooError(f"{argument}: {table.name} has no rows; give a table with at least one")
    return table


def read_edges(edges: TableLike | None) -> AdjacencySpec:
    """Read a graph from a file or a DataFrame with columns source and target; None is the embedded one.

    Raises:
        ZooError: if there is no such file, it can't be read, or it is no graph.
    """
    if edges is None:
        frame = breast_cancer_edges()
    elif isinstance(edges, pd.DataFrame):
        frame = edges
    else:
        # names are taken as they stand: "NA" and "007" may well be nodes
        frame = _read_frame(_existing(edges, "data.edges", (*_DELIMITERS, ".parquet")), "data.edges", None)
    try:
        return parse_adjacency(frame)
    except Kpnn2Error as error:
        where = f"{edges}: " if isinstance(edges, str) else ""
        raise Kpnn2Error(f"data.edges: {where}{error}") from None


def _existing(name: str, argument: str, formats: Sequence[str]) -> Path:
    if name == _IN_MEMORY:
        raise ZooError(
            f"{argument}: this checkpoint's table was a DataFrame, which it doesn't hold; name a file with {argument}"
        )
    path = Path(name).expanduser()
    if not os.path.isfile(path):  # Path.is_file raises for a name too long
        raise ZooError(f"{argument}: there is no file {name}; check the path")
    if path.suffix.lower() not in formats:
        raise ZooError(f"{argument}: got {name}; must be a {', '.join(formats)} file, so convert it to one")
    return path


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
            options = {"dtype": {name: str for name in as_text if name in header}, "low_memory": False}
            options["float_precision"] = "round_trip"  # the default is off in the last bit of one number in many
        delimiter = _DELIMITERS[path.suffix.lower()]
        frame = pd.read_csv(path, sep=delimiter, encoding="utf-8-sig", index_col=False, **options)
        return _named_columns(frame, argument, str(path))
    except UnicodeDecodeError as error:
        raise ZooError(
            f"{argument}: {path} has bytes that are no UTF-8, the first at offset {error.start}; convert it "
            "(iconv -t utf-8)"
        ) from None
    except (csv.Error, ValueError) as error:  # pandas' and pyarrow's own errors are ValueErrors
        kind = {".csv": "CSV", ".tsv": "TSV"}.get(path.suffix.lower(), "Parquet")
        reason = " ".join(str(error).split())
        raise ZooError(f"{argument}: {path} is no readable {kind} ({reason}); write it again") from None
    except OSError as error:
        reason = error.strerror or " ".join(str(error).split())
        raise ZooError(f"{argument}: {path} can't be read ({reason}); check file and permissions") from None


def _check_rows(path: Path, argument: str) -> list[str]:
    """The header of a .csv or .tsv. Pandas renames columns of one name and fills short rows; here they are refused."""
    with open(path, encoding="utf-8-sig", newline="") as file:
        rows = csv.reader(file, delimiter=_DELIMITERS[path.suffix.lower()], strict=True)
        header = next(rows, [])
        if not header:
            raise ZooError(f"{argument}: {path} is empty; give a table with a header and rows")
        _named_columns(pd.DataFrame(columns=header), argument, str(path))
        for row in rows:
            if row and len(row) != len(header):
                raise ZooError(
                    f"{argument}: {path} line {rows.line_num} has {len(row)} fields, but the header has {len(header)}; "
                    "mend that line"
                )
    return header


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


# ---------------------------------------------------------------------- measurements


def match_columns(
    table: Table, others: Sequence[str], spec: AdjacencySpec, ignore_unmatched: bool, allow_unmeasured: bool
) -> list[str | None]:
    """For each input node, its column; None where there is none and that is allowed.

    Raises:
        ZooError: listing the columns without an input node and the input nodes without a column, unless allowed, and
            always if no column has one.
    """
    inputs, there = set(spec.input_nodes), set(table.columns)
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
    return [node if node in there else None for node in spec.input_nodes]


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
        raise ZooError(
            f"{where}: column {values.name!r} has {plain.iloc[strange[0]]!r} in row {row_ids[strange[0]]!r}; it must "
            "hold numbers, so mend that cell (empty if not measured) or drop the column"
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


# ---------------------------------------------------------------------- labels


@dataclass(frozen=True)
class Labels:
    """Labels as numbers.

    ``target`` holds class numbers (rows,) in int64, flags (rows, columns) in float32, or values (rows,) in float64;
    ``classes`` the names they count, none for multilabel and regression.
    """

    problem: Problem
    target: np.ndarray
    classes: list[str]


def _kind(values: "pd.Series[Any]") -> str:
    inferred = pd.api.types.infer_dtype(values.astype(object), skipna=True)
    kinds = {"string": "text", "floating": "float", "mixed-integer-float": "float"}
    return kinds.get(inferred, inferred)


def _as_class(value: object) -> str:
    """A class by name: 1, 1.0 and "1" are the same one, whatever a file made of it."""
    if isinstance(value, (float, np.floating)) and float(value).is_integer():
        return str(int(value))
    return str(value)


def sort_classes(names: Sequence[str]) -> list[str]:
    """Classes in order: whole numbers by size, everything else as text."""
    if all(re.fullmatch(r"-?\d+", name) for name in names):
        return sorted(names, key=lambda name: (int(name), name))
    return sorted(names)


def _are_flags(values: "pd.Series[Any]") -> bool:
    return _kind(values) in ("boolean", "integer", "float") and bool(values.isin([0, 1]).all())


def decide_problem(labels: pd.DataFrame) -> Problem:
    """What kind of problem the label columns pose, where that is beyond doubt.

    Raises:
        ZooError: where it isn't, asking for data.problem.
    """
    if len(labels.columns) > 1:
        if all(_are_flags(labels[name]) for name in labels.columns):
            return "multilabel"
        odd = [name for name in labels.columns if not _are_flags(labels[name])]
        raise ZooError(f"data.problem: got auto, but the label columns {listed(odd)} hold more than 0 and 1; {_ASK}")
    values = labels.iloc[:, 0]
    kind, n = _kind(values), values.nunique()
    if kind == "float":
        return "regression"
    if kind in ("text", "boolean", "integer") and n == 2:
        return "binary"
    if kind in ("text", "integer") and 3 <= n <= _FEW_CLASSES:
        return "multiclass"
    raise ZooError(f"data.problem: got auto, but column {values.name!r} has {n} different {kind} values; {_ASK}")


_ASK = "say which with data.problem: binary, multiclass, multilabel or regression, or name another label"


def refuse_missing_labels(labels: pd.DataFrame, row_ids: Sequence[str]) -> None:
    """Raise ZooError, naming column and row, if a label is missing."""
    for name in labels.columns:
        missing = np.flatnonzero(labels[name].isna())
        if missing.size:
            raise ZooError(
                f"data.label: column {name!r} is empty in {missing.size} rows: "
                f"{listed([row_ids[row] for row in missing.tolist()])}; fill in or drop them"
            )


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
        ZooError: naming column and row or class, if a label is unknown or none of this problem.
    """
    if problem == "multilabel":
        for name in labels.columns:
            if not _are_flags(labels[name]):
                raise ZooError(f"data.label: column {name!r} holds more than 0 and 1; multilabel needs 0 and 1")
        return Labels(problem, labels.to_numpy(dtype=np.float32), [])
    if len(labels.columns) != 1:
        raise ZooError(f"data.label: got {listed(list(labels.columns))}; {problem} takes one column, so name one")
    values = labels.iloc[:, 0]
    if problem == "regression":
        if _kind(values) not in ("integer", "float"):
            raise ZooError(
                f"data.problem: got regression, but column {values.name!r} has {_kind(values)} values; {_ASK}"
            )
        return Labels(problem, column_of_numbers(values, "data.label", row_ids), [])
    if _kind(values) == "float" and not np.equal(np.mod(values.to_numpy(np.float64), 1), 0).all():
        raise ZooError(f"data.problem: got {problem}, but column {values.name!r} holds fractions; {_ASK}")
    names = [_as_class(value) for value in values]
    classes = sort_classes(sorted(set(names))) if known is None else list(known)
    unknown = sort_classes(sorted(set(names) - set(classes)))
    if unknown:
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
        raise ZooError(
            f"data.split_column: column {values.name!r} has {values.iloc[unknown[0]]!r} in row "
            f"{row_ids[unknown[0]]!r}; every row must have train, val or test"
        )
    return np.array([SPLITS.index(value) for value in values], dtype=np.uint8)


# ---------------------------------------------------------------------- what Lightning sees


class TableRows(Dataset[dict[str, Any]]):
    """Rows of a table: {"values": (n_inputs,), "id": name}, and "target" if it is known."""

    def __init__(self, values: Tensor, target: Tensor | None, ids: Sequence[str]) -> None:
        self.values, self.target, self.ids = values, target, ids

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, row: int) -> dict[str, Any]:
        item: dict[str, Any] = {"values": self.values[row], "id": self.ids[row]}
        return item if self.target is None else item | {"target": self.target[row]}

    def only(self, rows: np.ndarray) -> "TableRows":
        chosen = torch.from_numpy(rows)
        target = None if self.target is None else self.target[chosen]
        return TableRows(self.values[chosen], target, [self.ids[row] for row in rows.tolist()])

    def without_target(self) -> "TableRows":
        return TableRows(self.values, None, self.ids)


class GraphTableDataModule(pl.LightningDataModule):
    """A table with a row a sample, whose columns are the input nodes of a graph.

    Batches are dicts: "values" (B, inputs) in float32, in the order of the graph's input nodes, standardised, NaN where
    nothing was measured; "target" (B,) in float32 for binary (0, 1) and regression (standardised), (B,) in int64 for
    multiclass, (B, labels) in float32 for multilabel; "id", a list of B texts. For predict there is no target.

    Args:
        features: .csv, .tsv, .parquet or .h5ad file (or DataFrame) with a row a sample, or pbmc68k_reduced. Left out:
            scikit-learn's breast cancer table.
        edges: .csv, .tsv or .parquet file (or DataFrame) with columns source and target, an edge a row. Left out:
            the graph in the breast cancer table's column names.
        label: the column to predict, or a list of 0/1 columns; in an .h5ad a column of obs.
        problem: binary, multiclass, multilabel or regression; auto looks at the label: text, booleans or integers with
            2 values are binary, text or integers with 3 to 50 are multiclass, fractions are regression, several 0/1
            columns are multilabel.
        id_column: column that names the rows in predictions and errors; left out, rows are numbered from 0, in an
            .h5ad named as in obs_names.
        split_column: column with train, val or test in every row.
        group_column: rows with the same value here never come into two splits.
        val_fraction: share of the rows (of the groups) held out for validation.
        test_fraction: share held out for the test.
        split_seed: decides which are held out, and the order of training rows.
        unmatched_columns: columns that are no input node: error, or ignore them.
        unmeasured_nodes: input nodes without a column: error, or take them as missing in every row.
        standardise: subtract the training rows' mean from each column and divide by their standard deviation. Targets
            of a regression always are.
        batch_size: rows a batch.
        num_workers: loader processes; 0 loads in the main one, which is enough for a table in memory.
        predict_features: for predict: the table to use, in the same columns, label not needed. Left out: the test rows.
        from_checkpoint: a checkpoint file whose graph, classes and scaling are used in place of edges and training
            rows. Validation, test and predict then use every row of a table the checkpoint wasn't trained on.

    Raises:
        ZooError: for an argument out of range, here; for a table, graph or label that can't be used, in ``setup``.
    """

    def __init__(
        self,
        features: TableLike | None = None,
        edges: TableLike | None = None,
        label: str | list[str] | None = None,
        problem: Literal["auto", "binary", "multiclass", "multilabel", "regression"] = "auto",
        id_column: str | None = None,
        split_column: str | None = None,
        group_column: str | None = None,
        val_fraction: float = 0.15,
        test_fraction: float = 0.15,
        split_seed: int = 0,
        unmatched_columns: Literal["error", "ignore"] = "error",
        unmeasured_nodes: Literal["error", "missing"] = "error",
        standardise: bool = True,
        batch_size: int = 32,
        num_workers: int = 0,
        predict_features: str | None = None,
        from_checkpoint: str | None = None,
    ) -> None:
        super().__init__()
        for name, share in (("val_fraction", val_fraction), ("test_fraction", test_fraction)):
            if not 0 < share < 0.5:
                raise ZooError(f"data.{name}: got {share}; must lie between 0 and 0.5")
        for name, value, least in (
            ("batch_size", batch_size, 1),
            ("num_workers", num_workers, 0),
            ("split_seed", split_seed, 0),
        ):
            if not least <= value < 1 << 32:
                raise ZooError(f"data.{name}: got {value}; must be at least {least}, and less than 2^32")
        for name, choice, choices in (
            ("problem", problem, ("auto", "binary", "multiclass", "multilabel", "regression")),
            ("unmatched_columns", unmatched_columns, ("error", "ignore")),
            ("unmeasured_nodes", unmeasured_nodes, ("error", "missing")),
        ):
            if choice not in choices:
                raise ZooError(f"data.{name}: got {choice!r}; must be {' or '.join(choices)}")
        if features is not None and edges is None and from_checkpoint is None:
            raise ZooError("data.edges: got none; name the file with the graph of these features")
        if features is not None and label is None and from_checkpoint is None:
            raise ZooError("data.label: got none; name the column to predict")
        labels = [label] if isinstance(label, str) else label
        if labels is not None and (not labels or len(set(labels)) < len(labels)):
            raise ZooError(f"data.label: got {label}; name one column, or several different ones")
        self._features, self._edges = features, edges
        # A checkpoint has to stay plain, so it gets a mark in place of a table in memory.
        features, edges = (_IN_MEMORY if isinstance(given, pd.DataFrame) else given for given in (features, edges))
        self.save_hyperparameters()
        self.batch_size = batch_size
        self._saved = _Saved.read(from_checkpoint) if from_checkpoint else None
        self._labels = labels or (["diagnosis"] if self._saved is None else self._saved.identity["targets"])
        self._check_saved(problem)
        if self._saved is not None and self.hparams["edges"] == _IN_MEMORY and isinstance(self._edges, str):
            self._edges = None  # the checkpoint's own settings say so, and it has the graph itself
        self._spec: AdjacencySpec | None = None if self._saved is None else self._saved.spec
        self._identity: dict[str, Any] | None = None
        self._loaded: Literal["split", "evaluate", "predict"] | None = None
        self._rows: TableRows | None = None
        self._splits: np.ndarray | None = None  # None: every row is for evaluation
        self._asked: TableRows | None = None

    @staticmethod
    def as_in_checkpoint(path: str) -> dict[str, Any]:
        """Arguments with which another table is read as a checkpoint's was: its graph, classes and scaling."""
        return {"from_checkpoint": path, "edges": None}

    def _check_saved(self, problem: str) -> None:
        if self._saved is None:
            return
        path, identity = self.hparams["from_checkpoint"], self._saved.identity
        if self._labels != identity["targets"]:
            raise ZooError(
                f"data.label: got {listed(self._labels)}, but {path} predicts {listed(identity['targets'])}; rename "
                "the column, or leave data.label out"
            )
        if problem not in ("auto", identity["problem"]):
            raise ZooError(
                f"data.problem: got {problem}, but {path} was trained for {identity['problem']}; leave data.problem out"
            )

    # ------------------------------------------------------------------ preparation

    @property
    def spec(self) -> AdjacencySpec:
        """The graph: of the checkpoint if there is one, or of ``edges``.

        Raises:
            ZooError: if ``edges`` is no graph, or another one than the checkpoint's.
        """
        if self._spec is None:
            self._spec = read_edges(self._edges)
        return self._spec

    def setup(self, stage: str) -> None:
        """Read, match, split and standardise the table, as far as the stage needs it."""
        path = self.hparams["predict_features"]
        predicting = stage == "predict" and path is not None
        wanted: Literal["split", "evaluate", "predict"] = "split"
        if self._saved is not None and stage != "fit":
            wanted = "predict" if stage == "predict" else "evaluate"
        # with a checkpoint's scaling, the table to predict is all that predicting needs
        if not (predicting and self._saved is not None) and self._loaded not in ("split", wanted):
            self._load(wanted)
        if predicting:
            table = read_table(path, "data.predict_features", [self.hparams["id_column"]])
            ids = table.row_ids(self.hparams["id_column"])
            identity = self._identity
            if identity is None and self._saved is not None:
                identity = self._identity = self._saved.with_source(_source(table))
            self._asked = self._measured(table, ids, None if identity is None else _scales(identity))[0]

    def _load(self, wanted: Literal["split", "evaluate", "predict"]) -> None:
        h, saved = self.hparams, self._saved
        if saved is not None and self._edges is not None:
            saved.check_graph(read_edges(self._edges))
        roles = {f"data.{name}": h[name] for name in ("id_column", "split_column", "group_column")}
        table = read_table(self._features, "data.features", list(roles.values()))
        self._check_roles(roles)
        ids = table.row_ids(h["id_column"])
        labels = self._read_labels(table, ids, optional=wanted == "predict")
        splits = self._split(table, ids, labels, wanted)
        training = splits == 0 if splits is not None and wanted == "split" else None

        source = _source(table)
        if labels is not None and training is not None:
            source |= {"train_rows": int(training.sum()), "class_counts": self._counts(labels, training)}

        rows, scales = self._measured(table, ids, None if saved is None else _scales(saved.identity), training)
        unit = {} if saved is None else saved.unit
        if labels is not None:
            target = labels.target
            if labels.problem == "regression":
                unit = unit or _unit(target[training])
                target = (target - unit["target_mean"]) / unit["target_std"]
                if np.abs(target).max() > np.finfo(np.float32).max:
                    raise ZooError("data.label: the numbers are too large for float32; give them in a larger unit")
            rows.target = torch.from_numpy(target.astype(np.int64 if labels.problem == "multiclass" else np.float32))
        if saved is not None:
            self._identity = saved.with_source(source)
        elif labels is not None:  # as always without a checkpoint
            self._identity = {
                "kind": "table",
                "graph": self.spec.to_dict() | {"fingerprint": self.spec.fingerprint},
                "inputs": list(self.spec.input_nodes),
                "problem": labels.problem,
                **({"classes": labels.classes} if labels.classes else {}),
                "targets": list(self._labels),
                "mean": [mean for mean, _ in scales],
                "std": [std for _, std in scales],
                **unit,
                "source": source,
            }
        self._rows, self._splits, self._loaded = rows, splits, wanted
        self._report(table)

    def _read_labels(self, table: Table, ids: Sequence[str], optional: bool) -> Labels | None:
        """The label columns; where they are optional, only those of the checkpoint's own table, to split it again."""
        if optional and not (self._saved is not None and self._saved.made_of(table)):
            return None
        labels = pd.DataFrame({name: table.require("data.label", name) for name in self._labels})
        refuse_missing_labels(labels, ids)
        if self._saved is not None:
            return encode_labels(labels, self._saved.problem, ids, self._saved.classes)
        if self.hparams["problem"] != "auto":
            return encode_labels(labels, self.hparams["problem"], ids)
        problem = decide_problem(labels)
        values = labels.iloc[:, 0]
        seen = "0 and 1 in every column" if len(labels.columns) > 1 else f"{values.nunique()} {_kind(values)} values"
        rank_zero_info(f"data.problem: {problem}, from the label {listed(self._labels)} ({seen})")
        return encode_labels(labels, problem, ids)

    def _check_roles(self, roles: Mapping[str, str | None]) -> None:
        used: dict[str, str] = {}
        inputs = set(self.spec.input_nodes)
        for argument, column in [*(("data.label", name) for name in self._labels), *roles.items()]:
            if column is None:
                continue
            if column in inputs:
                raise ZooError(
                    f"{argument}: got {column!r}, which is also an input node of the graph; a column is either "
                    "measured or that, so name another or take it out of the edges"
                )
            if column in used:
                raise ZooError(f"{argument}: got {column!r}, which is also {used[column]}; name another column")
            if argument != "data.id_column":  # rows may well be named by their group
                used[column] = argument

    def _split(self, table: Table, ids: Sequence[str], labels: Labels | None, wanted: str) -> np.ndarray | None:
        """The split of each row; None if all are for evaluation."""
        h = self.hparams
        column = h["split_column"]
        if column is not None and (wanted != "predict" or column in table.about.columns):
            return splits_of_column(table.require("data.split_column", column), ids)
        if labels is None or (wanted != "split" and self._saved is not None and not self._saved.made_of(table)):
            return None
        self._warn_of_other_split(table)
        groups = None
        if h["group_column"] is not None:
            values = table.require("data.group_column", h["group_column"])
            if values.isna().any():
                row = ids[int(np.flatnonzero(values.isna())[0])]
                raise ZooError(f"data.group_column: column {values.name!r} is empty in row {row!r}; fill it in")
            groups = values.astype(str).to_numpy(dtype=object)
        classes = labels.target if labels.classes else None
        if classes is not None:
            counts = np.bincount(classes, minlength=len(labels.classes))
            rare = [name for name, count in zip(labels.classes, counts, strict=True) if count == 1]
            if rare:
                raise ZooError(
                    f"data.label: the classes {listed(rare)} have only 1 row; a class needs 2 to be trained on and "
                    "tested, so drop or merge them"
                )
        return split_rows(len(table), h["val_fraction"], h["test_fraction"], h["split_seed"], classes, groups)

    def _warn_of_other_split(self, table: Table) -> None:
        """A checkpoint's own table split in another way has training rows in its test split."""
        if self._saved is None or not self._saved.made_of(table):
            return
        names = ("val_fraction", "test_fraction", "split_seed", "split_column", "group_column")
        then = self._saved.settings
        other = [f"data.{name} was {then[name]}" for name in names if name in then and then[name] != self.hparams[name]]
        if other:
            rank_zero_warn(
                f"The checkpoint was trained on this table split in another way ({', '.join(other)}): rows it was "
                "trained on may be among the test rows"
            )

    def _counts(self, labels: Labels, training: np.ndarray) -> dict[str, int]:
        """Training rows of each class, or with each label; refused where there is nothing to learn."""
        target = labels.target[training]
        if not len(target):
            raise ZooError(f"data.split_column: no row of {self.hparams['split_column']!r} says train; some must")
        advice = "give it more rows, or split in another way (data.split_seed, data.split_column)"
        if labels.classes:
            counts = np.bincount(target, minlength=len(labels.classes)).tolist()
            missing = [name for name, count in zip(labels.classes, counts, strict=True) if not count]
            if missing:
                raise ZooError(f"data.label: no row of {listed(missing)} is in the training split; {advice}")
            return dict(zip(labels.classes, counts, strict=True))
        for name, values in zip(self._labels, np.atleast_2d(target.T), strict=True):
            if values.min() == values.max():
                raise ZooError(f"data.label: {name!r} is {values[0]:g} in every row of the training split; {advice}")
        if labels.problem == "regression":
            return {}
        return dict(zip(self._labels, target.sum(0).astype(int).tolist(), strict=True))

    def _measured(
        self,
        table: Table,
        ids: Sequence[str],
        fitted: Sequence[tuple[float, float]] | None,
        training: np.ndarray | None = None,
    ) -> tuple[TableRows, list[tuple[float, float]]]:
        h = self.hparams
        others = [*self._labels, *(h[name] for name in ("id_column", "split_column", "group_column") if h[name])]
        columns = match_columns(
            table, others, self.spec, h["unmatched_columns"] == "ignore", h["unmeasured_nodes"] == "missing"
        )
        values, scales = standardise(table, columns, ids, fitted, training, h["standardise"])
        return TableRows(values, None, ids), scales

    def _report(self, table: Table) -> None:
        identity = self.identity()
        if self._splits is None:
            rows = f"{len(table):,} rows, all of them used, as the checkpoint was trained on another table"
        else:
            counts = np.bincount(self._splits, minlength=3)
            rows = ", ".join(f"{count:,} {name}" for count, name in zip(counts, SPLITS, strict=True)) + " rows"
        rank_zero_info(f"Table {table.name}: {rows}; {len(identity['inputs']):,} inputs; {identity['problem']}")

    def identity(self) -> dict[str, Any]:
        """Graph, classes, scaling and source of the data: what a model of it must agree with.

        Raises:
            ZooError: before ``setup``.
        """
        if self._identity is None:
            raise ZooError("identity: not known before setup; call setup('fit') first")
        return self._identity

    @property
    def digest(self) -> str:
        """SHA-256 of the identity's canonical JSON."""
        return digest(self.identity())

    # ------------------------------------------------------------------ loaders

    def _of_split(self, split: int) -> TableRows:
        if self._rows is None:
            raise ZooError("GraphTableDataModule: no data yet; call setup('fit') first")
        if self._splits is None:
            if split == 0:
                raise ZooError("train_dataloader: this table was taken whole for evaluation; call setup('fit') first")
            return self._rows
        rows = np.flatnonzero(self._splits == split)
        if not rows.size:
            name = self.hparams["split_column"]
            raise ZooError(f"data.split_column: no row of {name!r} says {SPLITS[split]}; some must for this command")
        return self._rows.only(rows)

    def _options(self) -> dict[str, Any]:
        workers = self.hparams["num_workers"]
        return {
            "batch_size": self.batch_size,
            "num_workers": workers,
            "persistent_workers": workers > 0,
            "pin_memory": torch.cuda.is_available(),
        }

    def train_dataloader(self) -> ResumableLoader:
        rows = self._of_split(0)
        replicas, rank = (self.trainer.world_size, self.trainer.global_rank) if self.trainer else (1, 0)
        sampler = ShuffledSampler(len(rows), replicas, rank, self.hparams["split_seed"])
        return ResumableLoader(rows, sampler, **self._options())

    def val_dataloader(self) -> DataLoader[dict[str, Any]]:
        return DataLoader(self._of_split(1), **self._options())

    def test_dataloader(self) -> DataLoader[dict[str, Any]]:
        return DataLoader(self._of_split(2), **self._options())

    def predict_dataloader(self) -> DataLoader[dict[str, Any]]:
        rows = self._of_split(2) if self._asked is None else self._asked
        return DataLoader(rows.without_target(), **self._options())


def _source(table: Table) -> dict[str, Any]:
    return {"name": table.name, "rows": len(table), "sha256": table.sha256}


def _unit(target: np.ndarray) -> dict[str, float]:
    """Mean and standard deviation of a regression's training rows."""
    mean, std = mean_and_std(target)
    if not np.isfinite([mean, std]).all():
        raise ZooError("data.label: the numbers are too large to be standardised; give them in a larger unit")
    return {"target_mean": mean, "target_std": std}


def _scales(identity: Mapping[str, Any]) -> list[tuple[float, float]]:
    return list(zip(identity["mean"], identity["std"], strict=True))


@dataclass(frozen=True)
class _Saved:
    """What a checkpoint says of the table it was trained on."""

    path: str
    identity: dict[str, Any]
    settings: dict[str, Any]
    spec: AdjacencySpec

    @classmethod
    def read(cls, path: str) -> "_Saved":
        claim = read_claim(read_checkpoint(path), path)
        identity = claim["identity"]
        if identity.get("kind") != "table":
            raise ZooError(
                f"data.from_checkpoint: {path} was trained on {identity.get('kind', 'nothing')}, not on a table with a "
                "graph; name a checkpoint of a graph model"
            )
        wanted = {"graph", "inputs", "problem", "targets", "mean", "std"}
        if not wanted <= set(identity):
            lacks = listed(sorted(wanted - set(identity)))
            raise ZooError(f"data.from_checkpoint: the identity in {path} lacks {lacks}; train with this version")
        spec = parse_adjacency(pd.DataFrame(identity["graph"]["edges"], columns=["source", "target"], dtype=object))
        inputs = list(spec.input_nodes)
        if identity["inputs"] != inputs or not len(inputs) == len(identity["mean"]) == len(identity["std"]):
            raise CheckpointMismatchError(
                f"data.from_checkpoint: the inputs in {path} aren't those of its graph; take another copy of the file"
            )
        return cls(path, identity, (claim.get("data") or {}).get("init_args", {}), spec)

    @property
    def problem(self) -> Problem:
        return self.identity["problem"]

    @property
    def classes(self) -> list[str] | None:
        return self.identity.get("classes")

    @property
    def unit(self) -> dict[str, float]:
        return {name: self.identity[name] for name in ("target_mean", "target_std") if name in self.identity}

    def made_of(self, table: Table) -> bool:
        return self.identity.get("source", {}).get("sha256") == table.sha256

    def check_graph(self, spec: AdjacencySpec) -> None:
        if spec.fingerprint != self.spec.fingerprint:
            raise CheckpointMismatchError(
                f"data.edges: another graph than that of {self.path}; leave data.edges out to use the checkpoint's, or "
                "data.from_checkpoint to train on this one"
            )

    def with_source(self, source: Mapping[str, Any]) -> dict[str, Any]:
        """The identity for another table; what was counted in the training rows stays unless counted anew."""
        return self.identity | {"source": self.identity.get("source", {}) | source}
