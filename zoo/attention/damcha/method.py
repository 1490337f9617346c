"""Data-Adaptive Mahalanobis Cross-Head Attention (DAMCHA), its static ablation, and ordinary attention beside them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypedDict, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.attention.damcha.contexts import PrefixState
from zoo.attention.damcha.metric import BlockMetrics, StructuredMLPForM, check_dropout, check_heads, check_input
from zoo.errors import ZooError


class GeneratorOptions(TypedDict, total=False):
    """The options of ``StructuredMLPForM`` that pass through the layers above it; described there."""

    diag_scale: float
    off_diag_scale: float
    off_diag_mode: str
    off_diag_alpha_init: float
    use_layer_bias: bool
    layer_bias_rank: int
    compact_rank: int
    free_M: bool
    context_stride: int
    chunk_size: int | None


# What each switch must be where no generator exists. Sizes (mlp_hidden, layer_bias_rank, ...) describe parts that are
# then not built, and are let pass so that twins can share one set of arguments.
_SWITCHED_OFF: dict[str, object] = {
    "diag_scale": 1.0,
    "off_diag_scale": 1.0,
    "off_diag_mode": "mlp",
    "use_layer_bias": False,
    "compact_rank": 0,
    "free_M": False,
    "context_stride": 1,
}


def check_mode(use_M: bool, use_mlp: bool, share_mlp: bool, options: GeneratorOptions) -> None:
    """Raise ZooError for a combination of switches that means nothing."""
    if use_mlp and not use_M:
        raise ZooError(
            "use_mlp: got True with use_M False; a generator needs a metric to generate, so set use_M to True or "
            "use_mlp to False"
        )
    if share_mlp and not use_mlp:
        raise ZooError(
            "share_mlp: got True with use_mlp False; there is no generator to share, so set use_mlp to True or "
            "share_mlp to False"
        )
    if unknown := set(options) - set(GeneratorOptions.__annotations__):
        known = ", ".join(GeneratorOptions.__annotations__)
        raise TypeError(f"got an unexpected option {', '.join(sorted(unknown))}; the generator's options are {known}")
    if not use_mlp:
        for name, off in _SWITCHED_OFF.items():
            if options.get(name, off) != off:
                raise ZooError(
                    f"{name}: got {options[name]!r} with use_mlp False; it is an option of the generator, so set "  # type: ignore[literal-required]
                    f"use_mlp to True or leave {name} at {off!r}"
                )


@dataclass
class AttentionCache:
    """Keys and values of the tokens one layer has seen, with room for ``capacity`` of them.

    ``keys`` and ``values`` are (B, H, capacity, dh), ``real`` (B, capacity) or None while nothing is padded, and
    ``prefix`` the running context of the layer's own generator.
    """

    capacity: int
    length: int = 0
    keys: Tensor | None = None
    values: Tensor | None = None
    real: Tensor | None = None
    prefix: PrefixState = field(default_factory=PrefixState)

    def append(self, k: Tensor, v: Tensor, padding_mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Add the keys and values (B, H, T, dh) of T new tokens; return all so far and which of them are real."""
        B, H, T, dh = k.shape
        start, end = self.length, self.length + T
        if end > self.capacity:
            raise ZooError(f"cache: got {end} tokens for a capacity of {self.capacity}; make a larger cache")
        if self.keys is not None and self.keys.shape[:2] != (B, H):
            raise ZooError(
                f"cache: got {B} rows and {H} heads, but it holds {tuple(self.keys.shape[:2])}; "
                "use a new cache for another batch or model"
            )
        if self.keys is None or self.values is None:
            self.keys, self.values = k.new_empty(B, H, self.capacity, dh), v.new_empty(B, H, self.capacity, dh)
        self.keys[:, :, start:end], self.values[:, :, start:end] = k, v
        if padding_mask is not None and self.real is None:
            self.real = torch.ones(B, self.capacity, dtype=torch.bool, device=k.device)
        if padding_mask is not None and self.real is not None:
            self.real[:, start:end] = padding_mask.bool()
        self.length = end
        real = None if self.real is None else self.real[:, :end]
        return self.keys[:, :, :end], self.values[:, :, :end], real


class MBasedAttention(nn.Module):
    r"""Multi-head attention whose scores come from a generated metric.

    .. math::
        S_i = X_i m_i X_i^T / \sqrt{dh}, \quad A_i = softmax(S_i + mask), \quad O_i = A_i V_i, \quad
        Y = concat(O_1, ..., O_H) W_o

    :math:`X_i` is the i-th slice of the layer's own input, on both sides: there is no query or key projection. With
    ``q = X_i m_i`` the rest is ordinary attention, and PyTorch's fused kernels do it.

    Args:
        d_model: model width D.
        n_heads: number of heads H; divides D.
        dropout: dropout probability of the attention weights.
        bias: whether the projections have a bias.
        use_M: False gives ordinary attention with query and key projections.
        use_mlp: generate the metric from the input. False with ``use_M``: one learned matrix ``M0``, the static
            ablation, which starts at the identity.
        mlp_hidden: hidden widths of the generator.
        shared_mlp: a generator that a stack owns; its parameters are not registered here again.
        layer_idx: which layer this is, for the generator's layer bias.
        n_layers: number of layers the generator has biases for.
        use_multihead_M: accepted for compatibility with the method's command line; changes nothing, since DAMCHA
            always sums block rows per head.
        mlp_dropout: dropout probability in the generator; left out, ``dropout``.
        options: options of the generator, see ``StructuredMLPForM``.

    Raises:
        ZooError: for a combination of switches without meaning, here; for a wrong shape, in ``forward``.

    Source: DAMCHA, equations (5) to (8), appendix D.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        dropout: float = 0.1,
        bias: bool = True,
        use_M: bool = True,
        use_mlp: bool = True,
        mlp_hidden: Sequence[int] = (256, 512),
        shared_mlp: StructuredMLPForM | None = None,
        layer_idx: int = 0,
        n_layers: int = 4,
        use_multihead_M: bool = True,
        mlp_dropout: float | None = None,
        **options: Unpack[GeneratorOptions],
    ) -> None:
        super().__init__()
        check_heads(d_model, n_heads)
        check_dropout(dropout)
        check_mode(use_M, use_mlp, shared_mlp is not None, options)
        if shared_mlp is not None and options:
            raise ZooError(
                f"{next(iter(options))}: given beside shared_mlp, which has its own options; give it to that generator"
            )
        if shared_mlp is not None and (shared_mlp.d_model, shared_mlp.n_heads) != (d_model, n_heads):
            raise ZooError(
                f"shared_mlp: got one for d_model {shared_mlp.d_model} and {shared_mlp.n_heads} heads; this layer has "
                f"d_model {d_model} and {n_heads} heads, and both must agree"
            )
        self.d_model, self.n_heads, self.head_dim = d_model, n_heads, d_model // n_heads
        self.dropout, self.layer_idx = dropout, layer_idx
        self.use_M, self.use_mlp = use_M, use_mlp

        if not use_M:
            self.W_q = nn.Linear(d_model, d_model, bias=bias)
            self.W_k = nn.Linear(d_model, d_model, bias=bias)
        self.W_v = nn.Linear(d_model, d_model, bias=bias)
        self.out_proj = nn.Linear(d_model, d_model, bias=bias)
        if use_M and not use_mlp:
            self.M0 = nn.Parameter(torch.eye(d_model))
        self.generator: StructuredMLPForM | None = None
        if use_mlp and shared_mlp is None:
            drop = dropout if mlp_dropout is None else mlp_dropout
            self.generator = StructuredMLPForM(d_model, n_heads, mlp_hidden, drop, n_layers=n_layers, **options)
        # A tuple hides the module from registration: its stack owns it, saves it and moves it.
        self._shared = (shared_mlp,)

    @property
    def metric_generator(self) -> StructuredMLPForM | None:
        """The generator in use, own or shared; None for the static ablation and for ordinary attention."""
        return self.generator if self.generator is not None else self._shared[0]

    def forward(
        self,
        x: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        padding_mask: Tensor | None = None,
        head_metrics: Tensor | BlockMetrics | None = None,
        need_weights: bool = False,
        cache: AttentionCache | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend.

        Args:
            x: input (B, T, D).
            attn_mask: (T, T), (B, T, T) or broadcastable to (B, H, T, T). Bool or integer: True or non-zero is
                visible. Floating: added to the scores.
            is_causal: query t sees keys up to t, and its metric comes from the mean of x[:, :t+1].
            padding_mask: (B, T), True or non-zero at real tokens. Padded tokens are no keys, don't enter the context,
                and their outputs are zero, whatever their values.
            head_metrics: metrics made elsewhere, (B, H, dh, dh) or one a query (B, T, H, dh, dh), layer bias included;
                or a stack's ``BlockMetrics``, without. Else they are generated from ``x``.
            need_weights: also return the attention weights; takes the explicit road, with the same y.
            cache: keys, values and context of earlier tokens; x then holds the new ones only.

        Returns:
            y (B, T, D), and the weights (B, H, T, keys) or None. A query with no visible key mixes to zero.
        """
        check_input(x, self.d_model, padding_mask)
        B, T, _ = x.shape
        real: Tensor | None = None
        if padding_mask is not None:
            real = padding_mask.bool()
            x = x.masked_fill(~real.unsqueeze(-1), 0)  # NaN in padding would survive a product with zero

        q, k = self._queries_and_keys(x, head_metrics, is_causal, padding_mask, cache)  # (B, H, T, dh)
        v = self._heads(self.W_v(x))
        keys_real = real
        if cache is not None:
            k, v, keys_real = cache.append(k, v, padding_mask)

        if attn_mask is None and keys_real is None and not need_weights and (k.shape[2] == T or T == 1):
            causal = is_causal and bool(k.shape[2] == T)  # else the one query sees all keys
            mix = F.scaled_dot_product_attention(
                q, k, v, dropout_p=self._dropout_p, is_causal=causal, scale=1 / math.sqrt(self.head_dim)
            )
            return self.out_proj(self._merge(mix)), None

        visible, bias = self._visibility(q, k, attn_mask, is_causal, keys_real)
        some = visible.any(dim=-1, keepdim=True)  # a row of -inf has no softmax: open it, then drop what it mixes
        shown = visible | ~some
        mask = shown if bias is None else bias.masked_fill(~visible, 0).masked_fill(~shown, float("-inf"))
        if real is not None:
            some = some & real.view(B, 1, T, 1)
        weights = None
        if need_weights:
            scores = q @ k.transpose(-1, -2) / math.sqrt(self.head_dim)  # (B, H, T, keys)
            scores = scores.masked_fill(~shown, float("-inf")) if bias is None else scores + mask
            weights = scores.softmax(dim=-1).masked_fill(~some, 0)
            mix = F.dropout(weights, self._dropout_p) @ v
        else:
            mix = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, dropout_p=self._dropout_p, scale=1 / math.sqrt(self.head_dim)
            ).masked_fill(~some, 0)
        y = self.out_proj(self._merge(mix))
        return (y if real is None else y.masked_fill(~real.unsqueeze(-1), 0)), weights

    @property
    def _dropout_p(self) -> float:
        return self.dropout if self.training else 0.0

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], self.n_heads, self.head_dim).transpose(1, 2)  # (B, H, T, dh)

    def _merge(self, mix: Tensor) -> Tensor:
        return mix.transpose(1, 2).flatten(-2)  # (B, T, D)

    def _queries_and_keys(
        self,
        x: Tensor,
        head_metrics: Tensor | BlockMetrics | None,
        is_causal: bool,
        padding_mask: Tensor | None,
        cache: AttentionCache | None,
    ) -> tuple[Tensor, Tensor]:
        if not self.use_M:
            if head_metrics is not None:
                raise ZooError("head_metrics: given to attention with use_M False, which has no metric; leave it out")
            return self._heads(self.W_q(x)), self._heads(self.W_k(x))
        k = self._heads(x)
        m = head_metrics
        if m is None:
            generator = self.metric_generator
            if generator is None:
                return k @ self.static_metrics(), k
            if is_causal:
                m = generator.causal_metrics(x, padding_mask, None if cache is None else cache.prefix)
            else:
                m = generator.head_metrics(x, False, padding_mask, self.layer_idx)
        B, T, _ = x.shape
        H, dh = self.n_heads, self.head_dim
        if isinstance(m, BlockMetrics):
            q = m.queries(x.view(B, T, H, dh)).transpose(1, 2)
            generator = self.metric_generator
            bias = None if generator is None else generator.layer_bias_metrics(self.layer_idx)
            return (q if bias is None else q + k @ bias), k
        if m.dim() == 4 and m.shape == (B, H, dh, dh):
            return k @ m, k
        if m.shape != (B, T, H, dh, dh):
            raise ZooError(
                f"head_metrics: got shape {tuple(m.shape)}; expected {(B, H, dh, dh)} or, one a query, "
                f"{(B, T, H, dh, dh)}"
            )
        q = (x.view(B, T, H, 1, dh) @ m).squeeze(-2)  # (B, T, H, dh)
        return q.transpose(1, 2), k

    def static_metrics(self) -> Tensor:
        """Block-row sums of the learned ``M0``: (H, dh, dh)."""
        H, dh = self.n_heads, self.head_dim
        return self.M0.view(H, dh, H, dh).sum(dim=2)

    def _visibility(
        self, q: Tensor, k: Tensor, attn_mask: Tensor | None, is_causal: bool, keys_real: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Which key each query sees, (B or 1, H or 1, T, keys), and what a floating mask adds to the scores."""
        B, H, T, _ = q.shape
        n_keys = k.shape[2]
        visible = torch.ones(1, 1, T, n_keys, dtype=torch.bool, device=q.device)
        bias = None
        if attn_mask is not None:
            mask = attn_mask.unsqueeze(1) if attn_mask.dim() == 3 else attn_mask
            try:
                mask = mask.expand(B, H, T, n_keys) if mask.dim() == 4 else mask.expand(1, 1, T, n_keys)
            except RuntimeError:
                raise ZooError(
                    f"attn_mask: got shape {tuple(attn_mask.shape)}; expected (T, T), (B, T, T) or a shape that "
                    f"broadcasts to (B, H, T, keys) = {(B, H, T, n_keys)}"
                ) from None
            if mask.is_floating_point():
                bias = mask.to(q.dtype)
                visible = visible & (mask != float("-inf"))
            else:
                visible = visible & mask.bool()
        if is_causal:
            visible = visible & visible.new_ones(T, n_keys).tril(n_keys - T)
        if keys_real is not None:
            visible = visible & keys_real.view(keys_real.shape[0], 1, 1, n_keys)
        return visible, bias

    @torch.no_grad()
    def get_M_matrix(self) -> Tensor | None:
        """The full metric (D, D), averaged over the contexts of the last batch; None for ordinary attention."""
        if not self.use_M:
            return None
        generator = self.metric_generator
        return self.M0.detach().clone() if generator is None else generator.mean_metric(self.layer_idx)

    def extra_repr(self) -> str:
        return f"d_model={self.d_model}, n_heads={self.n_heads}, dropout={self.dropout}"
