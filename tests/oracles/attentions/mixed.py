"""The equations of ``mixed``."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from tests.oracles.attentions.common import Params, ordinary


def oracle(
    params: Params, x: Tensor, real: Tensor, n_heads: int, options: Any, causal: bool, layer_idx: int
) -> tuple[Tensor, Tensor | None]:
    def role(b: int, t: int, h: int, scores: Mapping[int, Tensor]) -> dict[int, Tensor]:
        here = int(real[b, :t].sum())

        def seen(j: int) -> bool:
            apart = here - int(real[b, :j].sum())
            if h % 4 == 1:
                return abs(apart) < options.window
            if h % 4 == 2:
                return apart >= 0
            if h % 4 == 3:
                return apart > 0 if causal else apart <= 0
            return True

        return {j: score for j, score in scores.items() if seen(j)}

    return ordinary(params, x, real, n_heads, causal, change=role)
