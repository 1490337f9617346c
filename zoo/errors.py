"""The errors a user of the zoo can meet; the command line prints each as one line."""

from collections.abc import Sequence


class ZooError(Exception):
    """A mistake that its user can mend: the message names the argument, the value, the rule and the next step."""


class Kpnn2Error(ZooError):
    """A packed attention layer or its graph was given something it must refuse."""


class CheckpointMismatchError(Kpnn2Error):
    """A checkpoint was made for other data (vocabulary, classes, graph) or another network than the one at hand."""


def listed(names: Sequence[object], shown: int = 5) -> str:
    """Names for a message: the first few, and how many more."""
    first = ", ".join(repr(name) for name in names[:shown])
    return first if len(names) <= shown else f"{first} and {len(names) - shown} more"
