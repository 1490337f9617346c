"""The equations of ``damcha``."""

from dataclasses import asdict
from typing import Any

from torch import Tensor

from tests.oracles.attentions.common import Params
from tests.oracles.damcha import GeneratorOracle, attention, under

_NOT_THE_GENERATORS = {"mlp_hidden", "share_mlp", "kl_weight", "off_diag_alpha_init"}


def oracle(
    params: Params, x: Tensor, real: Tensor, n_heads: int, options: Any, causal: bool, layer_idx: int
) -> tuple[Tensor, Tensor | None]:
    """Of a layer on its own, which has a generator of its own."""
    chosen = {name: value for name, value in asdict(options).items() if name not in _NOT_THE_GENERATORS}
    generator = GeneratorOracle(under(params, "generator."), x.shape[-1], n_heads, **chosen)
    return attention(x, params, n_heads, real, generator.metrics(x, real, causal, layer_idx), causal=causal)
