"""Attention whose scores and weights are composed across heads by maps that the input decides."""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.attention.base import Attention, AttentionCache, Masks, Shown, register_attention
from zoo.attention.mixing import visibility, visible_softmax
from zoo.errors import ZooError
from zoo.options import option

_RANK = 2


@dataclass(frozen=True)
class DcmhaOptions:
    variant: Literal["paper", "damcha_repo"] = option(
        "paper", "damcha_repo: one gated map a query, before the softmax only, as the method's repository has it"
    )

    def __post_init__(self) -> None:
        if self.variant not in ("paper", "damcha_repo"):
            raise ZooError(f"variant: got {self.variant!r}; choose paper or damcha_repo")


@register_attention("dcmha")
class DcmhaAttention(Attention):
    r"""Dynamically composable attention: for each query and each key a map across heads, before and after the softmax.

    .. math::
        s'(t, j) = s(t, j) (I + Q_t + K_j), \quad a = softmax(s' + mask), \quad a'(t, j) = a(t, j) (I + Q'_t + K'_j)

    with s(t, j) the row of H scores. Each map is of low rank plus a diagonal, :math:`\sum_{i=1}^{2} w_{1i}^T w_{2i} +
    diag(\tanh(x W_d))`, where :math:`(w_1, w_2) = GELU(x W_1) W_2`, with 4 H hidden dimensions, and each row of
    :math:`w_1` has root mean square one. None of these has a bias. The weights that are returned, and dropped out, are
    those after the second composition. No fused kernel does this: scores and weights of all heads exist, (B, H, T,
    keys). A cache holds the maps of the keys beside them.

    ``damcha_repo``: :math:`\alpha_t = softmax(W_2 \tanh(W_1 x_t))` over the source head,
    :math:`s'_h = \sum_g \alpha_t[g, h] s_g`, :math:`s'' = g s' + (1 - g) s` with the gate :math:`g_t = \sigma(W x_t)`.

    Source: Xiao et al. 2024, arXiv 2405.08553, section 2; how the maps start is their repository's,
    Caiyun-AI/DCFormer.
    """

    Options = DcmhaOptions
    _mean_maps: Tensor | None = None  # (1 or 2, H, H), of the last pass

    def build(self) -> None:
        D, H = self.d_model, self.n_heads
        self.W_q, self.W_k, self.W_v = self.linear(), self.linear(), self.linear()
        self.out_proj = self.out_linear()
        if self.options.variant == "damcha_repo":
            rank = max(4, H // 2)
            self.router = nn.Sequential(nn.Linear(D, rank), nn.Tanh(), nn.Linear(rank, H * H))
            self.gate = nn.Linear(D, H)
        else:  # four maps: before and after the softmax, of the query and of the key
            self.hidden = nn.Parameter(torch.empty(D, 4, 4 * H))
            self.low_rank = nn.Parameter(torch.empty(4, 4 * H, 2, _RANK, H))
            self.diagonal = nn.Parameter(torch.empty(D, 4, H))
        self.init_weights()

    def attend(
        self, x: Tensor, masks: Masks, shared: Any, cache: AttentionCache | None, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        q, k, v = (self.split_heads(project(x)) for project in (self.W_q, self.W_k, self.W_v))
        of_query, of_key = self._maps(x)  # (B, T, 2, H, H)
        self._remember(of_query, of_key, masks.padding)
        keys_real = masks.padding
        if cache is not None:
            new = {"keys": k, "values": v}
            if of_key is not None:
                new["maps"] = of_key.flatten(2).unsqueeze(1)
            kept = cache.extend(masks.padding, **new)
            k, v, keys_real = kept["keys"], kept["values"], cache.visible_keys
            if of_key is not None:
                of_key = kept["maps"][:, 0].view(*k.shape[::2], 2, self.n_heads, self.n_heads)
        seen, bias = visibility(q, k.shape[2], masks, keys_real)
        scores = (q / math.sqrt(self.head_dim)) @ k.transpose(-1, -2)  # (B, H, T, keys); scaled first: half overflows
        scores = _composed(scores, of_query[:, :, 0], None if of_key is None else of_key[:, :, 0])
        if bias is not None:
            scores = scores + bias.masked_fill(~seen, 0)
        weights = visible_softmax(scores, seen)
        if of_key is not None:
            weights = _composed(weights, of_query[:, :, 1], of_key[:, :, 1])
        y = F.dropout(weights, self.dropout_p) @ v
        return self.out_proj(self.merge_heads(y)), weights if need_weights else None

    def _maps(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The maps that queries bring, (B, T, 2, H, H), row from and column to which head, and those of keys."""
        H = self.n_heads
        eye = torch.eye(H, dtype=x.dtype, device=x.device)
        if self.options.variant == "damcha_repo":
            alpha = self.router(x).unflatten(-1, (H, H)).softmax(dim=-2)
            gate = torch.sigmoid(self.gate(x)).unsqueeze(-2)  # (B, T, 1, H)
            return (gate * alpha + (1 - gate) * eye).unsqueeze(2), None
        hidden = F.gelu(torch.einsum("btd,dck->btck", x, self.hidden))
        w1, w2 = torch.einsum("btck,ckpih->btcpih", hidden, self.low_rank).unbind(3)  # (B, T, 4, rank, H)
        wide = w1 if w1.dtype == torch.float64 else w1.float()  # squares and epsilon are less than half can hold
        w1 = (wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + 1e-6)).to(w2.dtype)
        diagonal = torch.tanh(torch.einsum("btd,dch->btch", x, self.diagonal))
        maps = torch.einsum("btcig,btcih->btcgh", w1, w2) + torch.diag_embed(diagonal)
        return eye + maps[:, :, :2], maps[:, :, 2:]

    @torch.no_grad()
    def _remember(self, of_query: Tensor, of_key: Tensor | None, padding: Tensor | None) -> None:
        if torch.compiler.is_exporting():
            return  # a graph keeps nothing
        maps = (of_query if of_key is None else of_query + of_key).detach().float()
        if padding is None:
            self._mean_maps = maps.mean(dim=(0, 1))
        else:
            real = padding.bool().to(maps.dtype)
            self._mean_maps = torch.einsum("bt,btcgh->cgh", real, maps) / real.sum().clamp(min=1)

    def matrices(self) -> dict[str, Tensor]:
        """How heads (rows) feed heads (columns) before and after the softmax, the mean over the last pass's tokens."""
        if self._mean_maps is None:
            return {}
        return dict(zip(("pre", "post"), self._mean_maps.clone(), strict=False))

    def shown(self, x: Tensor, masks: Masks, shared: Any) -> dict[str, Shown]:
        """The mean maps across heads; of ``damcha_repo`` also each head's gate at each token."""
        found = {name: Shown(matrix, ("from_head", "to_head")) for name, matrix in self.matrices().items()}
        if self.options.variant == "damcha_repo":
            found["gate"] = Shown(torch.sigmoid(self.gate(x[0])), ("token", "head"))
        return found

    def projections(self) -> list[str]:
        return ["W_q", "W_k", "W_v", "out_proj"]

    @torch.no_grad()
    def init_weights(self) -> None:
        if self.options.variant == "paper":
            D, H = self.d_model, self.n_heads
            self.hidden.normal_(std=math.sqrt(2 / (D + 4 * H)))
            self.low_rank.normal_(std=0.01 * math.sqrt(1 / (4 * H)) * 2 / (H + _RANK))
            self.diagonal.normal_(std=0.005 * math.sqrt(2 / (D + H)))


def _composed(rows: Tensor, of_query: Tensor, of_key: Tensor | None) -> Tensor:
    """Scores or weights (B, H, T, keys), composed by the queries' maps (B, T, H, H) and the keys'."""
    found = torch.einsum("bgtj,btgh->bhtj", rows, of_query)
    return found if of_key is None else found + torch.einsum("bgtj,bjgh->bhtj", rows, of_key)
