"""CSV and TSV files, of whatever they are: one reader, with what may be wrong with such a file."""

import csv
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from datamodules.text_reading import another_format, read_head, text_lines
from zoo.errors import ZooError, listed

DELIMITERS = {".csv": ",", ".tsv": "\t"}
_ALL = ";\t,|"
csv.field_size_limit((1 << 31) - 1)  # a cell may be a whole text


class CsvFile:
    """A file with a header and rows, separated by what its suffix says. Nothing in it is taken for anything but text.

    Args:
        path: the file, in UTF-8, with or without a byte order mark.
        argument: what it was given as, for messages.
        errors: what to do with bytes that are no UTF-8, and with NULs: strict (refuse), replace or ignore.
        delimiter: what separates its cells, whatever its suffix.

    Raises:
        ZooError: here, if it can't be read, is empty, or is no text by its first bytes; in the methods, naming the
            line, for cells too many or too few, quotes that don't close, and odd bytes.
    """

    def __init__(self, path: Path, argument: str, errors: str = "strict", delimiter: str | None = None) -> None:
        self.path, self.argument, self.errors = path, argument, errors
        self.delimiter = delimiter or DELIMITERS[path.suffix.lower()]
        self._goes_by_suffix = delimiter is None
        self._kind = "TSV" if self.delimiter == "\t" else "CSV"
        with self._explained():
            if fault := another_format(read_head(path)):
                raise ZooError(f"{argument}: {path} {fault}")

    @cached_property
    def first_line(self) -> str:
        """The header as it stands."""
        with self._explained():
            return next((line for line in self._lines() if line.strip()), "").rstrip("\r\n")

    @cached_property
    def header(self) -> list[str]:
        """Names of the columns, as they stand."""
        with self._explained():
            header = next(filter(None, self._reader()), None)
        if not header:
            raise ZooError(f"{self.argument}: {self.path} is empty; give a table with a header and rows")
        return header

    def rows(self) -> Iterator[list[str]]:
        """The rows below the header, one at a time, but for blank lines."""
        width = len(self.header)
        with self._explained():
            reader = self._reader()
            next(filter(None, reader))
            for row in reader:
                if not row or (len(row) == 1 < width and not row[0].strip()):
                    continue
                if len(row) != width:
                    self._refuse_width(len(row), reader.line_num)
                yield row

    def place(self, name: str, argument: str) -> int:
        """Which column has a name.

        Args:
            name: the name.
            argument: what it was given as, for messages.

        Raises:
            ZooError: if there is no such column, or more than one.
        """
        if self.header.count(name) != 1:
            if len(self.header) == 1:
                self.refuse_other_delimiter()
            found = "more than one such column" if name in self.header else f"the columns {listed(self.header)}"
            raise ZooError(f"{argument}: got {name!r}, but {self.path} has {found}; name one of them")
        return self.header.index(name)

    def refuse_other_delimiter(self) -> None:
        """Raise ZooError if something else than this file's delimiter separates its columns."""
        if self.delimiter not in self.first_line:
            self._refuse_delimiter(self.first_line)

    def refuse_same_columns(self) -> None:
        """Raise ZooError if two columns have one name."""
        again = sorted({name for name in self.header if name and self.header.count(name) > 1})
        if again:
            raise ZooError(
                f"{self.argument}: {self.path} has more than one column {listed(again)}; rename or drop one of each"
            )

    def texts(self) -> pd.DataFrame:
        """All of it, every cell the text that it is."""
        return pd.DataFrame(list(self.rows()), columns=pd.Index(self.header, dtype=object), dtype=str)

    def numbers(self, as_text: Collection[str | None] = ()) -> pd.DataFrame:
        """All of it, in the types that pandas takes the cells for; a column without a name gets pandas' own for it.

        Args:
            as_text: columns of which every cell stays the text that it is: in them 007 and NA are text.
        """
        for _ in self.rows():
            pass  # pandas fills short rows, and would end a cell at a NUL
        header = [name or f"Unnamed: {i}" for i, name in enumerate(self.header)]
        with self._explained():
            return pd.read_csv(
                self.path,
                sep=self.delimiter,
                encoding="utf-8-sig",
                index_col=False,
                header=0,
                names=header,
                # a converter, unlike a dtype, sees every cell, also those that pandas takes for missing values
                converters={i: str for i, name in enumerate(header) if name in as_text},
                low_memory=False,
                float_precision="round_trip",  # the default is off in the last bit of one number in many
            )

    # ------------------------------------------------------------------ what may be wrong

    def _lines(self) -> Iterator[str]:
        return text_lines(self.path, self.errors, newline="", argument=self.argument)

    def _reader(self) -> Any:
        return csv.reader(self._lines(), delimiter=self.delimiter, strict=True)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Say in one line what reading meets."""
        try:
            yield
        except OSError as error:
            reason = "there is no such file" if isinstance(error, FileNotFoundError) else error.strerror or error
            raise ZooError(
                f"{self.argument}: {self.path} can't be read ({reason}); check the path and its permissions"
            ) from None
        except (csv.Error, ValueError) as error:  # pandas' own errors are ValueErrors
            if isinstance(error, csv.Error):
                self.refuse_other_delimiter()
            reason = " ".join(str(error).split())[:200]
            raise ZooError(
                f"{self.argument}: {self.path} is no readable {self._kind} ({reason}); write it again"
            ) from None

    def _refuse_width(self, cells: int, line: int) -> None:
        if len(self.header) == 1 or any(";" in name for name in self.header):
            self._refuse_delimiter(";" if any(";" in name for name in self.header) else self.first_line)
        raise ZooError(
            f"{self.argument}: {self.path} line {line} has {cells} cells, but the header has {len(self.header)}; mend "
            f"that line, and put texts with {self.delimiter!r} in them in quotes"
        )

    def _refuse_delimiter(self, header: str) -> None:
        found = next((delimiter for delimiter in _ALL if delimiter in header and delimiter != self.delimiter), None)
        if found == ";":
            raise ZooError(
                f"{self.argument}: {self.path} is separated by ';', as spreadsheets write where a comma is the decimal "
                f"mark; save it with {self.delimiter!r} and decimal points: pandas.read_csv({self.path.name!r}, "
                "sep=';', decimal=',', dtype={'LABEL': str}).to_csv('NEW.csv', index=False)"
            )
        if found:
            right = next((suffix for suffix, delimiter in DELIMITERS.items() if delimiter == found), None)
            advice = f"rename it to {right}" if right and self._goes_by_suffix else f"separate it by {self.delimiter!r}"
            raise ZooError(f"{self.argument}: {self.path} is separated by {found!r}; {advice}")
