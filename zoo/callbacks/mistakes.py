"""What a picture run shows in TensorBoard: which classes it confuses, and the pictures it is most wrong about."""

import heapq
from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from matplotlib.figure import Figure
from torch import Tensor
from torchmetrics.classification import MulticlassConfusionMatrix

from zoo.errors import ZooError
from zoo.tasks import ImageClassificationTask


class Mistakes(pl.Callback):
    """Draw a confusion matrix and a grid of the worst mistakes to TensorBoard at each validation and test.

    The worst mistakes are the misread pictures whose true class got the least probability. With several processes the
    matrix counts the pictures of all, the grid shows those of the first.

    Args:
        pictures: how many mistakes to show at the most.
    """

    def __init__(self, pictures: int = 16) -> None:
        if pictures < 1:
            raise ZooError(f"Mistakes.pictures: got {pictures}; must be at least 1")
        self.pictures = pictures
        self._matrix: MulticlassConfusionMatrix | None = None
        self._worst: list[tuple[float, int, Tensor, str]] = []  # a heap: the least bad in front
        self._seen = 0

    def _start(self, task: pl.LightningModule) -> None:
        if not isinstance(task, ImageClassificationTask):
            raise ZooError(f"Mistakes: got {type(task).__name__}; it shows an ImageClassificationTask's mistakes only")
        self._matrix = MulticlassConfusionMatrix(len(task.classes)).to(task.device)
        self._worst, self._seen = [], 0

    def _add(self, task: pl.LightningModule, outputs: Any, batch: Mapping[str, Any]) -> None:
        if self._matrix is None or not isinstance(task, ImageClassificationTask):
            return
        probabilities, target = outputs["probabilities"], batch["target"]
        self._matrix.update(probabilities, target)
        probabilities, target = probabilities.cpu(), target.cpu()  # one wait for the device, not one a mistake
        read = probabilities.argmax(dim=-1)
        true = probabilities.gather(1, target.unsqueeze(1)).squeeze(1)
        for i in (read != target).nonzero().flatten().tolist():
            p = float(true[i])
            if len(self._worst) == self.pictures and -p <= self._worst[0][0]:
                continue
            true_class, read_class = _short(task.classes[target[i]], 30), _short(task.classes[read[i]], 20)
            title = (
                f"{true_class}\nread as {read_class}, {float(probabilities[i, read[i]]):.2f}\n{batch['id'][i][-30:]}"
            )
            self._seen += 1  # of equal probability, the first stay
            entry = (-p, -self._seen, batch["image"][i].float().cpu(), title)
            push = heapq.heappush if len(self._worst) < self.pictures else heapq.heapreplace
            push(self._worst, entry)

    def _show(self, trainer: pl.Trainer, task: pl.LightningModule, split: str) -> None:
        if self._matrix is None or not isinstance(task, ImageClassificationTask) or trainer.sanity_checking:
            return
        counts = self._matrix.compute().cpu()
        if not trainer.is_global_zero:
            return
        worst = [(picture, title) for _, _, picture, title in sorted(self._worst, reverse=True)]
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                step = trainer.global_step
                logger.experiment.add_figure(f"confusion/{split}", confusion_figure(counts, task.classes), step)
                if worst:
                    identity = task.data_identity
                    figure = mistakes_figure(worst, identity["mean"], identity["std"])
                    logger.experiment.add_figure(f"mistakes/{split}", figure, step)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._start(pl_module)

    def on_validation_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        self._add(pl_module, outputs, batch)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._show(trainer, pl_module, "val")

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._start(pl_module)

    def on_test_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        self._add(pl_module, outputs, batch)

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._show(trainer, pl_module, "test")


def _short(name: str, length: int) -> str:
    return name if len(name) <= length else f"{name[: length - 1]}…"


def confusion_figure(counts: Tensor, classes: Sequence[str]) -> Figure:
    """Counts (true class, class read) as a picture of each row's shares; written out for up to 20 classes."""
    n = len(classes)
    side = min(16.0, 3.0 + 0.4 * n)
    figure = Figure(figsize=(side, side), layout="constrained")
    axes = figure.add_subplot()
    shares = counts / counts.sum(dim=1, keepdim=True).clamp(min=1)
    shades = shares.sqrt()  # among many classes each confusion is rare, and should be seen
    axes.imshow(shades.numpy(), cmap="Blues", vmin=0, vmax=1)
    axes.set_xlabel("read as")
    axes.set_ylabel("true class")
    step = max(1, n // 40)  # more names than that can't be read
    names = [_short(name, 16) for name in classes]
    axes.set_xticks(range(0, n, step), names[::step], rotation=90, parse_math=False)
    axes.set_yticks(range(0, n, step), names[::step], parse_math=False)
    if n <= 20:
        for i in range(n):
            for j in range(n):
                if counts[i, j]:
                    colour = "white" if shades[i, j] > 0.6 else "black"
                    axes.text(j, i, str(int(counts[i, j])), ha="center", va="center", color=colour)
    return figure


def mistakes_figure(worst: Sequence[tuple[Tensor, str]], mean: Sequence[float], std: Sequence[float]) -> Figure:
    """Pictures (C, H, W), normalised, in a grid with a title each."""
    columns = min(4, len(worst))
    rows = -(-len(worst) // columns)
    height, width = worst[0][0].shape[-2:]
    figure = Figure(figsize=(2.4 * columns, (2.4 * height / width + 0.7) * rows), layout="constrained")
    for place, (picture, title) in enumerate(worst, start=1):
        axes = figure.add_subplot(rows, columns, place)
        shown = picture * torch.tensor(std).view(-1, 1, 1) + torch.tensor(mean).view(-1, 1, 1)
        axes.imshow(shown.clamp(0, 1).permute(1, 2, 0).numpy(), cmap="gray", vmin=0, vmax=1)
        axes.set_title(title, fontsize=8, parse_math=False)  # a $ in a name is no formula
        axes.axis("off")
    return figure
