"""Where a command writes what it was asked for: checked before the work, filled whole or not at all."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zoo.errors import ZooError


def checked_place(out: str | Path, suffix: str, overwrite: bool) -> Path:
    """``--out`` as a path that can be written to.

    Raises:
        ZooError: if it can't.
    """
    target = Path(out)
    if suffix and target.suffix != suffix:
        raise ZooError(f"--out: got {str(out)!r}; the file must end in {suffix}")
    if not target.name:
        raise ZooError(f"--out: got {str(out)!r}; name a new folder")
    if not target.parent.is_dir():
        raise ZooError(f"--out: got {str(out)!r}; there is no folder {target.parent}, so make it first")
    if suffix and target.is_dir():
        raise ZooError(f"--out: {out} is a folder; name a file in it")
    if not suffix and target.is_file():
        raise ZooError(f"--out: {out} is a file; name a folder that isn't there yet")
    if target.exists() and not overwrite and (suffix or any(target.iterdir())):
        raise ZooError(f"--out: {out} is there already; name another, or replace it with --overwrite")
    return target


@contextmanager
def placed(target: Path) -> Iterator[Path]:
    """A path to write to beside the target, which is replaced if all goes well."""
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as scratch:
        part = Path(scratch) / target.name
        yield part
        if target.is_dir():
            for file in part.iterdir():
                os.replace(file, target / file.name)
        else:
            os.replace(part, target)
