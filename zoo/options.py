"""Options of what is registered: a frozen dataclass each, typed and documented, checked by name."""

import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from zoo.errors import ZooError
from zoo.registry import nearest


def option(default: Any, help: str, *, shapes_weights: bool = True) -> Any:
    """A field of an options dataclass.

    Args:
        default: its default.
        help: what it means, for ``--model.attention.help``.
        shapes_weights: whether weights trained with one value are another network with another. False for what may be
            set anew for trained weights.
    """
    metadata = {"help": help, "shapes_weights": shapes_weights}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class NoOptions:
    """For what has no options."""


def parse_options(kind: Any, given: Mapping[str, Any], where: str = "attention_options") -> Any:
    """The options of an attention, a source of data or the like, from plain values.

    Args:
        kind: the class, with a dataclass ``Options`` and, if it is registered, a ``name``.
        given: values by name, as YAML has them.
        where: what they were given as, for messages.

    Raises:
        ZooError: for a name that it doesn't have, naming the nearest, or a value of another type or out of range.
    """
    check_named(given, where)
    known = {item.name: item for item in dataclasses.fields(kind.Options)}
    for name in given:
        if name not in known:
            title = getattr(kind, "name", "") or kind.__name__
            raise ZooError(f"{where}: got {name!r}, which is no option of {title}; {nearest(name, list(known))}")
    types_of = get_type_hints(kind.Options)
    values = {name: _typed(value, types_of[name], f"{where}.{name}") for name, value in given.items()}
    try:
        return kind.Options(**values)
    except ZooError as error:
        raise ZooError(f"{where}.{error}") from None


def check_named(given: Any, where: str = "attention_options") -> None:
    """Raise ZooError unless ``given`` is values by name."""
    if not isinstance(given, Mapping):
        raise ZooError(f"{where}: got {given!r}; must be values by name, such as '{{name: value}}'")


def plain_options(options: Any) -> dict[str, Any]:
    """The values of an options dataclass in JSON's types."""
    return {name: list(v) if isinstance(v, tuple) else v for name, v in dataclasses.asdict(options).items()}


def weight_options(options: Any) -> dict[str, Any]:
    """Those of the options that decide what network the weights are of, in JSON's types."""
    kept = {item.name for item in dataclasses.fields(options) if item.metadata.get("shapes_weights", True)}
    return {name: value for name, value in plain_options(options).items() if name in kept}


def _typed(value: Any, wanted: Any, where: str) -> Any:
    """The value, where it is of the type that an option's annotation says; whole numbers may stand for others."""
    origin, choices = get_origin(wanted), get_args(wanted)
    if origin in (Union, types.UnionType):
        for choice in choices:
            try:
                return _typed(value, choice, where)
            except ZooError:
                continue
    elif origin is Literal:
        if value in choices and type(value) in {type(choice) for choice in choices}:
            return value
    elif origin in (tuple, list, Sequence) or origin is typing.get_origin(Sequence[int]):
        if isinstance(value, (list, tuple)):
            return tuple(_typed(item, choices[0] if choices else Any, f"{where}.{i}") for i, item in enumerate(value))
    elif wanted is Any or (wanted in (None, type(None)) and value is None):
        return value
    elif wanted is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        with suppress(OverflowError):
            return float(value)
    elif wanted in (int, str, bool) and type(value) is wanted:
        return value
    raise ZooError(f"{where}: got {value!r}; must be {type_name(wanted)}")


def type_name(wanted: Any) -> str:
    """A type as a user would say it."""
    origin, choices = get_origin(wanted), get_args(wanted)
    if origin in (Union, types.UnionType):
        return " or ".join(type_name(choice) for choice in choices)
    if origin is Literal:
        return " or ".join(map(str, choices))
    if origin is not None:
        of = {int: "whole numbers", float: "numbers", str: "texts", bool: "true or false"}
        return f"a list of {of.get(choices[0], type_name(choices[0]))}" if choices else "a list"
    names = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(wanted, getattr(wanted, "__name__", str(wanted)))
