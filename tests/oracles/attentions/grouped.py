"""Grouped-query attention from its equation."""

import math
from collections.abc import Mapping

from torch import Tensor

from tests.oracles.attentions._heads import mixed_output, projected, softmax_weights
from zoo.attention.grouped import GroupedOptions


def oracle(
    params: Mapping[str, Tensor],
    x: Tensor,
    real: Tensor,
    n_heads: int,
    options: GroupedOptions,
    causal: bool,
    layer_idx: int,
) -> tuple[Tensor, Tensor | None]:
    groups = options.kv_heads
    if groups is None:
        groups = 1 if n_heads % 2 else n_heads // 2
    q = projected(params, "W_q", x, real, n_heads)
    k, v = (projected(params, name, x, real, groups) for name in ("W_k", "W_v"))
    own = [h * groups // n_heads for h in range(n_heads)]  # the group of each head
    scale = math.sqrt(x.shape[-1] // n_heads)
    weights = softmax_weights(real, n_heads, causal, lambda b, h, t, s: q[b][h][t] @ k[b][own[h]][s] / scale)
    return mixed_output(params, real, weights, lambda b, h, s: v[b][own[h]][s]), weights
