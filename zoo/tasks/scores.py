"""Figures of held-out rows: whatever the batches and the precision the same, and NaN, with a word, if undefined."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import MultilabelF1Score
from torchmetrics.functional import mean_absolute_error, mean_squared_error
from torchmetrics.functional.classification import binary_auroc, binary_average_precision, binary_calibration_error
from torchmetrics.utilities import dim_zero_cat

from zoo.errors import listed
from zoo.tasks.base import ZooTask

Kind = Literal["binary", "multiclass", "multilabel"]
_NOT_FINITE = "predictions that are no finite numbers (try --trainer.precision 32-true)"


def full_precision(outputs: Tensor) -> Tensor:
    """Outputs in float32 at the least: half precision has too few digits for a softmax, a loss or a unit."""
    return outputs.to(torch.promote_types(outputs.dtype, torch.float32))


def best(probabilities: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The n largest of each row (B, classes) and their places; of equal ones the first comes first."""
    values, places = probabilities.sort(dim=-1, descending=True, stable=True)
    return values[:, :n], places[:, :n]


def as_written(values: Tensor) -> list[list[float]]:
    """Numbers (rows, columns) for a file: in the fewest digits that give back each float exactly, and so each tie."""
    return [[float(str(value)) for value in row] for row in values.cpu().numpy()]


# ---------------------------------------------------------------------- sums over batches


class Ratio(Metric):
    r"""A sum over all batches by another, :math:`\sum a / \sum b`; NaN if the second is zero.

    Each sum is kept in two float32 parts: not every accelerator has float64, and one part alone goes wrong after many
    batches, as each addend loses its last bits against the total.
    """

    full_state_update = False
    reason = ""
    nothing = "nothing to take a mean of"  # what a split has where the second sum is zero
    above: Tensor
    above_rest: Tensor
    below: Tensor
    below_rest: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("above", "above_rest", "below", "below_rest"):
            self.add_state(name, torch.zeros((), dtype=torch.float32), dist_reduce_fx="sum")

    def _apply(self, fn: Callable[..., Any], exclude_state: Sequence[str] = "") -> nn.Module:
        """Go along to another device, and not to another precision."""
        this = super()._apply(fn, exclude_state)
        for name, default in list(self._defaults.items()):
            self._defaults[name] = cast(Tensor, default).float()
            setattr(self, name, getattr(self, name).float())
        return this

    def update(self, above: Tensor, below: Tensor) -> None:
        """Add to both sums."""
        self.above, self.above_rest = _add(self.above, self.above_rest, above.float())
        self.below, self.below_rest = _add(self.below, self.below_rest, below.float())

    def compute(self) -> Tensor:
        below = self.below + self.below_rest
        ratio = self.above / below + self.above_rest / below
        self.reason = "" if not ratio.isnan() else _NOT_FINITE if below else self.nothing
        return ratio


def _add(total: Tensor, rest: Tensor, addend: Tensor) -> tuple[Tensor, Tensor]:
    """A sum in two parts and one more number: what rounding took from the first goes to the second."""
    new = total + addend
    kept = new - total
    return new, rest + (total - (new - kept)) + (addend - kept)


class MeanLoss(Ratio):
    r"""The weighted mean of the losses of all rows, :math:`\sum w l / \sum w`."""

    higher_is_better = False
    nothing = "only rows of classes that weigh nothing"

    def update(self, losses: Tensor, weights: Tensor) -> None:
        """Add losses and weights, of one shape."""
        super().update((losses * weights).sum(), weights.sum())


class AccuracyOfBest(Ratio):
    """The share of rows whose class is among the n of largest probability."""

    higher_is_better = True

    def __init__(self, n: int) -> None:
        super().__init__()
        self.n = n

    def update(self, probabilities: Tensor, target: Tensor) -> None:
        """Add rows: probabilities (B, classes) and class numbers (B,)."""
        hits = (best(probabilities, self.n)[1] == target.unsqueeze(1)).any(dim=1)
        super().update(hits.sum(), torch.ones_like(target).sum())


# ---------------------------------------------------------------------- figures of all rows at once


class OverRows(Metric):
    """A figure that needs all rows: they are kept, and looked at in float64 on the CPU at the end.

    ``reason`` then says what the split has or lacks, where that left something out or made the figure NaN.
    """

    full_state_update = False
    reason = ""
    predicted: list[Tensor]
    target: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("predicted", [], dist_reduce_fx="cat")
        self.add_state("target", [], dist_reduce_fx="cat")

    def update(self, probabilities: Tensor, target: Tensor) -> None:
        """Keep rows: probabilities (B,) or (B, classes), and class numbers (B,) or flags (B, labels)."""
        self.predicted.append(probabilities.detach())
        self.target.append(target)

    def compute(self) -> Tensor:
        predicted, target = dim_zero_cat(self.predicted).cpu().double(), dim_zero_cat(self.target).cpu()
        self.reason = ""
        if predicted.isfinite().all():
            value = self.figure(predicted, target)
        else:
            value, self.reason = float("nan"), _NOT_FINITE
        return torch.tensor(float(value), dtype=torch.float32, device=self.device)

    @abstractmethod
    def figure(self, predicted: Tensor, target: Tensor) -> Tensor | float:
        """The figure of all rows; sets ``reason`` if need be."""


class CalibrationError(OverRows):
    """The mean gap of probability and share of hits over 15 bins of equal width, the last with its upper end.

    Of the second class where there are two, else of the class of largest probability.
    """

    higher_is_better = False

    def update(self, probabilities: Tensor, target: Tensor) -> None:
        if probabilities.ndim == 2:
            probabilities, read = probabilities.max(dim=1)
            target = read == target
        super().update(probabilities, target.long())

    def figure(self, predicted: Tensor, target: Tensor) -> Tensor:
        # torchmetrics opens a bin of its own for a probability of exactly 1
        return binary_calibration_error(predicted.clamp(max=1 - 2**-30), target, n_bins=15)


class _OverClasses(OverRows):
    """The mean of a figure over the classes or labels it is defined for."""

    higher_is_better = True

    def __init__(self, kind: Kind, names: Sequence[str]) -> None:
        super().__init__()
        self.kind, self.names = kind, names

    def figure(self, predicted: Tensor, target: Tensor) -> Tensor:
        names, predicted, hits = self._columns(predicted, target)
        found = hits.sum(dim=0)
        defined = [bool(ok) for ok in self.defined(found, len(hits))]
        each = [self.of_class(predicted[:, i], hits[:, i]) for i, ok in enumerate(defined) if ok]
        left_out = [i for i, ok in enumerate(defined) if not ok]
        absent = [names[i] for i in left_out if not found[i]]
        everywhere = [names[i] for i in left_out if found[i]]
        self.reason = _lacking(self.kind, self.names, absent, everywhere)
        return _mean(each)

    def _columns(self, predicted: Tensor, target: Tensor) -> tuple[Sequence[str], Tensor, Tensor]:
        """Names, probabilities and hits (rows, classes or labels), a column each; two classes have one between them."""
        if self.kind == "binary":
            return self.names[1:], predicted.unsqueeze(1), target.unsqueeze(1)
        if self.kind == "multiclass":
            return self.names, predicted, nn.functional.one_hot(target, len(self.names))
        return self.names, predicted, target

    @abstractmethod
    def defined(self, found: Tensor, rows: int) -> Tensor:
        """For which columns there is a figure, by how many of the rows they have."""

    @abstractmethod
    def of_class(self, predicted: Tensor, hits: Tensor) -> Tensor: ...


class AUROC(_OverClasses):
    """Area under the ROC curve, the mean over classes that some rows have and others don't; each against the rest."""

    def defined(self, found: Tensor, rows: int) -> Tensor:
        return (found > 0) & (found < rows)

    def of_class(self, predicted: Tensor, hits: Tensor) -> Tensor:
        return binary_auroc(predicted, hits)


class AveragePrecision(_OverClasses):
    """Average precision, the mean over classes that some rows have; each against the rest."""

    def defined(self, found: Tensor, rows: int) -> Tensor:
        return found > 0

    def of_class(self, predicted: Tensor, hits: Tensor) -> Tensor:
        return binary_average_precision(predicted, hits)


def _mean(each: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(each)).double().mean() if each else torch.tensor(float("nan"))


def _lacking(kind: Kind, names: Sequence[str], absent: Sequence[str], everywhere: Sequence[str] = ()) -> str:
    """What a split lacks, in words: rows of some classes, or, of labels, rows without them."""
    if kind == "binary" and everywhere:
        absent, everywhere = names[:1], ()
    if kind == "multiclass":  # rows of one class alone: the others are absent, which says it all
        everywhere = ()
    found = [f"no row of {listed(absent)}"] if absent else []
    found += [f"no row without {listed(everywhere)}"] if everywhere else []
    return " and ".join(found)


class MeanF1(MultilabelF1Score):
    """F1 of the second of two classes, or its mean over classes or labels that some rows have or were taken for."""

    reason = ""

    def __init__(self, kind: Kind, names: Sequence[str]) -> None:
        super().__init__(len(names), average="none", validate_args=False)  # it refuses one label alone
        self.kind, self.names = kind, names

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add rows: class numbers (B,) or flags (B, labels), both predicted and true."""
        if self.kind != "multilabel":
            preds, target = (nn.functional.one_hot(of, len(self.names)) for of in (preds, target))
        super().update(preds, target)

    def compute(self) -> Tensor:
        first = 1 if self.kind == "binary" else 0
        figures = super().compute().cpu().reshape(-1)
        each = list(zip(self.names, figures, self._rows(), strict=True))[first:]
        self.reason = _lacking(self.kind, self.names, [name for name, _, rows in each if not rows])
        return _mean([value for _, value, rows in each if rows]).float().to(self.device)

    def _rows(self) -> list[int]:
        """How many rows are of each class or were taken for it."""
        tp, fp, _, fn = self._final_state()
        return [int(n) for n in (tp + fp + fn).reshape(-1).tolist()]


# ---------------------------------------------------------------------- figures of numbers


class _OverNumbers(OverRows):
    """A figure of predicted and true numbers, both standardised."""

    def update(self, predicted: Tensor, exact: Tensor) -> None:
        """Keep rows: numbers (B,), and true ones (B,); those in int64 are the bits of a float64."""
        super().update(predicted, exact)

    def figure(self, predicted: Tensor, target: Tensor) -> Tensor | float:
        return self.of_numbers(
            predicted, target.view(torch.float64) if target.dtype == torch.int64 else target.double()
        )

    @abstractmethod
    def of_numbers(self, predicted: Tensor, target: Tensor) -> Tensor | float: ...


class MeanSquaredError(_OverNumbers):
    """Mean of the squared errors."""

    higher_is_better = False

    def of_numbers(self, predicted: Tensor, target: Tensor) -> Tensor:
        return mean_squared_error(predicted, target)


class MeanAbsoluteError(_OverNumbers):
    """Mean size of an error, times ``unit``: what one of the standardised numbers is in the table's."""

    higher_is_better = False

    def __init__(self, unit: float) -> None:
        super().__init__()
        self.unit = unit

    def of_numbers(self, predicted: Tensor, target: Tensor) -> Tensor:
        return mean_absolute_error(predicted, target) * self.unit


class R2(_OverNumbers):
    """Share of the numbers' spread that was predicted; NaN of equal numbers, or one alone."""

    higher_is_better = True

    def of_numbers(self, predicted: Tensor, target: Tensor) -> float:
        from sklearn.metrics import r2_score  # torchmetrics' takes a spread below 1e-4 for none

        if len(target) < 2:
            self.reason = "1 row"
        elif target.min() == target.max():
            self.reason = "no two numbers that differ"
        else:
            return float(r2_score(target.numpy(), predicted.numpy()))
        return float("nan")


# ---------------------------------------------------------------------- in a task


class ScoredTask(ZooTask):
    """A task with ``scores``, a collection of metrics for each of val and test, made in ``build``.

    At the end of a split, once a run, a line says which figures are NaN or leave classes out, and why.
    """

    scores: nn.ModuleDict

    def setup(self, stage: str) -> None:
        super().setup(stage)
        self._said: set[tuple[str, str]] = set()

    def score(self, split: str, shown: str = "loss", **rows: Tensor) -> None:
        """Update a split's metrics with a batch, each with those of the arguments it takes, and log them.

        Args:
            split: val or test.
            shown: the figure in the progress bar.
            rows: what the metrics' ``update`` take, by name.
        """
        self.update_and_log(cast(MetricCollection, self.scores[split]), f"{split}/{shown}", **rows)

    def update_and_log(self, scores: MetricCollection, shown: str, **rows: Tensor) -> None:
        """Update metrics with a batch, each with those of the arguments it takes, and log them.

        Args:
            scores: the metrics.
            shown: the full name of the figure in the progress bar.
            rows: what the metrics' ``update`` take, by name.
        """
        scores.update(**rows)
        for name, metric in scores.items(keep_base=False, copy_state=False):
            self.log(name, metric, prog_bar=name == shown)

    def on_validation_epoch_end(self) -> None:
        super().on_validation_epoch_end()
        self._tell("val")

    def on_test_epoch_end(self) -> None:
        super().on_test_epoch_end()
        self._tell("test")

    def _tell(self, split: str) -> None:
        """Say what isn't defined, or only for some classes."""
        if self.trainer.sanity_checking:
            return
        found: dict[tuple[str, str], list[str]] = {}
        scores = cast(MetricCollection, self.scores[split])
        for name, metric in scores.items(keep_base=False, copy_state=False):
            undefined = bool(metric.compute().isnan())  # kept, so that logging it computes nothing anew
            what, reason = "NaN" if undefined else "without some classes", getattr(metric, "reason", "")
            if (undefined or reason) and (name, what) not in self._said:
                self._said.add((name, what))
                found.setdefault((what, reason), []).append(name)
        for (what, reason), names in found.items():
            line = f"{', '.join(names)}: {what}, as the {split} split has {reason}"
            if what == "NaN":
                rank_zero_warn(f"{line}{self._monitors(names)}", stacklevel=6)  # of Lightning's: shows no line of code
            else:
                rank_zero_info(line)

    def _monitors(self, names: Sequence[str]) -> str:
        """What becomes of callbacks that watch a figure without a value."""
        callbacks: list[Any] = getattr(self.trainer, "callbacks", [])
        blind = [type(callback).__name__ for callback in callbacks if getattr(callback, "monitor", None) in names]
        return f"; {' and '.join(blind)} can't compare it, so give a monitor that has a value" if blind else ""
