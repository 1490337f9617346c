"""What a named source of data gives, and the registers of those that there are.

To add one, write a file with a subclass of ``CorpusSource``, ``PairSource``, ``PictureSource`` or ``TableSource`` whose
``load`` returns plain data, or of ``SequenceSource``, which draws it. Decorated with ``register_corpus``,
``register_pairs``, ``register_pictures``, ``register_table`` or ``register_sequences`` and put into this folder (or
named by ``ZOO_PLUGINS``), it is there as ``data.source`` in configs, on the command line, in checkpoints, and in the
tests that all sources pass. What comes of the data is no concern of a source: splits, tokens, sizes and scaling are the
data modules'.
"""

import dataclasses
import http.client
import os
import socket
import tarfile
import tempfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import pandas as pd

from zoo.checkpoint.remote import default_cache
from zoo.errors import ZooError
from zoo.options import NoOptions, parse_options
from zoo.registry import Registry

_PATIENCE = 30.0  # seconds a server may be silent
_NOT_FETCHED = (OSError, RuntimeError, EOFError, http.client.HTTPException, tarfile.TarError, zlib.error)
_SPLITS = {"train", "val", "test"}


# ---------------------------------------------------------------------- plain data


@dataclass(frozen=True)
class CorpusData:
    """A corpus.

    Args:
        documents: by name, in any order: a text, or the path of a file of plain text in UTF-8. Names are the same on
            every machine.
        about: what else the data identity is to keep of where the text came from, in JSON's types.

    Raises:
        ValueError: if there are none, or they are something else.
    """

    documents: Mapping[str, str | Path]
    about: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.documents, Mapping) or not self.documents:
            raise ValueError("documents must be texts or paths by name, at least one")
        for name, document in self.documents.items():
            if not isinstance(name, str) or not isinstance(document, (str, Path)):
                raise ValueError(f"document {name!r} is a {type(document).__name__}, and must be a text or a Path")


@dataclass(frozen=True)
class PairData:
    """Pairs of texts.

    Args:
        pairs: source and target of each, neither of them empty, in the same order on every machine.
        about: what else the data identity is to keep of where they came from, in JSON's types.

    Raises:
        ValueError: if there are none, or they are something else.
    """

    pairs: Sequence[tuple[str, str]]
    about: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not len(self.pairs):
            raise ValueError("pairs must be tuples of source and target, at least one")
        for i, pair in enumerate(self.pairs):
            if len(pair) != 2 or not all(isinstance(text, str) and text for text in pair):
                raise ValueError(f"pair {i} is {pair!r:.80}, and must be two texts that aren't empty")


@dataclass(frozen=True)
class SequenceData:
    """Sequences of symbols, in which some are answers that follow from those before them.

    Args:
        symbols: the names of all symbols, without blanks in them.
        tokens: (n, T), each symbol's place in ``symbols``.
        is_answer: (n, T) in bool, which of them are answers; never the first, and at least one in each sequence.

    Raises:
        ValueError: if these don't agree.
    """

    symbols: Sequence[str]
    tokens: np.ndarray
    is_answer: np.ndarray

    def __post_init__(self) -> None:
        if len(set(self.symbols)) < len(self.symbols) or any(len(name.split()) != 1 for name in self.symbols):
            raise ValueError("symbols must be different texts without blanks")
        if self.tokens.ndim != 2 or self.tokens.shape != self.is_answer.shape or self.is_answer.dtype != bool:
            raise ValueError(
                f"tokens are {self.tokens.shape} and is_answer {self.is_answer.shape} in {self.is_answer.dtype}; both "
                "must be (n, T), the second in bool"
            )
        if self.tokens.dtype.kind not in "iu" or not np.isin(self.tokens, np.arange(len(self.symbols))).all():
            raise ValueError("tokens of no symbol; they are whole numbers, places in symbols")
        if self.is_answer[:, 0].any() or not self.is_answer.any(axis=1).all():
            raise ValueError("every sequence must have an answer, which isn't its first symbol")


@dataclass(frozen=True)
class PictureData:
    """Pictures of classes.

    Args:
        pictures: (n, height, width) or (n, height, width, 3) in uint8, or n paths of files.
        labels: (n,), each picture's place in ``classes``.
        classes: names of the classes, in order.
        splits: (n,), train, val or test for each picture, where the set has splits of its own. Those of the three that
            it lacks are drawn.

    Raises:
        ValueError: if sizes don't agree, or a label is of no class.
    """

    pictures: np.ndarray | Sequence[Path]
    labels: np.ndarray | Sequence[int]
    classes: Sequence[str]
    splits: Sequence[str] | None = None

    def __post_init__(self) -> None:
        shape = getattr(self.pictures, "shape", None)
        if shape is not None and (self.pictures.dtype != np.uint8 or shape[3:] not in ((), (3,)) or len(shape) < 3):  # type: ignore[union-attr]
            raise ValueError(
                f"pictures are {shape} in {self.pictures.dtype}, and must be (n, height, width) or (n, height, width, "  # type: ignore[union-attr]
                "3) in uint8"
            )
        labels = np.asarray(self.labels)
        if len(self.pictures) != len(labels) or not len(labels):
            raise ValueError(f"not a label for each picture: {len(labels)} for {len(self.pictures)}")
        if labels.dtype.kind not in "iu" or labels.min() < 0 or labels.max() >= len(self.classes):
            raise ValueError("labels of no class; they are whole numbers, places in classes")
        if len(set(self.classes)) < len(self.classes) or not all(isinstance(name, str) for name in self.classes):
            raise ValueError("classes must be different texts")
        if self.splits is not None and (len(self.splits) != len(labels) or not _SPLITS.issuperset(self.splits)):
            raise ValueError("splits must be train, val or test for each picture")


@dataclass(frozen=True)
class TableData:
    """A table, and if it has them a graph and what is to be predicted.

    Args:
        table: a row a sample, or the path of a .csv, .tsv, .parquet or .h5ad file.
        edges: the graph, an edge a row in the columns source and target, or the path of such a file; None leaves it to
            ``data.edges``.
        label: the column that is predicted, or several; None leaves it to ``data.label``.

    Raises:
        ValueError: if a table is something else.
    """

    table: pd.DataFrame | Path
    edges: pd.DataFrame | Path | None = None
    label: str | Sequence[str] | None = None

    def __post_init__(self) -> None:
        for name, given in (("table", self.table), ("edges", self.edges)):
            if not isinstance(given, (pd.DataFrame, Path)) and (name == "table" or given is not None):
                raise ValueError(f"{name} is a {type(given).__name__}, and must be a DataFrame or a Path")


# ---------------------------------------------------------------------- the contract

Data = TypeVar("Data", CorpusData, PairData, SequenceData, PictureData, TableData)


class Source(ABC, Generic[Data]):
    """Where data comes from. Its docstring begins with one line for the help, and says whose the data is.

    Subclasses write ``load``. Those whose files are fetched also name ``own_folder`` and write ``download``.

    Args:
        folder: the folder that ``own_folder`` is in; left out, a part of ZOO_CACHE or of the user's cache folder.
        options: an instance of ``Options``, or a mapping that it is made of; None is its defaults.
        argument: what the source was given as, for messages.

    Raises:
        ZooError: for an unknown option, or one out of range.
    """

    name: ClassVar[str] = ""
    """What it is registered as."""
    title: ClassVar[str] = ""
    """What identities and messages call it; left out, its name."""
    Options: ClassVar[type] = NoOptions
    """A frozen dataclass whose fields are made with ``option``; its ``__post_init__`` checks the values."""
    own_folder: ClassVar[str] = ""
    """Name of the folder that ``download`` fills; empty for a source that fetches nothing."""
    shelf: ClassVar[str]
    """The part of the cache that sources of this kind are kept in."""

    def __init__(self, folder: str | Path | None = None, options: Any = None, argument: str = "data.source") -> None:
        self.folder = default_cache() / self.shelf if folder is None else Path(folder).expanduser()
        self.argument = argument
        given = options or {}
        self.options: Any = (
            given if isinstance(given, self.Options) else parse_options(type(self), given, "data.source_options")
        )

    # ------------------------------------------------------------------ to be written

    @abstractmethod
    def load(self) -> Data:
        """The data; of a source with files, from ``self.files``. The same every time, in the same order."""

    def download(self, into: Path) -> None:
        """Put the files into the folder ``own_folder`` of the folder ``into``, with whatever raises an OSError."""

    def wanted(self) -> str:
        """Which files ``self.files`` is to hold, for those who put them there by hand."""
        return "its files"

    # ------------------------------------------------------------------ what is given

    @property
    def shown(self) -> str:
        """What identities and messages call it."""
        return self.title or self.name

    @property
    def files(self) -> Path:
        """The folder with the source's files."""
        return self.folder / self.own_folder

    def fetch(self) -> None:
        """Download the files unless their folder is there; it gets its name once all is in it.

        Raises:
            ZooError: if they can't be downloaded, or not written.
        """
        if not self.own_folder or self.files.is_dir():
            return
        patience = socket.getdefaulttimeout()
        socket.setdefaulttimeout(_PATIENCE)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".downloading-", dir=self.folder) as scratch:
                self.download(Path(scratch))
                os.rename(Path(scratch, self.own_folder), self.files)
        except _NOT_FETCHED as error:
            if self.files.is_dir():  # another process was faster
                return
            raise ZooError(
                f"data.download: {self.name} couldn't be downloaded to {self.folder} ({_reason(error)}); try again "
                f"where there is a network and room, or put the set's files there by hand: {self.wanted()} in "
                f"{self.files}"
            ) from None
        finally:
            socket.setdefaulttimeout(patience)

    def read(self) -> Data:
        """What ``load`` gives.

        Raises:
            ZooError: if its files aren't there, or are damaged, or what it gives is no data of its kind.
        """
        if self.own_folder and not self.files.is_dir():
            raise ZooError(
                f"data.path: there is no {self.name} in {self.folder} (no folder {self.own_folder}); --data.download "
                "true fetches it, or name the folder that holds it"
            )
        try:
            return self.load()
        except ZooError:
            raise
        except Exception as error:  # whatever a library meets in a damaged file
            if not self.own_folder:
                raise ZooError(
                    f"{self.argument}: {self.name} gives no data ({type(error).__name__}: {_reason(error)}); mend "
                    f"{type(self).__module__}.{type(self).__qualname__}.load"
                ) from error
            raise ZooError(
                f"data.path: {self.name} in {self.files} is incomplete or damaged ({_reason(error)}); delete that "
                "folder, and --data.download true fetches it anew"
            ) from None


class CorpusSource(Source[CorpusData]):
    """A corpus by name."""

    shelf = "corpora"


class PairSource(Source[PairData]):
    """Pairs of texts by name."""

    shelf = "pairs"


class SequenceSource(Source[SequenceData]):
    """Sequences with known answers by name: a rule by which they are drawn.

    Subclasses write ``symbols`` and ``draw``, and where it says something ``reference``. Options that leave vocabulary
    and rule as they are, such as a length, are made with ``option(..., shapes_weights=False)``: a model may then be
    tested with other values than it was trained with.
    """

    shelf = "sequences"

    @abstractmethod
    def symbols(self) -> list[str]:
        """The names of all symbols, in order."""

    @abstractmethod
    def draw(self, n: int, random: np.random.RandomState) -> tuple[np.ndarray, np.ndarray]:
        """Sequences from random numbers alone: their symbols (n, T), whole numbers, and which are answers (n, T)."""

    def reference(self, tokens: np.ndarray, is_answer: np.ndarray) -> dict[str, float]:
        """The accuracy of predictors that need no training on these sequences, by name; ``chance`` among them."""
        return {}

    def load(self) -> SequenceData:
        """A few, to be looked at."""
        return SequenceData(self.symbols(), *self.draw(16, np.random.RandomState(0)))


@dataclass(frozen=True)
class PictureDefaults:
    """What a set's pictures are like, and how they are varied in training, where nothing else says so.

    Args:
        size: height and width that they are brought to.
        channels: 1 for greyscale, 3 for RGB.
        crop: share of the short side that is kept in evaluation.
        hflip: probability to mirror left and right.
        crop_scale: smallest share of the area that a random crop keeps.
    """

    size: int
    channels: int
    crop: float = 1.0
    hflip: float = 0.0
    crop_scale: float = 1.0


class PictureSource(Source[PictureData]):
    """A set of pictures by name."""

    shelf = "images"
    usual: ClassVar[PictureDefaults] = PictureDefaults(224, 3)
    """What its pictures are like."""


class TableSource(Source[TableData]):
    """A table by name."""

    shelf = "tables"


def _reason(error: Exception) -> str:
    """What an exception says, in one line and without paths where it can be."""
    reason = getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__
    return str(reason)[:200]


# ---------------------------------------------------------------------- the registers

_HOME, _GROUP = "datamodules.sources", "damcha_zoo.sources"
CORPORA: Registry[type[CorpusSource]] = Registry("corpus", _HOME, _GROUP)
PAIRS: Registry[type[PairSource]] = Registry("set of pairs", _HOME, _GROUP)
SEQUENCES: Registry[type[SequenceSource]] = Registry("kind of sequences", _HOME, _GROUP)
PICTURES: Registry[type[PictureSource]] = Registry("picture set", _HOME, _GROUP)
TABLES: Registry[type[TableSource]] = Registry("table", _HOME, _GROUP)
Kind = TypeVar("Kind", bound=type[Source[Any]])
SourceT = TypeVar("SourceT", bound=Source[Any])


def register_corpus(name: str) -> Callable[[Kind], Kind]:
    """A decorator that makes a ``CorpusSource`` known by a name.

    Raises:
        ZooError: if the name is taken or isn't one, or the class isn't made as it should be.
    """
    return _register(CORPORA, CorpusSource, name)


def register_pairs(name: str) -> Callable[[Kind], Kind]:
    """As ``register_corpus``, for a ``PairSource``."""
    return _register(PAIRS, PairSource, name)


def register_sequences(name: str) -> Callable[[Kind], Kind]:
    """As ``register_corpus``, for a ``SequenceSource``."""
    return _register(SEQUENCES, SequenceSource, name)


def register_pictures(name: str) -> Callable[[Kind], Kind]:
    """As ``register_corpus``, for a ``PictureSource``."""
    return _register(PICTURES, PictureSource, name)


def register_table(name: str) -> Callable[[Kind], Kind]:
    """As ``register_corpus``, for a ``TableSource``."""
    return _register(TABLES, TableSource, name)


def _register(register: Registry[Any], base: type, name: str) -> Callable[[Kind], Kind]:
    enter = register.register(name)

    def decorate(kind: Kind) -> Kind:
        if not (isinstance(kind, type) and issubclass(kind, base)):
            raise ZooError(f"{register.what}: {name} is no {base.__name__}; make it a subclass")
        if not summary(kind):
            raise ZooError(f"{register.what}: {name} has no docstring; say in one line what it is, for the help")
        if name in ("auto", "folder"):
            raise ZooError(f"{register.what}: {name!r} means something else in data.source; choose another name")
        if not dataclasses.is_dataclass(kind.Options) or not all(
            item.metadata.get("help") for item in dataclasses.fields(kind.Options)
        ):
            raise ZooError(f"{register.what}: the Options of {name} must be a dataclass with fields made by option()")
        enter(kind)
        kind.name = name
        return kind

    return decorate


def list_corpora() -> list[str]:
    """Names of the corpora that a ``TextDataModule`` can be made with."""
    return CORPORA.names()


def list_pairs() -> list[str]:
    """Names of the sets of pairs that a ``TextPairDataModule`` can be made with."""
    return PAIRS.names()


def list_sequences() -> list[str]:
    """Names of the kinds of sequences that a ``SequenceDataModule`` can be made with."""
    return SEQUENCES.names()


def list_pictures() -> list[str]:
    """Names of the picture sets that an ``ImageDataModule`` can be made with."""
    return PICTURES.names()


def list_tables() -> list[str]:
    """Names of the tables that a ``GraphTableDataModule`` can be made with."""
    return TABLES.names()


def make_source(
    register: Registry[type[SourceT]],
    name: str,
    folder: str | Path | None = None,
    options: Any = None,
    argument: str = "data.source",
    also: str | None = "auto",
) -> SourceT:
    """The source of a name.

    Args:
        register: CORPORA, PAIRS, SEQUENCES, PICTURES or TABLES.
        name: one of its names.
        folder, options, argument: as of ``Source``.
        also: what else the argument takes, for the message; None if nothing.

    Raises:
        ZooError: naming the nearest, if there is none; for a folder or options that it doesn't take.
    """
    try:
        kind = register.get(name, argument)
    except ZooError as error:
        raise ZooError(str(error) if also is None else f"{error}, and {also}") from None
    if folder is not None and not kind.own_folder:
        raise ZooError(
            f"data.path: got {str(folder)!r} with source {name}, which is at hand without one; leave data.path out, or "
            "set data.source to auto to read your own"
        )
    return kind(folder, options, argument)


def summary(kind: type[Source[Any]]) -> str:
    """The first line of a source's own docstring; empty if there is none."""
    return (kind.__dict__.get("__doc__") or "").strip().partition("\n")[0]


def describe(register: Registry[Any]) -> str:
    """The sources of a register with a line each, and their options, for the help."""
    told = []
    for name in register.names():
        kind = register.get(name)
        options = "; ".join(f"{item.name}: {item.metadata['help']}" for item in dataclasses.fields(kind.Options))
        told.append(f"{name} ({summary(kind).rstrip('.')}{f'; source_options: {options}' if options else ''})")
    return ", ".join(told)
