"""Pictures say what they are said to: colours, borders and names at their places."""

import numpy as np
import pytest

from zoo.drawing import Panel, bars, curves, heat_maps


def drawn(*panels, **options):
    given = {"columns": 2, "title": "t", "axes": ("row", "column"), "of": "size", **options}
    figure = heat_maps([Panel(np.array(values, dtype=float), name) for name, values in panels], **given)
    return figure, figure.axes[0], figure.axes[0].images[0]


def test_every_panel_is_where_its_title_is_under_one_scale():
    figure, axes, image = drawn(("a", [[1, 0], [0, 0]]), ("b", [[2, 0], [0, 0]]), ("c", [[4, 0], [0, 0]]))
    values = image.get_array().filled(np.nan)
    for title in axes.texts:
        left = round(title.get_position()[0] - 0.5)
        top = int(np.ceil(title.get_position()[1]))
        column = values[top : top + 2, left]
        assert np.nanmax(column) == {"a": 1, "b": 2, "c": 4}[title.get_text()]
    assert image.norm.vmin == 0
    assert image.norm.vmax == 4
    assert figure.axes[1].get_ylabel() == "size"


@pytest.mark.parametrize(
    ("values", "scale", "ends"),
    [
        ([[0.0, 3.0]], None, (0, 3)),
        ([[-2.0, 1.0]], None, (-2, 2)),
        ([[0.0, 1.0]], "signed", (-1, 1)),
        ([[np.nan, np.nan]], None, (0, 1e-12)),
        ([[0.0, 0.0]], None, (0, 1e-12)),
    ],
)
def test_scale_begins_at_zero_or_is_symmetric(values, scale, ends):
    _, _, image = drawn(("a", values), scale=scale)
    assert (image.norm.vmin, image.norm.vmax) == ends


def test_a_zero_is_white_on_a_signed_scale():
    _, _, image = drawn(("a", [[-1.0, 1.0], [0.0, 0.5]]))
    blue, red, white = (image.to_rgba(np.ma.array([x]))[0, :3] for x in (-1.0, 1.0, 0.0))
    assert blue[2] > blue[0]
    assert red[0] > red[2]
    assert (white > 0.95).all()


def test_lines_are_drawn_around_panels_and_between_blocks():
    _, axes, _ = drawn(("a", np.zeros((4, 4))), ("b", np.ones((4, 4))), blocks=2)
    outer, inner = (sorted(tuple(map(tuple, s)) for s in lines.get_segments()) for lines in axes.collections)
    assert len(outer) == 2 * 4
    assert len(inner) == 2 * 6
    middle = {(a[0] + b[0]) / 2 for a, b in inner if a[0] == b[0]}
    assert {1.5, 6.5} <= middle  # after two of four columns; the second panel begins at 5


def test_names_are_shown_as_they_are_and_thinned_where_there_are_too_many():
    names = [f"$x_{i}$" for i in range(100)]
    figure, axes, _ = drawn(("a", np.eye(100)), names=(names, names))
    shown = [label.get_text() for label in axes.get_yticklabels()]
    assert shown == names[::2]
    figure.canvas.draw_idle()
    figure.savefig("names.png")  # mathematics in a name is no reason to fail


def test_curves_and_bars_have_their_numbers():
    figure = curves([("p", [("h", np.array([3.0, 2.0]))]), ("q", [("h", np.array([1.0]))])], "t", ("value", "rank"))
    assert figure.axes[0].lines[1].get_ydata().tolist() == [3, 2]
    assert figure.axes[0].lines[1].get_xdata().tolist() == [1, 2]
    chart = bars(["full", "none"], [1.5, 2.5], "t", "loss").axes[0]
    assert [bar.get_width() for bar in chart.patches] == [1.5, 2.5]
    assert [label.get_text() for label in chart.get_yticklabels()] == ["full", "none"]
