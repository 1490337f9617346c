"""What Lightning does wrong with runs of this zoo, put right; the one place that reaches into it."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.loops.loop import _Loop
from torch import Tensor


def close_finished_epoch(trainer: pl.Trainer) -> None:
    """Let a run that was saved at the end of an epoch begin the next one; call it when training starts.

    A trainer with max_steps takes every checkpoint for one in the midst of an epoch. It would close the finished epoch
    a second time, so that the samples of the next one are never seen, and call callbacks at its end before there is a
    figure to look at.
    """
    loop = trainer.fit_loop
    epochs = loop.epoch_progress
    now: Any = epochs.current
    if loop.restarting and now.ready == now.started == now.processed == now.completed + 1:
        _Loop.restarting.fset(loop, False)  # type: ignore[attr-defined]
        loop.reset_restart_stage()
        loop.epoch_loop.reset_restart_stage()
        epochs.increment_completed()


def average_no_indices(trainer: pl.Trainer) -> None:
    """Let averages of the weights leave whole numbers as they are; call it when fitting starts.

    A moving average of buffers averages indices as well: 0.1 * 3 + 0.9 * 3 is a little less than 3, and becomes 2. The
    averaged model would attend along other edges, and count other bytes for a token.
    """
    for callback in getattr(trainer, "callbacks", []):
        average = callback._average_model if isinstance(callback, WeightAveraging) else None
        if average is not None:
            average.avg_fn = average.avg_fn and _of_fractions(average.avg_fn)
            average.multi_avg_fn = average.multi_avg_fn and _of_lists_of_fractions(average.multi_avg_fn)


def _of_fractions(mean: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def taken(averaged: Tensor, current: Tensor, n: Tensor | int) -> Tensor:
        return mean(averaged, current, n) if averaged.is_floating_point() else current

    return taken


def _of_lists_of_fractions(mean: Callable[..., None]) -> Callable[..., None]:
    def taken(averaged: list[Tensor], current: list[Tensor], n: Tensor | int) -> None:
        if averaged[0].is_floating_point():  # they come in groups of one type
            mean(averaged, current, n)
        else:
            for old, new in zip(averaged, current, strict=True):
                old.copy_(new)

    return taken
