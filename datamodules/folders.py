"""What lies in a user's folder: the same files whatever they hold, on every machine."""

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn


def is_hidden(name: str) -> bool:
    """Whether a file or folder is an editor's, a system's or a repository's own, and none of the user's data."""
    return name.startswith(".") or name.lower() in ("__macosx", "thumbs.db", "desktop.ini")


def folders_in(folder: str) -> list[str]:
    """Names of the folders in a folder, sorted; links to itself or to what it lies in are none."""
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries if os.path.isdir(entry) and not is_hidden(entry.name))
    above = _and_above(folder)
    return [name for name in names if os.path.realpath(os.path.join(folder, name)) not in above]


def _and_above(folder: str) -> set[str]:
    real = Path(os.path.realpath(folder))
    return {str(real), *map(str, real.parents)}


def _raise(error: OSError) -> NoReturn:
    raise error


def files_below(
    folder: str, suffixes: Sequence[str], others: "Counter[str] | None" = None, deep: bool = True
) -> list[str]:
    """Paths of the files below a folder, relative to it; links are followed, hidden files and folders left out.

    Args:
        folder: where to look.
        suffixes: how the names of wanted files end, in lower case.
        others: counts the suffixes of the files that are left out for them.
        deep: False looks into no folder.

    Raises:
        OSError: if a folder can't be read.
    """
    found = []
    seen = _and_above(folder)  # links may lead round in circles
    for where, folders, files in os.walk(folder, onerror=_raise, followlinks=True):
        inner = {os.path.realpath(os.path.join(where, name)): name for name in sorted(folders) if not is_hidden(name)}
        folders[:] = [name for real, name in inner.items() if deep and real not in seen]
        seen |= set(inner)
        for name in files:
            if is_hidden(name):
                continue
            if (suffix := os.path.splitext(name)[1].lower()) in suffixes:
                found.append(os.path.relpath(os.path.join(where, name), folder))
            elif others is not None:
                others[suffix or name] += 1
    return found
