"""A checkpoint, opened: read once, checked once, and asked as often as one likes."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any
from weakref import WeakValueDictionary

from torch import Tensor

from zoo.checkpoint.identity import canonical_json, read_checkpoint, read_claim
from zoo.checkpoint.index import find_checkpoint
from zoo.checkpoint.remote import Stamp, stamp_of
from zoo.errors import ZooError

_open: WeakValueDictionary[Stamp, "Checkpoint"] = WeakValueDictionary()  # those that somebody holds


class Checkpoint:
    """What a checkpoint file says of itself, and its tensors; get one by ``Checkpoint.open``.

    A file is read and its checksums are compared when it is opened. As long as somebody holds the checkpoint, whoever
    opens the same unchanged file in this process gets the same object, without another look at the file: so hold one
    over a command whose parts are given the file's name. Nothing is kept that nobody holds.

    The tensors are handed out once, to whoever asks first: then they are the caller's own, to write to or to let go of,
    and the checkpoint keeps none. Asked again, it reads the file again.

    Attributes:
        path: the file, or what an open one is called.
        claim: what the checkpoint says of itself, as ``read_claim`` checked it; to be read, not written to.
    """

    def __init__(self, contents: dict[str, Any], given: str | IO[bytes]) -> None:
        self.path = given if isinstance(given, str) else str(getattr(given, "name", "(open file)"))
        claim = read_claim(contents, self.path)
        self.claim: Mapping[str, Any] = {
            # the identity may be large, and nobody writes to one
            name: value if name == "identity" else copy.deepcopy(value)
            for name, value in claim.items()
        }
        self._given = given
        self._contents: dict[str, Any] | None = contents

    @classmethod
    def open(cls, given: "str | Path | IO[bytes] | Checkpoint", argument: str = "checkpoint") -> "Checkpoint":
        """Read a checkpoint and check it; code in it is never run.

        Args:
            given: a name on the shelf, whose file is then compared with the index, a file, the address of one, or an
                open file. A checkpoint stays as it is.
            argument: what errors call it.

        Raises:
            ZooError: if there is none; if it is damaged, holds code, or isn't of this zoo.
        """
        if isinstance(given, Checkpoint):
            return given
        try:
            if not isinstance(given, (str, Path)):
                return cls(read_checkpoint(given), given)
            path = find_checkpoint(str(given))
            stamp = stamp_of(path)
            found = _open.get(stamp) if stamp is not None else None
            if found is None:
                found = cls(read_checkpoint(path), path)
                if stamp is not None:
                    _open[stamp] = found
            return found
        except ZooError as error:
            if argument == "checkpoint":
                raise
            raise error.about(argument) from None

    @property
    def task(self) -> str:
        """The name of the class that made it; ``zoo.families.task_class`` has the class."""
        return self.claim["task"]

    @property
    def settings(self) -> dict[str, Any]:
        """The task's arguments: a copy."""
        return copy.deepcopy(self.claim["settings"])

    @property
    def data(self) -> str | None:
        """The name of the data module's class; None if it was made without one."""
        return None if self.claim["data"] is None else self.claim["data"]["class_path"]

    @property
    def data_settings(self) -> dict[str, Any]:
        """The data module's arguments: a copy; none if it was made without one."""
        return {} if self.claim["data"] is None else copy.deepcopy(self.claim["data"]["init_args"])

    @property
    def identity(self) -> dict[str, Any]:
        """The identity of the data that it was made for; to be read, not written to."""
        return self.claim["identity"]

    @property
    def digest(self) -> str:
        """SHA-256 of the identity."""
        return self.claim["digest"]

    @property
    def adapter(self) -> Mapping[str, str] | None:
        """Of an adapter: what its base was called, and the SHA-256 of its weights; None for whole weights."""
        return self.claim.get("adapter") or None

    def tensors(self) -> dict[str, Tensor]:
        """The state dict, as ``take`` hands it out."""
        return self.take()["state_dict"]

    def take(self) -> dict[str, Any]:
        """All that the file holds: state dict, states of optimizers, loops and callbacks, and the claim.

        Raises:
            ZooError: if it was handed out before, and the file isn't any more what it was.
        """
        contents, self._contents = self._contents, None
        if contents is None:
            contents = read_checkpoint(self._given)
            if canonical_json(read_claim(contents, self.path)) != canonical_json(self.claim):
                raise ZooError(f"{self.path} was replaced while it was in use; begin again", argument="checkpoint")
        return contents
