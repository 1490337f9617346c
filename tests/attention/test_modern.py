"""What is special to modern attention: its places, its norms and the stack that it asks for."""

import pytest
import torch
from torch import nn

from tests.oracles.attentions.modern import oracle
from tests.oracles.compare import TIGHT, assert_same_with_gradients, randomized
from zoo.attention import Masks, create_attention
from zoo.errors import ZooError
from zoo.models.decoder import LanguageModel
from zoo.models.vision_transformer import VisionTransformer


def make(d_model, n_heads, **options):
    return randomized(create_attention("modern", d_model, n_heads, **options), 0).eval()


def tokens(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_parameters_are_the_projections_and_two_scales_of_a_heads_width():
    layer = create_attention("modern", 128, 4, bias=False)
    assert sum(p.numel() for p in layer.parameters()) == 4 * 128**2 + 2 * 32


def test_scores_depend_on_the_difference_of_places_alone():
    layer, x = make(12, 2), tokens(1, 9, 12)
    hides_the_first = torch.ones(9, 9, dtype=torch.bool)
    hides_the_first[:, :4] = False  # they still count as places
    later = layer(x, Masks(True, None, hides_the_first))[0][:, 4:]
    torch.testing.assert_close(later, layer(x[:, 4:], Masks(True))[0], **TIGHT)


def test_a_place_is_the_number_of_real_tokens_before():
    layer, x = make(12, 2), tokens(1, 5, 12)
    gaps = torch.zeros(1, 8, 12, dtype=torch.float64)
    real = torch.tensor([[False, True, True, False, True, True, False, True]])
    gaps[real] = x[0]
    torch.testing.assert_close(layer(gaps, Masks(True, real))[0][real], layer(x, Masks(True))[0][0], **TIGHT)


def test_order_of_tokens_matters_without_positions_in_the_input():
    layer, x = make(12, 2), tokens(1, 5, 12)
    assert not torch.allclose(layer(x.flip(1))[0].flip(1), layer(x)[0])


def test_head_of_width_one_knows_no_order():
    layer, x = make(3, 3), tokens(1, 5, 3)
    torch.testing.assert_close(layer(x.flip(1))[0].flip(1), layer(x)[0], **TIGHT)


@pytest.mark.parametrize("width", [3, 4, 5, 8, 11])
@pytest.mark.parametrize("causal", [False, True])
def test_pictures_follow_the_equations_with_rows_and_columns(width, causal):
    places = torch.tensor([[-1, -1], [0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]])
    layer, x = make(2 * width, 2, base=50.0), tokens(2, 7, 2 * width).requires_grad_()
    params = dict(layer.named_parameters())
    y = oracle(params, x, torch.ones(2, 7, dtype=torch.bool), 2, layer.options, causal, 0, places)[0]
    assert_same_with_gradients(layer(x, Masks(causal, places=places))[0], y, {"x": x, **params}, 0)


def test_picture_moved_as_a_whole_keeps_its_scores():
    layer, x = make(16, 2), tokens(1, 6, 16)
    places = torch.cartesian_prod(torch.arange(2), torch.arange(3))
    moved = layer(x, Masks(places=places + torch.tensor([2, 5])))[0]
    torch.testing.assert_close(moved, layer(x, Masks(places=places))[0], **TIGHT)
    assert not torch.allclose(layer(x, Masks(places=places.flip(1)))[0], moved)


def test_length_of_queries_and_keys_changes_nothing():
    layer, x = make(12, 2), tokens(1, 5, 12)
    before = layer(x)[0]
    with torch.no_grad():  # a thousandfold, against an epsilon of 1e-6 in the norm
        for name in ("W_q", "W_k"):
            getattr(layer, name).weight.mul_(1000)
            getattr(layer, name).bias.mul_(1000)
    torch.testing.assert_close(layer(x)[0], before, rtol=1e-4, atol=1e-4)


def test_stack_of_text_is_pre_norm_with_rms_norms_and_no_positions():
    model = LanguageModel(5, 8, 2, 8, 2, attention="modern")
    assert model.decoder.norm_first
    assert not model.has_positions
    assert not any(isinstance(m, nn.LayerNorm) for m in model.modules())
    assert {a.options.base for a in model.decoder.attentions} == {10_000.0}


def test_stack_of_pictures_has_rms_norms_no_positions_and_a_base_of_its_own():
    sizes = {"img_size": 8, "patch_size": 4, "embed_dim": 8, "depth": 2, "num_heads": 2}
    model = VisionTransformer(attention="modern", **sizes)
    assert model.pos_embed is None
    assert not any(isinstance(m, nn.LayerNorm) for m in model.modules())
    assert {a.options.base for a in model.attentions} == {100.0}
    given = VisionTransformer(attention="modern", attention_options={"base": 9}, **sizes)
    assert given.attentions[0].options.base == 9


def test_place_of_a_patch_matters_in_a_picture():
    torch.manual_seed(0)
    model = VisionTransformer(img_size=8, patch_size=4, embed_dim=8, depth=1, num_heads=1, attention="modern").eval()
    picture = torch.randn(1, 3, 8, 8)
    swapped = torch.cat([picture[:, :, 4:], picture[:, :, :4]], dim=2)
    attn = model.blocks[0].attn
    with torch.no_grad():
        for norm in (attn.q_norm, attn.k_norm):
            norm.weight.mul_(5)  # so that scores, and places in them, are large
        patches, others = model.forward_features(picture)[0, 1:], model.forward_features(swapped)[0, 1:]
    assert not torch.allclose(others[[2, 3, 0, 1]], patches, atol=1e-4)


@pytest.mark.parametrize("base", [1.0, 0.0, -3.0, float("inf"), float("nan")])
def test_base_out_of_range_is_refused_by_name(base):
    with pytest.raises(ZooError, match=r"^attention_options\.base: got "):
        create_attention("modern", 8, 2, base=base)
