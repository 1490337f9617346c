"""Attention with a gate a head after the mix."""

from typing import Any

import torch
from torch import Tensor, nn

from zoo.attention.base import Attention, AttentionCache, Masks, register_attention
from zoo.attention.mixing import mix


@register_attention("gated")
class GatedAttention(Attention):
    r"""Attention whose heads are gated by the query's token.

    .. math:: y = concat_h(\sigma(w_h^T x) \, A_h v_h) W_o

    with A as in standard attention. PyTorch's fused kernels do the mix. Source: arXiv 2505.06708, the head-wise gate
    after the scaled dot product.
    """

    def build(self) -> None:
        self.W_q, self.W_k, self.W_v = self.linear(), self.linear(), self.linear()
        self.gate = nn.Linear(self.d_model, self.n_heads, bias=False)
        self.out_proj = self.out_linear()

    def attend(
        self, x: Tensor, masks: Masks, shared: Any, cache: AttentionCache | None, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        q, k, v = (self.split_heads(project(x)) for project in (self.W_q, self.W_k, self.W_v))
        keys_real = None
        if cache is not None:
            k, v, keys_real = cache.append(k, v, masks.padding)
        y, weights = mix(q, k, v, masks, keys_real, self.dropout_p, need_weights)
        y = y * torch.sigmoid(self.gate(x)).transpose(1, 2).unsqueeze(-1)  # (B, H, T, 1)
        return self.out_proj(self.merge_heads(y)), weights

    def projections(self) -> list[str]:
        return ["W_q", "W_k", "W_v", "out_proj"]
