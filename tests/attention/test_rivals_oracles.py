"""The five rivals and their variants against their equations; the common tests of all attentions do the same."""

import importlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.oracles.compare import SEEDS, assert_same_with_gradients, examples, padding, randomized, sizes
from zoo.attention.base import Masks, create_attention

REPOSITORY = {"variant": "damcha_repo"}
KINDS = [
    ("talking_heads", {}),
    ("dcmha", {}),
    ("dcmha", REPOSITORY),
    ("collaborative", {}),
    ("collaborative", {"key_dim": 5}),
    ("collaborative", REPOSITORY),
    ("mixed", {"window": 2}),
    ("mixture", {}),
    ("mixture", {"experts": 3, "chosen": 2}),
    ("mixture", REPOSITORY),
]


@pytest.mark.parametrize(("name", "options"), KINDS, ids=str)
@given(shape=sizes(max_tokens=5, max_heads=5), kind=st.sampled_from(["none", "left", "right", "scattered"]),
       causal=st.booleans(), bias=st.booleans(), seed=SEEDS)  # fmt: skip
@examples(6)
def test_layer_is_its_equations(name, options, shape, kind, causal, bias, seed):
    B, T, H, dh = shape
    attention = randomized(create_attention(name, H * dh, H, bias=bias, **options), seed).eval()
    real, x = padding(B, T, seed, kind), torch.randn(B, T, H * dh, dtype=torch.float64, requires_grad=True)
    params = dict(attention.named_parameters())
    oracle = importlib.import_module(f"tests.oracles.attentions.{name}").oracle
    y, weights = oracle(params, x, real, H, attention.options, causal, 0)
    masks = Masks(causal, None if kind == "none" else real)
    got, got_weights = attention(x, masks, need_weights=True)
    wanted = {"x": x, **params}
    assert_same_with_gradients(got, y, wanted, seed)
    assert_same_with_gradients(attention(x, masks)[0], y, wanted, seed)
    torch.testing.assert_close(got_weights, weights)
