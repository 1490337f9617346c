"""Pictures of numbers: grids of heat maps under one colour scale, and curves."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import Normalize, PowerNorm
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from numpy.typing import NDArray

Scale = Literal["share", "linear", "signed"]
_MOST_NAMES = 64  # along one edge of a panel; more can't be read
_DPI = 110


@dataclass(frozen=True)
class Panel:
    """One heat map.

    Args:
        values: the numbers (rows, columns); NaN stays white.
        title: what stands above it.
    """

    values: NDArray[np.floating]
    title: str = ""


def heat_maps(
    panels: Sequence[Panel],
    columns: int,
    title: str,
    axes: tuple[str, str],
    of: str,
    scale: Scale | None = None,
    largest: float | None = None,
    blocks: int = 1,
    numbers: bool = False,
    names: tuple[Sequence[str], Sequence[str]] | None = None,
) -> Figure:
    """Heat maps of one shape side by side, each with a border, under one colour scale.

    All are drawn as one picture, which costs the same for one panel as for a hundred.

    Args:
        panels: at least one, row by row.
        columns: how many stand side by side.
        title: of the whole.
        axes: what the rows and the columns of a panel are.
        of: what the colours are.
        scale: ``share`` runs from zero to the largest, with most colours for small numbers; ``linear`` is the same with
            as many for all; ``signed`` is white at zero, red above and blue below; None is linear where no number is
            negative, else signed.
        largest: where the colours end; None is the largest number.
        blocks: into how many equal slices rows and columns fall; lines are drawn between them.
        numbers: whether each number is written into its cell.
        names: of the rows and of the columns; None numbers the blocks, where there are some.
    """
    n_rows, n_columns = panels[0].values.shape
    columns = min(columns, len(panels))
    lines = -(-len(panels) // columns)
    longest = max(n_rows, n_columns)
    side = _side(longest, names is not None, columns)
    gap = max(1, round(0.06 * longest))
    # a title takes a fifth of an inch
    head = max(gap, math.ceil(0.2 * longest / side)) if any(panel.title for panel in panels) else gap
    mosaic = np.full((lines * (n_rows + head), columns * (n_columns + gap) - gap), np.nan)
    corners = []
    for i, panel in enumerate(panels):
        top, left = i // columns * (n_rows + head) + head, i % columns * (n_columns + gap)
        mosaic[top : top + n_rows, left : left + n_columns] = panel.values
        corners.append((top, left))

    height, width = (cells / longest * side for cells in mosaic.shape)
    figure, box = _figure(height, width, title, names)
    shown = figure.add_axes(box)
    cmap, norm = _colours(mosaic, scale, largest)
    image = shown.imshow(mosaic, cmap=cmap, norm=norm, aspect="equal", interpolation="nearest")
    for (top, left), panel in zip(corners, panels, strict=True):
        if panel.title:
            shown.text(
                left + n_columns / 2 - 0.5,
                top - 0.5 - 0.15 * head,
                panel.title,
                ha="center",
                va="bottom",
                fontsize=8,
                parse_math=False,
            )
    if numbers:
        _write_numbers(shown, image, corners, panels)
    shown.add_collection(_borders(corners, n_rows, n_columns, 1, linewidths=0.8))
    if blocks > 1:
        shown.add_collection(_borders(corners, n_rows, n_columns, blocks, linewidths=0.4, alpha=0.6))
    _name_edges(shown, corners, (n_rows, n_columns), blocks, names, axes)
    for spine in shown.spines.values():
        spine.set_visible(False)
    bar = figure.add_axes(
        (box[0] + box[2] + 0.15 / figure.get_figwidth(), box[1], 0.14 / figure.get_figwidth(), box[3])
    )
    figure.colorbar(image, cax=bar, label=of)
    return figure


def curves(
    panels: Sequence[tuple[str, Sequence[tuple[str, NDArray[np.floating]]]]], title: str, axes: tuple[str, str]
) -> Figure:
    """Curves over 1, 2, ...: a panel a title, in it a curve a name, all panels on the same scale.

    Args:
        panels: titles, and each one's curves by name.
        title: of the whole.
        axes: what goes up and what goes to the right.
    """
    columns = min(4, len(panels))
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(2.9 * columns + 1.2, 2.5 * lines + 0.6), layout="constrained", dpi=_DPI)
    grid = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False)
    figure.suptitle(title, fontsize=10, parse_math=False)
    for place, (name, drawn) in zip(grid.flat, panels, strict=False):
        place.set_title(name, fontsize=8, parse_math=False)
        place.axhline(0, color="grey", linewidth=0.5)
        for label, values in drawn:
            place.plot(np.arange(1, len(values) + 1), values, linewidth=1, label=label)
    for empty in grid.flat[len(panels) :]:
        empty.set_axis_off()
    figure.supylabel(axes[0], fontsize=9)
    figure.supxlabel(axes[1], fontsize=9)
    handles, labels = grid.flat[0].get_legend_handles_labels()
    if len(labels) > 1:
        figure.legend(handles, labels, loc="outside right upper", fontsize=7)
    return figure


def bars(names: Sequence[str], values: Sequence[float], title: str, axis: str) -> Figure:
    """A bar a name, from the top down, with its number; from zero, so that lengths compare."""
    figure = Figure(figsize=(6, 0.9 + 0.42 * len(names)), layout="constrained", dpi=_DPI)
    axes = figure.add_subplot()
    drawn = axes.barh(range(len(names)), values, color="#4477aa")
    axes.bar_label(drawn, [f" {value:.4g}" for value in values], fontsize=8)
    axes.set_yticks(range(len(names)), names, parse_math=False)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_xlabel(axis)
    axes.set_title(title, fontsize=10, parse_math=False)
    return figure


# ---------------------------------------------------------------------- what a grid is made of


def _side(longest: int, is_named: bool, columns: int) -> float:
    """The longer side of a panel, in inches: room for every name, and no more than a page for all."""
    if not is_named:
        return min(3.2, max(1.1, 14 / columns), max(1.4, 0.3 * longest))
    return min(9.0, max(1.6, 0.115 * min(longest, _MOST_NAMES)))


def _figure(
    height: float, width: float, title: str, names: tuple[Sequence[str], Sequence[str]] | None
) -> tuple[Figure, tuple[float, float, float, float]]:
    """A figure with room for a grid of this size in inches, and where in it the grid is."""
    longest = (max((len(name) for name in side), default=0) for side in (names or ((), ())))
    left, bottom = (0.55 + 0.068 * min(n, 28) for n in longest)
    right, top = 0.95, 0.45
    whole_width, whole_height = max(width + left + right, 0.5 + 0.075 * len(title)), max(height + bottom + top, 1.8)
    figure = Figure(figsize=(whole_width, whole_height), dpi=_DPI)
    figure.suptitle(title, fontsize=10, y=1 - 0.12 / whole_height, va="top", parse_math=False)
    return figure, (left / whole_width, bottom / whole_height, width / whole_width, height / whole_height)


def _colours(values: NDArray[np.floating], scale: Scale | None, largest: float | None) -> tuple[str, Normalize]:
    """The colour map and its ends."""
    finite = values[np.isfinite(values)]
    if scale is None:
        scale = "signed" if len(finite) and finite.min() < 0 else "linear"
    if largest is None:
        largest = max(float(np.abs(finite).max()) if len(finite) else 0.0, 1e-12)
    if scale == "signed":
        return "RdBu_r", Normalize(-largest, largest)
    return "magma_r", PowerNorm(0.5, 0, largest) if scale == "share" else Normalize(0, largest)


def _borders(
    corners: Sequence[tuple[int, int]], n_rows: int, n_columns: int, blocks: int, **look: float
) -> LineCollection:
    """Lines around each panel, and between the blocks in it."""
    found: list[list[tuple[float, float]]] = []
    for top, left in corners:
        for i in range(blocks + 1):
            y, x = top + i * n_rows / blocks - 0.5, left + i * n_columns / blocks - 0.5
            found.append([(left - 0.5, y), (left + n_columns - 0.5, y)])
            found.append([(x, top - 0.5), (x, top + n_rows - 0.5)])
    return LineCollection(found, colors="black", clip_on=False, **look)


def _write_numbers(shown: Axes, image: AxesImage, corners: Sequence[tuple[int, int]], panels: Sequence[Panel]) -> None:
    """Each number in its cell, dark on light or light on dark."""
    for (top, left), panel in zip(corners, panels, strict=True):
        for (i, j), value in np.ndenumerate(panel.values):
            if np.isfinite(value):
                red, green, blue, _ = image.to_rgba(np.array([value]))[0]
                colour = "white" if 0.3 * red + 0.6 * green + 0.1 * blue < 0.5 else "black"
                shown.text(left + j, top + i, f"{value:.2f}", ha="center", va="center", fontsize=6.5, color=colour)


def _name_edges(
    shown: Axes,
    corners: Sequence[tuple[int, int]],
    shape: tuple[int, int],
    blocks: int,
    names: tuple[Sequence[str], Sequence[str]] | None,
    axes: tuple[str, str],
) -> None:
    """Names at the left of the first panel of every line, and below the last of every column."""
    starts = sorted({top for top, _ in corners}), sorted({left for _, left in corners})
    for side, which in enumerate(("y", "x")):
        within: list[tuple[float, str]] = []
        if names is not None:
            step = math.ceil(shape[side] / _MOST_NAMES)
            within = [(i, _short(names[side][i])) for i in range(0, shape[side], step)]
        elif blocks > 1:
            within = [((i + 0.5) * shape[side] / blocks - 0.5, str(i)) for i in range(blocks)]
        ticks = [(start + place, name) for start in starts[side] for place, name in within]
        getattr(shown, f"set_{which}ticks")([place for place, _ in ticks])
        turned = {"rotation": 90} if which == "x" and any(len(name) > 2 for _, name in within) else {}
        getattr(shown, f"set_{which}ticklabels")([name for _, name in ticks], fontsize=6.5, parse_math=False, **turned)
        getattr(shown, f"set_{which}label")(axes[side], fontsize=9)
    shown.tick_params(length=1.5, pad=1.5)


def _short(name: str, length: int = 28) -> str:
    return name if len(name) <= length else f"{name[: length - 1]}…"
