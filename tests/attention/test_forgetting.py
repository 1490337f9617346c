"""What is special to forgetting attention: what its gates do, in both directions and across a cache."""

import pytest
import torch

from tests.oracles.compare import TIGHT, randomized
from zoo.attention import Masks, create_attention


def make(dtype=torch.float64):
    layer = randomized(create_attention("forgetting", 12, 3), 0).to(dtype)
    return layer, torch.randn(2, 6, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


def test_parameters_are_a_gate_and_its_bias_a_head_more():
    layer = create_attention("forgetting", 128, 4, bias=False)
    assert sum(p.numel() for p in layer.parameters()) == 4 * 128**2 + 128 * 4 + 4


@pytest.mark.parametrize("causal", [False, True])
def test_gates_that_forget_nothing_leave_standard_attention(causal):
    layer, x = make()
    standard = create_attention("standard", 12, 3).double()
    standard.load_state_dict({name: p for name, p in layer.state_dict().items() if not name.startswith("forget.")})
    with torch.no_grad():
        layer.forget.bias.fill_(50)
    torch.testing.assert_close(layer(x, Masks(causal))[0], standard(x, Masks(causal))[0], **TIGHT)


def test_gate_that_forgets_all_hides_what_lies_before_it():
    layer, x = make()
    with torch.no_grad():
        layer.forget.weight.zero_()
        layer.forget.weight[:, 0] = 1000
        layer.forget.bias.zero_()
        x[:, :, 0] = 1
        x[:, 3, 0] = -1  # the fourth token forgets
    weights = layer(x, Masks(True), need_weights=True)[1]
    assert weights[:, :, 3:, :3].max() < 1e-100
    assert weights[:, :, :3, :3].tril().gt(0).sum() == 2 * 3 * 6


def test_sequence_read_from_behind_is_mixed_from_behind():
    layer, x = make()
    torch.testing.assert_close(layer(x.flip(1))[0].flip(1), layer(x)[0], **TIGHT)


def test_earlier_keys_fade_alike_with_and_without_a_future():
    layer, x = make()
    weights = layer(x, need_weights=True)[1].tril()
    causal = layer(x, Masks(True), need_weights=True)[1]
    torch.testing.assert_close(weights / weights.sum(dim=-1, keepdim=True), causal, **TIGHT)


def test_padding_between_two_tokens_forgets_nothing():
    layer, x = make()
    real = torch.tensor([[True, False, True, True, False, True]] * 2)
    alone = x[real].view(2, 4, 12)
    for causal in (False, True):
        padded = layer(x, Masks(causal, real))[0][real].view(2, 4, 12)
        torch.testing.assert_close(padded, layer(alone, Masks(causal))[0], **TIGHT)


def test_sums_stay_in_single_precision_in_a_network_of_half():
    layer, x = make(torch.bfloat16)
    cache = layer.new_cache(6)
    layer(x, Masks(True), cache=cache)
    assert cache.kept["sums"].dtype == torch.float32


def test_half_precision_stays_finite_over_more_forgetting_than_it_has_numbers_for():
    layer = create_attention("forgetting", 8, 2)
    with torch.no_grad():
        layer.forget.bias.fill_(-3e4)
    layer.half()
    hides_itself = ~torch.eye(5, dtype=torch.bool)
    for need_weights in (False, True):
        y, _ = layer(torch.randn(1, 5, 8).half(), Masks(True, None, hides_itself), need_weights=need_weights)
        assert y.isfinite().all()
