"""Weights of a picture model carried over to other classes, sizes, channels and layers."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from timm.models import adapt_input_conv
from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn
from torch import Tensor, nn

from zoo.checkpoint.transfer import TensorTransfer, shape_of


def adapt_pictures(
    network: nn.Module,
    saved: Mapping[str, Tensor],
    saved_classes: Sequence[str] | None,
    classes: Sequence[str],
    heads: Sequence[str],
) -> tuple[dict[str, Tensor], list[TensorTransfer]]:
    """A state dict for ``network`` from the weights of another picture model.

    Class rows of the head go by class name, the first convolution to other channels and positions to another size by
    timm's rules, and the value and output projections of ordinary attention into a ``MetricAttention``. Whatever has no
    counterpart of its shape stays as ``network`` has it.

    Args:
        network: the model to fill; it isn't changed.
        saved: the other model's state dict.
        saved_classes: its class names in order; None if nobody knows them.
        classes: the class names of ``network``.
        heads: names of the classifier's layers, in both.

    Returns:
        The state dict, and what became of each tensor.
    """
    own = {name: tensor.detach() for name, tensor in network.state_dict().items()}
    source, notes = dict(saved), {}
    for theirs_in, mine_in in (("qkv", "W_v"), ("proj", "out_proj")):
        for name in [name for name in source if re.search(rf"\.attn\.{theirs_in}\.(weight|bias)$", name)]:
            mine_at = name.replace(f".attn.{theirs_in}.", f".attn.{mine_in}.")
            if name not in own and mine_at in own:
                values = theirs_in == "qkv"
                source[mine_at] = source[name].chunk(3)[2] if values else source[name]
                notes[mine_at] = f"the values' third of {name}" if values else name
                del source[name]
    resized = _fit_pictures(network, source)

    starts = tuple(f"{head}." for head in heads)
    rows = {c: i for i, c in enumerate(saved_classes or ())}
    known = [c for c in classes if c in rows]
    others = "" if len(known) == len(classes) else "; the others new"
    reorder = saved_classes is None or list(saved_classes) != list(classes)
    filled, transfers = dict(own), []
    for name, mine in own.items():
        theirs = resized.get(name)
        if theirs is not None and reorder and name.startswith(starts) and theirs.shape[1:] == mine.shape[1:]:
            if not known:
                transfers.append(TensorTransfer(name, "new", "no class in common"))
                continue
            filled[name] = mine.clone()
            for i, c in enumerate(classes):
                if c in rows:
                    filled[name][i] = theirs[rows[c]]
            transfers.append(
                TensorTransfer(name, "moved", f"rows of {len(known)} of {len(classes)} classes, by name{others}")
            )
        elif theirs is None or theirs.shape != mine.shape:
            was = "not there" if theirs is None else f"{shape_of(theirs)} there"
            transfers.append(TensorTransfer(name, "new", f"{was}, {shape_of(mine)} here"))
        else:
            filled[name] = theirs
            if name in notes:
                transfers.append(TensorTransfer(name, "moved", notes[name]))
            elif source[name].shape != theirs.shape:
                transfers.append(TensorTransfer(name, "resized", f"{shape_of(source[name])} to {shape_of(theirs)}"))
            else:
                transfers.append(TensorTransfer(name, "kept"))
    transfers += [
        TensorTransfer(name, "dropped", f"{shape_of(source[name])}, no place here")
        for name in source
        if name not in own
    ]
    return filled, transfers


def _fit_pictures(network: nn.Module, source: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``source`` with the first convolution fitted to the network's channels, patches and positions to its sizes."""
    own, fitted = network.state_dict(), dict(source)
    config = cast(Mapping[str, Any], getattr(network, "pretrained_cfg", None) or {})
    first = config.get("first_conv") or ()
    for name in [f"{conv}.weight" for conv in ([first] if isinstance(first, str) else first)]:
        if name in own and name in fitted and own[name].ndim == fitted[name].ndim == 4:
            there, here = fitted[name].shape[1], own[name].shape[1]
            if {there, here} == {1, 3}:  # not where the stem cuts pictures into blocks first
                fitted[name] = adapt_input_conv(here, fitted[name], base_chans=there)
    patches = "patch_embed.proj.weight"
    if not isinstance(network, VisionTransformer) or patches not in own:
        return fitted
    if patches in fitted and fitted[patches].shape[0] != own[patches].shape[0]:
        return fitted  # of another width
    positions = None if _may_resize(network, own, fitted) else fitted.pop("pos_embed", None)
    fitted = checkpoint_filter_fn(fitted, network)
    return fitted if positions is None else fitted | {"pos_embed": positions}


def _may_resize(network: VisionTransformer, own: Mapping[str, Tensor], source: Mapping[str, Tensor]) -> bool:
    """Whether timm may resize the positions: it takes them for those of a square, after as many tokens as here."""
    there, here = source.get("pos_embed"), own.get("pos_embed")
    if there is None or here is None or there.shape == here.shape:
        return False
    tokens = ("cls_token", "reg_token")
    if any((source[name].shape if name in source else 0) != (own[name].shape if name in own else 0) for name in tokens):
        return False
    patches = there.shape[1] - (0 if network.no_embed_class else network.num_prefix_tokens)
    return patches > 0 and math.isqrt(patches) ** 2 == patches
