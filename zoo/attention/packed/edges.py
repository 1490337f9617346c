"""The arithmetic of packed attention: dot products, softmax and weighted sums over the edges of a graph.

Two ways to the same numbers. ``IndexedEdges`` works through index operations, which any device and compiler has.
``CompressedEdges`` is for the CPU, where PyTorch has kernels for sparse rows that gather, multiply and sum in one go.

The gradients of a dot product over edges are mixes over edges, and the other way round. So each of the two functions is
the other's backward pass, any number of times; and what is kept for it are nodes and weights, never a gather.
"""

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor

# PyTorch says so once a process, at its first sparse matrix; who uses this layer can't do anything about it.
warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")

# Above this share of all pairs the fused kernel for dense attention is faster, below so many pairs neither matters.
_DENSE, _DENSE_FROM = 0.05, 1 << 16

# How many pairs a mask for that kernel holds, 16 MiB in float32. One that holds all pairs is kept for the next call;
# where there are more, queries are taken in blocks, whose masks are made for each call and gone after it.
MASK_PAIRS = 1 << 22

_TOGETHER = 1 << 20  # edges times samples and heads that one call on a CPU takes: 16 MiB of indices


class Edges(Protocol):
    """Edges, and what attention does along them.

    Nodes come and go as (B, n, H, dh). Scores and weights have a layout of the implementation's own.
    """

    def are(self, source: Tensor, target: Tensor) -> bool:
        """Whether these edges are those, in the order given."""

    def dot(self, q: Tensor, k: Tensor, scale: float) -> Tensor:
        """``scale q[target] . k[source]`` for every edge."""

    def hide(self, scores: Tensor, hidden: Tensor) -> Tensor:
        """Scores with -inf where the source is hidden (B, n)."""

    def softmax(self, scores: Tensor) -> Tensor:
        """Softmax over the edges of each target; where all scores are -inf it is zero."""

    def mix(self, weights: Tensor, v: Tensor) -> Tensor:
        """For every target the sum of ``weights[e] v[source[e]]`` over its edges e."""

    def as_given(self, weights: Tensor, heads: int) -> Tensor:
        """Weights in the order in which the edges were given: (B, nnz, H)."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor | None:
        """All three steps at once where that is faster, or None."""


# ---------------------------------------------------------------------- by index


@dataclass(frozen=True)
class IndexedEdges:
    """Edges by ascending target, or as given while a graph is compiled; sums over them are index operations."""

    source: Tensor
    target: Tensor
    order: Tensor
    n_targets: int
    chunk: int | None

    @classmethod
    def sort(cls, source: Tensor, target: Tensor, n_targets: int, chunk: int | None) -> "IndexedEdges":
        """By target: sums over a query's edges then write to one place after the other."""
        by_target, order = target.sort(stable=True)
        return cls(source[order], by_target, order, n_targets, chunk)

    def are(self, source: Tensor, target: Tensor) -> bool:
        return _same(self.source, self.target, self.order, source, target)

    def dot(self, q: Tensor, k: Tensor, scale: float) -> Tensor:
        q, k = (q * scale).transpose(0, 1).contiguous(), k.transpose(0, 1).contiguous()
        return _indexed_dot(q, k, self.target, self.source, self.chunk)  # (nnz, B, H)

    def hide(self, scores: Tensor, hidden: Tensor) -> Tensor:
        return scores.masked_fill(hidden.t().index_select(0, self.source).unsqueeze(-1), -math.inf)

    def softmax(self, scores: Tensor) -> Tensor:
        return cast(Tensor, _IndexedSoftmax.apply(scores, self.target, self.n_targets))

    def mix(self, weights: Tensor, v: Tensor) -> Tensor:
        v = v.transpose(0, 1).contiguous()  # what an edge gathers is one contiguous row
        mixed = _indexed_mix(weights, v, self.source, self.target, self.n_targets, self.chunk)
        return mixed.transpose(0, 1)

    def as_given(self, weights: Tensor, heads: int) -> Tensor:
        return torch.empty_like(weights).index_copy(0, self.order, weights).transpose(0, 1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor | None:
        return None


def _same(own_source: Tensor, own_target: Tensor, order: Tensor, source: Tensor, target: Tensor) -> bool:
    return (
        source.device == order.device
        and source.shape == target.shape == order.shape
        and torch.equal(source[order], own_source)
        and torch.equal(target[order], own_target)
    )


def _parts(n: int, size: int | None) -> Iterator[slice]:
    size = n if size is None else size
    return (slice(start, start + size) for start in range(0, n, size))


class _IndexedDot(torch.autograd.Function):
    @staticmethod
    def forward(a: Tensor, b: Tensor, at: Tensor, bt: Tensor, chunk: int | None) -> Tensor:
        out = a.new_empty(len(at), *a.shape[1:-1])  # (nnz, B, H)
        for part in _parts(len(at), chunk):
            product = a.index_select(0, at[part]).mul_(b.index_select(0, bt[part]))  # (part, B, H, dh)
            torch.sum(product, dim=-1, out=out[part])
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.chunk = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, b, at, bt = ctx.saved_tensors
        grad_a = _indexed_mix(grad, b, bt, at, len(a), ctx.chunk) if ctx.needs_input_grad[0] else None
        grad_b = _indexed_mix(grad, a, at, bt, len(b), ctx.chunk) if ctx.needs_input_grad[1] else None
        return grad_a, grad_b, None, None, None


class _IndexedMix(torch.autograd.Function):
    @staticmethod
    def forward(w: Tensor, v: Tensor, source: Tensor, target: Tensor, n_targets: int, chunk: int | None) -> Tensor:
        out = v.new_zeros(n_targets, *v.shape[1:])  # (n, B, H, dh)
        for part in _parts(len(source), chunk):
            out.index_add_(0, target[part], v.index_select(0, source[part]).mul_(w[part].unsqueeze(-1)))
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.n_targets, ctx.chunk = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        w, v, source, target = ctx.saved_tensors
        grad_w = _indexed_dot(grad, v, target, source, ctx.chunk) if ctx.needs_input_grad[0] else None
        grad_v = _indexed_mix(w, grad, target, source, len(v), ctx.chunk) if ctx.needs_input_grad[1] else None
        return grad_w, grad_v, None, None, None, None


class _IndexedSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(scores: Tensor, target: Tensor, n_targets: int) -> Tensor:
        rows = (n_targets, *scores.shape[1:])  # (L, B, H)
        places = target.view(-1, 1, 1).expand_as(scores)
        # Hidden scores are -inf by now, so the largest is the largest visible one and no exponent is above zero.
        top = scores.new_full(rows, -math.inf).scatter_reduce_(0, places, scores, "amax")
        top.masked_fill_(top == -math.inf, 0)
        w = (scores - top.index_select(0, target)).exp_()
        total = scores.new_zeros(rows).index_add_(0, target, w)
        total.masked_fill_(total == 0, 1)  # a query that sees no key
        return w.div_(total.index_select(0, target))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, target, ctx.n_targets = inputs
        ctx.save_for_backward(output, target)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        w, target = ctx.saved_tensors
        product = w * grad
        total = product.new_zeros(ctx.n_targets, *product.shape[1:]).index_add(0, target, product)
        return product - w * total.index_select(0, target), None, None


def _indexed_dot(a: Tensor, b: Tensor, at: Tensor, bt: Tensor, chunk: int | None) -> Tensor:
    """Dot products over the last axis, ``a[at[e]] . b[bt[e]]`` for every edge e: (nnz, B, H)."""
    return cast(Tensor, _IndexedDot.apply(a, b, at, bt, chunk))


def _indexed_mix(w: Tensor, v: Tensor, source: Tensor, target: Tensor, n_targets: int, chunk: int | None) -> Tensor:
    """For every target the sum of ``w[e] v[source[e]]`` over its edges e: (n_targets, B, H, dh)."""
    return cast(Tensor, _IndexedMix.apply(w, v, source, target, n_targets, chunk))


# ---------------------------------------------------------------------- by rows of a sparse matrix


@dataclass(frozen=True)
class _Rows:
    """Several copies of a graph side by side, as one matrix in compressed rows, seen from one of the edges' ends.

    Copy c has its nodes at c n and on. ``others`` are the columns, ``ends`` where each row's entries begin and end.
    """

    others: Tensor
    ends: Tensor


class CompressedEdges:
    """Edges by ascending target, as rows of a sparse matrix that all samples and heads share.

    Nodes are laid out (B H, n, dh), scores and weights (B H, nnz). One call takes as many samples and heads as have
    ``_TOGETHER`` edges in all, so that small graphs don't pay for calls and large ones not for indices. PyTorch's
    kernels gather, multiply and sum in one go, so nothing as large as edges times width is ever made.
    """

    def __init__(self, source: Tensor, target: Tensor, n_sources: int, n_targets: int, together: int | None) -> None:
        self.n_sources, self.n_targets, self._together = n_sources, n_targets, together
        self.target, self.order = target.sort(stable=True)
        self.source = source[self.order]
        self.alone = torch.bincount(target, minlength=n_targets).eq(0)  # targets that see no source
        self._by_source, self._to_source = self.source.sort(stable=True)
        limit = _TOGETHER if together is None else min(_TOGETHER, together)
        self._copies = max(1, limit // len(source))
        self._cache: dict[tuple[int, bool], _Rows] = {}
        self._mask: Tensor | None = None

    def are(self, source: Tensor, target: Tensor) -> bool:
        return _same(self.source, self.target, self.order, source, target)

    def dot(self, q: Tensor, k: Tensor, scale: float) -> Tensor:
        return _compressed_dot(_by_head(q), _by_head(k), self, scale)

    def hide(self, scores: Tensor, hidden: Tensor) -> Tensor:
        B, nnz = len(hidden), len(self.source)
        there = hidden.index_select(1, self.source).unsqueeze(1)  # (B, 1, nnz)
        return scores.view(B, len(scores) // max(B, 1), nnz).masked_fill(there, -math.inf).view_as(scores)

    def softmax(self, scores: Tensor) -> Tensor:
        return cast(Tensor, _CompressedSoftmax.apply(scores, self))

    def mix(self, weights: Tensor, v: Tensor) -> Tensor:
        B, _, H, dh = v.shape
        return _compressed_mix(weights, _by_head(v), self, False).view(B, H, self.n_targets, dh).transpose(1, 2)

    def as_given(self, weights: Tensor, heads: int) -> Tensor:
        given = torch.empty_like(weights).index_copy(1, self.order, weights)
        return given.view(len(given) // heads, heads, len(self.order)).transpose(1, 2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor | None:
        pairs = self.n_sources * self.n_targets
        if pairs < _DENSE_FROM or len(self.source) <= _DENSE * pairs or not q.numel() or not _finite(q, k, v):
            return None
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return cast(Tensor, _DenseAttention.apply(q, k, v, self, scale)[0]).transpose(1, 2)

    def masks(self, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
        """Blocks of targets, and for each a mask (rows, S): zero where a target sees a source and -inf elsewhere.

        The next block's mask is written over the last one's.
        """
        limit = MASK_PAIRS if self._together is None else min(MASK_PAIRS, self._together)
        step = max(1, limit // self.n_sources)
        if step >= self.n_targets:
            if self._mask is None or self._mask.dtype != dtype:
                with torch.inference_mode(False):  # training goes on with what a validation step made
                    mask = torch.empty(self.n_targets, self.n_sources, dtype=dtype)
                    self._mask = self._fill(mask, slice(0, self.n_targets))
            yield slice(0, self.n_targets), self._mask
            return
        memory = torch.empty(step, self.n_sources, dtype=dtype)
        for start in range(0, self.n_targets, step):
            rows = slice(start, min(start + step, self.n_targets))
            yield rows, self._fill(memory[: rows.stop - start], rows)

    def _fill(self, mask: Tensor, rows: slice) -> Tensor:
        first, last = torch.searchsorted(self.target, torch.tensor([rows.start, rows.stop])).tolist()
        mask.fill_(-math.inf)
        mask[self.target[first:last] - rows.start, self.source[first:last]] = 0
        mask[self.alone[rows]] = 0  # a row of -inf has no softmax
        return mask

    def blocks(self, rows: int) -> Iterator[slice]:
        """Samples and heads that one call takes."""
        return (slice(start, min(start + self._copies, rows)) for start in range(0, rows, self._copies))

    def rows(self, copies: int, back: bool) -> _Rows:
        """So many copies by target; ``back``: by source."""
        key = copies, back
        if key not in self._cache:
            if len(self._cache) > 8:  # two sides, full blocks and a last one, training and validation
                self._cache.clear()
            with torch.inference_mode(False):  # the first use may be a validation step, and training goes on with it
                self._cache[key] = self._make_rows(copies, back)
        return self._cache[key]

    def _make_rows(self, copies: int, back: bool) -> _Rows:
        n, n_others = (self.n_sources, self.n_targets) if back else (self.n_targets, self.n_sources)
        own, others = (self._by_source, self.target[self._to_source]) if back else (self.target, self.source)
        copy = torch.arange(copies).unsqueeze(1)
        columns = (others + copy * n_others).flatten()
        counts = torch.bincount(own, minlength=n).repeat(copies)
        ends = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        return _Rows(columns, ends)

    def pattern(self, copies: int, dtype: torch.dtype) -> Tensor:
        """So many copies by target, as a sparse matrix of zeros."""
        rows = self.rows(copies, False)
        zeros = torch.zeros(1, dtype=dtype).expand(len(rows.others))
        shape = (copies * self.n_targets, copies * self.n_sources)
        return torch.sparse_csr_tensor(rows.ends, rows.others, zeros, shape, check_invariants=False)

    def by_source(self, weights: Tensor) -> Tensor:
        """Weights (..., nnz) in the order of the sources."""
        return weights.index_select(-1, self._to_source)


def _by_head(x: Tensor) -> Tensor:
    """(B, n, H, dh) to (B H, n, dh)."""
    return x.transpose(1, 2).reshape(x.shape[0] * x.shape[2], x.shape[1], x.shape[3])


class _CompressedDot(torch.autograd.Function):
    @staticmethod
    def forward(a: Tensor, b: Tensor, edges: CompressedEdges, scale: float) -> Tensor:
        parts = []
        for block in edges.blocks(len(a)):
            left, right = a[block].flatten(0, 1), b[block].flatten(0, 1)
            pattern = edges.pattern(block.stop - block.start, a.dtype)
            parts.append(torch.sparse.sampled_addmm(pattern, left, right.T, beta=0.0, alpha=scale).values())
        return _joined(parts, a).view(len(a), len(edges.source))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        a, b, ctx.edges, ctx.scale = inputs
        ctx.save_for_backward(a, b)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        grad = grad * ctx.scale
        grad_a = _compressed_mix(grad, b, ctx.edges, False) if ctx.needs_input_grad[0] else None
        grad_b = _compressed_mix(grad, a, ctx.edges, True) if ctx.needs_input_grad[1] else None
        return grad_a, grad_b, None, None


class _CompressedMix(torch.autograd.Function):
    @staticmethod
    def forward(w: Tensor, v: Tensor, edges: CompressedEdges, back: bool) -> Tensor:
        n = edges.n_sources if back else edges.n_targets
        parts = []
        for block in edges.blocks(len(v)):
            rows = edges.rows(block.stop - block.start, back)
            weights = edges.by_source(w[block]) if back else w[block]
            part = F.embedding_bag(
                rows.others,
                v[block].flatten(0, 1),
                rows.ends,
                mode="sum",
                per_sample_weights=weights.flatten(),
                include_last_offset=True,
            )
            parts.append(part)
        return _joined(parts, v).view(len(v), n, v.shape[2])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        w, v, ctx.edges, ctx.back = inputs
        ctx.save_for_backward(w, v)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        w, v = ctx.saved_tensors
        at_target, at_source = (v, grad) if ctx.back else (grad, v)
        grad_w = _compressed_dot(at_target, at_source, ctx.edges, 1.0) if ctx.needs_input_grad[0] else None
        grad_v = _compressed_mix(w, grad, ctx.edges, not ctx.back) if ctx.needs_input_grad[1] else None
        return grad_w, grad_v, None, None


class _CompressedSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(scores: Tensor, edges: CompressedEdges) -> Tensor:
        # Hidden scores are -inf by now, so the largest is the largest visible one and no exponent is above zero.
        top = _reduced(scores, edges, "max")
        top.masked_fill_(top == -math.inf, 0)
        w = (scores - top.index_select(1, edges.target)).exp_()
        total = _reduced(w, edges, "sum")
        total.masked_fill_(total == 0, 1)  # a query that sees no key
        return w.div_(total.index_select(1, edges.target))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.edges = inputs[1]
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (w,) = ctx.saved_tensors
        product = w * grad
        total = cast(Tensor, _CompressedTotal.apply(product, ctx.edges))
        return product - w * total.index_select(1, ctx.edges.target), None


class _CompressedTotal(torch.autograd.Function):
    """Sum over the edges of each target: (B H, nnz) to (B H, n)."""

    @staticmethod
    def forward(x: Tensor, edges: CompressedEdges) -> Tensor:
        return _reduced(x, edges, "sum")

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.edges = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.index_select(1, ctx.edges.target), None


class _DenseAttention(torch.autograd.Function):
    """PyTorch's fused attention with the edges as its mask. A zero weight times NaN is NaN, and a second derivative of
    the kernel isn't known: gradients that aren't finite, or have to be differentiated, go along the edges."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, edges: CompressedEdges, scale: float) -> tuple[Tensor, ...]:
        outs, sums = [], []
        for rows, mask in edges.masks(q.dtype):
            out, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q[:, :, rows], k, v, attn_mask=mask, scale=scale
            )
            outs.append(out.transpose(1, 2))  # as they lie in memory
            sums.append(logsumexp.transpose(1, 2))
        out, logsumexp = (_joined(parts, q, dim=1).transpose(1, 2) for parts in (outs, sums))
        return out.masked_fill_(edges.alone.view(-1, 1), 0), logsumexp

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        q, k, v, ctx.edges, ctx.scale = inputs
        out, logsumexp = output
        ctx.mark_non_differentiable(logsumexp)
        ctx.save_for_backward(q, k, v, out, logsumexp)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, logsumexp = ctx.saved_tensors
        if not torch.is_grad_enabled() and _finite(grad):
            grad = grad.masked_fill(ctx.edges.alone.view(-1, 1), 0)
            d_q, d_k, d_v = [], None, None
            for rows, mask in ctx.edges.masks(q.dtype):
                d_q_part, d_k_part, d_v_part = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                    *(x[:, :, rows] for x in (grad, q)), k, v, *(x[:, :, rows] for x in (out, logsumexp)),
                    0.0, False, attn_mask=mask, scale=ctx.scale,
                )  # fmt: skip
                d_q.append(d_q_part.transpose(1, 2))
                d_k = d_k_part if d_k is None else d_k.add_(d_k_part)
                d_v = d_v_part if d_v is None else d_v.add_(d_v_part)
            return _joined(d_q, q, dim=1).transpose(1, 2), d_k, d_v, None, None
        keep = torch.is_grad_enabled()
        wanted = [x for x, needed in zip((q, k, v), ctx.needs_input_grad, strict=False) if needed]
        if not keep:
            q, k, v = (
                x.detach().requires_grad_(needed) for x, needed in zip((q, k, v), ctx.needs_input_grad, strict=False)
            )
            wanted = [x for x in (q, k, v) if x.requires_grad]
        with torch.enable_grad():
            edges, (a, b, c) = ctx.edges, (x.transpose(1, 2) for x in (q, k, v))
            y = edges.mix(edges.softmax(edges.dot(a, b, ctx.scale)), c).transpose(1, 2)
            given = iter(torch.autograd.grad(y, wanted, grad, create_graph=keep))
        return (*(next(given) if needed else None for needed in ctx.needs_input_grad[:3]), None, None)


def _finite(*tensors: Tensor) -> bool:
    """Whether all numbers are; a sum that overflows counts as not."""
    return all(bool(tensor.sum().isfinite()) for tensor in tensors)


def _reduced(x: Tensor, edges: CompressedEdges, how: str) -> Tensor:
    """Largest value or sum over the edges of each target; -inf or zero where there is none."""
    parts = []
    for block in edges.blocks(len(x)):
        ends = edges.rows(block.stop - block.start, False).ends
        parts.append(torch.segment_reduce(x[block].flatten(), how, offsets=ends, unsafe=True))
    return _joined(parts, x).view(len(x), edges.n_targets)


def _joined(parts: list[Tensor], like: Tensor, dim: int = 0) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts, dim) if parts else like.new_empty(0)


def _compressed_dot(a: Tensor, b: Tensor, edges: CompressedEdges, scale: float) -> Tensor:
    """``scale`` times ``a[target] . b[source]`` for every edge: (B H, nnz)."""
    return cast(Tensor, _CompressedDot.apply(a, b, edges, scale))


def _compressed_mix(w: Tensor, v: Tensor, edges: CompressedEdges, back: bool) -> Tensor:
    """For every target the sum of ``w[e] v[source[e]]``; ``back``: for every source that of ``w[e] v[target[e]]``."""
    return cast(Tensor, _CompressedMix.apply(w, v, edges, back))
