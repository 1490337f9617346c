"""What a run starts from: weights drawn at random, or others' weights, with adapters beside them if wished."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from zoo.adapters import BASE, add_lora, merge_lora, projections
from zoo.checkpoint.checkpoint import Checkpoint
from zoo.checkpoint.transfer import TensorTransfer, read_transfers, summary
from zoo.errors import CheckpointMismatchError, ZooError
from zoo.tasks.layers import head_parameters, train_only
from zoo.tasks.pretrained import NETWORK, Pretrained
from zoo.tasks.settings import check_settings, defaults_of, plain

if TYPE_CHECKING:
    from zoo.tasks.base import ZooTask


class StartOptions(TypedDict, total=False):
    """What every task starts from and trains.

    Args:
        pretrained: weights to start from: a checkpoint file of this zoo, a name of zoo list, or an address; of a
            picture task also the name of a timm model that has weights to download. Settings of the network that are
            left as they are by default become the pretrained model's. Default: none, random weights.
        on_mismatch: pretrained weights for other data or another network: error, or adapt: carry over what fits by
            name, and print what became of the rest. Default: error.
        train: what to train: all, head, or last_N (the last N blocks, last norm and head). The rest stays as it is,
            without dropout. Default: all.
        layer_decay: factor of the learning rate from each block to the one before; 1 for none. Default: 1.
        lora_rank: above 0, train adapters of this rank beside the projections of pretrained weights (LoRA), and in full
            the head and whatever wasn't kept; checkpoints hold these alone, and load onto the same weights only. Needs
            peft. Default: 0.
        lora_alpha: the adapters are scaled by lora_alpha / lora_rank. Default: twice the rank.
        lora_dropout: dropout probability in front of the adapters. Default: 0.
        compile: compile the network for training (torch.compile); checkpoints are the same with and without. Default:
            false.
    """

    pretrained: str | None
    on_mismatch: Literal["error", "adapt"]
    train: str
    layer_decay: float
    lora_rank: int
    lora_alpha: float | None
    lora_dropout: float
    compile: bool


START_DEFAULTS: StartOptions = {
    "pretrained": None,
    "on_mismatch": "error",
    "train": "all",
    "layer_decay": 1.0,
    "lora_rank": 0,
    "lora_alpha": None,
    "lora_dropout": 0.0,
    "compile": False,
}

NOT_BUILT = (TypeError, LookupError, ValueError, AttributeError, ArithmeticError, RuntimeError, MemoryError)
"""What building a network from settings or identities without sense may raise."""

_ADAPTING = ("pretrained", "on_mismatch", "lora_rank", "lora_alpha", "lora_dropout", "renamed")


def check_start(o: StartOptions) -> None:
    """Raise ZooError for an option that is unknown, out of range, or without effect beside the others."""
    if unknown := sorted(set(o) - set(START_DEFAULTS)):
        raise TypeError(f"got {', '.join(unknown)}, which is no setting of this task")
    place, rank, alpha = o["pretrained"], o["lora_rank"], o["lora_alpha"]
    check_settings(
        (
            ("layer_decay", o["layer_decay"], 0 < o["layer_decay"] <= 1, "must lie in (0, 1]"),
            ("pretrained", place, place != "", "must be a file, a name of zoo list or an address, or left out"),
            ("lora_rank", rank, rank >= 0, "must be 0 or more"),
            ("lora_alpha", alpha, alpha is None or 0 < alpha < math.inf, "must be a positive number"),
            ("lora_alpha", alpha, alpha is None or rank, "needs a lora_rank above 0"),
            ("lora_dropout", o["lora_dropout"], 0 <= o["lora_dropout"] < 1, "must lie in [0, 1)"),
            ("on_mismatch", o["on_mismatch"], o["on_mismatch"] in ("error", "adapt"), "must be error or adapt"),
            (
                "train",
                o["train"],
                re.fullmatch(r"all|head|last_[1-9]\d*", str(o["train"])),
                "must be all, head, or last_N such as last_2",
            ),
            (
                "lora_rank",
                rank,
                not rank or (place is not None and o["train"] == "all"),
                "it adapts weights that there are and decides what is trained, so set model.pretrained, and leave "
                "model.train out",
            ),
        )
    )


def altered(error: Exception) -> str:
    """What to say of a checkpoint from which no network can be built."""
    reason = " ".join(str(error).split())[:160]
    return f"its settings or its data identity make no sense ({type(error).__name__}: {reason}); take another copy"


class Start:
    """Fills a task's network with what a run starts from, and remembers it.

    A new run reads ``pretrained``, takes the settings it leaves open from it, and carries its weights over. A run that
    goes on from a checkpoint needs none of this but the settings; of an adapter's checkpoint it needs the base.

    Args:
        task: whose network it is.
    """

    transfers: list[TensorTransfer]
    """What became of each tensor of the weights that the run started from."""
    adapter: dict[str, str] | None
    """What the adapters' base was called, and the digest of its weights; None without adapters."""

    def __init__(self, task: "ZooTask") -> None:
        self.task = task
        self.transfers, self.adapter = [], None

    # ------------------------------------------------------------------ in a trainer

    def build(self, identity: Mapping[str, Any], is_new_run: bool, goes_on_from: str | Path | None) -> None:
        """Build the task's network and fill it.

        Args:
            identity: of the data.
            is_new_run: whether weights are to be read.
            goes_on_from: the checkpoint that is going to be loaded, if there is one.

        Raises:
            ZooError: for weights that can't be had or don't fit.
        """
        task, source, other = self.task, None, {}
        checkpoint = None
        if task.settings["pretrained"] and goes_on_from is not None:
            if not Path(goes_on_from).is_dir():  # a sharded strategy's, which reads it itself
                checkpoint = Checkpoint.open(goes_on_from)
                task.take_settings(checkpoint.settings)  # on_load_checkpoint compares the others
        elif task.settings["pretrained"] and is_new_run:
            source = task.find_pretrained()
            other = task.take_settings(source.settings)
            self._check_settings(source, other)
        task.build_and_freeze(identity)
        if source is not None:
            self._fill(source, other)
            rank_zero_info(f"Weights of {source.given}:\n{summary(self.transfers)}")
        elif checkpoint is not None and checkpoint.adapter:
            self.attach(checkpoint.claim)  # now, so that an average of the weights has it too
        if self.adapter is not None:
            sizes = [(p.numel(), p.requires_grad) for p in task.network.parameters()]
            trained = sum(n for n, is_trained in sizes if is_trained)
            rank_zero_info(f"LoRA: {trained:,} of {sum(n for n, _ in sizes):,} parameters are trained")

    def _check_settings(self, source: Pretrained, other: Mapping[str, str]) -> None:
        if other and self.task.settings["on_mismatch"] == "error":
            found = "; ".join(f"{name} is {values}" for name, values in other.items())
            raise CheckpointMismatchError(
                f"{source.given} is another network: {found}. Leave these settings out, or set "
                "model.on_mismatch to adapt to carry over what fits",
                argument="model.pretrained",
            )

    def _fill(self, source: Pretrained, other: Mapping[str, str]) -> None:
        task = self.task
        state, transfers = self._carried_over(source)
        changed = [transfer for transfer in transfers if transfer.outcome != "kept"]
        if all(transfer.outcome in ("new", "dropped") for transfer in transfers):
            raise CheckpointMismatchError(
                f"{source.given} has nothing that fits {task.network_name}; leave the network's "
                "settings out to take its architecture",
                argument="model.pretrained",
            )
        if task.settings["on_mismatch"] == "error":
            found = task.other_data(source)
            if not found and changed:
                found = [f"{transfer.tensor}: {transfer.outcome} ({transfer.note})" for transfer in changed]
            if found:
                more = f"; and {len(found) - 3} more" if len(found) > 3 else ""
                raise CheckpointMismatchError(
                    f"{source.given} doesn't fit as it is: {'; '.join(found[:3])}{more}. {task.pretrained_advice}",
                    argument="model.pretrained",
                )
        task.network.load_state_dict(state)
        self.transfers = [*transfers, *(TensorTransfer(name, "new", values) for name, values in other.items())]
        if task.settings["lora_rank"]:
            self._add_adapter(source)

    def _carried_over(self, source: Pretrained) -> tuple[dict[str, Tensor], list[TensorTransfer]]:
        try:
            return self.task.carry_over(source)
        except NOT_BUILT as error:
            raise ZooError(f"{source.given}: {altered(error)}", argument="model.pretrained") from None

    # ------------------------------------------------------------------ adapters

    def _add_adapter(self, source: Pretrained) -> None:
        """Put adapters beside the projections; train them, the head, and what the base has no weights for."""
        task, s = self.task, self.task.settings
        full = {transfer.tensor for transfer in self.transfers if transfer.outcome != "kept"} | head_parameters(task)
        alpha = 2.0 * s["lora_rank"] if s["lora_alpha"] is None else s["lora_alpha"]
        add_lora(task.network, projections(task.network, task.depths()), s["lora_rank"], alpha, s["lora_dropout"])
        names = [name for name, _ in task.network.named_parameters()]
        train_only(task.network, {name for name in names if ".lora_" in name or name.replace(BASE, ".") in full})
        self.adapter = {"base": source.given, "digest": source.digest()}

    def attach(self, claim: Mapping[str, Any]) -> None:
        """Put the base's weights into the network, and adapters like a checkpoint's beside them.

        Raises:
            ZooError: if the base can't be had, or isn't the one the adapters were trained on.
        """
        adapter, theirs, mine = claim["adapter"], claim["settings"], self.task.settings
        if not (
            isinstance(adapter, dict)
            and all(isinstance(adapter.get(name), str) for name in ("base", "digest"))
            and isinstance(theirs.get("lora_rank"), int)
            and theirs["lora_rank"] > 0
        ):
            raise ZooError("what it says of its adapter was altered; take another", argument="checkpoint")
        self.transfers = read_transfers(claim.get("transfer", []))  # what wasn't kept is trained in full
        if mine["lora_rank"]:  # else a config that doesn't mention the adapter
            is_trained = self.task.trainer_or_none is not None and self.task.trainer.state.fn == "fit"
            for name in ("lora_rank", "lora_alpha", *(("lora_dropout",) if is_trained else ())):
                if mine[name] != theirs.get(name):
                    raise CheckpointMismatchError(
                        f"model.{name}: {theirs.get(name)} in the checkpoint, {mine[name]} here; leave it out",
                        argument="checkpoint",
                    )
        given, before = mine["pretrained"] or theirs["pretrained"], dict(mine)
        mine.update({name: theirs[name] for name in _ADAPTING if name in theirs} | {"pretrained": given})
        try:
            if self.adapter is None:
                self._add_base(given, adapter)
            elif self.adapter["digest"] != adapter["digest"]:
                raise _other_base(adapter, given, self.adapter["digest"])
        except ZooError:
            mine.update(before)
            raise

    def _add_base(self, given: str, adapter: Mapping[str, str]) -> None:
        try:
            source = self.task.find_pretrained()
        except ZooError as error:
            reason = error.text.partition(";")[0]
            raise ZooError(
                f"an adapter for {adapter['base']}, which can't be read ({reason}); give the place of its "
                "base with --model.pretrained",
                argument="checkpoint",
            ) from None
        if (found := source.digest()) != adapter["digest"]:
            raise _other_base(adapter, given, found)
        self.task.network.load_state_dict(self._carried_over(source)[0])
        self._add_adapter(source)

    def frozen(self) -> set[str]:
        """Names, in the task's state dict, of what an adapter's checkpoint leaves to its base; none without one."""
        parameters = () if self.adapter is None else self.task.network.named_parameters()
        return {f"{NETWORK}{name}" for name, parameter in parameters if not parameter.requires_grad}

    def complete(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """An adapter's tensors with those of its base, which the network has."""
        trained = {f"{NETWORK}{name}" for name, p in self.task.network.named_parameters() if p.requires_grad}
        own = {f"{NETWORK}{name}": tensor for name, tensor in self.task.network.state_dict().items()}
        return {**{name: tensor for name, tensor in own.items() if name not in {*tensors, *trained}}, **tensors}

    def merge_adapter(self) -> None:
        """Add the adapters to the weights they stand beside; the task is an ordinary one from then on."""
        merge_lora(self.task.network)
        self.adapter = None
        self.task.settings.update({"lora_rank": 0, "lora_alpha": None, "lora_dropout": 0.0})


def settings_taken(task: "ZooTask", theirs: Mapping[str, Any]) -> dict[str, str]:
    """Let the network's settings that are as by default become ``theirs``; the others that differ, each in words."""
    defaults, taken = defaults_of(type(task)), []
    for name in task.network_settings:
        default, mine = defaults[name], plain(task.settings[name])
        wanted = theirs.get(name, default)
        if mine == default != wanted:
            task.settings[name] = wanted
            taken.append(f"{name} {wanted}")
    if taken:
        rank_zero_info(f"Settings of the weights: {', '.join(taken)}")
    here, there = plain(task.network_of(plain(task.settings))), plain(task.network_of(theirs))
    return {
        f"model.{name}": f"{here.get(name)} here, {there.get(name)} there"
        for name in sorted({*here, *there})
        if here.get(name) != there.get(name)
    }


def _other_base(adapter: Mapping[str, str], given: str, found: str) -> CheckpointMismatchError:
    return CheckpointMismatchError(
        f"an adapter for {adapter['base']} with weights {adapter['digest'][:12]}..., but {given} has "
        f"{found[:12]}...; give the base it was trained on with --model.pretrained",
        argument="checkpoint",
    )
