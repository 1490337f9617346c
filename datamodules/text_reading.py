"""From the bytes of a file to its text, in pieces or lines, and what is no text at all."""

import codecs
import io
import os
import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from zoo.errors import ZooError

PIECE = 1 << 20  # bytes of text read, and encoded, at a time
HEAD = 1 << 13  # bytes by which a file is known
_SURROGATE = re.compile("[\ud800-\udfff]")
_BLANK = re.compile(r"[ \n]")
_NO_TEXT = re.compile("[\0-\x08\x0e-\x1f]|\ufffd(?!$)")  # the last character may be cut
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
    b"PK\3\4": "is a zip archive or a document in one; unpack it (unzip), or save it as text, a sheet as CSV",
    b"\xd0\xcf\x11\xe0": "is a document of an office program; save it as text, a sheet as CSV",
    b"\x89HDF": "is an HDF5 file, as .h5ad are; write what is in it as text",
    b"%PDF-": "is a PDF; take its text out (pdftotext)",
    b"{\\rtf": "is an RTF document; save it as text",
    b"PAR1\x15": "is a Parquet file; rename it to .parquet if it is a table, or write its texts to .jsonl",
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
    nuls = "holds NUL bytes, so it is no text; take it out, or drop them (tr -d '\\000')"
    return another_format(head) or (nuls if b"\0" in head else None)


def another_format(head: bytes) -> str | None:
    """Which format or encoding a file that begins so is of, and what to do; None if it may be text in UTF-8."""
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
    return None


# ---------------------------------------------------------------------- plain text


def _as_utf8(data: bytes) -> bytes:
    """``data`` with NULs, which are no text, as bytes that no UTF-8 has."""
    return data.replace(b"\0", b"\xff")


def file_pieces(path: Place, start: int, end: int, errors: str, argument: str = "data.path") -> Iterator[str]:
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
                raise ZooError(_undecodable(path, start - len(error.object) + error.start, argument)) from None
            cut = (block and text.rfind("\n") + 1) or len(text)
            if cut:
                yield text[:cut]
            rest = text[cut:]


def _undecodable(path: Place, offset: int, argument: str) -> str:
    with open_place(path) as file:
        file.seek(offset)
        nul = file.read(1) == b"\0"
    what = "NUL bytes" if nul else "bytes that are no UTF-8"
    advice = "drop them (tr -d '\\000')" if nul else "convert it (iconv -f latin1 -t utf-8, if it is Latin-1)"
    if argument == "data.path":  # of other files none has such a setting
        advice += " or set data.encoding_errors to replace or ignore"
    return f"{argument}: {path} has {what}, the first at offset {offset}; {advice}"


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


def text_lines(path: Path, errors: str, newline: str, argument: str = "data.path") -> Iterator[str]:
    """The lines of a file, without a byte order mark, split as ``open`` does for ``newline``.

    Raises:
        ZooError: for bytes that are no UTF-8 and for NULs, if ``errors`` is strict.
    """
    with io.TextIOWrapper(io.BufferedReader(_Bytes(path)), "utf-8-sig", errors, newline) as lines:
        try:
            yield from lines
        except UnicodeDecodeError:
            deque(file_pieces(path, 0, os.path.getsize(path), errors, argument), maxlen=0)  # which says where
            raise
