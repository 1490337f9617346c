"""What stacks of attention layers have in common, whatever their families."""

import math
from collections.abc import Sequence

from torch import Tensor, nn

from zoo.attention.base import METRIC, Attention
from zoo.errors import ZooError


def layer_matrices(layers: Sequence[Attention]) -> list[tuple[str, Tensor]]:
    """What there is to look at in each layer: ``layer_0`` for a metric M, ``layer_0/name`` for anything else."""
    return [
        (f"layer_{i}" if name == METRIC else f"layer_{i}/{name}", matrix)
        for i, layer in enumerate(layers)
        for name, matrix in layer.matrices().items()
    ]


def summed_losses(layers: Sequence[Attention]) -> dict[str, tuple[Tensor, float]]:
    """Auxiliary losses by name: the sum over layers, and the weight."""
    found: dict[str, tuple[Tensor, float]] = {}
    for layer in layers:
        for loss in layer.auxiliary_losses():
            value, _ = found.get(loss.name, (0, 0))
            found[loss.name] = (value + loss.value, loss.weight)
    return found


def lr_factors(network: nn.Module) -> dict[str, float]:
    """By what the learning rate of each of a network's parameters is multiplied, as its modules say.

    Raises:
        ZooError: for a factor that is no positive number.
    """
    found = {name: 1.0 for name, _ in network.named_parameters()}
    for where, module in network.named_modules():
        for start, factor in getattr(module, "lr_factors", dict)().items():
            if not 0 < factor < math.inf:
                raise ZooError(f"lr_factors: got {factor!r} for {start!r} of {where}; must be a positive number")
            whole = f"{where}.{start}" if where else start
            found |= {name: before * factor for name, before in found.items() if name.startswith(whole)}
    return found
