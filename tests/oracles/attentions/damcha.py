"""DAMCHA's layer with a generator of its own, from its equations."""

from collections.abc import Mapping
from dataclasses import asdict

import torch
from torch import Tensor

from tests.oracles.damcha import GeneratorOracle, attention, under
from zoo.attention import DamchaOptions

# not the generator's arithmetic
OF_THE_LAYER = ("mlp_hidden", "share_mlp", "kl_weight", "key_projection")
OF_TRAINING = ("off_diag_alpha_init", "identity_start", "generator_lr_factor")


def oracle(
    params: Mapping[str, Tensor],
    x: Tensor,
    real: Tensor,
    n_heads: int,
    options: DamchaOptions,
    causal: bool,
    layer_idx: int,
) -> tuple[Tensor, Tensor | None]:
    x = torch.where(real.unsqueeze(-1), x, 0)
    settings = {name: value for name, value in asdict(options).items() if name not in OF_THE_LAYER + OF_TRAINING}
    generator = GeneratorOracle(under(params, "generator."), x.shape[-1], n_heads, **settings)
    metrics = generator.metrics(x, real, causal, layer_idx)
    return attention(x, params, n_heads, real, metrics, None, causal, options.key_projection)
