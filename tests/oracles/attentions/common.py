"""What the oracles share: loops over rows, queries and keys."""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from tests.oracles.damcha import affine

Params = Mapping[str, Tensor]


def zero() -> Tensor:
    return torch.zeros((), dtype=torch.float64)


def softmax(scores: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Weights by key; none where there is no key."""
    if not scores:
        return {}
    highest = max(score.item() for score in scores.values())
    total = torch.stack([torch.exp(score - highest) for score in scores.values()]).sum()
    return {j: torch.exp(score - highest) / total for j, score in scores.items()}


def keys_of(real: Tensor, b: int, t: int, causal: bool) -> list[int]:
    """The keys that query t of row b may see."""
    return [j for j in range(real.shape[1]) if real[b, j] and (not causal or j <= t)]


def head(row: Tensor, n_heads: int, h: int) -> Tensor:
    width = len(row) // n_heads
    return row[h * width : (h + 1) * width]


def projected(x: Tensor, params: Params, name: str, n_heads: int) -> list[list[list[Tensor]]]:
    """What a projection gives, by row, token and head."""
    return [[[head(affine(row, params, name), n_heads, h) for h in range(n_heads)] for row in rows] for rows in x]


def dot_scores(q: Tensor, keys: Mapping[int, Tensor]) -> dict[int, Tensor]:
    return {j: (q @ k) / math.sqrt(len(q)) for j, k in keys.items()}


def mixed(weights: Mapping[int, Tensor], values: Callable[[int], Tensor], width: int) -> Tensor:
    out = torch.zeros(width, dtype=torch.float64)
    for j, weight in weights.items():
        out = out + weight * values(j)
    return out


def assembled(
    x: Tensor, real: Tensor, one: Callable[[int, int], tuple[Tensor, Sequence[Mapping[int, Tensor]]]], n_heads: int
) -> tuple[Tensor, Tensor]:
    """y (B, T, D) and weights (B, H, T, T) from ``one(b, t)``, the output and the weights of each head by key."""
    B, T, D = x.shape
    y, weights = [], []
    for b in range(B):
        rows, tables = [], []
        for t in range(T):
            out, heads = one(b, t) if real[b, t] else (torch.zeros(D, dtype=torch.float64), [{}] * n_heads)
            rows.append(out)
            tables.append(torch.stack([torch.stack([a.get(j, zero()) for j in range(T)]) for a in heads]))
        y.append(torch.stack(rows))
        weights.append(torch.stack(tables, dim=1))
    return torch.stack(y), torch.stack(weights)


def ordinary(
    params: Params,
    x: Tensor,
    real: Tensor,
    n_heads: int,
    causal: bool,
    change: Callable[[int, int, int, Mapping[int, Tensor]], Mapping[int, Tensor]] = lambda b, t, h, scores: scores,
    after: Callable[[int, int, int, Tensor], Tensor] = lambda b, t, h, mix: mix,
) -> tuple[Tensor, Tensor]:
    """Standard attention whose scores of a head, and whose mix, may be changed."""
    q, k, v = (projected(x, params, name, n_heads) for name in ("W_q", "W_k", "W_v"))

    def one(b: int, t: int) -> tuple[Tensor, list[dict[int, Tensor]]]:
        mixes, tables = [], []
        for h in range(n_heads):
            keys = {j: k[b][j][h] for j in keys_of(real, b, t, causal)}
            weights = softmax(change(b, t, h, dot_scores(q[b][t][h], keys)))
            tables.append(weights)
            mixes.append(after(b, t, h, mixed(weights, lambda j, h=h: v[b][j][h], len(v[b][t][h]))))
        return affine(torch.cat(mixes), params, "out_proj"), tables

    return assembled(x, real, one, n_heads)
