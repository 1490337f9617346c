"""Attention whose heads can be shut by a gate that reads the query's token."""

from typing import Any

import torch
from torch import Tensor

from zoo.attention.base import Attention, AttentionCache, Masks, Shown, register_attention
from zoo.attention.mixing import mix


@register_attention("gated")
class GatedAttention(Attention):
    r"""Multi-head attention with a gate a head after the mix.

    .. math::
        A_h = softmax(X W_{q,h} (X W_{k,h})^T / \sqrt{dh} + mask), \quad
        Y = concat_h(\sigma(X w_h) \odot A_h X W_{v,h}) W_o

    One gate (a number in (0, 1)) a head and token, from the token that asks: a head may say nothing, without a place
    to send its attention to. The weights that are returned are those before the gate.

    Source: Qiu et al. 2025, arXiv 2505.06708, the headwise gate after the mix.
    """

    def build(self) -> None:
        self.W_q, self.W_k, self.W_v = self.linear(), self.linear(), self.linear()
        self.gate = self.linear(self.d_model, self.n_heads)
        self.out_proj = self.out_linear()

    def attend(
        self, x: Tensor, masks: Masks, shared: Any, cache: AttentionCache | None, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        q, k, v = (self.split_heads(project(x)) for project in (self.W_q, self.W_k, self.W_v))  # (B, H, T, dh)
        keys_real = None
        if cache is not None:
            k, v, keys_real = cache.append(k, v, masks.padding)
        y, weights = mix(q, k, v, masks, keys_real, self.dropout_p, need_weights)
        gates = torch.sigmoid(self.gate(x)).transpose(1, 2).unsqueeze(-1)  # (B, H, T, 1)
        return self.out_proj(self.merge_heads(gates * y)), weights

    def shown(self, x: Tensor, masks: Masks, shared: Any) -> dict[str, Shown]:
        """Each head's gate at each token, between 0 (says nothing) and 1."""
        return {"gate": Shown(torch.sigmoid(self.gate(x[0])), ("token", "head"))}
