"""Text that every machine with Python has."""

import sys
import sysconfig
from pathlib import Path

from datamodules.sources.base import CorpusData, CorpusSource, register_corpus

_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3"}


@register_corpus("stdlib")
class StandardLibrary(CorpusSource):
    """The source of the running Python's standard library, without its tests and installed packages.

    Source: Python itself, under the licence of the Python Software Foundation.
    """

    title = "python-stdlib"

    def load(self) -> CorpusData:
        root = Path(sysconfig.get_path("stdlib"))
        files = {
            path.relative_to(root).as_posix(): path
            for path in root.rglob("*.py")
            # what the build wrote (_sysconfigdata_...) differs between machines of one version
            if not _LEFT_OUT.intersection(path.relative_to(root).parts) and not path.name.startswith("_sysconfigdata")
        }
        return CorpusData(files, about={"python": ".".join(map(str, sys.version_info[:3]))})
