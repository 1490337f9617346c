"""How fast a run goes."""

import time
from collections import deque
from typing import Any

import lightning.pytorch as pl
from torch import Tensor


class TokensPerSecond(pl.Callback):
    """Log training throughput in tokens a second, over all processes, without the time spent in validation.

    A batch (rows, columns) counts as rows x (columns - 1) tokens: the last column is a target only.

    Args:
        steps: over how many of the last steps to average.
    """

    def __init__(self, steps: int = 50) -> None:
        self._last: deque[tuple[int, float]] = deque(maxlen=steps)
        self._start = 0.0

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._start = time.perf_counter()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Tensor, batch_idx: int
    ) -> None:
        tokens = batch.shape[0] * (batch.shape[1] - 1) * trainer.world_size
        self._last.append((tokens, time.perf_counter() - self._start))
        total, seconds = (sum(column) for column in zip(*self._last, strict=True))
        pl_module.log("tokens_per_second", total / seconds, prog_bar=True)
