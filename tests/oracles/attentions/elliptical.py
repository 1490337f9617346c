"""The equations of ``elliptical``."""

from typing import Any

from torch import Tensor

from tests.oracles.attentions.common import Params, ordinary


def oracle(
    params: Params, x: Tensor, real: Tensor, n_heads: int, options: Any, causal: bool, layer_idx: int
) -> tuple[Tensor, Tensor | None]:
    """Of a layer on its own: there is none before it, so its metric is the identity."""
    return ordinary(params, x, real, n_heads, causal)
