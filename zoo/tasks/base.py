"""What the tasks of all families share, from the making of a network out of a data identity to the end of a run.

What a run starts from is in ``start``, what a checkpoint claims in ``claims``, what a run is trained with in
``optimizer``.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self, Unpack

import lightning.pytorch as pl
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torchmetrics import Metric

from zoo.checkpoint.checkpoint import Checkpoint
from zoo.checkpoint.identity import check_identity, check_plain, differences
from zoo.checkpoint.transfer import TensorTransfer, carry, summary
from zoo.checkpoint.writing import CheckedCheckpointIO, is_usual
from zoo.errors import CheckpointMismatchError, ZooError
from zoo.private.lightning import average_no_indices, checkpoint_to_load, close_finished_epoch, put_off_stop, stop
from zoo.tasks.claims import (
    add_identity,
    check_claim,
    check_finders,
    checked_tensors,
    class_path,
    drop_identity,
    fitting,
    take_gathered,
    write_claim,
)
from zoo.tasks.layers import freeze
from zoo.tasks.optimizer import (
    ChosenOptimizer,
    Schedule,
    check_training,
    keep_factors,
    make_optimizer,
    move_lr,
    tell_unread,
)
from zoo.tasks.pretrained import Pretrained
from zoo.tasks.settings import defaults_of, plain
from zoo.tasks.start import START_DEFAULTS, Start, StartOptions, check_start, settings_taken


@dataclass(frozen=True)
class ExampleInputs:
    """Inputs of a network.

    Args:
        name: what a graph calls its input.
        inputs: several, of different sizes.
        dynamic: which of their axes may have any size, as ``torch.export`` takes it.
    """

    name: str
    inputs: Sequence[Tensor]
    dynamic: Mapping[int, Any]


class ZooTask(pl.LightningModule, ABC):
    """A LightningModule whose network is built from the data's identity and saved with it.

    The network comes into being in ``configure_model``, from the data module's identity, or from the checkpoint's where
    there is no data module. A checkpoint carries task, settings, data and identity under the key ``zoo``, in plain
    types. Loading compares all of them, and every tensor's name and shape, before it copies the first.

    A subclass names its network's settings, builds the network, and writes the steps.

    Args:
        lr: AdamW's learning rate at its height.
        weight_decay: decoupled decay, on matrices only.
        beta2: AdamW's second decay rate.
        warmup: share of the run's steps in which the learning rate rises to lr; then it falls along a cosine.
        min_lr: share of lr that is left at the end.
        start: what the run starts from, and which part of the network is trained, as ``StartOptions`` has it.
    """

    network_settings: ClassVar[tuple[str, ...]]
    """Names of the settings that decide what the network is."""
    mismatch_advice: ClassVar[str]
    """What to do about a checkpoint that was made for other data."""

    pretrained_advice: ClassVar[str] = "To carry over what fits, set model.on_mismatch to adapt"
    """What to do about weights to start from that were made for other data."""

    free_settings: ClassVar[tuple[str, ...]] = ("pretrained", "on_mismatch", "renamed", "compile")
    """Names of the settings that may change when a run goes on, since nothing that is learned depends on them from
    then on. All others a run keeps from its beginning."""

    hub_library: ClassVar[str] = "pytorch"
    """The library that the hub says the model is for: timm where it is a model of timm's."""

    predictions_suffix: ClassVar[str] = ".csv"
    """What kind of file `lightning predict` writes if no path is given."""

    start_defaults: ClassVar[StartOptions] = START_DEFAULTS
    network: nn.Module

    settings: dict[str, Any]
    """The hyperparameters that count, as checkpoints keep them: those given, with what pretrained weights and the data
    decide. ``hparams`` stay as they were given."""
    step_seed: int | None
    """What each step of the run is seeded with, together with its number; None before the first."""
    has_begun: bool
    """Whether training has started, so that everything a run goes on from has been taken."""

    def __init__(
        self,
        lr: float,
        weight_decay: float,
        beta2: float,
        warmup: float,
        min_lr: float,
        **start: Unpack[StartOptions],
    ) -> None:
        super().__init__()
        options: StartOptions = {**START_DEFAULTS, **start}
        check_training(lr, weight_decay, beta2, warmup, min_lr)
        check_start(options)
        self.save_hyperparameters(dict(options))
        self.save_hyperparameters()  # of the subclass too
        self.settings = dict(self.hparams)
        self.start, self.schedule = Start(self), Schedule(warmup, min_lr)
        self.chosen_optimizer: ChosenOptimizer | None = None
        self.own_lr: float | None = None
        self.identity: dict[str, Any] | None = None
        self.register_state_dict_post_hook(add_identity)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(drop_identity)  # type: ignore[no-untyped-call]
        self.step_seed, self.has_begun, self._is_to_stop = None, False, False
        self.gathered: dict[str, Tensor] = {}  # gradients that a checkpoint was written in the midst of

    # ------------------------------------------------------------------ to be written

    @abstractmethod
    def build(self, identity: Mapping[str, Any]) -> None:
        """Make ``self.network``, and whatever else depends on the data, from its identity."""

    @abstractmethod
    def depths(self) -> dict[str, int]:
        """How far up each of the network's parameters is: 0 in the stem, 1 and more in the blocks, most in the head."""

    @abstractmethod
    def heads(self) -> tuple[str, ...]:
        """Names, or beginnings of names, of the parameters that turn the network's last state into its answer."""

    def carry_over(self, source: Pretrained) -> tuple[dict[str, Tensor], list[TensorTransfer]]:
        """A state dict for the network from other weights, and what became of each tensor.

        Tensors of the same name and shape are kept. A family whose rows have names, such as tokens or classes, carries
        those over by name.
        """
        own = {name: tensor.detach() for name, tensor in self.network.state_dict().items()}
        return carry(own, source.weights(), {})

    # ------------------------------------------------------------------ what may be overridden

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

    def example_inputs(self) -> ExampleInputs:
        """What the network may be given, to write it as a graph and to compare what was written.

        Raises:
            ZooError: if the family has none.
        """
        raise ZooError(
            f"{type(self).__name__} has no example inputs, so it can't be written as a graph; use safetensors",
            argument="--to",
        )

    def inputs_of(self, batch: Any) -> Tensor:
        """What of a batch of the data module's the network reads.

        Raises:
            ZooError: if the family doesn't say, so that nobody can look inside.
        """
        raise ZooError(
            f"{type(self).__name__} doesn't say what of a batch its network reads, so its models can't be looked into; "
            "write its inputs_of",
            argument="checkpoint",
        )

    def token_names(self, inputs: Tensor) -> list[str]:
        """What the tokens of a sample, inputs (1, ...), are called, in the order of queries; [] if unknown."""
        return []

    def with_attention_options(self, options: Mapping[str, Any]) -> dict[str, Any] | None:
        """This task's settings with some options of its attention set anew; None where the attention has no such one.

        Args:
            options: values by name.
        """
        return None

    def graph_properties(self) -> dict[str, str]:
        """What an exported graph is to say of its inputs or outputs, in JSON where it isn't one word."""
        return {}

    @property
    def hub_pipeline(self) -> str:
        """The hub's name for what the model does."""
        return "other"

    def undecayed(self) -> set[str]:
        """Names of matrices that no decay applies to."""
        return set()

    @property
    def network_name(self) -> str:
        """What to call the network in a message."""
        return "the network"

    def find_pretrained(self) -> Pretrained:
        """What ``pretrained`` stands for.

        Raises:
            ZooError: if it can't be had.
        """
        return Pretrained.read(self.settings["pretrained"], class_path(type(self)))

    def take_settings(self, theirs: Mapping[str, Any]) -> dict[str, str]:
        """Settings of the network left at their defaults become ``theirs``; returns the others that differ."""
        return settings_taken(self, theirs)

    def other_data(self, source: Pretrained) -> list[str]:
        """Every way in which the pretrained model's data differ from these."""
        return differences(source.identity, self.data_identity)

    def data_wishes(self) -> dict[str, Any]:
        """What data the network was made for, in the terms of the data module's ``suit``."""
        return {}

    # ------------------------------------------------------------------ the network

    @property
    def trainer_or_none(self) -> pl.Trainer | None:
        """The trainer; None where the task has none, for which Lightning's ``trainer`` raises."""
        return self._trainer

    @property
    def is_built(self) -> bool:
        return "network" in self._modules

    @property
    def data_identity(self) -> dict[str, Any]:
        """The identity of the data this task was built for.

        Raises:
            ZooError: while there is neither data nor checkpoint.
        """
        if self.identity is None:
            raise ZooError(
                f"{type(self).__name__}: not built yet; fit it with a data module, or load a checkpoint with "
                "load_from_checkpoint"
            )
        return self.identity

    def build_and_freeze(self, identity: Mapping[str, Any]) -> None:
        """Build the network, and leave only what ``train`` says to the optimizer."""
        self.identity = dict(identity)
        self.build(identity)
        freeze(self, self.settings["train"])

    def configure_callbacks(self) -> list[pl.Callback]:
        """What every run of a task needs; a callback of the user's, of the same kind, takes its place.

        Lightning asks for callbacks before it sets up the data, which is told here what the network was made for.
        """
        from zoo.callbacks.finite import FiniteWeights  # which stand above the tasks
        from zoo.callbacks.seeding import StepSeeding

        suit = getattr(getattr(self.trainer, "datamodule", None), "suit", None)
        if suit is not None:
            suit(self.data_wishes())
        there: list[pl.Callback] = getattr(self.trainer, "callbacks", [])
        return [kind() for kind in (StepSeeding, FiniteWeights) if not any(isinstance(c, kind) for c in there)]

    def setup(self, stage: str) -> None:
        """See to it that what is going to be saved can be read again, and that what is going to be read is checked."""
        check_plain(plain(self.settings), "model")
        if (datamodule := getattr(self.trainer, "datamodule", None)) is not None:
            check_plain(plain(datamodule.hparams), "data")
        strategy = self.trainer.strategy
        # sharded strategies write and read folders of their own
        if type(strategy).load_checkpoint is Strategy.load_checkpoint and is_usual(strategy.checkpoint_io):
            strategy.checkpoint_io = CheckedCheckpointIO()

    def configure_model(self) -> None:
        """Build the network from the data module's identity, once, and start a new run from the pretrained weights."""
        trainer = self._trainer
        datamodule = getattr(trainer, "datamodule", None) if trainer is not None else None
        if self.is_built:
            if datamodule is not None:
                check_identity(self.data_identity, datamodule.identity(), self.mismatch_advice)
            return
        identity = self.identity if datamodule is None else datamodule.identity()
        if identity is None:
            return  # load_from_checkpoint calls this before the identity is known
        goes_on_from = None if trainer is None else checkpoint_to_load(trainer)
        is_new_run = fitting(self) and goes_on_from is None
        if fitting(self) and not is_new_run:
            check_finders(self.trainer)
        self.start.build(self.identity or identity, is_new_run, goes_on_from)
        if self.settings["compile"] and fitting(self):
            self.network.compile()  # in place: names of parameters stay

    # ------------------------------------------------------------------ checkpoints

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
        where, here = checkpoint.path, class_path(cls)
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

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        write_claim(self, checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Compare everything the checkpoint claims with this task; on a difference nothing is loaded.

        Raises:
            CheckpointMismatchError: for another task, other data, another network, or other tensors.
        """
        check_claim(self, checkpoint)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As PyTorch's, after every check has passed: data identity, packed layers, names and shapes of all tensors.

        Raises:
            CheckpointMismatchError: and then nothing has been copied.
        """
        return super().load_state_dict(checked_tensors(self, state_dict, strict), strict, assign)

    @property
    def transfers(self) -> list[TensorTransfer]:
        """What became of each tensor of the weights that the run started from."""
        return self.start.transfers

    def merge_adapter(self) -> None:
        """Add the adapters to the weights they stand beside; the task is an ordinary one from then on."""
        self.start.merge_adapter()

    # ------------------------------------------------------------------ training

    def choose_optimizer(self, optimizer: Mapping[str, Any] | None, lr_scheduler: Mapping[str, Any] | None) -> None:
        """Train with another optimizer or schedule than AdamW and its own, as --optimizer and --lr_scheduler do.

        Args:
            optimizer: ``{"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}}``; None for AdamW.
            lr_scheduler: the same of a scheduler, which goes by epochs; None for the usual one beside AdamW, and for a
                learning rate that stays beside another optimizer.
        """
        given = optimizer is not None or lr_scheduler is not None
        self.chosen_optimizer = ChosenOptimizer(optimizer, lr_scheduler) if given else None
        tell_unread(self)

    def configure_optimizers(self) -> Any:
        """AdamW with decay on matrices only; linear warm-up, then cosine decay over the trainer's own step budget."""
        return make_optimizer(self)

    @property
    def lr(self) -> float:
        """The learning rate at its height. Setting it, as a learning-rate finder does, moves the schedule too."""
        return self.settings["lr"] if self.own_lr is None else self.own_lr

    @lr.setter
    def lr(self, value: float) -> None:
        if self._trainer is not None:
            move_lr(self.trainer, value / self.lr)
        if self.own_lr is None:
            self.settings["lr"] = value
        else:
            self.own_lr = value

    def with_auxiliary(self, loss: Tensor, terms: Mapping[str, tuple[Tensor, float]]) -> Tensor:
        """The loss and the terms that the attention adds, each logged under its name and weighted."""
        for name, (value, weight) in terms.items():
            self.log(f"train/{name}", value)
            loss = loss + weight * value
        return loss

    def on_fit_start(self) -> None:
        average_no_indices(self.trainer)
        for metric in self.modules():
            if isinstance(metric, Metric):
                metric.reset()  # states that a test left behind can't be written to outside inference mode
        if self.transfers and self.trainer.is_global_zero:
            for logger in self.loggers:
                if isinstance(logger, TensorBoardLogger):
                    logger.experiment.add_text("pretrained", summary(self.transfers))

    def on_train_start(self) -> None:
        self.has_begun = True
        close_finished_epoch(self.trainer)
        keep_factors(self)
        self.schedule.begin(self.trainer)
        take_gathered(self)

    def on_validation_batch_end(self, *_: Any, **__: Any) -> None:
        """Put off the end of a run that is told to stop until the validation is done."""
        if fitting(self) and not self.trainer.sanity_checking:
            self._is_to_stop |= put_off_stop(self.trainer)

    def on_validation_end(self) -> None:
        if self._is_to_stop:
            self._is_to_stop = False
            stop(self.trainer)
