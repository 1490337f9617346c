"""The equations of ``forgetting``."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tests.oracles.attentions.common import Params, ordinary, zero
from tests.oracles.damcha import affine


def oracle(
    params: Params, x: Tensor, real: Tensor, n_heads: int, options: Any, causal: bool, layer_idx: int
) -> tuple[Tensor, Tensor | None]:
    def kept(b: int, token: int, h: int) -> Tensor:
        return -torch.log(1 + torch.exp(-affine(x[b, token], params, "forget")[h]))

    def fade(b: int, t: int, h: int, scores: Mapping[int, Tensor]) -> dict[int, Tensor]:
        found = {}
        for j, score in scores.items():
            lost = zero()
            for token in range(min(j, t) + 1, max(j, t) + 1):
                if real[b, token]:
                    lost = lost + kept(b, token, h)
            found[j] = score + lost
        return found

    return ordinary(params, x, real, n_heads, causal, change=fade)
