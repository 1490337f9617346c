"""A mixture of attention heads: a router picks some of many for each token."""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from zoo.attention.base import Attention, AttentionCache, AuxiliaryLoss, Masks, option, register_attention
from zoo.attention.mixing import mix
from zoo.errors import ZooError


@dataclass(frozen=True)
class MixtureOptions:
    experts: int | None = option(None, "number of expert heads E; null is 2 H")
    chosen: int | None = option(None, "how many of them a token takes, k; null is H")
    balance_weight: float = option(0.01, "weight of the load-balance loss", shapes_weights=False)
    z_weight: float = option(0.001, "weight of the router's z loss", shapes_weights=False)
    variant: Literal["paper", "damcha_repo"] = option(
        "paper",
        "damcha_repo: experts with keys and values of their own, a softmax over the k best, outputs side by side, and "
        "no losses, as the method's repository has it",
    )

    def __post_init__(self) -> None:
        for name in ("experts", "chosen"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ZooError(f"{name}: got {value}; give at least 1, or null")
        for name in ("balance_weight", "z_weight"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ZooError(f"{name}: got {value}; must be 0 or more")


@register_attention("mixture")
class MixtureAttention(Attention):
    r"""Expert heads with queries and outputs of their own over one shared pair of keys and values.

    .. math::
        y_t = \sum_{i \in G_t} w_{i,t} \, softmax(x_t W_{q,i} (X W_k)^T / \sqrt{dh} + mask) X W_v W_{o,i}, \quad
        w_{i,t} = p_{i,t} / \sum_{j \in G_t} p_{j,t}, \quad p_t = softmax(x_t W_r)

    :math:`G_t` are the k experts with the largest :math:`p_t`; the divisor carries no gradient. Two terms keep the
    router in order: the load balance :math:`E \sum_i f_i P_i`, with f the share of choices and P the mean
    probability, and the z loss, the mean of :math:`(\log \sum_i e^{x W_r})^2`, both over real tokens. PyTorch's fused
    kernels attend with all E experts, and what wasn't chosen is multiplied by zero: exact, and without a saving of
    time.

    ``damcha_repo``: experts with keys and values of their own; gates are a softmax over the k best of the router's
    numbers; gated outputs stand side by side in the order of their gates, k dh wide.

    The weights that ``need_weights`` gives are those of the k chosen experts, (B, k, T, keys). Source: Zhang et al.
    2022, arXiv 2210.05144, section 3.
    """

    Options = MixtureOptions

    def build(self) -> None:
        D, dh = self.d_model, self.head_dim
        o = self.options
        self.experts = 2 * self.n_heads if o.experts is None else o.experts
        self.chosen = min(self.n_heads, self.experts) if o.chosen is None else o.chosen
        if self.chosen > self.experts:
            raise ZooError(
                f"attention_options.chosen: got {self.chosen} of {self.experts} experts; choose at most all of them"
            )
        is_paper = o.variant == "paper"
        self.W_q = nn.Linear(D, self.experts * dh, bias=False)
        self.W_k, self.W_v = (nn.Linear(D, dh if is_paper else self.experts * dh, bias=False) for _ in range(2))
        self.router = nn.Linear(D, self.experts, bias=not is_paper)
        if is_paper:
            self.W_o = nn.Parameter(torch.empty(self.experts, dh, D))
        else:
            self.out_proj = self.out_linear(self.chosen * dh)
        self._losses: list[AuxiliaryLoss] = []
        self.init_weights()

    def attend(
        self, x: Tensor, masks: Masks, shared: Any, cache: AttentionCache | None, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        is_paper = self.options.variant == "paper"
        q = self.split_heads(self.W_q(x), self.experts)  # (B, E, T, dh)
        k, v = (self.split_heads(project(x), 1 if is_paper else self.experts) for project in (self.W_k, self.W_v))
        keys_real = None
        if cache is not None:
            k, v, keys_real = cache.append(k, v, masks.padding)
        y, weights = mix(q, k, v, masks, keys_real, self.dropout_p, need_weights)
        logits = self.router(x)
        wide = logits if logits.dtype == torch.float64 else logits.float()
        best, places = wide.topk(self.chosen, dim=-1)  # (B, T, k)
        if weights is not None:
            weights = weights.gather(1, places.transpose(1, 2).unsqueeze(-1).expand(-1, -1, -1, weights.shape[-1]))
        if not is_paper:
            index = places.transpose(1, 2).unsqueeze(-1).expand(-1, -1, -1, self.head_dim)
            gated = y.gather(1, index) * best.softmax(dim=-1).to(y.dtype).transpose(1, 2).unsqueeze(-1)
            return self.out_proj(self.merge_heads(gated)), weights
        p = wide.softmax(dim=-1)
        taken = torch.zeros_like(p).scatter(-1, places, 1.0)  # (B, T, E)
        gates = p * taken / p.gather(-1, places).sum(dim=-1, keepdim=True).detach()
        self._losses = self._router_losses(wide, p, taken, masks.padding) if self.training else []
        y = y * gates.to(y.dtype).transpose(1, 2).unsqueeze(-1)
        return torch.einsum("beth,ehd->btd", y, self.W_o.to(y.dtype)), weights

    def _router_losses(self, logits: Tensor, p: Tensor, taken: Tensor, padding: Tensor | None) -> list[AuxiliaryLoss]:
        real = torch.ones_like(p[..., :1]) if padding is None else padding.bool().unsqueeze(-1).to(p.dtype)
        n = real.sum().clamp(min=1)
        share = (taken * real).sum(dim=(0, 1)) / (n * self.chosen)
        mean = (p * real).sum(dim=(0, 1)) / n
        z = (logits.logsumexp(dim=-1, keepdim=True).square() * real).sum() / n
        balance = self.experts * (share * mean).sum()
        return [
            AuxiliaryLoss("balance", balance, self.options.balance_weight),
            AuxiliaryLoss("router_z", z, self.options.z_weight),
        ]

    def auxiliary_losses(self) -> list[AuxiliaryLoss]:
        """Load balance and z loss of the last forward pass in training."""
        return self._losses

    def projections(self) -> list[str]:
        return ["W_q", "W_k", "W_v"]

    @torch.no_grad()
    def init_weights(self) -> None:
        if self.options.variant == "paper":
            self.W_o.uniform_(-1, 1).mul_((self.chosen * self.head_dim) ** -0.5)
