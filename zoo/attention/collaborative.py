"""Attention whose heads share one query and one key projection."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.attention.base import Attention, AttentionCache, Masks, Shown, register_attention
from zoo.attention.mixing import mix
from zoo.errors import ZooError
from zoo.options import option


@dataclass(frozen=True)
class CollaborativeOptions:
    key_dim: int | None = option(None, "width D~ of the shared queries and keys; null is D / 2, the paper's saving")
    variant: Literal["paper", "damcha_repo"] = option(
        "paper",
        "damcha_repo: heads are combinations of the usual ones, by H x H matrices, as the method's repository has it",
    )

    def __post_init__(self) -> None:
        if self.variant not in ("paper", "damcha_repo"):
            raise ZooError(f"variant: got {self.variant!r}; choose paper or damcha_repo")
        if self.key_dim is not None and self.key_dim < 1:
            raise ZooError(f"key_dim: got {self.key_dim}; give a width of at least 1, or null")
        if self.key_dim is not None and self.variant != "paper":
            raise ZooError(f"key_dim: got {self.key_dim} with variant {self.variant}, which has none; leave it out")


@register_attention("collaborative")
class CollaborativeAttention(Attention):
    r"""Heads that weigh the dimensions of one shared pair of queries and keys.

    .. math:: s_h = ((X W_q) \circ m_h) (X W_k)^T / \sqrt{dh} + (X c_h)^T / \sqrt{dh}, \quad A_h = softmax(s_h + mask)

    with :math:`m_h` in R^D~ and the content bias :math:`c_h` in R^D, a score that a key has whatever the query: it is
    what a query's bias would give, so that queries and keys have none. They are D~ wide, so scores cost H D~ / D times
    those of standard attention: at D~ = D there would be as many parameters and H times the work, hence half of it
    where nothing is said. :math:`m_h` starts normal, with the spread that gives scores standard attention's. PyTorch's
    attention does it, with the content bias in H more dimensions, up to a multiple of 8; fused where a kernel takes
    queries wider than values, such as CUDA's memory-efficient one. A cache holds the shared key once for all heads.

    ``damcha_repo``: :math:`q_h = \sum_g C_{hg} \tilde q_g`, C near the identity, the same for keys.

    Source: Cordonnier et al. 2020, arXiv 2006.16362, section 3.
    """

    Options = CollaborativeOptions

    def build(self) -> None:
        D, H = self.d_model, self.n_heads
        self.key_dim = D if self.options.variant != "paper" else self.options.key_dim or max(1, D // 2)
        self.W_q, self.W_k = (nn.Linear(D, self.key_dim, bias=False) for _ in range(2))
        self.W_v, self.out_proj = self.linear(), self.out_linear()
        if self.options.variant == "paper":
            self.mixing = nn.Parameter(torch.empty(H, self.key_dim))
            self.content_bias = nn.Linear(D, H, bias=False)
        else:
            self.combine_q, self.combine_k = (nn.Parameter(torch.empty(H, H)) for _ in range(2))
        self.init_weights()

    def attend(
        self, x: Tensor, masks: Masks, shared: Any, cache: AttentionCache | None, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        q, k = self._queries_and_keys(x)
        v, keys_real = self.split_heads(self.W_v(x)), None
        if cache is not None:
            kept = cache.extend(masks.padding, keys=k, values=v)
            k, v, keys_real = kept["keys"], kept["values"], cache.visible_keys
        k = k.expand(-1, self.n_heads, -1, -1)
        y, weights = mix(q, k, v, masks, keys_real, self.dropout_p, need_weights, scale=self.head_dim**-0.5)
        return self.out_proj(self.merge_heads(y)), weights

    def _queries_and_keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Queries (B, H, T, w) and keys (B, 1 or H, T, w)."""
        q, k = self.W_q(x), self.W_k(x)
        if self.options.variant != "paper":
            return tuple(
                torch.einsum("hg,bgtd->bhtd", combine, self.split_heads(heads))
                for combine, heads in ((self.combine_q, q), (self.combine_k, k))
            )  # type: ignore[return-value]
        weighed = q.unsqueeze(1) * self.mixing.to(q.dtype).unsqueeze(1)  # (B, H, T, D~)
        width = self.n_heads + -(self.key_dim + self.n_heads) % 8  # kernels want multiples of 8
        own = torch.eye(self.n_heads, width, dtype=q.dtype, device=x.device)[:, None].expand(*weighed.shape[:3], -1)
        content = F.pad(self.content_bias(x), (0, width - self.n_heads))
        return torch.cat([weighed, own], dim=-1), torch.cat([k, content], dim=-1).unsqueeze(1)

    def projections(self) -> list[str]:
        return ["W_q", "W_k", "W_v", "out_proj"]

    def matrices(self) -> dict[str, Tensor]:
        """How heads weigh shared dimensions (H, D~); of ``damcha_repo`` the two combinations (H, H)."""
        if self.options.variant == "paper":
            return {"mixing": self.mixing.detach().clone()}
        return {"combine_q": self.combine_q.detach().clone(), "combine_k": self.combine_k.detach().clone()}

    def shown(self, x: Tensor, masks: Masks, shared: Any) -> dict[str, Shown]:
        """How heads weigh shared dimensions, or, of ``damcha_repo``, the usual heads."""
        of = "dimension" if self.options.variant == "paper" else "of_head"
        return {name: Shown(weights, ("head", of)) for name, weights in self.matrices().items()}

    @torch.no_grad()
    def init_weights(self) -> None:
        if self.options.variant == "paper":
            self.mixing.normal_(std=(self.head_dim / self.key_dim) ** 0.5)
            return
        for combine in (self.combine_q, self.combine_k):
            combine.normal_(std=0.01).add_(torch.eye(self.n_heads, dtype=combine.dtype, device=combine.device))
