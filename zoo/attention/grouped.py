"""Attention whose query heads share keys and values in groups."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from zoo.attention.base import Attention, AttentionCache, Masks, register_attention
from zoo.attention.mixing import mix
from zoo.errors import ZooError
from zoo.options import option


@dataclass(frozen=True)
class GroupedOptions:
    """The options of grouped attention."""

    kv_heads: int | None = option(
        None,
        "how many heads of keys and values there are; divides the number of heads, and 1 is multi-query attention; "
        "null is half of the heads, or 1 where their number is odd",
    )

    def __post_init__(self) -> None:
        if self.kv_heads is not None and self.kv_heads < 1:
            raise ZooError(
                f"kv_heads: got {self.kv_heads}; must be at least 1 and divide the number of heads, so choose a "
                "divisor, or null for half"
            )


@register_attention("grouped")
class GroupedAttention(Attention):
    r"""Grouped-query attention: G heads of keys and values, each for H / G heads of queries in a row.

    .. math::
        A_h = softmax(X W_{q,h} (X W_{k,g(h)})^T / \sqrt{dh} + mask), \quad g(h) = \lfloor h G / H \rfloor, \quad
        Y = concat_h(A_h X W_{v,g(h)}) W_o

    A cache holds G heads, not H, which is what it is for.

    Source: Ainslie et al. 2023, arXiv 2305.13245, section 2.2.
    """

    Options = GroupedOptions

    def build(self) -> None:
        H, D = self.n_heads, self.d_model
        asked = self.options.kv_heads
        self.kv_heads: int = (H // 2 if H % 2 == 0 else 1) if asked is None else asked
        if H % self.kv_heads:
            divisors = ", ".join(str(n) for n in range(1, H + 1) if H % n == 0)
            raise ZooError(
                f"attention_options.kv_heads: got {self.kv_heads} for {H} heads; must divide the number of heads, so "
                f"choose one of {divisors}"
            )
        width = self.kv_heads * self.head_dim
        self.W_q, self.W_k, self.W_v = self.linear(), self.linear(D, width), self.linear(D, width)
        self.out_proj = self.out_linear()

    def attend(
        self, x: Tensor, masks: Masks, shared: Any, cache: AttentionCache | None, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        q = self.split_heads(self.W_q(x))  # (B, H, T, dh)
        k, v = (self.split_heads(project(x), self.kv_heads) for project in (self.W_k, self.W_v))  # (B, G, T, dh)
        keys_real = None
        if cache is not None:
            k, v, keys_real = cache.append(k, v, masks.padding)
        y, weights = mix(q, k, v, masks, keys_real, self.dropout_p, need_weights)
        return self.out_proj(self.merge_heads(y)), weights
