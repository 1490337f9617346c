"""The method's static ablation: one learned metric a layer."""

from typing import Any

import torch
from torch import Tensor, nn

from zoo.attention.base import Attention, AttentionCache, Masks, register_attention
from zoo.attention.mixing import mix


@register_attention("static")
class StaticAttention(Attention):
    r"""Scores from a learned metric that doesn't depend on the input.

    .. math::
        S_i = X_i m_i X_i^T / \sqrt{dh}, \quad m_i = \sum_j M_{0,ij}, \quad Y = concat_i(softmax(S_i + mask) V_i) W_o

    :math:`X_i` is the i-th slice of the layer's own input, on both sides; :math:`M_0` (D, D) starts at the identity.

    Source: DAMCHA, section 3.3.
    """

    def build(self) -> None:
        self.W_v = self.linear()
        self.out_proj = self.out_linear()
        self.M0 = nn.Parameter(torch.eye(self.d_model))

    def attend(
        self, x: Tensor, masks: Masks, shared: Any, cache: AttentionCache | None, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        k, v = self.split_heads(x), self.split_heads(self.W_v(x))  # (B, H, T, dh)
        q, keys_real = k @ self.static_metrics(), None
        if cache is not None:
            k, v, keys_real = cache.append(k, v, masks.padding)
        y, weights = mix(q, k, v, masks, keys_real, self.dropout_p, need_weights)
        return self.out_proj(self.merge_heads(y)), weights

    def static_metrics(self) -> Tensor:
        """Block-row sums of the learned ``M0``: (H, dh, dh)."""
        H, dh = self.n_heads, self.head_dim
        return self.M0.view(H, dh, H, dh).sum(dim=2)

    def matrices(self) -> dict[str, Tensor]:
        """The full metric M (D, D)."""
        return {"M": self.M0.detach().clone()}

    @torch.no_grad()
    def init_weights(self) -> None:
        self.M0.copy_(torch.eye(self.d_model))
