"""Attention with rotary positions and QK-norm from its equations, one pair of dimensions after the other."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tests.oracles.attentions._heads import mixed_output, projected, rms_scaled, softmax_weights
from zoo.attention.modern import ModernOptions


def oracle(
    params: Mapping[str, Tensor],
    x: Tensor,
    real: Tensor,
    n_heads: int,
    options: ModernOptions,
    causal: bool,
    layer_idx: int,
    grid: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """``grid`` (T, 2): row and column of every token of a picture, -1 where there is none."""
    q, k, v = (projected(params, name, x, real, n_heads) for name in ("W_q", "W_k", "W_v"))
    scale = math.sqrt(x.shape[-1] // n_heads)

    def place(b: int, t: int) -> Sequence[int]:
        return [int(real[b, :t].sum())] if grid is None else [max(int(p), 0) for p in grid[t]]

    def turned(vector: Tensor, name: str, b: int, t: int) -> Tensor:
        return rotated(rms_scaled(vector, params[f"{name}.weight"], 1e-6), place(b, t), options.base)

    def score(b: int, h: int, t: int, s: int) -> Tensor:
        return turned(q[b][h][t], "q_norm", b, t) @ turned(k[b][h][s], "k_norm", b, s) / scale

    weights = softmax_weights(real, n_heads, causal, score)
    return mixed_output(params, real, weights, lambda b, h, s: v[b][h][s]), weights


def rotated(x: Tensor, place: Sequence[int], base: float) -> Tensor:
    """x (dh,) turned by a place of one or two coordinates; what doesn't divide is left as it is."""
    n = len(x) // (2 * len(place))
    pairs = n * len(place)
    entries = list(x)
    for c, p in enumerate(place):
        for i in range(n):
            low, high = c * n + i, pairs + c * n + i
            angle = p * base ** (-i / n)
            entries[low] = x[low] * math.cos(angle) - x[high] * math.sin(angle)
            entries[high] = x[low] * math.sin(angle) + x[high] * math.cos(angle)
    return torch.stack(entries)
