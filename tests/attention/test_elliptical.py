"""What is special to elliptical attention: the metric that comes from the layer before."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from tests.oracles.attentions.elliptical import layer as layer_oracle
from tests.oracles.compare import SEEDS, TIGHT, assert_same_with_gradients, examples, padding, randomized
from zoo.attention import Masks, attention_class, create_attention
from zoo.errors import ZooError
from zoo.models.decoder import Decoder, DecoderCache, LanguageModel
from zoo.models.vision_transformer import VisionTransformer


def stack(n_layers, D, H, seed, **options):
    layers = [create_attention("elliptical", D, H, i, n_layers, **options) for i in range(n_layers)]
    return [randomized(layer, seed + i) for i, layer in enumerate(layers)]


def run(layers, x, masks):
    """A bare stack with residuals: outputs and weights of every layer."""
    kind = attention_class("elliptical")
    shared = kind.make_shared(x.shape[-1], layers[0].n_heads, len(layers), 0.0, layers[0].options).share(
        x, masks, None, 1
    )
    found = []
    for layer in layers:
        y, weights = layer(x, masks, shared, need_weights=True)
        found.append((y, weights))
        x = x + layer(x, masks, shared)[0]
    return found


@pytest.mark.parametrize("scale", ["max", "mean"])
@given(
    size=st.tuples(st.integers(1, 2), st.integers(1, 5), st.integers(1, 3), st.integers(1, 3)),
    kind=st.sampled_from(["none", "left", "right", "scattered"]),
    causal=st.booleans(),
    seed=SEEDS,
)
@examples(15)
def test_stack_follows_its_equations(scale, size, kind, causal, seed):
    B, T, H, dh = size
    layers, real = stack(3, H * dh, H, seed, scale=scale), padding(B, T, seed, kind)
    x = torch.randn(B, T, H * dh, dtype=torch.float64, requires_grad=True)
    masks = Masks(causal, None if kind == "none" else real)
    tensors = {"x": x} | {f"{i}.{name}": p for i, layer in enumerate(layers) for name, p in layer.named_parameters()}
    h, before = x, None
    for layer, (y, weights) in zip(layers, run(layers, x, masks), strict=True):
        params = dict(layer.named_parameters())
        expected, expected_weights = layer_oracle(params, h, real, H, layer.options, causal, before)
        assert_same_with_gradients(y, expected, tensors, seed)
        torch.testing.assert_close(weights * real[:, None, :, None], expected_weights, **TIGHT)
        h, before = h + expected, (params, h)


def test_it_has_no_parameters_of_its_own():
    assert sum(p.numel() for p in create_attention("elliptical", 128, 4, bias=False).parameters()) == 4 * 128**2
    names = Decoder(8, 2, 8, 2, attention="elliptical").state_dict()
    assert names.keys() == Decoder(8, 2, 8, 2, attention="standard").state_dict().keys()


def test_first_layer_is_ordinary_attention():
    (first, _), x = stack(2, 8, 2, 0), torch.randn(2, 5, 8, dtype=torch.float64)
    standard = create_attention("standard", 8, 2).double()
    standard.load_state_dict(first.state_dict())
    torch.testing.assert_close(run([first], x, Masks(True))[0][0], standard(x, Masks(True))[0], **TIGHT)


@pytest.mark.parametrize("causal", [False, True])
def test_values_that_do_not_change_leave_ordinary_attention(causal):
    layer, x = stack(2, 8, 2, 0)[1], torch.randn(2, 5, 8, dtype=torch.float64)
    unchanged = {0: layer.split_heads(layer.W_v(x)).detach()}
    torch.testing.assert_close(layer(x, Masks(causal), unchanged)[0], layer(x, Masks(causal))[0], **TIGHT)


def test_metric_is_another_one_for_every_query_and_reads_no_future():
    torch.manual_seed(0)
    decoder = randomized(Decoder(8, 2, 8, 3, dropout=0.0, attention="elliptical"), 0)
    x = torch.randn(2, 6, 8, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(decoder(x)[:, 2].sum(), x)
    assert gradient[:, 3:].abs().max() == 0
    changed = x.detach().clone()  # the metric carries no gradients, so look at values as well
    changed[:, 3:] += 1
    torch.testing.assert_close(decoder(changed)[:, :3], decoder(x)[:, :3], **TIGHT)


@pytest.mark.parametrize("parts", [(1,) * 6, (3, 3), (4, 1, 1)])
def test_running_sums_go_on_across_a_cache(parts):
    decoder = randomized(Decoder(8, 2, 8, 3, dropout=0.0, attention="elliptical"), 0)
    x, real = torch.randn(3, 6, 8, dtype=torch.float64), torch.ones(3, 6, dtype=torch.bool)
    real[0, :2] = real[1, :5] = False
    cache = DecoderCache(decoder, 6)
    pieces = [decoder(a, r, cache) for a, r in zip(x.split(parts, 1), real.split(parts, 1), strict=True)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), decoder(x, real), **TIGHT)
    assert cache.layers[1].state["changes"].shape == (3, 2, 1, 4)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_layers_run_again_for_their_gradients_find_the_same_values(use_reentrant):
    layers, found = stack(3, 8, 2, 0), []
    x = torch.randn(2, 5, 8, dtype=torch.float64, requires_grad=True)
    for again in (False, True):
        shared: dict[int, torch.Tensor] = {}
        h = x
        for layer in layers:
            args = (h, Masks(), shared)
            h = h + (checkpoint(layer, *args, use_reentrant=use_reentrant) if again else layer(*args))[0]
        for layer in layers:
            layer.zero_grad()
        h.square().sum().backward()
        found.append([p.grad for layer in layers for p in layer.parameters()])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, **TIGHT)


def test_two_passes_share_nothing():
    torch.manual_seed(0)
    model = LanguageModel(7, 8, 2, 8, 2, attention="elliptical").eval()
    tokens = torch.randint(0, 7, (2, 5))
    first = model(tokens)
    model(torch.randint(0, 7, (3, 4)))
    assert torch.equal(model(tokens), first)


def test_metric_can_be_looked_at_from_the_second_layer_on():
    torch.manual_seed(0)
    model = VisionTransformer(
        img_size=8, patch_size=4, embed_dim=8, depth=3, num_heads=2, attention="elliptical"
    ).eval()
    assert model.matrices() == []
    model(torch.randn(2, 3, 8, 8))
    (name, metric), (other, _) = model.get_M_matrices()
    assert (name, other) == ("layer_1", "layer_2")
    assert metric.shape == (8, 8)
    assert torch.equal(metric, metric.diagonal().diag())
    assert metric.min() >= 0
    assert metric.max() <= 1
    assert copy.deepcopy(model).get_M_matrices()[0][1].equal(metric)


def test_scale_that_there_is_not_is_refused_by_name():
    with pytest.raises(ZooError, match=r"^attention_options\.scale: got 'median'; must be max or mean"):
        create_attention("elliptical", 8, 2, scale="median")
