"""The end of a run that can't come to anything."""

from typing import Any

import lightning.pytorch as pl
import torch

from zoo.errors import ZooError


class DivergedError(ZooError):
    """Training came to weights that are no finite numbers."""


class FiniteWeights(pl.Callback):
    """End a run whose weights are no numbers any more, instead of saving them as its best.

    It looks after a step, and before each validation. Every task brings this callback itself.

    Args:
        every_n_steps: after how many steps it looks again.
    """

    def __init__(self, every_n_steps: int = 50) -> None:
        if every_n_steps < 1:
            raise ZooError(f"FiniteWeights.every_n_steps: got {every_n_steps}; must be at least 1")
        self.every_n_steps = every_n_steps

    def on_before_zero_grad(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        if trainer.global_step % self.every_n_steps == 1 % self.every_n_steps:
            self._check(trainer, pl_module)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._check(trainer, pl_module)

    def _check(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not all(torch.isfinite(p).all() for p in pl_module.parameters()):
            lr = getattr(pl_module, "lr", "a learning rate")
            raise DivergedError(
                f"model.lr: got {lr}, and at step {trainer.global_step} some weights are no finite numbers; "
                "training diverged, so lower it"
            )
