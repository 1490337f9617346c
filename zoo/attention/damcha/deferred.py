"""Metrics that layers read without a gradient as large as they are, and where asked for without being kept at all.

Plain autograd writes a gradient as large as all metrics, (blocks, H, dh, dh), for every layer that reads them, and adds
them up. That is memory traffic, not arithmetic. Here each layer's backward pass returns only its input's gradient and
leaves its (x, g) on a list; when all layers are through, the generator's backward pass forms, for a chunk of blocks,

    dm = sum over layers of x^T g

as one small batched product, and feeds it at once into the two products that need it. A chunk fits the caches.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from zoo.private.torch import backward_pass

_CHUNK = 1 << 19  # numbers of a metric chunk for each thread: 2 MiB in float32, the size of a core's second cache

# Up to this width of the generator's last hidden layer its product is done sooner, per number made, than the number is
# written and read back (2 K operations against 12 bytes); see benchmarks/NOTES.md.
_RECOMPUTE_UP_TO = 64


class Workspace:
    """The memory of a generator's metrics, kept from one training step to the next.

    A fresh allocation of that size is mapped page by page as it is written, which takes longer than the writing.
    """

    def __init__(self) -> None:
        self._free: Tensor | None = None

    def take(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """An uninitialised tensor, of the memory given back last if that is large enough and not larger than twice."""
        kept, self._free = self._free, None
        size = torch.Size(shape).numel()
        alike = kept is not None and kept.dtype == like.dtype and kept.device == like.device
        if kept is not None and alike and size <= kept.numel() <= 2 * size:
            return kept[:size].view(shape)
        return like.new_empty(size).view(shape)

    def give(self, tensor: Tensor) -> None:
        """Take memory back; of two, the last one stays."""
        # Other devices' memory PyTorch keeps itself, and inference tensors can't be written to outside.
        if tensor.device.type == "cpu" and not tensor.is_inference():
            self._free = tensor.view(-1)

    def clear(self) -> None:
        self._free = None


class _Ledger:
    """What the layers that read some metrics share: the metrics, if they are kept, and what backward passes leave."""

    def __init__(self, workspace: Workspace, chunk: int | None) -> None:
        self.metrics: Tensor | None = None
        self.chunk = chunk
        # (x, g) of every layer whose backward pass has run, by backward pass: a second one must not see the first's.
        self.readings: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self._workspace = workspace

    def __del__(self) -> None:
        if self.metrics is not None:  # the graph is gone, and nothing else has seen this tensor
            self._workspace.give(self.metrics)


class SharedMetrics:
    """Metrics m (..., H, dh, dh) from hidden states (..., K), weight (H dh dh, K) and bias (H dh dh).

    ``read(x)`` is ``x m`` per head, with x (..., H, s, dh) for the s queries of a block; gradients flow to x and to the
    three sources.

    Args:
        hidden, weight, bias: as above.
        readers: how many layers will read; a single one may be better off making each chunk again.
        chunk_size: how many metrics exist at once, forward and backward; None leaves that to what is faster.
        workspace: where the memory for the metrics comes from.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor,
        readers: int,
        chunk_size: int | None,
        workspace: Workspace,
    ) -> None:
        kind = hidden.device.type
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            hidden, weight, bias = hidden.to(dtype), weight.to(dtype), bias.to(dtype)
        keeps = chunk_size is None and (readers > 1 or weight.shape[1] > _RECOMPUTE_UP_TO or kind != "cpu")
        self._ledger = _Ledger(workspace, chunk_size)
        # Layers hang on this empty tensor, so that the generator's backward pass comes after all of theirs.
        self._anchor: Tensor = _Generate.apply(hidden, weight, bias, self._ledger)
        self._sources = (hidden.detach(), weight.detach(), bias.detach())
        if keeps:
            self._ledger.metrics = m = workspace.take((hidden.shape[:-1].numel(), weight.shape[0]), weight)
            with torch.no_grad():
                torch.addmm(
                    self._sources[2], self._sources[0].reshape(len(m), weight.shape[1]), self._sources[1].T, out=m
                )

    def read(self, x: Tensor) -> Tensor:
        return _Read.apply(x.to(self._sources[1].dtype), self._anchor, self._ledger, *self._sources)


def _parts_of(n: int, size: int, limit: int | None, device: str) -> Iterator[slice]:
    """Cut n metrics of ``size`` numbers into chunks that fit the caches, and of no more than ``limit`` metrics."""
    step = max(1, _CHUNK * torch.get_num_threads() // size) if device == "cpu" else n
    step = max(1, min(step, n if limit is None else limit))
    return (slice(start, min(start + step, n)) for start in range(0, n, step))


class _Chunks:
    """The metrics of a ledger in parts (c H, dh, dh), from memory where they are kept and made again where not."""

    def __init__(self, ledger: _Ledger, hidden: Tensor, weight: Tensor, bias: Tensor) -> None:
        self._kept, self._weight, self._bias = ledger.metrics, weight, bias
        self._hidden = hidden.reshape(-1, hidden.shape[-1])  # (n, K)
        n = len(self._hidden)
        if self._kept is not None:
            self.parts = [slice(0, n)]
        else:
            self.parts = list(_parts_of(n, weight.shape[0], ledger.chunk, weight.device.type))
            longest = max((part.stop - part.start for part in self.parts), default=0)
            self._buffer = weight.new_empty(longest, weight.shape[0])

    def __getitem__(self, part: slice) -> Tensor:
        """Metrics (c, H dh dh)."""
        if self._kept is not None:
            return self._kept
        out = self._buffer[: part.stop - part.start]
        return torch.addmm(self._bias, self._hidden[part], self._weight.T, out=out)


class _Generate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor, ledger: _Ledger) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.set_materialize_grads(False)
        ctx.ledger = ledger
        return hidden.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: None) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        hidden, weight = ctx.saved_tensors
        readings = ctx.ledger.readings.pop(backward_pass(), [])
        if not readings:
            return None, None, None, None
        K, size = hidden.shape[-1], weight.shape[0]
        flat = hidden.reshape(-1, K)  # (n, K), n blocks
        n, (H, s, dh) = len(flat), readings[0][0].shape[-3:]
        rows = torch.cat([flat, flat.new_ones(n, 1)], dim=1)  # the last row of a product with it is the sum, for bias
        xs, gs = ([tensor.reshape(n, H, s, dh) for tensor in tensors] for tensors in zip(*readings, strict=True))
        d_hidden = torch.empty_like(flat)
        wide = torch.promote_types(weight.dtype, torch.float32)
        d_weight = torch.zeros(K + 1, size, dtype=wide, device=weight.device)
        parts = list(_parts_of(n, size, ctx.ledger.chunk, weight.device.type))
        longest = max((part.stop - part.start for part in parts), default=0)
        dm_buffer = weight.new_empty(longest * H, dh, dh)
        x_buffer, g_buffer = (weight.new_empty(longest, H, len(readings) * s, dh) for _ in range(2))
        for part in parts:
            c = part.stop - part.start
            x = torch.cat([tensor[part] for tensor in xs], dim=-2, out=x_buffer[:c]).view(c * H, -1, dh)
            g = torch.cat([tensor[part] for tensor in gs], dim=-2, out=g_buffer[:c]).view(c * H, -1, dh)
            dm = torch.bmm(x.transpose(1, 2), g, out=dm_buffer[: c * H]).view(c, size)
            torch.mm(dm, weight, out=d_hidden[part])
            if wide == weight.dtype:
                d_weight.addmm_(rows[part].T, dm)
            else:
                d_weight += rows[part].T @ dm
        d_weight = d_weight.to(weight.dtype)
        return d_hidden.view_as(hidden), d_weight[:K].T, d_weight[K], None


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, ledger: _Ledger, *sources: Tensor) -> Tensor:
        ctx.save_for_backward(x, *sources)
        ctx.ledger = ledger
        return _through(x, _Chunks(ledger, *sources), transposed=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, *sources = ctx.saved_tensors
        g = g.contiguous()
        if ctx.needs_input_grad[1]:
            ctx.ledger.readings.setdefault(backward_pass(), []).append((x, g))
        dx = _through(g, _Chunks(ctx.ledger, *sources), transposed=True) if ctx.needs_input_grad[0] else None
        return dx, None, None, None, None, None


def _through(x: Tensor, metrics: _Chunks, transposed: bool) -> Tensor:
    """x m or x m^T, for x (..., H, s, dh)."""
    H, s, dh = x.shape[-3:]
    rows = x.reshape(-1, H * s * dh).contiguous()
    out = torch.empty_like(rows)
    for part in metrics.parts:
        m = metrics[part].view(-1, dh, dh)
        torch.bmm(rows[part].view(-1, s, dh), m.transpose(1, 2) if transposed else m, out=out[part].view(-1, s, dh))
    return out.view(x.shape)
