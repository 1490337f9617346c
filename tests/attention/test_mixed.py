"""What is special to attention whose heads have roles."""

import pytest
import torch

from zoo.attention.base import Masks, create_attention
from zoo.attention.mixed import MixedOptions
from zoo.errors import ZooError

T, WINDOW = 7, 3


def seen_by(masks, H=4, tokens=T):
    """Which keys each head's weights fall on: (B, H, T, keys)."""
    torch.manual_seed(0)
    attention = create_attention("mixed", 4 * H, H, window=WINDOW).eval()
    B = 1 if masks.padding is None else len(masks.padding)
    return attention(torch.randn(B, tokens, 4 * H), masks, need_weights=True)[1] > 0


def rule(masks_of_head):
    return torch.tensor([[masks_of_head(t, j) for j in range(T)] for t in range(T)])


def test_has_the_parameters_of_standard_attention():
    attention = create_attention("mixed", 128, 4, bias=False)
    assert sum(p.numel() for p in attention.parameters()) == 65_536
    assert attention.options.window == 8


def test_roles_in_a_causal_stack():
    seen = seen_by(Masks(True))[0]
    assert seen[0].equal(rule(lambda t, j: j <= t))
    assert seen[1].equal(rule(lambda t, j: t - WINDOW < j <= t))
    assert seen[2].equal(rule(lambda t, j: j <= t))
    assert seen[3].equal(rule(lambda t, j: j < t))


def test_roles_in_a_full_stack():
    seen = seen_by(Masks())[0]
    assert seen[0].all()
    assert seen[1].equal(rule(lambda t, j: abs(t - j) < WINDOW))
    assert seen[2].equal(rule(lambda t, j: j <= t))
    assert seen[3].equal(rule(lambda t, j: j >= t))


def test_roles_go_round_where_four_does_not_divide_the_heads():
    seen = seen_by(Masks(True), H=6)[0]
    assert seen[4].equal(seen[0])
    assert seen[5].equal(seen[1])


@pytest.mark.parametrize("causal", [True, False])
def test_window_counts_real_tokens_only(causal):
    real = torch.tensor([[1, 0, 1, 0, 0, 1, 1, 0, 1, 1, 1]]).bool()
    padded = seen_by(Masks(causal, real), tokens=11)[0][:, real[0]][:, :, real[0]]
    assert padded.equal(seen_by(Masks(causal))[0])


def test_first_query_of_a_backward_head_mixes_to_zero():
    attention = create_attention("mixed", 16, 4, bias=False)
    with torch.no_grad():
        attention.out_proj.weight.copy_(torch.eye(16))
    x = torch.randn(2, 3, 16, requires_grad=True)
    y, _ = attention(x, Masks(True))
    assert y[:, 0, 12:].eq(0).all()
    assert torch.autograd.grad(y.square().sum(), x)[0].isfinite().all()


def test_mask_is_made_once_for_rows_without_padding():
    attention, shapes = create_attention("mixed", 16, 4), []
    made = attention._roles
    attention._roles = lambda *given: shapes.append(made(*given).shape) or made(*given)
    attention(torch.randn(5, 3, 16), Masks(True))
    assert shapes == [(1, 4, 3, 3)]


def test_window_below_one_is_refused():
    with pytest.raises(ZooError, match=r"^window: got 0"):
        MixedOptions(window=0)
