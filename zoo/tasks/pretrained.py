"""Weights that a run starts from, and what they were trained for."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from zoo.checkpoint.identity import read_checkpoint, read_claim
from zoo.checkpoint.index import resolve
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
        try:
            path = resolve(given)
            checkpoint = read_checkpoint(path)
            claim = read_claim(checkpoint, path)
            if claim.get("adapter"):
                raise ZooError(
                    f"checkpoint: {given} holds an adapter, not a whole model; make it one with zoo export {given} "
                    "--to checkpoint --out FILE.ckpt"
                )
        except ZooError as error:
            raise type(error)(f"model.pretrained: {str(error).removeprefix('checkpoint: ')}") from None
        if claim["task"] != task:
            raise CheckpointMismatchError(
                f"model.pretrained: {given} is of {claim['task']}; this task needs one of {task}"
            )
        state = network_tensors(checkpoint["state_dict"])
        if wrong := not_finite(state):
            raise ZooError(f"model.pretrained: {given} has numbers in {listed(wrong)} that aren't finite; take another")
        return cls(given, claim["settings"], claim["identity"], state)

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
