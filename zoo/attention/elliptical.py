"""Attention under a diagonal metric, read off how values change from layer to layer."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from zoo.attention.base import Attention, AttentionCache, Masks, register_attention
from zoo.attention.mixing import mix
from zoo.options import option


@dataclass(frozen=True)
class EllipticalOptions:
    """The options of elliptical attention."""

    scale: Literal["max", "mean"] = option(
        "max", "what the metric of a head is divided by: its largest entry (max), or the mean of its entries (mean)"
    )


class ValuesByLayer(nn.Module):
    """What the layers of a stack hand on to each other in one forward pass; it has no parameters."""

    def share(self, x: Tensor, masks: Masks, cache: None, readers: int) -> dict[int, Tensor]:
        """A place, empty, for the values of each layer, (B, H, T, dh) by its index.

        They are detached, so it serves layers that are run again for their gradients (checkpointing) as well; for those
        all of them are kept until the pass is over.
        """
        return {}

    def new_cache(self) -> None:
        """Layers keep in their own caches what they need of earlier tokens."""
        return None


@register_attention("elliptical")
class EllipticalAttention(Attention):
    r"""Multi-head attention with queries and keys compared under a diagonal metric M, another for every input.

    .. math::
        A_h = softmax(q_h M_h k_h^T / \sqrt{dh} + mask), \quad M_h = diag(m_h / \max_d m_{hd}), \quad
        m_h = mean_t |v_{h,t}^{(n)} - v_{h,t}^{(n-1)}|, \quad Y = concat_h(A_h v_h) W_o

    with :math:`v^{(n)}` the values of layer n: a direction in which they change much from layer to layer counts much.
    The mean is over the real tokens. Causally it is over those up to the query, so every query has a metric of its own
    and no future leaks; it is folded into the query, and PyTorch's fused kernels do the rest. The first layer, and one
    on its own, has no layer before it and is ordinary attention, as is a head whose values don't change at all.

    The estimate carries no gradients, as in the authors' code. That code averages over the whole sequence in a causal
    language model as well, future included. The paper's step size delta cancels in the division by the largest entry.

    Source: Nielsen et al. 2024, arXiv 2406.13770; its repository for gradients and scale.
    """

    Options = EllipticalOptions

    @classmethod
    def make_shared(
        cls, d_model: int, n_heads: int, n_layers: int, dropout: float, options: EllipticalOptions
    ) -> nn.Module | None:
        return ValuesByLayer()

    def build(self) -> None:
        self.W_q, self.W_k, self.W_v = self.linear(), self.linear(), self.linear()
        self.out_proj = self.out_linear()
        self._last_metric: Tensor | None = None  # (B, H, dh), to look at; no buffer, as its batch may be any

    def attend(
        self, x: Tensor, masks: Masks, shared: Any, cache: AttentionCache | None, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        q, k, v = (self.split_heads(project(x)) for project in (self.W_q, self.W_k, self.W_v))  # (B, H, T, dh)
        if shared is not None:
            shared[self.layer_idx] = v.detach()
            if self.layer_idx - 1 in shared:
                metric = self._metric(v.detach(), shared[self.layer_idx - 1], masks, cache)
                q = q * metric.to(q.dtype)
        keys_real = None
        if cache is not None:
            k, v, keys_real = cache.append(k, v, masks.padding)
        y, weights = mix(q, k, v, masks, keys_real, self.dropout_p, need_weights)
        return self.out_proj(self.merge_heads(y)), weights

    def _metric(self, values: Tensor, before: Tensor, masks: Masks, cache: AttentionCache | None) -> Tensor:
        """The diagonals (B, H, T, dh), one a query, or (B, H, 1, dh), one for all."""
        changes = (values - before).abs()
        changes = changes.to(torch.promote_types(changes.dtype, torch.float32))
        if masks.padding is not None:
            changes = changes.masked_fill(~masks.padding.bool()[:, None, :, None], 0)
        # sums do for means: how many tokens they are of cancels in the scale
        sums = changes.cumsum(dim=2) if masks.causal else changes.sum(dim=2, keepdim=True)
        if cache is not None:
            sums = sums + cache.state.get("changes", 0)
            cache.state["changes"] = sums[:, :, -1:]
        scale = sums.amax(dim=-1, keepdim=True) if self.options.scale == "max" else sums.mean(dim=-1, keepdim=True)
        metric = torch.where(scale > 0, sums / scale.clamp(min=torch.finfo(sums.dtype).tiny), 1)
        if not torch.compiler.is_exporting():  # an exported graph can't write to its module
            self._last_metric = metric[:, :, -1].clone()
        return metric

    def matrices(self) -> dict[str, Tensor]:
        """The metric M (D, D) of all heads, diagonal: of the last query, averaged over the batch."""
        return {} if self._last_metric is None else {"M": self._last_metric.mean(dim=0).flatten().diag()}
