"""Attention along the edges of a graph."""

from zoo.attention.packed.attention import PackedMultiheadAttention, check_packed_layers

__all__ = ["PackedMultiheadAttention", "check_packed_layers"]
