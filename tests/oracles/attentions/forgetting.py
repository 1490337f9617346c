"""Forgetting attention from its equation, one gate after the other."""

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
    q, k, v, forget = (projected(params, name, x, real, n_heads) for name in ("W_q", "W_k", "W_v", "forget"))
    scale = math.sqrt(x.shape[-1] // n_heads)

    def score(b: int, h: int, t: int, s: int) -> Tensor:
        total = q[b][h][t] @ k[b][h][s] / scale
        crossed = range(s + 1, t + 1) if s <= t else range(t, s)  # from key to query, the query's side included
        for i in crossed:
            if real[b, i]:
                total = total - torch.log(1 + torch.exp(-forget[b][h][i][0]))
        return total

    weights = softmax_weights(real, n_heads, causal, score)
    return mixed_output(params, real, weights, lambda b, h, s: v[b][h][s]), weights
