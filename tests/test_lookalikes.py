"""Names that a reader can't tell apart are one look, and are shown by their code points."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.oracles.compare import examples
from zoo.errors import Kpnn2Error, ZooError
from zoo.lookalikes import appearance, look_alikes, refuse_look_alikes, spelt

NAMES = st.text(st.one_of(st.characters(), st.sampled_from("ab é\u0301\u200b\u00a0\u0410\u03bf\t")), max_size=8)
HIDDEN = "\u200b\u200c\u200d\u200e\u2060\ufeff\u00ad\u034f\ufe0f\x00\x7f\u180b\u3164\uffa0\U000e0100"

ALIKE = {
    "zero width": ("h", "h\u200b"),
    "byte order mark": ("id", "\ufeffid"),
    "soft hyphen": ("gene", "ge\u00adne"),
    "composed and not": ("é", "e\u0301"),
    "accents in another order": ("a\u0323\u0301", "a\u0301\u0323"),
    "hidden before an accent": ("é", "e\u200b\u0301"),
    "blank at the end": ("benign", "benign "),
    "blank that doesn't break": ("a b", "a\u00a0b"),
    "two blanks": ("a b", "a  b"),
    "Cyrillic": ("cat", "\u0441at"),
    "Cyrillic with an accent": ("\u0451", "ë"),
    "Greek": ("Beta", "\u0392eta"),
    "Greek with an accent": ("\u0386", "Á"),
    "micro and mu": ("\u00b5m", "\u03bcm"),
    "ohm and omega": ("\u2126", "\u03a9"),
    "hyphen that doesn't break": ("a-b", "a\u2011b"),
    "dash of an editor": ("1-2", "1\u20132"),
    "quote of an editor": ("5'", "5\u2019"),
    "ligature": ("fine", "\ufb01ne"),
    "control": ("a", "a\x00"),
}


@pytest.mark.parametrize("case", ALIKE)
def test_names_that_look_the_same_are_found_and_shown_by_code_point(case):
    names = ALIKE[case]
    assert look_alikes(["other", *names]) == [list(names)]
    with pytest.raises(Kpnn2Error) as refusal:
        refuse_look_alikes(["other", *names], "edgelist: names", Kpnn2Error, "rename one")
    first, second = map(spelt, names)
    assert str(refusal.value) == f"edgelist: names look the same and differ: {first} and {second}; rename one"
    assert first != second
    assert str(refusal.value).isascii()


@pytest.mark.parametrize(
    "names",
    [
        ("1", "01", "1.0", "1e0"),
        ("IL1", "Il1", "ll1", "I11"),
        ("a", "A", "ä", "å", "à"),
        ("TNF\u03b1", "TNFa", "TNFβ"),
        ("\u03bd", "v", "\u03c1", "p", "κ", "k"),
        ("ｶ", "カ", "か", "力"),
        ("a_b", "a-b", "a b", "ab", "a.b"),
        ("x²", "x2", "x₂"),
        ("м", "m", "и", "н", "h"),
        ("", "?"),
    ],
)
def test_names_that_look_different_may_stand_side_by_side(names):
    assert look_alikes(names) == []
    refuse_look_alikes(names, "names")


def test_the_same_name_twice_is_one_name():
    assert look_alikes(["é", "é", "a", "a"]) == []


def test_many_are_cut_short():
    names = [f"n{i}" + blank for i in range(50) for blank in ("", " ", "\t", "\u200b")]
    with pytest.raises(ZooError, match=r"^x look the same and differ: 'n0' and 'n0 ' and .* and 47 more; ") as refusal:
        refuse_look_alikes(names, "x")
    assert len(str(refusal.value)) < 200


# ---------------------------------------------------------------------- whatever the name


@examples(300)
@given(NAMES)
def test_spelling_and_what_leaves_no_mark_never_change_the_look(name):
    look = appearance(name)
    assert appearance(look) == look
    for form in ("NFC", "NFD"):
        assert appearance(unicodedata.normalize(form, name)) == look
    assert appearance(f"\u2003 {name}\t") == look


@examples(300)
@given(NAMES, st.sampled_from(HIDDEN), st.integers(0, 8))
def test_a_hidden_character_anywhere_never_changes_the_look(name, hidden, place):
    assert appearance(name[:place] + hidden + name[place:]) == appearance(name)


@examples(200)
@given(st.lists(NAMES, max_size=8))
def test_groups_are_the_names_of_one_look(names):
    groups = look_alikes(names)
    looks = {}
    for name in dict.fromkeys(names):
        looks.setdefault(appearance(name), []).append(name)
    assert groups == [group for group in looks.values() if len(group) > 1]


@examples(200)
@given(st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E)))
def test_plain_names_look_like_themselves(name):
    assert appearance(name) == name
    assert spelt(name) == f"'{name}'"
