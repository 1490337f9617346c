"""The equations of ``static``."""

from typing import Any

from torch import Tensor

from tests.oracles.attentions.common import Params
from tests.oracles.damcha import attention, static_metrics


def oracle(
    params: Params, x: Tensor, real: Tensor, n_heads: int, options: Any, causal: bool, layer_idx: int
) -> tuple[Tensor, Tensor | None]:
    return attention(x, params, n_heads, real, static_metrics(params["M0"], n_heads), causal=causal)
