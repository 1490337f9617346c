"""Gated attention from its equation."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from tests.oracles.attentions._heads import mixed_output, projected, softmax_weights
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
    q, k, v, gate = (projected(params, name, x, real, n_heads) for name in ("W_q", "W_k", "W_v", "gate"))
    scale = math.sqrt(x.shape[-1] // n_heads)
    weights = softmax_weights(real, n_heads, causal, lambda b, h, t, s: q[b][h][t] @ k[b][h][s] / scale)

    def gated(b: int, h: int, t: int, mix: Tensor) -> Tensor:
        return mix / (1 + torch.exp(-gate[b][h][t][0]))

    return mixed_output(params, real, weights, lambda b, h, s: v[b][h][s], gated), weights
