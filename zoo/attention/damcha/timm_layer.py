"""The method's attention as a layer for models of timm's own."""

from typing import Any

import torch
from torch import Tensor, nn

from zoo.attention.base import check_dropout
from zoo.attention.damcha.attention import DamchaAttention
from zoo.attention.damcha.method import MBasedAttention
from zoo.attention.damcha.metric import BlockMetrics
from zoo.attention.standard import StandardAttention
from zoo.attention.static import StaticAttention
from zoo.errors import ZooError


class MetricAttention(MBasedAttention):
    """``MBasedAttention`` behind the interface of timm's attention layers, for timm's ``attn_layer``.

    Args:
        dim: width D.
        num_heads: number of heads H; divides D.
        qkv_bias: whether the value projection has a bias.
        qk_norm: refused; there are no projected queries and keys to normalise.
        scale_norm: refused.
        proj_bias: whether the output projection has a bias.
        attn_drop: dropout probability of the attention weights.
        proj_drop: dropout probability of the output.
        norm_layer: not used; timm passes it.
        device: where to put the parameters.
        dtype: their type.
        options: further arguments of ``MBasedAttention``, such as ``use_mlp``, ``mlp_hidden`` and ``shared_mlp``.

    Raises:
        ZooError: for a value out of range or a combination without meaning.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        qkv_bias: bool = False,
        qk_norm: bool = False,
        scale_norm: bool = False,
        proj_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        norm_layer: type[nn.Module] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        for name, value in (("qk_norm", qk_norm), ("scale_attn_norm", scale_norm)):
            if value:
                raise ZooError(f"{name}: got True; a generated metric takes the place it would have, so leave it False")
        check_dropout(proj_drop)
        super().__init__(dim, num_heads, attn_drop, qkv_bias, out_bias=proj_bias, **options)
        self.proj_drop = nn.Dropout(proj_drop)
        self.to(device=device, dtype=dtype)

    def forward(  # type: ignore[override]  # timm's layers return one tensor
        self,
        x: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        head_metrics: Tensor | BlockMetrics | None = None,
    ) -> Tensor:
        """Attend: (B, T, D) -> (B, T, D); the arguments are ``MBasedAttention``'s."""
        y, _ = super().forward(x, attn_mask, is_causal, head_metrics=head_metrics)
        return self.proj_drop(y)


class _Standard(MetricAttention, StandardAttention): ...


class _Static(MetricAttention, StaticAttention): ...


class _Damcha(MetricAttention, DamchaAttention):
    metric_generator = DamchaAttention.metric_generator


MetricAttention.kinds = {"standard": _Standard, "static": _Static, "damcha": _Damcha}
