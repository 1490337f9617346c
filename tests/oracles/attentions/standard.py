"""Ordinary multi-head attention from its equation."""

from collections.abc import Mapping

import torch
from torch import Tensor

from tests.oracles.damcha import attention
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
    return attention(torch.where(real.unsqueeze(-1), x, 0), params, n_heads, real, None, None, causal)
