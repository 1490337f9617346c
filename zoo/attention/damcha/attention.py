"""The layer of DAMCHA, as stacks make it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from torch import Tensor, nn

from zoo.attention.base import Attention, AttentionCache, AuxiliaryLoss, Masks, Shown, register_attention
from zoo.attention.damcha.contexts import PrefixState
from zoo.attention.damcha.metric import BlockMetrics, MetricOptions, StructuredMLPForM
from zoo.attention.mixing import mix
from zoo.errors import ZooError
from zoo.options import option


@dataclass(frozen=True)
class DamchaOptions(MetricOptions):
    """The options of DAMCHA: those of the metric, and where its generators are."""

    mlp_hidden: Sequence[int] = option((256, 512), "hidden widths of the generator")
    share_mlp: bool = option(True, "one generator for the whole stack; false gives each layer its own")
    kl_weight: float = option(1e-4, "weight of the KL term of off_diag_mode bayesian in the loss", shapes_weights=False)
    key_projection: bool = option(
        False,
        "an addition of this zoo, not the method's: keys are slices of a learned D x D projection of the layer's "
        "input, in place of slices of the input itself",
    )


class FinishedMetrics:
    """Metrics that a caller made, (B, H, dh, dh) or one a query (B, T, H, dh, dh), the layer's bias included."""

    def __init__(self, metrics: Tensor) -> None:
        self.metrics = metrics


@register_attention("damcha")
class DamchaAttention(Attention):
    r"""Data-Adaptive Mahalanobis Cross-Head Attention.

    .. math::
        S_i = X_i m_i X_i^T / \sqrt{dh}, \quad A_i = softmax(S_i + mask), \quad O_i = A_i V_i, \quad
        Y = concat(O_1, ..., O_H) W_o

    :math:`X_i` is the i-th slice of the layer's own input, on both sides: there is no query or key projection. With
    ``q = X_i m_i`` the rest is ordinary attention, and PyTorch's fused kernels do it. The metric m is generated from
    the mean of the tokens, causally from those up to the query: of the stack's input by the stack's generator
    (``share_mlp``), or of the layer's input by its own.

    Additions of this zoo, off by default: ``context_stride``, ``identity_start``, ``generator_lr_factor``, and
    ``key_projection``, with which :math:`S_i = X_i m_i (X W_k)_i^T / \sqrt{dh}`.

    Source: DAMCHA, equations (5) to (8), appendix D.
    """

    Options = DamchaOptions
    shared_name = "shared_mlp"

    def build(self) -> None:
        self.W_v = self.linear()
        self.out_proj = self.out_linear()
        self.W_k: nn.Linear | None = self.linear() if self.options.key_projection else None
        shared = self.shared_module
        if shared is not None and (shared.d_model, shared.n_heads) != (self.d_model, self.n_heads):
            raise ZooError(
                f"shared_mlp: got one for d_model {shared.d_model} and {shared.n_heads} heads; this layer has "
                f"d_model {self.d_model} and {self.n_heads} heads, and both must agree"
            )
        self.generator: StructuredMLPForM | None = None
        if shared is None:
            self.generator = _generator(self.d_model, self.n_heads, self.n_layers, self.hidden_dropout, self.options)
        self.init_weights()

    @classmethod
    def make_shared(
        cls, d_model: int, n_heads: int, n_layers: int, dropout: float, options: DamchaOptions
    ) -> nn.Module | None:
        return _generator(d_model, n_heads, n_layers, dropout, options) if options.share_mlp else None

    @classmethod
    def defaults(cls, stack: Literal["text", "pictures"], n_layers: int) -> dict[str, Any]:
        return {"mlp_hidden": (2 * n_layers,)} if stack == "pictures" else {}

    @property
    def metric_generator(self) -> StructuredMLPForM:
        """The generator in use, own or shared."""
        return cast(StructuredMLPForM, self.shared_module if self.generator is None else self.generator)

    def attend(
        self, x: Tensor, masks: Masks, shared: Any, cache: AttentionCache | None, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        slices, v = self.split_heads(x), self.split_heads(self.W_v(x))  # (B, H, T, dh)
        k = slices if self.W_k is None else self.split_heads(self.W_k(x))
        q, keys_real = self._queries(x, slices, masks, shared, cache), None
        if cache is not None:
            k, v, keys_real = cache.append(k, v, masks.padding)
        y, weights = mix(q, k, v, masks, keys_real, self.dropout_p, need_weights)
        return self.out_proj(self.merge_heads(y)), weights

    def _queries(self, x: Tensor, slices: Tensor, masks: Masks, shared: Any, cache: AttentionCache | None) -> Tensor:
        """``X_i m_i`` (B, H, T, dh)."""
        B, T, _ = x.shape
        H, dh = self.n_heads, self.head_dim
        generator, m = self.metric_generator, shared
        if m is None and masks.causal:
            prefix = None if cache is None else cache.state.setdefault("prefix", PrefixState())
            m = generator.causal_metrics(x, masks.padding, prefix)
        elif m is None:
            m = generator.head_metrics(x, False, masks.padding, layer_idx=None)
        if isinstance(m, BlockMetrics):
            q = m.queries(x.view(B, T, H, dh)).transpose(1, 2)
            bias = generator.layer_bias_metrics(self.layer_idx)
            return q if bias is None else q + slices @ bias
        m = m.metrics if isinstance(m, FinishedMetrics) else generator.add_layer_bias(m, self.layer_idx)
        if m.dim() == 4 and m.shape == (B, H, dh, dh):
            return slices @ m
        if m.shape != (B, T, H, dh, dh):
            raise ZooError(
                f"head_metrics: got shape {tuple(m.shape)}; expected {(B, H, dh, dh)} or, one a query, "
                f"{(B, T, H, dh, dh)}"
            )
        return (x.view(B, T, H, 1, dh) @ m).squeeze(-2).transpose(1, 2)

    def init_weights(self) -> None:
        """Beside a metric that starts at the identity, the keys' projection does too; else it is drawn."""
        if self.W_k is not None and self.metric_generator.identity_start:
            nn.init.eye_(self.W_k.weight)
            if self.W_k.bias is not None:
                nn.init.zeros_(self.W_k.bias)

    def auxiliary_losses(self) -> list[AuxiliaryLoss]:
        """The KL term of ``off_diag_mode`` bayesian; the first layer speaks for a shared generator."""
        if self.metric_generator.off_diag_mode != "bayesian" or (self.generator is None and self.layer_idx > 0):
            return []
        return [AuxiliaryLoss("kl", self.metric_generator.get_kl_divergence(), self.options.kl_weight)]

    def matrices(self) -> dict[str, Tensor]:
        """The full metric M (D, D), averaged over the contexts of the last batch."""
        return {"M": self.metric_generator.mean_metric(self.layer_idx)}

    def shown(self, x: Tensor, masks: Masks, shared: Any) -> dict[str, Shown]:
        """The metric M and the heads' metrics; with coefficients of off-diagonal blocks those as well, alpha[i, j, k]
        that of diagonal block k in block (i, j), and of ``bayesian`` their standard deviations."""
        axes = ("block_row", "block_column", "diagonal_block")
        coefficients = self.metric_generator.off_diagonal_coefficients()
        return super().shown(x, masks, shared) | {name: Shown(alpha, axes) for name, alpha in coefficients.items()}


def _generator(d_model: int, n_heads: int, n_layers: int, dropout: float, options: DamchaOptions) -> StructuredMLPForM:
    return StructuredMLPForM(d_model, n_heads, options.mlp_hidden, dropout, n_layers=n_layers, **options.of_metric())
