"""The attention that a practitioner of today starts from: rotary positions and normalised queries and keys."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from zoo.attention.base import Attention, AttentionCache, Masks, StackStyle, places_of, register_attention
from zoo.attention.mixing import mix
from zoo.errors import ZooError
from zoo.options import option

EPS = 1e-6  # keeps the norm of a zero vector from dividing by zero
PICTURE_BASE = 100.0  # of axial rotation: a picture has tens of rows, where a text has thousands of tokens


@dataclass(frozen=True)
class ModernOptions:
    """The options of modern attention."""

    base: float = option(
        10_000.0,
        "the slowest pair of dimensions turns nearly base times slower than the fastest; 100 in a stack for pictures",
    )

    def __post_init__(self) -> None:
        if not 1 < self.base < float("inf"):
            raise ZooError(
                f"base: got {self.base}; must be a number above 1, such as 10000 for text or 100 for pictures"
            )


@register_attention("modern")
class ModernAttention(Attention):
    r"""Multi-head attention with rotary positions and QK-norm, in a pre-norm RMSNorm stack.

    .. math::
        q'_t = R_{p(t)} (g_q \odot rms(q_t)), \quad k'_s = R_{p(s)} (g_k \odot rms(k_s)), \quad
        A_h = softmax(q'_h k_h'^T / \sqrt{dh} + mask), \quad Y = concat_h(A_h X W_{v,h}) W_o

    :math:`rms(x) = x / \sqrt{mean(x^2) + 10^{-6}}` over the dh entries of a head, with scales :math:`g` (dh) that the
    heads share. :math:`R_p` turns pairs of dimensions by angles that grow with the place p, so scores depend on places
    through their differences alone. Text: the place is the number of real tokens before; pair i of n = dh // 2 turns by
    :math:`p \, base^{-i/n}`. Pictures: a place is a row and a column, each with n = dh // 4 pairs of its own, so half
    of the head's width for each; class and register tokens have no place and aren't turned. Dimensions that are left
    over, one where dh is odd, up to three for pictures, aren't turned either: a head of width 1, or below 4 for
    pictures, knows no positions.

    Source: Su et al. 2021, arXiv 2104.09864, section 3.2 (rotation); Heo et al. 2024, arXiv 2403.13298 (axial, for
    pictures); Henry et al. 2020, arXiv 2010.04245 (QK-norm, here with the root mean square for the norm, and
    1 / sqrt(dh) kept); Zhang and Sennrich 2019, arXiv 1910.07467 (RMSNorm).
    """

    Options = ModernOptions
    stack = StackStyle(norm="rms", norm_first=True, positions=False)

    @classmethod
    def defaults(cls, stack: Literal["text", "pictures"], n_layers: int) -> dict[str, Any]:
        return {"base": PICTURE_BASE} if stack == "pictures" else {}

    def build(self) -> None:
        self.W_q, self.W_k, self.W_v = self.linear(), self.linear(), self.linear()
        self.out_proj = self.out_linear()
        self.q_norm, self.k_norm = nn.RMSNorm(self.head_dim, eps=EPS), nn.RMSNorm(self.head_dim, eps=EPS)

    def attend(
        self, x: Tensor, masks: Masks, shared: Any, cache: AttentionCache | None, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        q, k, v = (self.split_heads(project(x)) for project in (self.W_q, self.W_k, self.W_v))  # (B, H, T, dh)
        angles = self._angles(x, masks, cache)
        # normalised in the type of the scale, wherever autocast gives another
        q = turned(self.q_norm(q.to(self.q_norm.weight.dtype)), angles).to(v.dtype)
        k = turned(self.k_norm(k.to(self.k_norm.weight.dtype)), angles).to(v.dtype)
        keys_real = None
        if cache is not None:
            k, v, keys_real = cache.append(k, v, masks.padding)
        y, weights = mix(q, k, v, masks, keys_real, self.dropout_p, need_weights)
        return self.out_proj(self.merge_heads(y)), weights

    def _angles(self, x: Tensor, masks: Masks, cache: AttentionCache | None) -> Tensor:
        """By how much each pair of dimensions is turned, (T, pairs), or (B, 1, T, pairs) where some are padding."""
        if masks.places is None:
            places = places_of(masks, x.shape[1], cache, x.device).unsqueeze(-1)  # (..., T, 1)
        else:
            places = masks.places.clamp(min=0)  # (T, 2); -1 is no place, and 0 turns nothing
        n = self.head_dim // (2 * places.shape[-1])
        exact = torch.promote_types(x.dtype, torch.float32)  # bfloat16 can't tell places above 256 apart
        steps = torch.arange(n, device=x.device, dtype=exact)
        rates = torch.pow(torch.tensor(self.options.base, device=x.device, dtype=exact), -steps / max(n, 1))
        angles = (places.to(exact).unsqueeze(-1) * rates).flatten(-2)
        return angles.unsqueeze(1) if angles.dim() == 3 else angles

    @torch.no_grad()
    def init_weights(self) -> None:
        self.q_norm.reset_parameters()
        self.k_norm.reset_parameters()


def turned(x: Tensor, angles: Tensor) -> Tensor:
    """x (B, H, T, dh) with dimensions i and n + i turned by ``angles`` (..., T, n); what is beyond 2 n stays."""
    n = angles.shape[-1]
    x = x.to(torch.promote_types(x.dtype, angles.dtype))
    cos, sin = angles.cos(), angles.sin()
    first, second, rest = x[..., :n], x[..., n : 2 * n], x[..., 2 * n :]
    return torch.cat([first * cos - second * sin, first * sin + second * cos, rest], dim=-1)
