"""From the bytes of a file to its text: pieces of plain text, rows of tables, and what is no text at all."""

import codecs
import csv
import io
import json
import os
import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from zoo.errors import ZooError

TABLES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv")
PIECE = 1 << 20  # bytes of text read, and encoded, at a time
HEAD = 1 << 13  # bytes by which a file is known
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
_SURROGATE = re.compile("[\ud800-\udfff]")
_BLANK = re.compile(r"[ \n]")
_NO_TEXT = re.compile("[\0-\x08\x0e-\x1f]|\ufffd(?!$)")  # the last character may be cut
_BLANKS = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder()
_MARKS = {  # the longer ones first: UTF-32's begins with UTF-16's
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
_BEGINNINGS = {  # of files that are often taken for text, or hold some
    b"\x1f\x8b": "is compressed by gzip; unpack it (gunzip)",
    b"BZh91AY&SY": "is compressed by bzip2; unpack it (bunzip2)",
    b"\xfd7zXZ\0": "is compressed by xz; unpack it (unxz)",
    b"\x28\xb5\x2f\xfd": "is compressed by zstd; unpack it (unzstd)",
    b"PK\3\4": "is a zip archive or a document in one; unpack it (unzip), or save the document as text",
    b"%PDF-": "is a PDF; take its text out (pdftotext)",
    b"{\\rtf": "is an RTF document; save it as text",
    b"PAR1\x15": "is a Parquet file; write its texts to .jsonl",
}


@dataclass(frozen=True)
class Document:
    """Text in memory, read as a file is."""

    name: str
    content: bytes

    def __str__(self) -> str:
        return self.name


Place: TypeAlias = Path | Document


def open_place(place: Place) -> io.BufferedReader | io.BytesIO:
    """The bytes of a file or of a text in memory."""
    return io.BytesIO(place.content) if isinstance(place, Document) else open(place, "rb")


def size_of(place: Place) -> int:
    """How many they are."""
    return len(place.content) if isinstance(place, Document) else place.stat().st_size


def read_head(path: Path) -> bytes:
    """The first bytes of a file, without a byte order mark of UTF-8: what ``no_text`` looks at."""
    with open(path, "rb") as file:
        return file.read(HEAD).removeprefix(codecs.BOM_UTF8)


def no_text(head: bytes) -> str | None:
    """Why a file that begins so is no text in UTF-8, and what to do; None if it may be."""
    for mark, encoding in _MARKS.items():
        if head.startswith(mark):
            return f"is {encoding.upper()}, not UTF-8; convert it (iconv -f {encoding} -t utf-8)"
    for beginning, reason in _BEGINNINGS.items():
        if head.startswith(beginning):
            return reason
    if b"\0" not in head:
        return None
    for encoding in ("utf-16le", "utf-16be"):
        text = head[: len(head) // 2 * 2].decode(encoding, errors="replace")
        # read in the wrong order, no character is a blank
        if _BLANK.search(text) and not _NO_TEXT.search(text):
            return f"looks like UTF-16 without a mark, not UTF-8; convert it (iconv -f {encoding} -t utf-8)"
    return "holds NUL bytes, so it is no text; take it out, or drop them (tr -d '\\000')"


# ---------------------------------------------------------------------- plain text


def _as_utf8(data: bytes) -> bytes:
    """``data`` with NULs, which are no text, as bytes that no UTF-8 has."""
    return data.replace(b"\0", b"\xff")


def file_pieces(path: Place, start: int, end: int, errors: str) -> Iterator[str]:
    """The text of bytes start..end of a file, in pieces of about a MiB that end with a line where they can.

    A byte order mark at the start of the file is left out.

    Raises:
        ZooError: for bytes that are no UTF-8 and for NULs, if ``errors`` is strict.
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors)
    rest = ""
    with open_place(path) as file:
        start = max(start, len(codecs.BOM_UTF8) if file.read(3) == codecs.BOM_UTF8 else 0)
        file.seek(start)
        block = b"some"
        while block:
            block = file.read(min(PIECE, max(end - start, 0)))
            start += len(block)
            try:
                text = rest + decoder.decode(_as_utf8(block), final=not block)
            except UnicodeDecodeError as error:
                raise ZooError(_undecodable(path, start - len(error.object) + error.start)) from None
            cut = (block and text.rfind("\n") + 1) or len(text)
            if cut:
                yield text[:cut]
            rest = text[cut:]


def _undecodable(path: Place, offset: int) -> str:
    with open_place(path) as file:
        file.seek(offset)
        nul = file.read(1) == b"\0"
    what = "NUL bytes" if nul else "bytes that are no UTF-8"
    advice = "drop them (tr -d '\\000')" if nul else "convert it (iconv -f latin1 -t utf-8, if it is Latin-1)"
    return (
        f"data.path: {path} has {what}, the first at offset {offset}; {advice} or set data.encoding_errors to replace "
        "or ignore"
    )


def line_start(path: Place, offset: int) -> int:
    """The first line start at or after ``offset``; where none follows within a MiB, the next character."""
    if not offset:
        return 0
    with open_place(path) as file:
        file.seek(offset - 1)
        line = file.readline(PIECE)
        if line.endswith(b"\n") and file.read(1):
            return offset - 1 + len(line)
        file.seek(offset)
        following = file.read(3)  # a character goes on for three bytes at most
    return offset + next((i for i, byte in enumerate(following) if byte & 0xC0 != 0x80), len(following))


# ---------------------------------------------------------------------- tables


def table_rows(path: Path, field: str, errors: str) -> Iterator[str]:
    """The texts of a table, one a row, by the suffix of its name; empty for a row without text.

    .csv and .tsv have a header; .jsonl and .ndjson an object a line; .json a list of objects, or objects one after
    another. No more than a row is held in memory.

    Raises:
        ZooError: naming file and line, if a row is malformed or has no such field; if ``errors`` is strict, for bytes
            that are no UTF-8, NULs, and halves of surrogate pairs.
    """
    suffix = path.suffix.lower()
    if suffix in _DELIMITERS:
        yield from _csv_rows(path, field, errors, _DELIMITERS[suffix])
        return
    for number, row in (_json_objects if suffix == ".json" else _json_lines)(path, errors):
        if not isinstance(row, dict) or field not in row:
            has = ", ".join(map(str, row)) if isinstance(row, dict) else type(row).__name__
            raise ZooError(
                f"data.field: got {field!r}, but {path} line {number} has {has}; name a field that every object has"
            )
        text = row[field]
        if text is not None and not isinstance(text, str):
            raise ZooError(f"data.field: {path} line {number}: {field!r} is a {type(text).__name__}; must be text")
        yield whole_characters(text or "", errors, f"data.path: {path} line {number}")


def whole_characters(text: str, errors: str, where: str) -> str:
    """``text`` without halves of surrogate pairs, which JSON can hold and UTF-8 can't.

    Raises:
        ZooError: starting with ``where``, if there are some and ``errors`` is strict.
    """
    half = None if text.isascii() else _SURROGATE.search(text)
    if half and errors == "strict":
        raise ZooError(
            f"{where} has half of a surrogate pair ({half[0]!r}), which is no character; mend it or set "
            "data.encoding_errors to replace or ignore"
        )
    return _SURROGATE.sub("\ufffd" if errors == "replace" else "", text) if half else text


class _Bytes(io.FileIO):
    """A file as ``_as_utf8`` gives it."""

    def readinto(self, buffer: Any, /) -> int:
        n = super().readinto(buffer)
        view = memoryview(buffer)
        view[:n] = _as_utf8(bytes(view[:n]))
        return n


def _lines(path: Path, errors: str, newline: str) -> Iterator[str]:
    with io.TextIOWrapper(io.BufferedReader(_Bytes(path)), "utf-8-sig", errors, newline) as lines:
        try:
            yield from lines
        except UnicodeDecodeError:
            deque(file_pieces(path, 0, os.path.getsize(path), errors), maxlen=0)  # which says where
            raise


def _csv_rows(path: Path, field: str, errors: str, delimiter: str) -> Iterator[str]:
    csv.field_size_limit((1 << 31) - 1)  # a cell may be a whole text
    rows = csv.reader(_lines(path, errors, newline=""), delimiter=delimiter, strict=True)
    try:
        header = next(rows, None)
        if not header:
            raise ZooError(f"data.path: {path} is empty; give a table with a header and rows")
        if header.count(field) != 1:
            found = "more than one such column" if field in header else f"the columns {', '.join(header)}"
            advice = _separated(path, field, errors, delimiter) or "name one of them"
            raise ZooError(f"data.field: got {field!r}, but {path} has {found}; {advice}")
        place = header.index(field)
        for row in rows:
            if row and len(row) != len(header):
                raise ZooError(
                    f"data.path: {path} line {rows.line_num} has {len(row)} cells, the header {len(header)}; "
                    f"put texts with {_SEPARATORS[delimiter]} in quotes"
                )
            if row:
                yield row[place]
    except csv.Error as error:
        advice = _separated(path, field, errors, delimiter) or "mend it"
        kind = path.suffix[1:].upper()
        raise ZooError(f"data.path: {path} line {rows.line_num} is no readable {kind} ({error}); {advice}") from None


def _separated(path: Path, field: str, errors: str, delimiter: str) -> str | None:
    """Advice for a table whose header has the column once it is separated in another way."""
    header = next(_lines(path, errors, newline=""), "")
    for separator, name in _SEPARATORS.items():
        if separator != delimiter and field in next(csv.reader([header], delimiter=separator), []):
            others = [suffix for suffix, known in _DELIMITERS.items() if known == separator]
            rename = f"call it {others[0]}, or " if others else ""
            return (
                f"its columns are separated by {name}, which isn't how a {path.suffix} is read: {rename}write it with "
                f"{_SEPARATORS[delimiter]}"
            )
    return None


def _json_lines(path: Path, errors: str) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(_lines(path, errors, newline="\n"), start=1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except (ValueError, RecursionError) as error:
                advice = "mend or drop it, or call the file .json if it isn't an object a line"
                raise _no_json(path, number, error, advice) from None


def _no_json(path: Path, line: int, error: Exception | str, advice: str = "mend it") -> ZooError:
    reason = error.msg if isinstance(error, json.JSONDecodeError) else error
    return ZooError(f"data.path: {path} line {line} is no JSON ({reason}); {advice}")


class _Stream:
    """Text that is read as it is needed.

    ``text`` is what is known from ``place`` on, ``line`` the number of the line there.
    """

    def __init__(self, pieces: Iterator[str]) -> None:
        self.pieces = pieces
        self.text, self.place, self.line = "", 0, 1

    def grow(self) -> bool:
        """Read on, at least as much again as is at hand; False at the end."""
        parts = [self.text[self.place :]]
        self.text, self.place = "", 0
        missing = len(parts[0]) + 1
        while missing > 0 and (piece := next(self.pieces, "")):
            parts.append(piece)
            missing -= len(piece)
        self.text = "".join(parts)
        return len(parts) > 1

    def move(self, place: int) -> None:
        self.line += self.text.count("\n", self.place, place)
        self.place = place

    def peek(self) -> str:
        """The next character that is no blank; empty at the end."""
        while True:
            self.move(_BLANKS.match(self.text, self.place).end())  # type: ignore[union-attr]
            if self.place < len(self.text) or not self.grow():
                return self.text[self.place : self.place + 1]


def _json_objects(path: Path, errors: str) -> Iterator[tuple[int, Any]]:
    """(line, value) of each value in a list, or of values one after another."""
    stream = _Stream(file_pieces(path, 0, os.path.getsize(path), errors))
    in_list = stream.peek() == "["
    if in_list:
        stream.move(stream.place + 1)
    ends = "]" if in_list else ""
    first = True
    while (following := stream.peek()) != ends:
        if in_list and not first:
            if following != ",":
                raise _no_json(path, stream.line, "a comma or the list's end is missing")
            stream.move(stream.place + 1)
            stream.peek()
        first = False
        yield stream.line, _next_value(stream, path)
    if in_list:
        stream.move(stream.place + 1)
        if stream.peek():
            raise _no_json(path, stream.line, "something follows the list's end")


def _next_value(stream: _Stream, path: Path) -> Any:
    while True:
        try:
            value, end = _DECODER.raw_decode(stream.text, stream.place)
        except json.JSONDecodeError as error:
            # what ends in the middle may go on in the next piece
            cut = error.msg.startswith("Unterminated string") or error.pos > len(stream.text) - 12
            if not (cut and stream.grow()):
                raise _no_json(path, stream.line, error) from None
        except (ValueError, RecursionError) as error:
            raise _no_json(path, stream.line, error) from None
        else:
            stream.move(end)
            return value
