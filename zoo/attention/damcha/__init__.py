"""Data-Adaptive Mahalanobis Cross-Head Attention: the metric, its contexts, and the layer."""

from zoo.attention.damcha.attention import DamchaAttention, DamchaOptions
from zoo.attention.damcha.contexts import PrefixState
from zoo.attention.damcha.method import MBasedAttention, check_mode
from zoo.attention.damcha.metric import BlockMetrics, StructuredMLPForM

__all__ = [
    "BlockMetrics",
    "DamchaAttention",
    "DamchaOptions",
    "MBasedAttention",
    "PrefixState",
    "StructuredMLPForM",
    "check_mode",
]
