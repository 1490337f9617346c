"""The equations of ``standard``."""

from typing import Any

from torch import Tensor

from tests.oracles.attentions.common import Params, ordinary


def oracle(
    params: Params, x: Tensor, real: Tensor, n_heads: int, options: Any, causal: bool, layer_idx: int
) -> tuple[Tensor, Tensor | None]:
    return ordinary(params, x, real, n_heads, causal)
