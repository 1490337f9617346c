"""Attention whose heads have roles."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zoo.attention.base import Attention, AttentionCache, Masks, option, places_of, register_attention
from zoo.attention.mixing import mix
from zoo.errors import ZooError

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
    Tokens are counted without padding. The first query of a causal backward head sees nothing, and mixes to zero.

    PyTorch's fused kernels do it, with a mask (H, T, keys). Source: Cui et al. 2019, Mixed Multi-Head Self-Attention
    for Neural Machine Translation, WNGT 2019.
    """

    Options = MixedOptions

    def build(self) -> None:
        self.W_q, self.W_k, self.W_v = self.linear(), self.linear(), self.linear()
        self.out_proj = self.out_linear()

    def attend(
        self, x: Tensor, masks: Masks, shared: Any, cache: AttentionCache | None, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        q, k, v = (self.split_heads(project(x)) for project in (self.W_q, self.W_k, self.W_v))
        here = places_of(masks, x.shape[1], cache, x.device)  # (T,) or (B, T)
        here = here.expand(len(x), -1) if here.dim() == 1 else here
        there, keys_real = here, None
        if cache is not None:
            kept = cache.extend(masks.padding, keys=k, values=v, places=here[:, None, :, None])
            k, v, there, keys_real = kept["keys"], kept["values"], kept["places"][:, 0, :, 0], cache.visible_keys
        y, weights = mix(
            q, k, v, masks, keys_real, self.dropout_p, need_weights, visible=self._roles(here, there, masks.causal)
        )
        return self.out_proj(self.merge_heads(y)), weights

    def _roles(self, here: Tensor, there: Tensor, causal: bool) -> Tensor:
        """Which keys each head's role lets a query see: (B, H, T, keys)."""
        apart = here.unsqueeze(-1) - there.unsqueeze(-2)  # (B, T, keys)
        every = torch.ones_like(apart, dtype=torch.bool)
        backward = apart > 0 if causal else apart <= 0
        seen = {
            "global": every,
            "local": apart.abs() < self.options.window,
            "forward": apart >= 0,
            "backward": backward,
        }
        return torch.stack([seen[ROLES[h % len(ROLES)]] for h in range(self.n_heads)], dim=1)
