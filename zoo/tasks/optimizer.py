"""What a task is trained with: AdamW and a schedule of its own, or an optimizer and a scheduler that were chosen."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.cli import ReduceLROnPlateau, instantiate_class
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from zoo.attention.stacks import lr_factors
from zoo.errors import ZooError
from zoo.private.lightning import search_by_factors
from zoo.tasks.settings import check_settings, defaults_of, plain

if TYPE_CHECKING:
    from zoo.tasks.base import ZooTask

OWN = ("lr", "weight_decay", "beta2", "warmup", "min_lr")
"""The settings of a task that belong to AdamW and its schedule."""


def check_training(lr: float, weight_decay: float, beta2: float, warmup: float, min_lr: float) -> None:
    """Raise ZooError for a setting of AdamW and its schedule that is out of range."""
    check_settings(
        (
            ("lr", lr, 0 < lr < math.inf, "must be a positive number"),
            ("weight_decay", weight_decay, 0 <= weight_decay < math.inf, "must be 0 or more"),
            ("beta2", beta2, 0 <= beta2 < 1, "must lie in [0, 1)"),
            ("warmup", warmup, 0 <= warmup < 1, "is a share of the run and must lie in [0, 1)"),
            ("min_lr", min_lr, 0 <= min_lr <= 1, "is a share of lr and must lie in [0, 1]"),
        )
    )


class Schedule:
    """The share of the learning rate that is used at a step: a linear rise to 1, then a cosine down to ``min_lr``.

    Args:
        warmup: share of the run's steps in which it rises.
        min_lr: what is left at the end.
    """

    def __init__(self, warmup: float, min_lr: float) -> None:
        self.warmup, self.min_lr = warmup, min_lr
        self.steps = math.inf
        """How many steps the run has; known once training starts."""

    def share(self, step: int) -> float:
        known = math.isfinite(self.steps)
        warmup = max(1, round(self.warmup * self.steps)) if known else 100
        if step < warmup:
            return (step + 1) / warmup
        if not known:
            return 1.0  # no end in sight: stay
        done = min(1.0, (step - warmup) / max(1, self.steps - warmup))
        return self.min_lr + (1 - self.min_lr) * (1 + math.cos(math.pi * done)) / 2

    def begin(self, trainer: pl.Trainer) -> None:
        """Learn how long the run is, and set the learning rate of its next step by that.

        Call it when training starts, and not before: the trainer makes the training data to answer, and of data that
        was made before a checkpoint's state is read, a run that goes on starts the epoch again.
        """
        self.steps = trainer.estimated_stepping_batches
        for schedule in (config.scheduler for config in trainer.lr_scheduler_configs):
            if isinstance(schedule, LambdaLR) and schedule.lr_lambdas == [self.share] * len(schedule.base_lrs):
                share = self.share(schedule.last_epoch)
                for group, base in zip(schedule.optimizer.param_groups, schedule.base_lrs, strict=True):
                    group["lr"] = base * share


@dataclass(frozen=True)
class ChosenOptimizer:
    """An optimizer and a scheduler as Lightning's command line has them; None where none was chosen.

    Args:
        optimizer: ``{"class_path": ..., "init_args": {...}}`` of a torch.optim.Optimizer, without its parameters.
        lr_scheduler: the same of a scheduler, without its optimizer. It goes by epochs, as on Lightning's command line.
    """

    optimizer: Mapping[str, Any] | None
    lr_scheduler: Mapping[str, Any] | None

    def plain(self) -> dict[str, Any]:
        """In JSON's types, for a checkpoint: a run goes on with the optimizer it began with."""
        chosen = {"optimizer": self.optimizer, "lr_scheduler": self.lr_scheduler}
        return {name: _json(value) for name, value in chosen.items() if value is not None}


def _json(value: Any) -> Any:
    value = plain(value)
    if isinstance(value, dict):
        return {name: _json(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_json(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


LR_FACTOR = "lr_factor"
"""Where a group of parameters keeps its factor of the learning rate; left out where it is 1."""


def parameter_groups(task: "ZooTask") -> list[dict[str, Any]]:
    """What AdamW trains, in groups of equal weight decay and learning rate."""
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    undecayed, factors = task.undecayed(), _lr_factors(task)
    for name, parameter in task.network.named_parameters():
        if parameter.requires_grad:
            decay = task.settings["weight_decay"] if parameter.ndim >= 2 and name not in undecayed else 0.0
            groups.setdefault((-decay, factors[name]), []).append(parameter)
    return [_group(groups[key], key[1], lr=task.lr * key[1], weight_decay=-key[0]) for key in sorted(groups)]


def _group(parameters: list[nn.Parameter], factor: float, **options: float) -> dict[str, Any]:
    return {"params": parameters, **options, **({} if factor == 1 else {LR_FACTOR: factor})}


def _lr_factors(task: "ZooTask") -> dict[str, float]:
    """By what the learning rate of each parameter is multiplied: ``layer_decay`` for each block below the head, and
    what the attention says of its own."""
    depths, theirs = task.depths(), lr_factors(task.network)
    top = max(depths.values())
    return {name: task.settings["layer_decay"] ** (top - depth) * theirs[name] for name, depth in depths.items()}


def keep_factors(task: "ZooTask") -> None:
    """Give groups of parameters their factors of a rate that Lightning's finder gave to all alike; call it when
    training starts, the finder's own included."""
    searching = search_by_factors(task.trainer, LR_FACTOR)
    for optimizer in task.trainer.optimizers:
        for group in optimizer.param_groups:
            if LR_FACTOR in group and (searching or group["lr"] == task.lr):
                group["lr"] *= group[LR_FACTOR]


def make_optimizer(task: "ZooTask") -> Any:
    """What ``configure_optimizers`` returns: the zoo's AdamW and schedule, or what was chosen in their place.

    A chosen optimizer gets all parameters that are trained, and its options apply to all of them alike; its learning
    rate is multiplied by the factors of ``layer_decay``, from block to block below the head, and of an attention's
    ``lr_factors``. Without a chosen scheduler its learning rate stays. A scheduler alone takes the place of AdamW's
    schedule.
    """
    chosen = task.chosen_optimizer
    if chosen is None or chosen.optimizer is None:
        optimizer: Optimizer = AdamW(
            parameter_groups(task),
            lr=task.lr,
            betas=(0.9, task.settings["beta2"]),
            # Lightning doesn't clip gradients for a fused optimizer in mixed precision, nor scale the loss of one
            fused="mixed" not in str(task.trainer.precision) and task.trainer.precision != "16-true",
        )
    else:
        optimizer = _make_chosen(task, chosen.optimizer)
    if chosen is None or (chosen.optimizer is None and chosen.lr_scheduler is None):
        schedule = LambdaLR(optimizer, task.schedule.share)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
    if chosen.lr_scheduler is None:
        return optimizer
    scheduler = _made(chosen.lr_scheduler, optimizer, "--lr_scheduler")
    if _are_lost(optimizer):
        name = type(scheduler).__name__
        rank_zero_warn(f"--lr_scheduler: {name} sets one rate for all parameters, so their factors of it aren't read")
    if isinstance(scheduler, ReduceLROnPlateau):
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": scheduler.monitor}}
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler}}


def _are_lost(optimizer: Optimizer) -> bool:
    """Whether groups of parameters don't begin at their factors of one rate, as a scheduler set rates of its own."""
    groups = optimizer.param_groups
    if not any(LR_FACTOR in group for group in groups):
        return False
    rates = [group.get("initial_lr", group["lr"]) / group.get(LR_FACTOR, 1.0) for group in groups]
    return bool(max(rates) > 1.001 * min(rates))


def _make_chosen(task: "ZooTask", chosen: Mapping[str, Any]) -> Optimizer:
    factors, groups = _lr_factors(task), dict[float, list[nn.Parameter]]()
    for name, parameter in task.network.named_parameters():
        if parameter.requires_grad:
            groups.setdefault(factors[name], []).append(parameter)
    optimizer: Optimizer = _made(chosen, [_group(groups[f], f) for f in sorted(groups)], "--optimizer")
    lr = optimizer.defaults.get("lr")
    if not isinstance(lr, (int, float)):
        if set(groups) != {1.0}:
            of_blocks = f"model.layer_decay {task.settings['layer_decay']}"
            given = of_blocks if task.settings["layer_decay"] != 1 else "an attention's factor of the learning rate"
            raise ZooError(
                f"got {type(optimizer).__name__}, whose learning rate is no number to multiply, beside {given}; leave "
                "one of them out",
                argument="--optimizer",
            )
        return optimizer
    if task.own_lr is None:  # else a finder found one
        task.own_lr = float(lr)
    for factor, group in zip(sorted(groups), optimizer.param_groups, strict=True):
        group["lr"] = task.lr * factor
    return optimizer


def _made(chosen: Mapping[str, Any], made_of: Any, argument: str) -> Any:
    try:
        return instantiate_class(made_of, dict(chosen))
    except (TypeError, ValueError) as error:
        reason = " ".join(str(error).split())[:160]
        raise ZooError(
            f"got {chosen['class_path']}, which can't be made ({reason}); give what it needs, see "
            f"{argument}.help {chosen['class_path'].rpartition('.')[2]}",
            argument=argument,
        ) from None


def tell_unread(task: "ZooTask") -> None:
    """Say which settings of a task a chosen optimizer or scheduler takes the place of, of those that were given."""
    chosen = task.chosen_optimizer
    if chosen is None:
        return
    unread = OWN if chosen.optimizer is not None else ("warmup", "min_lr")
    defaults = defaults_of(type(task))
    given = [f"model.{name}" for name in unread if task.settings[name] != defaults[name]]
    if given:
        which = "--optimizer" if chosen.optimizer is not None else "--lr_scheduler"
        rank_zero_info(f"{which}: takes the place of {', '.join(given)}, which isn't read")


def move_lr(trainer: pl.Trainer, factor: float) -> None:
    """Multiply the learning rates that a trainer's optimizers and schedulers begin with."""
    for optimizer in trainer.optimizers:
        for group in optimizer.param_groups:
            group["initial_lr" if "initial_lr" in group else "lr"] *= factor
    for config in trainer.lr_scheduler_configs:
        if hasattr(config.scheduler, "base_lrs"):
            config.scheduler.base_lrs = [base * factor for base in config.scheduler.base_lrs]
