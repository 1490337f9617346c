"""Names that look the same and are not: by hidden characters, other spellings of a letter, or other alphabets."""

import unicodedata
from collections.abc import Iterable, Sequence

from zoo.errors import ZooError

# Letters of other alphabets that most fonts draw as they draw the Latin one, the micro sign, and dashes.
_DRAWN_ALIKE = str.maketrans(
    "АВЕКМНОРСТХаеорсухіјѕһ" + "ΑΒΕΖΗΙΚΜΝΟΡΤΥΧο" + "\u00b5" + "\u2010\u2011\u2012\u2212",
    "ABEKMHOPCTXaeopcyxijsh" + "ABEZHIKMNOPTYXo" + "\u03bc" + "----",
)


def _is_hidden(character: str) -> bool:
    """Whether a character leaves no mark: zero-width ones, marks of direction, variation selectors, controls."""
    return (
        unicodedata.category(character) in ("Cf", "Cc")
        or character in "\u034f\u115f\u1160\u3164"
        or ("\ufe00" <= character <= "\ufe0f")
    )


def appearance(name: str) -> str:
    """What a name looks like: the same for two names that a reader can't tell apart.

    Spellings of one letter are composed (NFC), characters that leave no mark are left out, any run of white space is
    one space and surrounds nothing, and letters that are drawn alike are one.
    """
    composed = " ".join(unicodedata.normalize("NFC", name).split())
    if composed.isascii() and composed.isprintable():
        return composed
    bare = "".join(character for character in composed if not _is_hidden(character))
    return unicodedata.normalize("NFC", " ".join(bare.translate(_DRAWN_ALIKE).split()))


def spelt(name: str) -> str:
    """A name as Python writes it, with every character that isn't ASCII as its code point: 'e<U+0301>'."""
    return "'" + "".join(c if " " <= c <= "~" else f"<U+{ord(c):04X}>" for c in name) + "'"


def look_alikes(names: Iterable[str]) -> list[list[str]]:
    """Groups of different names that look the same, each in the order of ``names``."""
    groups: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        groups.setdefault(appearance(name), []).append(name)
    return [group for group in groups.values() if len(group) > 1]


def refuse_look_alikes(
    names: Iterable[str], where: str, error: type[ZooError] = ZooError, advice: str = "give both one spelling"
) -> None:
    """Raise ``error`` if two names look the same, showing their code points.

    Args:
        names: any number of names; a repeated one counts once.
        where: what the message starts with: the argument, and what the names are of.
        error: what to raise.
        advice: the next step.
    """
    if found := look_alikes(names):
        shown = "; ".join(_together(group) for group in found[:3])
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        raise error(f"{where} look the same and differ: {shown}{more}; {advice}")


def _together(group: Sequence[str]) -> str:
    return " and ".join(map(spelt, group[:3]))
