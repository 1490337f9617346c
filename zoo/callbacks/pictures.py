"""What attention looks like, in TensorBoard."""

from collections.abc import Iterator
from typing import Any, cast

import lightning.pytorch as pl
from matplotlib.figure import Figure

from zoo.callbacks.loggers import tensorboards
from zoo.errors import ZooError
from zoo.looking import Look, attention_layers, look
from zoo.looking.pictures import attention_pictures, is_drawn_alike, shown_picture
from zoo.tasks import LanguageModelTask, ZooTask

_TOKENS = 48  # of a text, which is as many as can be told apart
_DPI = 72  # most of the time goes into writing the pixels


class MetricPictures(pl.Callback):
    """Draw what each layer's attention does to TensorBoard's image tab at each validation: its maps, and what else it
    has to show, such as DAMCHA's metric M, under a colour scale and with a border around each head.

    All of it is of one sample, the first of the last batch, of a text the first 48 tokens; a generated metric is the
    one at its end. Layers that show the same share a panel. It costs a pass of that sample and a picture of each kind.
    ``zoo inspect`` draws the same with the names of the tokens, and writes the numbers.
    """

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        network = pl_module.network if isinstance(pl_module, ZooTask) else None
        if network is None or not attention_layers(network):
            raise ZooError(
                f"MetricPictures: got {type(pl_module).__name__} around {type(network).__name__}, which has no "
                "attention to draw, so take it out of trainer.callbacks"
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
        if not last or trainer.sanity_checking or not tensorboards(trainer):
            return
        looks = _look(cast(ZooTask, pl_module), batch)  # in every process, as a sharded network takes all of them
        if not trainer.is_global_zero:
            return
        for name, figure in _pictures(looks):
            figure.set_dpi(_DPI)
            for logger in tensorboards(trainer):
                logger.experiment.add_figure(f"attention/{name}", figure, trainer.global_step)


def _look(task: ZooTask, batch: Any) -> list[Look]:
    inputs = task.inputs_of(batch)[:1]
    if isinstance(task, LanguageModelTask):
        inputs = inputs[:, :_TOKENS]
    try:
        return look(task.network, inputs)
    except ZooError:  # more weights than are worth a picture are no reason to end a run
        return look(task.network, inputs, maps=False)


def _pictures(looks: list[Look]) -> Iterator[tuple[str, Figure]]:
    with_maps = [item for item in looks if item.maps is not None]
    for i, figure in enumerate(attention_pictures(with_maps, "the last batch's first sample")):
        yield f"maps_{i}" if i else "maps", figure
    for name in dict.fromkeys(name for item in looks for name in item.shown):
        having = [item for item in looks if name in item.shown]
        if is_drawn_alike(having, name):
            yield name, shown_picture(having, name, [])
