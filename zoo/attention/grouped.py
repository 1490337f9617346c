"""Grouped-query attention: fewer keys and values than queries."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from zoo.attention.base import Attention, AttentionCache, Masks, option, register_attention
from zoo.attention.mixing import mix
from zoo.errors import ZooError


@dataclass(frozen=True)
class GroupedOptions:
    kv_heads: int | None = option(
        None, "number of key and value heads G, a divisor of H; null is H / 2, or 1 of an odd H"
    )

    def __post_init__(self) -> None:
        if self.kv_heads is not None and self.kv_heads < 1:
            raise ZooError(f"kv_heads: got {self.kv_heads}; give at least 1")


@register_attention("grouped")
class GroupedAttention(Attention):
    r"""Attention whose query heads share keys and values in groups of H / G.

    .. math:: A_h = softmax(q_h k_{g(h)}^T / \sqrt{dh} + mask), \quad y = concat_h(A_h v_{g(h)}) W_o,
        \quad g(h) = \lfloor h G / H \rfloor

    PyTorch's fused kernels do it. Source: Ainslie et al. 2023, arXiv 2305.13245, section 2.
    """

    Options = GroupedOptions

    def build(self) -> None:
        H, G = self.n_heads, self.options.kv_heads
        G = self.kv_heads = (H // 2 if H % 2 == 0 else 1) if G is None else G
        if H % G:
            raise ZooError(
                f"attention_options.kv_heads: got {G} for {H} heads; it must divide them, so choose a divisor"
            )
        self.W_q = self.linear()
        self.W_k, self.W_v = (self.linear(n_out=G * self.head_dim) for _ in range(2))
        self.out_proj = self.out_linear()

    def attend(
        self, x: Tensor, masks: Masks, shared: Any, cache: AttentionCache | None, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        G = self.kv_heads
        q, k, v = self.split_heads(self.W_q(x)), self.split_heads(self.W_k(x), G), self.split_heads(self.W_v(x), G)
        keys_real = None
        if cache is not None:
            k, v, keys_real = cache.append(k, v, masks.padding)
        y, weights = mix(q, k, v, masks, keys_real, self.dropout_p, need_weights)
        return self.out_proj(self.merge_heads(y)), weights
