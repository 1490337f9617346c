"""The decoder stack against its equations: sharing, causality, padding, cached decoding, copies and refusals."""

import copy
import io
import itertools
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.oracles.compare import (
    MODES,
    SEEDS,
    TIGHT,
    LargestTensor,
    assert_same_with_gradients,
    examples,
    generator_options,
    gradients,
    padding,
    randomized,
    sizes,
)
from tests.oracles.damcha import DecoderOracle
from zoo.attention import Masks, StructuredMLPForM
from zoo.errors import ZooError
from zoo.models.decoder import Decoder, DecoderCache

PADDINGS = st.sampled_from(["none", "left", "right", "scattered"])
INDEPENDENT = {"share_mlp": False}
STATIC = {"share_mlp": False, "use_mlp": False}
ORDINARY = {"share_mlp": False, "use_mlp": False, "use_M": False}
# Every mode with a shared and with independent generators, and the two decoders that have none.
SHARED_KINDS = {f"{mode}, shared": options for mode, options in MODES.items()}
INDEPENDENT_KINDS = {f"{mode}, independent": {**INDEPENDENT, **options} for mode, options in MODES.items()}
WITH_METRIC = {**SHARED_KINDS, **INDEPENDENT_KINDS, "static": STATIC}
KINDS = {**WITH_METRIC, "ordinary": ORDINARY}
FEW_KINDS = {"shared": {}, "independent": INDEPENDENT, "static": STATIC, "ordinary": ORDINARY}


def make(H=3, dh=2, seed=0, n_layers=2, dtype=torch.float64, **options):
    arguments = {"dropout": 0.0, "mlp_hidden": (4, 3), **options}
    return randomized(Decoder(H * dh, H, 5, n_layers, **arguments), seed, dtype).eval()


def tokens(B, T, D=6, seed=0, dtype=torch.float64):
    return torch.randn(B, T, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def oracle_of(decoder, H, switches, options, alphas=None, norm_first=False):
    parameters = dict(decoder.named_parameters())
    shape = (decoder.d_model, H, len(decoder.layers))
    return DecoderOracle(parameters, *shape, **switches, options=options, norm_first=norm_first, alphas=alphas)


def split(kind):
    """The switches of a kind, and the rest of its options."""
    options = dict(KINDS[kind])
    switches = {name: options.pop(name) for name in ("share_mlp", "use_mlp", "use_M") if name in options}
    return switches, options


# ---------------------------------------------------------------------- values and gradients


@pytest.mark.parametrize("norm_first", [False, True], ids=["post-norm", "pre-norm"])
@pytest.mark.parametrize("kind", KINDS)
@examples(6)
@given(data=st.data(), size=sizes(max_heads=2), n_layers=st.integers(1, 3), pad=PADDINGS, seed=SEEDS)
def test_decoder_follows_its_equations(kind, norm_first, data, size, n_layers, pad, seed):
    B, T, H, dh = size
    switches, _ = split(kind)
    mode = kind.split(",")[0]
    options = data.draw(generator_options(mode)) if mode in MODES else {}
    decoder = make(H, dh, seed, n_layers, norm_first=norm_first, **switches, **options)
    oracle = oracle_of(decoder, H, switches, options, norm_first=norm_first)
    real = padding(B, T, seed, pad)
    x = tokens(B, T, H * dh, seed).masked_fill(~real.unsqueeze(-1), float("nan")).requires_grad_()
    expected = oracle.run(x, real)[0]
    actual = decoder(x, None if pad == "none" else real)
    # Layer norms over one or two nearly equal entries divide by a small deviation, three layers deep: a few more
    # digits go than in one layer.
    assert_same_with_gradients(actual, expected, {"x": x, **oracle.params}, seed, rtol=1e-8, atol=1e-9)
    with torch.no_grad():  # another road
        torch.testing.assert_close(decoder(x, None if pad == "none" else real), expected, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("share", [True, False])
@examples(6)
@given(size=sizes(max_heads=3), seed=SEEDS)
def test_bayesian_draws_one_sample_a_generator_while_training(share, size, seed):
    B, T, H, dh = size
    options = {"off_diag_mode": "bayesian"}
    decoder, x = make(H, dh + 2, seed, share_mlp=share, **options).train(), tokens(B, T, H * (dh + 2), seed)
    # Without dropout the coefficients are all that is drawn: the shared generator's, or each layer's in turn.
    torch.manual_seed(seed)
    actual = decoder(x.requires_grad_())
    torch.manual_seed(seed)
    generators = [decoder.shared_mlp] if share else [layer.attention.generator for layer in decoder.layers]
    alphas = [
        g.alpha_mu + torch.exp(g.alpha_logvar / 2) * torch.randn(H, H, H, dtype=torch.float64) for g in generators
    ]
    oracle = oracle_of(decoder, H, {"share_mlp": share}, options, alphas)
    expected = oracle.run(x, torch.ones(B, T, dtype=torch.bool))[0]
    # As above: layer norms lose a few digits.
    assert_same_with_gradients(actual, expected, {"x": x, **oracle.params}, seed, rtol=1e-8, atol=1e-9)


# ---------------------------------------------------------------------- causality and padding


@pytest.mark.parametrize("norm_first", [False, True], ids=["post-norm", "pre-norm"])
@pytest.mark.parametrize("kind", KINDS)
@examples(4)
@given(T=st.integers(1, 8), data=st.data(), seed=SEEDS)
def test_position_ignores_future_tokens(kind, norm_first, T, data, seed):
    decoder, x = make(seed=seed, norm_first=norm_first, **KINDS[kind]), tokens(2, T, seed=seed)
    t = data.draw(st.integers(0, T - 1))
    other = x.clone()
    other[:, t + 1 :] = 10 * tokens(2, T, seed=seed + 1)[:, t + 1 :]
    with torch.no_grad():
        y, changed, short = decoder(x), decoder(other), decoder(x[:, : t + 1])
    # Bit for bit: running sums and row-wise products of one shape, and future keys weigh exp(-inf) = 0 exactly.
    assert torch.equal(y[:, : t + 1], changed[:, : t + 1])
    # A shorter input may take kernels that sum in another order.
    torch.testing.assert_close(short, y[:, : t + 1], **TIGHT)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pad", ["left", "right", "scattered"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e300])
def test_padding_values_never_leak(kind, pad, value):
    decoder, real = make(norm_first=pad == "left", **KINDS[kind]), padding(3, 5, 7, pad)
    assert not real.all()
    clean = tokens(3, 5).requires_grad_()
    spoiled = clean.detach().masked_fill(~real.unsqueeze(-1), value).requires_grad_()
    y, other = decoder(spoiled, real), decoder(clean, real)
    # Hidden values are replaced before anything is computed with them, so not a bit may differ.
    assert torch.equal(y, other)
    assert y.isfinite().all()
    assert (y[~real] == 0).all()
    assert (y[real] != 0).any()
    got = gradients(y, [spoiled, *decoder.parameters()], 0)
    for a, b in zip(got, gradients(other, [clean, *decoder.parameters()], 0), strict=True):
        assert torch.equal(a, b)
        assert a.isfinite().all()
    assert (got[0][~real] == 0).all()
    assert (got[0][real] != 0).any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_sequence_gives_what_the_sequence_alone_gives(kind, side):
    decoder, x = make(**KINDS[kind]), tokens(2, 4)
    filler = torch.full((2, 3, 6), float("nan"), dtype=torch.float64)
    parts = [filler, x] if side == "left" else [x, filler]
    real = torch.cat([torch.full(part.shape[:2], part is x) for part in parts], 1)
    y = decoder(torch.cat(parts, 1), real)
    # The padded input takes the masked kernel and longer sums with zeros.
    torch.testing.assert_close(y[real].view(2, 4, 6), decoder(x), **TIGHT)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.float32])
@pytest.mark.parametrize("kind", FEW_KINDS)
def test_padding_mask_of_numbers_means_non_zero_is_real(kind, dtype):
    decoder, x, real = make(**FEW_KINDS[kind]), tokens(3, 5), padding(3, 5, 7, "left")
    assert torch.equal(decoder(x, real.to(dtype) * 2), decoder(x, real))
    assert not torch.allclose(decoder(x, real)[real], decoder(x)[real])


# ---------------------------------------------------------------------- sharing


@pytest.mark.parametrize("kind", SHARED_KINDS)
@pytest.mark.parametrize("grad", [True, False])
def test_shared_generator_is_evaluated_once_a_forward_pass(kind, grad):
    decoder, calls = make(n_layers=3, **KINDS[kind]), []
    decoder.shared_mlp.hidden.register_forward_hook(lambda *_: calls.append(1))
    with torch.set_grad_enabled(grad):
        decoder(tokens(2, 4))
        assert len(calls) == 1
        decoder(tokens(2, 4))
        assert len(calls) == 2


def test_independent_generators_are_evaluated_once_each():
    decoder, calls = make(n_layers=3, **INDEPENDENT), []
    for n, layer in enumerate(decoder.layers):
        layer.attention.generator.hidden.register_forward_hook(lambda *_, n=n: calls.append(n))
    decoder(tokens(2, 4))
    assert calls == [0, 1, 2]


@pytest.mark.parametrize("kind", SHARED_KINDS)
def test_shared_parameters_are_registered_once(kind):
    decoder = make(**KINDS[kind])
    names = [name for name in decoder.state_dict() if "generator" in name or "shared_mlp" in name]
    assert names
    assert all(name.startswith("shared_mlp.") for name in names)
    everything = list(decoder.named_parameters(remove_duplicate=False))
    assert len(everything) == len({id(p) for _, p in everything})


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_exists_from_construction_on(kind):
    decoder = Decoder(6, 3, 5, 2, mlp_hidden=(4,), **KINDS[kind])
    before = {name: value.shape for name, value in decoder.state_dict().items()}
    decoder(tokens(2, 3, dtype=torch.float32), torch.ones(2, 3, dtype=torch.bool))
    assert {name: value.shape for name, value in decoder.state_dict().items()} == before


@pytest.mark.parametrize("kind", ["mlp, shared", "mlp, independent", "layer_bias, shared", "static", "ordinary"])
def test_training_reaches_every_parameter(kind):
    decoder = make(**KINDS[kind])
    parameters = dict(decoder.named_parameters())
    # The key's bias shifts all scores of a query alike, so softmax takes it out.
    reached = {name: p for name, p in parameters.items() if not name.endswith("W_k.bias")}
    for name, grad in zip(reached, gradients(decoder(tokens(2, 4)), [*reached.values()], 0), strict=True):
        assert (grad != 0).any(), name


@pytest.mark.parametrize("kind", FEW_KINDS)
def test_conversion_reaches_every_parameter(kind):
    decoder, x = make(dtype=torch.float32, **FEW_KINDS[kind]), tokens(2, 4, dtype=torch.float32)
    before = decoder(x)
    decoder.to(torch.float64)
    assert all(p.dtype == torch.float64 for p in decoder.parameters())
    # The same float32 numbers computed more exactly: float32 rounding through two layers of order-one values.
    torch.testing.assert_close(decoder(x.double()).float(), before, rtol=1e-3, atol=1e-4)


def through_pickle(decoder):
    return pickle.loads(pickle.dumps(decoder))


def through_save(decoder):
    buffer = io.BytesIO()
    torch.save(decoder, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, through_pickle, through_save])
@pytest.mark.parametrize("guard", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("kind", SHARED_KINDS)
def test_copy_keeps_one_generator_shared_between_its_layers(kind, guard, duplicate):
    decoder, x = make(n_layers=3, **KINDS[kind]), tokens(2, 4)
    with guard():
        expected = decoder(x)  # something is kept from this pass
    twin = duplicate(decoder)
    assert twin.shared_mlp is not decoder.shared_mlp
    assert all(layer.attention.metric_generator is twin.shared_mlp for layer in twin.layers)
    with torch.no_grad():
        # The kept weights may come from another operation order than those fused with gradients on: none known, but
        # not promised.
        torch.testing.assert_close(twin(x), expected.detach(), **TIGHT)
        for parameter in twin.shared_mlp.parameters():
            parameter.data.copy_(parameter.data * 2 + 0.1)
        twin.eval()
        changed = twin(x)
        assert not torch.allclose(changed, expected)
        # Each layer of the copy, called alone, generates from the changed generator too.
        for layer in twin.layers:
            want, _ = layer.attention(x, Masks(causal=True))
            layer.attention._shared[0].out.bias.add_(1)
            assert not torch.allclose(layer.attention(x, Masks(causal=True))[0], want)
        torch.testing.assert_close(decoder(x), expected.detach(), **TIGHT)


def test_multihead_flag_changes_nothing():
    twins = []
    for flag in (True, False):
        torch.manual_seed(0)
        twins.append(Decoder(6, 3, 5, 2, 0.0, mlp_hidden=(4,), use_multihead_M=flag))
    assert list(twins[0].state_dict()) == list(twins[1].state_dict())
    x = tokens(2, 4, dtype=torch.float32)
    assert torch.equal(twins[0](x), twins[1](x))


# ---------------------------------------------------------------------- cached decoding


@pytest.mark.parametrize("kind", KINDS)
@examples(8)
@given(
    T=st.integers(1, 8),
    cuts=st.sets(st.integers(1, 7)),
    pad=st.sampled_from(["none", "left", "scattered", "left, then none given"]),
    spare=st.integers(0, 3),
    norm_first=st.booleans(),
    seed=SEEDS,
)
def test_cached_decoding_gives_the_uncached_output(kind, T, cuts, pad, spare, norm_first, seed):
    decoder, x = make(seed=seed, norm_first=norm_first, **KINDS[kind]), tokens(2, T, seed=seed)
    edges = [0, *sorted(c for c in cuts if c < T), T]
    real = padding(2, T, seed, pad.split(",")[0])
    if pad == "left, then none given":  # a prompt padded on its left, then new tokens, all of them real
        real[:, edges[1] :] = True
    x = x.masked_fill(~real.unsqueeze(-1), float("nan"))
    cache, parts = DecoderCache(decoder, T + spare), []
    with torch.no_grad():
        whole = decoder(x, None if pad == "none" else real)
        for start, end in itertools.pairwise(edges):
            mask = None if pad == "none" or (start and pad.endswith("given")) else real[:, start:end]
            parts.append(decoder(x[:, start:end], mask, cache=cache))
            assert cache.length == end
    # The context's sum is grouped otherwise and scores take other kernels; a few more digits go in the layer norms.
    torch.testing.assert_close(torch.cat(parts, 1), whole, **TIGHT)


@pytest.mark.parametrize("kind", ["mlp, shared", "linear_comb, shared", "mlp, independent"])
def test_cached_decoding_sums_the_output_map_once_a_generator(kind, monkeypatch):
    calls, original = [], StructuredMLPForM._fuse

    def counted(self):
        calls.append(self)
        return original(self)

    monkeypatch.setattr(StructuredMLPForM, "_fuse", counted)
    decoder = make(**KINDS[kind])
    cache = DecoderCache(decoder, 6)
    with torch.inference_mode():
        for t in range(6):
            decoder(tokens(2, 1, seed=t), cache=cache)
    generators = [m for m in decoder.modules() if isinstance(m, StructuredMLPForM)]
    assert len(calls) == len(generators) == (1 if "shared" in kind else 2)


def test_cache_that_is_full_says_so():
    decoder = make()
    cache = DecoderCache(decoder, 3)
    decoder(tokens(1, 3), cache=cache)
    with pytest.raises(ZooError, match=r"cache.*4.*capacity of 3"):
        decoder(tokens(1, 1), cache=cache)


@pytest.mark.parametrize("n_layers", [1, 3])
def test_cache_for_another_depth_is_refused(n_layers):
    with pytest.raises(ZooError, match="cache"):
        make(n_layers=2)(tokens(1, 2), cache=DecoderCache(make(n_layers=n_layers), 4))


def test_cache_of_another_batch_is_refused():
    decoder = make()
    cache = DecoderCache(decoder, 4)
    decoder(tokens(2, 2), cache=cache)
    with pytest.raises(ZooError, match="cache"):
        decoder(tokens(1, 1), cache=cache)


# ---------------------------------------------------------------------- looking in, and KL


@pytest.mark.parametrize("norm_first", [False, True], ids=["post-norm", "pre-norm"])
@pytest.mark.parametrize("pad", ["none", "left", "right"])
@pytest.mark.parametrize("kind", WITH_METRIC)
def test_matrices_are_the_full_metrics_of_the_final_prefix_averaged_over_the_batch(kind, pad, norm_first):
    switches, options = split(kind)
    decoder, x, real = make(norm_first=norm_first, **KINDS[kind]), tokens(3, 4), padding(3, 4, 7, pad)
    decoder(x, None if pad == "none" else real)
    matrices = decoder.get_M_matrices()
    assert [name for name, _ in matrices] == ["layer_0", "layer_1"]
    with torch.no_grad():
        expected = oracle_of(decoder, 3, switches, options, norm_first=norm_first).final_matrices(x, real)
    for (_, got), want in zip(matrices, expected, strict=True):
        torch.testing.assert_close(got, want, **TIGHT)
        assert not got.requires_grad
    # The last batch is the one that counts.
    decoder(tokens(3, 4, seed=9))
    for (_, got), (_, old) in zip(decoder.get_M_matrices(), matrices, strict=True):
        assert torch.allclose(got, old) == (kind == "static")


@pytest.mark.parametrize("kind", [kind for kind in WITH_METRIC if kind != "static"])
def test_matrices_before_a_forward_pass_are_a_clear_error(kind):
    with pytest.raises(ZooError, match="forward pass"):
        make(**KINDS[kind]).get_M_matrices()


def test_ordinary_decoder_has_no_matrices():
    decoder = make(**ORDINARY)
    decoder(tokens(1, 2))
    assert decoder.get_M_matrices() == []


@pytest.mark.parametrize("kind", KINDS)
def test_kl_is_the_sum_over_the_generators(kind):
    decoder = make(**KINDS[kind])
    expected = torch.zeros((), dtype=torch.float64)
    for name, mu in decoder.named_parameters():
        if name.endswith("alpha_mu"):
            logvar = decoder.get_parameter(name.replace("alpha_mu", "alpha_logvar"))
            for i in range(3):
                for j in range(3):
                    if i != j:
                        expected = expected + ((logvar[i, j].exp() + mu[i, j] ** 2 - 1 - logvar[i, j]) / 2).sum()
    torch.testing.assert_close(decoder.get_kl_divergence(), expected, **TIGHT)
    assert (expected > 0) == ("bayesian" in kind)


# ---------------------------------------------------------------------- memory, precision, dropout


@pytest.mark.parametrize("kind", ["mlp, shared", "layer_bias, shared", "mlp, independent"])
def test_no_full_matrix_is_made_for_each_token(kind):
    T, D, H = 64, 32, 4
    decoder = make(H, D // H, mlp_hidden=(16,), **KINDS[kind])
    x = tokens(1, T, D).requires_grad_()
    with LargestTensor() as forward:
        y = decoder(x)
    with LargestTensor() as backward:
        y.sum().backward()
    # Generator weight D D 16, head metrics T H dh dh and scores H T T: all 16384, a quarter of T D D.
    assert forward.numel <= 16384
    assert backward.numel <= 16384
    assert T * D * D > 16384
    assert backward.operations > 40  # the backward pass was watched indeed


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("padded", [True, False])
def test_autocast_to_bfloat16_stays_finite(kind, padded):
    decoder, x = make(dtype=torch.float32, **KINDS[kind]), tokens(2, 5, dtype=torch.float32).requires_grad_()
    real = padding(2, 5, 1, "left") if padded else None
    with torch.autocast("cpu", torch.bfloat16):
        y = decoder(x, real)
    assert y.isfinite().all()
    assert (y != 0).any()
    grads = gradients(y, [x, *decoder.parameters()], 0)
    assert all(g.isfinite().all() for g in grads)
    assert (grads[0] != 0).any()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        cache = DecoderCache(decoder, 5)
        parts = [
            decoder(x[:, a:b], None if real is None else real[:, a:b], cache=cache) for a, b in ((0, 3), (3, 4), (4, 5))
        ]
    # A few dozen roundings to bfloat16 (2^-9 each), spread further by two layer norms of six entries each.
    torch.testing.assert_close(torch.cat(parts, 1).float(), y.detach().float(), rtol=0.1, atol=0.25)


@pytest.mark.parametrize("kind", ["mlp, shared", "mlp, independent", "linear_comb, shared"])
def test_evaluation_under_autocast_does_not_spoil_full_precision(kind):
    decoder, x = make(dtype=torch.float32, **KINDS[kind]), tokens(2, 5, dtype=torch.float32)
    expected = decoder(x).detach()
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            decoder(x)
        # Float32 through two layers of order-one values; weights rounded to bfloat16 would be off by 1e-3 or more.
        torch.testing.assert_close(decoder(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", FEW_KINDS)
def test_dropout_acts_in_training_only(kind):
    decoder, x = make(dropout=0.5, **FEW_KINDS[kind]), tokens(2, 5)
    assert torch.equal(decoder(x), decoder(x))
    decoder.train()
    assert not torch.allclose(decoder(x), decoder(x))


@pytest.mark.parametrize("norm_first", [False, True], ids=["post-norm", "pre-norm"])
@pytest.mark.parametrize("branch", ["attention", "feed_forward"])
def test_dropout_acts_on_each_branch_before_it_is_added(branch, norm_first):
    decoder, x = make(n_layers=1, norm_first=norm_first), tokens(2, 5)
    layer, other = decoder.layers[0], "feed_forward" if branch == "attention" else "attention"
    with torch.no_grad():  # leave one branch only, so that only its dropout can show
        for parameter in (layer.attention.out_proj if other == "attention" else layer.feed_forward[3]).parameters():
            parameter.zero_()
    layer.dropout.p = 0.5
    assert torch.equal(decoder(x), decoder(x))
    decoder.train()
    assert not torch.allclose(decoder(x), decoder(x))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.startswith("bayesian")])
def test_without_dropout_training_gives_what_evaluation_gives(kind):
    decoder, x = make(**KINDS[kind]), tokens(2, 5)
    expected = decoder(x)
    assert torch.equal(decoder.train()(x), expected)  # the same operations


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"n_heads": 4}, "n_heads"),
        ({"d_ff": 0}, "d_ff"),
        ({"n_layers": 0}, "n_layers"),
        ({"dropout": 1.0}, "dropout"),
        ({"dropout": -0.1}, "dropout"),
        ({"use_M": False}, "use_mlp"),
        ({"use_M": False, "use_mlp": False}, "share_mlp"),
        ({"use_mlp": False}, "share_mlp"),
        ({"off_diag_mode": "nonsense"}, "off_diag_mode"),
        ({"off_diag_mode": "nonsense", **INDEPENDENT}, "off_diag_mode"),
        ({"mlp_hidden": (0,)}, "hidden"),
        ({"compact_rank": -1}, "compact_rank"),
        ({"compact_rank": 2, "off_diag_mode": "bayesian"}, "compact_rank"),
        ({"use_layer_bias": True, "layer_bias_rank": 0}, "layer_bias_rank"),
        *(
            ({**switches, option: value}, option)
            for switches in (STATIC, ORDINARY)
            for option, value in {
                "off_diag_mode": "linear_comb",
                "diag_scale": 0.5,
                "off_diag_scale": 0.5,
                "use_layer_bias": True,
                "compact_rank": 2,
                "free_M": True,
            }.items()
        ),
    ],
)
def test_nonsense_is_refused_by_name(arguments, name):
    with pytest.raises(ZooError, match=name):
        Decoder(**{"d_model": 6, "n_heads": 3, "d_ff": 5, "n_layers": 2, **arguments})


@pytest.mark.parametrize("kind", FEW_KINDS)
def test_unknown_option_is_refused(kind):
    with pytest.raises((TypeError, ZooError), match="diagscale"):
        Decoder(6, 3, 5, 2, diagscale=2.0, **FEW_KINDS[kind])


@pytest.mark.parametrize("kind", FEW_KINDS)
@pytest.mark.parametrize("shape", [(4, 6), (2, 4, 5), (1, 2, 4, 6)])
def test_input_of_another_shape_is_refused(kind, shape):
    with pytest.raises(ZooError, match="x: got shape"):
        make(**FEW_KINDS[kind])(torch.ones(shape, dtype=torch.float64))


@pytest.mark.parametrize("kind", FEW_KINDS)
@pytest.mark.parametrize("shape", [(4,), (4, 2), (1, 4), (2, 5), (2, 4, 1)])
def test_padding_mask_of_another_shape_is_refused(kind, shape):
    with pytest.raises(ZooError, match="padding_mask: got shape"):
        make(**FEW_KINDS[kind])(tokens(2, 4), torch.ones(shape, dtype=torch.bool))
