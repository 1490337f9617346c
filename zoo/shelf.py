"""The shelf of trained models: an index of names, and the files they stand for."""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema

from zoo.errors import ZooError, listed

_TEXT = {"type": "string", "minLength": 1}
_HEX = {"type": "string", "pattern": "^[0-9a-f]{64}$"}
_METRIC = {
    "type": "object",
    "required": ["name", "value", "split", "data"],
    "additionalProperties": False,
    "properties": {"name": _TEXT, "value": {"type": "number"}, "split": _TEXT, "data": _TEXT, "note": _TEXT},
}
_ENTRY = {
    "name": {"type": "string", "pattern": "^[a-z0-9][a-z0-9_]*$"},
    "family": {"enum": ["language", "vision", "graph"]},
    "summary": _TEXT,
    "file": _TEXT,
    "sha256": _HEX,
    "bytes": {"type": "integer", "minimum": 1},
    "parameters": {"type": "integer", "minimum": 1},
    "identity": _HEX,
    "metrics": {"type": "array", "minItems": 1, "items": _METRIC},
    "command": _TEXT,
    "config": _TEXT,
    "training_time": _TEXT,
    "versions": {"type": "object", "minProperties": 1, "additionalProperties": _TEXT},
    "licence": _TEXT,
}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["models"],
    "additionalProperties": False,
    "properties": {
        "models": {
            "type": "array",
            "items": {
                "type": "object",
                "required": list(_ENTRY),
                "additionalProperties": False,
                "properties": _ENTRY,
            },
        }
    },
}


@dataclass(frozen=True)
class Entry:
    """A trained model on the shelf.

    ``sha256`` and ``bytes`` are the file's, ``identity`` is the digest of the identity of its data, ``metrics`` are the
    figures that ``lightning test`` gives, ``command`` is how it was trained.
    """

    name: str
    family: str
    summary: str
    file: str
    sha256: str
    bytes: int
    parameters: int
    identity: str
    metrics: tuple[Mapping[str, Any], ...]
    command: str
    config: str
    training_time: str
    versions: Mapping[str, str]
    licence: str
    folder: Path

    @property
    def path(self) -> Path:
        """The checkpoint file."""
        return self.folder / self.file

    @property
    def card(self) -> Path:
        """The text that describes the model."""
        return self.path.with_name("card.md")

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _ENTRY} | {"metrics": [dict(metric) for metric in self.metrics]}


def shelf_folder() -> Path:
    """The folder of the index: ``ZOO_SHELF``, or checkpoints/ beside the package."""
    given = os.environ.get("ZOO_SHELF")
    return Path(given) if given else Path(__file__).parents[1] / "checkpoints"


def read_index(folder: Path | None = None) -> dict[str, Entry]:
    """The models on the shelf by name.

    Raises:
        ZooError: if there is no index, or it isn't as it should be.
    """
    return _read_index((folder or shelf_folder()) / "index.json")


@cache
def _read_index(file: Path) -> dict[str, Entry]:
    if not file.is_file():
        raise ZooError(
            f"ZOO_SHELF: there is no {file}; trained models come with a clone of the repository, so set ZOO_SHELF to "
            "the checkpoints folder of one"
        )
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        jsonschema.validate(found, SCHEMA)
    except (ValueError, jsonschema.ValidationError) as error:
        where = ".".join(map(str, getattr(error, "absolute_path", ())))
        reason = getattr(error, "message", str(error))
        raise ZooError(f"index: {file} isn't as it should be: {where or 'file'}: {reason}; take it anew") from None
    entries = [Entry(**{**model, "metrics": tuple(model["metrics"])}, folder=file.parent) for model in found["models"]]
    names = [entry.name for entry in entries]
    if len(set(names)) < len(names):
        raise ZooError(f"index: {file} has a name twice; each model needs its own")
    return dict(zip(names, entries, strict=True))


def entry_of(name: str) -> Entry:
    """The model of that name.

    Raises:
        ZooError: if there is none.
    """
    index = read_index()
    if name not in index:
        raise ZooError(f"name: got {name!r}; the shelf has {listed(sorted(index), shown=20)}")
    return index[name]


def check_file(entry: Entry) -> None:
    """Raise ZooError unless the model's file is there and is the one that the index speaks of."""
    if not entry.path.is_file():
        raise ZooError(
            f"{entry.name}: there is no file {entry.path}; it comes with a clone of the repository, so set ZOO_SHELF "
            "to the checkpoints folder of one"
        )
    size = entry.path.stat().st_size
    with open(entry.path, "rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    if (size, sha256) != (entry.bytes, entry.sha256):
        raise ZooError(
            f"{entry.name}: {entry.path} ({size:,} bytes, SHA-256 {sha256[:12]}...) isn't the file of the index "
            f"({entry.bytes:,} bytes, {entry.sha256[:12]}...); it was altered or cut short, so take it anew"
        )


def resolve(given: str) -> str:
    """A checkpoint file's path, from its path or from a name on the shelf.

    Raises:
        ZooError: if the name's file isn't the one of the index.
    """
    if Path(given).exists() or Path(given).suffix or os.sep in given:
        return given
    try:
        index = read_index()
    except ZooError:
        return given
    if given not in index:
        return given
    check_file(index[given])
    return str(index[given].path)
