"""Attention that forgets: every token has a gate that fades what lies before it."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.attention.base import Attention, AttentionCache, Masks, Shown, register_attention
from zoo.attention.mixing import mix


@register_attention("forgetting")
class ForgettingAttention(Attention):
    r"""Multi-head attention whose scores fade by the forget gates between key and query.

    .. math::
        s_h(t, j) = q_t k_j^T / \sqrt{dh} + \sum_{j < l \le t} \log f_h(l), \quad
        f_h(l) = \sigma(w_h^T x_l + b_h), \quad Y = concat_h(softmax(s_h + mask) X W_{v,h}) W_o

    With c the running sum of log f that is :math:`c_t - c_j`, a bias a pair of tokens. PyTorch's fused attention takes
    it, as a mask (B, H, T, keys) that is made whole; its flash kernel doesn't. Sums are float32, whatever the network
    is. Padding forgets nothing.

    The paper's attention is causal. Where a query sees later tokens too, this layer fades them as it would in the
    sequence read from behind: the bias of j > t is :math:`\sum_{t \le l < j} \log f_h(l)`. That part is ours. The stack
    keeps its own positions, so that it differs from ``standard`` in nothing else; the paper's does without.

    Source: Lin et al. 2025, arXiv 2503.02130, section 3.
    """

    def build(self) -> None:
        self.W_q, self.W_k, self.W_v = self.linear(), self.linear(), self.linear()
        self.forget = nn.Linear(self.d_model, self.n_heads)  # its bias is of the definition
        self.out_proj = self.out_linear()

    def attend(
        self, x: Tensor, masks: Masks, shared: Any, cache: AttentionCache | None, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        q, k, v = (self.split_heads(project(x)) for project in (self.W_q, self.W_k, self.W_v))  # (B, H, T, dh)
        sums, keys_real = self._sums(x, masks, cache), None  # (B, H, T, 2)
        own = sums
        if cache is not None:
            kept = cache.extend(masks.padding, keys=k, values=v, sums=sums)
            k, v, sums, keys_real = kept["keys"], kept["values"], kept["sums"], cache.visible_keys
        bias = _fading(own, sums, masks.causal)
        # no lower than the type of the scores has numbers for, since a row of -inf has no softmax
        bias = bias.clamp(min=torch.finfo(q.dtype).min / 2).to(q.dtype)
        y, weights = mix(q, k, v, masks, keys_real, self.dropout_p, need_weights, bias=bias)
        return self.out_proj(self.merge_heads(y)), weights

    def _sums(self, x: Tensor, masks: Masks, cache: AttentionCache | None) -> Tensor:
        """Running sums of log f, of the tokens up to each one and of those before it: (B, H, T, 2)."""
        logits = self.forget(x)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        log_f = F.logsigmoid(logits).transpose(1, 2)  # (B, H, T)
        if masks.padding is not None:
            log_f = log_f.masked_fill(~masks.padding.bool().unsqueeze(1), 0)
        up_to = log_f.cumsum(dim=-1)
        if cache is not None and cache.length:
            up_to = up_to + cache.kept["sums"][:, :, cache.length - 1, :1]
        return torch.stack([up_to, up_to - log_f], dim=-1)

    def shown(self, x: Tensor, masks: Masks, shared: Any) -> dict[str, Shown]:
        """Each head's forget gate f at each token: what lies before counts f times as much from there on."""
        return {"forget_gate": Shown(torch.sigmoid(self.forget(x[0])), ("token", "head"))}


def _fading(queries: Tensor, keys: Tensor, causal: bool) -> Tensor:
    """The bias (B, H, T, keys) of the last T tokens, from running sums (B, H, T, 2) and (B, H, keys, 2)."""
    earlier = queries[..., 0].unsqueeze(-1) - keys[..., 0].unsqueeze(-2)  # of a key before the query
    if causal:
        return earlier
    later = keys[..., 1].unsqueeze(-2) - queries[..., 1].unsqueeze(-1)
    T, n_keys = earlier.shape[-2:]
    is_earlier = torch.ones(T, n_keys, dtype=torch.bool, device=queries.device).tril(n_keys - T)
    return torch.where(is_earlier, earlier, later)
