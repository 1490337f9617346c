"""The equations of ``grouped``."""

from typing import Any

import torch
from torch import Tensor

from tests.oracles.attentions.common import Params, assembled, dot_scores, keys_of, mixed, projected, softmax
from tests.oracles.damcha import affine


def oracle(
    params: Params, x: Tensor, real: Tensor, n_heads: int, options: Any, causal: bool, layer_idx: int
) -> tuple[Tensor, Tensor | None]:
    dh = x.shape[-1] // n_heads
    groups = len(params["W_k.weight"]) // dh
    q = projected(x, params, "W_q", n_heads)
    k, v = (projected(x, params, name, groups) for name in ("W_k", "W_v"))

    def one(b: int, t: int) -> tuple[Tensor, list[dict[int, Tensor]]]:
        mixes, tables = [], []
        for h in range(n_heads):
            g = h * groups // n_heads
            weights = softmax(dot_scores(q[b][t][h], {j: k[b][j][g] for j in keys_of(real, b, t, causal)}))
            tables.append(weights)
            mixes.append(mixed(weights, lambda j, g=g: v[b][j][g], dh))
        return affine(torch.cat(mixes), params, "out_proj"), tables

    return assembled(x, real, one, n_heads)
