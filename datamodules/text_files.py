"""The files of a corpus, which of them are text, and how their texts are split."""

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import ClassVar, TypeGuard

from lightning.pytorch.utilities import rank_zero_info

from datamodules.folders import files_below, files_matching, is_utf8
from datamodules.sources.base import CorpusData
from datamodules.splits import FEW_DOCUMENTS, cut_places, split_documents
from datamodules.text_reading import (
    Document,
    Place,
    file_pieces,
    line_start,
    no_text,
    open_place,
    read_head,
    size_of,
    whole_characters,
)
from datamodules.text_tables import TABLES, table_rows
from zoo.errors import ZooError, listed

PLAIN = (".txt", ".md", ".py")
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip")


@dataclass(frozen=True)
class TextFile:
    """A file of the corpus; ``name`` is its path below the corpus, the same on every machine."""

    name: str
    path: Path

    @property
    def kind(self) -> str:
        """The suffix, or the name of a file without one."""
        return self.path.suffix.lower() or self.path.name

    @property
    def place(self) -> Place:
        return self.path

    @property
    def is_table(self) -> bool:
        return self.kind in TABLES


@dataclass(frozen=True)
class TextInMemory:
    """A text of the corpus that is in no file."""

    name: str
    place: Document
    is_table: ClassVar[bool] = False


def named_files(data: CorpusData, errors: str) -> "list[TextFile | TextInMemory]":
    """The documents of a named corpus, sorted by name.

    Raises:
        ZooError: for halves of surrogate pairs, if ``errors`` is strict.
    """
    files: list[TextFile | TextInMemory] = []
    for name, document in sorted(data.documents.items()):
        if isinstance(document, Path):
            files.append(TextFile(name, document))
        else:
            text = whole_characters(document, errors, f"data.source: document {name!r}")
            files.append(TextInMemory(name, Document(name, text.encode())))
    return files


# ---------------------------------------------------------------------- a user's files


def find_files(path: str, field: str | None) -> list[TextFile]:
    """The files of a user's corpus: a file, a folder, or a glob, without those that are empty.

    A folder gives its .txt, .md and .py files, and with ``field`` its tables too; so does a glob that doesn't say how
    names end. A file, or a glob that does, may be of any kind; one that isn't known is plain text. Hidden files are
    left out unless they are named, and of links to one file all but one. One line says what is left out, and one what
    is read as plain text for want of a better kind.

    Raises:
        ZooError: if there is nothing to read or it can't be read; for a table without a ``field`` and a ``field``
            without a table; for what is no text, by its content; for names that are no UTF-8.
    """
    if not is_utf8(path):
        raise ZooError(f"data.path: the name {path!r} is no UTF-8; rename it")
    wanted = PLAIN + (TABLES if field else ())
    kinds: Counter[str] = Counter()
    hidden: list[str] = []
    try:
        root, names = _format(path, wanted, kinds, hidden)
        if not names:
            found = ", ".join(sorted({*kinds, *hidden})) or "nothing"
            raise ZooError(
                f"data.path: {path} has no {', '.join(wanted)} file (found: {found}); "
                f"put text there{_hint(kinds, field)}"
            )
        _refuse_names(path, names)
        real = _only_files(root, sorted(names))
        once = _once(root, real)
        files = _only_texts(once)
    except OSError as error:
        raise ZooError(
            f"data.path: {error.filename or path} can't be read ({error.strerror}); check its permissions"
        ) from None
    if not files:
        raise ZooError(f"data.path: {path} is empty; give files with text in them")
    _check_field(path, field, files)
    left_out = {
        f"of other kinds ({_listed(kinds)}{_hint(kinds, field)})": kinds.total(),
        f"hidden ({_listed(Counter(hidden))})": len(hidden),
        "no files, or links to none": len(names) - len(real),
        "other links to the same files": len(real) - len(once),
        "empty": len(once) - len(files),
    }
    if any(left_out.values()):
        listing = ", ".join(f"{number:,} {what}" for what, number in left_out.items() if number)
        rank_zero_info(f"data.path: left out of {path}: {listing}")
    unknown = Counter(file.kind for file in files if file.kind not in PLAIN + TABLES)
    if unknown:
        rank_zero_info(
            f"data.path: {unknown.total():,} files are read as plain text, with any markup, since no other way is "
            f"known for {_listed(unknown)}"
        )
    return files


def _format(path: str, wanted: tuple[str, ...], kinds: "Counter[str]", hidden: list[str]) -> tuple[str, list[str]]:
    """The folder of a corpus, and the names of its files below it."""
    place = os.path.expanduser(path)
    if os.path.isfile(place):
        return os.path.dirname(place), [os.path.basename(place)]
    if os.path.isdir(place):
        return place, files_below(place, wanted, kinds, hidden=hidden)
    matches = files_matching(place)
    if not matches:
        raise ZooError(f"data.path: {path} is no file, no folder and matches nothing; check the path")
    if place[-1] in "*?]":
        kinds.update(kind for name in matches if (kind := TextFile(name, Path(name)).kind) not in wanted)
        matches = [name for name in matches if os.path.splitext(name)[1].lower() in wanted]
    root = os.path.commonpath([os.path.dirname(name) for name in matches]) if matches else ""
    return root, [os.path.relpath(name, root or os.curdir) for name in matches]


def _refuse_names(path: str, names: list[str]) -> None:
    strange = [name for name in names if not is_utf8(name)]
    if strange:
        raise ZooError(f"data.path: {len(strange)} names in {path!r} are no UTF-8: {listed(strange)}; rename them")


def _only_files(root: str, names: Iterable[str]) -> list[TextFile]:
    """What can be opened: no pipes, and no links to nothing."""
    files = [TextFile(name.replace(os.sep, "/"), Path(root, name)) for name in names]
    return [file for file in files if file.path.is_file()]


def _once(root: str, files: list[TextFile]) -> list[TextFile]:
    """Each file once, however many links lead to it: else it could be in the training text and in the test."""
    top = os.path.realpath(root)
    real = {file: os.path.realpath(file.path) for file in files}
    first: dict[str, TextFile] = {}
    for file in sorted(files, key=lambda file: os.path.join(top, file.name) != real[file]):  # links come last
        first.setdefault(real[file], file)
    return [file for file in files if first[real[file]] is file]


def _only_texts(files: list[TextFile]) -> list[TextFile]:
    """Those that aren't empty."""
    heads = {file: read_head(file.path) for file in files}
    faults = {file: fault for file, head in heads.items() if (fault := no_text(head))}
    if faults:
        file, fault = next(iter(faults.items()))
        more = f" (one of {len(faults)} that are no text)" if len(faults) > 1 else ""
        raise ZooError(f"data.path: {file.path}{more} {fault}")
    return [file for file, head in heads.items() if head]


def _check_field(path: str, field: str | None, files: list[TextFile]) -> None:
    table = next((file for file in files if file.is_table), None)
    if table and not field:
        word = "column" if table.kind in (".csv", ".tsv") else "field"
        raise ZooError(
            f"data.field: got none, but {table.path} is a table; name the {word} with the text, or call the file .txt "
            "to read it as it stands"
        )
    if field and not table:
        raise ZooError(f"data.field: got {field!r}, but {path} has no table ({', '.join(TABLES)}); leave it out")


def _listed(kinds: "Counter[str]") -> str:
    return listed([kind for kind, _ in kinds.most_common()])


def _hint(kinds: "Counter[str]", field: str | None) -> str:
    """How some of the files of other kinds could be read."""
    tables = not field and not kinds.keys().isdisjoint(TABLES)
    compressed = not kinds.keys().isdisjoint(_COMPRESSED)
    return ("; give data.field for tables" if tables else "") + ("; unpack what is compressed" if compressed else "")


# ---------------------------------------------------------------------- documents


@dataclass(frozen=True)
class Corpus:
    """Files, how their texts are found, and how they are split.

    ``iterate`` gives (split, pieces of text) a document, never holding more than a piece.
    """

    files: Sequence[TextFile | TextInMemory]
    field: str | None
    encoding_errors: str
    val_fraction: float
    test_fraction: float
    seed: int

    @property
    def n_bytes(self) -> int:
        return sum(size_of(file.place) for file in self.files)

    def content_digest(self) -> str:
        """SHA-256 over the names and bytes of all files."""
        total = hashlib.sha256()
        for file in self.files:
            with open_place(file.place) as handle:
                total.update(f"{file.name}\0{hashlib.file_digest(handle, 'sha256').hexdigest()}\n".encode())
        return total.hexdigest()

    def iterate(self) -> Iterator[tuple[int, Iterator[str]]]:
        counts = self._counts
        n = sum(counts)
        if n < FEW_DOCUMENTS:
            for file in self.files:
                yield from self._cut_table(file) if self._is_table(file) else self._cut_file(file.place)
            return
        names = (f"{file.name}:{i}" for file, count in zip(self.files, counts, strict=True) for i in range(count))
        splits = iter(split_documents(names, n, self.val_fraction, self.test_fraction, self.seed).tolist())
        for file in self.files:
            if self._is_table(file):
                yield from ((next(splits), iter((text,))) for text in self._texts(file))
            else:
                yield next(splits), file_pieces(file.place, 0, size_of(file.place), self.encoding_errors)

    def _is_table(self, file: TextFile | TextInMemory) -> TypeGuard[TextFile]:
        return file.is_table and self.field is not None

    def _rows(self, file: TextFile) -> Iterator[str]:
        return table_rows(file.path, self.field or "", self.encoding_errors)

    def _texts(self, file: TextFile) -> Iterator[str]:
        return (text for text in self._rows(file) if text)

    @cached_property
    def _counts(self) -> list[int]:
        """Number of documents in each file."""
        rows = [
            Counter(map(bool, self._rows(file))) if self._is_table(file) else Counter([True]) for file in self.files
        ]
        counts = [kinds[True] for kinds in rows]
        without = sum(kinds[False] for kinds in rows)
        if not any(counts):
            raise ZooError(f"data.field: {self.field!r} has no text in any of {without:,} rows; name another field")
        if without:
            rank_zero_info(f"data.field: {without:,} rows without text in {self.field!r} are left out")
        return counts

    def _places(self, size: int) -> list[int]:
        return cut_places(size, self.val_fraction, self.test_fraction)

    def _cut_file(self, place: Place) -> Iterator[tuple[int, Iterator[str]]]:
        size = size_of(place)
        cuts = [0, *(line_start(place, offset) for offset in self._places(size)), size]
        for split, (start, end) in enumerate(pairwise(cuts)):
            if start < end:
                yield split, file_pieces(place, start, end, self.encoding_errors)

    def _cut_table(self, file: TextFile) -> Iterator[tuple[int, Iterator[str]]]:
        for text in self._texts(file):
            cuts = [0, *(_line_start(text, place) for place in self._places(len(text))), len(text)]
            yield from ((i, iter((text[a:b],))) for i, (a, b) in enumerate(pairwise(cuts)) if a < b)


def _line_start(text: str, offset: int) -> int:
    """The first line start at or after ``offset``; where none follows, ``offset``."""
    place = text.find("\n", max(0, offset - 1)) + 1 if offset else 0
    return place if 0 < place < len(text) else offset
