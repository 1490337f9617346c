"""The attention layers of the zoo, and the register that stacks look them up in."""

from zoo.attention.base import (
    Attention,
    AttentionCache,
    AuxiliaryLoss,
    Masks,
    Shown,
    StackStyle,
    attention_class,
    create_attention,
    list_attentions,
    places_of,
    register_attention,
)
from zoo.attention.damcha import (
    BlockMetrics,
    DamchaAttention,
    DamchaOptions,
    MBasedAttention,
    PrefixState,
    StructuredMLPForM,
    check_mode,
)
from zoo.attention.mixing import mix, visible_softmax
from zoo.attention.packed import PackedMultiheadAttention
from zoo.attention.standard import StandardAttention
from zoo.attention.static import StaticAttention
from zoo.options import NoOptions, option

__all__ = [
    "Attention",
    "AttentionCache",
    "AuxiliaryLoss",
    "BlockMetrics",
    "DamchaAttention",
    "DamchaOptions",
    "MBasedAttention",
    "Masks",
    "NoOptions",
    "PackedMultiheadAttention",
    "PrefixState",
    "Shown",
    "StackStyle",
    "StandardAttention",
    "StaticAttention",
    "StructuredMLPForM",
    "attention_class",
    "check_mode",
    "create_attention",
    "list_attentions",
    "mix",
    "option",
    "places_of",
    "register_attention",
    "visible_softmax",
]
