"""The files of a corpus, their texts, and how those are split."""

import csv
import glob
import hashlib
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from zoo.errors import ZooError

PLAIN = (".txt", ".md", ".py")
TABLES = (".jsonl", ".csv")
PIECE = 1 << 20  # bytes of text read, and encoded, at a time
_FEW = 20  # a corpus of fewer documents is split inside each, by position


@dataclass(frozen=True)
class TextFile:
    """A file of the corpus; ``name`` is its path below the corpus, the same on every machine."""

    name: str
    path: Path

    @property
    def is_table(self) -> bool:
        return self.path.suffix.lower() in TABLES


def stdlib_files() -> list[TextFile]:
    """The Python sources of the running interpreter's standard library, without its tests and installed packages."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3"}
    files = (
        TextFile(path.relative_to(root).as_posix(), path)
        for path in root.rglob("*.py")
        # what the build wrote (_sysconfigdata_...) differs between machines of one version
        if not left_out.intersection(path.relative_to(root).parts) and not path.name.startswith("_sysconfigdata")
    )
    return sorted(files, key=lambda file: file.name)


def find_files(path: str, field: str | None) -> list[TextFile]:
    """The files of a user's corpus: a file, a folder, or a glob.

    A folder gives its .txt, .md and .py files, and with ``field`` its .jsonl and .csv files too.

    Raises:
        ZooError: if there is nothing to read, or a table without a ``field``.
    """
    expanded = Path(path).expanduser()
    if expanded.is_file():
        found, root = [expanded], expanded.parent
    elif expanded.is_dir():
        wanted = PLAIN + (TABLES if field else ())
        root = expanded
        found = [p for p in expanded.rglob("*") if p.is_file() and p.suffix.lower() in wanted]
        if not found:
            others = sorted({p.suffix or p.name for p in expanded.rglob("*") if p.is_file()})
            hint = " and give data.field for tables" if set(others) & set(TABLES) and not field else ""
            raise ZooError(
                f"data.path: folder {path} has no {', '.join(wanted)} file (found: {', '.join(others) or 'nothing'}); "
                f"put text there{hint}"
            )
    else:
        found = [Path(p) for p in glob.glob(str(expanded), recursive=True) if Path(p).is_file()]
        if not found:
            raise ZooError(f"data.path: {path} is no file, no folder and matches nothing; check the path")
        root = Path(os.path.commonpath([p.parent for p in found]))
    files = sorted((TextFile(p.relative_to(root).as_posix(), p) for p in found), key=lambda file: file.name)
    if not field and (table := next((file for file in files if file.is_table), None)):
        raise ZooError(
            f"data.field: got none, but {table.path} is a table; name the {_column_word(table)} with the text"
        )
    return files


def _column_word(file: TextFile) -> str:
    return "column" if file.path.suffix.lower() == ".csv" else "field"


# ---------------------------------------------------------------------- documents: their number, texts and splits


def count_rows(file: TextFile, field: str) -> int:
    """Number of texts in a table."""
    return sum(1 for _ in table_rows(file, field))


def table_rows(file: TextFile, field: str) -> Iterator[str]:
    """The texts of a .jsonl or .csv file, one a row; rows without text are left out.

    Raises:
        ZooError: naming file and line, if a row is malformed or has no such field.
    """
    if file.path.suffix.lower() == ".csv":
        yield from _csv_rows(file, field)
        return
    with open(file.path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:  # also undecodable bytes
                raise ZooError(f"data.path: {file.path} line {number} is no JSON ({error}); mend or drop it") from None
            if not isinstance(row, dict) or field not in row:
                has = ", ".join(map(str, row)) if isinstance(row, dict) else type(row).__name__
                raise ZooError(
                    f"data.field: got {field!r}, but {file.path} line {number} has {has}; name a field every line has"
                )
            if not isinstance(row[field], str):
                raise ZooError(
                    f"data.field: {file.path} line {number}: {field!r} is a {type(row[field]).__name__}; must be text"
                )
            if row[field]:
                yield row[field]


def _csv_rows(file: TextFile, field: str) -> Iterator[str]:
    csv.field_size_limit((1 << 31) - 1)  # a cell may be a whole text
    try:
        with open(file.path, encoding="utf-8-sig", newline="") as handle:
            rows = csv.reader(handle, strict=True)
            header = next(rows, None)
            if not header:
                raise ZooError(f"data.path: {file.path} is empty; give a table with a header and rows")
            if header.count(field) != 1:
                found = "more than one such column" if field in header else f"the columns {', '.join(header)}"
                raise ZooError(f"data.field: got {field!r}, but {file.path} has {found}; name one of them")
            place = header.index(field)
            for row in rows:
                if row and len(row) != len(header):
                    raise ZooError(
                        f"data.path: {file.path} line {rows.line_num} has {len(row)} cells, the header {len(header)}; "
                        "put texts with commas in quotes"
                    )
                if row and row[place]:
                    yield row[place]
    except csv.Error as error:
        raise ZooError(f"data.path: {file.path} is no readable CSV ({error}); mend it") from None
    except UnicodeDecodeError as error:
        raise ZooError(
            f"data.path: {file.path} has bytes that are no UTF-8, the first at offset {error.start}; convert it"
        ) from None


def _undecodable(path: Path, offset: int) -> str:
    return (
        f"data.path: {path} has bytes that are no UTF-8, the first at offset {offset}; convert it (iconv -t utf-8) or "
        "set data.encoding_errors to replace or ignore"
    )


def file_pieces(path: Path, start: int, end: int, errors: str) -> Iterator[str]:
    """The text of bytes start..end of a file, in pieces of about a MiB that end with a line where they can."""
    rest = b""
    offset = start
    with open(path, "rb") as file:
        file.seek(start)
        while (block := file.read(min(PIECE, end - start))) or rest:
            start += len(block)
            data = rest + block
            cut = len(data) if not block else data.rfind(b"\n") + 1 or _whole_characters(data)
            piece, rest = data[:cut], data[cut:]
            try:
                text = piece.decode(errors=errors)
            except UnicodeDecodeError as error:
                raise ZooError(_undecodable(path, offset + error.start)) from None
            offset += len(piece)
            if text:
                yield text


def _whole_characters(data: bytes) -> int:
    """Length of ``data`` without a last UTF-8 character that may go on past it."""
    for back in range(1, min(4, len(data)) + 1):
        if data[-back] & 0xC0 != 0x80:
            return len(data) - back if data[-back] >= 0xC0 else len(data)
    return len(data)


def _line_start(path: Path, offset: int) -> int:
    """The first line start at or after ``offset``; where the file has no line end there, the next character."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        if offset:
            file.seek(offset - 1)
            file.readline(PIECE)
        place = file.tell()
        if offset and place < size:
            file.seek(place - 1)
            if file.read(1) == b"\n":
                return place
        if not offset or place < size:
            return place
        file.seek(offset)  # the last line began before the offset: cut inside it
        while (byte := file.read(1)) and byte[0] & 0xC0 == 0x80:
            offset += 1
    return offset


def split_numbers(names: Iterable[str], n: int, val_fraction: float, test_fraction: float, seed: int) -> np.ndarray:
    """0, 1 or 2 (train, val, test) for each of n documents, by the order of the SHA-256 of seed and name."""
    keys = np.fromiter(
        (int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8]) for name in names), np.uint64, count=n
    )
    order = np.argsort(keys, kind="stable")
    n_test, n_val = (max(1, round(n * fraction)) for fraction in (test_fraction, val_fraction))
    splits = np.zeros(n, dtype=np.uint8)
    splits[order[:n_test]] = 2
    splits[order[n_test : n_test + n_val]] = 1
    return splits


@dataclass(frozen=True)
class Corpus:
    """Files, how their texts are found, and how they are split.

    ``iterate`` gives (split, pieces of text) a document, never holding more than a piece.
    """

    files: list[TextFile]
    field: str | None
    encoding_errors: str
    val_fraction: float
    test_fraction: float
    seed: int

    @property
    def n_bytes(self) -> int:
        return sum(file.path.stat().st_size for file in self.files)

    def content_digest(self) -> str:
        """SHA-256 over the names and bytes of all files."""
        total = hashlib.sha256()
        for file in self.files:
            with open(file.path, "rb") as handle:
                total.update(f"{file.name}\0{hashlib.file_digest(handle, 'sha256').hexdigest()}\n".encode())
        return total.hexdigest()

    def iterate(self) -> Iterator[tuple[int, Iterator[str]]]:
        counts = [count_rows(file, self.field) if file.is_table and self.field else 1 for file in self.files]
        n = sum(counts)
        if n >= _FEW:
            names = (f"{file.name}:{i}" for file, count in zip(self.files, counts, strict=True) for i in range(count))
            splits = split_numbers(names, n, self.val_fraction, self.test_fraction, self.seed)
        else:
            train_end = 1 - self.val_fraction - self.test_fraction
            places = (np.arange(n) + 0.5) / max(n, 1)
            splits = (places >= train_end).astype(np.uint8) + (places >= 1 - self.test_fraction)
        number = 0
        for file in self.files:
            if file.is_table and self.field:
                for text in table_rows(file, self.field):
                    yield int(splits[number]), iter((text,))
                    number += 1
            elif n >= _FEW:
                yield int(splits[number]), file_pieces(file.path, 0, file.path.stat().st_size, self.encoding_errors)
                number += 1
            else:
                yield from self._cut_by_position(file)
                number += 1

    def _cut_by_position(self, file: TextFile) -> Iterator[tuple[int, Iterator[str]]]:
        size = file.path.stat().st_size
        shares = (1 - self.val_fraction - self.test_fraction, 1 - self.test_fraction)
        cuts = [0, *(_line_start(file.path, int(size * share)) for share in shares), size]
        for split in range(3):
            if cuts[split] < cuts[split + 1]:
                yield split, file_pieces(file.path, cuts[split], cuts[split + 1], self.encoding_errors)
