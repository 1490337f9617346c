"""What a stack asks of an attention, and the register of those that there are.

To add one, write a file with a subclass of ``Attention``: its options, ``build`` for its parameters, ``attend`` for its
arithmetic. Decorated with ``register_attention`` and put into this folder (or named by ``ZOO_PLUGINS``), it is there in
language models and vision transformers, on the command line, in checkpoints, and in the tests that all of them pass.
CONTRIBUTING.md has one from beginning to end.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol, TypeVar

import torch
from torch import Tensor, nn

from zoo.errors import ZooError
from zoo.options import NoOptions, parse_options
from zoo.registry import Registry

# ---------------------------------------------------------------------- what a layer is given


@dataclass(frozen=True)
class Masks:
    """Which tokens there are, and which of them a query may see.

    Args:
        causal: query t sees keys up to t.
        padding: (B, T), True or non-zero at real tokens; None where all are. Padded tokens are no keys.
        extra: (T, keys), (B, T, keys) or broadcastable to (B, H, T, keys). Bool or integer: True or non-zero is
            visible. Floating: added to the scores.
        places: (T, 2), row and column of every token of a picture, for attentions with positions of their own; -1 for
            tokens without a place. None: a token's place is the number of real tokens before it.
    """

    causal: bool = False
    padding: Tensor | None = None
    extra: Tensor | None = None
    places: Tensor | None = None


@dataclass
class AttentionCache:
    """What a layer keeps of the tokens it has seen, with room for ``capacity`` of them.

    ``kept`` holds a tensor (B, heads, capacity, width) a name, such as keys and values; ``real`` (B, capacity) which
    tokens are real, None while nothing is padded; ``state`` whatever doesn't grow, such as running sums.
    """

    capacity: int
    length: int = 0
    kept: dict[str, Tensor] = field(default_factory=dict)
    real: Tensor | None = None
    state: dict[str, Any] = field(default_factory=dict)

    def extend(self, padding: Tensor | None, **new: Tensor) -> dict[str, Tensor]:
        """Add what T new tokens leave, each (B, heads, T, width); return all so far, by the same names.

        Call it once a forward pass. ``visible_keys`` then says which of them are real.

        Raises:
            ZooError: if there is no room, or the batch isn't the one that is in here.
        """
        first = next(iter(new.values()))
        B, T = first.shape[0], first.shape[2]
        start, end = self.length, self.length + T
        if end > self.capacity:
            raise ZooError(f"cache: got {end} tokens for a capacity of {self.capacity}; make a larger cache")
        for name, tensor in new.items():
            if name not in self.kept:
                self.kept[name] = tensor.new_empty(*tensor.shape[:2], self.capacity, tensor.shape[3])
            held = self.kept[name]
            if held.shape[:2] != tensor.shape[:2]:
                raise ZooError(
                    f"cache: got {B} rows and {tensor.shape[1]} heads, but it holds {tuple(held.shape[:2])}; "
                    "use a new cache for another batch or model"
                )
            held[:, :, start:end] = tensor
        if padding is not None and self.real is None:
            self.real = torch.ones(B, self.capacity, dtype=torch.bool, device=first.device)
        if self.real is not None:
            self.real[:, start:end] = True if padding is None else padding.bool()
        self.length = end
        return {name: self.kept[name][:, :, :end] for name in new}

    def append(self, k: Tensor, v: Tensor, padding: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """``extend`` for keys and values (B, H, T, dh): all so far, and which of them are real (B, keys)."""
        kept = self.extend(padding, keys=k, values=v)
        return kept["keys"], kept["values"], self.visible_keys

    @property
    def visible_keys(self) -> Tensor | None:
        """Which tokens are real, (B, length); None where all are."""
        return None if self.real is None else self.real[:, : self.length]

    @property
    def keys(self) -> Tensor | None:
        return self.kept.get("keys")

    @property
    def values(self) -> Tensor | None:
        return self.kept.get("values")


def places_of(masks: Masks, tokens: int, cache: AttentionCache | None, device: torch.device) -> Tensor:
    """The places of new tokens, how many real ones come before each: (T,), or (B, T) where some are padding.

    Call it before ``cache.extend``. Padding has some place from 0 on.
    """
    seen = None if cache is None else cache.visible_keys
    start: int | Tensor = 0 if cache is None else cache.length if seen is None else seen.sum(dim=1, keepdim=True)
    if masks.padding is None:
        steps = torch.arange(tokens, device=device)
        return steps + start
    return (start + masks.padding.bool().cumsum(dim=1) - 1).clamp(min=0)


class Shared(Protocol):
    """What an attention may keep for a whole stack: a module that makes something once a forward pass.

    The stack owns it, saves it under ``Attention.shared_name``, and hands what ``share`` returns to every layer's
    ``forward``.
    """

    def share(self, x: Tensor, masks: Masks, cache: Any, readers: int) -> Any:
        """What the layers of a stack share in this pass.

        Args:
            x: the stack's input (B, T, D).
            masks: as every layer gets them.
            cache: what ``new_cache`` made, where text goes on from earlier tokens; else None.
            readers: how many layers will read it. 0: only tensors may be returned, as gradients follow no other way.
        """
        ...

    def new_cache(self) -> Any: ...


@dataclass(frozen=True)
class AuxiliaryLoss:
    """A term that an attention adds to the task's loss: ``weight`` times ``value``, logged as ``name``."""

    name: str
    value: Tensor
    weight: float


METRIC = "M"
"""The name of the method's metric among an attention's matrices."""


@dataclass(frozen=True)
class Shown:
    """Numbers of an attention to look at, at most three axes of them.

    Args:
        values: the numbers; NaN where there is none.
        axes: what each axis counts, in words of small letters joined by underscores, each once. ``head`` and ``token``
            are the layer's heads and the sample's tokens; after ``head``, ``row`` and ``column`` are a matrix a head.
        blocks: of a matrix, into how many equal slices its rows and its columns fall, a head each; 1 for none.
    """

    values: Tensor
    axes: tuple[str, ...]
    blocks: int = 1


@dataclass(frozen=True)
class StackStyle:
    """What an attention wants of the stack around it.

    Args:
        norm: which norm the stack's layers have.
        norm_first: pre-norm (True) or post-norm (False); None leaves it to the stack.
        positions: whether the stack adds positions to its input; False where the attention brings its own.
    """

    norm: Literal["layer", "rms"] = "layer"
    norm_first: bool | None = None
    positions: bool = True


# ---------------------------------------------------------------------- the contract


class Attention(nn.Module, ABC):
    """An attention layer: its parameters, its arithmetic, and what the stack around it has to know.

    Subclasses write ``build`` and ``attend``, and override the rest only where the default isn't right.

    Args:
        d_model: width D.
        n_heads: number of heads H; divides D.
        layer_idx: which layer of its stack this is.
        n_layers: how many the stack has.
        dropout: dropout probability of the attention weights.
        bias: whether the projections have a bias.
        options: an instance of ``Options``, or a mapping that it is made of; None is its defaults.
        shared_module: what ``make_shared`` made for the stack; its parameters are not registered here again.
        hidden_dropout: dropout probability of hidden layers inside, should there be any; left out, ``dropout``.
        out_bias: whether the output projection has a bias; left out, ``bias``.

    Raises:
        ZooError: for a value out of range or an unknown option, here; for a wrong shape, in ``forward``.
    """

    name: ClassVar[str] = ""
    """What it is registered as."""
    Options: ClassVar[type] = NoOptions
    """A frozen dataclass whose fields are made with ``option``; its ``__post_init__`` checks the values."""
    stack: ClassVar[StackStyle] = StackStyle()
    shared_name: ClassVar[str] = "shared"
    """Under which name a stack keeps, and saves, what ``make_shared`` made."""
    is_ordinary: ClassVar[bool] = False
    """Whether it is what every library calls attention; stacks then use their library's, whose trained weights load."""
    no_export: ClassVar[str] = ""
    """Why it can't be exported as a graph; empty if it can.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        layer_idx: int = 0,
        n_layers: int = 1,
        dropout: float = 0.0,
        bias: bool = True,
        options: Any = None,
        shared_module: Any = None,
        hidden_dropout: float | None = None,
        out_bias: bool | None = None,
    ) -> None:
        super().__init__()
        check_heads(d_model, n_heads)
        check_dropout(dropout)
        self.d_model, self.n_heads, self.head_dim = d_model, n_heads, d_model // n_heads
        self.layer_idx, self.n_layers, self.dropout = layer_idx, n_layers, dropout
        self.bias, self.out_bias = bias, bias if out_bias is None else out_bias
        self.hidden_dropout = dropout if hidden_dropout is None else hidden_dropout
        self.options: Any = options if isinstance(options, self.Options) else parse_options(type(self), options or {})
        # A tuple hides the module from registration: its stack owns it, saves it and moves it.
        self._shared = (shared_module,)
        self.build()

    # ------------------------------------------------------------------ to be written

    @abstractmethod
    def build(self) -> None:
        """Make the parameters, from ``self.d_model``, ``n_heads``, ``head_dim``, ``bias`` and ``options``."""

    @abstractmethod
    def attend(
        self, x: Tensor, masks: Masks, shared: Any, cache: AttentionCache | None, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The output (B, T, D), and the weights (B, H, T, keys) if they are asked for.

        ``x`` is checked, and zero at padding; outputs at padding are set to zero afterwards. With a ``cache`` x holds
        the new tokens only: ``cache.extend`` adds what they leave and returns that of all. ``zoo.attention.mixing`` has
        softmax and mix for every kind of mask.
        """

    # ------------------------------------------------------------------ what may be overridden

    @classmethod
    def make_shared(cls, d_model: int, n_heads: int, n_layers: int, dropout: float, options: Any) -> nn.Module | None:
        """What a stack of these layers owns together, a ``Shared``; None for nothing."""
        return None

    @classmethod
    def defaults(cls, stack: Literal["text", "pictures"], n_layers: int) -> dict[str, Any]:
        """Options whose defaults depend on the stack."""
        return {}

    def new_cache(self, capacity: int) -> AttentionCache:
        """What a layer needs to go on from tokens it has seen, empty."""
        return AttentionCache(capacity)

    def auxiliary_losses(self) -> list[AuxiliaryLoss]:
        """Terms of the loss that come from the last forward pass, or from the parameters."""
        return []

    def matrices(self) -> dict[str, Tensor]:
        """What there is to look at after a forward pass: matrices by name."""
        return {}

    def shown(self, x: Tensor, masks: Masks, shared: Any) -> dict[str, Shown]:
        r"""What there is to look at after a forward pass over one sample, by name: matrices, gates, loads and the like.

        All of ``matrices()``, if nothing else is said, and beside a metric M its block-row sums, ``head_metrics``:
        :math:`m_i = \sum_j M_{ij}`, a matrix a head.

        Args:
            x: what ``forward`` was given, (1, T, D), without padding.
            masks: likewise.
            shared: likewise.
        """
        D, H = self.d_model, self.n_heads
        found = {name: Shown(matrix, ("row", "column")) for name, matrix in self.matrices().items()}
        if METRIC in found and found[METRIC].values.shape == (D, D):
            found[METRIC] = Shown(found[METRIC].values, ("row", "column"), blocks=H)
            sums = found[METRIC].values.reshape(H, self.head_dim, H, self.head_dim).sum(dim=2)
            found["head_metrics"] = Shown(sums, ("head", "row", "column"))
        return found

    def projections(self) -> list[str]:
        """Names of the linear layers that low-rank adapters (LoRA) may stand beside; all that are direct children."""
        return [name for name, module in self.named_children() if type(module) is nn.Linear]

    def lr_factors(self) -> dict[str, float]:
        """By what the learning rate of some parameters is multiplied: positive numbers, by the beginnings of the
        parameters' names, such as ``{"gate.": 0.1}``. Those that aren't named learn at the learning rate itself.

        Every optimizer honours it, chosen ones too. A module inside, or one that the stack owns, may have a method of
        the same name for its own parameters; where several speak of a parameter, factors multiply.
        """
        return {}

    def init_weights(self) -> None:
        """Draw anew what isn't a linear layer's; a stack calls it after giving those its own start (timm's name)."""

    def reset_parameters(self) -> None:
        """The same by PyTorch's name."""
        self.init_weights()

    # ------------------------------------------------------------------ what is given

    def forward(
        self,
        x: Tensor,
        masks: Masks = Masks(),
        shared: Any = None,
        cache: AttentionCache | None = None,
        need_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend.

        Args:
            x: input (B, T, D).
            masks: who sees whom.
            shared: what the stack's ``Shared`` made in this pass; None for a layer on its own.
            cache: what earlier tokens left; x then holds the new ones only.
            need_weights: also return the attention weights; takes the explicit road, with the same y.

        Returns:
            y (B, T, D), zero at padding, and the weights (B, H, T, keys) or None. A query with no visible key mixes to
            zero.
        """
        check_input(x, self.d_model, masks.padding)
        if masks.padding is None:
            return self.attend(x, masks, shared, cache, need_weights)
        hidden = ~masks.padding.bool().unsqueeze(-1)
        x = x.masked_fill(hidden, 0)  # NaN in padding would survive a product with zero
        y, weights = self.attend(x, masks, shared, cache, need_weights)
        return y.masked_fill(hidden, 0), None if weights is None else weights.masked_fill(hidden.unsqueeze(1), 0)

    @property
    def shared_module(self) -> Any:
        """What the stack owns; None for a layer on its own."""
        return self._shared[0]

    @property
    def proj(self) -> Any:
        """The output projection by timm's name, where there is one."""
        return self.out_proj

    @property
    def dropout_p(self) -> float:
        return self.dropout if self.training else 0.0

    def linear(self, n_in: int | None = None, n_out: int | None = None) -> nn.Linear:
        """A projection with this layer's choice of bias; D to D if nothing is said."""
        return nn.Linear(n_in or self.d_model, n_out or self.d_model, bias=self.bias)

    def out_linear(self, n_in: int | None = None) -> nn.Linear:
        """The output projection, to D."""
        return nn.Linear(n_in or self.d_model, self.d_model, bias=self.out_bias)

    def split_heads(self, x: Tensor, n_heads: int | None = None) -> Tensor:
        """(B, T, H w) -> (B, H, T, w)."""
        H = n_heads or self.n_heads
        return x.view(*x.shape[:-1], H, x.shape[-1] // H).transpose(1, 2)

    def merge_heads(self, mix: Tensor) -> Tensor:
        """(B, H, T, w) -> (B, T, H w)."""
        return mix.transpose(1, 2).flatten(-2)

    def extra_repr(self) -> str:
        return f"d_model={self.d_model}, n_heads={self.n_heads}, dropout={self.dropout}"


# ---------------------------------------------------------------------- the register

ATTENTIONS: Registry[type[Attention]] = Registry("attention", "zoo.attention", "damcha_zoo.attentions")
Kind = TypeVar("Kind", bound=type[Attention])


def register_attention(name: str) -> Callable[[Kind], Kind]:
    """A decorator that makes an attention known by a name.

    Raises:
        ZooError: if the name is taken or isn't one, or the options aren't made as they should be.
    """
    enter = ATTENTIONS.register(name)

    def decorate(kind: Kind) -> Kind:
        if not dataclasses.is_dataclass(kind.Options):
            raise ZooError(f"attention: the Options of {name} are no dataclass; make them one, with option() fields")
        for item in dataclasses.fields(kind.Options):
            if not item.metadata.get("help"):
                raise ZooError(f"attention: the option {item.name} of {name} has no help; make it with option()")
        enter(kind)
        kind.name = name
        return kind

    return decorate


def list_attentions() -> list[str]:
    """Names of the attentions that language models and vision transformers can be made with."""
    return ATTENTIONS.names()


def attention_class(name: str, argument: str = "attention") -> type[Attention]:
    """The attention of a name.

    Raises:
        ZooError: naming the nearest, if there is none.
    """
    return ATTENTIONS.get(name, argument)


def create_attention(
    name: str,
    d_model: int,
    n_heads: int,
    layer_idx: int = 0,
    n_layers: int = 1,
    dropout: float = 0.0,
    bias: bool = True,
    **options: Any,
) -> Attention:
    """A layer on its own.

    Args:
        name: one of ``list_attentions()``.
        d_model, n_heads, layer_idx, n_layers, dropout, bias: as of ``Attention``.
        options: its own.

    Raises:
        ZooError: for a name or an option that there isn't, or a value out of range.
    """
    return attention_class(name)(d_model, n_heads, layer_idx, n_layers, dropout, bias, options)


# ---------------------------------------------------------------------- checks


def check_dropout(dropout: float) -> None:
    """Raise ZooError unless ``dropout`` is a probability below one."""
    if not 0 <= dropout < 1:
        raise ZooError(f"dropout: got {dropout}; must lie in [0, 1)")


def check_input(x: Tensor, d_model: int, padding_mask: Tensor | None) -> None:
    """Raise ZooError unless x is (B, T, d_model) and the mask, if any, (B, T)."""
    if x.dim() != 3 or x.shape[-1] != d_model:
        raise ZooError(f"x: got shape {tuple(x.shape)}; expected (batch, tokens, {d_model})")
    if padding_mask is not None and padding_mask.shape != x.shape[:2]:
        raise ZooError(f"padding_mask: got shape {tuple(padding_mask.shape)}; expected {tuple(x.shape[:2])}")


def check_heads(d_model: int, n_heads: int) -> None:
    """Raise ZooError unless ``d_model`` splits into ``n_heads`` equal slices."""
    if d_model < 1 or n_heads < 1 or d_model % n_heads:
        raise ZooError(
            f"n_heads: got {n_heads} for d_model {d_model}; d_model must be a positive multiple of n_heads, "
            "so choose a divisor of d_model"
        )
