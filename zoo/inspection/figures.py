"""Figures of what attention layers show, as tables."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
from torch import Tensor

from zoo.attention.base import Shown
from zoo.looking import Look
from zoo.looking.measures import (
    block_norms,
    head_similarity,
    is_matrix_a_head,
    map_entropy,
    maps_of,
    mean_of_pairs,
    spectra,
)

Row = dict[str, Any]


# ---------------------------------------------------------------------- of attention maps


def similarity_table(looks: Sequence[Look]) -> pd.DataFrame:
    """layer, head, other_head, cosine."""
    rows = [
        {"layer": look.layer, "head": g, "other_head": h, "cosine": float(found[g, h])}
        for look, found in ((look, head_similarity(maps_of(look))) for look in looks)
        for g in range(len(found))
        for h in range(len(found))
    ]
    return pd.DataFrame(rows, columns=["layer", "head", "other_head", "cosine"])


def attention_table(looks: Sequence[Look], names: Sequence[str]) -> pd.DataFrame:
    """layer, head, query, key, query_name, key_name, weight; pairs without a weight, or with weight zero, left out."""
    parts = []
    for look in looks:
        weights = maps_of(look).numpy()
        head, query, key = np.nonzero(np.nan_to_num(weights))
        columns = {"layer": look.layer, "head": head, "query": query, "key": key}
        columns |= {f"{end}_name": _named(names, place) for end, place in (("query", query), ("key", key))}
        parts.append(pd.DataFrame({**columns, "weight": weights[head, query, key]}))
    return pd.concat(parts, ignore_index=True)


def _named(names: Sequence[str], places: np.ndarray) -> np.ndarray:
    return np.array(names, dtype=object)[places] if names else places.astype(str)


# ---------------------------------------------------------------------- of matrices


def block_table(looks: Sequence[Look], name: str) -> pd.DataFrame:
    """layer, block_row, block_column, norm, mean, min, max of a matrix that falls into blocks."""
    rows = []
    for look, item in _having(looks, name):
        n = item.blocks
        parts = item.values.double().view(n, item.values.shape[0] // n, n, item.values.shape[1] // n).transpose(1, 2)
        norms = block_norms(item.values, n)
        for i in range(n):
            for j in range(n):
                part = parts[i, j]
                rows.append(
                    {"layer": look.layer, "block_row": i, "block_column": j, "norm": float(norms[i, j])}
                    | {"mean": float(part.mean()), "min": float(part.min()), "max": float(part.max())}
                )
    return pd.DataFrame(rows)


def spectrum_table(looks: Sequence[Look], name: str) -> pd.DataFrame:
    """layer, head, kind (``singular_value``, or ``eigenvalue`` of the symmetric part), rank from 1, value."""
    return pd.DataFrame(
        [
            {"layer": look.layer, "head": head, "kind": kind, "rank": rank, "value": value}
            for look, item in _having(looks, name)
            for head, matrix in enumerate(item.values)
            for kind, values in spectra(matrix).items()
            for rank, value in enumerate(values.tolist(), start=1)
        ]
    )


# ---------------------------------------------------------------------- of anything shown


def shown_table(looks: Sequence[Look], name: str, names: Sequence[str]) -> pd.DataFrame:
    """layer, a column an axis, value; with ``token_name`` behind an axis of tokens."""
    parts = []
    for look, item in _having(looks, name):
        values = item.values.numpy()
        columns: dict[str, Any] = {"layer": look.layer}
        for axis, places in zip(item.axes, np.indices(values.shape), strict=True):
            columns[axis] = places.reshape(-1)
            if axis == "token":
                columns["token_name"] = _named(names, columns[axis])
        parts.append(pd.DataFrame({**columns, "value": values.reshape(-1)}, index=range(values.size)))
    return pd.concat(parts, ignore_index=True).dropna(subset="value")


def _having(looks: Sequence[Look], name: str) -> Iterator[tuple[Look, Shown]]:
    return ((look, look.shown[name]) for look in looks if name in look.shown)


# ---------------------------------------------------------------------- the summary


def summary_table(looks: Sequence[Look], ablation: pd.DataFrame | None) -> pd.DataFrame:
    """layer, head, figure, value: what each layer and head comes to; no layer and no head where it is of all."""
    rows: list[Row] = []
    for look in looks:
        maps = maps_of(look)
        rows.append(_row(look.layer, None, "map_similarity", mean_of_pairs(head_similarity(maps))))
        rows += [_row(look.layer, h, "map_entropy", v) for h, v in enumerate(map_entropy(maps).tolist())]
        for name, item in look.shown.items():
            rows += _figures(look.layer, name, item)
    if ablation is not None:
        rows += [
            _row(None, None, f"loss_{blocks.replace(' ', '_').replace('-', '_')}", loss)
            for blocks, loss in zip(ablation["blocks"], ablation["loss"], strict=True)
        ]
    table = pd.DataFrame(rows, columns=["layer", "head", "figure", "value"])
    return table.dropna(subset="value").astype({"layer": "Int64", "head": "Int64"}).reset_index(drop=True)


def _figures(layer: int, name: str, item: Shown) -> list[Row]:
    if is_matrix_a_head(item):
        return [row for h, m in enumerate(item.values) for row in _of_metric(layer, h, name, m)]
    if item.blocks > 1:
        return _of_blocks(layer, name, item)
    if not item.axes:
        return [_row(layer, None, name, float(item.values))]
    if "head" in item.axes:
        by_head = item.values.movedim(item.axes.index("head"), 0).flatten(1)
        return [row for h, values in enumerate(by_head) for row in _spread(layer, h, name, values)]
    return _spread(layer, None, name, item.values)


def _of_metric(layer: int, head: int, name: str, m: Tensor) -> list[Row]:
    found = spectra(m)
    symmetric = (m + m.T) / 2
    norm = float(m.double().norm())
    figures = {
        "norm": norm,
        "asymmetry": float((m - symmetric).double().norm()) / norm if norm else float("nan"),
        "min": float(m.min()),
        "max": float(m.max()),
        "largest_singular_value": float(found["singular_value"][0]),
        "smallest_eigenvalue": float(found["eigenvalue"][-1]),
        "largest_eigenvalue": float(found["eigenvalue"][0]),
    }
    return [_row(layer, head, f"{name}_{figure}", value) for figure, value in figures.items()]


def _of_blocks(layer: int, name: str, item: Shown) -> list[Row]:
    squares = block_norms(item.values, item.blocks).square()
    diagonal = float(squares.diagonal().sum())
    figures = {
        "norm": float(squares.sum()) ** 0.5,
        "diagonal_norm": diagonal**0.5,
        "off_diagonal_norm": max(float(squares.sum()) - diagonal, 0.0) ** 0.5,
        "min": float(item.values.min()),
        "max": float(item.values.max()),
    }
    return [_row(layer, None, f"{name}_{figure}", value) for figure, value in figures.items()]


def _spread(layer: int, head: int | None, name: str, values: Tensor) -> list[Row]:
    real = values[~values.isnan()]
    if not len(real):
        return []
    figures = {"mean": real.mean(), "min": real.min(), "max": real.max()}
    return [_row(layer, head, f"{name}_{figure}", float(value)) for figure, value in figures.items()]


def _row(layer: int | None, head: int | None, figure: str, value: float) -> Row:
    return {"layer": layer, "head": head, "figure": figure, "value": value}
