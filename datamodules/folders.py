"""What lies in a user's folder: the same files whatever they hold, on every machine."""

import glob
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
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


def _walk(
    folder: str, deep: bool = True, hidden: list[str] | None = None
) -> Iterator[tuple[str, list[str], list[str]]]:
    """As os.walk, through links but into each folder once, without what is hidden; that is gathered in ``hidden``."""
    seen = _and_above(folder)  # links may lead round in circles
    for where, folders, files in os.walk(folder, onerror=_raise, followlinks=True):
        if hidden is not None:
            hidden += filter(is_hidden, sorted(folders + files))
        inner = {os.path.realpath(os.path.join(where, name)): name for name in sorted(folders) if not is_hidden(name)}
        folders[:] = [name for real, name in inner.items() if deep and real not in seen]
        seen |= set(inner)
        yield where, folders, [name for name in files if not is_hidden(name)]


def files_below(
    folder: str,
    suffixes: Sequence[str],
    others: "Counter[str] | None" = None,
    deep: bool = True,
    hidden: list[str] | None = None,
) -> list[str]:
    """Paths of the files below a folder, relative to it; links are followed, hidden files and folders left out.

    Args:
        folder: where to look.
        suffixes: how the names of wanted files end, in lower case.
        others: counts the suffixes of the files that are left out for them.
        deep: False looks into no folder.
        hidden: gathers the names of what is hidden.

    Raises:
        OSError: if a folder can't be read.
    """
    found = []
    for where, _, files in _walk(folder, deep, hidden):
        for name in files:
            if (suffix := os.path.splitext(name)[1].lower()) in suffixes:
                found.append(os.path.relpath(os.path.join(where, name), folder))
            elif others is not None:
                others[suffix or name] += 1
    return found


def files_matching(pattern: str) -> list[str]:
    """Paths of the files that a glob matches, sorted; ``**`` stands for any number of folders, one in another.

    A wildcard matches nothing hidden unless it begins with a dot. ``**`` follows links, but not round in circles.

    Raises:
        OSError: if a folder can't be read.
    """
    *folders, last = Path(pattern).parts
    if last == "**":
        folders, last = [*folders, last], "*"
    places = [""]
    for part in folders:
        if part == "**":
            places = [inner for place in places for inner in _and_below(place)]
        else:
            places = [path for place in places for path in _matches(place, part) if os.path.isdir(path)]
    return sorted({path for place in places for path in _matches(place, last) if os.path.isfile(path)})


def _and_below(folder: str) -> list[str]:
    start = folder or os.curdir
    inner = (os.path.relpath(os.path.join(where, name), start) for where, names, _ in _walk(start) for name in names)
    return [folder, *(os.path.join(folder, name) for name in inner)]


def _matches(folder: str, part: str) -> list[str]:
    """Paths in a folder that one part of a glob stands for."""
    named = os.path.join(folder, part)
    if not glob.has_magic(part) or os.path.exists(named):
        return [named]
    shown = [name for name in os.listdir(folder or os.curdir) if part.startswith(".") or not is_hidden(name)]
    return [os.path.join(folder, name) for name in shown if fnmatchcase(name, part)]


def is_utf8(name: str) -> bool:
    """Whether a name can be written down; the system may have others."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
