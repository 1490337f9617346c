"""What a task writes into a checkpoint, compares when it loads one, and refuses when a run goes on from one."""

import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from zoo.attention.packed import check_packed_layers
from zoo.checkpoint.identity import (
    CHECKPOINT_KEY,
    PROVENANCE,
    canonical_json,
    check_identity,
    differences,
    digest,
    read_claim,
)
from zoo.checkpoint.transfer import read_transfers
from zoo.errors import CheckpointMismatchError, ZooError, listed
from zoo.private.lightning import keep_to_own_folder
from zoo.tasks.settings import plain
from zoo.tasks.start import NOT_BUILT, altered

if TYPE_CHECKING:
    from zoo.tasks.base import ZooTask

GRADIENTS = "gathered_gradients"  # where a checkpoint in the midst of a step's batches keeps their gradients so far
IDENTITY_TENSOR = "data_identity"  # where a bare state dict keeps the identity, as the UTF-8 of its canonical JSON
_STATES = {"state_dict", "current_model_state"}  # the second beside a moving average, which is then the first


def class_path(kind: type) -> str:
    """The name under which a checkpoint keeps a class."""
    return f"{kind.__module__}.{kind.__qualname__}"


def fitting(task: "ZooTask") -> bool:
    """Whether the task is being trained, rather than tested or loaded."""
    return task.trainer_or_none is not None and task.trainer.state.fn == "fit"


# ---------------------------------------------------------------------- what is written


def claim_of(task: "ZooTask", datamodule: pl.LightningDataModule | None, identity: Mapping[str, Any]) -> dict[str, Any]:
    """What a checkpoint of a task says of itself, in JSON's types.

    Args:
        task: whose weights it holds.
        datamodule: what it was trained on; None if that isn't known.
        identity: of the data.
    """
    data = None
    if datamodule is not None:
        data = {"class_path": class_path(type(datamodule)), "init_args": plain(datamodule.hparams)}
    return {
        "task": class_path(type(task)),
        "settings": plain(task.settings),
        "data": data,
        "identity": identity,
        "digest": digest(identity),
        "step_seed": task.step_seed,
        "transfer": [transfer.plain() for transfer in task.start.transfers],
    }


def write_claim(task: "ZooTask", checkpoint: dict[str, Any]) -> None:
    """Put into a checkpoint what it is, and what a run that goes on from it needs beyond Lightning's."""
    trainer = task.trainer_or_none
    claim = checkpoint[CHECKPOINT_KEY] = claim_of(task, getattr(trainer, "datamodule", None), task.data_identity)
    if trainer is not None:
        claim["trainer"] = _of_the_trainer(trainer)
        if task.chosen_optimizer is not None:
            claim["optimizer"] = task.chosen_optimizer.plain()
        if _is_gathering(trainer):  # each process has its own
            gathered = {name: p.grad for name, p in task.named_parameters() if p.grad is not None}
            checkpoint[GRADIENTS] = {name: trainer.strategy.reduce(grad.clone()) for name, grad in gathered.items()}
    if task.start.adapter is not None:
        claim["adapter"], frozen = dict(task.start.adapter), task.start.frozen()
        for part in _STATES & set(checkpoint):
            checkpoint[part] = {name: tensor for name, tensor in checkpoint[part].items() if name not in frozen}


def _of_the_trainer(trainer: pl.Trainer) -> dict[str, Any]:
    return {
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        "gradient_clip_val": trainer.gradient_clip_val,
        "precision": str(trainer.precision),
        "limit_train_batches": trainer.limit_train_batches,
        "processes": trainer.world_size,
    }


def _is_gathering(trainer: pl.Trainer) -> bool:
    """Whether gradients of some batches wait for the others of their step."""
    batches = trainer.accumulate_grad_batches
    return trainer.state.fn == "fit" and not trainer.is_last_batch and (trainer.fit_loop.batch_idx + 1) % batches > 0


# ---------------------------------------------------------------------- what is compared


def check_claim(task: "ZooTask", checkpoint: dict[str, Any]) -> None:
    """Compare everything a checkpoint claims with a task, and build the task's network if it has none yet.

    ``load_state_dict`` looks at the tensors after that, before it copies any.

    Raises:
        CheckpointMismatchError: for another task, other data or another network.
        ZooError: for a checkpoint that a run can't go on from.
    """
    claim = read_claim(checkpoint, "file")
    here = class_path(type(task))
    if claim["task"] != here:
        raise CheckpointMismatchError(
            f"of {claim['task']}, but this is {here}; use the task it was made by", argument="checkpoint"
        )
    if fitting(task):
        _check_goes_on(task, claim, checkpoint)
    task.step_seed = claim.get("step_seed")
    task.start.transfers = read_transfers(claim.get("transfer", []))
    if fitting(task):
        _tell_changed(task, claim)
        keep_to_own_folder(task.trainer, checkpoint.get("callbacks") or {}, task.trainer.ckpt_path)
        task.gathered = dict(checkpoint.get(GRADIENTS) or {})
    if not task.is_built:
        try:
            task.build_and_freeze(claim["identity"])
        except NOT_BUILT as error:
            raise ZooError(altered(error), argument="checkpoint") from None
    check_identity(claim["identity"], task.data_identity, task.mismatch_advice)
    saved, current = task.network_of(claim["settings"]), task.network_of(plain(task.settings))
    if found := differences(plain(saved), plain(current)):
        raise CheckpointMismatchError(
            f"of another network. {'; '.join(found)}. Leave these settings out to take the "
            "checkpoint's, or train anew without --ckpt_path",
            argument="checkpoint",
        )
    if fitting(task) and not finders(task.trainer):  # which go back to where they began, with what they found
        _check_kept(task, claim)
    if claim.get("adapter"):
        task.start.attach(claim)
        for part in _STATES & set(checkpoint):
            checkpoint[part] = task.start.complete(checkpoint[part])
    old, new = claim["identity"].get("source"), task.data_identity.get("source")
    if _are_other(old, new) and task.trainer_or_none is not None and task.trainer.state.fn != "predict":
        rank_zero_warn(f"The checkpoint was trained on {_listed(old)}; this is {_listed(new)}: figures may differ")


def _check_goes_on(task: "ZooTask", claim: Mapping[str, Any], checkpoint: Mapping[str, Any]) -> None:
    """Raise ZooError for a run that was also told to start from weights, and for a checkpoint without an optimizer."""
    given = task.settings["pretrained"]
    moved = claim.get("adapter") and task.settings["lora_rank"]  # the base's digest is compared instead
    if given is not None and given != claim["settings"].get("pretrained") and not moved:
        raise ZooError(
            f"model.pretrained: got {given} beside --ckpt_path. The one starts a new run from weights, the other "
            "goes on with a run and its optimizer; leave one of them out"
        )
    if "optimizer_states" not in checkpoint:
        raise ZooError(
            "--ckpt_path: got a checkpoint of weights alone, and fit goes on with the optimizer's state, which it "
            "lacks; use it with test and predict, start a new run from it with --model.pretrained, or go on from "
            "the run's last.ckpt"
        )


def _check_kept(task: "ZooTask", claim: Mapping[str, Any]) -> None:
    """Raise CheckpointMismatchError if a run that goes on would be given other settings than it began with."""
    saved, mine = plain(task.kept_of(claim["settings"])), plain(task.kept_of(plain(task.settings)))
    then = {f"model.{name}": (saved.get(name), mine.get(name)) for name in sorted({*saved, *mine})}
    chosen = {} if task.chosen_optimizer is None else task.chosen_optimizer.plain()
    began = claim.get("optimizer") or {}
    then |= {f"--{name}": (began.get(name), chosen.get(name)) for name in ("optimizer", "lr_scheduler")}
    datamodule = getattr(task.trainer, "datamodule", None)
    if claim["data"] is not None and isinstance(datamodule, pl.LightningDataModule):
        saved, here = claim["data"]["init_args"], plain(datamodule.hparams)
        known = [name for name in getattr(datamodule, "kept_settings", ()) if name in saved]
        then |= {f"data.{name}": (saved[name], here[name]) for name in known}
    if found := [f"{name}: {old} in the checkpoint, {new} here" for name, (old, new) in then.items() if old != new]:
        raise CheckpointMismatchError(
            f"{'; '.join(found)}. A run goes on with the settings it had; leave these settings out, "
            "or begin a new run from the checkpoint's weights with --model.pretrained",
            argument="checkpoint",
        )


def finders(trainer: pl.Trainer) -> list[pl.Callback]:
    """Lightning's finders of a learning rate or a batch size among a trainer's callbacks."""
    callbacks: list[pl.Callback] = getattr(trainer, "callbacks", [])
    return [c for c in callbacks if isinstance(c, (BatchSizeFinder, LearningRateFinder))]


def check_finders(trainer: pl.Trainer) -> None:
    """Raise ZooError if a run that goes on from a checkpoint is to look for a learning rate or a batch size."""
    if found := finders(trainer):
        raise ZooError(
            f"trainer.callbacks: got {type(found[0]).__name__} beside --ckpt_path; it belongs to the "
            "beginning of a run, so take it out to go on with one"
        )


def _tell_changed(task: "ZooTask", claim: Mapping[str, Any]) -> None:
    """Say in one line what of the trainer is other than it was when the checkpoint was written."""
    before = dict(claim.get("trainer") or {})
    changed = [
        f"{name} {value}, which was {before[name]}"
        for name, value in _of_the_trainer(task.trainer).items()
        if before.get(name, value) != value
    ]
    if changed:
        rank_zero_warn(f"The run goes on with {'; '.join(changed)}: what follows is other than it would have been")
    seed = os.environ.get("PL_GLOBAL_SEED")
    if seed is not None and task.step_seed not in (None, int(seed) % (1 << 31)):
        rank_zero_info(f"seed_everything: {seed} here, but a run keeps the seed it began with, {task.step_seed}")


def _are_other(old: Mapping[str, Any] | None, new: Mapping[str, Any] | None) -> bool:
    """Whether two accounts of where data came from contradict each other; an older one may say less."""
    if old is None or new is None:
        return old is not new
    return any(old[name] != new[name] for name in {*old} & {*new})


def _listed(source: Mapping[str, Any] | None) -> str:
    """Where data came from, in one line: counts of each class and fingerprints are for programs."""
    if source is None:
        return "unknown data"
    shown = {name: value for name, value in source.items() if name != "fingerprint" and not isinstance(value, Mapping)}
    return ", ".join(f"{name} {value}" for name, value in shown.items())


# ---------------------------------------------------------------------- tensors


def take_gathered(task: "ZooTask") -> None:
    """Go on gathering the gradients of a step that a checkpoint was written in the midst of."""
    own = dict(task.named_parameters())
    if wrong := [name for name, grad in task.gathered.items() if not _fits(grad, own.get(name))]:
        raise ZooError(
            f"its gradients of {listed(wrong)} fit no tensor; it was altered, take another", argument="checkpoint"
        )
    for name, grad in task.gathered.items():
        own[name].grad = grad.to(own[name])
    task.gathered = {}


def _fits(grad: object, parameter: Tensor | None) -> bool:
    return isinstance(grad, Tensor) and parameter is not None and grad.shape == parameter.shape


def add_identity(task: "ZooTask", state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Put the identity into a state dict, as a tensor; a hook of PyTorch's."""
    if task.identity is not None:
        binding = {name: value for name, value in task.identity.items() if name not in PROVENANCE}
        text = bytearray(canonical_json(binding).encode())
        state[f"{prefix}{IDENTITY_TENSOR}"] = torch.frombuffer(text, dtype=torch.uint8)


def drop_identity(task: "ZooTask", state: dict[str, Any], prefix: str, *_: Any) -> None:
    """For a task inside another module, such as a moving average of its weights, which checks nothing."""
    state.pop(f"{prefix}{IDENTITY_TENSOR}", None)


def checked_tensors(task: "ZooTask", state: Mapping[str, Any], strict: bool) -> dict[str, Tensor]:
    """A state dict without its identity, once that, packed layers, and names and shapes of all tensors are right.

    Raises:
        CheckpointMismatchError: for anything else.
    """
    rest = dict(state)
    identity = rest.pop(IDENTITY_TENSOR, None)
    if identity is not None and task.identity is not None:
        check_identity(_identity_from_tensor(identity), task.identity, task.mismatch_advice)
    check_packed_layers(task, rest)
    own = {name: value for name, value in task.state_dict().items() if name != IDENTITY_TENSOR}
    optional = {name for name in own if name.endswith(("index_digest", "identity"))}  # their absence is no error
    found = [f"{name} is missing" for name in own if name not in rest and name not in optional] if strict else []
    found += [f"{name} is unknown" for name in rest if name not in own] if strict else []
    found += [
        f"{name} is {tuple(rest[name].shape)}, not {tuple(own[name].shape)}"
        for name in own
        if name in rest and rest[name].shape != own[name].shape
    ]
    if found:
        raise CheckpointMismatchError(
            f"its tensors don't fit this network. {'; '.join(found[:5])}"
            f"{f'; and {len(found) - 5} more' if len(found) > 5 else ''}. Use the settings it was trained with",
            argument="checkpoint",
        )
    return rest


def _identity_from_tensor(saved: Tensor) -> dict[str, Any]:
    try:
        identity = json.loads(bytes(saved.cpu().numpy()).decode())
    except (ValueError, TypeError):
        raise CheckpointMismatchError(
            f"{IDENTITY_TENSOR}: not the UTF-8 text of an identity; the checkpoint was damaged, so take another copy"
        ) from None
    if not isinstance(identity, dict):
        raise CheckpointMismatchError(f"{IDENTITY_TENSOR}: got a {type(identity).__name__}, not an identity")
    return identity
