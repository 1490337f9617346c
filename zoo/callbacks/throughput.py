"""How fast a run goes."""

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from typing import Any, ClassVar

import lightning.pytorch as pl
from torch import Tensor


class _PerSecond(pl.Callback, ABC):
    """Log training throughput over all processes, without loading and validation.

    Args:
        steps: over how many of the last steps to average.
    """

    figure: ClassVar[str]

    def __init__(self, steps: int = 50) -> None:
        self._last: deque[tuple[int, float]] = deque(maxlen=steps)
        self._start = 0.0

    @abstractmethod
    def count(self, batch: Any) -> int:
        """How many of what is counted a batch holds."""

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._start = time.perf_counter()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._last.append((self.count(batch) * trainer.world_size, time.perf_counter() - self._start))
        total, seconds = (sum(column) for column in zip(*self._last, strict=True))
        pl_module.log(self.figure, total / seconds, prog_bar=True)


class TokensPerSecond(_PerSecond):
    """Log training throughput in tokens a second, over all processes, without loading and validation.

    A batch (rows, columns) counts as rows x (columns - 1) tokens: the last column is a target only. Of a dict all
    ``inputs`` count, those too whose targets don't, and padding.

    Args:
        steps: over how many of the last steps to average.
    """

    figure = "tokens_per_second"

    def count(self, batch: Tensor | Mapping[str, Tensor]) -> int:
        return batch[:, 1:].numel() if isinstance(batch, Tensor) else batch["inputs"].numel()


class PicturesPerSecond(_PerSecond):
    """Log training throughput in pictures a second, over all processes, without loading and validation.

    Args:
        steps: over how many of the last steps to average.
    """

    figure = "pictures_per_second"

    def count(self, batch: Mapping[str, Any]) -> int:
        return len(batch["image"])
