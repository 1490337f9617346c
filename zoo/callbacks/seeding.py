"""Random numbers that a run which goes on draws as an unbroken one would."""

from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch

from zoo.tasks import ZooTask


class StepSeeding(pl.Callback):
    """Seed each training step by its number and the seed of the run, which its checkpoints keep.

    So a run that goes on from a checkpoint draws the dropout masks that an unbroken one would. Every task brings this
    callback itself.
    """

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if not isinstance(pl_module, ZooTask):
            return
        if pl_module.step_seed is None:
            pl_module.step_seed = torch.initial_seed() % (1 << 31)
        number = trainer.fit_loop.total_batch_idx * trainer.world_size + trainer.global_rank
        torch.manual_seed(pl_module.step_seed * 1_000_003 + number)
        np.random.seed((pl_module.step_seed * 1_000_003 + number) % (1 << 32))  # timm's Mixup draws from NumPy's
