"""Checkpoints that are whole or not there."""

import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins import TorchCheckpointIO


class AtomicCheckpointIO(TorchCheckpointIO):
    """Write a checkpoint beside its place and then rename it, so that a kill leaves the one before.

    Lightning's own writes to the system's folder for temporary files first. Where that is another file system, the move
    from there is a copy over the only good file.
    """

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
