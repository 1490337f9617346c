"""What attention layers show, drawn: one colour scale a picture, a border around each head."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Literal

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from zoo.attention.base import Shown
from zoo.drawing import Panel, bars, curves, heat_maps
from zoo.looking.layers import Look
from zoo.looking.measures import head_similarity, maps_of, spectra

_WEIGHT = "attention weight"


def attention_pictures(looks: Sequence[Look], title: str) -> Iterator[Figure]:
    """All maps of all layers in one picture, a line a layer; layers with maps of another shape in one of their own.

    Args:
        looks: taken with maps.
        title: what the sample is.
    """
    for shape, group in groupby(looks, key=lambda look: maps_of(look).shape):
        panels = [
            Panel(values, f"layer {look.layer}, head {h}") for look in group for h, values in enumerate(_seen(look))
        ]
        yield heat_maps(panels, shape[0], f"Attention of {title}", ("query", "key"), _WEIGHT, _scale(panels))


def attention_picture(look: Look, names: Sequence[str], title: str) -> Figure:
    """The maps of one layer, with the names of the tokens.

    Args:
        look: taken with maps.
        names: of the tokens; none to number them.
        title: what the sample is.
    """
    maps = _seen(look)
    labels = _labels(names, maps.shape[1]), _labels(names, maps.shape[2])
    panels = [Panel(values, f"head {h}") for h, values in enumerate(maps)]
    columns = int(np.ceil(np.sqrt(len(maps))))
    heading = f"Attention of {title}, layer {look.layer} ({look.attention})"
    return heat_maps(panels, columns, heading, ("query", "key"), _WEIGHT, _scale(panels), names=labels)


def similarity_picture(looks: Sequence[Look]) -> Figure:
    """Cosines of the heads' maps, a panel a layer."""
    panels = [Panel(head_similarity(maps_of(look)).numpy(), f"layer {look.layer}") for look in looks]
    heads = [str(h) for h in range(panels[0].values.shape[0])]
    return heat_maps(
        panels,
        min(4, len(panels)),
        "Similarity of heads' attention maps",
        ("head", "head"),
        "cosine",
        scale="signed" if any((panel.values < 0).any() for panel in panels) else "linear",
        largest=1.0,
        numbers=len(heads) * len(heads) * len(panels) <= 512,  # more take long and can't be read
        names=(heads, heads),
    )


def shown_picture(looks: Sequence[Look], name: str, tokens: Sequence[str]) -> Figure:
    """What the layers show under a name; layers with the same numbers share a panel.

    Args:
        looks: those of the layers that show it, all with the same axes and sizes.
        name: of what they show.
        tokens: names of the tokens.
    """
    groups = same_layers(looks, name)
    first = looks[0].shown[name]
    words = [axis.replace("_", " ") for axis in first.axes]
    title = name.replace("_", " ")
    if not first.axes:
        return bars([where for where, _ in groups], [float(item.values) for _, item in groups], title, title)
    if len(first.axes) == 1:
        lines = np.stack([item.values.numpy() for _, item in groups])
        places = [str(i) for i in range(lines.shape[1])]
        return heat_maps([Panel(lines)], 1, title, ("layer", words[0]), title, names=([w for w, _ in groups], places))
    if len(first.axes) == 3:
        panels = [
            Panel(values, f"{where}, {words[0]} {i}")
            for where, item in groups
            for i, values in enumerate(item.values.numpy())
        ]
        return heat_maps(panels, len(first.values), title, (words[1], words[2]), title, names=_numbers(panels[0]))
    if first.axes[0] == "token":  # tokens to the right, as one reads them
        panels = [Panel(item.values.numpy().T, where) for where, item in groups]
        rows = [str(i) for i in range(panels[0].values.shape[0])]
        named = rows, _labels(tokens, panels[0].values.shape[1])
        return heat_maps(panels, 1, title, (words[1], "token"), title, names=named)
    panels = [Panel(item.values.numpy(), where) for where, item in groups]
    axes = (words[0], words[1]) if first.blocks == 1 else ("block row (head)", "block column (head)")
    names = _numbers(panels[0]) if first.blocks == 1 else None
    return heat_maps(panels, min(4, len(panels)), title, axes, title, blocks=first.blocks, names=names)


def spectrum_picture(looks: Sequence[Look], name: str) -> Figure:
    """Singular values, and eigenvalues of the symmetric part, of a matrix a head; layers with the same share panels."""
    kinds = {"singular_value": "singular values", "eigenvalue": "eigenvalues of the symmetric part"}
    panels: list[tuple[str, list[tuple[str, NDArray[np.floating]]]]] = []
    for where, item in same_layers(looks, name):
        found = [spectra(matrix) for matrix in item.values]
        panels += [
            (f"{where}: {words}", [(f"head {h}", by_kind[kind].numpy()) for h, by_kind in enumerate(found)])
            for kind, words in kinds.items()
        ]
    return curves(panels, f"Spectrum of {name.replace('_', ' ')}", ("value", "rank"))


def _scale(panels: Sequence[Panel]) -> Literal["share", "signed"]:
    return "signed" if any((panel.values < 0).any() for panel in panels) else "share"


def _seen(look: Look) -> NDArray[np.floating]:
    """A look's maps, blank where a query doesn't see a key."""
    maps = maps_of(look).numpy()
    return np.where(maps == 0, np.nan, maps)


def same_layers(looks: Sequence[Look], name: str) -> list[tuple[str, Shown]]:
    """What layers show under a name, once for layers in a row with the same numbers; and which layers, in words."""
    found: list[tuple[list[int], Shown]] = []
    for look in looks:
        item = look.shown[name]
        if found and _are_same(found[-1][1].values, item.values):
            found[-1][0].append(look.layer)
        else:
            found.append(([look.layer], item))
    return [
        (f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]} to {layers[-1]}", item)
        for layers, item in found
    ]


def is_drawn_alike(looks: Sequence[Look], name: str) -> bool:
    """Whether all layers show something of the same axes and sizes under a name, so that one picture holds it."""
    items = [look.shown[name] for look in looks]
    return len({(item.axes, item.values.shape) for item in items}) == 1 and items[0].values.numel() > 0


def _are_same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())


def _numbers(panel: Panel) -> tuple[list[str], list[str]] | None:
    """Numbers for the rows and the columns of a small panel."""
    rows, columns = panel.values.shape
    return None if max(rows, columns) > 16 else (_labels([], rows), _labels([], columns))


def _labels(names: Sequence[str], n: int) -> list[str]:
    return list(names) if len(names) == n else [str(i) for i in range(n)]
