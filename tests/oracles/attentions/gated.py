"""The equations of ``gated``."""

from typing import Any

import torch
from torch import Tensor

from tests.oracles.attentions.common import Params, ordinary


def oracle(
    params: Params, x: Tensor, real: Tensor, n_heads: int, options: Any, causal: bool, layer_idx: int
) -> tuple[Tensor, Tensor | None]:
    def gate(b: int, t: int, h: int, mix: Tensor) -> Tensor:
        return mix / (1 + torch.exp(-(params["gate.weight"][h] @ x[b, t])))

    return ordinary(params, x, real, n_heads, causal, after=gate)
