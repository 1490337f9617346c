"""Weights that a run starts from, and what they were trained for."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from zoo.checkpoint.checkpoint import Checkpoint
from zoo.checkpoint.transfer import weights_digest
from zoo.errors import CheckpointMismatchError, ZooError, listed

NETWORK = "network."  # where a task's state dict keeps its network


@dataclass
class Pretrained:
    """A checkpoint to start from: as it was given, its task's settings, its data's identity, its network's tensors."""

    given: str
    settings: dict[str, Any]
    identity: dict[str, Any]
    state: dict[str, Tensor]

    @classmethod
    def read(cls, given: str, task: str) -> Self:
        """Read a checkpoint file, a name on the shelf or an address.

        Args:
            given: which.
            task: the class that must have made it.

        Raises:
            ZooError: if there is none, or it is damaged or of another task.
        """
        checkpoint = Checkpoint.open(given, "model.pretrained")
        if checkpoint.adapter:
            raise ZooError(
                f"{given} holds an adapter, not a whole model; make it one with zoo export {given} "
                "--to checkpoint --out FILE.ckpt",
                argument="model.pretrained",
            )
        if checkpoint.task != task:
            raise CheckpointMismatchError(
                f"{given} is of {checkpoint.task}; this task needs one of {task}", argument="model.pretrained"
            )
        state = network_tensors(checkpoint.tensors())
        if wrong := not_finite(state):
            raise ZooError(
                f"{given} has numbers in {listed(wrong)} that aren't finite; take another", argument="model.pretrained"
            )
        return cls(given, checkpoint.settings, checkpoint.identity, state)

    def weights(self) -> dict[str, Tensor]:
        """The network's state dict."""
        return self.state

    def digest(self) -> str:
        """SHA-256 of the weights, whatever file they came in."""
        return weights_digest(self.weights())


def not_finite(state: Mapping[str, Tensor]) -> list[str]:
    """Names of the tensors that hold an infinity or no number."""
    return [name for name, tensor in state.items() if not torch.isfinite(tensor).all()]


def network_tensors(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The network's part of a task's state dict, under the network's own names."""
    return {name.removeprefix(NETWORK): tensor for name, tensor in state.items() if name.startswith(NETWORK)}
