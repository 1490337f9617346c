"""The metric of DAMCHA: from a context vector to one bilinear form per head."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from zoo.attention.base import Masks, check_dropout, check_heads, check_input
from zoo.attention.damcha.contexts import PrefixState, TokenBlocks, block_contexts, mean_context
from zoo.attention.damcha.deferred import SharedMetrics, Workspace
from zoo.attention.damcha.identity_start import check_identity_start, start_at_identity
from zoo.errors import ZooError
from zoo.options import option
from zoo.private.torch import has_autocast

_FEW = 16  # contexts for which metrics are made at once where there are no gradients
OFF_DIAG_MODES = ("mlp", "linear_comb", "bayesian", "separate_B")
Mode = Literal["mlp", "linear_comb", "bayesian", "separate_B"]


# Fused optimizers write to parameters without raising their version; this counts the steps of all optimizers.
_optimizer_steps = 0


def _count_step(*_: object) -> None:
    global _optimizer_steps
    _optimizer_steps += 1


register_optimizer_step_post_hook(_count_step)


def check_names(options: Mapping[str, Any], of_the_layer: Sequence[str] = ()) -> None:
    """Raise TypeError for a name that is no option of the generator, nor one of the layer around it."""
    if unknown := sorted(set(options) - {*METRIC_OPTIONS, *of_the_layer}):
        raise TypeError(
            f"got an unexpected option {', '.join(unknown)}; the generator's options are {', '.join(METRIC_OPTIONS)}"
        )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value < 1 << 31


@dataclass(frozen=True)
class MetricOptions:
    """What decides how a metric is generated; the one place where these options are.

    Raises:
        ZooError: for a value out of range or a combination without meaning.
    """

    diag_scale: float = option(1.0, "factor of the metric's diagonal blocks", shapes_weights=False)
    off_diag_scale: float = option(1.0, "factor of the metric's other blocks", shapes_weights=False)
    off_diag_mode: Mode = option(
        "mlp",
        "where off-diagonal blocks come from: the generator (mlp), learned combinations of the diagonal blocks "
        "(linear_comb), the same with Gaussian coefficients that are sampled while training (bayesian), or learned "
        "matrices that don't depend on the input (separate_B)",
    )
    off_diag_alpha_init: float = option(
        0.1, "standard deviation of the coefficients at the start (linear_comb, bayesian)", shapes_weights=False
    )
    use_layer_bias: bool = option(False, "add U diag(s_l) V^T to the metric of layer l")
    layer_bias_rank: int = option(16, "rank of that bias")
    compact_rank: int = option(
        0, "r > 0 generates M = U V^T / sqrt(r) with U, V of shape (D, r): 2 K D r weights in the last layer, not K D^2"
    )
    free_M: bool = option(False, "take the raw output as M, whatever off_diag_mode says")
    context_stride: int = option(
        1, "s > 1 gives s causal queries in a row the metric of the first of them, s times cheaper; 1 is the method"
    )
    chunk_size: int | None = option(
        None,
        "how many causal metrics exist at once: less memory, more time, the same numbers; null is what is faster",
        shapes_weights=False,
    )
    identity_start: bool = option(
        False,
        "an addition of this zoo, not the method's: every head's metric starts as the identity, whatever the context, "
        "and the generator learns how to leave it; the projection of key_projection then starts so too; a low rank "
        "must be at least d_model / n_heads",
        shapes_weights=False,
    )
    generator_lr_factor: float = option(
        1.0,
        "an addition of this zoo, not the method's: the generator's parameters learn at this factor of the learning "
        "rate, such as 0.1",
        shapes_weights=False,
    )

    def __post_init__(self) -> None:
        if self.off_diag_mode not in OFF_DIAG_MODES:
            raise ZooError(f"off_diag_mode: got {self.off_diag_mode!r}; choose one of {', '.join(OFF_DIAG_MODES)}")
        if self.compact_rank < 0:
            raise ZooError(f"compact_rank: got {self.compact_rank}; give 0 for full rank or a rank of at least 1")
        if self.compact_rank and self.off_diag_mode != "mlp":
            raise ZooError(
                f"compact_rank: got {self.compact_rank} with off_diag_mode {self.off_diag_mode!r}; a low-rank M has no "
                "block rule, so drop one of the two"
            )
        if self.use_layer_bias and self.layer_bias_rank < 1:
            raise ZooError(f"layer_bias_rank: got {self.layer_bias_rank}; use_layer_bias needs a rank of at least 1")
        if not _is_count(self.context_stride):
            raise ZooError(
                f"context_stride: got {self.context_stride!r}; it is how many tokens share a context, so give a whole "
                "number from 1, the method as it is, to 2^31 - 1"
            )
        if self.chunk_size is not None and not _is_count(self.chunk_size):
            raise ZooError(
                f"chunk_size: got {self.chunk_size!r}; give a whole number from 1 to 2^31 - 1, or leave it out for no "
                "bound"
            )
        if self.chunk_size is not None and self.compact_rank:
            raise ZooError(
                f"chunk_size: got {self.chunk_size} with compact_rank {self.compact_rank}; a low-rank metric is read "
                "without being formed, so leave chunk_size out"
            )
        if not 0 < self.generator_lr_factor < math.inf:
            raise ZooError(
                f"generator_lr_factor: got {self.generator_lr_factor}; it multiplies the learning rate, so give a "
                "positive number, 1 for the rate of all other parameters"
            )

    def of_metric(self) -> dict[str, Any]:
        """These options by name, without those of a subclass."""
        return {name: value for name, value in asdict(self).items() if name in METRIC_OPTIONS}


METRIC_OPTIONS = tuple(item.name for item in fields(MetricOptions))


class BlockMetrics:
    """Causal metrics, one a block of tokens, without layer bias, for one layer or several to read."""

    def __init__(self, blocks: TokenBlocks, read: Callable[[Tensor], Tensor]) -> None:
        self._blocks, self._read = blocks, read

    def queries(self, x: Tensor) -> Tensor:
        """``X_i m_i`` for every token and head: (B, T, H, dh) -> (B, T, H, dh)."""
        return self._blocks.scatter(self._read(self._blocks.gather(x)))


class StructuredMLPForM(nn.Module):
    r"""Generate the cross-head metric :math:`M` from a context, and its block-row sums.

    .. math:: M = f_\theta(c) \in R^{D \times D}, \qquad m_i = \sum_j s_{ij} M_{ij} \in R^{dh \times dh}

    with ``M[i*dh + a, j*dh + b]`` the entry (a, b) of block (i, j), :math:`s_{ii}` = ``diag_scale`` and
    :math:`s_{ij}` = ``off_diag_scale`` elsewhere. The last affine map of the generator and the sum over j commute, so
    ``head_metrics`` sums the weights first and never makes a (..., D, D) tensor.

    Args:
        d_model: model width D.
        n_heads: number of heads H; divides D. dh = D / H.
        hidden_dims: widths of the hidden layers, each Linear, GELU, Dropout. Empty: one affine map of the context.
        dropout: dropout probability in the hidden layers.
        n_layers: number of layers that share this generator; used by ``use_layer_bias``.
        options: those of ``MetricOptions``. ``context_stride`` is ours, not the method's: query t's metric comes from
            the mean of x[:, :b+1], b the first position of t's block, so no query sees ahead. ``chunk_size`` bounds
            memory forward and backward; under ``torch.compile`` the compiler plans memory. ``identity_start`` and
            ``generator_lr_factor`` are ours too: see ``identity_start.py`` and ``lr_factors``.

    Raises:
        ZooError: for a value out of range or a combination without meaning.

    Source: DAMCHA, equations (3) and (4), sections 3.3 and 3.4, appendix D.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        hidden_dims: Sequence[int] = (256, 512),
        dropout: float = 0.1,
        n_layers: int = 4,
        **options: Any,
    ) -> None:
        super().__init__()
        check_heads(d_model, n_heads)
        check_dropout(dropout)
        if any(width < 1 for width in hidden_dims):
            raise ZooError(f"hidden_dims: got {tuple(hidden_dims)}; every hidden width must be at least 1")
        check_names(options)
        o = MetricOptions(**options)
        if o.use_layer_bias and n_layers < 1:
            raise ZooError(f"n_layers: got {n_layers}; use_layer_bias needs a bias for at least 1 layer")
        self.context_stride, self.chunk_size = o.context_stride, o.chunk_size
        self.d_model, self.n_heads, self.head_dim = d_model, n_heads, d_model // n_heads
        self.diag_scale, self.off_diag_scale = o.diag_scale, o.off_diag_scale
        self.identity_start, self.generator_lr_factor = o.identity_start, o.generator_lr_factor
        self.off_diag_mode = "mlp" if o.free_M else o.off_diag_mode
        compact_rank = o.compact_rank
        self.n_layers, self.compact_rank = n_layers, compact_rank
        if self.identity_start:
            check_identity_start(self)

        layers: list[nn.Module] = []
        width = d_model
        for hidden in hidden_dims:
            layers += [nn.Linear(width, hidden), nn.GELU(), nn.Dropout(dropout)]
            width = hidden
        self.hidden = nn.Sequential(*layers)
        self.out = nn.Linear(width, 2 * d_model * compact_rank if compact_rank else d_model * d_model)

        H = n_heads
        self.off_diag_alpha_init = o.off_diag_alpha_init
        if self.off_diag_mode == "linear_comb":
            self.alpha = nn.Parameter(torch.empty(H, H, H))
        elif self.off_diag_mode == "bayesian":
            self.alpha_mu = nn.Parameter(torch.empty(H, H, H))
            self.alpha_logvar = nn.Parameter(torch.empty(H, H, H))
        elif self.off_diag_mode == "separate_B":
            self.B = nn.Parameter(torch.empty(H, self.head_dim, d_model))

        self.use_layer_bias = o.use_layer_bias
        if o.use_layer_bias:
            self.bias_U = nn.Parameter(torch.empty(d_model, o.layer_bias_rank))
            self.bias_V = nn.Parameter(torch.empty(d_model, o.layer_bias_rank))
            self.bias_scale = nn.Parameter(torch.empty(n_layers, o.layer_bias_rank))
        self._reset_own_parameters()

        self.last_context: Tensor | None = None  # no buffer: DDP would broadcast it between batches of unequal size
        self._fused: tuple[tuple[object, ...], list[tuple[Tensor, int]], tuple[Tensor, Tensor]] | None = None
        self._workspace = Workspace()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Draw all parameters anew, as the constructor does; timm calls it by this name after its own rules."""
        for layer in [*self.hidden, self.out]:
            if isinstance(layer, nn.Linear):
                layer.reset_parameters()
        self._reset_own_parameters()

    reset_parameters = init_weights

    @torch.no_grad()
    def _reset_own_parameters(self) -> None:
        if self.off_diag_mode == "linear_comb":
            self.alpha.normal_(std=self.off_diag_alpha_init)
        elif self.off_diag_mode == "bayesian":
            self.alpha_mu.normal_(std=self.off_diag_alpha_init)
            self.alpha_logvar.fill_(-4.0)
        elif self.off_diag_mode == "separate_B":
            self.B.normal_(std=0.01)
        if self.use_layer_bias:
            for factor in (self.bias_U, self.bias_V):
                wide = (
                    factor.double() if factor.dtype == torch.float64 else factor.float()
                )  # QR knows no narrower types
                factor.copy_(nn.init.orthogonal_(torch.empty_like(wide), gain=0.1))
            for i, scale in enumerate(self.bias_scale):
                scale.normal_(std=0.1 * (1 + 0.2 * i))
        if self.identity_start:
            start_at_identity(self)

    def lr_factors(self) -> dict[str, float]:
        """All parameters learn at ``generator_lr_factor`` of the learning rate; see ``Attention.lr_factors``."""
        return {} if self.generator_lr_factor == 1 else {"": self.generator_lr_factor}

    # ------------------------------------------------------------------ the full matrix

    def forward(self, context: Tensor, layer_idx: int = 0) -> Tensor:
        """The finished metric M: context (..., D) -> (..., D, D), biases and both scales included."""
        H, dh, D = self.n_heads, self.head_dim, self.d_model
        raw = self.out(self.hidden(context))
        lead = raw.shape[:-1]
        if self.compact_rank:
            U, V = self._low_rank_factors(raw)
            full = U @ V.transpose(-1, -2) / math.sqrt(self.compact_rank)
        else:
            full = raw.view(*lead, D, D)
        blocks = full.view(*lead, H, dh, H, dh)
        if self.off_diag_mode != "mlp":
            diagonal = blocks.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)  # (..., H, dh, dh)
            if self.off_diag_mode == "separate_B":
                others = self.B.view(H, dh, H, dh).expand_as(blocks)
            else:
                others = torch.einsum("ijk,...kab->...iajb", self._alpha(), diagonal)
            keep = torch.eye(H, dtype=torch.bool, device=full.device).view(H, 1, H, 1)
            blocks = torch.where(keep, diagonal.unsqueeze(-2), others)
        if self.use_layer_bias:
            blocks = blocks + self._layer_bias(layer_idx).view(H, dh, H, dh)
        return (blocks * self._block_scales().view(H, 1, H, 1)).reshape(*lead, D, D)

    def _low_rank_factors(self, raw: Tensor) -> tuple[Tensor, Tensor]:
        U, V = raw.view(*raw.shape[:-1], 2, self.d_model, self.compact_rank).unbind(-3)
        return U, V

    def _layer_bias(self, layer_idx: int) -> Tensor:
        if not 0 <= layer_idx < self.n_layers:
            raise ZooError(
                f"layer_idx: got {layer_idx}; the generator has biases for {self.n_layers} layers, so it must lie in "
                f"0..{self.n_layers - 1}"
            )
        return (self.bias_U * self.bias_scale[layer_idx]) @ self.bias_V.T  # (D, D)

    def _block_scales(self) -> Tensor:
        return self.off_diag_scale + (self.diag_scale - self.off_diag_scale) * self._eye()

    def _eye(self) -> Tensor:
        return torch.eye(self.n_heads, dtype=self.out.weight.dtype, device=self.out.weight.device)

    def _alpha(self) -> Tensor:
        if self.off_diag_mode == "linear_comb":
            return self.alpha
        if not self.training:
            return self.alpha_mu
        return self.alpha_mu + torch.exp(self.alpha_logvar / 2) * torch.randn_like(self.alpha_mu)

    # ------------------------------------------------------------------ block-row sums

    def head_metrics(
        self,
        x: Tensor,
        causal: bool = False,
        padding_mask: Tensor | None = None,
        layer_idx: int | None = 0,
        state: PrefixState | None = None,
    ) -> Tensor:
        """The metric of every head, generated from the mean of the input.

        Args:
            x: input (B, T, D).
            causal: query t's metric comes from the mean of x[:, :t+1] instead of the whole sequence.
            padding_mask: (B, T), True or non-zero at real tokens; the others don't count.
            layer_idx: which layer's bias to add (``use_layer_bias``); None adds none.
            state: where a causal prefix goes on from and is kept (generation with a cache).

        Returns:
            m (B, H, dh, dh), or (B, T, H, dh, dh) if causal.
        """
        check_input(x, self.d_model, padding_mask)
        if causal:
            contexts, blocks = self._block_contexts(x, padding_mask, state)
            m = blocks.spread(self._row_sums(contexts))
        else:
            context = mean_context(x, padding_mask)
            self._remember(context)
            m = self._row_sums(context)
        return m if layer_idx is None else self.add_layer_bias(m, layer_idx)

    def causal_metrics(
        self, x: Tensor, padding_mask: Tensor | None = None, state: PrefixState | None = None, readers: int = 1
    ) -> BlockMetrics:
        """The same causal metrics, without layer bias, for ``readers`` layers to read: the fast road.

        Arguments are those of ``head_metrics``.
        """
        check_input(x, self.d_model, padding_mask)
        contexts, blocks = self._block_contexts(x, padding_mask, state)
        hidden = self.hidden(contexts)  # (B, n, K)
        if self.compact_rank:
            U, V = self._summed_factors(hidden)
            return BlockMetrics(blocks, lambda tokens: (tokens @ U) @ V.transpose(-1, -2))
        weight, bias = self._fused_out()
        # A compiler plans memory itself; for a few tokens, as in generation, chunks would cost more than they save.
        if torch.compiler.is_compiling() or (not torch.is_grad_enabled() and self._are_few(contexts)):
            m = F.linear(hidden, weight, bias).view(*hidden.shape[:-1], self.n_heads, self.head_dim, self.head_dim)
            return BlockMetrics(blocks, lambda tokens: tokens @ m)
        shared = SharedMetrics(hidden, weight, bias, readers, self.chunk_size, self._workspace)
        return BlockMetrics(blocks, shared.read)

    def _are_few(self, contexts: Tensor) -> bool:
        return len(contexts) * contexts.shape[1] <= min(_FEW, self.chunk_size or _FEW)

    def _block_contexts(
        self, x: Tensor, padding_mask: Tensor | None, state: PrefixState | None
    ) -> tuple[Tensor, TokenBlocks]:
        contexts, blocks = block_contexts(x, self.context_stride, padding_mask, state)
        self._remember(blocks.last(contexts))
        return contexts, blocks

    def _remember(self, context: Tensor) -> None:
        """Keep each row's last context (B, D), for pictures."""
        if not torch.compiler.is_exporting():  # an exported graph can't write to its module
            self.last_context = context.detach()

    def layer_bias_metrics(self, layer_idx: int) -> Tensor | None:
        """Block-row sums (H, dh, dh) of layer ``layer_idx``'s bias; None without ``use_layer_bias``."""
        return self._row_sum_of(self._layer_bias(layer_idx)) if self.use_layer_bias else None

    def add_layer_bias(self, m: Tensor, layer_idx: int) -> Tensor:
        """Metrics (..., H, dh, dh) plus the block-row sums of layer ``layer_idx``'s bias, if there is one."""
        bias = self.layer_bias_metrics(layer_idx)
        return m if bias is None else m + bias

    def _row_sums(self, context: Tensor) -> Tensor:
        """Context (..., D) -> m (..., H, dh, dh), without the layer bias."""
        H, dh = self.n_heads, self.head_dim
        hidden = self.hidden(context)
        if self.compact_rank:
            U, V = self._summed_factors(hidden)
            return U @ V.transpose(-1, -2)
        weight, bias = self._fused_out()
        return F.linear(hidden, weight, bias).view(*hidden.shape[:-1], H, dh, dh)

    def _summed_factors(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Low-rank factors of the block-row sums m = U V^T, each (..., H, dh, r)."""
        raw = self.out(hidden)
        lead = (*raw.shape[:-1], self.n_heads, self.head_dim)
        U, V = (factor.view(*lead, self.compact_rank) for factor in self._low_rank_factors(raw))
        summed = self.off_diag_scale * V.sum(-3, keepdim=True) + (self.diag_scale - self.off_diag_scale) * V
        return U, summed / math.sqrt(self.compact_rank)

    def _row_sum_of(self, full: Tensor) -> Tensor:
        """(D, D, *) -> (H, dh, dh, *): block rows summed with their scales."""
        H, dh = self.n_heads, self.head_dim
        blocks = full.reshape(H, dh, H, dh, *full.shape[2:])
        if self.diag_scale == self.off_diag_scale == 1:
            return blocks.sum(dim=2)
        return torch.einsum("ij,iajb...->iab...", self._block_scales().to(full.dtype), blocks)

    def _fuse(self) -> tuple[Tensor, Tensor]:
        """Weight (H dh dh, K) and bias (H dh dh) of the last map with the sum over block columns taken first."""
        H, dh, D = self.n_heads, self.head_dim, self.d_model
        weight, bias = self.out.weight.view(D, D, -1), self.out.bias.view(D, D)
        if self.off_diag_mode == "mlp":
            fused_weight, fused_bias = self._row_sum_of(weight), self._row_sum_of(bias)
        else:
            weight = weight.view(H, dh, H, dh, -1).diagonal(dim1=0, dim2=2).movedim(-1, 0)  # (H, dh, dh, K)
            bias = bias.view(H, dh, H, dh).diagonal(dim1=0, dim2=2).movedim(-1, 0)
            if self.off_diag_mode == "separate_B":
                off_diagonal = self.off_diag_scale * (1 - self._eye())
                others = torch.einsum("ij,iajb->iab", off_diagonal, self.B.view(H, dh, H, dh))
                fused_weight, fused_bias = self.diag_scale * weight, self.diag_scale * bias + others
            else:
                # m_i = sum_k beta[i, k] * (diagonal block k)
                eye = self._eye()
                beta = self.diag_scale * eye + self.off_diag_scale * torch.einsum("ij,ijk->ik", 1 - eye, self._alpha())
                fused_weight = torch.einsum("ik,kabn->iabn", beta, weight)
                fused_bias = torch.einsum("ik,kab->iab", beta, bias)
        return fused_weight.reshape(H * dh * dh, -1), fused_bias.reshape(-1)

    def _fused_out(self) -> tuple[Tensor, Tensor]:
        """``_fuse()``, kept while gradients are off and nothing that it is made of has changed.

        That is the settings that ``_fuse`` reads, and its sources. Their detached views are kept beside the result:
        they share storage and version counter with the parameters, so neither an in-place update, nor a swapped
        ``.data``, nor memory used again goes unnoticed.
        """
        device = self.out.weight.device.type
        if not has_autocast(device):  # such as meta
            return self._kept_or_fused()
        with torch.autocast(device, enabled=False):  # the sum is kept for calls without it too
            return self._kept_or_fused()

    def _kept_or_fused(self) -> tuple[Tensor, Tensor]:
        sampled = self.off_diag_mode == "bayesian" and self.training
        if torch.is_grad_enabled() or sampled or torch.compiler.is_compiling():
            self._fused = None
            return self._fuse()
        sources = self._fuse_sources()
        if any(source.is_inference() for source in sources):  # these have no version counter
            return self._fuse()
        settings = self._fuse_settings()
        if self._fused is not None:
            made_with, seen, fused = self._fused
            if (
                made_with == settings
                and len(seen) == len(sources)
                and all(
                    old.data_ptr() == new.data_ptr()
                    and old.shape == new.shape
                    and old.stride() == new.stride()
                    and old.dtype == new.dtype
                    and old.device == new.device
                    and version == new._version
                    for (old, version), new in zip(seen, sources, strict=True)
                )
            ):
                return fused
        fused = self._fuse()
        self._fused = settings, [(source.detach(), source._version) for source in sources], fused
        return fused

    def _fuse_settings(self) -> tuple[object, ...]:
        """Whatever ``_fuse`` reads that is no tensor; a scale that is NaN equals none, so nothing is kept for it."""
        scales = float(self.diag_scale), float(self.off_diag_scale)
        return _optimizer_steps, self.off_diag_mode, scales, self.n_heads, self.head_dim

    def _fuse_sources(self) -> list[Tensor]:
        extra = {"linear_comb": "alpha", "bayesian": "alpha_mu", "separate_B": "B"}.get(self.off_diag_mode)
        return [self.out.weight, self.out.bias] + ([cast(Tensor, getattr(self, extra))] if extra else [])

    def train(self, mode: bool = True) -> "StructuredMLPForM":
        self._fused = None  # writes through .data leave no trace; a change of mode is where such swaps happen
        self._workspace.clear()
        return super().train(mode)

    def _apply(self, fn: Any, recurse: bool = True) -> "StructuredMLPForM":
        self._fused = None
        self._workspace.clear()
        moved: StructuredMLPForM = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return moved

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_fused": None, "_workspace": Workspace()}

    # ------------------------------------------------------------------ for a stack whose layers share it

    def share(self, x: Tensor, masks: Masks, cache: PrefixState | None, readers: int) -> "Tensor | BlockMetrics":
        """Metrics of a stack's input, without layer biases, for so many layers to read; for none, as a tensor."""
        if masks.causal and readers:
            return self.causal_metrics(x, masks.padding, cache, readers)
        return self.head_metrics(x, masks.causal, masks.padding, layer_idx=None, state=cache)

    def new_cache(self) -> PrefixState:
        """What a causal context goes on from."""
        return PrefixState()

    # ------------------------------------------------------------------ looking in, and the loss of bayesian

    @torch.no_grad()
    def mean_metric(self, layer_idx: int = 0) -> Tensor:
        """M (D, D) averaged over the contexts of the last batch; a causal batch gives each row's last prefix.

        Raises:
            ZooError: before the first forward pass.
        """
        if self.last_context is None:
            raise ZooError("get_M_matrices: no context seen yet; run a forward pass first")
        was_training = self.training
        self.eval()
        try:
            return self(self.last_context.to(self.out.weight), layer_idx).mean(dim=0)
        finally:
            self.train(was_training)

    @torch.no_grad()
    def off_diagonal_coefficients(self) -> dict[str, Tensor]:
        """``alpha`` (H, H, H), NaN for the diagonal blocks i = j, and of ``bayesian`` ``alpha_std``; else nothing."""
        found: dict[str, Tensor] = {}
        if self.off_diag_mode == "linear_comb":
            found["alpha"] = self.alpha
        elif self.off_diag_mode == "bayesian":
            found |= {"alpha": self.alpha_mu, "alpha_std": torch.exp(self.alpha_logvar / 2)}
        own = self._eye().bool().unsqueeze(-1)
        return {name: values.masked_fill(own, float("nan")) for name, values in found.items()}

    def get_kl_divergence(self) -> Tensor:
        r"""KL of the coefficients from N(0, 1): the sum over i != j and k of (exp(logvar) + mu^2 - 1 - logvar) / 2.

        Zero for every mode but ``bayesian``.
        """
        if self.off_diag_mode != "bayesian":
            return self.out.weight.new_zeros(())
        mu, logvar = self.alpha_mu, self.alpha_logvar
        kl = (logvar.exp() + mu.square() - 1 - logvar) / 2
        return (kl * (1 - self._eye()).unsqueeze(-1)).sum()
