"""What is special to attention whose heads share queries and keys."""

import pytest
import torch

from zoo.attention.base import Masks, create_attention
from zoo.attention.collaborative import CollaborativeOptions
from zoo.attention.standard import StandardAttention
from zoo.errors import ZooError


def layer(D=12, H=3, **options):
    torch.manual_seed(0)
    return create_attention("collaborative", D, H, **options).eval()


@pytest.mark.parametrize("width", [None, 32, 128])
def test_costs_two_narrow_projections_a_mixing_and_a_content_bias(width):
    D, H, narrow = 128, 4, width or 64
    attention = layer(D, H, bias=False, key_dim=width)
    n = sum(p.numel() for p in attention.parameters())
    assert n == 2 * D * D + 2 * D * narrow + H * narrow + H * D
    assert n - attention.content_bias.weight.numel() == 2 * D * D + 2 * D * narrow + H * narrow


def test_repository_variant_costs_two_combinations():
    assert sum(p.numel() for p in layer(128, 4, bias=False, variant="damcha_repo").parameters()) == 4 * 128**2 + 2 * 16


def test_mixing_that_cuts_into_heads_is_standard_attention():
    """Section 3 of the paper: with D~ = D, and block-wise mixing vectors, it is the attention of every library; a
    query's bias becomes the content bias, and a key's bias changes nothing."""
    D, H, dh = 12, 3, 4
    attention, standard, x = layer(D, H, key_dim=D), StandardAttention(D, H).eval(), torch.randn(2, 5, D)
    with torch.no_grad():
        for name in ("W_q", "W_k"):
            getattr(attention, name).weight.copy_(getattr(standard, name).weight)
        attention.W_v.load_state_dict(standard.W_v.state_dict())
        attention.out_proj.load_state_dict(standard.out_proj.state_dict())
        attention.mixing.copy_(torch.eye(H).repeat_interleave(dh, dim=1))
        keys = standard.W_k.weight.view(H, dh, D)
        attention.content_bias.weight.copy_(torch.einsum("hw,hwd->hd", standard.W_q.bias.view(H, dh), keys))
    for masks in (Masks(True), Masks()):
        for got, wanted in zip(
            attention(x, masks, None, None, True), standard(x, masks, None, None, True), strict=True
        ):
            torch.testing.assert_close(got, wanted)


def test_repository_variant_starts_near_standard_attention():
    attention, standard = layer(variant="damcha_repo"), StandardAttention(12, 3)
    assert (attention.combine_q - torch.eye(3)).abs().max() < 0.1
    with torch.no_grad():
        attention.combine_q.copy_(torch.eye(3))
        attention.combine_k.copy_(torch.eye(3))
        for name in ("W_q", "W_k"):
            getattr(standard, name).bias.zero_()
    standard.load_state_dict(attention.state_dict(), strict=False)
    x = torch.randn(2, 5, 12)
    torch.testing.assert_close(attention(x)[0], standard.eval()(x)[0])


def test_cache_holds_one_key_for_all_heads():
    attention, cache = layer(24, 4), layer(24, 4).new_cache(8)
    attention(torch.randn(2, 8, 24), Masks(True), cache=cache)
    assert cache.kept["keys"].shape == (2, 1, 8, 16)  # D~ = 12 and a content bias a head


def test_stack_leaves_mixing_normal():
    attention = layer(64, 4)
    attention.mixing.data.zero_()
    attention.init_weights()
    assert 0.5 < attention.mixing.std() / (16 / 32) ** 0.5 < 1.5
    torch.testing.assert_close(attention.matrices()["mixing"], attention.mixing.detach())


def test_options_out_of_range_are_refused():
    with pytest.raises(ZooError, match=r"^key_dim: got 0"):
        CollaborativeOptions(key_dim=0)
    with pytest.raises(ZooError, match=r"^key_dim: got 8 with variant damcha_repo"):
        CollaborativeOptions(key_dim=8, variant="damcha_repo")
    with pytest.raises(ZooError, match=r"^variant: got 'repo'"):
        CollaborativeOptions(variant="repo")
