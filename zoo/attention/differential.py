"""Attention as the difference of two softmaxes, which cancels what both attend to."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from zoo.attention.base import Attention, AttentionCache, Masks, Shown, register_attention
from zoo.attention.mixing import mix
from zoo.errors import ZooError

EPS = 1e-5  # of the norm after the mix
SPREAD = 0.1  # standard deviation of lambda's vectors at the start


@register_attention("differential")
class DifferentialAttention(Attention):
    r"""Differential attention: two softmaxes a head, the second subtracted with a learned weight.

    .. math::
        A_h = softmax(q_{h1} k_{h1}^T / \sqrt{w} + mask) - \lambda \, softmax(q_{h2} k_{h2}^T / \sqrt{w} + mask), \quad
        Y = concat_h((1 - \lambda_{init}) \, g \odot rms(A_h X W_{v,h})) W_o

    with w = dh / 2 the width of the two halves of a head's query and key, and
    :math:`\lambda = e^{a_1 \cdot b_1} - e^{a_2 \cdot b_2} + \lambda_{init}` of four learned vectors (w), one
    :math:`\lambda` a layer; :math:`\lambda_{init} = 0.8 - 0.6 e^{-0.3 n}` for layer n from 0.
    :math:`rms(x) = x / \sqrt{mean(x^2) + 10^{-5}}` over the dh entries of a head, with a scale :math:`g` (dh) that the
    heads share. Two calls of PyTorch's fused attention do it, as the difference may be taken after the values are
    mixed. The weights that are returned are A, whose rows sum to :math:`1 - \lambda` and whose entries may be negative.
    Each softmax has a dropout of its own.

    The paper gives its network half the heads of the Transformer that it is compared with, so that w is that one's dh.

    Raises:
        ZooError: if dh is odd.

    Source: Ye et al. 2024, arXiv 2410.05258, section 2.1.
    """

    def build(self) -> None:
        if self.head_dim % 2:
            raise ZooError(
                f"n_heads: got {self.n_heads} for d_model {self.d_model}, which makes heads of width {self.head_dim}; "
                "differential attention halves it, so choose a number of heads that leaves it even"
            )
        self.W_q, self.W_k, self.W_v = self.linear(), self.linear(), self.linear()
        self.out_proj = self.out_linear()
        self.lambda_init = 0.8 - 0.6 * math.exp(-0.3 * self.layer_idx)
        width = self.head_dim // 2
        self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2 = (
            nn.Parameter(SPREAD * torch.randn(width)) for _ in range(4)
        )
        self.head_norm = nn.RMSNorm(self.head_dim, eps=EPS)

    def attend(
        self, x: Tensor, masks: Masks, shared: Any, cache: AttentionCache | None, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        q, k, v = (self.split_heads(project(x)) for project in (self.W_q, self.W_k, self.W_v))  # (B, H, T, dh)
        keys_real = None
        if cache is not None:
            k, v, keys_real = cache.append(k, v, masks.padding)
        mixes, weights = zip(
            *(
                mix(half_q, half_k, v, masks, keys_real, self.dropout_p, need_weights)
                for half_q, half_k in zip(q.chunk(2, dim=-1), k.chunk(2, dim=-1), strict=True)
            ),
            strict=True,
        )
        weight = self.current_lambda()
        # normalised in the type of the scale, wherever autocast gives another
        y = (mixes[0] - weight * mixes[1]).to(self.head_norm.weight.dtype)
        y = ((1 - self.lambda_init) * self.head_norm(y)).to(v.dtype)
        return self.out_proj(self.merge_heads(y)), weights[0] - weight * weights[1] if need_weights else None

    def current_lambda(self) -> Tensor:
        """The weight of the second softmax, a number."""
        first, second = (self.lambda_q1 * self.lambda_k1).sum(), (self.lambda_q2 * self.lambda_k2).sum()
        return first.exp() - second.exp() + self.lambda_init

    def shown(self, x: Tensor, masks: Masks, shared: Any) -> dict[str, Shown]:
        """The weight of the second softmax."""
        return {"lambda": Shown(self.current_lambda(), ())}

    @torch.no_grad()
    def init_weights(self) -> None:
        for vector in (self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2):
            vector.normal_(std=SPREAD)
        self.head_norm.reset_parameters()
