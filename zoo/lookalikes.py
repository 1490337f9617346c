"""Names that look the same and are not: hidden characters, other spellings of a letter, letters of other alphabets."""

import unicodedata
from collections.abc import Iterable, Sequence

from zoo.errors import ZooError

# The characters that Unicode says to draw as nothing (Default_Ignorable_Code_Point), by their first and last.
_IGNORABLE = (
    (0x00AD, 0x00AD),
    (0x034F, 0x034F),
    (0x061C, 0x061C),
    (0x115F, 0x1160),
    (0x17B4, 0x17B5),
    (0x180B, 0x180F),
    (0x200B, 0x200F),
    (0x202A, 0x202E),
    (0x2060, 0x206F),
    (0x3164, 0x3164),
    (0xFE00, 0xFE0F),
    (0xFEFF, 0xFEFF),
    (0xFFA0, 0xFFA0),
    (0xFFF0, 0xFFFB),
    (0x1BCA0, 0x1BCA3),
    (0x1D173, 0x1D17A),
    (0xE0000, 0xE0FFF),
)
_CONTROLS = (*range(0x20), *range(0x7F, 0xA0))

_CYRILLIC = (
    "\u0410\u0412\u0415\u0405\u0406\u0408\u041a\u041c\u041d\u041e"
    "\u0420\u0421\u0422\u0425\u04ae\u0430\u0435\u043e\u0440\u0441"
    "\u0443\u0445\u0456\u0458\u0455\u04bb\u0501\u051b\u051d"
)
_GREEK = "\u0391\u0392\u0395\u0396\u0397\u0399\u039a\u039c\u039d\u039f\u03a1\u03a4\u03a5\u03a7\u03bf\u03f2\u03f9\u03f3"

# Left apart are letters that are only near (nu and v, alpha and a, capital i and l): tables of measurements have both,
# and mean both.
_DRAWN = str.maketrans(
    {
        **{code: "" for first, last in _IGNORABLE for code in range(first, last + 1)},
        **{code: "" for code in _CONTROLS if not chr(code).isspace()},
        **dict(zip(_CYRILLIC, "ABESIJKMHOPCTXYaeopcyxijshdqw", strict=True)),
        **dict(zip(_GREEK, "ABEZHIKMNOPTYXocCj", strict=True)),
        **dict.fromkeys("\u2010\u2011\u2012\u2013\u2212\u02d7\ufe63", "-"),  # hyphens, minus, the dash editors put
        **dict.fromkeys("\u2018\u2019\u02bc\u02b9\u2032", "'"),  # the quotes and apostrophes editors put
        **dict.fromkeys("\u201c\u201d", '"'),
        **{chr(0xFB00 + i): text for i, text in enumerate(("ff", "fi", "fl", "ffi", "ffl", "st", "st"))},  # ligatures
        "\u00b5": "\u03bc",  # the micro sign is a mu
        "\u2026": "...",
        "\u2800": " ",  # braille without a dot
    }
)


def appearance(name: str) -> str:
    """What a name looks like: the same for two names that a reader can't tell apart.

    Spellings of one letter are composed (NFC), characters that leave no mark are left out, letters that are drawn alike
    are one, any run of white space is one space, and none is left at the ends.
    """
    if not (name.isascii() and name.isprintable()):
        # Taken apart first: alphabets share their accents, and a hidden character may stand before one.
        name = unicodedata.normalize("NFC", unicodedata.normalize("NFD", name).translate(_DRAWN))
    return " ".join(name.split())


def spelt(name: str) -> str:
    """A name in quotes, with every character that isn't printable ASCII as its code point: 'e<U+0301>'."""
    return "'" + "".join(c if " " <= c <= "~" else f"<U+{ord(c):04X}>" for c in name) + "'"


def look_alikes(names: Iterable[str]) -> list[list[str]]:
    """Groups of different names that look the same, each in the order of ``names``."""
    names = list(dict.fromkeys(names))
    # A graph has as many names as genes: those in plain ASCII take no Python call each.
    looks = list(map(" ".join, map(str.split, names)))
    text = "".join(looks)
    if not (text.isascii() and text.isprintable()):
        looks = [look if look.isascii() and look.isprintable() else appearance(look) for look in looks]
    if len(set(looks)) == len(names):
        return []
    groups: dict[str, list[str]] = {}
    for name, look in zip(names, looks, strict=True):
        groups.setdefault(look, []).append(name)
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
