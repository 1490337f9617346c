"""Attention under a diagonal metric that is read off how values change from layer to layer."""

from typing import Any

import torch
from torch import Tensor, nn

from zoo.attention.base import Attention, AttentionCache, Masks, register_attention
from zoo.attention.mixing import mix


class LayerValues(nn.Module):
    """Hands the values of each layer on to the next, within one forward pass; has no parameters."""

    def share(self, x: Tensor, masks: Masks, cache: Any, readers: int) -> dict[int, Tensor]:
        """Where this pass keeps its values, by layer."""
        return {}

    def new_cache(self) -> None:
        return None


@register_attention("elliptical")
class EllipticalAttention(Attention):
    r"""Attention that weighs a dimension by how much values change along it from the layer before to this one.

    .. math::
        A_h = softmax(q_h M_h k_h^T / \sqrt{dh} + mask), \quad M_h = diag(m_h / \max_i m_{h,i}), \quad
        m_h = mean_t |v_h^{l}(t) - v_h^{l-1}(t)|

    The mean runs over the real tokens, causally over those up to the query. The first layer of a stack, and a layer
    on its own, have nothing to compare with: there M is the identity. M carries no gradient: it is an estimate, not a
    parameter. With it folded into the queries, PyTorch's fused kernels do the rest. Source: Nielsen et al. 2024,
    arXiv 2406.13770, section 3.
    """

    def build(self) -> None:
        self.W_q, self.W_k, self.W_v = self.linear(), self.linear(), self.linear()
        self.out_proj = self.out_linear()
        self.last_metric: Tensor | None = None

    @classmethod
    def make_shared(cls, d_model: int, n_heads: int, n_layers: int, dropout: float, options: Any) -> nn.Module:
        return LayerValues()

    def attend(
        self, x: Tensor, masks: Masks, shared: Any, cache: AttentionCache | None, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        q, k, v = (self.split_heads(project(x)) for project in (self.W_q, self.W_k, self.W_v))  # (B, H, T, dh)
        if shared is not None:
            before = shared.get(self.layer_idx - 1)
            shared[self.layer_idx] = v.detach()
            if before is not None:
                q = q * self._metric(v.detach(), before, masks, cache).to(q.dtype)
        keys_real = None
        if cache is not None:
            k, v, keys_real = cache.append(k, v, masks.padding)
        y, weights = mix(q, k, v, masks, keys_real, self.dropout_p, need_weights)
        return self.out_proj(self.merge_heads(y)), weights

    def _metric(self, v: Tensor, before: Tensor, masks: Masks, cache: AttentionCache | None) -> Tensor:
        """The diagonal of M, (B, H, 1 or T, dh)."""
        change = (v - before).abs()
        change = change if change.dtype == torch.float64 else change.float()
        if masks.padding is not None:
            change = change.masked_fill(~masks.padding.bool().view(len(v), 1, -1, 1), 0)
        # dividing by the largest makes a sum as good as a mean
        total = change.cumsum(dim=2) if masks.causal else change.sum(dim=2, keepdim=True)
        if cache is not None:
            total = total + cache.state.get("changes", 0)
            cache.state["changes"] = total[:, :, -1:]
        largest = total.amax(dim=-1, keepdim=True)
        metric = torch.where(largest > 0, total / largest.clamp(min=torch.finfo(total.dtype).tiny), 1.0)
        if not torch.compiler.is_exporting():
            self.last_metric = metric[:, :, -1].mean(dim=0)
        return metric

    def matrices(self) -> dict[str, Tensor]:
        """The diagonals (H, dh) of the last batch; none in the first layer."""
        return {} if self.last_metric is None else {"diagonal": self.last_metric}
