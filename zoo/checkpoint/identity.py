"""What a checkpoint claims to be, and the check that it is.

A data identity is a plain, JSON-safe dict: the kind of data, names in order, and whatever is needed to rebuild the
model side. Its digest is the SHA-256 of its canonical JSON. ``source`` in it records where the data came from; it is
kept and shown, but data from elsewhere with the same names is no mismatch.
"""

import hashlib
import json
import pickle
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import IO, Any

import torch

from zoo.errors import CheckpointMismatchError, ZooError, listed

CHECKPOINT_KEY = "zoo"  # where a checkpoint keeps its claim: {"task", "network", "data", "identity", "digest", ...}
PROVENANCE = ("source",)


def canonical_json(value: object) -> str:
    """JSON with sorted keys and no spaces; in UTF-8 its bytes are what digests are taken of."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def digest(identity: Mapping[str, Any]) -> str:
    """SHA-256, as hex, of the canonical JSON of a data identity."""
    return hashlib.sha256(canonical_json(identity).encode()).hexdigest()


def _list_differences(name: str, saved: Sequence[Any], current: Sequence[Any]) -> list[str]:
    found = []
    if len(saved) != len(current):
        found.append(f"{name}: {len(saved)} in the checkpoint, {len(current)} here")
    known, here = {canonical_json(item) for item in saved}, {canonical_json(item) for item in current}
    missing = [item for item in saved if canonical_json(item) not in here]
    extra = [item for item in current if canonical_json(item) not in known]
    if missing:
        found.append(f"{name}: only in the checkpoint: {listed(missing)}")
    if extra:
        found.append(f"{name}: only here: {listed(extra)}")
    for i, (old, new) in enumerate(zip(saved, current, strict=False)):
        if old != new:
            found.append(f"{name}: first difference at {i}: {old!r} in the checkpoint, {new!r} here")
            break
    return found


def differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Every way in which two identities differ, by name, without their provenance; empty if they agree."""
    found: list[str] = []
    for name in sorted({*saved, *current} - set(PROVENANCE)):
        old, new = saved.get(name), current.get(name)
        if old == new:
            continue
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            found += [f"{name}.{line}" for line in differences(old, new)]
        elif isinstance(old, (list, tuple)) and isinstance(new, (list, tuple)):
            found += _list_differences(name, old, new)
        else:
            found.append(f"{name}: {_brief(old)} in the checkpoint, {_brief(new)} here")
    return found


def _brief(value: object) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, (list, tuple)):
        return f"{len(value)} entries"
    return repr(value)


def check_identity(saved: Mapping[str, Any], current: Mapping[str, Any], advice: str) -> None:
    """Raise CheckpointMismatchError, naming every difference and ending in ``advice``, unless the two agree."""
    found = differences(saved, current)
    if found:
        raise CheckpointMismatchError(
            f"made for other data than this. {'; '.join(found)}. {advice}", argument="checkpoint"
        )


def read_checkpoint(given: str | Path | IO[bytes]) -> dict[str, Any]:
    """Read a checkpoint's plain types and tensors onto the CPU; code in it is never run.

    Args:
        given: its file, by path or open.

    Raises:
        ZooError: if the file is missing, unreadable, truncated, damaged, or holds anything but plain types and tensors.
    """
    path = Path(given if isinstance(given, (str, Path)) else str(getattr(given, "name", "(open file)")))
    if isinstance(given, (str, Path)):
        if path.is_dir():
            raise ZooError(f"{path} is a folder; name the .ckpt file in it", argument="checkpoint")
        if not path.is_file():
            raise ZooError(
                f"there is no file {path}; look for .ckpt files in the run's checkpoints folder", argument="checkpoint"
            )
    try:
        # opened once: what is loaded is what was checked, even if another takes its place meanwhile
        with open(path, "rb") if isinstance(given, (str, Path)) else nullcontext(given) as file:
            with zipfile.ZipFile(file) as archive:
                broken = archive.testzip()  # torch.load doesn't look at the checksums that torch.save writes
            if broken is not None:
                raise _damaged(path)
            file.seek(0)
            checkpoint = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if "weights_only" in str(error).lower() or "unsupported global" in str(error).lower():
            raise ZooError(
                f"{path} holds Python objects that loading would have to run; a checkpoint of this zoo has "
                "plain types and tensors only, so get it from whoever trained it, saved by this zoo",
                argument="checkpoint",
            ) from None
        raise _damaged(path) from None
    except PermissionError:
        raise ZooError(f"{path} can't be read; check its permissions", argument="checkpoint") from None
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, zipfile.BadZipFile):
        raise _damaged(path) from None
    if not isinstance(checkpoint, dict):
        raise ZooError(
            f"{path} holds a {type(checkpoint).__name__}, not a checkpoint; name a .ckpt file", argument="checkpoint"
        )
    return checkpoint


_DEEPEST, _MOST = 64, 50_000_000  # levels and items of what a checkpoint says of itself


def _check_json(value: object, sizes: dict[int, int], depth: int = 0) -> int:
    """The number of items of a value in JSON's types, those in several places counted as often.

    Raises:
        ZooError: for other types, and where a few bytes would become more than can be looked at.
    """
    if value is None or isinstance(value, (str, float)):
        return 1
    if isinstance(value, int):
        if abs(value) >= 1 << 64:
            raise ZooError("holds a number of more than 64 bits")
        return 1
    if not isinstance(value, (dict, list, tuple)):
        raise ZooError(f"holds a {type(value).__name__}")
    if depth > _DEEPEST:
        raise ZooError(f"is nested more than {_DEEPEST} deep")
    if id(value) not in sizes:
        if isinstance(value, dict) and not all(isinstance(name, str) for name in value):
            raise ZooError("has a name that is no text")
        items = value.values() if isinstance(value, dict) else value
        sizes[id(value)] = 1 + sum(_check_json(item, sizes, depth + 1) for item in items)
    if sizes[id(value)] > _MOST:
        raise ZooError(f"has more than {_MOST:,} items")
    return sizes[id(value)]


def check_plain(value: object, where: str) -> None:
    """Raise ZooError unless a setting is data all the way down, with nothing in it that could become an object.

    Settings are None, booleans, numbers, texts, and lists and dicts of these. The command line's parser makes an
    instance of whatever a dict with the key ``class_path`` names wherever a setting may be anything, and reads such
    dicts out of texts; so neither may be there.

    Args:
        value: the setting.
        where: what it is called in the message.
    """
    if isinstance(value, str):
        if _names_a_class(value):
            raise ZooError(f"{where}: is a text that describes a class to make; settings are data, and name none")
    elif isinstance(value, Mapping):
        for name, item in value.items():
            if not isinstance(name, str) or "class_path" in name.split("."):
                raise ZooError(f"{where}: has the key {name!r}; settings are data, and never name a class to make")
            check_plain(item, f"{where}.{name}")
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            check_plain(item, f"{where}.{i}")
    elif value is not None and not isinstance(value, (bool, int, float)):
        raise ZooError(f"{where}: is a {type(value).__name__}; settings are numbers, texts, lists and dicts of them")


def _names_a_class(text: str) -> bool:
    """Whether a YAML parser finds the key ``class_path`` in a text, of which nothing is made, nor aliases followed."""
    if ":" not in text:  # a mapping has one
        return False
    import yaml  # seldom needed

    try:
        scalars = [event.value for event in yaml.parse(text) if isinstance(event, yaml.ScalarEvent)]
    except (yaml.YAMLError, ValueError, RecursionError):
        return False
    return any("class_path" in scalar.split(".") for scalar in scalars)


def _damaged(path: Path) -> ZooError:
    size = f" ({path.stat().st_size:,} bytes)" if path.is_file() else ""
    return ZooError(
        f"{path}{size} is no complete checkpoint; it was cut short, damaged or "
        "is another kind of file, so copy it again or take an earlier one",
        argument="checkpoint",
    )


def read_claim(checkpoint: Mapping[str, Any], path: str | Path) -> dict[str, Any]:
    """What a checkpoint says of itself: its task, network, data and identity.

    Raises:
        ZooError: if it says nothing, its identity isn't the one its digest was taken of, or its settings are more than
            data.
    """
    claim = checkpoint.get(CHECKPOINT_KEY)
    if not isinstance(claim, dict) or not isinstance(claim.get("identity"), dict):
        raise ZooError(
            f"{path} wasn't written by this zoo (it carries no data identity); use one that was", argument="checkpoint"
        )
    try:
        _check_json(claim, {})
    except ZooError as error:
        raise ZooError(f"{path}: what it says of itself {error}; the file was altered", argument="checkpoint") from None
    if digest(claim["identity"]) != claim.get("digest"):
        raise ZooError(
            f"{path}: its data identity doesn't match its digest; the file was altered", argument="checkpoint"
        )
    tensors = checkpoint.get("state_dict")
    whole = isinstance(claim.get("task"), str) and isinstance(claim.get("settings"), dict) and "data" in claim
    data = claim.get("data")
    whole = whole and (data is None or (isinstance(data, dict) and {"class_path", "init_args"} <= set(data)))
    whole = whole and (data is None or isinstance(data["init_args"], dict))
    whole = whole and isinstance(claim.get("step_seed"), int | None) and isinstance(claim.get("trainer"), dict | None)
    if not whole or not isinstance(tensors, dict) or not all(isinstance(t, torch.Tensor) for t in tensors.values()):
        raise ZooError(f"{path} lacks its task, settings, data or tensors; the file was altered", argument="checkpoint")
    try:
        check_plain(claim["settings"], "model")
        check_plain({} if data is None else data["init_args"], "data")
    except ZooError as error:
        raise ZooError(
            f"{path} isn't safe to use: {error}. Take another, or ask who made it", argument="checkpoint"
        ) from None
    return claim
