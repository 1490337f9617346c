"""The errors a user of the zoo can meet; the command line prints each as one line."""

from collections.abc import Sequence
from typing import Self

STAND_INS = ("checkpoint", "address", "name")
"""What functions call the file they were given, for want of the name under which their caller got it."""


class ZooError(Exception):
    """A mistake that its user can mend: the message names the argument, the value, the rule and the next step.

    Args:
        text: the value, the rule and the next step.
        argument: what it is about, as its user knows it, such as ``--out``; it comes first in the message. None if the
            text says it, or it is about nothing in particular.
    """

    argument: str | None
    text: str

    def __init__(self, text: str, argument: str | None = None) -> None:
        super().__init__(text if argument is None else f"{argument}: {text}")
        self.argument, self.text = argument, text

    def about(self, argument: str, where: object = None) -> Self:
        """The same error, as one about ``argument``.

        A stand-in for what was given is replaced by it; whatever else the error is about stays in the text.

        Args:
            argument: what the caller's user gave.
            where: comes before the text, as the file in which it was found.
        """
        text = self.text if self.argument in STAND_INS else str(self)
        return type(self)(text if where is None else f"{where}: {text}", argument)


class Kpnn2Error(ZooError):
    """A packed attention layer or its graph was given something it must refuse."""


class CheckpointMismatchError(Kpnn2Error):
    """A checkpoint was made for other data (vocabulary, classes, graph) or another network than the one at hand."""


def listed(names: Sequence[object], shown: int = 5) -> str:
    """Names for a message: the first few, and how many more."""
    first = ", ".join(repr(name) for name in names[:shown])
    return first if len(names) <= shown else f"{first} and {len(names) - shown} more"
