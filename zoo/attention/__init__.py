"""The attention layers of the zoo."""

from zoo.attention.damcha import AttentionCache, GeneratorOptions, MBasedAttention, check_mode
from zoo.attention.metric import PrefixState, StructuredMLPForM

__all__ = [
    "AttentionCache",
    "GeneratorOptions",
    "MBasedAttention",
    "PrefixState",
    "StructuredMLPForM",
    "check_mode",
]
