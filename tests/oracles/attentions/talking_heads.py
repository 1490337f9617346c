"""The equations of ``talking_heads``."""

import math
from typing import Any

import torch
from torch import Tensor

from tests.oracles.attentions.common import Params, assembled, keys_of, mixed, projected, softmax
from tests.oracles.damcha import affine


def oracle(
    params: Params, x: Tensor, real: Tensor, n_heads: int, options: Any, causal: bool, layer_idx: int
) -> tuple[Tensor, Tensor | None]:
    q, k, v = (projected(x, params, name, n_heads) for name in ("W_q", "W_k", "W_v"))
    heads = range(n_heads)

    def one(b: int, t: int) -> tuple[Tensor, list[dict[int, Tensor]]]:
        keys = keys_of(real, b, t, causal)
        scores = [{j: q[b][t][h] @ k[b][j][h] / math.sqrt(len(q[b][t][h])) for j in keys} for h in heads]
        said = [softmax({j: sum(params["P"][g, h] * scores[g][j] for g in heads) for j in keys}) for h in heads]
        tables = [{j: sum(params["R"][g, h] * said[g][j] for g in heads) for j in keys} for h in heads]
        mixes = [mixed(tables[h], lambda j, h=h: v[b][j][h], len(v[b][t][h])) for h in heads]
        return affine(torch.cat(mixes), params, "out_proj"), tables

    return assembled(x, real, one, n_heads)
