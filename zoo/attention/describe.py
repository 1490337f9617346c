"""What attentions there are and what can be set about them, in words."""

import dataclasses
import inspect
import textwrap
from typing import get_type_hints

from zoo.attention.base import attention_class, list_attentions
from zoo.options import type_name


def summary_of(name: str) -> str:
    """The first sentence of an attention's docstring."""
    return inspect.cleandoc(attention_class(name).__doc__ or "").partition("\n")[0]


def describe_all() -> str:
    """A line an attention."""
    names = list_attentions()
    width = max(map(len, names))
    return "\n".join(f"{name:{width}}  {summary_of(name)}" for name in names)


def describe(name: str, argument: str = "attention") -> str:
    """What an attention is, and its options with their types, defaults and meaning.

    Raises:
        ZooError: naming the nearest, if there is none.
    """
    kind = attention_class(name, argument)
    text = inspect.cleandoc(kind.__doc__ or "")
    lines = [f"{name}: {text}", ""]
    items = dataclasses.fields(kind.Options)
    lines.append("Options, for --model.attention_options:" if items else "It has no options.")
    defaults = kind.Options()
    hints = get_type_hints(kind.Options)
    for item in items:
        default = getattr(defaults, item.name)
        lines.append(f"  {item.name}: {type_name(hints[item.name])}, default {_yaml(default)}")
        note = "" if item.metadata["shapes_weights"] else " (may be set anew for trained weights)"
        lines += textwrap.wrap(f"{item.metadata['help']}{note}", 110, initial_indent=_IN, subsequent_indent=_IN)
    return "\n".join(lines)


_IN = " " * 6


def _yaml(value: object) -> str:
    """A default as YAML has it."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return str(list(value) if isinstance(value, tuple) else value)
