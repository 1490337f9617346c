"""The attention layers of the zoo."""

from zoo.attention.damcha import (
    AttentionCache,
    BlockMetrics,
    GeneratorOptions,
    MBasedAttention,
    PrefixState,
    StructuredMLPForM,
    check_mode,
)
from zoo.attention.packed import PackedMultiheadAttention

__all__ = [
    "AttentionCache",
    "BlockMetrics",
    "GeneratorOptions",
    "MBasedAttention",
    "PackedMultiheadAttention",
    "PrefixState",
    "StructuredMLPForM",
    "check_mode",
]
