"""The baselines: DAMCHA as its equations are written, and what else a user could take."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.models.decoder import Decoder, DecoderLayer


class LiteralDecoder(nn.Module):
    """A ``Decoder``'s own parameters, run as the equations say: a metric M (D, D) for every token of the batch, its
    block rows summed, and an explicit T x T softmax."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, x: Tensor) -> Tensor:
        shared = self.decoder.shared_mlp
        metrics = None if shared is None else self._metrics(shared, x)
        for layer in self.decoder.layers:
            x = self._layer(layer, x, metrics)
        return self.decoder.norm(x)

    def _metrics(self, generator: Any, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        H, dh = generator.n_heads, generator.head_dim
        context = x.cumsum(dim=1) / torch.arange(1, T + 1, device=x.device).view(1, T, 1)
        return generator(context).view(B, T, H, dh, H, dh).sum(dim=4)  # M (B, T, D, D) first

    def _layer(self, layer: DecoderLayer, x: Tensor, metrics: Tensor | None) -> Tensor:
        attention = layer.attention
        B, T, D = x.shape
        H, dh = attention.n_heads, attention.head_dim
        m = self._metrics(attention.generator, x) if metrics is None else metrics
        heads = x.view(B, T, H, dh)
        q = torch.einsum("bthd,bthde->bhte", heads, m)
        scores = q @ heads.permute(0, 2, 3, 1) / math.sqrt(dh)
        scores = scores.masked_fill(torch.ones(T, T, dtype=torch.bool, device=x.device).triu(1), -math.inf)
        mix = scores.softmax(dim=-1) @ attention.W_v(x).view(B, T, H, dh).transpose(1, 2)
        x = layer.norm1(x + attention.out_proj(mix.transpose(1, 2).reshape(B, T, D)))
        return layer.norm2(x + layer.feed_forward(x))


def power_law_graph(n: int, mean_degree: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Edges in random order; in-degrees fall as rank^-0.8 and are at least 1."""
    draw = np.random.default_rng(seed)
    weight = np.arange(1, n + 1) ** -0.8
    draw.shuffle(weight)
    degree = np.clip(np.round(weight / weight.mean() * mean_degree), 1, n).astype(np.int64)
    target = np.repeat(np.arange(n), degree)
    if mean_degree * n > 1_000_000:  # drawing without repeats takes minutes there; the few repeats are dropped instead
        pairs = np.unique(target * n + draw.integers(0, n, len(target)))
    else:
        pairs = np.concatenate([i * n + draw.choice(n, d, replace=False) for i, d in enumerate(degree)])
    draw.shuffle(pairs)
    return pairs % n, pairs // n


class DenseMasked(nn.Module):
    """Ordinary attention over all pairs through PyTorch's fused kernel, with the edges as its mask."""

    def __init__(self, source: np.ndarray, target: np.ndarray, n: int, width: int, heads: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        mask = torch.zeros(n, n, dtype=torch.bool)
        mask[torch.from_numpy(target), torch.from_numpy(source)] = True
        self.register_buffer("mask", mask)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask).transpose(1, 2).flatten(2))


def disjoint_union(
    conv: nn.Module, source: np.ndarray, target: np.ndarray, n: int, batch: int
) -> Callable[..., Tensor]:
    """A PyTorch Geometric layer on ``batch`` copies of the graph side by side."""
    edges = torch.from_numpy(np.stack([source, target]))
    union = torch.cat([edges + i * n for i in range(batch)], dim=1)

    def forward(x: Tensor) -> Tensor:
        return conv(x.reshape(-1, x.shape[-1]), union.to(x.device)).view_as(x)

    return forward
