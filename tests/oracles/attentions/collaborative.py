"""The equations of ``collaborative``."""

import math
from typing import Any

import torch
from torch import Tensor

from tests.oracles.attentions.common import Params, assembled, head, keys_of, mixed, projected, softmax
from tests.oracles.damcha import affine


def oracle(
    params: Params, x: Tensor, real: Tensor, n_heads: int, options: Any, causal: bool, layer_idx: int
) -> tuple[Tensor, Tensor | None]:
    dh = x.shape[-1] // n_heads
    v = projected(x, params, "W_v", n_heads)

    def combined(row: Tensor, name: str, h: int) -> Tensor:
        made = affine(row, params, f"W_{name}")
        return sum((params[f"combine_{name}"][h, g] * head(made, n_heads, g) for g in range(n_heads)), torch.zeros(dh))

    def score(b: int, t: int, j: int, h: int) -> Tensor:
        if options.variant == "damcha_repo":
            return combined(x[b, t], "q", h) @ combined(x[b, j], "k", h) / math.sqrt(dh)
        shared = (affine(x[b, t], params, "W_q") * params["mixing"][h]) @ affine(x[b, j], params, "W_k")
        return (shared + params["content_bias.weight"][h] @ x[b, j]) / math.sqrt(dh)

    def one(b: int, t: int) -> tuple[Tensor, list[dict[int, Tensor]]]:
        keys = keys_of(real, b, t, causal)
        tables = [softmax({j: score(b, t, j, h) for j in keys}) for h in range(n_heads)]
        mixes = [mixed(tables[h], lambda j, h=h: v[b][j][h], dh) for h in range(n_heads)]
        return affine(torch.cat(mixes), params, "out_proj"), tables

    return assembled(x, real, one, n_heads)
