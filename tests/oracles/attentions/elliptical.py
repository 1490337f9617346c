"""Elliptical attention from its equations: a layer on its own, which is ordinary, and the layers of a stack."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from tests.oracles.attentions._heads import Params, mixed_output, projected, softmax_weights
from zoo.attention.elliptical import EllipticalOptions


def oracle(
    params: Mapping[str, Tensor],
    x: Tensor,
    real: Tensor,
    n_heads: int,
    options: EllipticalOptions,
    causal: bool,
    layer_idx: int,
) -> tuple[Tensor, Tensor | None]:
    return layer(params, x, real, n_heads, options, causal, None)


def layer(
    params: Params,
    x: Tensor,
    real: Tensor,
    n_heads: int,
    options: EllipticalOptions,
    causal: bool,
    before: tuple[Params, Tensor] | None,
) -> tuple[Tensor, Tensor]:
    """y and weights of a layer; ``before`` has the parameters and the input of the one before it."""
    q, k, v = (projected(params, name, x, real, n_heads) for name in ("W_q", "W_k", "W_v"))
    old = None if before is None else projected(before[0], "W_v", before[1], real, n_heads)
    T, dh = x.shape[1], x.shape[2] // n_heads

    def metric(b: int, h: int, t: int) -> list[float]:
        if old is None:
            return [1.0] * dh
        tokens = [s for s in range(t + 1 if causal else T) if real[b, s]]
        changes = [
            sum(abs(v[b][h][s][d].item() - old[b][h][s][d].item()) for s in tokens) / len(tokens) for d in range(dh)
        ]
        scale = max(changes) if options.scale == "max" else sum(changes) / dh
        return [change / scale for change in changes] if scale > 0 else [1.0] * dh

    def score(b: int, h: int, t: int, s: int) -> Tensor:
        m = metric(b, h, t)
        terms = [q[b][h][t][d] * m[d] * k[b][h][s][d] for d in range(dh)]
        return sum(terms, torch.zeros((), dtype=x.dtype)) / math.sqrt(dh)

    weights = softmax_weights(real, n_heads, causal, score)
    return mixed_output(params, real, weights, lambda b, h, s: v[b][h][s]), weights
