"""What the attention layers of a network do with one sample: their weights, and what else they show."""

import inspect
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from zoo.attention.base import Attention, Shown
from zoo.attention.packed import PackedMultiheadAttention
from zoo.errors import ZooError

MOST_WEIGHTS = 1 << 23
"""How many attention weights a look keeps at the most."""

_FORWARD = inspect.signature(Attention.forward)


@dataclass(frozen=True)
class Look:
    """What one layer did with a sample; everything is on the CPU, in float32 at the least.

    Args:
        layer: which one, from 0, in the order in which they ran.
        attention: what it is registered as, or its class.
        maps: its weights (H, queries, keys), NaN at pairs that the layer knows no weight for, such as those of nodes
            without an edge; None where they weren't asked for.
        shown: what else it shows, by name.
    """

    layer: int
    attention: str
    maps: Tensor | None
    shown: Mapping[str, Shown]


def attention_layers(network: nn.Module) -> list[nn.Module]:
    """The layers of a network that ``look`` can look into: those of this zoo, along graphs, and timm's own."""
    return [module for module in network.modules() if _is_ours(module) or _is_packed(module) or _is_timms(module)]


def look(
    network: nn.Module,
    inputs: Tensor,
    layers: Collection[int] | None = None,
    maps: bool = True,
    most: int = MOST_WEIGHTS,
) -> list[Look]:
    """Pass one sample through a network and keep what its attention layers do with it.

    The network is in eval mode for the pass and as it was afterwards; a compiled one runs uncompiled.

    Args:
        network: any network; layers that aren't known aren't in the result.
        inputs: what it reads, a single sample: (1, ...).
        layers: the numbers of the layers to keep; None keeps all.
        maps: whether to keep the attention weights.
        most: how many of these to keep.

    Raises:
        ZooError: if there are more attention weights than ``most``.
    """
    looked = _Looking(layers, maps, most)
    with ExitStack() as stack, torch.no_grad():
        for module in network.modules():
            stack.callback(setattr, module, "training", module.training)
        network.eval()
        for module in attention_layers(network):
            hook = looked.ours if _is_ours(module) else looked.packed if _is_packed(module) else None
            if hook is not None:
                stack.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
                continue
            stack.callback(setattr, module, "fused_attn", module.fused_attn)
            setattr(module, "fused_attn", False)  # noqa: B010  (mypy's; the fused kernel has no weights to show)
            name = type(module).__name__
            drop = cast(nn.Module, module.attn_drop)
            handle = drop.register_forward_hook(lambda _, given, __, name=name: looked.timms(name, given))
            stack.callback(handle.remove)
        network.forward(inputs)
    return looked.found


def _is_ours(module: nn.Module) -> bool:
    return isinstance(module, Attention) and type(module).forward is Attention.forward


def _is_packed(module: nn.Module) -> bool:
    return isinstance(module, PackedMultiheadAttention)


def _is_timms(module: nn.Module) -> bool:
    """Whether it is an attention in the way of timm's, which drops weights out in ``attn_drop`` unless it is fused."""
    return hasattr(module, "fused_attn") and isinstance(getattr(module, "attn_drop", None), nn.Module)


class _Looking:
    """Gathers what the layers do, as they run; its methods are hooks."""

    def __init__(self, layers: Collection[int] | None, maps: bool, most: int) -> None:
        self.layers, self.maps, self.most = layers, maps, most
        self.found: list[Look] = []
        self._next, self._kept = 0, 0

    def _add(self, name: str, weights: Any, size: int, shown: Any) -> None:
        """Count a layer, and keep it if it is wanted; ``weights()`` and ``shown()`` are asked then only."""
        layer, self._next = self._next, self._next + 1
        if self.layers is not None and layer not in self.layers:
            return
        self._kept += size if self.maps else 0
        if self._kept > self.most:
            raise ZooError(
                f"got one whose attention maps hold more than {self.most:,} weights; give a shorter one, or fewer "
                "layers",
                argument="sample",
            )
        self.found.append(Look(layer, name, _kept(weights()) if self.maps else None, shown()))

    def ours(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _: Any) -> None:
        module = cast(Attention, layer)
        bound = _FORWARD.bind(module, *args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        tokens = given["x"].shape[1]

        def weights() -> Tensor:
            found = module.forward(given["x"], given["masks"], given["shared"], given["cache"], need_weights=True)[1]
            if found is None:
                raise ZooError(f"attention {module.name} gave no weights for need_weights; its attend must return them")
            return found[0]

        def shown() -> dict[str, Shown]:
            found = module.shown(given["x"], given["masks"], given["shared"])
            return {name: Shown(_kept(item.values), item.axes, item.blocks) for name, item in found.items()}

        self._add(module.name or type(module).__name__, weights, module.n_heads * tokens * tokens, shown)

    def packed(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _: Any) -> None:
        module = cast(PackedMultiheadAttention, layer)
        shape = (module.num_heads, module.query_features, module.key_features)

        def weights() -> Tensor:
            asked = kwargs | {"need_weights": True, "average_attn_weights": False}
            along = cast(Tensor, module.forward(*args, **asked)[1])  # (1, nnz, H)
            dense = along.new_full(shape, float("nan"))
            dense[:, module.target_index, module.source_index] = along[0].T
            return dense

        self._add("packed", weights, shape[0] * shape[1] * shape[2], dict)

    def timms(self, name: str, given: tuple[Tensor, ...]) -> None:
        if given[0].dim() == 4 and len(given[0]) == 1:  # else windows, or another thing of timm's
            self._add(name, lambda: given[0][0], given[0].numel(), dict)


def _kept(values: Tensor) -> Tensor:
    """A copy for the CPU, in float32 at the least."""
    return values.detach().to(torch.promote_types(values.dtype, torch.float32)).cpu().clone()
