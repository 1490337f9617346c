"""A mixture of attention heads: a router picks some of many for each token."""

import math
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from torch import Tensor, nn

from zoo.attention.base import Attention, AttentionCache, AuxiliaryLoss, Masks, Shown, register_attention
from zoo.attention.mixing import mix
from zoo.errors import ZooError
from zoo.options import option

_OF_LOSSES = ("balance_weight", "z_weight")


@dataclass(frozen=True)
class MixtureOptions:
    experts: int | None = option(None, "number of expert heads E; null is 2 H")
    chosen: int | None = option(None, "how many of them a token takes, k; null is H, or all E if they are fewer")
    balance_weight: float = option(0.01, "weight of the load-balance loss", shapes_weights=False)
    z_weight: float = option(0.001, "weight of the router's z loss", shapes_weights=False)
    variant: Literal["paper", "damcha_repo"] = option(
        "paper",
        "damcha_repo: experts with keys and values of their own, a softmax over the k best, outputs side by side, and "
        "no losses, as the method's repository has it",
    )

    def __post_init__(self) -> None:
        if self.variant not in ("paper", "damcha_repo"):
            raise ZooError(f"variant: got {self.variant!r}; choose paper or damcha_repo")
        for name in ("experts", "chosen"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ZooError(f"{name}: got {value}; give at least 1, or null")
        if self.experts is not None and self.chosen is not None and self.chosen > self.experts:
            raise ZooError(f"chosen: got {self.chosen} of {self.experts} experts; choose at most all of them")
        usual = {item.name: item.default for item in fields(self)}
        for name in _OF_LOSSES:
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ZooError(f"{name}: got {value}; must be 0 or more")
            if self.variant != "paper" and value != usual[name]:
                raise ZooError(f"{name}: got {value} with variant {self.variant}, which has no losses; leave it out")


@register_attention("mixture")
class MixtureAttention(Attention):
    r"""Expert heads with queries and outputs of their own over one shared pair of keys and values.

    .. math::
        y_t = \sum_{i \in G_t} w_{i,t} \, softmax(x_t W_{q,i} (X W_k)^T / \sqrt{dh} + mask) X W_v W_{o,i}, \quad
        w_{i,t} = p_{i,t} / \sum_{j \in G_t} p_{j,t}, \quad p_t = softmax(x_t W_r)

    :math:`G_t` are the k experts with the largest :math:`p_t`; the divisor carries no gradient. As keys and values are
    shared, PyTorch's fused kernels attend with the k queries that a token chose, one of them a head. Projections are
    made for all E experts, and zero where one wasn't chosen: exact, and of shapes that no token decides, so that it
    compiles and exports.

    Two terms keep the router in order while training: the load balance :math:`E \sum_i f_i P_i`, with f the share of
    choices and P the mean probability, and the z loss, the mean of :math:`(\log \sum_i e^{x W_r})^2`, both over real
    tokens.

    ``damcha_repo``: experts with keys and values of their own; gates are a softmax over the k best of the router's
    numbers; gated outputs stand side by side in the order of their gates, k dh wide. All E experts attend.

    The weights that ``need_weights`` gives are those of the chosen experts, the likeliest first: (B, k, T, keys). A
    mask with a part a head is for these k, in the paper's variant; for the E experts in the other.

    Source: Zhang et al. 2022, arXiv 2210.05144, section 3.
    """

    Options = MixtureOptions
    _losses: list[AuxiliaryLoss]
    _together: Tensor | None = None  # (E, E), of the last pass

    def build(self) -> None:
        D, dh, o = self.d_model, self.head_dim, self.options
        self.is_paper = o.variant == "paper"
        self.experts = 2 * self.n_heads if o.experts is None else o.experts
        self.chosen = min(self.n_heads, self.experts) if o.chosen is None else o.chosen
        if self.chosen > self.experts:
            raise ZooError(f"chosen: got {self.chosen} of {self.experts} experts; choose at most all of them")
        self._losses = []
        if self.is_paper:
            self.W_q, self.W_k, self.W_v = self.linear(n_out=self.experts * dh), self.linear(D, dh), self.linear(D, dh)
            self.router = nn.Linear(D, self.experts, bias=False)
            self.out_proj = self.out_linear(self.experts * dh)
            # Gates sum to one: each expert's outputs start as if it were alone, as in the paper's repository.
            bound = math.sqrt(6 / (dh + D))
            nn.init.uniform_(self.out_proj.weight, -bound, bound)
        else:
            self.W_q, self.W_k, self.W_v = (nn.Linear(D, self.experts * dh, bias=False) for _ in range(3))
            self.router = nn.Linear(D, self.experts)
            self.out_proj = self.out_linear(self.chosen * dh)

    def attend(
        self, x: Tensor, masks: Masks, shared: Any, cache: AttentionCache | None, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        logits = self.router(x)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        best, places = logits.topk(self.chosen, dim=-1)  # (B, T, k)
        self._remember(logits, places, masks.padding)
        q = self.split_heads(self.W_q(x), self.experts)  # (B, E, T, dh)
        k, v = (self.split_heads(project(x), 1 if self.is_paper else self.experts) for project in (self.W_k, self.W_v))
        keys_real = None
        if cache is not None:
            k, v, keys_real = cache.append(k, v, masks.padding)
        slots = places.transpose(1, 2).unsqueeze(-1)  # (B, k, T, 1)
        index = slots.expand(-1, -1, -1, self.head_dim)
        if self.is_paper:
            y, weights = mix(q.gather(1, index), k, v, masks, keys_real, self.dropout_p, need_weights)
            p = logits.softmax(dim=-1).gather(-1, places)
            gates = p / p.sum(dim=-1, keepdim=True).detach()
        else:
            y, weights = mix(q, k, v, masks, keys_real, self.dropout_p, need_weights)
            y = y.gather(1, index)
            weights = None if weights is None else weights.gather(1, slots.expand(-1, -1, -1, weights.shape[-1]))
            gates = best.softmax(dim=-1)
        y = y * gates.to(y.dtype).transpose(1, 2).unsqueeze(-1)  # (B, k, T, dh)
        if self.is_paper:
            y = y.new_zeros(q.shape).scatter(1, index, y)  # to each expert's place, (B, E, T, dh)
        return self.out_proj(self.merge_heads(y)), weights

    def _remember(self, logits: Tensor, places: Tensor, padding: Tensor | None) -> None:
        """Keep the losses of a pass in training, and which experts were chosen."""
        if torch.compiler.is_exporting():
            return  # a graph keeps nothing
        real = torch.ones_like(logits[..., :1])
        if padding is not None:
            real = padding.bool().unsqueeze(-1).to(logits.dtype)
        n = real.sum().clamp(min=1)
        taken = torch.zeros_like(logits).scatter(-1, places, 1.0) * real  # (B, T, E)
        self._together = torch.einsum("btd,bte->de", taken, taken).detach() / n
        if not (self.training and self.is_paper):
            self._losses = []
            return
        share = taken.sum(dim=(0, 1)) / (n * self.chosen)
        mean = (logits.softmax(dim=-1) * real).sum(dim=(0, 1)) / n
        z = (logits.logsumexp(dim=-1, keepdim=True).square() * real).sum() / n
        self._losses = [
            AuxiliaryLoss("balance", self.experts * (share * mean).sum(), self.options.balance_weight),
            AuxiliaryLoss("router_z", z, self.options.z_weight),
        ]

    def auxiliary_losses(self) -> list[AuxiliaryLoss]:
        """Load balance and z loss of the last forward pass in training."""
        return self._losses

    def matrices(self) -> dict[str, Tensor]:
        """Which share of the last pass's tokens chose both of two experts (E, E); the diagonal is each one's load."""
        return {} if self._together is None else {"together": self._together.clone()}

    def shown(self, x: Tensor, masks: Masks, shared: Any) -> dict[str, Shown]:
        """The router's probabilities, each expert's load (the share of tokens that chose it), and who is chosen with
        whom."""
        logits = self.router(x[0])
        found = {
            "router": Shown(
                logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(dim=-1), ("token", "expert")
            )
        }
        if self._together is not None:
            found["load"] = Shown(self._together.diagonal(), ("expert",))
            found["together"] = Shown(self._together, ("expert", "other_expert"))
        return found

    def projections(self) -> list[str]:
        return ["W_q", "W_k", "W_v", "out_proj"]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_losses": []}  # tensors with a history can be neither copied nor pickled
