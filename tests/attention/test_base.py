"""The contract's own parts: options from plain values, masks, caches and places, and the register's demands."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import pytest
import torch

from zoo.attention import Attention, AttentionCache, Masks, create_attention, mix, option, places_of, register_attention
from zoo.attention.base import ATTENTIONS
from zoo.errors import ZooError
from zoo.models.decoder import LanguageModel
from zoo.options import NoOptions, parse_options, plain_options, type_name, weight_options


@dataclass(frozen=True)
class Choices:
    """One option of every type."""

    count: int = option(1, "a whole number")
    most: int | None = option(None, "a whole number, or null", shapes_weights=False)
    rate: float = option(0.5, "a number")
    ceiling: float | None = option(None, "a number, or null")
    on: bool = option(False, "true or false")
    kind: Literal["soft", "hard"] = option("soft", "which kind")
    level: Literal[1, 2] = option(1, "which level")
    title: str = option("", "any text")
    widths: Sequence[int] = option((4, 2), "whole numbers")
    names: tuple[str, ...] = option((), "texts")
    rows: Sequence[Sequence[float]] | None = option(None, "rows of numbers, or null")

    def __post_init__(self) -> None:
        if self.count < 0:
            raise ZooError(f"count: got {self.count}; give 0 or more")


class Chosen(Attention):
    Options = Choices

    def build(self): ...

    def attend(self, x, masks, shared, cache, need_weights):
        return x, None


def parsed(**given):
    return parse_options(Chosen, given)


# ---------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("count", 3, 3),
        ("most", 3, 3),
        ("most", None, None),
        ("rate", 0.25, 0.25),
        ("rate", 2, 2.0),
        ("ceiling", 2, 2.0),
        ("ceiling", None, None),
        ("on", True, True),
        ("kind", "hard", "hard"),
        ("level", 2, 2),
        ("title", "any", "any"),
        ("widths", [8, 8], (8, 8)),
        ("widths", (8,), (8,)),
        ("widths", [], ()),
        ("names", ["a", "b"], ("a", "b")),
        ("rows", [[1, 0.5], []], ((1.0, 0.5), ())),
        ("rows", None, None),
    ],
)
def test_a_value_of_its_type_is_taken(name, value, expected):
    found = getattr(parsed(**{name: value}), name)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("count", "3", "a whole number"),
        ("count", 3.0, "a whole number"),
        ("count", True, "a whole number"),
        ("count", None, "a whole number"),
        ("most", "3", "a whole number or null"),
        ("most", False, "a whole number or null"),
        ("rate", "0.5", "a number"),
        ("rate", True, "a number"),
        ("rate", [0.5], "a number"),
        pytest.param("rate", 10**400, "a number", id="too large"),
        ("ceiling", True, "a number or null"),
        ("on", 1, "true or false"),
        ("on", "true", "true or false"),
        ("kind", "sof", "soft or hard"),
        ("kind", ["soft"], "soft or hard"),
        ("kind", None, "soft or hard"),
        ("level", True, "1 or 2"),
        ("level", 1.0, "1 or 2"),
        ("title", 3, "a text"),
        ("widths", 3, "a list of whole numbers"),
        ("widths", "34", "a list of whole numbers"),
        ("widths", {3: 4}, "a list of whole numbers"),
        ("names", "ab", "a list of texts"),
        ("rows", [1.0], "a list of a list of numbers or null"),
    ],
)
def test_a_value_of_another_type_is_refused_with_the_right_one(name, value, rule):
    with pytest.raises(ZooError) as error:
        parsed(**{name: value})
    assert str(error.value) == f"attention_options.{name}: got {value!r}; must be {rule}"


def test_a_wrong_item_is_named_by_its_place():
    with pytest.raises(ZooError, match=r"^attention_options\.widths\.1: got 'x'; must be a whole number$"):
        parsed(widths=[1, "x", 2.5])
    with pytest.raises(ZooError, match=r"^here\.names\.0: got 3; must be a text$"):
        parse_options(Chosen, {"names": [3]}, "here")


def test_an_unknown_name_is_told_the_nearest():
    with pytest.raises(
        ZooError, match=r"^attention_options: got 'width', which is no option of Chosen; do you mean wid"
    ):
        parsed(width=[1])
    with pytest.raises(ZooError, match=r"which is no option of Chosen; there are 'count', 'most'"):
        parsed(qqq=1)
    with pytest.raises(ZooError, match=r"got 'width', which is no option of standard; there are none"):
        create_attention("standard", 8, 2, width=3)


@pytest.mark.parametrize("given", ["count", 3, [("count", 3)], ["count"], NoOptions()], ids=str)
def test_options_are_values_by_name(given):
    refused = pytest.raises(ZooError, match=r"^attention_options: got .*; must be values by name")
    with refused:
        parse_options(Chosen, given)
    with refused:
        Chosen(8, 2, options=given)
    with refused:
        LanguageModel(5, 8, 2, 8, 1, attention="static", attention_options=given)


def test_a_value_out_of_range_is_refused_where_it_was_given():
    with pytest.raises(ZooError, match=r"^attention_options\.count: got -1; give 0 or more$"):
        parsed(count=-1)


def test_options_are_themselves_or_made_of_a_mapping_or_left_out():
    made = Choices(count=3)
    assert Chosen(8, 2, options=made).options is made
    assert Chosen(8, 2, options={"count": 3}).options == made
    assert Chosen(8, 2).options == Choices()


def test_plain_options_come_back_as_they_were():
    made = parsed(widths=[3], names=["a"], rows=[[1.0]], count=2)
    plain = plain_options(made)
    assert plain["widths"] == [3]
    assert plain["names"] == ["a"]
    assert parsed(**plain) == made
    assert set(plain) - set(weight_options(made)) == {"most"}


def test_defaults_are_of_their_own_types():
    for name in ATTENTIONS.names():
        kind = ATTENTIONS.get(name)
        for stack in ("text", "pictures"):
            options = parse_options(kind, kind.defaults(stack, 3))
            assert parse_options(kind, plain_options(options)) == options


@pytest.mark.parametrize(
    ("hint", "told"),
    [
        (int | None, "a whole number or null"),
        (Sequence[int], "a list of whole numbers"),
        (list[float], "a list of numbers"),
        (tuple[str, ...], "a list of texts"),
        (Sequence[int] | None, "a list of whole numbers or null"),
        (Literal["a", 2], "a or 2"),
        (bool, "true or false"),
        (torch.dtype, "dtype"),
    ],
    ids=str,
)
def test_types_are_told_as_a_user_would_say_them(hint, told):
    assert type_name(hint) == told


# ---------------------------------------------------------------------- the register


@pytest.fixture
def register(monkeypatch):
    """``register_attention``, forgotten after the test."""
    ATTENTIONS.names()
    monkeypatch.setattr(ATTENTIONS, "_items", dict(ATTENTIONS._items))
    return register_attention


def test_a_registered_attention_knows_its_name(register):
    kind = register("chosen")(type("Chosen", (Chosen,), {}))
    assert kind.name == "chosen"
    assert create_attention("chosen", 8, 2, count=3).options.count == 3


def test_options_without_help_arent_registered(register):
    bare = dataclasses.make_dataclass("Bare", [("width", int, dataclasses.field(default=3))], frozen=True)
    with pytest.raises(ZooError, match=r"the option width of chosen has no help; make it with option\(\)"):
        register("chosen")(type("Chosen", (Chosen,), {"Options": bare}))
    with pytest.raises(ZooError, match="the Options of chosen are no dataclass"):
        register("chosen")(type("Chosen", (Chosen,), {"Options": int}))
    assert "chosen" not in ATTENTIONS.names()


def test_an_unknown_attention_is_told_the_nearest():
    with pytest.raises(ZooError, match=r"^attention: got 'standart', which is none; do you mean standard"):
        create_attention("standart", 8, 2)
    with pytest.raises(ZooError, match=r"^attention: got 'standart', which is none; do you mean standard"):
        LanguageModel(5, 8, 2, 8, 1, attention="standart")


# ---------------------------------------------------------------------- masks

PADDED = torch.tensor([[1, 1, 1, 0], [0, 1, 1, 1]])


def qkv(T=4, keys=4):
    g = torch.Generator().manual_seed(0)
    return [torch.randn(2, 2, n, 3, dtype=torch.float64, generator=g) for n in (T, keys, keys)]


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint8, torch.float32])
def test_padding_is_true_or_not_zero_at_real_tokens(dtype):
    mask = (PADDED * (0.5 if dtype == torch.float32 else 3)).to(dtype)
    y, weights = mix(*qkv(), Masks(padding=mask), need_weights=True)
    assert torch.equal(y, mix(*qkv(), Masks(padding=PADDED.bool()), need_weights=True)[0])
    assert torch.equal(weights != 0, PADDED.bool()[:, None, None, :].expand(2, 2, 4, 4))
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2, 4, dtype=torch.float64))


def test_masks_hide_what_any_of_them_hides():
    extra = torch.rand(4, 4, generator=torch.Generator().manual_seed(1)) < 0.7
    weights = mix(*qkv(), Masks(True, PADDED, extra), need_weights=True)[1]
    seen = extra & torch.ones(4, 4, dtype=torch.bool).tril() & PADDED.bool()[:, None, None, :]
    assert torch.equal(weights != 0, seen.expand(2, 2, 4, 4))


ADDED = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "masks",
    [Masks(), Masks(True), Masks(True, PADDED), Masks(extra=ADDED)],
    ids=["none", "causal", "padded", "added"],  # not the numbers: processes that share the tests out must agree
)
def test_both_roads_of_the_mix_agree(masks):
    expected = mix(*qkv(), masks, need_weights=True)[0]
    # Float64 sums of four terms, in another order.
    torch.testing.assert_close(mix(*qkv(), masks)[0], expected, rtol=1e-12, atol=1e-12)


def test_the_last_queries_see_all_keys_before_them():
    weights = mix(*qkv(2, 5), Masks(True), need_weights=True)[1]
    assert torch.equal(weights[0, 0] != 0, torch.tensor([[True] * 4 + [False], [True] * 5]))


def test_a_key_serves_several_heads_in_a_row():
    q, k, v = (torch.randn(1, n, 4, 3, dtype=torch.float64) for n in (4, 2, 2))
    wide = mix(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), Masks(True))[0]
    for need_weights in (False, True):
        torch.testing.assert_close(mix(q, k, v, Masks(True), need_weights=need_weights)[0], wide)


@pytest.mark.parametrize("shape", [(3, 4), (3,), (3, 4, 4), (2, 3, 4, 4)])
def test_a_mask_of_another_shape_is_refused(shape):
    with pytest.raises(ZooError, match=r"^attn_mask: got shape \("):
        mix(*qkv(), Masks(extra=torch.ones(shape, dtype=torch.bool)))


# ---------------------------------------------------------------------- caches


def test_a_cache_returns_all_it_was_given():
    cache, (_, k, v) = AttentionCache(6), qkv(keys=5)
    assert cache.keys is cache.values is cache.visible_keys is None
    for start, end in ((0, 2), (2, 3), (3, 5)):
        keys, values, real = cache.append(k[:, :, start:end], v[:, :, start:end], None)
        assert torch.equal(keys, k[:, :, :end])
        assert torch.equal(values, v[:, :, :end])
        assert real is None
        assert cache.length == end


def test_padding_of_any_piece_is_remembered_for_all():
    cache, (_, k, v) = AttentionCache(6), qkv(keys=6)
    for i, padding in enumerate((None, torch.tensor([[0, 1], [1, 1]]), None)):
        real = cache.append(k[:, :, 2 * i : 2 * i + 2], v[:, :, 2 * i : 2 * i + 2], padding)[2]
    assert real.dtype == torch.bool
    assert real.tolist() == [[True, True, False, True, True, True], [True] * 6]


def test_a_cache_that_is_full_says_so_and_keeps_what_it_has():
    cache, (_, k, v) = AttentionCache(4), qkv(keys=3)
    cache.append(k, v, None)
    with pytest.raises(ZooError, match="cache: got 6 tokens for a capacity of 4; make a larger cache"):
        cache.append(k, v, None)
    assert cache.length == 3
    assert torch.equal(cache.keys[:, :, :3], k)


@pytest.mark.parametrize("part", [(slice(1), slice(None)), (slice(None), slice(1))], ids=["batch", "heads"])
def test_a_cache_of_another_batch_or_model_is_refused(part):
    cache, (_, k, v) = AttentionCache(6), qkv(keys=3)
    cache.append(k, v, None)
    with pytest.raises(ZooError, match=r"cache: got . rows and . heads, but it holds \(2, 2\); use a new cache"):
        cache.append(k[part], v[part], None)
    assert cache.length == 3


def test_tensors_of_any_name_and_width_are_kept_side_by_side():
    cache, a, b = AttentionCache(3), torch.randn(2, 1, 2, 5), torch.randn(2, 4, 2, 1)
    kept = cache.extend(None, a=a, b=b)
    assert torch.equal(kept["a"], a)
    assert torch.equal(kept["b"], b)
    assert cache.keys is None


# ---------------------------------------------------------------------- places

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_a_place_is_the_number_of_real_tokens_before(dtype):
    assert places_of(Masks(), 4, None, CPU).tolist() == [0, 1, 2, 3]
    padding = (PADDED * (0.5 if dtype == torch.float32 else 2)).to(dtype)
    places = places_of(Masks(padding=padding), 4, None, CPU)
    assert places[0, :3].tolist() == [0, 1, 2]
    assert places[1, 1:].tolist() == [0, 1, 2]
    assert places.min() >= 0


@pytest.mark.parametrize("start", [1, 2, 3])
@pytest.mark.parametrize("then", ["told", "none"])
def test_places_go_on_from_a_cache(start, then):
    cache, padding = AttentionCache(8), torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    if then == "none":
        padding[:, start:] = 1
    whole = places_of(Masks(padding=padding), 6, None, CPU)
    for a, b in ((0, start), (start, 5), (5, 6)):
        real = padding[:, a:b].bool()
        masks = Masks(padding=None if then == "none" and a else padding[:, a:b])
        places = places_of(masks, b - a, cache, CPU).expand(2, -1)
        assert torch.equal(places[real], whole[:, a:b][real])
        cache.extend(masks.padding, keys=torch.zeros(2, 1, b - a, 1))


def test_places_go_on_from_a_cache_without_padding():
    cache = AttentionCache(8)
    cache.extend(None, keys=torch.zeros(2, 1, 3, 1))
    assert places_of(Masks(), 2, cache, CPU).tolist() == [3, 4]
    padded = Masks(padding=torch.tensor([[1, 1], [0, 1]]))
    assert places_of(padded, 2, cache, CPU).tolist() == [[3, 4], [2, 3]]
