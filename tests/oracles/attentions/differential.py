"""Differential attention from its equation."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from tests.oracles.attentions._heads import mixed_output, projected, rms_scaled, softmax_weights
from zoo.attention import NoOptions


def oracle(
    params: Mapping[str, Tensor],
    x: Tensor,
    real: Tensor,
    n_heads: int,
    options: NoOptions,
    causal: bool,
    layer_idx: int,
) -> tuple[Tensor, Tensor | None]:
    q, k, v = (projected(params, name, x, real, n_heads) for name in ("W_q", "W_k", "W_v"))
    w = x.shape[-1] // n_heads // 2
    first, second = (
        softmax_weights(real, n_heads, causal, lambda b, h, t, s, i=i: q[b][h][t][i] @ k[b][h][s][i] / math.sqrt(w))
        for i in (slice(0, w), slice(w, 2 * w))
    )
    start = 0.8 - 0.6 * math.exp(-0.3 * layer_idx)
    terms = [torch.exp(params[f"lambda_q{i}"] @ params[f"lambda_k{i}"]) for i in (1, 2)]
    weights = first - (terms[0] - terms[1] + start) * second

    def normed(b: int, h: int, t: int, mix: Tensor) -> Tensor:
        return (1 - start) * rms_scaled(mix, params["head_norm.weight"], 1e-5)

    return mixed_output(params, real, weights, lambda b, h, s: v[b][h][s], normed), weights
