"""The generator of DAMCHA's metric against its equations, and what it promises about memory and its kept weights."""

import copy
import itertools
import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.oracles.compare import (
    MODES,
    SEEDS,
    TIGHT,
    LargestTensor,
    assert_same_with_gradients,
    examples,
    generator_options,
    padding,
    randomized,
    sizes,
)
from tests.oracles.damcha import GeneratorOracle, context, row_sums
from zoo.attention import PrefixState, StructuredMLPForM
from zoo.attention.damcha.contexts import mean_context, prefix_mean_context
from zoo.errors import ZooError

PADDINGS = st.sampled_from(["none", "left", "right", "scattered"])
HIDDEN = st.sampled_from([(), (3,), (4, 3)])


def make(H, dh, seed=0, hidden=(4, 3), dtype=torch.float64, **options):
    generator = StructuredMLPForM(H * dh, H, hidden, **{"n_layers": 3, "dropout": 0.0, **options})
    return randomized(generator, seed, dtype).eval()


def oracle_of(generator, H, alpha=None, **options):
    return GeneratorOracle(dict(generator.named_parameters()), generator.d_model, H, alpha=alpha, **options)


def stacked_metrics(oracle, x, real, causal, layer):
    """(B, H, dh, dh), or (B, T, H, dh, dh) if causal."""
    metrics, (B, T, _) = oracle.metrics(x, real, causal, layer), x.shape
    if not causal:
        return torch.stack([torch.stack(metrics(b, 0)) for b in range(B)])
    return torch.stack([torch.stack([torch.stack(metrics(b, t)) for t in range(T)]) for b in range(B)])


# ---------------------------------------------------------------------- values and gradients


@pytest.mark.parametrize("mode", MODES)
@examples(8)
@given(data=st.data(), size=sizes(), hidden=HIDDEN, seed=SEEDS)
def test_full_metric_follows_its_equations(mode, data, size, hidden, seed):
    B, T, H, dh = size
    options, layer = data.draw(generator_options(mode)), data.draw(st.integers(0, 2))
    generator = make(H, dh, seed, hidden, **options)
    c = torch.randn(B, T, H * dh, dtype=torch.float64, requires_grad=True)
    oracle = oracle_of(generator, H, **options)
    expected = torch.stack([torch.stack([oracle.matrix(c[b, t], layer) for t in range(T)]) for b in range(B)])
    assert_same_with_gradients(generator(c, layer), expected, {"context": c, **oracle.params}, seed)


@pytest.mark.parametrize("mode", MODES)
@examples(12)
@given(data=st.data(), size=sizes(), hidden=HIDDEN, causal=st.booleans(), kind=PADDINGS, seed=SEEDS)
def test_head_metrics_are_the_block_row_sums_of_the_full_metric(mode, data, size, hidden, causal, kind, seed):
    B, T, H, dh = size
    options, layer = data.draw(generator_options(mode)), data.draw(st.sampled_from([0, 1, 2, None]))
    generator = make(H, dh, seed, hidden, **options)
    x = torch.randn(B, T, H * dh, dtype=torch.float64, requires_grad=True)
    real = padding(B, T, seed, kind)
    oracle = oracle_of(generator, H, **options)

    def compared(m):  # padding has no block of its own, so its metrics are those of any
        return m * real.view(B, T, 1, 1, 1) if causal and options["context_stride"] > 1 else m

    actual = compared(generator.head_metrics(x, causal, None if kind == "none" else real, layer))
    expected = compared(stacked_metrics(oracle, x, real, causal, layer))
    assert_same_with_gradients(actual, expected, {"x": x, **oracle.params}, seed)
    with torch.no_grad():  # the kept weights give the same
        kept = compared(generator.head_metrics(x, causal, None if kind == "none" else real, layer))
    torch.testing.assert_close(kept, expected, **TIGHT)


@examples(8)
@given(data=st.data(), size=sizes(), causal=st.booleans(), seed=SEEDS)
def test_bayesian_uses_one_reparametrised_sample_while_training(data, size, causal, seed):
    B, T, H, dh = size
    options = data.draw(generator_options("bayesian"))
    generator = make(H, dh, seed, **options).train()
    x = torch.randn(B, T, H * dh, dtype=torch.float64, requires_grad=True)
    # Without dropout the coefficients are all that is drawn, so the same seed gives the same eps.
    torch.manual_seed(seed)
    actual = generator.head_metrics(x, causal)
    torch.manual_seed(seed)
    eps = torch.randn(H, H, H, dtype=torch.float64)
    alpha = generator.alpha_mu + torch.exp(generator.alpha_logvar / 2) * eps
    oracle = oracle_of(generator, H, alpha, **options)
    expected = stacked_metrics(oracle, x, torch.ones(B, T, dtype=torch.bool), causal, 0)
    assert_same_with_gradients(actual, expected, {"x": x, **oracle.params}, seed)

    torch.manual_seed(seed)
    full = generator(x[:, 0])
    expected = torch.stack([oracle.matrix(x[b, 0]) for b in range(B)])
    assert_same_with_gradients(full, expected, {"x": x, **oracle.params}, seed)


@pytest.mark.parametrize("grad", [True, False])
def test_bayesian_samples_anew_at_every_call_in_training_and_never_in_eval(grad):
    generator, x = make(3, 2, off_diag_mode="bayesian"), torch.randn(1, 4, 6, dtype=torch.float64)
    with torch.set_grad_enabled(grad):
        assert torch.equal(generator.head_metrics(x), generator.head_metrics(x))
        generator.train()
        assert not torch.equal(generator.head_metrics(x), generator.head_metrics(x))


@examples(20)
@given(size=sizes(max_tokens=6), kind=PADDINGS, causal=st.booleans(), seed=SEEDS)
def test_context_is_the_mean_of_the_real_tokens(size, kind, causal, seed):
    B, T, H, dh = size
    torch.manual_seed(seed)
    x = torch.randn(B, T, H * dh, dtype=torch.float64, requires_grad=True)
    real = padding(B, T, seed, kind)
    mask = None if kind == "none" else real
    if causal:
        actual = prefix_mean_context(x, mask)
        expected = torch.stack(
            [torch.stack([context(x[b, : t + 1], real[b, : t + 1].tolist()) for t in range(T)]) for b in range(B)]
        )
    else:
        actual = mean_context(x, mask)
        expected = torch.stack([context(x[b], real[b].tolist()) for b in range(B)])
    assert_same_with_gradients(actual, expected, {"x": x}, seed)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("causal", [True, False])
def test_padding_values_never_reach_the_context_or_its_gradient(value, causal):
    real = padding(3, 5, 1, "scattered")
    real[0] = False
    x = torch.randn(3, 5, 4, dtype=torch.float64)
    mean = prefix_mean_context if causal else mean_context
    spoiled = x.masked_fill(~real.unsqueeze(-1), value).requires_grad_()
    # Hidden values are replaced before anything is computed with them, so not a bit may differ.
    assert torch.equal(mean(spoiled, real), mean(x, real))
    (grad,) = torch.autograd.grad(mean(spoiled, real).sum(), spoiled)
    assert grad.isfinite().all()
    assert (grad[~real] == 0).all()
    assert (mean(spoiled, real)[0] == 0).all()  # a row without a real token


@examples(12)
@given(T=st.integers(1, 7), cuts=st.sets(st.integers(1, 6)), kind=PADDINGS, seed=SEEDS)
def test_prefix_goes_on_from_its_state(T, cuts, kind, seed):
    torch.manual_seed(seed)
    x, real = torch.randn(2, T, 3, dtype=torch.float64), padding(2, T, seed, kind)
    mask = None if kind == "none" else real
    state, parts = PrefixState(), []
    edges = [0, *sorted(c for c in cuts if c < T), T]
    for start, end in itertools.pairwise(edges):
        parts.append(prefix_mean_context(x[:, start:end], None if mask is None else mask[:, start:end], state))
    # One addition is grouped otherwise than in the unbroken running sum.
    torch.testing.assert_close(torch.cat(parts, dim=1), prefix_mean_context(x, mask), **TIGHT)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_bfloat16_context_of_4096_tokens_is_accumulated_in_float32(causal, padded):
    torch.manual_seed(0)
    generator = StructuredMLPForM(4, 2, (4,), 0.0).to(torch.bfloat16).eval()
    x = (1 + 0.5 * torch.randn(2, 4096, 4)).to(torch.bfloat16)
    real = torch.rand(2, 4096) < 0.7 if padded else None
    seen = []
    generator.hidden.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    generator.head_metrics(x, causal, real)
    weight = torch.ones(2, 4096, 1, dtype=torch.float64) if real is None else real.double().unsqueeze(-1)
    exact = (x.double() * weight).sum(1) / weight.sum(1)
    assert seen[0].dtype == torch.bfloat16
    last = seen[0][:, -1] if causal else seen[0]
    # One rounding of the finished mean to bfloat16 (8 bits: 2^-9 relative) and float32 sums; 2^-8 is twice that. A
    # bfloat16 running sum of ones stops at 256, which would be off by a factor of 16.
    torch.testing.assert_close(last.double(), exact, rtol=2**-8, atol=0)


def test_bfloat16_prefix_state_stays_float32():
    state = PrefixState()
    x = torch.ones(1, 300, 2, dtype=torch.bfloat16)
    for t in range(300):
        last = prefix_mean_context(x[:, t : t + 1], None, state)
    assert state.total.dtype == torch.float32
    assert (state.total == 300).all()
    assert (last == 1).all()


# ---------------------------------------------------------------------- construction


def test_parameters_start_as_the_method_says():
    torch.manual_seed(0)
    H, D = 12, 24
    coefficients = StructuredMLPForM(D, H, (), off_diag_mode="linear_comb", off_diag_alpha_init=0.1).alpha
    bayesian = StructuredMLPForM(D, H, (), off_diag_mode="bayesian", off_diag_alpha_init=0.3)
    B = StructuredMLPForM(D, H, (), off_diag_mode="separate_B").B
    assert coefficients.shape == bayesian.alpha_mu.shape == bayesian.alpha_logvar.shape == (H, H, H)
    assert B.shape == (H, D // H, D)
    assert (bayesian.alpha_logvar == -4).all()
    # The standard deviation of n normal draws is off by 1 / sqrt(2 n): 1.7 % for 1728, 2.9 % for 576; six times that.
    assert coefficients.std().item() == pytest.approx(0.1, rel=0.1)
    assert bayesian.alpha_mu.std().item() == pytest.approx(0.3, rel=0.1)
    assert B.std().item() == pytest.approx(0.01, rel=0.18)

    biased = StructuredMLPForM(24, 12, (), use_layer_bias=True, n_layers=4)
    for factor in (biased.bias_U, biased.bias_V):
        assert factor.shape == (24, 16)
        # Orthogonal with gain 0.1; float32 QR.
        torch.testing.assert_close(factor.T @ factor, 0.01 * torch.eye(16), rtol=0, atol=1e-6)
    assert biased.bias_scale.shape == (4, 16)
    wide = StructuredMLPForM(24, 12, (), use_layer_bias=True, n_layers=4, layer_bias_rank=2000).bias_scale
    for n in range(4):
        assert wide[n].std().item() == pytest.approx(0.1 * (1 + 0.2 * n), rel=0.1)  # 1.6 % expected, six times that


@pytest.mark.parametrize("mode", MODES)
def test_every_parameter_exists_from_construction_on(mode):
    generator = StructuredMLPForM(6, 3, (4,), **MODES[mode])
    before = {name: value.shape for name, value in generator.state_dict().items()}
    generator.head_metrics(torch.randn(2, 3, 6), causal=True)
    generator(torch.randn(2, 6))
    assert {name: value.shape for name, value in generator.state_dict().items()} == before
    assert not any(isinstance(m, nn.modules.lazy.LazyModuleMixin) for m in generator.modules())


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"n_heads": 5}, "n_heads"),
        ({"n_heads": 0}, "n_heads"),
        ({"d_model": 0}, "d_model"),
        ({"off_diag_mode": "nonsense"}, "off_diag_mode"),
        ({"hidden_dims": (4, 0)}, "hidden_dims"),
        ({"compact_rank": -1}, "compact_rank"),
        ({"compact_rank": 2, "off_diag_mode": "linear_comb"}, "compact_rank"),
        ({"compact_rank": 2, "off_diag_mode": "bayesian"}, "compact_rank"),
        ({"compact_rank": 2, "off_diag_mode": "separate_B"}, "compact_rank"),
        ({"use_layer_bias": True, "layer_bias_rank": 0}, "layer_bias_rank"),
        ({"use_layer_bias": True, "n_layers": 0}, "n_layers|layers"),
        ({"dropout": 1.5}, "dropout"),
        ({"dropout": -0.1}, "dropout"),
    ],
)
def test_nonsense_is_refused_by_name(arguments, name):
    with pytest.raises(ZooError, match=name):
        StructuredMLPForM(**{"d_model": 6, "n_heads": 3, "hidden_dims": (4,), **arguments})


@pytest.mark.parametrize("layer", [-1, 3])
def test_layer_without_a_bias_of_its_own_is_refused(layer):
    generator = make(3, 2, use_layer_bias=True)
    with pytest.raises(ZooError, match="layer_idx"):
        generator.head_metrics(torch.randn(1, 2, 6, dtype=torch.float64), layer_idx=layer)


@pytest.mark.parametrize("shape", [(6,), (2, 6), (2, 3, 5)])
def test_input_of_another_shape_is_refused(shape):
    with pytest.raises(ZooError, match="x: got"):
        make(3, 2).head_metrics(torch.randn(shape, dtype=torch.float64))


@pytest.mark.parametrize("shape", [(3, 2), (2, 3, 1)])
def test_padding_mask_of_another_shape_is_refused(shape):
    with pytest.raises(ZooError, match="padding_mask"):
        make(3, 2).head_metrics(torch.randn(2, 3, 6, dtype=torch.float64), True, torch.ones(shape, dtype=torch.bool))


# ---------------------------------------------------------------------- memory


@pytest.mark.parametrize("mode", MODES)
def test_causal_metrics_never_make_a_matrix_of_full_width_for_each_token(mode):
    T, D, H = 64, 32, 4
    generator = make(H, D // H, hidden=(16,), **MODES[mode])
    x = torch.randn(1, T, D, dtype=torch.float64, requires_grad=True)
    with LargestTensor() as forward:
        out = generator.head_metrics(x, causal=True)
    with LargestTensor() as backward:
        out.sum().backward()
    # The largest there need be: the generator's last weight (D D 16) or the head metrics (T H dh dh), both 16384.
    assert forward.numel <= 16384 < T * D * D
    assert backward.numel <= 16384
    assert backward.operations > 10  # the backward pass was watched indeed

    with LargestTensor() as full:
        generator(prefix_mean_context(x))
    assert full.numel >= T * D * D  # and a full matrix a token would have been seen


# ---------------------------------------------------------------------- the kept weights


@pytest.fixture
def fused(monkeypatch):
    """Counts how often the output map is summed over block columns."""
    calls, original = [], StructuredMLPForM._fuse

    def counted(self):
        calls.append(self)
        return original(self)

    monkeypatch.setattr(StructuredMLPForM, "_fuse", counted)
    return calls


CACHED_MODES = [mode for mode in MODES if mode != "compact_rank"]  # low rank has no weight to sum


def recomputed(generator, x):
    """Head metrics by way of the full matrix, which keeps nothing."""
    M = generator(mean_context(x))
    return torch.stack([torch.stack(row_sums(one, generator.n_heads)) for one in M])


def assert_up_to_date(generator, x):
    torch.testing.assert_close(generator.head_metrics(x), recomputed(generator, x), **TIGHT)


def inputs(dtype=torch.float64):
    return torch.randn(2, 4, 6, dtype=dtype, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("mode", CACHED_MODES)
def test_output_map_is_fused_once_per_weight_version_without_gradients(mode, guard, fused):
    generator, x = make(3, 2, **MODES[mode]), inputs()
    with guard():
        for _ in range(3):
            generator.head_metrics(x, causal=True)
        assert len(fused) == 1
        generator.out.weight.mul_(2)
        for _ in range(3):
            generator.head_metrics(x)
        assert len(fused) == 2


def test_output_map_is_fused_at_every_call_with_gradients(fused):
    generator, x = make(3, 2), inputs()
    for _ in range(2):
        grads = torch.autograd.grad(generator.head_metrics(x).sum(), generator.out.weight)
        assert grads[0].abs().sum() > 0
    assert len(fused) == 2


def test_kept_weights_made_without_gradients_do_not_cut_them_later():
    generator, x = make(3, 2), inputs()
    for guard in (torch.no_grad, torch.inference_mode):
        with guard():
            generator.head_metrics(x)
        grads = torch.autograd.grad(generator.head_metrics(x).sum(), list(generator.parameters()))
        assert all(g.abs().sum() > 0 for g in grads)


def step(optimizer, **options):
    def update(generator):
        for parameter in generator.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer(generator.parameters(), lr=0.1, **options).step()

    return update


def swap_data(generator):
    for parameter in generator.parameters():
        parameter.data = parameter.data * 2 + 0.1


def load(assign):
    def update(generator):
        generator.load_state_dict({k: v * 2 + 0.1 for k, v in generator.state_dict().items()}, assign=assign)

    return update


def replace_parameter(generator):
    generator.out.weight = nn.Parameter(generator.out.weight.detach() * 2)


def copy_data_and_switch(generator):
    for parameter in generator.parameters():
        parameter.data.copy_(parameter.data * 2 + 0.1)
    generator.train()
    generator.eval()


def copy_data_and_call_eval(generator):
    for parameter in generator.parameters():
        parameter.data.copy_(parameter.data * 2 + 0.1)
    generator.eval()


def in_inference_mode(generator):
    with torch.inference_mode():
        for parameter in generator.parameters():
            parameter.mul_(2).add_(0.1)


def in_place(generator):
    for parameter in generator.parameters():
        with torch.no_grad():
            parameter.mul_(2).add_(0.1)


UPDATES = {
    "in place": in_place,
    "in place, inference mode": in_inference_mode,
    "SGD": step(torch.optim.SGD, foreach=False),
    "SGD foreach": step(torch.optim.SGD, foreach=True),
    "SGD fused": step(torch.optim.SGD, fused=True),
    "AdamW": step(torch.optim.AdamW, foreach=False),
    "AdamW foreach": step(torch.optim.AdamW, foreach=True),
    "AdamW fused": step(torch.optim.AdamW, fused=True),
    "data swapped": swap_data,
    "loaded": load(assign=False),
    "loaded by assignment": load(assign=True),
    "parameter replaced": replace_parameter,
    "data copied, mode switched": copy_data_and_switch,
    "data copied, eval again": copy_data_and_call_eval,
}


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("mode", ["mlp", "linear_comb"])
def test_kept_weights_follow_an_update(mode, update, guard):
    generator, x = make(3, 2, off_diag_mode=mode), inputs()
    with guard():
        before = generator.head_metrics(x)
    UPDATES[update](generator)
    with guard():
        assert_up_to_date(generator, x)
        assert not torch.allclose(generator.head_metrics(x), before)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("kind", ["foreach", "fused"])
def test_kept_weights_follow_a_step_after_a_look_without_gradients(optimizer, kind):
    """Training, with a metric logged without gradients between the backward pass and the optimizer's step."""
    generator, x = make(3, 2).train(), inputs()
    stepper = optimizer(generator.parameters(), lr=0.1, **{kind: True})
    generator.head_metrics(x).sum().backward()
    with torch.no_grad():
        before = generator.head_metrics(x)
    stepper.step()
    with torch.no_grad():
        assert_up_to_date(generator, x)
        assert not torch.allclose(generator.head_metrics(x), before)


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(
    ("mode", "name"),
    [
        ("mlp", "out.weight"),
        ("mlp", "out.bias"),
        ("linear_comb", "alpha"),
        ("bayesian", "alpha_mu"),
        ("separate_B", "B"),
    ],
)
def test_kept_weights_follow_each_of_their_sources(mode, name, guard):
    generator, x = make(3, 2, off_diag_mode=mode), inputs()
    with guard():
        before = generator.head_metrics(x)
        generator.get_parameter(name).add_(1)
        assert_up_to_date(generator, x)
        assert not torch.allclose(generator.head_metrics(x), before)


SETTINGS = {
    "diag_scale": (0.5, 0, True, -1.5, torch.tensor(0.25)),
    "off_diag_scale": (0.0, 2, False, -0.5, torch.tensor(0.25)),
}


@pytest.mark.parametrize("mode", CACHED_MODES)
@pytest.mark.parametrize("name", SETTINGS)
def test_kept_weights_follow_a_scale_that_is_set_anew(name, mode):
    generator, x = make(3, 2, **MODES[mode]), inputs()
    with torch.no_grad():
        for value in SETTINGS[name]:
            before = generator.head_metrics(x)
            setattr(generator, name, value)
            after = generator.head_metrics(x)
            assert not torch.allclose(after, before)
            generator._fused = None
            assert torch.equal(after, generator.head_metrics(x))


def test_kept_weights_follow_a_scale_that_is_written_to():
    generator, x = make(3, 2), inputs()
    generator.off_diag_scale = torch.tensor(1.0, dtype=torch.float64)
    with torch.no_grad():
        generator.head_metrics(x)
        generator.off_diag_scale.zero_()
        assert_up_to_date(generator, x)


def test_scale_that_is_not_a_number_spoils_the_metrics_and_goes_with_it():
    generator, x = make(3, 2), inputs()
    with torch.no_grad():
        expected = generator.head_metrics(x)
        generator.diag_scale = math.nan
        for _ in range(2):
            assert generator.head_metrics(x).isnan().all()
        generator.diag_scale = 1.0
        assert torch.equal(generator.head_metrics(x), expected)


def test_kept_weights_follow_a_change_of_mode():
    generator, x = make(3, 2, off_diag_mode="linear_comb"), inputs()
    with torch.no_grad():
        generator.head_metrics(x)
        generator.off_diag_mode = "mlp"
        assert_up_to_date(generator, x)
        generator.off_diag_mode = "linear_comb"
        assert_up_to_date(generator, x)


def test_kept_weights_follow_a_matrix_seen_another_way():
    """The same memory with other strides."""
    generator, x = make(3, 2, hidden=(36,)), inputs()  # a weight as high as wide
    with torch.no_grad():
        before = generator.head_metrics(x)
        generator.out.weight.data = generator.out.weight.data.T
        assert not torch.allclose(generator.head_metrics(x), before)
        generator.out.weight.data = generator.out.weight.data.contiguous()
        assert_up_to_date(generator, x)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda g: pickle.loads(pickle.dumps(g))])
def test_copy_does_not_use_the_kept_weights_of_its_original(duplicate):
    generator, x = make(3, 2), inputs()
    with torch.no_grad():
        generator.head_metrics(x)
        twin = duplicate(generator)
        for parameter in twin.parameters():
            parameter.data.copy_(parameter.data * 2 + 0.1)  # leaves no trace in the version counter
        assert_up_to_date(twin, x)
        assert_up_to_date(generator, x)
        assert not torch.allclose(twin.head_metrics(x), generator.head_metrics(x))


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_generator_that_ran_without_gradients_can_be_copied_and_pickled(guard):
    generator, x = make(3, 2), inputs()
    with guard():
        expected = generator.head_metrics(x)
    for twin in (copy.deepcopy(generator), pickle.loads(pickle.dumps(generator))):
        with torch.no_grad():
            assert torch.equal(twin.head_metrics(x), expected)  # the same numbers by the same operations


def test_kept_weights_are_not_pickled():
    generator, x = make(3, 2), inputs()
    generator.head_metrics(x)
    before = len(pickle.dumps(generator))
    with torch.no_grad():
        generator.head_metrics(x)
    # The kept weight alone (H dh dh 3 numbers of 8 bytes, 288) would add more than its own size.
    assert len(pickle.dumps(generator)) < before + 288


def test_kept_weights_follow_a_change_of_dtype():
    generator = make(3, 2, dtype=torch.float32)
    with torch.no_grad():
        generator.head_metrics(inputs(torch.float32))
        generator.to(torch.float64)
        assert generator.head_metrics(inputs()).dtype == torch.float64
        assert_up_to_date(generator, inputs())


def test_weights_kept_under_autocast_do_not_serve_full_precision():
    generator, x = make(3, 2, dtype=torch.float32), inputs(torch.float32)
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            generator.head_metrics(x)
        # Float32 with short sums: 1e-5 relative at values of order one. bfloat16 weights would be off by 1e-3 or fail.
        torch.testing.assert_close(generator.head_metrics(x), recomputed(generator, x), rtol=1e-5, atol=1e-5)


def test_weights_kept_in_training_mode_of_bayesian_are_never_a_sample():
    generator, x = make(3, 2, off_diag_mode="bayesian").train(), inputs()
    with torch.no_grad():
        generator.head_metrics(x)
        generator.eval()
        assert_up_to_date(generator, x)


# ---------------------------------------------------------------------- KL, and looking in


@examples(8)
@given(H=st.integers(1, 4), seed=SEEDS)
def test_kl_is_that_of_the_off_diagonal_coefficients_from_a_standard_normal(H, seed):
    generator = make(H, 2, seed, off_diag_mode="bayesian")
    mu, logvar = generator.alpha_mu, generator.alpha_logvar
    expected = torch.zeros((), dtype=torch.float64)
    for i in range(H):
        for j in range(H):
            for k in range(H):
                if i != j:
                    posterior = torch.distributions.Normal(mu[i, j, k], torch.exp(logvar[i, j, k] / 2))
                    prior = torch.distributions.Normal(torch.zeros_like(mu[i, j, k]), torch.ones_like(mu[i, j, k]))
                    expected = expected + torch.distributions.kl_divergence(posterior, prior)
    assert_same_with_gradients(generator.get_kl_divergence(), expected, {"mu": mu, "logvar": logvar}, seed)


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "bayesian"])
def test_kl_is_zero_without_coefficients_to_sample(mode):
    assert make(3, 2, **MODES[mode]).get_kl_divergence().item() == 0


def test_looking_in_before_a_forward_pass_is_a_clear_error():
    with pytest.raises(ZooError, match="forward pass"):
        make(3, 2).mean_metric()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("causal", [True, False])
def test_mean_metric_averages_the_full_metrics_and_leaves_the_mode_alone(mode, causal):
    generator, x = make(3, 2, **MODES[mode]).train(), inputs()
    generator.head_metrics(x, causal)
    oracle = oracle_of(generator, 3, **MODES[mode])
    seen = 3 if causal and mode == "stride" else 4  # the last block of two begins with the third token
    expected = torch.stack([oracle.matrix(context(x[b, :seen], [True] * seen), 1) for b in range(2)]).mean(0)
    actual = generator.mean_metric(1)
    torch.testing.assert_close(actual, expected.detach(), **TIGHT)
    assert not actual.requires_grad
    assert generator.training
    assert generator.hidden.training
