"""Checkpoints that are whole or not there, and that run no code."""

import os
import re
import tempfile
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins import CheckpointIO, TorchCheckpointIO

from zoo.checkpoint.checkpoint import Checkpoint
from zoo.errors import ZooError

_KINDS: dict[str, type] = {
    **dict.fromkeys(("callbacks", "loops", "gathered_gradients", "hyper_parameters"), dict),
    **dict.fromkeys(("optimizer_states", "lr_schedulers"), list),
    **dict.fromkeys(("epoch", "global_step"), int),
    "pytorch-lightning_version": str,
}


def is_usual(io: CheckpointIO) -> bool:
    """Whether it is what Lightning takes where nobody chose."""
    return type(io) is TorchCheckpointIO


class CheckedCheckpointIO(TorchCheckpointIO):
    """Write a checkpoint beside its place and then rename it, so that a kill leaves the one before; read it checked.

    Lightning's own writes to the system's folder for temporary files first. Where that is another file system, the move
    from there is a copy over the only good file. And it runs what a file from an address says.
    """

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """A file, a name on the shelf or an address: plain types and tensors, on the CPU.

        Raises:
            ZooError: if there is none, or it isn't whole, or holds code.
        """
        checkpoint = Checkpoint.open(path).take()
        for name, kind in _KINDS.items():
            if not isinstance(checkpoint.get(name, kind()), kind):
                raise ZooError(
                    f"{path}: its {name} is no {kind.__name__}; it was altered, take another", argument="checkpoint"
                )
        if not re.match(r"[2-9]\.|\d\d+\.", checkpoint.get("pytorch-lightning_version", "2.")):
            raise ZooError(
                f"{path}: not of a version of Lightning that this zoo runs with; take another", argument="checkpoint"
            )
        return checkpoint

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a checkpoint; never anything else that a state of a run may name."""
        if Path(path).suffix == ".ckpt" and Path(path).is_file():
            Path(path).unlink()

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        if "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, scratch = tempfile.mkstemp(prefix=f".{target.name}-", dir=target.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(scratch, 0o644)  # mkstemp's files are private
            os.replace(scratch, target)
        except BaseException:
            Path(scratch).unlink(missing_ok=True)
            raise
