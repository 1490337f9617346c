"""Which parameters of a network lie how far up, and which of them are trained."""

from collections.abc import Collection
from typing import TYPE_CHECKING, cast

from torch import nn

from zoo.errors import ZooError

if TYPE_CHECKING:
    from zoo.tasks.base import ZooTask


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


def head_parameters(task: "ZooTask") -> set[str]:
    """Names of the parameters of the head; none where no head is known."""
    return {name for name in task.depths() if task.heads() and name.startswith(task.heads())}


def train_only(network: nn.Module, trained: Collection[str]) -> None:
    """Leave only the named parameters to the optimizer; modules without any of them lose their dropout."""
    for name, parameter in network.named_parameters():
        parameter.requires_grad = name in trained
    for module in network.modules():
        parameters = list(module.parameters())
        if parameters and not any(p.requires_grad for p in parameters):
            module.eval()
    for name, module in network.named_children():  # between the stem and the blocks, without weights
        if name != "head_drop" and not list(module.parameters()):
            module.eval()


def freeze(task: "ZooTask", train: str) -> None:
    """Leave only what ``train`` says to the optimizer: all, head, or last_N.

    Raises:
        ZooError: for a head that isn't known, or more blocks than there are.
    """
    if train == "all":
        return
    depths = task.depths()
    top = max(depths.values())
    if train == "head":
        trained = head_parameters(task)
        if not trained:
            raise ZooError(f"got head; none is known of {task.network_name}, so give last_1", argument="model.train")
    else:
        n = int(train.removeprefix("last_"))
        if n > top - 1:
            raise ZooError(
                f"got {train}; {task.network_name} has {top - 1} blocks, so give at most that", argument="model.train"
            )
        trained = {name for name, depth in depths.items() if depth >= top - n}
    train_only(task.network, trained)
