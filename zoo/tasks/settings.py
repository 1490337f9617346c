"""Settings of a task as plain values, and their defaults."""

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from zoo.errors import ZooError


def plain(value: object) -> Any:
    """A copy in JSON's types: tuples become lists."""
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def defaults_of(kind: type) -> dict[str, Any]:
    """The settings of a class with their defaults, those of its bases too."""
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__[:-1]):
        found |= plain(getattr(base, "start_defaults", {}))
        found |= {name: plain(p.default) for name, p in inspect.signature(base).parameters.items()}
    return found


def check_settings(rules: Iterable[tuple[str, object, object, str]]) -> None:
    """Raise ZooError for the first setting, of name, value, whether it is good, and its rule, that isn't good."""
    for name, value, is_good, rule in rules:
        if not is_good:
            raise ZooError(f"got {value!r}; {rule}", argument=f"model.{name}")
