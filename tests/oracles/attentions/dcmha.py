"""The equations of ``dcmha``."""

import math
from typing import Any

import torch
from torch import Tensor

from tests.oracles.attentions.common import Params, assembled, keys_of, mixed, projected, softmax
from tests.oracles.damcha import affine, gelu


def dynamic_map(row: Tensor, params: Params, which: int) -> Tensor:
    """One of the four maps (H, H) that a token brings: rank two, and a diagonal."""
    hidden = gelu(row @ params["hidden"][:, which])
    made = torch.diag(torch.tanh(row @ params["diagonal"][:, which]))
    for i in range(2):
        w1, w2 = (hidden @ params["low_rank"][which, :, part, i] for part in range(2))
        made = made + torch.outer(w1 / torch.sqrt((w1 * w1).sum() / len(w1) + 1e-6), w2)
    return made


def routed(row: Tensor, params: Params, n_heads: int) -> Tensor:
    alpha = affine(torch.tanh(affine(row, params, "router.0")), params, "router.2").reshape(n_heads, n_heads)
    alpha = torch.exp(alpha) / torch.exp(alpha).sum(dim=0, keepdim=True)
    gate = 1 / (1 + torch.exp(-affine(row, params, "gate")))
    return torch.stack(
        [gate[h] * alpha[:, h] + (1 - gate[h]) * torch.eye(n_heads, dtype=row.dtype)[h] for h in range(n_heads)], dim=1
    )


def oracle(
    params: Params, x: Tensor, real: Tensor, n_heads: int, options: Any, causal: bool, layer_idx: int
) -> tuple[Tensor, Tensor | None]:
    q, k, v = (projected(x, params, name, n_heads) for name in ("W_q", "W_k", "W_v"))
    heads, eye = range(n_heads), torch.eye(n_heads, dtype=x.dtype)
    is_paper = options.variant == "paper"

    def composition(b: int, t: int, j: int, step: int) -> Tensor:
        if is_paper:
            return eye + dynamic_map(x[b, t], params, step) + dynamic_map(x[b, j], params, 2 + step)
        return routed(x[b, t], params, n_heads) if step == 0 else eye

    def one(b: int, t: int) -> tuple[Tensor, list[dict[int, Tensor]]]:
        keys = keys_of(real, b, t, causal)
        composed = {}
        for j in keys:
            rows = torch.stack([q[b][t][h] @ k[b][j][h] / math.sqrt(len(q[b][t][h])) for h in heads])
            composed[j] = rows @ composition(b, t, j, 0)
        said = [softmax({j: composed[j][h] for j in keys}) for h in heads]
        after = {j: torch.stack([said[h][j] for h in heads]) @ composition(b, t, j, 1) for j in keys}
        tables = [{j: after[j][h] for j in keys} for h in heads]
        mixes = [mixed(tables[h], lambda j, h=h: v[b][j][h], len(v[b][t][h])) for h in heads]
        return affine(torch.cat(mixes), params, "out_proj"), tables

    return assembled(x, real, one, n_heads)
