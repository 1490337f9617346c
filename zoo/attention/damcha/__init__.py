"""Data-Adaptive Mahalanobis Cross-Head Attention: the metric, its contexts, and the layer."""

from zoo.attention.damcha.contexts import PrefixState
from zoo.attention.damcha.method import AttentionCache, GeneratorOptions, MBasedAttention, check_mode
from zoo.attention.damcha.metric import BlockMetrics, StructuredMLPForM

__all__ = [
    "AttentionCache",
    "BlockMetrics",
    "GeneratorOptions",
    "MBasedAttention",
    "PrefixState",
    "StructuredMLPForM",
    "check_mode",
]
