"""What writing and reading other formats share: their names, and a whole checkpoint."""

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from zoo.catalogue import load_pretrained, verify_file
from zoo.checkpoint.identity import CHECKPOINT_KEY
from zoo.checkpoint.writing import CheckedCheckpointIO
from zoo.errors import ZooError
from zoo.tasks import ZooTask

FORMATS = {
    "safetensors": ".safetensors",
    "onnx": ".onnx",
    "torch-export": ".pt2",
    "hub-folder": "",
    "checkpoint": ".ckpt",
}
"""Formats by name, and how a file's name ends in each; hub-folder is a folder."""

WEIGHTS, CONFIG = "model.safetensors", "config.json"
"""The hub's names of a folder's files."""

DIGEST = "weights_sha256"
"""Of the tensors, in the metadata of a .safetensors file and in a folder's config.json."""


def size(file: Path) -> str:
    """A file's size, in words."""
    return f"{file.stat().st_size:,} bytes"


def write_checkpoint(task: ZooTask, claim: Mapping[str, Any], file: Path) -> list[str]:
    """Write a task as a checkpoint of this zoo, and load it again; returns what was checked."""
    checkpoint = {
        "epoch": 0,
        "global_step": 0,
        "pytorch-lightning_version": version("lightning"),
        "state_dict": task.state_dict(),
        "hparams_name": "kwargs",
        "hyper_parameters": claim["settings"],
        CHECKPOINT_KEY: dict(claim),
    }
    CheckedCheckpointIO().save_checkpoint(checkpoint, file)
    again = load_pretrained(file).state_dict()
    if any(not torch.equal(tensor, again[name]) for name, tensor in checkpoint["state_dict"].items()):
        raise ZooError(f"--out: {file.name} holds other tensors than were written; check the disk")
    return verify_file(str(file))


def brief(error: Exception) -> str:
    """What an error says, in one line."""
    return " ".join(str(error).split())[:160] or type(error).__name__
