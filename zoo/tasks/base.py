"""What the tasks of all families share: the network's birth from a data identity, checks on load, the optimizer."""

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from zoo.attention.packed import check_packed_layers
from zoo.errors import CheckpointMismatchError, ZooError
from zoo.identity import (
    CHECKPOINT_KEY,
    PROVENANCE,
    canonical_json,
    check_identity,
    differences,
    digest,
    read_checkpoint,
    read_claim,
)

IDENTITY_TENSOR = "data_identity"  # where a bare state dict keeps the identity, as the UTF-8 of its canonical JSON


def _add_identity(task: "ZooTask", state: dict[str, Any], prefix: str, metadata: Any) -> None:
    if task._identity is not None:
        binding = {name: value for name, value in task._identity.items() if name not in PROVENANCE}
        text = bytearray(canonical_json(binding).encode())
        state[f"{prefix}{IDENTITY_TENSOR}"] = torch.frombuffer(text, dtype=torch.uint8)


def _drop_identity(task: "ZooTask", state: dict[str, Any], prefix: str, *_: Any) -> None:
    """For a task inside another module, such as a moving average of its weights, which checks nothing."""
    state.pop(f"{prefix}{IDENTITY_TENSOR}", None)


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


def _listed(source: Mapping[str, Any] | None) -> str:
    """Where data came from, in one line: counts of each class and fingerprints are for programs."""
    if source is None:
        return "unknown data"
    told = {name: value for name, value in source.items() if name != "fingerprint" and not isinstance(value, Mapping)}
    return ", ".join(f"{name} {value}" for name, value in told.items())


def plain(value: object) -> Any:
    """A copy in JSON's types: tuples become lists."""
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


class ZooTask(pl.LightningModule, ABC):
    """A LightningModule whose network is built from the data's identity and saved with it.

    The network comes into being in ``configure_model``, from the data module's identity, or from the checkpoint's where
    there is no data module. A checkpoint carries task, settings, data and identity under the key ``zoo``, in plain
    types. Loading compares all of them, and every tensor's name and shape, before it copies the first.

    Args:
        lr: AdamW's learning rate at its height.
        weight_decay: decoupled decay, on matrices only.
        beta2: AdamW's second decay rate.
        warmup: share of the run's steps in which the learning rate rises to ``lr``; then it falls along a cosine.
        min_lr: share of ``lr`` that is left at the end.
    """

    network_settings: ClassVar[tuple[str, ...]]
    """Names of the hyperparameters that decide what the network is."""
    mismatch_advice: ClassVar[str]
    """What to do about a checkpoint that was made for other data."""

    optimizer_settings: ClassVar[tuple[str, ...]] = ("lr", "weight_decay", "beta2")
    """Names of the hyperparameters that a run keeps from its beginning, as its optimizer's state does."""

    predictions_suffix: ClassVar[str] = ".csv"
    """What kind of file `lightning predict` writes if no path is given."""

    network: nn.Module

    def __init__(self, lr: float, weight_decay: float, beta2: float, warmup: float, min_lr: float) -> None:
        super().__init__()
        for name, value, good, rule in (
            ("lr", lr, 0 < lr < math.inf, "must be a positive number"),
            ("weight_decay", weight_decay, 0 <= weight_decay < math.inf, "must be 0 or more"),
            ("beta2", beta2, 0 <= beta2 < 1, "must lie in [0, 1)"),
            ("warmup", warmup, 0 <= warmup < 1, "is a share of the run and must lie in [0, 1)"),
            ("min_lr", min_lr, 0 <= min_lr <= 1, "is a share of lr and must lie in [0, 1]"),
        ):
            if not good:
                raise ZooError(f"model.{name}: got {value}; {rule}")
        self.lr, self.weight_decay, self.beta2, self.warmup, self.min_lr = lr, weight_decay, beta2, warmup, min_lr
        self._identity: dict[str, Any] | None = None
        self.register_state_dict_post_hook(_add_identity)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_drop_identity)  # type: ignore[no-untyped-call]
        self._step_seed: int | None = None

    @abstractmethod
    def build(self, identity: Mapping[str, Any]) -> None:
        """Make ``self.network``, and whatever else depends on the data, from its identity."""

    # ------------------------------------------------------------------ identity

    @property
    def is_built(self) -> bool:
        return "network" in self._modules

    @property
    def data_identity(self) -> dict[str, Any]:
        """The identity of the data this task was built for.

        Raises:
            ZooError: while there is neither data nor checkpoint.
        """
        if self._identity is None:
            raise ZooError(
                f"{type(self).__name__}: not built yet; fit it with a data module, or load a checkpoint with "
                "load_from_checkpoint"
            )
        return self._identity

    def configure_model(self) -> None:
        """Build the network from the data module's identity, once."""
        if self.is_built:
            return
        if self._identity is None:
            datamodule = getattr(self._trainer, "datamodule", None) if self._trainer is not None else None
            if datamodule is None:
                return  # load_from_checkpoint calls this before the identity is known
            self._identity = datamodule.identity()
        self.build(self._identity)

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, *args: Any, **settings: Any) -> Self:
        """As Lightning's, of a local file after the checks that the command line makes.

        Args:
            checkpoint_path: the file.
            args: as in Lightning: where to put the tensors, and so on.
            settings: hyperparameters that replace the checkpoint's.

        Raises:
            ZooError: if the file is missing, damaged, holds code, or is of another task.
        """
        if isinstance(checkpoint_path, (str, Path)) and "://" not in str(checkpoint_path):
            claim = read_claim(read_checkpoint(checkpoint_path), checkpoint_path)
            here = f"{cls.__module__}.{cls.__qualname__}"
            if claim["task"] != here:
                raise CheckpointMismatchError(f"checkpoint: {checkpoint_path} is of {claim['task']}, not of {here}")
        return super().load_from_checkpoint(checkpoint_path, *args, **settings)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        datamodule = getattr(self._trainer, "datamodule", None) if self._trainer is not None else None
        checkpoint[CHECKPOINT_KEY] = {
            "task": f"{type(self).__module__}.{type(self).__qualname__}",
            "settings": plain(self.hparams),
            "data": None
            if datamodule is None
            else {
                "class_path": f"{type(datamodule).__module__}.{type(datamodule).__qualname__}",
                "init_args": plain(datamodule.hparams),
            },
            "identity": self.data_identity,
            "digest": digest(self.data_identity),
            "step_seed": self._step_seed,
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Compare everything the checkpoint claims with this task; on a difference nothing is loaded.

        Raises:
            CheckpointMismatchError: for another task, other data, another network, or other tensors.
        """
        claim = read_claim(checkpoint, "file")
        here = f"{type(self).__module__}.{type(self).__qualname__}"
        if claim["task"] != here:
            raise CheckpointMismatchError(
                f"checkpoint: of {claim['task']}, but this is {here}; use the task it was made by"
            )
        fitting = self._trainer is not None and self._trainer.state.fn == "fit"
        if fitting and "optimizer_states" not in checkpoint:
            raise ZooError(
                "--ckpt_path: got a checkpoint of weights alone, and fit goes on with the optimizer's state, which it "
                "lacks; use it with test and predict, or go on from the run's last.ckpt"
            )
        self._step_seed = claim.get("step_seed")
        if fitting:
            kept = [
                f"model.{name}: {claim['settings'].get(name)} in the checkpoint, {self.hparams[name]} here"
                for name in self.optimizer_settings
                if claim["settings"].get(name) != self.hparams[name]
            ]
            if kept:
                raise CheckpointMismatchError(
                    f"checkpoint: {'; '.join(kept)}. A run goes on with the optimizer it had; leave these settings out"
                )
        if not self.is_built:
            self._identity = claim["identity"]
            self.build(self._identity)
        check_identity(claim["identity"], self.data_identity, self.mismatch_advice)
        saved = {name: claim["settings"].get(name) for name in self.network_settings}
        current = {name: plain(self.hparams)[name] for name in self.network_settings}
        if found := differences(saved, current):
            raise CheckpointMismatchError(
                f"checkpoint: of another network. {'; '.join(found)}. Leave these settings out to take the "
                "checkpoint's, or train anew without --ckpt_path"
            )
        # load_state_dict looks at the tensors, before it copies any
        old, new = claim["identity"].get("source"), self.data_identity.get("source")
        if old != new and self._trainer is not None and self._trainer.state.fn != "predict":
            rank_zero_warn(f"The checkpoint was trained on {_listed(old)}; this is {_listed(new)}: figures may differ")

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As PyTorch's, after every check has passed: data identity, packed layers, names and shapes of all tensors.

        Raises:
            CheckpointMismatchError: and then nothing has been copied.
        """
        rest = dict(state_dict)
        saved = rest.pop(IDENTITY_TENSOR, None)
        if saved is not None and self._identity is not None:
            check_identity(_identity_from_tensor(saved), self._identity, self.mismatch_advice)
        check_packed_layers(self, rest)
        self._check_tensors(rest, strict)
        return super().load_state_dict(rest, strict, assign)

    def _check_tensors(self, saved: Mapping[str, Tensor], strict: bool) -> None:
        own = {name: value for name, value in self.state_dict().items() if name != IDENTITY_TENSOR}
        optional = {name for name in own if name.endswith(("index_digest", "identity"))}  # their absence is no error
        found = [f"{name} is missing" for name in own if name not in saved and name not in optional] if strict else []
        found += [f"{name} is unknown" for name in saved if name not in own] if strict else []
        found += [
            f"{name} is {tuple(saved[name].shape)}, not {tuple(own[name].shape)}"
            for name in own
            if name in saved and saved[name].shape != own[name].shape
        ]
        if found:
            raise CheckpointMismatchError(
                f"checkpoint: its tensors don't fit this network. {'; '.join(found[:5])}"
                f"{f'; and {len(found) - 5} more' if len(found) > 5 else ''}. Use the settings it was trained with"
            )

    # ------------------------------------------------------------------ training

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Seed each step by its number, so that a resumed run draws the dropout masks an unbroken one would."""
        if self._step_seed is None:
            self._step_seed = torch.initial_seed() % (1 << 31)
        number = self.trainer.fit_loop.total_batch_idx * self.trainer.world_size + self.trainer.global_rank
        torch.manual_seed(self._step_seed * 1_000_003 + number)
        np.random.seed((self._step_seed * 1_000_003 + number) % (1 << 32))  # timm's Mixup draws from NumPy's

    def on_before_zero_grad(self, optimizer: Any) -> None:
        if self.trainer.global_step % 50 == 1:
            self._check_weights()

    def on_validation_start(self) -> None:
        if self.trainer.state.fn == "fit" and not self.trainer.sanity_checking:
            self._check_weights()

    def _check_weights(self) -> None:
        """End a run whose weights are no numbers any more, instead of saving them as its best."""
        if not all(torch.isfinite(p).all() for p in self.parameters()):
            raise ZooError(
                f"model.lr: got {self.lr}, and at step {self.trainer.global_step} some weights are no finite numbers; "
                "training diverged, so lower it"
            )

    def parameter_groups(self) -> list[dict[str, Any]]:
        """What the optimizer trains, in groups of equal weight decay and learning rate."""
        trained = [p for p in self.parameters() if p.requires_grad]
        matrices = [p for p in trained if p.ndim >= 2]
        others = [p for p in trained if p.ndim < 2]
        return [{"params": matrices, "weight_decay": self.weight_decay}, {"params": others, "weight_decay": 0.0}]

    def configure_optimizers(self) -> Any:
        """AdamW with decay on matrices only; linear warm-up, then cosine decay over the trainer's own step budget."""
        optimizer = torch.optim.AdamW(
            self.parameter_groups(),
            lr=self.lr,
            betas=(0.9, self.beta2),
            # Lightning doesn't clip gradients for a fused optimizer in mixed precision, nor scale the loss of one
            fused="mixed" not in str(self.trainer.precision) and self.trainer.precision != "16-true",
        )
        budget = self.trainer.estimated_stepping_batches
        warmup = max(1, round(self.warmup * budget)) if math.isfinite(budget) else 100

        def factor(step: int) -> float:
            if step < warmup:
                return (step + 1) / warmup
            if not math.isfinite(budget):
                return 1.0  # no end in sight: stay
            done = min(1.0, (step - warmup) / max(1, budget - warmup))
            return self.min_lr + (1 - self.min_lr) * (1 + math.cos(math.pi * done)) / 2

        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": LambdaLR(optimizer, factor), "interval": "step"}}
