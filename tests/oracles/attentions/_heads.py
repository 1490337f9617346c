"""What oracles of attentions have in common: one softmax a head and query, in loops over everything."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tests.oracles.damcha import affine

Params = Mapping[str, Tensor]
Score = Callable[[int, int, int, int], Tensor]  # (batch row, head, query, key) -> a number
Value = Callable[[int, int, int], Tensor]  # (batch row, head, key) -> (dh,)
Change = Callable[[int, int, int, Tensor], Tensor]  # (batch row, head, query, its mix) -> (dh,)


def projected(params: Params, name: str, x: Tensor, real: Tensor, n_heads: int) -> list[Any]:
    """A projection of every real token, by batch row, head and token: (w,). Zero at padding."""
    rows = []
    for b in range(len(x)):
        tokens = [affine(x[b, t] if real[b, t] else torch.zeros_like(x[b, t]), params, name) for t in range(x.shape[1])]
        width = len(tokens[0]) // n_heads
        rows.append([[token[h * width : (h + 1) * width] for token in tokens] for h in range(n_heads)])
    return rows


def softmax_weights(real: Tensor, n_heads: int, causal: bool, score: Score) -> Tensor:
    """Weights (B, H, T, T); zero at padding and at what a query doesn't see."""
    B, T = real.shape
    zero = torch.zeros((), dtype=torch.float64)
    rows = []
    for b in range(B):
        for h in range(n_heads):
            for t in range(T):
                weights = [zero] * T
                seen = [s for s in range(t + 1 if causal else T) if real[b, s]] if real[b, t] else []
                if seen:
                    scores = [score(b, h, t, s) for s in seen]
                    highest = max(value.item() for value in scores)
                    total = sum((torch.exp(value - highest) for value in scores), zero)
                    for s, value in zip(seen, scores, strict=True):
                        weights[s] = torch.exp(value - highest) / total
                rows.append(torch.stack(weights))
    return torch.stack(rows).view(B, n_heads, T, T)


def mixed_output(params: Params, real: Tensor, weights: Tensor, value: Value, change: Change | None = None) -> Tensor:
    """y (B, T, D): every head's mix of the values, changed if need be, through the output projection."""
    B, H, T, _ = weights.shape
    rows = []
    for b in range(B):
        for t in range(T):
            heads = []
            for h in range(H):
                mix = 0 * value(b, h, 0)
                for s in range(T):
                    mix = mix + weights[b, h, t, s] * value(b, h, s)
                heads.append(mix if change is None else change(b, h, t, mix))
            y = affine(torch.cat(heads), params, "out_proj")
            rows.append(y if real[b, t] else torch.zeros_like(y))
    return torch.stack(rows).view(B, T, -1)


def rms_scaled(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """x (n,) over its root mean square, times the scale (n,)."""
    return x / torch.sqrt((x * x).sum() / len(x) + eps) * scale
