"""What stacks of attention layers have in common, whatever their families."""

from collections.abc import Sequence

from torch import Tensor

from zoo.attention.base import METRIC, Attention


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
