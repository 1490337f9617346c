"""The equations of ``modern``."""

import math
from typing import Any

import torch
from torch import Tensor

from tests.oracles.attentions.common import Params, assembled, dot_scores, keys_of, mixed, projected, softmax
from tests.oracles.damcha import affine


def turned(row: Tensor, place: int, base: float) -> Tensor:
    """Each pair (i, i + n) turned by its angle; the last of an odd width stays."""
    n = len(row) // 2
    out = list(row.unbind())
    for i in range(n):
        angle = place * base ** (-i / n)
        out[i] = row[i] * math.cos(angle) - row[i + n] * math.sin(angle)
        out[i + n] = row[i] * math.sin(angle) + row[i + n] * math.cos(angle)
    return torch.stack(out)


def oracle(
    params: Params, x: Tensor, real: Tensor, n_heads: int, options: Any, causal: bool, layer_idx: int
) -> tuple[Tensor, Tensor | None]:
    q, k, v = (projected(x, params, name, n_heads) for name in ("W_q", "W_k", "W_v"))

    def ready(row: Tensor, name: str, b: int, t: int) -> Tensor:
        row = row / torch.sqrt((row * row).sum() / len(row) + 1e-6) * params[f"{name}.weight"]
        return turned(row, int(real[b, :t].sum()), options.rotary_base)

    def one(b: int, t: int) -> tuple[Tensor, list[dict[int, Tensor]]]:
        mixes, tables = [], []
        for h in range(n_heads):
            keys = {j: ready(k[b][j][h], "k_norm", b, j) for j in keys_of(real, b, t, causal)}
            weights = softmax(dot_scores(ready(q[b][t][h], "q_norm", b, t), keys))
            tables.append(weights)
            mixes.append(mixed(weights, lambda j, h=h: v[b][j][h], len(v[b][t][h])))
        return affine(torch.cat(mixes), params, "out_proj"), tables

    return assembled(x, real, one, n_heads)
