"""The shelf of trained models: an index of names, and the files they stand for, here or at an address."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema

from zoo.checkpoint.remote import fetch, is_address, place_of, sha256_of
from zoo.errors import ZooError, listed

_TEXT = {"type": "string", "minLength": 1}
_FILE = {"type": "string", "pattern": r"^[\w-][\w.-]*(/[\w-][\w.-]*)*$"}  # below the index's folder
_HEX = {"type": "string", "pattern": "^[0-9a-f]{64}$"}
_METRIC = {
    "type": "object",
    "required": ["name", "value", "split", "data"],
    "additionalProperties": False,
    "properties": {"name": _TEXT, "value": {"type": "number"}, "split": _TEXT, "data": _TEXT, "note": _TEXT},
}
_ENTRY = {
    "name": {"type": "string", "pattern": "^[a-z0-9][a-z0-9_]*$"},
    "family": {"type": "string", "pattern": "^[a-z][a-z0-9_]*$"},
    "summary": _TEXT,
    "file": _FILE,
    "sha256": _HEX,
    "bytes": {"type": "integer", "minimum": 1},
    "parameters": {"type": "integer", "minimum": 1},
    "identity": _HEX,
    "metrics": {"type": "array", "minItems": 1, "items": _METRIC},
    "command": _TEXT,
    "config": _FILE,
    "training_time": _TEXT,
    "versions": {"type": "object", "minProperties": 1, "additionalProperties": _TEXT},
    "licence": _TEXT,
}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["models"],
    "additionalProperties": False,
    "properties": {
        "origin": {"type": "string", "pattern": "^[A-Za-z][A-Za-z0-9+.-]*://."},
        "models": {
            "type": "array",
            "items": {
                "type": "object",
                "required": list(_ENTRY),
                "additionalProperties": False,
                "properties": _ENTRY,
            },
        },
    },
}


@dataclass(frozen=True)
class Entry:
    """A trained model on the shelf.

    ``sha256`` and ``bytes`` are the file's, ``identity`` is the digest of the identity of its data, ``metrics`` are the
    figures that ``lightning test`` gives, ``command`` is how it was trained. ``folder`` is the index's, ``origin`` the
    address of one with the files that aren't there.
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
    origin: str | None = None

    @property
    def path(self) -> Path:
        """The checkpoint file; until ``check_file`` it may have to be fetched."""
        own = self.folder / self.file
        return own if self.origin is None or own.is_file() else place_of(f"{self.origin}/{self.file}")

    @property
    def card(self) -> Path:
        """The text that describes the model; ``companion`` fetches it where it isn't here."""
        return (self.folder / self.file).with_name("card.md")

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _ENTRY} | {"metrics": [dict(metric) for metric in self.metrics]}


def shipped(kind: str) -> Path:
    """The folder of the ``checkpoints`` or ``configs`` that ship: in an installed package, or beside it in a clone."""
    inside = Path(__file__).parents[1] / "_data" / kind
    return inside if inside.is_dir() else Path(__file__).parents[2] / kind


def shelf_folder() -> Path:
    """The folder of the index: ``ZOO_SHELF``, or what ships; of an address, its place in the cache."""
    given = os.environ.get("ZOO_SHELF")
    if not given:
        return shipped("checkpoints")
    return place_of(f"{given.rstrip('/')}/index.json").parent if is_address(given) else Path(given)


def read_index(folder: Path | None = None) -> dict[str, Entry]:
    """The models on the shelf by name.

    Args:
        folder: the index's; left out, ``ZOO_SHELF``, which may be an address, or what ships.

    Raises:
        ZooError: if there is no index, or it isn't as it should be.
    """
    given, origin = os.environ.get("ZOO_SHELF", "").rstrip("/"), os.environ.get("ZOO_ORIGIN", "").rstrip("/")
    if folder is None and is_address(given):
        return _read_index(_fetch_index(f"{given}/index.json", shelf_folder()), given)
    return _read_index((folder or shelf_folder()) / "index.json", origin or None)


@cache
def _fetch_index(address: str, folder: Path) -> Path:
    """Once a run; ``folder`` is its place, another one with another cache."""
    return fetch(address, fresh=True)


def _read_index(file: Path, origin: str | None) -> dict[str, Entry]:
    try:
        about = file.stat()
    except OSError:
        stamp = None
    else:
        stamp = about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns
    return dict(_parsed_index(file.absolute(), origin, stamp))


@cache
def _parsed_index(file: Path, origin: str | None, stamp: object) -> dict[str, Entry]:
    """Once for a file as it is; ``stamp`` is another one after every change."""
    if not file.is_file():
        raise ZooError(
            f"ZOO_SHELF: there is no {file}; set ZOO_SHELF to the checkpoints folder of a clone of the repository, or "
            "to an address of one"
        )
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        jsonschema.validate(found, SCHEMA)
    except (ValueError, jsonschema.ValidationError) as error:
        where = ".".join(map(str, getattr(error, "absolute_path", ())))
        reason = getattr(error, "message", str(error))
        raise ZooError(f"index: {file} isn't as it should be: {where or 'file'}: {reason}; take it anew") from None
    origin = found.get("origin", "").rstrip("/") or origin
    if origin is not None and not is_address(origin):
        raise ZooError(f"ZOO_ORIGIN: got {origin!r}; must be the address of a folder, as https:// or hf://")
    entries = [
        Entry(**{**model, "metrics": tuple(model["metrics"])}, folder=file.parent, origin=origin)
        for model in found["models"]
    ]
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
        raise ZooError(f"got {name!r}; the shelf has {listed(sorted(index), shown=20)}", argument="name")
    return index[name]


def check_file(entry: Entry) -> None:
    """Raise ZooError unless the model's file is there, or can be had, and is the one that the index speaks of."""
    if not entry.path.is_file() and entry.origin is None:
        raise ZooError(
            f"{entry.name}: its weights aren't here ({entry.path}), as an installed package has none; set ZOO_SHELF to "
            "the checkpoints folder of a clone of the repository, or ZOO_ORIGIN to an address of one"
        )
    if (address := _address(entry, entry.file)) is not None:
        try:
            fetch(address, entry.sha256)
        except ZooError as error:
            raise error.about(entry.name) from None
    size, sha256 = entry.path.stat().st_size, entry.sha256 if address else sha256_of(entry.path)
    if (size, sha256) != (entry.bytes, entry.sha256):
        raise ZooError(
            f"{entry.name}: {entry.path} ({size:,} bytes, SHA-256 {sha256[:12]}...) isn't the file of the index "
            f"({entry.bytes:,} bytes, {entry.sha256[:12]}...); it was altered or cut short, so take it anew"
        )


def _address(entry: Entry, file: str) -> str | None:
    """Where a file of the index comes from; None if it lies on a shelf of this machine."""
    if entry.origin is None:
        return None
    address, own = f"{entry.origin}/{file}", entry.folder / file
    return None if own.is_file() and own != place_of(address) else address


def companion(entry: Entry, path: Path) -> Path:
    """A text that goes with a model, such as its card, from its place in the index's folder.

    Raises:
        ZooError: if it is neither there nor at the origin.
    """
    if (address := _address(entry, path.relative_to(entry.folder).as_posix())) is not None:
        return fetch(address, fresh=True)
    if not path.is_file():
        raise ZooError(f"{entry.name}: there is no {path}; take the shelf anew")
    return path


def whereabouts(entry: Entry) -> str:
    """Where a model's file is, or comes from."""
    if entry.path.is_file():
        return str(entry.path)
    if entry.origin is not None:
        return f"{entry.origin}/{entry.file}, fetched when it is used"
    return "not here: ZOO_SHELF or ZOO_ORIGIN says where"


def resolve(given: str) -> str:
    """A checkpoint file's path, from its path, an address, or a name on the shelf; anything else stays as it is, but
    for a ~ in front.

    Raises:
        ZooError: if the address can't be read, or the name's file isn't the one of the index.
    """
    if is_address(given):
        return str(fetch(given))
    given = os.path.expanduser(given)
    if Path(given).is_file() or Path(given).suffix or os.sep in given:
        return given
    try:
        index = read_index()
    except ZooError:
        if os.environ.get("ZOO_SHELF"):
            raise
        return given
    if given not in index:
        return given
    check_file(index[given])
    return str(index[given].path)


def find_checkpoint(given: str) -> str:
    """As ``resolve``, but what can only be a name is refused if the shelf lacks it.

    Raises:
        ZooError: naming what the shelf has; and as ``resolve``.
    """
    path = resolve(given)
    if path == given and not Path(path).exists() and not Path(path).suffix:
        entry_of(path)
    return path
