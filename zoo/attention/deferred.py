"""Metrics that several layers read, and whose gradient is formed once, a cache-sized chunk at a time.

Plain autograd writes a gradient as large as all metrics, (tokens, H, dh, dh), for every layer that reads them, and adds
them up. That is memory traffic, not arithmetic. Here each layer's backward pass returns only its input's gradient and
leaves its (x, g) on a list; when all layers are through, the generator's backward pass forms, for a chunk of tokens,

    dm = sum over layers of the outer products x g^T

as one small batched product, and feeds it at once into the two products that need it.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

_CHUNK = 1 << 18  # numbers of a metric chunk: 1 MiB in float32, the size of a core's cache

Readings = dict[int, list[tuple[Tensor, Tensor]]]


class SharedMetrics:
    """Metrics m (..., H, dh, dh) from hidden states (..., K), weight (H dh dh, K) and bias (H dh dh).

    ``tensor`` is m itself. ``queries(x)`` is ``x m`` per head, with x (..., H, dh); gradients flow to x and to the
    three sources, through ``queries`` only.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor, n_heads: int) -> None:
        kind = hidden.device.type
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            hidden, weight, bias = hidden.to(dtype), weight.to(dtype), bias.to(dtype)
        # (x, g) of every layer whose backward pass has run, by backward pass: a second one must not see the first's.
        self._readings: Readings = {}
        self.tensor: Tensor = _Generate.apply(hidden, weight, bias, n_heads, self._readings)

    def queries(self, x: Tensor) -> Tensor:
        return _Read.apply(x.to(self.tensor.dtype), self.tensor, self._readings)


class _Generate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor, n_heads: int, readings: Readings) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.set_materialize_grads(False)
        ctx.readings = readings
        dh = int((weight.shape[0] // n_heads) ** 0.5)
        return F.linear(hidden, weight, bias).view(*hidden.shape[:-1], n_heads, dh, dh)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: None) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        hidden, weight = ctx.saved_tensors
        readings = ctx.readings.pop(_backward_pass(), [])
        if not readings:
            return None, None, None, None, None
        K = hidden.shape[-1]
        flat = hidden.reshape(-1, K)  # (n, K), n tokens
        n, wide = len(flat), torch.promote_types(weight.dtype, torch.float32)
        xs = torch.stack([x.flatten(0, -3) for x, _ in readings], dim=-1)  # (n, H, dh, L)
        gs = torch.stack([g.flatten(0, -3) for _, g in readings], dim=-2)  # (n, H, L, dh)
        d_hidden = torch.empty_like(flat)
        d_weight = torch.zeros(weight.shape, dtype=wide, device=weight.device)
        d_bias = torch.zeros(weight.shape[0], dtype=wide, device=weight.device)
        step = max(1, _CHUNK // weight.shape[0]) if weight.device.type == "cpu" else n
        for start in range(0, n, step):
            part = slice(start, start + step)
            dm = (xs[part] @ gs[part]).flatten(1)  # (chunk, H dh dh)
            torch.mm(dm, weight, out=d_hidden[part])
            if wide == weight.dtype:
                d_weight.addmm_(dm.T, flat[part])
            else:
                d_weight += dm.T @ flat[part]
            d_bias += dm.sum(dim=0, dtype=wide)
        return d_hidden.view_as(hidden), d_weight.to(weight.dtype), d_bias.to(weight.dtype), None, None


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, m: Tensor, readings: Readings) -> Tensor:
        ctx.save_for_backward(x, m)
        ctx.readings = readings
        return (x.unsqueeze(-2) @ m).squeeze(-2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, None, None]:
        x, m = ctx.saved_tensors
        if ctx.needs_input_grad[1]:
            ctx.readings.setdefault(_backward_pass(), []).append((x, g))
        dx = (m @ g.unsqueeze(-1)).squeeze(-1) if ctx.needs_input_grad[0] else None
        return dx, None, None


def _backward_pass() -> int:
    """A number that is the same for all nodes of one backward pass."""
    return torch._C._current_graph_task_id()
