"""What the tasks of all families share: the network's birth from a data identity, checks on load, the optimizer."""

import inspect
import json
import math
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, cast

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torchmetrics import Metric

from zoo.adapters import BASE, add_lora, merge_lora, projections
from zoo.attention.packed import check_packed_layers
from zoo.checkpoint.checkpoint import Checkpoint
from zoo.checkpoint.identity import (
    CHECKPOINT_KEY,
    PROVENANCE,
    canonical_json,
    check_identity,
    check_plain,
    differences,
    digest,
    read_claim,
)
from zoo.checkpoint.transfer import TensorTransfer, read_transfers, summary
from zoo.checkpoint.writing import CheckedCheckpointIO, is_usual
from zoo.errors import CheckpointMismatchError, ZooError, listed
from zoo.tasks.mends import average_no_indices, close_finished_epoch, keep_to_own_folder, put_off_stop, stop
from zoo.tasks.pretrained import NETWORK, Pretrained

GRADIENTS = "gathered_gradients"  # where a checkpoint in the midst of a step's batches keeps their gradients so far
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


_ADAPTING = ("pretrained", "on_mismatch", "lora_rank", "lora_alpha", "lora_dropout", "renamed")
_STATES = {"state_dict", "current_model_state"}  # the second beside a moving average, which is then the first
_NOT_BUILT = (
    TypeError,
    LookupError,
    ValueError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
    MemoryError,
)  # from settings or identities without sense


def _altered(error: Exception) -> str:
    reason = " ".join(str(error).split())[:160]
    return f"its settings or its data identity make no sense ({type(error).__name__}: {reason}); take another copy"


def _other_base(adapter: Mapping[str, str], given: str, found: str) -> CheckpointMismatchError:
    return CheckpointMismatchError(
        f"an adapter for {adapter['base']} with weights {adapter['digest'][:12]}..., but {given} has "
        f"{found[:12]}...; give the base it was trained on with --model.pretrained",
        argument="checkpoint",
    )


def _fits(grad: object, parameter: Tensor | None) -> bool:
    return isinstance(grad, Tensor) and parameter is not None and grad.shape == parameter.shape


def layer_depths(network: nn.Module, layers: str, stem: tuple[str, ...]) -> dict[str, int]:
    """How far up each parameter of a stack is: 0 in ``stem``, 1 to n in the layers, n + 1 after them."""
    n = len(cast(nn.ModuleList, network.get_submodule(layers)))
    depths = {}
    for name, _ in network.named_parameters():
        if name.startswith(f"{layers}."):
            depths[name] = int(name.removeprefix(f"{layers}.").partition(".")[0]) + 1
        else:
            depths[name] = 0 if name.startswith(stem) else n + 1
    return depths


def defaults_of(kind: type) -> dict[str, Any]:
    """The settings of a class with their defaults, those of its bases too."""
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__[:-1]):
        found |= {name: plain(p.default) for name, p in inspect.signature(base).parameters.items()}
    return found


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
        warmup: share of the run's steps in which the learning rate rises to lr; then it falls along a cosine.
        min_lr: share of lr that is left at the end.
        pretrained: weights to start from: a checkpoint file of this zoo, a name of zoo list, or an address. Settings of
            the network that are left as they are by default become the pretrained model's.
        on_mismatch: pretrained weights for other data or another network: error, or adapt: carry over what fits by
            name, and print what became of the rest.
        train: what to train: all, head, or last_N (the last N blocks, last norm and head). The rest stays as it is,
            without dropout.
        layer_decay: factor of the learning rate from each block to the one before; 1 for none.
        lora_rank: above 0, train adapters of this rank beside the projections of pretrained weights (LoRA), and in full
            the head and whatever wasn't kept; checkpoints hold these alone, and load onto the same weights only. Needs
            peft.
        lora_alpha: the adapters are scaled by lora_alpha / lora_rank; left out, twice the rank.
        lora_dropout: dropout probability in front of the adapters.
        compile: compile the network for training (torch.compile); checkpoints are the same with and without.
    """

    network_settings: ClassVar[tuple[str, ...]]
    """Names of the hyperparameters that decide what the network is."""
    mismatch_advice: ClassVar[str]
    """What to do about a checkpoint that was made for other data."""

    pretrained_advice: ClassVar[str] = "To carry over what fits, set model.on_mismatch to adapt"
    """What to do about weights to start from that were made for other data."""

    free_settings: ClassVar[tuple[str, ...]] = ("pretrained", "on_mismatch", "renamed", "compile")
    """Names of the hyperparameters that may change when a run goes on, since nothing that is learned depends on them
    from then on. All others a run keeps from its beginning."""

    predictions_suffix: ClassVar[str] = ".csv"
    """What kind of file `lightning predict` writes if no path is given."""

    network: nn.Module

    def __init__(
        self,
        lr: float,
        weight_decay: float,
        beta2: float,
        warmup: float,
        min_lr: float,
        pretrained: str | None = None,
        on_mismatch: Literal["error", "adapt"] = "error",
        train: str = "all",
        layer_decay: float = 1.0,
        lora_rank: int = 0,
        lora_alpha: float | None = None,
        lora_dropout: float = 0.0,
        compile: bool = False,
    ) -> None:
        super().__init__()
        for name, value, good, rule in (
            ("lr", lr, 0 < lr < math.inf, "must be a positive number"),
            ("weight_decay", weight_decay, 0 <= weight_decay < math.inf, "must be 0 or more"),
            ("beta2", beta2, 0 <= beta2 < 1, "must lie in [0, 1)"),
            ("warmup", warmup, 0 <= warmup < 1, "is a share of the run and must lie in [0, 1)"),
            ("min_lr", min_lr, 0 <= min_lr <= 1, "is a share of lr and must lie in [0, 1]"),
            ("layer_decay", layer_decay, 0 < layer_decay <= 1, "must lie in (0, 1]"),
            (
                "pretrained",
                pretrained,
                pretrained != "",
                "must be a file, a name of zoo list or an address, or left out",
            ),
            ("lora_rank", lora_rank, lora_rank >= 0, "must be 0 or more"),
            ("lora_alpha", lora_alpha, lora_alpha is None or 0 < lora_alpha < math.inf, "must be a positive number"),
            ("lora_alpha", lora_alpha, lora_alpha is None or lora_rank, "needs a lora_rank above 0"),
            ("lora_dropout", lora_dropout, 0 <= lora_dropout < 1, "must lie in [0, 1)"),
            ("on_mismatch", on_mismatch, on_mismatch in ("error", "adapt"), "must be error or adapt"),
            (
                "train",
                train,
                re.fullmatch(r"all|head|last_[1-9]\d*", str(train)),
                "must be all, head, or last_N such as last_2",
            ),
        ):
            if not good:
                raise ZooError(f"model.{name}: got {value!r}; {rule}")
        if lora_rank and (pretrained is None or train != "all"):
            raise ZooError(
                f"model.lora_rank: got {lora_rank}; it adapts weights that there are and decides what is trained, so "
                "set model.pretrained, and leave model.train out"
            )
        self.save_hyperparameters()  # of the subclass too
        self._lr, self._budget = lr, math.inf
        self.weight_decay, self.beta2, self.warmup, self.min_lr = weight_decay, beta2, warmup, min_lr
        self._identity: dict[str, Any] | None = None
        self.register_state_dict_post_hook(_add_identity)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_drop_identity)  # type: ignore[no-untyped-call]
        self._step_seed: int | None = None
        self._gathered: dict[str, Tensor] = {}  # gradients that a checkpoint was written in the midst of
        self.transfers: list[TensorTransfer] = []
        self._started_from: str | None = None
        self._not_started: ZooError | None = None
        self._other_settings: dict[str, str] = {}
        self._is_loaded = self._told = self._told_to_stop = False
        self.has_begun = False
        """Whether training has started, so that everything a run goes on from has been taken."""
        self._adapter: dict[str, str] | None = None  # what the adapters' base was called, and the digest of its weights
        self.goes_on_from: str | None = None
        """The checkpoint that is going to be loaded, where that is known: then no other weights are read."""

    @abstractmethod
    def build(self, identity: Mapping[str, Any]) -> None:
        """Make ``self.network``, and whatever else depends on the data, from its identity."""

    @classmethod
    def network_of(cls, settings: Mapping[str, Any]) -> dict[str, Any]:
        """What network settings mean: equal for two settings exactly where weights of one are weights of the other."""
        full = defaults_of(cls) | dict(settings)
        return {name: full[name] for name in cls.network_settings}

    @classmethod
    def kept_of(cls, settings: Mapping[str, Any]) -> dict[str, Any]:
        """What settings mean, beyond the network, that a run keeps from its beginning."""
        full = defaults_of(cls) | dict(settings)
        return {name: full[name] for name in full if name not in {*cls.free_settings, *cls.network_settings}}

    @abstractmethod
    def depths(self) -> dict[str, int]:
        """How far up each of the network's parameters is: 0 in the stem, 1 and more in the blocks, most in the head."""

    @abstractmethod
    def heads(self) -> tuple[str, ...]:
        """Names, or beginnings of names, of the parameters that turn the network's last state into its answer."""

    @abstractmethod
    def carry_over(self, source: Pretrained) -> tuple[dict[str, Tensor], list[TensorTransfer]]:
        """A state dict for the network from other weights, and what became of each tensor."""

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
        """Build the network from the data module's identity, once, and start a new run from the pretrained weights."""
        trainer = self._trainer
        datamodule = getattr(trainer, "datamodule", None) if trainer is not None else None
        if self.is_built:
            if datamodule is not None:
                check_identity(self.data_identity, datamodule.identity(), self.mismatch_advice)
            return
        if self._identity is None:
            if datamodule is None:
                return  # load_from_checkpoint calls this before the identity is known
            self._identity = datamodule.identity()
        fitting = trainer is not None and trainer.state.fn == "fit"
        claim: Mapping[str, Any] = {}
        source = None
        if self.hparams["pretrained"] and self.goes_on_from is not None:
            checkpoint = Checkpoint.open(self.goes_on_from)
            claim = checkpoint.claim
            self._take_settings(checkpoint.settings)  # on_load_checkpoint compares the others
        elif self.hparams["pretrained"] and fitting:
            try:
                source = self.find_pretrained()
                self._check_settings(source, self._take_settings(source.settings))
            except ZooError as error:  # a run that goes on does without; fit(ckpt_path=...) is known only on loading it
                self._not_started = error
        self.build(self._identity)
        self._freeze()
        if source is not None and self._not_started is None:
            try:
                self._start_from(source)
            except ZooError as error:
                self._not_started = error
        if claim.get("adapter"):
            self._attach_adapter(claim)  # now, so that an average of the weights has it too
        if self.hparams["compile"] and fitting:
            self.network.compile()  # in place: names of parameters stay

    # ------------------------------------------------------------------ other weights to start from

    def find_pretrained(self) -> Pretrained:
        """What ``pretrained`` stands for.

        Raises:
            ZooError: if it can't be had.
        """
        return Pretrained.read(self.hparams["pretrained"], f"{type(self).__module__}.{type(self).__qualname__}")

    def _take_settings(self, theirs: Mapping[str, Any]) -> dict[str, str]:
        """Settings of the network left at their defaults become ``theirs``; returns the others that differ."""
        defaults, taken = defaults_of(type(self)), []
        for name in self.network_settings:
            default, mine = defaults[name], plain(self.hparams[name])
            wanted = theirs.get(name, default)
            if mine == default != wanted:
                self.hparams[name] = wanted
                taken.append(f"{name} {wanted}")
        if taken:
            rank_zero_info(f"Settings of the weights: {', '.join(taken)}")
        here, there = plain(self.network_of(plain(self.hparams))), plain(self.network_of(theirs))
        return {
            f"model.{name}": f"{here.get(name)} here, {there.get(name)} there"
            for name in sorted({*here, *there})
            if here.get(name) != there.get(name)
        }

    def _check_settings(self, source: Pretrained, other: Mapping[str, str]) -> None:
        self._other_settings = dict(other)
        if other and self.hparams["on_mismatch"] == "error":
            found = "; ".join(f"{name} is {values}" for name, values in other.items())
            raise CheckpointMismatchError(
                f"model.pretrained: {source.given} is another network: {found}. Leave these settings out, or set "
                "model.on_mismatch to adapt to carry over what fits"
            )

    def _start_from(self, source: Pretrained) -> None:
        state, transfers = self._carried_over(source)
        changed = [transfer for transfer in transfers if transfer.outcome != "kept"]
        if all(transfer.outcome in ("new", "dropped") for transfer in transfers):
            raise CheckpointMismatchError(
                f"model.pretrained: {source.given} has nothing that fits {self.network_name}; leave the network's "
                "settings out to take its architecture"
            )
        if self.hparams["on_mismatch"] == "error":
            found = self._other_data(source)
            if not found and changed:
                found = [f"{transfer.tensor}: {transfer.outcome} ({transfer.note})" for transfer in changed]
            if found:
                more = f"; and {len(found) - 3} more" if len(found) > 3 else ""
                raise CheckpointMismatchError(
                    f"model.pretrained: {source.given} doesn't fit as it is: {'; '.join(found[:3])}{more}. "
                    f"{self.pretrained_advice}"
                )
        self.network.load_state_dict(state)
        self.transfers = [
            *transfers,
            *(TensorTransfer(name, "new", values) for name, values in self._other_settings.items()),
        ]
        self._started_from = source.given
        if self.hparams["lora_rank"]:
            self._add_adapter(source)

    def _carried_over(self, source: Pretrained) -> tuple[dict[str, Tensor], list[TensorTransfer]]:
        try:
            return self.carry_over(source)
        except _NOT_BUILT as error:
            raise ZooError(f"model.pretrained: {source.given}: {_altered(error)}") from None

    # ------------------------------------------------------------------ adapters

    def _add_adapter(self, source: Pretrained) -> None:
        """Put adapters beside the projections; train them, the head, and what the base has no weights for."""
        h = self.hparams
        full = {transfer.tensor for transfer in self.transfers if transfer.outcome != "kept"}
        depths = self.depths()
        heads = {name for name in depths if self.heads() and name.startswith(self.heads())}
        alpha = 2.0 * h["lora_rank"] if h["lora_alpha"] is None else h["lora_alpha"]
        add_lora(self.network, projections(self.network, depths), h["lora_rank"], alpha, h["lora_dropout"])
        for name, parameter in self.network.named_parameters():
            parameter.requires_grad = ".lora_" in name or name.replace(BASE, ".") in full | heads
        self._rest_frozen()
        self._adapter = {"base": source.given, "digest": source.digest()}

    def _attach_adapter(self, claim: Mapping[str, Any]) -> None:
        """Put the base's weights into the network, and adapters like a checkpoint's beside them.

        Raises:
            ZooError: if the base can't be had, or isn't the one the adapters were trained on.
        """
        adapter, settings = claim["adapter"], claim["settings"]
        if not (
            isinstance(adapter, dict)
            and all(isinstance(adapter.get(name), str) for name in ("base", "digest"))
            and isinstance(settings.get("lora_rank"), int)
            and settings["lora_rank"] > 0
        ):
            raise ZooError("what it says of its adapter was altered; take another", argument="checkpoint")
        self.transfers = read_transfers(claim.get("transfer", []))  # what wasn't kept is trained in full
        h = self.hparams
        if h["lora_rank"]:  # else a config that doesn't mention the adapter
            for name in ("lora_rank", "lora_alpha"):
                if h[name] != settings.get(name):
                    raise CheckpointMismatchError(
                        f"model.{name}: {settings.get(name)} in the checkpoint, {h[name]} here; leave it out",
                        argument="checkpoint",
                    )
        given = h["pretrained"] or settings["pretrained"]
        before = {name: h[name] for name in _ADAPTING if name in h}
        h.update({name: settings[name] for name in _ADAPTING if name in settings} | {"pretrained": given})
        try:
            if self._adapter is None:
                self._add_base(given, adapter)
            elif self._adapter["digest"] != adapter["digest"]:
                raise _other_base(adapter, given, self._adapter["digest"])
        except ZooError:
            h.update(before)
            raise

    def _add_base(self, given: str, adapter: Mapping[str, str]) -> None:
        try:
            source = self.find_pretrained()
        except ZooError as error:
            reason = error.text.partition(";")[0]
            raise ZooError(
                f"an adapter for {adapter['base']}, which can't be read ({reason}); give the place of its "
                "base with --model.pretrained",
                argument="checkpoint",
            ) from None
        if (found := source.digest()) != adapter["digest"]:
            raise _other_base(adapter, given, found)
        self.network.load_state_dict(self._carried_over(source)[0])
        self._add_adapter(source)

    def _complete(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """An adapter's tensors with those of its base, which the network has."""
        own = self.network.state_dict()
        missing = {f"{NETWORK}{name}": tensor for name, tensor in own.items() if f"{NETWORK}{name}" not in tensors}
        trained = {f"{NETWORK}{name}" for name, p in self.network.named_parameters() if p.requires_grad}
        return {**{name: tensor for name, tensor in missing.items() if name not in trained}, **tensors}

    def merge_adapter(self) -> None:
        """Add the adapters to the weights they stand beside; the task is an ordinary one from then on."""
        merge_lora(self.network)
        self._adapter = None
        self.hparams.update({"lora_rank": 0, "lora_alpha": None, "lora_dropout": 0.0})

    def _other_data(self, source: Pretrained) -> list[str]:
        """Every way in which the pretrained model's data differ from these."""
        return differences(source.identity, self.data_identity)

    def _tell_start(self) -> None:
        """Say what the run starts from, or why it can't: after a checkpoint was loaded, before any callback's turn."""
        if self._not_started is not None:
            raise self._not_started
        if self._told:  # a finder sets the optimizer up again
            return
        self._told = True
        if self._is_loaded and self.trainer.state.fn == "fit" and self._finders:
            raise ZooError(
                f"trainer.callbacks: got {type(self._finders[0]).__name__} beside --ckpt_path; it belongs to the "
                "beginning of a run, so take it out to go on with one"
            )
        if self._started_from is not None:
            rank_zero_info(f"Weights of {self._started_from}:\n{summary(self.transfers)}")
        if self._adapter is not None:
            sizes = [(p.numel(), p.requires_grad) for p in self.network.parameters()]
            trained = sum(n for n, is_trained in sizes if is_trained)
            rank_zero_info(f"LoRA: {trained:,} of {sum(n for n, _ in sizes):,} parameters are trained")

    @property
    def _finders(self) -> list[pl.Callback]:
        callbacks: list[pl.Callback] = getattr(self.trainer, "callbacks", [])
        return [c for c in callbacks if isinstance(c, (BatchSizeFinder, LearningRateFinder))]

    def on_fit_start(self) -> None:
        average_no_indices(self.trainer)
        for metric in self.modules():
            if isinstance(metric, Metric):
                metric.reset()  # states that a test left behind can't be written to outside inference mode
        if self.transfers and self.trainer.is_global_zero:
            for logger in self.loggers:
                if isinstance(logger, TensorBoardLogger):
                    logger.experiment.add_text("pretrained", summary(self.transfers))

    def _freeze(self) -> None:
        """Leave only what ``train`` says to the optimizer; frozen modules lose their dropout."""
        train = self.hparams["train"]
        if train == "all":
            return
        depths, heads = self.depths(), self.heads()
        top = max(depths.values())
        if train == "head":
            trained = {name for name in depths if name.startswith(heads)} if heads else set()
            if not trained:
                raise ZooError(f"model.train: got head; none is known of {self.network_name}, so give last_1")
        else:
            n = int(train.removeprefix("last_"))
            if n > top - 1:
                raise ZooError(
                    f"model.train: got {train}; {self.network_name} has {top - 1} blocks, so give at most that"
                )
            trained = {name for name, depth in depths.items() if depth >= top - n}
        for name, parameter in self.network.named_parameters():
            parameter.requires_grad = name in trained
        self._rest_frozen()

    def _rest_frozen(self) -> None:
        """Modules without anything to train lose their dropout."""
        for module in self.network.modules():
            parameters = list(module.parameters())
            if parameters and not any(p.requires_grad for p in parameters):
                module.eval()
        for name, module in self.network.named_children():  # between the stem and the blocks, without weights
            if name != "head_drop" and not list(module.parameters()):
                module.eval()

    @property
    def network_name(self) -> str:
        """What to call the network in a message."""
        return "the network"

    @classmethod
    def load_from_checkpoint(
        cls,
        checkpoint_path: Any,
        map_location: Any = None,
        hparams_file: str | Path | None = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        **settings: Any,
    ) -> Self:
        """As Lightning's, after the checks that the command line makes.

        Args:
            checkpoint_path: the file, a name of zoo list, an address, an open file, or a ``Checkpoint``.
            map_location: the device to put the task on, as `to` takes it; left out, the CPU.
            hparams_file: refused: a checkpoint holds its settings.
            strict: whether every tensor must be there, and no other; left out, yes.
            weights_only: False is refused: a checkpoint's code is never run.
            settings: hyperparameters that replace the checkpoint's.

        Raises:
            ZooError: if the file is missing, damaged, holds code, or is of another task.
        """
        if hparams_file is not None or weights_only is False:
            given = "hparams_file" if hparams_file is not None else "weights_only=False"
            raise ZooError(
                f"load_from_checkpoint: got {given}; a checkpoint of this zoo is data and holds its settings, so leave "
                "it out"
            )
        checkpoint = Checkpoint.open(checkpoint_path)
        where, here = checkpoint.path, f"{cls.__module__}.{cls.__qualname__}"
        if checkpoint.task != here:
            raise CheckpointMismatchError(f"{where} is of {checkpoint.task}, not of {here}", argument="checkpoint")
        try:
            task = cls(**{**checkpoint.settings, **settings})
        except (TypeError, ValueError) as error:
            reason = " ".join(str(error).split())[:160]
            raise ZooError(
                f"{where}: its settings make no sense ({reason}); take another copy", argument="checkpoint"
            ) from None
        contents = checkpoint.take()
        task.on_load_checkpoint(contents)
        task.load_state_dict(contents["state_dict"], strict=strict is not False)
        return task if map_location is None else task.to(map_location)

    def setup(self, stage: str) -> None:
        """See to it that what is going to be saved can be read again, and that what is going to be read is checked."""
        check_plain(plain(self.hparams), "model")
        if (datamodule := getattr(self.trainer, "datamodule", None)) is not None:
            check_plain(plain(datamodule.hparams), "data")
        strategy = self.trainer.strategy
        # sharded strategies write and read folders of their own
        if type(strategy).load_checkpoint is Strategy.load_checkpoint and is_usual(strategy.checkpoint_io):
            strategy.checkpoint_io = CheckedCheckpointIO()

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
            "transfer": [transfer.plain() for transfer in self.transfers],
        }
        if self._trainer is not None:
            checkpoint[CHECKPOINT_KEY]["trainer"] = self._of_the_trainer()
            if self._is_gathering:  # each process has its own
                reduce = self.trainer.strategy.reduce
                gathered = {name: p.grad for name, p in self.named_parameters() if p.grad is not None}
                checkpoint[GRADIENTS] = {name: reduce(grad.clone()) for name, grad in gathered.items()}
        if self._adapter is not None:
            checkpoint[CHECKPOINT_KEY]["adapter"] = dict(self._adapter)
            frozen = {f"{NETWORK}{name}" for name, p in self.network.named_parameters() if not p.requires_grad}
            for part in _STATES & set(checkpoint):
                checkpoint[part] = {name: tensor for name, tensor in checkpoint[part].items() if name not in frozen}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Compare everything the checkpoint claims with this task; on a difference nothing is loaded.

        Raises:
            CheckpointMismatchError: for another task, other data, another network, or other tensors.
        """
        claim = read_claim(checkpoint, "file")
        here = f"{type(self).__module__}.{type(self).__qualname__}"
        if claim["task"] != here:
            raise CheckpointMismatchError(
                f"of {claim['task']}, but this is {here}; use the task it was made by", argument="checkpoint"
            )
        fitting = self._trainer is not None and self._trainer.state.fn == "fit"
        given = self.hparams["pretrained"]
        moved = claim.get("adapter") and self.hparams["lora_rank"]  # the base's digest is compared instead
        if fitting and given is not None and given != claim["settings"].get("pretrained") and not moved:
            raise ZooError(
                f"model.pretrained: got {given} beside --ckpt_path. The one starts a new run from weights, the other "
                "goes on with a run and its optimizer; leave one of them out"
            )
        if fitting and "optimizer_states" not in checkpoint:
            raise ZooError(
                "--ckpt_path: got a checkpoint of weights alone, and fit goes on with the optimizer's state, which it "
                "lacks; use it with test and predict, start a new run from it with --model.pretrained, or go on from "
                "the run's last.ckpt"
            )
        self._step_seed = claim.get("step_seed")
        self._started_from = self._not_started = None
        self._is_loaded = True
        self.transfers = read_transfers(claim.get("transfer", []))
        if fitting:
            self._tell_changed(claim)
            keep_to_own_folder(self.trainer, checkpoint.get("callbacks") or {}, self.trainer.ckpt_path)
            self._gathered = dict(checkpoint.get(GRADIENTS) or {})
        if not self.is_built:
            self._identity = claim["identity"]
            try:
                self.build(self._identity)
            except _NOT_BUILT as error:
                raise ZooError(_altered(error), argument="checkpoint") from None
            self._freeze()
        check_identity(claim["identity"], self.data_identity, self.mismatch_advice)
        saved, current = self.network_of(claim["settings"]), self.network_of(plain(self.hparams))
        if found := differences(plain(saved), plain(current)):
            raise CheckpointMismatchError(
                f"of another network. {'; '.join(found)}. Leave these settings out to take the "
                "checkpoint's, or train anew without --ckpt_path",
                argument="checkpoint",
            )
        if fitting and not self._finders:  # which go back to where they began, with what they found
            self._check_kept(claim)
        if claim.get("adapter"):
            self._attach_adapter(claim)
            for part in _STATES & set(checkpoint):
                checkpoint[part] = self._complete(checkpoint[part])
        # load_state_dict looks at the tensors, before it copies any
        old, new = claim["identity"].get("source"), self.data_identity.get("source")
        if old != new and self._trainer is not None and self._trainer.state.fn != "predict":
            rank_zero_warn(f"The checkpoint was trained on {_listed(old)}; this is {_listed(new)}: figures may differ")

    def _check_kept(self, claim: Mapping[str, Any]) -> None:
        """Raise CheckpointMismatchError if a run that goes on would be given other settings than it began with."""
        saved, mine = plain(self.kept_of(claim["settings"])), plain(self.kept_of(plain(self.hparams)))
        then = {f"model.{name}": (saved.get(name), mine.get(name)) for name in sorted({*saved, *mine})}
        datamodule = getattr(self._trainer, "datamodule", None)
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

    def _tell_changed(self, claim: Mapping[str, Any]) -> None:
        """Say in one line what of the trainer is other than it was when the checkpoint was written."""
        now, before = self._of_the_trainer(), dict(claim.get("trainer") or {})
        changed = [
            f"{name} {value}, which was {before[name]}"
            for name, value in now.items()
            if before.get(name, value) != value
        ]
        if changed:
            rank_zero_warn(f"The run goes on with {'; '.join(changed)}: what follows is other than it would have been")
        seed = os.environ.get("PL_GLOBAL_SEED")
        if seed is not None and self._step_seed not in (None, int(seed) % (1 << 31)):
            rank_zero_info(f"seed_everything: {seed} here, but a run keeps the seed it began with, {self._step_seed}")

    def _of_the_trainer(self) -> dict[str, Any]:
        trainer = self.trainer
        return {
            "accumulate_grad_batches": trainer.accumulate_grad_batches,
            "gradient_clip_val": trainer.gradient_clip_val,
            "precision": str(trainer.precision),
            "limit_train_batches": trainer.limit_train_batches,
            "processes": trainer.world_size,
        }

    @property
    def _is_gathering(self) -> bool:
        """Whether gradients of some batches wait for the others of their step."""
        trainer, batches = self.trainer, self.trainer.accumulate_grad_batches
        return (
            trainer.state.fn == "fit" and not trainer.is_last_batch and (trainer.fit_loop.batch_idx + 1) % batches > 0
        )

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
                f"its tensors don't fit this network. {'; '.join(found[:5])}"
                f"{f'; and {len(found) - 5} more' if len(found) > 5 else ''}. Use the settings it was trained with",
                argument="checkpoint",
            )

    # ------------------------------------------------------------------ training

    def with_auxiliary(self, loss: Tensor, terms: Mapping[str, tuple[Tensor, float]]) -> Tensor:
        """The loss and the terms that the attention adds, each logged under its name and weighted."""
        for name, (value, weight) in terms.items():
            self.log(f"train/{name}", value)
            loss = loss + weight * value
        return loss

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

    def on_validation_batch_end(self, *_: Any, **__: Any) -> None:
        if self.trainer.state.fn == "fit" and not self.trainer.sanity_checking:
            self._told_to_stop |= put_off_stop(self.trainer)

    def on_validation_end(self) -> None:
        if self._told_to_stop:
            self._told_to_stop = False
            stop(self.trainer)

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
        depths, undecayed = self.depths(), self.undecayed()
        top = max(depths.values())
        groups: dict[tuple[float, float], list[nn.Parameter]] = {}
        for name, parameter in self.network.named_parameters():
            if parameter.requires_grad:
                decay = self.weight_decay if parameter.ndim >= 2 and name not in undecayed else 0.0
                lr = self.lr * self.hparams["layer_decay"] ** (top - depths[name])
                groups.setdefault((-decay, lr), []).append(parameter)
        return [{"params": groups[key], "lr": key[1], "weight_decay": -key[0]} for key in sorted(groups)]

    def undecayed(self) -> set[str]:
        """Names of matrices that no decay applies to."""
        return set()

    def configure_optimizers(self) -> Any:
        """AdamW with decay on matrices only; linear warm-up, then cosine decay over the trainer's own step budget."""
        self._tell_start()
        optimizer = torch.optim.AdamW(
            self.parameter_groups(),
            lr=self.lr,
            betas=(0.9, self.beta2),
            # Lightning doesn't clip gradients for a fused optimizer in mixed precision, nor scale the loss of one
            fused="mixed" not in str(self.trainer.precision) and self.trainer.precision != "16-true",
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": LambdaLR(optimizer, self._share_of_lr), "interval": "step"},
        }

    def _share_of_lr(self, step: int) -> float:
        """The share of lr that is used at a step."""
        known = math.isfinite(self._budget)
        warmup = max(1, round(self.warmup * self._budget)) if known else 100
        if step < warmup:
            return (step + 1) / warmup
        if not known:
            return 1.0  # no end in sight: stay
        done = min(1.0, (step - warmup) / max(1, self._budget - warmup))
        return self.min_lr + (1 - self.min_lr) * (1 + math.cos(math.pi * done)) / 2

    def on_train_start(self) -> None:
        """Learn how long the run is, and set the learning rate of its next step by that.

        Not before: the trainer makes the training data to answer, and of data that was made before a checkpoint's
        state is read, a run that goes on starts the epoch again.
        """
        self.has_begun = True
        close_finished_epoch(self.trainer)
        self._budget = self.trainer.estimated_stepping_batches
        for schedule in (config.scheduler for config in self.trainer.lr_scheduler_configs):
            if isinstance(schedule, LambdaLR) and schedule.lr_lambdas == [self._share_of_lr] * len(schedule.base_lrs):
                share = self._share_of_lr(schedule.last_epoch)
                for group, base in zip(schedule.optimizer.param_groups, schedule.base_lrs, strict=True):
                    group["lr"] = base * share
        self._take_gathered()

    def _take_gathered(self) -> None:
        """Go on gathering the gradients of a step that a checkpoint was written in the midst of."""
        own = dict(self.named_parameters())
        if wrong := [name for name, grad in self._gathered.items() if not _fits(grad, own.get(name))]:
            raise ZooError(
                f"its gradients of {listed(wrong)} fit no tensor; it was altered, take another", argument="checkpoint"
            )
        for name, grad in self._gathered.items():
            own[name].grad = grad.to(own[name])
        self._gathered = {}

    @property
    def lr(self) -> float:
        """AdamW's learning rate at its height. Setting it, as a learning-rate finder does, moves the schedule too."""
        return self._lr

    @lr.setter
    def lr(self, value: float) -> None:
        if self._trainer is not None:
            for optimizer in self.trainer.optimizers:
                for group in optimizer.param_groups:
                    group["initial_lr"] *= value / self._lr
            for schedule in self.trainer.lr_scheduler_configs:
                schedule.scheduler.base_lrs = [base * value / self._lr for base in schedule.scheduler.base_lrs]
        self._lr = value
