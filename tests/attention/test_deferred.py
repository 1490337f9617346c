"""The gradient that a generator's readers leave behind: the same as autograd's, whatever is asked for and how often."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.oracles.compare import MODES, TIGHT, gradients, randomized
from tests.oracles.damcha import DecoderOracle
from zoo.attention.damcha import deferred
from zoo.models.decoder import Decoder

# The low-rank generator takes ordinary autograd; with a layer bias, every layer adds its own.
KINDS = {mode: {} | options for mode, options in MODES.items()}
B, T, H, D, LAYERS = 2, 5, 3, 6, 3
# Three layer norms on the way: a few digits more than one layer loses.
LOOSE = {"rtol": 1e-8, "atol": 1e-9}


def make(share=True, **options):
    decoder = Decoder(D, H, 5, LAYERS, 0.0, share_mlp=share, mlp_hidden=(4, 3), **options)
    return randomized(decoder, 5).eval()


def tokens(seed=0):
    return torch.randn(B, T, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


def expected_output(decoder, x, share=True, **options):
    oracle = DecoderOracle(dict(decoder.named_parameters()), D, H, LAYERS, share_mlp=share, options=options)
    return oracle.run(x, torch.ones(B, T, dtype=torch.bool))[0]


def assert_same(got, want):
    assert any((g != 0).any() for g in want)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, **LOOSE)


@pytest.mark.parametrize(("share", "tokens_a_chunk"), [(True, 1), (False, 1), (True, 3), (False, 4), (True, 10)])
@pytest.mark.parametrize("kind", KINDS)
def test_gradient_does_not_depend_on_how_tokens_are_chunked(kind, tokens_a_chunk, share, monkeypatch):
    monkeypatch.setattr(deferred, "_CHUNK", tokens_a_chunk * D * (D // H))  # H dh dh numbers a token
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)  # of each thread
    decoder, x = make(share, **KINDS[kind]), tokens()
    wanted = [x, *decoder.parameters()]
    got = gradients(decoder(x), wanted, 1)
    assert_same(got, gradients(expected_output(decoder, x, share, **KINDS[kind]), wanted, 1))


@pytest.mark.parametrize("kind", KINDS)
def test_backward_twice_through_one_graph_gives_twice_the_gradient(kind):
    decoder, x = make(**KINDS[kind]), tokens()
    once = gradients(expected_output(decoder, x, **KINDS[kind]).square(), [x, *decoder.parameters()], 1)
    y = decoder(x).square()
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for _ in range(2):
        (y * weight).sum().backward(retain_graph=True)
    assert_same(
        [t.grad if t.grad is not None else torch.zeros_like(t) for t in [x, *decoder.parameters()]],
        [2 * g for g in once],
    )


def test_forward_passes_may_overlap_before_their_backward_passes():
    decoder, first, second = make(), tokens(1), tokens(2)
    wanted = [first, second, *decoder.parameters()]
    a, b = decoder(first), decoder(second)
    got_b, got_a, got_both = gradients(b, wanted, 2), gradients(a, wanted, 1), gradients(a + b, wanted, 3)
    want_a, want_b = expected_output(decoder, first), expected_output(decoder, second)
    assert_same(got_a, gradients(want_a, wanted, 1))
    assert_same(got_b, gradients(want_b, wanted, 2))
    assert_same(got_both, gradients(want_a + want_b, wanted, 3))


@pytest.mark.parametrize("frozen", ["shared_mlp.", "shared_mlp.hidden", "shared_mlp.out", "layers.", "layers.1."])
@pytest.mark.parametrize("input_needs_grad", [True, False])
def test_frozen_parts_leave_the_other_gradients_as_they_are(frozen, input_needs_grad):
    decoder, x = make(), tokens().requires_grad_(input_needs_grad)
    for name, parameter in decoder.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    wanted = [t for t in [x, *decoder.parameters()] if t.requires_grad]
    assert_same(gradients(decoder(x), wanted, 1), gradients(expected_output(decoder, x), wanted, 1))


def test_gradient_of_one_tensor_at_a_time_is_the_same():
    decoder, x = make(), tokens()
    y, want_y = decoder(x), expected_output(decoder, x)
    wanted = {"x": x, **dict(decoder.named_parameters())}
    for tensor, want in zip(wanted.values(), gradients(want_y, [*wanted.values()], 1), strict=True):
        torch.testing.assert_close(gradients(y, [tensor], 1)[0], want, **LOOSE)


@pytest.mark.parametrize("depth", range(LAYERS))
def test_gradient_of_an_inner_layer_counts_the_layers_below_it_only(depth):
    decoder, x, seen = make(), tokens(), []
    decoder.layers[depth].register_forward_hook(lambda module, args, out: seen.append(out))
    decoder(x)
    wanted = [x, *decoder.layers[: depth + 1].parameters(), *decoder.shared_mlp.parameters()]
    oracle = DecoderOracle(dict(decoder.named_parameters()), D, H, depth + 1)
    want = oracle.run(x, torch.ones(B, T, dtype=torch.bool))[0]
    assert_same(gradients(seen[0], wanted, 1), gradients(want, wanted, 1))


@pytest.mark.parametrize("kind", KINDS)
def test_recomputed_layers_give_the_same_gradient(kind):
    decoder, x = make(**KINDS[kind]), tokens()
    wanted = [x, *decoder.parameters()]
    want = gradients(expected_output(decoder, x, **KINDS[kind]), wanted, 1)
    for layer in decoder.layers:
        plain = layer.forward
        layer.forward = lambda *args, plain=plain: checkpoint(plain, *args, use_reentrant=False)
    assert_same(gradients(decoder(x), wanted, 1), want)


@pytest.mark.parametrize("share", [True, False], ids=["shared", "independent"])
@pytest.mark.parametrize("kind", KINDS)
def test_values_are_the_same_with_and_without_gradients(kind, share):
    decoder, x = make(share, **KINDS[kind]), tokens()
    for guard in (torch.no_grad, torch.inference_mode):
        with guard():
            y = decoder(x)
        torch.testing.assert_close(y, decoder(x).detach(), **TIGHT)  # one road fuses and multiplies in another order
