"""What is special to grouped attention: how many heads of keys and values there are, and whose they are."""

import pytest
import torch

from tests.oracles.compare import TIGHT, randomized
from zoo.attention import Masks, create_attention
from zoo.errors import ZooError


@pytest.mark.parametrize(
    ("heads", "asked", "kv_heads"), [(4, None, 2), (3, None, 1), (1, None, 1), (4, 4, 4), (6, 3, 3)]
)
def test_parameters_are_those_of_fewer_keys_and_values(heads, asked, kv_heads):
    D = 12
    layer = create_attention("grouped", D, heads, bias=False, kv_heads=asked)
    assert sum(p.numel() for p in layer.parameters()) == 2 * D**2 + 2 * D * kv_heads * (D // heads)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("need_weights", [False, True])
def test_heads_in_a_row_share_what_standard_attention_would_have_twice(kv_heads, need_weights):
    layer = randomized(create_attention("grouped", 12, 4, kv_heads=kv_heads), 0)
    standard = create_attention("standard", 12, 4).double()
    state = layer.state_dict()
    for name in ("W_k.weight", "W_k.bias", "W_v.weight", "W_v.bias"):
        groups = state[name].unflatten(0, (kv_heads, 3))
        state[name] = groups.repeat_interleave(4 // kv_heads, dim=0).flatten(0, 1)
    standard.load_state_dict(state)
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    expected, weights = standard(x, Masks(True), need_weights=need_weights)
    got, found = layer(x, Masks(True), need_weights=need_weights)
    torch.testing.assert_close(got, expected, **TIGHT)
    if need_weights:
        torch.testing.assert_close(found, weights, **TIGHT)


def test_cache_holds_the_groups_only():
    layer = create_attention("grouped", 12, 4, kv_heads=2)
    cache = layer.new_cache(5)
    layer(torch.randn(3, 5, 12), Masks(True), cache=cache)
    assert cache.keys.shape == cache.values.shape == (3, 2, 5, 3)


@pytest.mark.parametrize(("kv_heads", "rule"), [(3, "choose one of 1, 2, 4"), (8, "choose one of"), (0, "at least 1")])
def test_number_that_does_not_divide_the_heads_is_refused_by_name(kv_heads, rule):
    with pytest.raises(ZooError, match=rf"^attention_options\.kv_heads: got {kv_heads}.*{rule}"):
        create_attention("grouped", 16, 4, kv_heads=kv_heads)
