"""What a run shows in TensorBoard: what a language model writes, and what the metrics of attention look like."""

from collections.abc import Sequence
from typing import Any, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor

from zoo.errors import ZooError
from zoo.models.decoder import LanguageModel
from zoo.models.vision_transformer import VisionTransformer
from zoo.tasks import LanguageModelTask, ZooTask


def _tensorboards(trainer: pl.Trainer) -> list[TensorBoardLogger]:
    return [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]


class TextSamples(pl.Callback):
    """Write continuations of fixed prompts to TensorBoard's text tab at each validation.

    Args:
        prompts: the texts to continue; an empty one starts a new text.
        max_new_tokens: how many tokens to add at the most.
    """

    def __init__(self, prompts: Sequence[str] = ("",), max_new_tokens: int = 100) -> None:
        self.prompts, self.max_new_tokens = list(prompts), max_new_tokens

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not isinstance(pl_module, LanguageModelTask):
            raise ZooError(f"TextSamples: got {type(pl_module).__name__}; it shows a LanguageModelTask's samples only")
        if trainer.sanity_checking or not trainer.is_global_zero:
            return
        for logger in _tensorboards(trainer):
            network = pl_module.network
            room = self.max_new_tokens
            if network.positions == "learned":  # which end; a sample is no reason to end the run as well
                longest = max(len(pl_module.encode_prompt(prompt)) for prompt in self.prompts)
                room = max(0, min(room, network.max_len - longest))
            texts = pl_module.generate(self.prompts, max_new_tokens=room)
            for i, (prompt, text) in enumerate(zip(self.prompts, texts, strict=True)):
                indented = "\n".join(f"    {line}" for line in f"{prompt}{text}".splitlines())  # Markdown's verbatim
                logger.experiment.add_text(f"sample/{i}", indented, trainer.global_step)


def signed_picture(M: Tensor) -> Tensor:
    """A matrix as a picture (3, rows, columns): red above zero, blue below, full colour at the largest."""
    scaled = (M / M.abs().max().clamp(min=1e-12)).float().cpu()
    red, blue = 1 + scaled.clamp(max=0), 1 - scaled.clamp(min=0)
    return torch.stack([red, torch.minimum(red, blue), blue])


class MetricPictures(pl.Callback):
    """Draw each layer's metric M to TensorBoard's image tab at each validation.

    Averaged over the last batch, each row's final prefix. Layers that share one metric share one picture.
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
        for name, M in stack.get_M_matrices():
            if shown is not None and torch.equal(M, shown):
                continue
            shown = M
            for logger in _tensorboards(trainer):
                logger.experiment.add_image(f"metric/{name}", signed_picture(M), trainer.global_step)
