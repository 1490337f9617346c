"""What attention looks like, in TensorBoard."""

from typing import Any, cast

import lightning.pytorch as pl
import torch
from torch import Tensor

from zoo.callbacks.loggers import tensorboards
from zoo.errors import ZooError
from zoo.models.decoder import LanguageModel
from zoo.models.vision_transformer import VisionTransformer
from zoo.tasks import ZooTask


def signed_picture(M: Tensor) -> Tensor:
    """A matrix as a picture (3, rows, columns): red above zero, blue below, full colour at the largest."""
    scaled = (M / M.abs().max().clamp(min=1e-12)).float().cpu()
    red, blue = 1 + scaled.clamp(max=0), 1 - scaled.clamp(min=0)
    return torch.stack([red, torch.minimum(red, blue), blue])


class MetricPictures(pl.Callback):
    """Draw what each layer's attention has to show, such as DAMCHA's metric M, to TensorBoard's image tab at each
    validation.

    A generated metric is averaged over the last batch, each row's final prefix. Layers that share one picture are drawn
    once.
    """

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        network = pl_module.network if isinstance(pl_module, ZooTask) else None
        if not isinstance(network, (LanguageModel, VisionTransformer)):
            raise ZooError(
                f"MetricPictures: got {type(pl_module).__name__} around {type(network).__name__}; it draws the metrics "
                "of LanguageModel and of damcha_vit_* only, so take it out of trainer.callbacks"
            )

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        # not at the end of validation: by then a moving average of the weights has given way to the weights again
        last = batch_idx + 1 == trainer.num_val_batches[dataloader_idx]
        if not last or trainer.sanity_checking or not trainer.is_global_zero:
            return
        network = cast(ZooTask, pl_module).network
        shown: Tensor | None = None
        stack = network.decoder if isinstance(network, LanguageModel) else cast(VisionTransformer, network)
        for name, M in stack.matrices():
            if shown is not None and torch.equal(M, shown):
                continue
            shown = M
            for logger in tensorboards(trainer):
                logger.experiment.add_image(f"metric/{name}", signed_picture(M), trainer.global_step)
