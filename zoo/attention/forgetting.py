"""Attention that forgets: a learned decay between query and key."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from zoo.attention.base import Attention, AttentionCache, Masks, register_attention
from zoo.attention.mixing import mix


@register_attention("forgetting")
class ForgettingAttention(Attention):
    r"""Attention whose scores fade with what was forgotten between key and query.

    .. math::
        s_h(t, j) = q_h(t) k_h(j)^T / \sqrt{dh} + \sum_{j < l \le t} \log f_h(l), \quad
        f_h(l) = \sigma(w_h^T x_l + b_h)

    Where no order is given, as in pictures, the sum runs over the tokens between the two and the later of them, on
    either side; that is ours. Padding forgets nothing. The sums are kept in float32. The term makes a (B, H, T, keys)
    tensor, which PyTorch's fused kernels add. Source: Lin et al. 2025, arXiv 2503.02130, section 3.
    """

    def build(self) -> None:
        self.W_q, self.W_k, self.W_v = self.linear(), self.linear(), self.linear()
        self.forget = nn.Linear(self.d_model, self.n_heads)
        self.out_proj = self.out_linear()

    def attend(
        self, x: Tensor, masks: Masks, shared: Any, cache: AttentionCache | None, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        q, k, v = (self.split_heads(project(x)) for project in (self.W_q, self.W_k, self.W_v))
        raw = self.forget(x)
        logs = F.logsigmoid(raw if raw.dtype == q.new_empty(0).double().dtype else raw.float())  # (B, T, H)
        if masks.padding is not None:
            logs = logs.masked_fill(~masks.padding.bool().unsqueeze(-1), 0)
        sums = logs.cumsum(dim=1).transpose(1, 2).unsqueeze(-1)  # (B, H, T, 1)
        keys_real, all_sums = None, sums
        if cache is not None:
            if "forgotten" in cache.state:
                sums = sums + cache.state["forgotten"]
            cache.state["forgotten"] = sums[:, :, -1:]
            kept = cache.extend(masks.padding, keys=k, values=v, sums=sums)
            k, v, all_sums, keys_real = kept["keys"], kept["values"], kept["sums"], cache.visible_keys
        bias = sums - all_sums.transpose(-1, -2)  # negative for keys before the query
        if not masks.causal:
            bias = -bias.abs()
        y, weights = mix(q, k, v, masks, keys_real, self.dropout_p, need_weights, bias=bias.to(q.dtype))
        return self.out_proj(self.merge_heads(y)), weights

    def projections(self) -> list[str]:
        return ["W_q", "W_k", "W_v", "out_proj"]
