"""The attention layer against its equations, and what it promises about causality, padding, masks and caches."""

import copy
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
from tests.oracles.damcha import GeneratorOracle, attention, static_metrics, under
from zoo.attention import AttentionCache, MBasedAttention, StructuredMLPForM
from zoo.errors import ZooError

PADDINGS = st.sampled_from(["none", "left", "right", "scattered"])
# Every mode of the generator, and the two layers that have none.
STATIC, ORDINARY = {"use_mlp": False}, {"use_mlp": False, "use_M": False}
KINDS = {**MODES, "static": STATIC, "ordinary": ORDINARY}
INF = float("inf")


def make(H, dh, seed=0, dtype=torch.float64, **options):
    arguments = {"dropout": 0.0, "mlp_hidden": (4, 3), "n_layers": 3, **options}
    return randomized(MBasedAttention(H * dh, H, **arguments), seed, dtype).eval()


def tokens(B, T, D, seed=0, dtype=torch.float64):
    return torch.randn(B, T, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@st.composite
def masks(draw, B, H, T, seed):
    """None, or a mask of any dtype and any of the shapes that fit; some rows may hide everything."""
    shape = draw(
        st.sampled_from(
            [
                None,
                (T, T),
                (B, T, T),
                (1, T, T),
                (B, H, T, T),
                (1, H, T, T),
                (B, 1, T, T),
                (1, 1, T, T),
                (B, 1, 1, T),
                (1, H, T, 1),
            ]
        )
    )
    if shape is None:
        return None
    g = torch.Generator().manual_seed(seed)
    visible = torch.rand(shape, generator=g) < draw(st.sampled_from([0.4, 0.8]))
    kind = draw(st.sampled_from(["bool", "int", "float", "float with -inf"]))
    if kind == "bool":
        return visible
    if kind == "int":
        return visible.to(draw(st.sampled_from([torch.int64, torch.int8, torch.uint8]))) * draw(st.sampled_from([1, 3]))
    added = torch.randn(shape, generator=g, dtype=torch.float64)
    return (added if kind == "float" else added.masked_fill(~visible, -INF)).requires_grad_()


def metrics_of(kind, layer, x, real, causal, H, options):
    """The oracle's metrics of a layer of that kind, read off its parameters."""
    parameters = dict(layer.named_parameters())
    if kind == "ordinary":
        return None
    if kind == "static":
        return static_metrics(parameters["M0"], H)
    oracle = GeneratorOracle(under(parameters, "generator."), x.shape[-1], H, **options)
    return oracle.metrics(x, real, causal, layer.layer_idx)


# ---------------------------------------------------------------------- values and gradients


@pytest.mark.parametrize("kind", KINDS)
@examples(12)
@given(data=st.data(), size=sizes(max_heads=2), pad=PADDINGS, causal=st.booleans(), seed=SEEDS)
def test_attention_follows_its_equations(kind, data, size, pad, causal, seed):
    B, T, H, dh = size
    options = data.draw(generator_options(kind)) if kind in MODES else {}
    switches = {} if kind in MODES else KINDS[kind]
    layer = make(
        H, dh, seed, layer_idx=data.draw(st.integers(0, 2)), bias=data.draw(st.booleans()), **options, **switches
    )
    mask = data.draw(masks(B, H, T, seed))
    real = padding(B, T, seed, pad)
    x = tokens(B, T, H * dh, seed).masked_fill(~real.unsqueeze(-1), float("nan")).requires_grad_()

    metrics = metrics_of(kind, layer, x, real, causal, H, options)
    expected, expected_weights = attention(x, dict(layer.named_parameters()), H, real, metrics, mask, causal)
    wanted = {"x": x, **dict(layer.named_parameters())}
    if mask is not None and mask.requires_grad:
        wanted["attn_mask"] = mask
    given_padding = None if pad == "none" else real
    y, nothing = layer(x, mask, causal, given_padding)
    assert nothing is None
    assert_same_with_gradients(y, expected, wanted, seed)
    with torch.no_grad():  # another road
        torch.testing.assert_close(layer(x, mask, causal, given_padding)[0], expected, **TIGHT)
    explicit, weights = layer(x, mask, causal, given_padding, need_weights=True)
    assert_same_with_gradients(explicit, expected, wanted, seed)
    assert_same_with_gradients(weights, expected_weights, wanted, seed)


@examples(10)
@given(data=st.data(), size=sizes(), seed=SEEDS)
def test_bayesian_layer_uses_its_sample_while_training(data, size, seed):
    B, T, H, dh = size
    options = data.draw(generator_options("bayesian"))
    layer, x = make(H, dh, seed, **options).train(), tokens(B, T, H * dh, seed).requires_grad_()
    real = torch.ones(B, T, dtype=torch.bool)
    # Without dropout the coefficients are all that is drawn, so the same seed gives the same eps.
    torch.manual_seed(seed)
    actual = layer(x, is_causal=True)[0]
    torch.manual_seed(seed)
    eps = torch.randn(H, H, H, dtype=torch.float64)
    parameters = dict(layer.named_parameters())
    alpha = parameters["generator.alpha_mu"] + torch.exp(parameters["generator.alpha_logvar"] / 2) * eps
    metrics = metrics_of("bayesian", layer, x, real, True, H, {**options, "alpha": alpha})
    expected = attention(x, parameters, H, real, metrics, causal=True)[0]
    assert_same_with_gradients(actual, expected, {"x": x, **parameters}, seed)


@examples(8)
@given(size=sizes(), per_query=st.booleans(), causal=st.booleans(), seed=SEEDS)
def test_given_metrics_replace_the_generated_ones(size, per_query, causal, seed):
    B, T, H, dh = size
    layer, x = make(H, dh, seed), tokens(B, T, H * dh, seed).requires_grad_()
    shape = (B, T, H, dh, dh) if per_query else (B, H, dh, dh)
    m = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    real = torch.ones(B, T, dtype=torch.bool)

    def metrics(b, t):
        return list(m[b, t] if per_query else m[b])

    expected = attention(x, dict(layer.named_parameters()), H, real, metrics, causal=causal)[0]
    actual = layer(x, is_causal=causal, head_metrics=m)[0]
    assert_same_with_gradients(actual, expected, {"x": x, "head_metrics": m, **dict(layer.named_parameters())}, seed)


@pytest.mark.parametrize("mode", MODES)
def test_shared_generator_gives_what_an_own_one_gives_and_stays_its_owners(mode):
    own = make(3, 2, layer_idx=1, **MODES[mode])
    guest = MBasedAttention(6, 3, 0.0, shared_mlp=own.generator, layer_idx=1).double().eval()
    assert not [name for name, _ in guest.named_parameters() if not name.startswith(("W_v.", "out_proj."))]
    guest.load_state_dict({k: v for k, v in own.state_dict().items() if not k.startswith("generator.")})
    x = tokens(2, 4, 6)
    assert torch.equal(guest(x, is_causal=True)[0], own(x, is_causal=True)[0])  # the same operations
    assert torch.equal(guest.get_M_matrix(), own.get_M_matrix())


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_exists_from_construction_on(kind):
    layer = MBasedAttention(6, 3, mlp_hidden=(4,), **KINDS[kind])
    before = {name: value.shape for name, value in layer.state_dict().items()}
    layer(tokens(2, 3, 6, dtype=torch.float32), is_causal=True)
    assert {name: value.shape for name, value in layer.state_dict().items()} == before
    assert ("W_q.weight" in before) == ("W_k.weight" in before) == (kind == "ordinary")
    assert ("M0" in before) == (kind == "static")
    assert ("generator.out.weight" in before) == (kind in MODES)


def test_static_metric_starts_at_the_identity():
    layer = MBasedAttention(6, 3, use_mlp=False)
    assert torch.equal(layer.M0, torch.eye(6))
    assert torch.equal(layer.get_M_matrix(), torch.eye(6))


def test_multihead_flag_changes_nothing():
    twins = []
    for flag in (True, False):
        torch.manual_seed(0)
        twins.append(MBasedAttention(6, 3, 0.0, mlp_hidden=(4,), use_multihead_M=flag))
    assert list(twins[0].state_dict()) == list(twins[1].state_dict())
    x = tokens(2, 4, 6, dtype=torch.float32)
    assert torch.equal(twins[0](x)[0], twins[1](x)[0])


@pytest.mark.parametrize("bias", [True, False])
def test_bias_switch_decides_over_the_bias_of_every_projection(bias):
    layer = MBasedAttention(6, 3, bias=bias, **ORDINARY)
    assert all((p.bias is not None) == bias for p in (layer.W_q, layer.W_k, layer.W_v, layer.out_proj))


# ---------------------------------------------------------------------- causality


@pytest.mark.parametrize("kind", KINDS)
@examples(5)
@given(size=sizes(max_tokens=7), seed=SEEDS, data=st.data())
def test_query_ignores_future_tokens(kind, size, seed, data):
    B, T, H, dh = size
    layer, x = make(H, dh, seed, **KINDS[kind]), tokens(B, T, H * dh, seed)
    t = data.draw(st.integers(0, T - 1))
    other = x.clone()
    other[:, t + 1 :] = 10 * tokens(B, T, H * dh, seed + 1)[:, t + 1 :]
    for need_weights in (False, True):
        y, changed = (layer(z, is_causal=True, need_weights=need_weights)[0] for z in (x, other))
        # Bit for bit: running sums and row-wise products of one shape, and future keys weigh exp(-inf) = 0 exactly.
        assert torch.equal(y[:, : t + 1], changed[:, : t + 1])
    short = layer(x[:, : t + 1], is_causal=True)[0]
    torch.testing.assert_close(short, y[:, : t + 1], **TIGHT)  # other shapes may take kernels that sum otherwise


@pytest.mark.parametrize("kind", KINDS)
def test_query_has_no_gradient_from_the_future(kind):
    layer, x = make(3, 2, **KINDS[kind]), tokens(1, 5, 6).requires_grad_()
    grad = torch.autograd.grad(layer(x, is_causal=True)[0][:, 2].square().sum(), x)[0]
    assert (grad[:, 3:] == 0).all()
    assert (grad[:, :3] != 0).any(dim=-1).all()


@pytest.mark.parametrize("mode", MODES)
def test_metric_of_the_full_sequence_depends_on_every_token(mode):
    layer, x = make(3, 2, **MODES[mode]), tokens(1, 5, 6).requires_grad_()
    only_first = torch.eye(5, dtype=torch.bool)
    only_first[:, 0] = True  # query 0 sees itself alone, query 1 two keys: later tokens enter through the metric only
    grad = torch.autograd.grad(layer(x, only_first)[0][:, 1].sum(), x)[0]
    assert (grad[:, 2:] != 0).any(dim=-1).all()


# ---------------------------------------------------------------------- padding and masks


@pytest.mark.parametrize("kind", KINDS)
@examples(5)
@given(
    size=sizes(),
    pad=st.sampled_from(["left", "right", "scattered"]),
    value=st.sampled_from([float("nan"), INF, -INF, 1e300]),
    causal=st.booleans(),
    need_weights=st.booleans(),
    seed=SEEDS,
)
def test_padding_values_never_leak(kind, size, pad, value, causal, need_weights, seed):
    B, T, H, dh = size
    layer, real = make(H, dh, seed, **KINDS[kind]), padding(B, T, seed, pad)
    clean = tokens(B, T, H * dh, seed).requires_grad_()
    spoiled = clean.detach().masked_fill(~real.unsqueeze(-1), value).requires_grad_()
    arguments = {"is_causal": causal, "padding_mask": real, "need_weights": need_weights}
    y, other = layer(spoiled, **arguments)[0], layer(clean, **arguments)[0]
    # Hidden values are replaced before anything is computed with them, so not a bit may differ.
    assert torch.equal(y, other)
    assert y.isfinite().all()
    assert (y[~real] == 0).all()
    got = gradients(y, [spoiled, *layer.parameters()], seed)
    for a, b in zip(got, gradients(other, [clean, *layer.parameters()], seed), strict=True):
        assert torch.equal(a, b)
        assert a.isfinite().all()
    assert (got[0][~real] == 0).all()


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.float32])
@pytest.mark.parametrize("kind", ["mlp", "ordinary"])
def test_padding_mask_of_numbers_means_non_zero_is_real(kind, dtype):
    layer, x, real = make(3, 2, **KINDS[kind]), tokens(3, 5, 6), padding(3, 5, 2, "left")
    assert not real.all()
    assert torch.equal(
        layer(x, is_causal=True, padding_mask=real.to(dtype) * 2)[0], layer(x, is_causal=True, padding_mask=real)[0]
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("how", ["bool", "int", "float", "4-D"])
@pytest.mark.parametrize("need_weights", [True, False])
def test_query_without_a_visible_key_mixes_to_zero_with_finite_gradients(kind, causal, how, need_weights):
    layer, x = make(3, 2, **KINDS[kind]), tokens(2, 4, 6).requires_grad_()
    visible = torch.ones(4, 4, dtype=torch.bool)
    visible[2] = False
    wanted = [x, *layer.parameters()]
    if how == "float":
        mask = torch.zeros(4, 4, dtype=torch.float64).masked_fill(~visible, -INF).requires_grad_()
        wanted.append(mask)
    else:
        mask = {"bool": visible, "int": visible.long(), "4-D": visible.expand(2, 3, 4, 4)}[how]
    y, weights = layer(x, mask, causal, need_weights=need_weights)
    # Zero times the output weights, plus the bias: exact.
    assert torch.equal(y[:, 2], layer.out_proj.bias.expand(2, 6))
    assert not torch.allclose(y[:, 1], layer.out_proj.bias)
    assert all(g.isfinite().all() for g in gradients(y, wanted, 0))
    if need_weights:
        assert (weights[:, :, 2] == 0).all()


def test_query_whose_visible_keys_are_all_padding_mixes_to_zero():
    layer, x = make(3, 2), tokens(1, 4, 6).requires_grad_()
    real = torch.tensor([[True, True, False, True]])
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[3] = torch.tensor([False, False, True, False])  # query 3 may look at the padded key only
    y = layer(x, mask, padding_mask=real)[0]
    assert torch.equal(y[:, 3], layer.out_proj.bias.expand(1, 6))
    assert all(g.isfinite().all() for g in gradients(y, [x, *layer.parameters()], 0))


@pytest.mark.parametrize("kind", KINDS)
def test_bool_integer_and_infinite_masks_agree(kind):
    layer, x = make(3, 2, **KINDS[kind]), tokens(2, 4, 6)
    visible = torch.rand(2, 4, 4, generator=torch.Generator().manual_seed(1)) < 0.6
    expected = layer(x, visible)[0]
    assert not torch.allclose(expected, layer(x)[0])
    assert torch.equal(layer(x, visible.long())[0], expected)
    assert torch.equal(layer(x, visible.to(torch.int8) * -2)[0], expected)  # non-zero is visible
    # Adding 0 and -inf takes another kernel than choosing by a bool mask.
    added = torch.zeros(2, 4, 4, dtype=torch.float64).masked_fill(~visible, -INF)
    torch.testing.assert_close(layer(x, added)[0], expected, **TIGHT)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_asking_for_weights_leaves_the_output_as_it_is(kind, causal, padded):
    layer, x = make(3, 2, **KINDS[kind]), tokens(3, 5, 6)
    real = padding(3, 5, 4, "right") if padded else torch.ones(3, 5, dtype=torch.bool)
    arguments = {"is_causal": causal, "padding_mask": real if padded else None}
    y, weights = layer(x, **arguments, need_weights=True)
    torch.testing.assert_close(y, layer(x, **arguments)[0], **TIGHT)  # an explicit softmax against a fused kernel
    assert weights.shape == (3, 3, 5, 5)
    assert (weights >= 0).all()
    sums = weights.sum(-1).transpose(1, 2)  # (B, T, H)
    torch.testing.assert_close(sums[real], torch.ones_like(sums[real]), **TIGHT)
    assert (weights.transpose(2, 3).transpose(1, 2)[~real] == 0).all()  # no weight on padded keys
    if causal:
        assert (weights.triu(1) == 0).all()


# ---------------------------------------------------------------------- cache


@pytest.mark.parametrize("kind", KINDS)
def test_mask_over_all_keys_works_with_a_cache(kind):
    layer, x = make(3, 2, **KINDS[kind]), tokens(2, 5, 6)
    mask = torch.rand(5, 5, generator=torch.Generator().manual_seed(2)) < 0.7
    cache = AttentionCache(6)
    with torch.no_grad():
        whole = layer(x, mask, is_causal=True)[0]
        parts = [layer(x[:, a:b], mask[a:b, :b], is_causal=True, cache=cache)[0] for a, b in ((0, 2), (2, 3), (3, 5))]
    torch.testing.assert_close(torch.cat(parts, 1), whole, **TIGHT)
    assert cache.length == 5


def test_cache_that_is_full_says_so():
    layer, cache = make(3, 2), AttentionCache(3)
    layer(tokens(1, 2, 6), is_causal=True, cache=cache)
    with pytest.raises(ZooError, match=r"cache.*4.*capacity of 3"):
        layer(tokens(1, 2, 6), is_causal=True, cache=cache)


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"use_M": False}, "use_mlp"),
        ({"use_M": False, "use_mlp": True}, "use_mlp"),
        ({"n_heads": 4}, "n_heads"),
        ({"use_mlp": False, "off_diag_mode": "bayesian"}, "off_diag_mode"),
        ({"use_mlp": False, "diag_scale": 2.0}, "diag_scale"),
        ({"use_mlp": False, "off_diag_scale": 0.0}, "off_diag_scale"),
        ({"use_mlp": False, "use_layer_bias": True}, "use_layer_bias"),
        ({"use_mlp": False, "compact_rank": 2}, "compact_rank"),
        ({"use_mlp": False, "free_M": True}, "free_M"),
        ({**ORDINARY, "free_M": True}, "free_M"),
        ({"off_diag_mode": "nonsense"}, "off_diag_mode"),
        ({"compact_rank": 2, "off_diag_mode": "separate_B"}, "compact_rank"),
        ({"dropout": 1.5}, "dropout"),
        ({"dropout": -0.5, **ORDINARY}, "dropout"),
    ],
)
def test_nonsense_is_refused_by_name(arguments, name):
    with pytest.raises(ZooError, match=name):
        MBasedAttention(**{"d_model": 6, "n_heads": 3, **arguments})


@pytest.mark.parametrize("switches", [{}, STATIC, ORDINARY], ids=["generated", "static", "ordinary"])
def test_unknown_option_is_refused(switches):
    with pytest.raises((TypeError, ZooError), match="diagscale"):
        MBasedAttention(6, 3, diagscale=2.0, **switches)


@pytest.mark.parametrize("switches", [STATIC, ORDINARY], ids=["static", "ordinary"])
def test_shared_generator_is_refused_where_none_is_used(switches):
    with pytest.raises(ZooError, match=r"shared_mlp|share_mlp|use_mlp"):
        MBasedAttention(6, 3, shared_mlp=StructuredMLPForM(6, 3, (4,)), **switches)


def test_shared_generator_of_another_size_is_refused():
    for D, H in ((12, 3), (6, 2)):
        with pytest.raises(ZooError, match="shared_mlp"):
            MBasedAttention(6, 3, shared_mlp=StructuredMLPForM(D, H, (4,)))


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"x": (4, 6)}, "x"),
        ({"x": (2, 4, 5)}, "x"),
        ({"x": (2, 1, 4, 6)}, "x"),
        ({"padding_mask": (2, 5)}, "padding_mask"),
        ({"padding_mask": (1, 4)}, "padding_mask"),
        ({"padding_mask": (2, 4, 1)}, "padding_mask"),
        ({"attn_mask": (4, 5)}, "attn_mask"),
        ({"attn_mask": (3, 4, 4)}, "attn_mask"),
        ({"attn_mask": (2, 2, 4, 4)}, "attn_mask"),
        ({"attn_mask": (1, 2, 3, 4, 4)}, "attn_mask"),
        ({"head_metrics": (2, 3, 2)}, "head_metrics"),
        ({"head_metrics": (1, 3, 2, 2)}, "head_metrics"),
        ({"head_metrics": (2, 5, 3, 2, 2)}, "head_metrics"),
    ],
)
def test_wrong_shape_is_refused_by_name(arguments, name):
    given_shapes = {"x": (2, 4, 6), **arguments}
    tensors = {key: torch.ones(shape, dtype=torch.float64) for key, shape in given_shapes.items()}
    with pytest.raises(ZooError, match=f"{name}: got shape"):
        make(3, 2)(**tensors)


def test_metrics_given_to_ordinary_attention_are_refused():
    with pytest.raises(ZooError, match="head_metrics"):
        make(3, 2, **ORDINARY)(tokens(1, 2, 6), head_metrics=torch.ones(1, 3, 2, 2, dtype=torch.float64))


# ---------------------------------------------------------------------- looking in


@pytest.mark.parametrize("mode", MODES)
def test_metric_before_a_forward_pass_is_a_clear_error(mode):
    with pytest.raises(ZooError, match="forward pass"):
        make(3, 2, **MODES[mode]).get_M_matrix()


def test_ordinary_attention_has_no_metric():
    layer = make(3, 2, **ORDINARY)
    layer(tokens(1, 2, 6))
    assert layer.get_M_matrix() is None


# ---------------------------------------------------------------------- memory, precision, dropout


def test_standard_path_never_makes_a_matrix_of_full_width_for_each_token():
    T, D, H = 64, 32, 4
    layer = make(H, D // H, mlp_hidden=(16,))
    x = tokens(1, T, D).requires_grad_()
    with LargestTensor() as forward:
        y, _ = layer(x, is_causal=True)
    with LargestTensor() as backward:
        y.sum().backward()
    # Generator weight D D 16, head metrics T H dh dh and scores H T T: all 16384, a quarter of T D D.
    assert forward.numel <= 16384
    assert backward.numel <= 16384
    assert T * D * D > 16384
    assert backward.operations > 20  # the backward pass was watched indeed
    with LargestTensor() as full:
        layer.generator(x)
    assert full.numel >= T * D * D  # and a full matrix a token would have been seen


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("road", ["plain", "padded", "weights", "float mask", "cached"])
def test_autocast_to_bfloat16_stays_finite_and_near_full_precision(kind, road):
    layer, x = make(3, 2, dtype=torch.float32, **KINDS[kind]), tokens(2, 5, 6, dtype=torch.float32).requires_grad_()
    arguments = {
        "plain": {},
        "padded": {"padding_mask": padding(2, 5, 1, "left")},
        "weights": {"need_weights": True},
        "float mask": {"attn_mask": torch.zeros(5, 5)},
        "cached": {},
    }[road]
    exact = layer(x, is_causal=True, **arguments)[0]
    with torch.autocast("cpu", torch.bfloat16):
        if road == "cached":
            cache = AttentionCache(5)
            with torch.no_grad():
                y = torch.cat(
                    [layer(x[:, a:b], is_causal=True, cache=cache)[0] for a, b in ((0, 3), (3, 4), (4, 5))], 1
                )
        else:
            y = layer(x, is_causal=True, **arguments)[0]
    assert y.isfinite().all()
    # A dozen roundings to bfloat16 (2^-9 each) on the way to values of order one.
    torch.testing.assert_close(y.float(), exact, rtol=0.05, atol=0.1)
    if road != "cached":
        grads = gradients(y, [x, *layer.parameters()], 0)
        assert all(g.isfinite().all() for g in grads)
        assert any((g != 0).any() for g in grads)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("padded", [True, False])
def test_bfloat16_layer_stays_near_full_precision(kind, padded):
    layer, x = make(3, 2, dtype=torch.float32, **KINDS[kind]), tokens(2, 5, 6, dtype=torch.float32)
    real = padding(2, 5, 1, "left") if padded else None
    exact = layer(x, is_causal=True, padding_mask=real)[0]
    y = copy.deepcopy(layer).to(torch.bfloat16)(x.to(torch.bfloat16), is_causal=True, padding_mask=real)[0]
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), exact, rtol=0.05, atol=0.1)  # as above


@pytest.mark.parametrize("road", ["plain", "padded", "weights"])
def test_dropout_of_attention_weights_acts_in_training_only(road):
    layer, x = make(3, 2, dropout=0.5, **ORDINARY), tokens(2, 6, 6)  # no generator: only the weights can be dropped
    arguments = {"padding_mask": torch.ones(2, 6)} if road == "padded" else {"need_weights": road == "weights"}
    assert torch.equal(layer(x, **arguments)[0], layer(x, **arguments)[0])
    layer.train()
    assert not torch.allclose(layer(x, **arguments)[0], layer(x, **arguments)[0])


def test_dropout_acts_in_the_generator_in_training_only():
    layer, x = make(3, 2, dropout=0.5, mlp_hidden=(32,)), tokens(2, 6, 6)
    assert torch.equal(layer.generator.head_metrics(x), layer.generator.head_metrics(x))
    layer.train()
    assert not torch.allclose(layer.generator.head_metrics(x), layer.generator.head_metrics(x))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
@pytest.mark.parametrize("kind", KINDS)
def test_copy_gives_the_same_and_shares_nothing(kind, duplicate):
    layer, x = make(3, 2, **KINDS[kind]), tokens(2, 4, 6)
    with torch.no_grad():
        expected = layer(x, is_causal=True)[0]
        twin = duplicate(layer)
        assert torch.equal(twin(x, is_causal=True)[0], expected)
        for parameter in twin.parameters():
            parameter.data.copy_(parameter.data * 2 + 0.1)
        assert not torch.allclose(twin(x, is_causal=True)[0], expected)
        assert torch.equal(layer(x, is_causal=True)[0], expected)
