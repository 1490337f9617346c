"""Ordinary attention as it is built today: rotary positions and normalised queries and keys."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zoo.attention.base import Attention, AttentionCache, Masks, StackStyle, option, places_of, register_attention
from zoo.attention.mixing import mix
from zoo.errors import ZooError


@dataclass(frozen=True)
class ModernOptions:
    rotary_base: float = option(10_000.0, "base of the rotary angles: the longest wave is 2 pi times as long")

    def __post_init__(self) -> None:
        if not 1 < self.rotary_base < 1e12:
            raise ZooError(f"rotary_base: got {self.rotary_base}; must be above 1, as 10000 is")


@register_attention("modern")
class ModernAttention(Attention):
    r"""Attention with rotary positions and RMS-normalised queries and keys, in a pre-norm stack of RMS norms.

    .. math:: A_h = softmax(R_t(g_q \, q_h / rms(q_h)) \; R_j(g_k \, k_h / rms(k_h))^T / \sqrt{dh} + mask)

    R_p turns each pair of dimensions (i, i + w/2) by the angle p b^{-2i/w}, w the width that turns. In text p is the
    number of real tokens before; in pictures the first half of a head turns by its row and the second by its column,
    and class and register tokens not at all. What doesn't divide into pairs stays. The stack adds no positions of its
    own. PyTorch's fused kernels do the rest.

    Sources: Su et al. 2021, arXiv 2104.09864, section 3.2; Henry et al. 2020, arXiv 2010.04245; Zhang and Sennrich
    2019, arXiv 1910.07467.
    """

    Options = ModernOptions
    stack = StackStyle(norm="rms", norm_first=True, positions=False)

    def build(self) -> None:
        self.W_q, self.W_k, self.W_v = self.linear(), self.linear(), self.linear()
        self.q_norm, self.k_norm = (nn.RMSNorm(self.head_dim, eps=1e-6) for _ in range(2))
        self.out_proj = self.out_linear()

    def attend(
        self, x: Tensor, masks: Masks, shared: Any, cache: AttentionCache | None, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        q, k, v = (self.split_heads(project(x)) for project in (self.W_q, self.W_k, self.W_v))  # (B, H, T, dh)
        turn = self._turns(masks, x, cache)
        q, k, keys_real = turn(self.q_norm(q)).to(v.dtype), turn(self.k_norm(k)).to(v.dtype), None
        if cache is not None:
            k, v, keys_real = cache.append(k, v, masks.padding)
        y, weights = mix(q, k, v, masks, keys_real, self.dropout_p, need_weights)
        return self.out_proj(self.merge_heads(y)), weights

    def _turns(self, masks: Masks, x: Tensor, cache: AttentionCache | None) -> "Turn":
        if masks.places is None:
            places = places_of(masks, x.shape[1], cache, x.device)  # (T,) or (B, T)
            return Turn([places], self.head_dim, self.options.rotary_base)
        rows, columns = masks.places.clamp(min=0).unbind(-1)  # -1 has no place, and 0 doesn't turn
        return Turn([rows, columns], self.head_dim, self.options.rotary_base)


class Turn:
    """Turns pairs of dimensions by angles that grow with a token's place.

    Args:
        places: a tensor (T,) or (B, T) a coordinate.
        width: width of a head, shared out among the coordinates.
        base: base of the angles.
    """

    def __init__(self, places: list[Tensor], width: int, base: float) -> None:
        self.pairs = width // len(places) // 2
        angles = [self._angles(p, base) for p in places]
        self.cos, self.sin = (
            torch.cat([f(a) for a in angles], dim=-1).unsqueeze(-3) for f in (torch.cos, torch.sin)
        )  # (1 or B, 1, T, coordinates * pairs)

    def _angles(self, places: Tensor, base: float) -> Tensor:
        steps = torch.arange(self.pairs, device=places.device, dtype=torch.float64) / max(self.pairs, 1)
        return places.unsqueeze(-1).double() * base**-steps

    def __call__(self, x: Tensor) -> Tensor:
        """x (B, H, T, dh), turned; the arithmetic is in float32 or better."""
        wide = x if x.dtype == torch.float64 else x.float()
        cos, sin = self.cos.to(wide.dtype), self.sin.to(wide.dtype)
        n = cos.shape[-1]
        a, b, rest = wide[..., :n], wide[..., n : 2 * n], wide[..., 2 * n :]
        return torch.cat([a * cos - b * sin, a * sin + b * cos, rest], dim=-1)
