"""The attentions that DAMCHA is compared with against their equations, in values and gradients."""

import importlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.oracles.compare import SEEDS, TIGHT, assert_same_with_gradients, examples, padding, randomized
from zoo.attention import Masks, create_attention

KINDS = [
    ("standard", {}),
    ("static", {}),
    ("damcha", {"share_mlp": False, "mlp_hidden": (3,)}),
    ("damcha", {"share_mlp": False, "mlp_hidden": (3,), "off_diag_mode": "linear_comb", "use_layer_bias": True}),
    ("modern", {}),
    ("modern", {"base": 7.0}),
    ("grouped", {}),
    ("grouped", {"kv_heads": 1}),
    ("gated", {}),
    ("forgetting", {}),
    ("differential", {}),
    ("elliptical", {}),
]


@pytest.mark.parametrize(("name", "options"), KINDS)
@given(
    size=st.tuples(st.integers(1, 2), st.integers(1, 5), st.integers(1, 4), st.integers(1, 3)),
    kind=st.sampled_from(["none", "left", "right", "scattered"]),
    causal=st.booleans(),
    layer_idx=st.integers(0, 2),
    bias=st.booleans(),
    seed=SEEDS,
)
@examples(12)
def test_layer_follows_its_equations(name, options, size, kind, causal, layer_idx, bias, seed):
    B, T, H, width = size
    D = H * (2 * width if name == "differential" else width)
    oracle = importlib.import_module(f"tests.oracles.attentions.{name}").oracle
    layer = randomized(create_attention(name, D, H, layer_idx, 3, bias=bias, **options), seed).eval()
    x = torch.randn(B, T, D, dtype=torch.float64, requires_grad=True)
    real = padding(B, T, seed, kind)
    masks = Masks(causal, None if kind == "none" else real)
    params = dict(layer.named_parameters())
    y, weights = oracle(params, x, real, H, layer.options, causal, layer_idx)
    assert_same_with_gradients(layer(x, masks)[0], y, {"x": x, **params}, seed)
    again, found = layer(x, masks, need_weights=True)
    assert_same_with_gradients(again, y, {"x": x, **params}, seed)
    torch.testing.assert_close(found * real[:, None, :, None], weights, **TIGHT)
