"""What is special to differential attention: its lambda, the rows of its weights, and the halves of a head."""

import math

import pytest
import torch

from tests.oracles.compare import TIGHT, randomized
from zoo.attention import Masks, create_attention
from zoo.errors import ZooError
from zoo.models.decoder import LanguageModel


def test_parameters_are_four_half_heads_and_a_scale_more():
    layer = create_attention("differential", 128, 4, bias=False)
    assert sum(p.numel() for p in layer.parameters()) == 4 * 128**2 + 4 * 16 + 32


def test_lambda_starts_by_the_depth_of_the_layer():
    layers = LanguageModel(5, 8, 2, 8, 4, attention="differential").decoder.attentions
    for n, layer in enumerate(layers):
        assert layer.lambda_init == pytest.approx(0.8 - 0.6 * math.exp(-0.3 * n))
    assert layers[0].lambda_init == pytest.approx(0.2)
    with torch.no_grad():
        for vector in (layers[1].lambda_q1, layers[1].lambda_q2):
            vector.zero_()
    assert layers[1].current_lambda().item() == pytest.approx(layers[1].lambda_init)


def test_rows_of_the_weights_sum_to_one_less_lambda():
    layer = randomized(create_attention("differential", 12, 3, layer_idx=2), 0)
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    weights = layer(x, Masks(True), need_weights=True)[1]
    expected = (1 - layer.current_lambda()).expand(2, 3, 5)
    torch.testing.assert_close(weights.sum(dim=-1), expected, **TIGHT)
    assert weights.min() < 0


def test_what_both_halves_attend_to_cancels_where_lambda_is_one():
    layer = randomized(create_attention("differential", 12, 3), 0)
    with torch.no_grad():
        for name in ("W_q", "W_k"):
            projection = getattr(layer, name)
            for tensor in (projection.weight, projection.bias):
                halves = tensor.unflatten(0, (3, 2, 2))
                halves[:, 1] = halves[:, 0]
        for vector in (layer.lambda_q1, layer.lambda_k1, layer.lambda_q2, layer.lambda_k2):
            vector.zero_()
        layer.lambda_q1[0] = layer.lambda_k1[0] = math.sqrt(math.log(2 - layer.lambda_init))
    weights = layer(torch.randn(2, 5, 12, dtype=torch.float64), need_weights=True)[1]
    torch.testing.assert_close(weights, torch.zeros_like(weights), **TIGHT)


def test_drawing_anew_leaves_small_vectors_and_unit_scales():
    layer = randomized(create_attention("differential", 256, 2), 0)
    layer.init_weights()
    vectors = torch.cat([layer.lambda_q1, layer.lambda_k1, layer.lambda_q2, layer.lambda_k2])
    assert 0.07 < vectors.std() < 0.13  # 256 draws: the error of the spread is 0.0044,
    assert vectors.mean().abs() < 0.04  # that of the mean 0.0063
    assert layer.head_norm.weight.eq(1).all()


@pytest.mark.parametrize("n_heads", [4, 12])
def test_odd_width_of_a_head_is_refused_by_name(n_heads):
    with pytest.raises(ZooError, match=rf"^n_heads: got {n_heads} for d_model 12.*even"):
        create_attention("differential", 12, n_heads)
