"""Attention whose heads talk to each other before and after the softmax."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.attention.base import Attention, AttentionCache, Masks, Shown, register_attention
from zoo.attention.mixing import visibility, visible_softmax


@register_attention("talking_heads")
class TalkingHeadsAttention(Attention):
    r"""Attention whose scores, and then weights, are mixed across heads by learned matrices.

    .. math::
        s'_h = \sum_g P_{gh} s_g, \quad a_h = softmax(s'_h + mask), \quad a'_h = \sum_g R_{gh} a_g, \quad
        y = concat_h(a'_h v_h) W_o

    P and R (H, H) start at the identity. The mask comes after the first mixing, so that no minus infinity is mixed. The
    weights that are returned, and dropped out, are those after the second; they may be negative, and a row's sum is
    that of R's column. No fused kernel does this: scores and weights of all heads exist, (B, H, T, keys).

    Source: Shazeer et al. 2020, arXiv 2003.02436.
    """

    def build(self) -> None:
        self.W_q, self.W_k, self.W_v = self.linear(), self.linear(), self.linear()
        self.out_proj = self.out_linear()
        self.P, self.R = (nn.Parameter(torch.eye(self.n_heads)) for _ in range(2))

    def attend(
        self, x: Tensor, masks: Masks, shared: Any, cache: AttentionCache | None, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        q, k, v = (self.split_heads(project(x)) for project in (self.W_q, self.W_k, self.W_v))
        keys_real = masks.padding
        if cache is not None:
            k, v, keys_real = cache.append(k, v, masks.padding)
        seen, bias = visibility(q, k.shape[2], masks, keys_real)
        scores = (q * self.head_dim**-0.5) @ k.transpose(-1, -2)  # (B, H, T, keys); scaled first, as half overflows
        scores = torch.einsum("bgtj,gh->bhtj", scores, self.P)
        if bias is not None:
            scores = scores + bias.masked_fill(~seen, 0)
        weights = torch.einsum("bgtj,gh->bhtj", visible_softmax(scores, seen), self.R)
        y = F.dropout(weights, self.dropout_p) @ v
        return self.out_proj(self.merge_heads(y)), weights if need_weights else None

    def matrices(self) -> dict[str, Tensor]:
        """How heads are mixed, P and R, (H, H) each."""
        return {"P": self.P.detach().clone(), "R": self.R.detach().clone()}

    def shown(self, x: Tensor, masks: Masks, shared: Any) -> dict[str, Shown]:
        """How scores (P) and weights (R) of heads feed those of others."""
        return {name: Shown(mixing, ("from_head", "to_head")) for name, mixing in self.matrices().items()}

    @torch.no_grad()
    def init_weights(self) -> None:
        for mixing in (self.P, self.R):
            mixing.copy_(torch.eye(self.n_heads))
