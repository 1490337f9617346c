"""The equations of ``differential``."""

import math
from typing import Any

import torch
from torch import Tensor

from tests.oracles.attentions.common import Params, assembled, dot_scores, keys_of, mixed, projected, softmax
from tests.oracles.damcha import affine


def oracle(
    params: Params, x: Tensor, real: Tensor, n_heads: int, options: Any, causal: bool, layer_idx: int
) -> tuple[Tensor, Tensor | None]:
    q, k, v = (projected(x, params, name, n_heads) for name in ("W_q", "W_k", "W_v"))
    start = 0.8 - 0.6 * math.exp(-0.3 * layer_idx)
    q1, k1, q2, k2 = params["lambdas"]
    lam = torch.exp(q1 @ k1) - torch.exp(q2 @ k2) + start
    half = x.shape[-1] // n_heads // 2

    def one(b: int, t: int) -> tuple[Tensor, list[dict[int, Tensor]]]:
        mixes, tables = [], []
        for h in range(n_heads):
            first, second = (
                softmax(dot_scores(q[b][t][h][part], {j: k[b][j][h][part] for j in keys_of(real, b, t, causal)}))
                for part in (slice(0, half), slice(half, None))
            )
            weights = {j: first[j] - lam * second[j] for j in first}
            tables.append(weights)
            mix = mixed(weights, lambda j, h=h: v[b][j][h], 2 * half)
            rms = torch.sqrt((mix * mix).sum() / len(mix) + 1e-5)
            mixes.append((1 - start) * mix / rms * params["norm.weight"])
        return affine(torch.cat(mixes), params, "out_proj"), tables

    return assembled(x, real, one, n_heads)
