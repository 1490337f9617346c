"""Ordinary multi-head attention."""

from typing import Any

from torch import Tensor

from zoo.attention.base import Attention, AttentionCache, Masks, register_attention
from zoo.attention.mixing import mix


@register_attention("standard")
class StandardAttention(Attention):
    r"""Multi-head attention with query and key projections.

    .. math::
        A_h = softmax(X W_{q,h} (X W_{k,h})^T / \sqrt{dh} + mask), \quad Y = concat_h(A_h X W_{v,h}) W_o

    Source: Vaswani et al. 2017, arXiv 1706.03762, section 3.2.
    """

    is_ordinary = True

    def build(self) -> None:
        self.W_q, self.W_k, self.W_v = self.linear(), self.linear(), self.linear()
        self.out_proj = self.out_linear()

    def attend(
        self, x: Tensor, masks: Masks, shared: Any, cache: AttentionCache | None, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        q, k, v = (self.split_heads(project(x)) for project in (self.W_q, self.W_k, self.W_v))  # (B, H, T, dh)
        keys_real = None
        if cache is not None:
            k, v, keys_real = cache.append(k, v, masks.padding)
        y, weights = mix(q, k, v, masks, keys_real, self.dropout_p, need_weights)
        return self.out_proj(self.merge_heads(y)), weights
