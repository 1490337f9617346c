"""The configs that ship, by name."""

import difflib
import re
import sys
from pathlib import Path

from zoo.checkpoint.index import companion, read_index, shipped
from zoo.errors import ZooError

_SIDE_FILE = re.compile(r"(?<![\w/.-])configs/([\w/-]+\.(?:csv|tsv|parquet|txt|jsonl))\b")


def config_files() -> dict[str, Path]:
    """The configs by family and name, such as ``lm/stdlib_damcha``."""
    root = shipped("configs")
    return {path.relative_to(root).with_suffix("").as_posix(): path for path in sorted(root.glob("*/*.yaml"))}


def summary(file: Path) -> str:
    """The first line of a config, a comment that says what it is."""
    return file.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")


def find_config(name: str) -> Path:
    """The file of a config.

    Args:
        name: with or without its family, or that of a trained model, whose config is then found.

    Raises:
        ZooError: if there is none, or more than one.
    """
    wanted = name.removeprefix("configs/").removesuffix(".yaml")
    files = config_files()
    folder, slash, rest = wanted.partition("/")
    if slash and folder not in {full.partition("/")[0] for full in files}:
        from zoo.families import families  # brings Lightning with it

        wanted = next((f"{family.configs}/{rest}" for family in families() if family.name == folder), wanted)
    found = [full for full in files if wanted in (full, full.rpartition("/")[2])]
    if len(found) == 1:
        return files[found[0]]
    if found:
        raise ZooError(f"got {name!r}, which is {' and '.join(found)}; name one of them", argument="name")
    try:
        index = read_index()
    except ZooError:
        index = {}
    if wanted in index:
        entry = index[wanted]
        return companion(entry, entry.folder / entry.config)
    close = {
        full: difflib.SequenceMatcher(None, wanted, full if "/" in wanted else full.rpartition("/")[2]).ratio()
        for full in [*files, *index]
    }
    near = [full for full in sorted(close, key=lambda full: -close[full])[:3] if close[full] > 0.6]
    hint = f"do you mean {' or '.join(near)}? " if near else ""
    raise ZooError(
        f"got {name!r}, which is no config and no trained model; {hint}zoo config lists the configs", argument="name"
    )


def read_config(file: Path) -> str:
    """The text of a config; files beside it that it names, and that aren't in this folder, by their own place."""

    def placed(found: re.Match[str]) -> str:
        here = shipped("configs") / found[1]
        if Path(found[0]).exists() or not here.is_file():
            return found[0]
        print(f"{found[0]} is named by its place, {here}; copy it to change it", file=sys.stderr)
        return str(here)

    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    return "".join(line if line.startswith("#") else _SIDE_FILE.sub(placed, line) for line in lines)
