"""What a model's loss is without some blocks of its metric."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import pandas as pd
import torch
from tqdm import tqdm

from datamodules.base import ZooDataModule
from zoo.attention.base import Attention
from zoo.errors import ZooError
from zoo.tasks import ZooTask

KEPT = {
    "full": (),
    "diagonal only": ("off_diag_scale",),
    "off-diagonal only": ("diag_scale",),
    "none": ("diag_scale", "off_diag_scale"),
}
"""Which blocks are kept, and the scales that are set to zero for that."""


SCALES = ("diag_scale", "off_diag_scale")


class _Progress(pl.Callback):
    def __init__(self, bar: Any) -> None:
        self.bar, self.batches = bar, 0

    def on_test_batch_end(self, *_: Any, **__: Any) -> None:
        self.bar.update()
        self.batches += 1


def can_ablate(task: ZooTask) -> bool:
    """Whether the options of a task's attention have scales for diagonal and off-diagonal blocks."""
    return task.with_attention_options(dict.fromkeys(SCALES, 0.0)) is not None


def ablate_blocks(task: ZooTask, data: ZooDataModule, batches: int, device: str | torch.device = "cpu") -> pd.DataFrame:
    """Test a trained model as it is, and with blocks of its metric scaled by zero.

    Each row is the test of a network made with those scales and the same weights, on the same first batches of the test
    split.

    Args:
        task: the trained model, without adapters.
        data: its data.
        batches: how many batches of the test split, at the most.
        device: where to run.

    Returns:
        blocks (``KEPT``), diag_scale, off_diag_scale, batches, and each of the task's figures without its "test/".

    Raises:
        ZooError: unless ``can_ablate``.
    """
    if not can_ablate(task):
        raise ZooError(
            f"{task.network_name} has an attention without the options {' and '.join(SCALES)}, so no block can be "
            "switched off; take one with them, such as damcha"
        )
    options = next(layer.options for layer in task.network.modules() if isinstance(layer, Attention))
    own = {name: float(getattr(options, name)) for name in SCALES}
    total = len(KEPT) * min(batches, len(data.test_dataloader()))
    rows = []
    with _without_notes(), tqdm(total=total, desc="Block ablation", unit="batch", leave=False) as bar:
        for blocks, off in KEPT.items():
            changed = dict.fromkeys(off, 0.0)
            progress = _Progress(bar)
            found = _trainer(batches, device, progress).test(_twin(task, changed), data, verbose=False)[0]
            figures = {name.removeprefix("test/"): value for name, value in found.items()}
            rows.append({"blocks": blocks, **own, **changed, "batches": progress.batches, **figures})
    return pd.DataFrame(rows)


@contextmanager
def _without_notes() -> Iterator[None]:
    """Without what Lightning and the data say at the beginning of every test, as four in a row say the same."""
    log = logging.getLogger("lightning.pytorch")
    level = log.level
    log.setLevel(logging.WARNING)
    try:
        yield
    finally:
        log.setLevel(level)


def _twin(task: ZooTask, options: dict[str, float]) -> ZooTask:
    """The same weights in a network with other options of its attention."""
    twin = type(task)(**(task.with_attention_options(options) or {}))
    twin.build_and_freeze(task.data_identity)
    twin.load_state_dict(task.state_dict())
    return twin


def _trainer(batches: int, device: str | torch.device, progress: pl.Callback) -> pl.Trainer:
    place = torch.device(device)
    return pl.Trainer(
        accelerator=place.type,
        devices=1 if place.type == "cpu" or place.index is None else [place.index],
        limit_test_batches=batches,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[progress],
    )
