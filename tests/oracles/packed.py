"""Packed attention as its equations say it: one query, one head and one edge at a time."""

import math

import torch
from torch import Tensor

from zoo.attention.packed import PackedMultiheadAttention


def packed_attention(
    layer: PackedMultiheadAttention, query: Tensor, key: Tensor, value: Tensor, hidden: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Output (..., L, D) and weights (..., nnz, H) of a layer in eval mode, batch first whatever the layer says."""
    if query.dim() > 2:
        each = [
            packed_attention(layer, query[b], key[b], value[b], None if hidden is None else hidden[b])
            for b in range(len(query))
        ]
        return torch.stack([y for y, _ in each]), torch.stack([w for _, w in each])
    H, dh = layer.num_heads, layer.head_dim
    edges = list(zip(layer.source_index.tolist(), layer.target_index.tolist(), strict=True))
    q, k, v = layer.q_proj(query), layer.k_proj(key), layer.v_proj(value)
    zero = query.new_zeros(())
    weights = [[zero] * H for _ in edges]
    rows = []
    for i in range(layer.query_features):
        seen = [e for e, (j, t) in enumerate(edges) if t == i and not (hidden is not None and hidden[j])]
        heads = []
        for h in range(H):
            own = slice(h * dh, (h + 1) * dh)
            mix = query.new_zeros(dh)
            if seen:
                scores = torch.stack([(q[i, own] * k[edges[e][0], own]).sum() / math.sqrt(dh) for e in seen])
                for e, weight in zip(seen, scores.softmax(0), strict=True):
                    weights[e][h] = weight
                    mix = mix + weight * v[edges[e][0], own]
            heads.append(mix)
        rows.append(torch.cat(heads))
    return layer.out_proj(torch.stack(rows)), torch.stack([torch.stack(row) for row in weights])
