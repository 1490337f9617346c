"""The attention layers of the zoo."""

from zoo.attention.blocks import PrefixState
from zoo.attention.damcha import AttentionCache, GeneratorOptions, MBasedAttention, check_mode
from zoo.attention.metric import BlockMetrics, StructuredMLPForM

__all__ = [
    "AttentionCache",
    "BlockMetrics",
    "GeneratorOptions",
    "MBasedAttention",
    "PrefixState",
    "StructuredMLPForM",
    "check_mode",
]
