"""Lightning's private names: what it does wrong with runs of this zoo, put right, and what it tells nobody."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.tuner.lr_finder import _ExponentialLR, _LinearLR
from torch import Tensor


def checkpoint_to_load(trainer: pl.Trainer) -> str | Path | None:
    """The checkpoint that a run is going to load, before it does; None for a run that begins.

    ``fit(ckpt_path=...)`` hands it from function to function, and keeps it only once it is being loaded, when the model
    has been made. So it is looked up in ``Trainer._run``, which is running, and by then knows what last, best and hpc
    stand for.
    """
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is pl.Trainer._run.__code__ and frame.f_locals.get("self") is trainer:
            found: str | Path | None = frame.f_locals["ckpt_path"]
            return found
    return trainer.ckpt_path


def close_finished_epoch(trainer: pl.Trainer) -> None:
    """Let a run that was saved at the end of an epoch begin the next one; call it when training starts.

    A trainer with max_steps takes every checkpoint for one in the midst of an epoch. It would close the finished epoch
    a second time, so that the samples of the next one are never seen, and call callbacks at its end before there is a
    figure to look at.
    """
    loop = trainer.fit_loop
    epochs = loop.epoch_progress
    now: Any = epochs.current
    finished = now.ready == now.started == now.processed and now.processed > 0
    if loop.restarting and finished:
        _Loop.restarting.fset(loop, False)  # type: ignore[attr-defined]
        loop.reset_restart_stage()
        loop.epoch_loop.reset_restart_stage()
        if now.completed < now.processed:  # written before the last callbacks were done
            epochs.increment_completed()


def keep_to_own_folder(trainer: pl.Trainer, states: dict[str, Any], resumed: str | Path | None) -> None:
    """Let the states of ModelCheckpoints name no files but those in their own folders, by their present places.

    What they name is deleted once something better is there, and their paths are those of the machine and the folder
    that wrote them; a stranger's may be any.

    Args:
        trainer: whose callbacks are going to get the states.
        states: of all callbacks, by their keys.
        resumed: the checkpoint that the run goes on from.
    """
    for callback in getattr(trainer, "checkpoint_callbacks", []):
        state = states.get(callback.state_key)
        if not isinstance(callback, ModelCheckpoint) or not isinstance(state, dict):
            continue
        folder = Path(callback.dirpath or ".")
        same_run = resumed is not None and Path(resumed).resolve().parent == folder.resolve()

        def placed(name: object, folder: Path = folder, same_run: bool = same_run) -> str:
            file = folder / Path(str(name)).name
            return str(file) if same_run and name and file.suffix == ".ckpt" and file.is_file() else ""

        best = {placed(name): score for name, score in dict(state.get("best_k_models") or {}).items() if placed(name)}
        kept = {name: placed(state.get(name)) for name in ("best_model_path", "kth_best_model_path", "last_model_path")}
        states[callback.state_key] = {**state, **kept, "best_k_models": best, "dirpath": callback.dirpath}
        if not best:
            forgotten = ("best_model_score", "kth_value", "current_score")
            states[callback.state_key] |= {name: getattr(callback, name) for name in forgotten}


def search_by_factors(trainer: pl.Trainer, key: str) -> bool:
    """Let a learning-rate finder try each rate at the factors of the groups of parameters; whether one is searching.

    It would train all groups at the same rate, and suggest one for a training that never happens.

    Args:
        trainer: whose training starts.
        key: where a group has its factor.
    """
    found = False
    for scheduler in (config.scheduler for config in trainer.lr_scheduler_configs):
        if not isinstance(scheduler, (_LinearLR, _ExponentialLR)):
            continue
        found, alike = True, scheduler.get_lr

        def by_factors(
            alike: Callable[[], list[float]] = alike, groups: list[dict[str, Any]] = scheduler.optimizer.param_groups
        ) -> list[float]:
            return [lr * group.get(key, 1.0) for lr, group in zip(alike(), groups, strict=True)]

        scheduler.get_lr = by_factors  # type: ignore[method-assign]
    return found


def put_off_stop(trainer: pl.Trainer) -> bool:
    """Take back that a run was told to stop; whether it was. Lightning would stop in the midst of a validation, with
    averages in place of the weights."""
    signals = trainer._signal_connector
    told, signals.received_sigterm = signals.received_sigterm, False
    return bool(told)


def stop(trainer: pl.Trainer) -> None:
    """Tell a run to stop after this step."""
    trainer._signal_connector.received_sigterm = True


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
