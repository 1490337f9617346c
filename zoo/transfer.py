"""Carry trained weights over to a network for other data, by name, and say what became of each."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from timm.models import adapt_input_conv
from timm.models.vision_transformer import checkpoint_filter_fn
from torch import Tensor, nn

from zoo.models.vision_transformer import VisionTransformer


@dataclass
class Fate:
    """What became of a tensor: ``kept``, ``moved`` (other place or order), ``resized``, ``new`` or ``dropped``."""

    tensor: str
    fate: Literal["kept", "moved", "resized", "new", "dropped"]
    note: str = ""

    def plain(self) -> dict[str, str]:
        return asdict(self)


def summary(fates: Sequence[Fate], kept: bool = True) -> str:
    """A Markdown table of what became of each tensor; those simply kept in one row, or left out."""
    same = [fate for fate in fates if fate.fate == "kept"]
    rows = [f"| {fate.fate} | {fate.tensor} | {fate.note} |" for fate in fates if fate.fate != "kept"]
    if kept and same:
        rows.insert(0, f"| kept | {len(same)} tensors | as they were |")
    return "\n".join(["| | tensor | |", "|---|---|---|", *rows])


def adapt_pictures(
    network: nn.Module,
    saved: Mapping[str, Tensor],
    saved_classes: Sequence[str] | None,
    classes: Sequence[str],
    head: str,
) -> tuple[dict[str, Tensor], list[Fate]]:
    """A state dict for ``network`` from the weights of another picture model.

    Class rows of the head go by class name, the first convolution to other channels and positions to another size by
    timm's rules, and the value and output projections of ordinary attention into a ``MetricAttention``. Whatever has no
    counterpart of its shape stays as ``network`` has it.

    Args:
        network: the model to fill; it isn't changed.
        saved: the other model's state dict.
        saved_classes: its class names in order; None if nobody knows them.
        classes: the class names of ``network``.
        head: name of the classifier in both.

    Returns:
        The state dict, and what became of each tensor.
    """
    own = {name: tensor.detach() for name, tensor in network.state_dict().items()}
    source, notes = dict(saved), {}
    for name in [name for name in source if name.endswith(".attn.qkv.weight") or name.endswith(".attn.qkv.bias")]:
        block, kind = name.removesuffix(f"qkv.{name.rpartition('.')[2]}"), name.rpartition(".")[2]
        if f"{block}W_v.{kind}" in own and name not in own:
            source[f"{block}W_v.{kind}"] = source.pop(name).chunk(3)[2]
            notes[f"{block}W_v.{kind}"] = f"the values' third of {name}"
            if f"{block}proj.{kind}" in source:
                source[f"{block}out_proj.{kind}"] = source.pop(f"{block}proj.{kind}")
                notes[f"{block}out_proj.{kind}"] = f"{block}proj.{kind}"
    resized = _fit_pictures(network, source)

    filled, fates = dict(own), []
    for name, mine in own.items():
        theirs = resized.get(name)
        if head and name.startswith(f"{head}.") and (saved_classes is None or list(saved_classes) != list(classes)):
            rows = {c: i for i, c in enumerate(saved_classes or ())}
            known = [c for c in classes if c in rows]
            if theirs is None or theirs.shape[1:] != mine.shape[1:] or not known:
                fates.append(Fate(name, "new", "no class in common"))
                continue
            filled[name] = mine.clone()
            for i, c in enumerate(classes):
                if c in rows:
                    filled[name][i] = theirs[rows[c]]
            fates.append(
                Fate(name, "moved", f"rows of {len(known)} of {len(classes)} classes, by name; the others new")
            )
        elif theirs is None or theirs.shape != mine.shape:
            was = "not there" if theirs is None else f"{_shape(theirs)} there"
            fates.append(Fate(name, "new", f"{was}, {_shape(mine)} here"))
        else:
            filled[name] = theirs
            if name in notes:
                fates.append(Fate(name, "moved", notes[name]))
            elif source[name].shape != theirs.shape:
                fates.append(Fate(name, "resized", f"{_shape(source[name])} to {_shape(theirs)}"))
            else:
                fates.append(Fate(name, "kept"))
    fates += [Fate(name, "dropped", f"{_shape(source[name])}, no place here") for name in source if name not in own]
    return filled, fates


def _fit_pictures(network: nn.Module, source: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``source`` with the first convolution fitted to the network's channels, patches and positions to its sizes."""
    fitted = dict(source)
    patches = getattr(getattr(network, "patch_embed", None), "proj", None)
    name = "patch_embed.proj.weight"
    if isinstance(patches, nn.Conv2d) and name in fitted:
        there, here = fitted[name].shape[1], patches.weight.shape[1]
        if there != here:
            fitted[name] = adapt_input_conv(here, fitted[name], base_chans=there)
    same_width = name not in fitted or fitted[name].shape[0] == network.state_dict()[name].shape[0]
    if isinstance(network, VisionTransformer) and same_width:
        return checkpoint_filter_fn(fitted, network)
    return fitted


def _shape(tensor: Tensor) -> str:
    return " x ".join(map(str, tensor.shape)) or "a number"
