"""Pairs of texts that every machine with Python has."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from datamodules.sources.base import PairData, PairSource, register_pairs
from datamodules.sources.stdlib import StandardLibrary
from zoo.errors import ZooError
from zoo.options import option

# a function with its parameters, which may hold brackets once more, and the first line of its docstring
_FUNCTION = re.compile(
    r"^[ \t]*+def[ ]++(\w++)(\((?:[^()]++|\([^()]*+\))*+\))[^:\n]*+:[ \t]*+\n\s*+[rR]?\"\"\"([^\n\"]++)", re.M
)


@dataclass(frozen=True)
class SignatureOptions:
    """Which functions are taken."""

    longest: int = option(100, "characters of a docstring's line, and of a signature, at the most")

    def __post_init__(self) -> None:
        if self.longest < 20:
            raise ZooError(f"longest: got {self.longest}; must be at least 20")


@register_pairs("stdlib_signatures")
class StandardLibrarySignatures(PairSource):
    """First lines of docstrings in the running Python's standard library, and their functions' signatures.

    ``Return the absolute value of x.`` and ``def fabs(x):``, of every function and method whose docstring has three
    double quotes, in the order of files and lines. The signature is what ``ast.unparse`` makes of it, without what is
    returned. Of several functions with one line the first is taken.

    Source: Python itself, under the licence of the Python Software Foundation.
    """

    Options = SignatureOptions
    title = "python-stdlib-signatures"

    def load(self) -> PairData:
        corpus = StandardLibrary().load()
        first: dict[str, str] = {}
        for _, file in sorted(corpus.documents.items()):
            for source, target in _functions(Path(file).read_text(encoding="utf-8", errors="replace")):
                if max(len(source), len(target)) <= self.options.longest:
                    first.setdefault(source, target)
        return PairData(list(first.items()), corpus.about)


def _functions(code: str) -> Iterator[tuple[str, str]]:
    """Docstring line and signature of each function in a file."""
    for name, parameters, line in _FUNCTION.findall(code):
        try:
            (function,) = ast.parse(f"def {name}{parameters}: pass").body
        except SyntaxError:  # a comment with a bracket in it, or code in a text
            continue
        if line.strip():
            yield line.strip(), ast.unparse(function).partition("\n")[0]
