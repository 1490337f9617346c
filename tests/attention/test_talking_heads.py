"""What is special to attention whose heads talk to each other."""

import torch

from zoo.attention.base import Masks, create_attention
from zoo.attention.standard import StandardAttention


def layer(D=12, H=3, **options):
    torch.manual_seed(0)
    return create_attention("talking_heads", D, H, **options).eval()


def test_costs_two_mixings_beside_standard_attention():
    assert sum(p.numel() for p in layer(128, 4, bias=False).parameters()) == 65_568


def test_starts_as_standard_attention():
    attention, x = layer(), torch.randn(2, 5, 12)
    standard = StandardAttention(12, 3).eval()
    standard.load_state_dict({name: value for name, value in attention.state_dict().items() if name not in "PR"})
    torch.testing.assert_close(attention(x, Masks(True))[0], standard(x, Masks(True))[0])


def test_row_of_p_says_whom_a_head_speaks_to():
    attention, x = layer(), torch.randn(1, 4, 12)
    with torch.no_grad():
        attention.P.copy_(torch.tensor([[1.0, 0, 1], [0, 1, 0], [0, 0, 0]]))  # head 0 speaks to heads 0 and 2
    weights = attention(x, need_weights=True)[1]
    torch.testing.assert_close(weights[:, 0], weights[:, 2])


def test_weights_of_a_row_sum_to_the_column_of_r():
    attention, x = layer(), torch.randn(2, 5, 12)
    with torch.no_grad():
        attention.R.normal_()
    weights = attention(x, Masks(True), need_weights=True)[1]
    torch.testing.assert_close(weights.sum(-1), attention.R.sum(0).view(1, 3, 1).expand(2, 3, 5))


def test_key_that_one_head_may_not_see_is_mixed_into_it_after_the_softmax_only():
    attention, x = layer(), torch.randn(1, 4, 12)
    seen = torch.ones(1, 3, 4, 4, dtype=torch.bool)
    seen[:, 0, :, 2] = False
    weights = attention(x, Masks(extra=seen), need_weights=True)[1]
    assert weights[:, 0, :, 2].eq(0).all()
    with torch.no_grad():
        attention.R[1, 0] = 0.5
    mixed = attention(x, Masks(extra=seen), need_weights=True)[1]
    torch.testing.assert_close(mixed[:, 0, :, 2], 0.5 * weights[:, 1, :, 2])


def test_init_weights_restores_the_identity_and_matrices_show_it():
    attention = layer()
    with torch.no_grad():
        attention.P.normal_()
        attention.R.normal_()
    attention.init_weights()
    for name in ("P", "R"):
        torch.testing.assert_close(attention.matrices()[name], torch.eye(3))
