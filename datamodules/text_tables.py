"""The texts of tables: a column of .csv and .tsv, a field of the objects in .jsonl, .ndjson and .json."""

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from datamodules.csv_reading import DELIMITERS, CsvFile
from datamodules.text_reading import file_pieces, text_lines, whole_characters
from zoo.errors import ZooError

TABLES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv")
_BLANKS = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder()


def table_rows(path: Path, field: str, errors: str) -> Iterator[str]:
    """The texts of a table, one a row, by the suffix of its name; empty for a row without text.

    As ``table_records``, of one field.
    """
    return (text for (text,) in table_records(path, {"data.field": field}, errors))


def table_records(path: Path, fields: Mapping[str, str], errors: str) -> Iterator[tuple[str, ...]]:
    """The texts in some fields of a table, a tuple a row, by the suffix of its name; empty where there is no text.

    .csv and .tsv have a header; .jsonl and .ndjson an object a line; .json a list of objects, or objects one after
    another. No more than a row is held in memory.

    Args:
        path: the file.
        fields: names of columns or fields, by what they were given as, for messages.
        errors: what to do with bytes that are no UTF-8, NULs, and halves of surrogate pairs: strict, replace or ignore.

    Raises:
        ZooError: naming file and line, if a row is malformed or lacks a field; if ``errors`` is strict, for bytes
            that are no UTF-8, NULs, and halves of surrogate pairs.
    """
    suffix = path.suffix.lower()
    if suffix in DELIMITERS:
        table = CsvFile(path, "data.path", errors=errors)
        places = [table.place(name, argument) for argument, name in fields.items()]
        yield from (tuple(row[place] for place in places) for row in table.rows())
        return
    for number, row in (_json_objects if suffix == ".json" else _json_lines)(path, errors):
        yield tuple(_text_of(row, name, argument, errors, path, number) for argument, name in fields.items())


def _text_of(row: Any, name: str, argument: str, errors: str, path: Path, line: int) -> str:
    if not isinstance(row, dict) or name not in row:
        has = ", ".join(map(str, row)) if isinstance(row, dict) else type(row).__name__
        raise ZooError(
            f"{argument}: got {name!r}, but {path} line {line} has {has}; name a field that every object has"
        )
    text = row[name]
    if text is not None and not isinstance(text, str):
        raise ZooError(f"{argument}: {path} line {line}: {name!r} is a {type(text).__name__}; must be text")
    return whole_characters(text or "", errors, f"data.path: {path} line {line}")


def _json_lines(path: Path, errors: str) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(text_lines(path, errors, newline="\n"), start=1):
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
