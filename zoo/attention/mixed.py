"""Attention whose heads have roles."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zoo.attention.base import Attention, AttentionCache, Masks, register_attention
from zoo.attention.mixing import mix
from zoo.errors import ZooError
from zoo.options import option

ROLES = ("global", "local", "forward", "backward")


@dataclass(frozen=True)
class MixedOptions:
    window: int = option(8, "how many tokens the local heads see: a query's own and those before (and, full, after) it")

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ZooError(f"window: got {self.window}; give at least 1, the query's own token")


@register_attention("mixed")
class MixedAttention(Attention):
    r"""Standard attention whose heads h take the roles global, local, forward and backward in turn, each with its mask.

    Causally, global and forward heads see keys j <= t, local heads the last w of those, backward heads j < t. In full
    attention global heads see all, local heads :math:`|t - j| < w`, forward heads j <= t, backward heads j >= t.
    Tokens are counted without padding, and pictures' patches row by row, behind the class token. The first query of a
    causal backward head sees nothing, and mixes to zero. With a number of heads that 4 doesn't divide, the first roles
    have one more. PyTorch's fused kernels do it, with a mask (H, T, keys).

    Source: Cui et al. 2019, Mixed Multi-Head Self-Attention for Neural Machine Translation, WNGT 2019; the masks of a
    causal stack are those of the method's repository.
    """

    Options = MixedOptions

    def build(self) -> None:
        self.W_q, self.W_k, self.W_v = self.linear(), self.linear(), self.linear()
        self.out_proj = self.out_linear()

    def attend(
        self, x: Tensor, masks: Masks, shared: Any, cache: AttentionCache | None, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        q, k, v = (self.split_heads(project(x)) for project in (self.W_q, self.W_k, self.W_v))
        keys_real = masks.padding
        if cache is not None:
            k, v, keys_real = cache.append(k, v, masks.padding)
        n_keys = k.shape[2]
        places = torch.arange(n_keys, device=x.device).unsqueeze(0)  # (1, keys): as all rows have the same, one mask
        if keys_real is not None:
            places = keys_real.bool().long().cumsum(dim=1)  # (B, keys)
        roles = self._roles(places[:, n_keys - x.shape[1] :], places, masks.causal)
        y, weights = mix(q, k, v, masks, keys_real, self.dropout_p, need_weights, visible=roles)
        return self.out_proj(self.merge_heads(y)), weights

    def _roles(self, here: Tensor, there: Tensor, causal: bool) -> Tensor:
        """Which keys each head's role lets a query see: (B or 1, H, T, keys)."""
        apart = here.unsqueeze(-1) - there.unsqueeze(-2)  # (B or 1, T, keys)
        every = torch.ones_like(apart, dtype=torch.bool)
        backward = apart > 0 if causal else apart <= 0
        seen = {
            "global": every,
            "local": apart.abs() < self.options.window,
            "forward": apart >= 0,
            "backward": backward,
        }
        return torch.stack([seen[ROLES[h % len(ROLES)]] for h in range(self.n_heads)], dim=1)
