"""The method's own front: its switches, and the layer that they make. The one place that translates them."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from zoo.attention.base import Attention, AttentionCache, Masks, attention_class
from zoo.attention.damcha.attention import DamchaAttention, DamchaOptions, FinishedMetrics
from zoo.attention.damcha.metric import METRIC_OPTIONS, BlockMetrics, StructuredMLPForM, check_names
from zoo.attention.standard import StandardAttention
from zoo.attention.static import StaticAttention
from zoo.errors import ZooError
from zoo.options import check_named, parse_options

SWITCHES = ("use_M", "use_mlp", "share_mlp", "mlp_hidden")
OPTIONS = tuple(item.name for item in fields(DamchaOptions) if item.name not in SWITCHES)
"""The options of ``damcha`` that go by the same names beside the switches."""

# Sizes, starts and weights of parts that are then not built: let pass, so that twins can share one set of arguments.
_HARMLESS = ("layer_bias_rank", "off_diag_alpha_init", "chunk_size", "kl_weight")
_SWITCHED_OFF = {
    item.name: item.default for item in fields(DamchaOptions) if item.name in OPTIONS and item.name not in _HARMLESS
}


def check_mode(use_M: bool, use_mlp: bool, share_mlp: bool, options: Mapping[str, Any]) -> None:
    """Raise ZooError for a combination of switches that means nothing."""
    if use_mlp and not use_M:
        raise ZooError(
            "use_mlp: got True with use_M False; a generator needs a metric to generate, so set use_M to True or "
            "use_mlp to False"
        )
    if share_mlp and not use_mlp:
        raise ZooError(
            "share_mlp: got True with use_mlp False; there is no generator to share, so set use_mlp to True or "
            "share_mlp to False"
        )
    check_names(options, OPTIONS)
    if not use_mlp:
        for name, off in _SWITCHED_OFF.items():
            if options.get(name, off) != off:
                raise ZooError(
                    f"{name}: got {options[name]!r} with use_mlp False; it is an option of generated metrics, so set "
                    f"use_mlp to True or leave {name} at {off!r}"
                )


def attention_of_switches(
    use_M: bool = True,
    use_mlp: bool = True,
    share_mlp: bool = True,
    mlp_hidden: Sequence[int] | None = None,
    options: Mapping[str, Any] | None = None,
) -> tuple[str, dict[str, Any]]:
    """The name and the options of the attention that the method's switches mean.

    Args:
        use_M: False is ordinary attention.
        use_mlp: False, with ``use_M``, is the static ablation.
        share_mlp: one generator for the stack.
        mlp_hidden: hidden widths of the generator; None is the stack's default.
        options: the generator's further options.

    Raises:
        ZooError: for a combination without meaning.
    """
    check_mode(use_M, use_mlp, share_mlp, options or {})
    if not use_mlp:
        return ("static" if use_M else "standard"), {}
    widths = {} if mlp_hidden is None else {"mlp_hidden": tuple(mlp_hidden)}
    return "damcha", {"share_mlp": share_mlp, **widths, **(options or {})}


def switches_in(settings: dict[str, Any]) -> dict[str, Any]:
    """Take the method's switches that are given out of a dict of settings: the arguments of ``attention_of_switches``,
    the generator's under ``options``."""
    settings.pop("use_multihead_M", None)  # part of the method's command line; changes nothing
    found: dict[str, Any] = {name: settings.pop(name) for name in SWITCHES if name in settings}
    options = {item.name: settings.pop(item.name) for item in fields(DamchaOptions) if item.name in settings}
    return {**found, "options": options}


def known_switches() -> list[str]:
    """Names of all switches of the method, in the order that ``switches_in`` takes them."""
    return list(dict.fromkeys([*SWITCHES, *(item.name for item in fields(DamchaOptions)), "use_multihead_M"]))


def chosen_attention(
    attention: str | None,
    attention_options: Mapping[str, Any] | None,
    switches: Mapping[str, Any],
    stack: Literal["text", "pictures"],
    n_layers: int,
) -> tuple[type[Attention], Any]:
    """The attention that a stack is made of, and its options.

    Args:
        attention: its name; None for what the switches mean.
        attention_options: its options by name.
        switches: the method's, as ``switches_in`` finds them. Beside a name they may only say more of the options of
            ``damcha``.
        stack: which kind of stack asks, for defaults.
        n_layers: how many layers it has.

    Raises:
        ZooError: for a name or option that there isn't, a value out of range, or two that contradict each other.
    """
    check_named(attention_options or {})
    given = dict(attention_options or {})
    if attention is None:
        name, meant = attention_of_switches(**switches)
    else:
        name, options = attention, dict(switches.get("options", {}))
        meant = {n: v for n, v in switches.items() if n in ("share_mlp", "mlp_hidden")} | options
        extra = sorted(set(switches) & {"use_M", "use_mlp"}) + (sorted(meant) if name != "damcha" else [])
        if extra:
            raise ZooError(
                f"{extra[0]}: given beside attention {name!r}; it is a switch of the method's, and the name takes its "
                "place, so leave one of them out"
            )
    for option, value in meant.items():
        if option in given and given[option] != value:
            raise ZooError(
                f"attention_options.{option}: got {given[option]!r} beside {option} {value!r}; they are the same "
                "option, so leave one of them out"
            )
    kind = attention_class(name)
    return kind, parse_options(kind, {**kind.defaults(stack, n_layers), **meant, **given})


def reset_options(
    settings: dict[str, Any], switches: dict[str, Any], kind: type[Attention], options: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Set options of an attention anew, in settings that may have some of them as switches of the method's.

    Args:
        settings: with ``attention_options``; written to.
        switches: where the method's switches are, in ``settings`` or a part of them; written to.
        kind: the attention that the settings mean.
        options: the new values by name.

    Returns:
        The settings; None, and nothing is written, if the attention has no such option.
    """
    if not set(options) <= {item.name for item in fields(kind.Options)}:
        return None
    given = dict(settings.get("attention_options") or {})
    for name, value in options.items():
        if kind is DamchaAttention and name in known_switches():
            given.pop(name, None)
            switches[name] = value
        else:
            given[name] = value
    settings["attention_options"] = given or None
    return settings


class MBasedAttention(Attention):
    r"""Multi-head attention whose scores come from a generated metric, by the method's own names and switches.

    .. math::
        S_i = X_i m_i X_i^T / \sqrt{dh}, \quad A_i = softmax(S_i + mask), \quad O_i = A_i V_i, \quad
        Y = concat(O_1, ..., O_H) W_o

    Which of the three attentions it is follows from the switches: ``DamchaAttention``, ``StaticAttention``
    (``use_mlp=False``) or ``StandardAttention`` (``use_M=False``).

    Args:
        d_model: model width D.
        n_heads: number of heads H; divides D.
        dropout: dropout probability of the attention weights.
        bias: whether the projections have a bias.
        use_M: False gives ordinary attention with query and key projections.
        use_mlp: generate the metric from the input. False with ``use_M``: one learned matrix ``M0``, the static
            ablation, which starts at the identity.
        mlp_hidden: hidden widths of the generator.
        shared_mlp: a generator that a stack owns; its parameters are not registered here again.
        layer_idx: which layer this is, for the generator's layer bias.
        n_layers: number of layers the generator has biases for.
        use_multihead_M: accepted for compatibility with the method's command line; changes nothing, since DAMCHA
            always sums block rows per head.
        mlp_dropout: dropout probability in the generator; left out, ``dropout``.
        out_bias: whether the output projection has a bias; left out, ``bias``.
        options: options of the generator, see ``MetricOptions``, and of the layer: ``key_projection``, ``kl_weight``.

    Raises:
        ZooError: for a combination of switches without meaning, here; for a wrong shape, in ``forward``.

    Source: DAMCHA, equations (5) to (8), appendix D.
    """

    kinds: ClassVar[Mapping[str, type["MBasedAttention"]]]
    """What a class of this front becomes, by the name of the attention."""

    def __new__(cls, *_: Any, use_M: bool = True, use_mlp: bool = True, **__: Any) -> "MBasedAttention":
        kind = (
            cls.kinds["standard" if not use_M else "damcha" if use_mlp else "static"] if "kinds" in vars(cls) else cls
        )
        made: MBasedAttention = super().__new__(kind)
        return made

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        dropout: float = 0.1,
        bias: bool = True,
        *,
        use_M: bool = True,
        use_mlp: bool = True,
        mlp_hidden: Sequence[int] = (256, 512),
        shared_mlp: StructuredMLPForM | None = None,
        layer_idx: int = 0,
        n_layers: int = 4,
        use_multihead_M: bool = True,
        mlp_dropout: float | None = None,
        out_bias: bool | None = None,
        **options: Any,
    ) -> None:
        theirs = [name for name in options if name in METRIC_OPTIONS]
        if shared_mlp is not None and theirs and use_mlp:
            raise ZooError(
                f"{theirs[0]}: given beside shared_mlp, which has its own options; give it to that generator"
            )
        _, made = attention_of_switches(use_M, use_mlp, shared_mlp is not None, mlp_hidden, options)
        super().__init__(d_model, n_heads, layer_idx, n_layers, dropout, bias, made, shared_mlp, mlp_dropout, out_bias)
        self.use_M, self.use_mlp = use_M, use_mlp

    def forward(  # type: ignore[override]  # the method's arguments, not the contract's
        self,
        x: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        padding_mask: Tensor | None = None,
        head_metrics: Tensor | BlockMetrics | None = None,
        need_weights: bool = False,
        cache: AttentionCache | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend.

        Args:
            x: input (B, T, D).
            attn_mask: (T, T), (B, T, T) or broadcastable to (B, H, T, T). Bool or integer: True or non-zero is
                visible. Floating: added to the scores.
            is_causal: query t sees keys up to t, and its metric comes from the mean of x[:, :t+1].
            padding_mask: (B, T), True or non-zero at real tokens. Padded tokens are no keys, don't enter the context,
                and their outputs are zero, whatever their values.
            head_metrics: metrics made elsewhere, (B, H, dh, dh) or one a query (B, T, H, dh, dh), layer bias included;
                or a stack's ``BlockMetrics``, without. Else they are generated from ``x``.
            need_weights: also return the attention weights; takes the explicit road, with the same y.
            cache: keys, values and context of earlier tokens; x then holds the new ones only.

        Returns:
            y (B, T, D), and the weights (B, H, T, keys) or None. A query with no visible key mixes to zero.
        """
        if head_metrics is not None and not self.use_M:
            raise ZooError("head_metrics: given to attention with use_M False, which has no metric; leave it out")
        shared = FinishedMetrics(head_metrics) if isinstance(head_metrics, Tensor) else head_metrics
        return super().forward(x, Masks(is_causal, padding_mask, attn_mask), shared, cache, need_weights)

    @property
    def metric_generator(self) -> StructuredMLPForM | None:
        """The generator in use, own or shared; None for the static ablation and for ordinary attention."""
        return None

    @torch.no_grad()
    def get_M_matrix(self) -> Tensor | None:
        """The full metric (D, D), averaged over the contexts of the last batch; None for ordinary attention."""
        return self.matrices().get("M")

    def _get_name(self) -> str:
        return "MBasedAttention"


class _Standard(MBasedAttention, StandardAttention): ...


class _Static(MBasedAttention, StaticAttention): ...


class _Damcha(MBasedAttention, DamchaAttention):
    metric_generator = DamchaAttention.metric_generator


MBasedAttention.kinds = {"standard": _Standard, "static": _Static, "damcha": _Damcha}
