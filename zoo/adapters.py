"""Low-rank adapters (LoRA) on a network's projections, through ``peft``.

W x becomes W x + (alpha / rank) B A x with A (rank, in) and B (out, rank), B zero at the start; W stays as it is.
Source: Hu et al. 2021, LoRA, section 4.1.
"""

import warnings
from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from zoo.attention import Attention
from zoo.errors import ZooError

BASE = ".base_layer."  # peft puts the layer that it adapts there


def projections(network: nn.Module, depths: Mapping[str, int]) -> list[str]:
    """Names of the linear layers in a network's blocks; of an attention's, those that it calls projections."""
    top = max(depths.values())
    linear = [
        name
        for name, module in network.named_modules()
        if type(module) is nn.Linear and 0 < depths.get(f"{name}.weight", 0) < top
    ]
    layers = {name: module for name, module in network.named_modules() if isinstance(module, Attention)}
    theirs = {f"{name}.{own}" for name, layer in layers.items() for own in layer.projections()}
    inside = tuple(f"{name}." for name in layers)
    return [name for name in linear if name in theirs or not (inside and name.startswith(inside))]


def add_lora(network: nn.Module, names: Collection[str], rank: int, alpha: float, dropout: float) -> None:
    """Put an adapter beside each of the named linear layers; what the network computes stays the same.

    Raises:
        ZooError: if there is no layer to adapt, or ``peft`` isn't installed.
    """
    if not names:
        raise ZooError("model.lora_rank: this network has no linear projections in its blocks; set model.train instead")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise ZooError("model.lora_rank: needs peft, which isn't installed; pip install 'damcha-zoo[lora]'") from None
    scale: Any = alpha  # peft's annotation says int, its arithmetic takes any number
    config = LoraConfig(r=rank, lora_alpha=scale, lora_dropout=dropout, target_modules=list(names))
    inject_adapter_in_model(config, network)


def has_lora(network: nn.Module) -> bool:
    return any(BASE in f".{name}." for name, _ in network.named_parameters())


def merge_lora(network: nn.Module) -> None:
    """Add each adapter to the layer it stands beside, and take it away."""
    for name, module in list(network.named_modules()):
        if hasattr(module, "get_base_layer") and hasattr(module, "merge"):
            module.merge()
            parent, _, child = name.rpartition(".")
            setattr(network.get_submodule(parent), child, module.get_base_layer())
