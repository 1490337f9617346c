"""Attention as the difference of two softmaxes."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zoo.attention.base import Attention, AttentionCache, Masks, option, register_attention
from zoo.attention.mixing import mix
from zoo.errors import ZooError


@dataclass(frozen=True)
class DifferentialOptions:
    lambda_spread: float = option(0.1, "standard deviation of lambda's vectors at the start", shapes_weights=False)

    def __post_init__(self) -> None:
        if not 0 <= self.lambda_spread < math.inf:
            raise ZooError(f"lambda_spread: got {self.lambda_spread}; must be 0 or more")


@register_attention("differential")
class DifferentialAttention(Attention):
    r"""The difference of two attentions of half the width a head, so that what both attend to cancels.

    .. math::
        A_h = softmax(q_{h,1} k_{h,1}^T / \sqrt{dh/2} + mask)
            - \lambda \, softmax(q_{h,2} k_{h,2}^T / \sqrt{dh/2} + mask),
        \quad y = concat_h((1 - \lambda_0) RMS(A_h v_h)) W_o,

        \lambda = e^{\lambda_{q1} \cdot \lambda_{k1}} - e^{\lambda_{q2} \cdot \lambda_{k2}} + \lambda_0,
        \quad \lambda_0 = 0.8 - 0.6 e^{-0.3 l}

    with l the layer, counted from 0, lambda shared by the heads of a layer, and the RMS norm over each head with a
    learned scale that the heads share. Two calls of PyTorch's fused kernels do it. Source: Ye et al. 2024, arXiv
    2410.05258, section 2.1.
    """

    Options = DifferentialOptions

    def build(self) -> None:
        if self.head_dim % 2:
            raise ZooError(
                f"n_heads: got {self.n_heads} for d_model {self.d_model}, heads of width {self.head_dim}; differential "
                "attention halves them, so choose an even width"
            )
        self.W_q, self.W_k, self.W_v = self.linear(), self.linear(), self.linear()
        self.lambdas = nn.Parameter(torch.empty(4, self.head_dim // 2))  # q1, k1, q2, k2
        self.norm = nn.RMSNorm(self.head_dim, eps=1e-5)
        self.out_proj = self.out_linear()
        self.lambda_start = 0.8 - 0.6 * math.exp(-0.3 * self.layer_idx)
        self.init_weights()

    def attend(
        self, x: Tensor, masks: Masks, shared: Any, cache: AttentionCache | None, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        q, k, v = (self.split_heads(project(x)) for project in (self.W_q, self.W_k, self.W_v))
        keys_real = None
        if cache is not None:
            k, v, keys_real = cache.append(k, v, masks.padding)
        pairs = [
            mix(a, b, v, masks, keys_real, self.dropout_p, need_weights)
            for a, b in zip(q.chunk(2, dim=-1), k.chunk(2, dim=-1), strict=True)
        ]
        lam = self.lam().to(v.dtype)
        y = self.norm(pairs[0][0] - lam * pairs[1][0]) * (1 - self.lambda_start)
        first, second = pairs[0][1], pairs[1][1]
        weights = None if first is None or second is None else first - lam * second
        return self.out_proj(self.merge_heads(y.to(v.dtype))), weights

    def lam(self) -> Tensor:
        """lambda, a number."""
        q1, k1, q2, k2 = self.lambdas
        return (q1 * k1).sum().exp() - (q2 * k2).sum().exp() + self.lambda_start

    def matrices(self) -> dict[str, Tensor]:
        """lambda (1, 1)."""
        return {"lambda": self.lam().detach().view(1, 1)}

    @torch.no_grad()
    def init_weights(self) -> None:
        self.lambdas.normal_(std=self.options.lambda_spread)
