"""The zoo's own additions to DAMCHA: a start at the identity, projected keys, and a learning rate for the generator."""

import itertools

import pytest
import torch
from torch import nn

from tests.oracles.compare import assert_same_with_gradients, padding, randomized
from tests.oracles.damcha import DecoderOracle
from zoo.attention import DamchaAttention, Masks, MBasedAttention, StructuredMLPForM, create_attention
from zoo.attention.stacks import lr_factors
from zoo.errors import ZooError
from zoo.models.decoder import Decoder, LanguageModel
from zoo.models.vision_transformer import VisionTransformer

H, DH = 3, 2
D = H * DH
MODES = {
    "full": {},
    "linear_comb": {"off_diag_mode": "linear_comb"},
    "bayesian": {"off_diag_mode": "bayesian"},
    "separate_B": {"off_diag_mode": "separate_B"},
    "free_M": {"free_M": True, "off_diag_mode": "linear_comb"},
    "rank of a head": {"compact_rank": DH},
    "higher rank": {"compact_rank": DH + 3},
}
# The last two: nothing on the diagonal, and scales of a row that sum to zero.
SCALES = [(1.0, 1.0), (0.5, -1.5), (-2.0, 0.0), (0.0, 0.25), (-2.0, 1.0)]


# ---------------------------------------------------------------------- identity_start


@pytest.mark.parametrize("heads", [1, 2, 3])
@pytest.mark.parametrize("mode", MODES)
def test_every_heads_metric_starts_as_the_identity_whatever_the_context(mode, heads):
    torch.manual_seed(0)
    one = torch.eye(DH, dtype=torch.float64)
    for (diag, off), bias, hidden in itertools.product(SCALES, (False, True), ((4, 3), ())):
        if heads == 1 and not diag:
            continue
        options = {"diag_scale": diag, "off_diag_scale": off, "use_layer_bias": bias, **MODES[mode]}
        generator = StructuredMLPForM(heads * DH, heads, hidden, 0.0, 3, identity_start=True, **options)
        x = 3 * torch.randn(2, 4, heads * DH, dtype=torch.float64)
        for _ in range(2):
            found = generator.double().eval().head_metrics(x, causal=True, layer_idx=1)
            # The bias was made in float32, of a few terms of order one; the rest is float64.
            torch.testing.assert_close(found, one.expand_as(found), rtol=0, atol=1e-5)
            full = generator(torch.randn(heads * DH, dtype=torch.float64), 1)
            rows = full.view(heads, DH, heads, DH).sum(dim=2)
            torch.testing.assert_close(rows, one.expand_as(rows), rtol=0, atol=1e-5)
            randomized(generator, 1)
            generator.reset_parameters()


def test_the_full_metric_starts_as_the_static_one_does():
    generator = StructuredMLPForM(D, H, (4,), identity_start=True)
    assert torch.equal(generator(torch.randn(D)), torch.eye(D))


@pytest.mark.parametrize("mode", MODES)
def test_a_generator_that_starts_at_the_identity_learns_with_all_its_parameters(mode):
    torch.manual_seed(0)
    options = {"use_layer_bias": True, "diag_scale": 0.5, **MODES[mode]}
    generator = StructuredMLPForM(D, H, (5, 4), 0.0, 1, identity_start=True, **options).double()
    x, target = torch.randn(4, 5, D, dtype=torch.float64), torch.randn(4, H, DH, DH, dtype=torch.float64)
    before = {name: parameter.clone() for name, parameter in generator.named_parameters()}
    optimizer, losses = torch.optim.SGD(generator.parameters(), 0.1), []
    for _ in range(3):
        losses.append((generator.head_metrics(x, layer_idx=0) - target).square().mean())
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert mode == "bayesian" or losses[2] < losses[1] < losses[0]  # whose samples scatter
    assert [name for name, parameter in generator.named_parameters() if torch.equal(parameter, before[name])] == []
    if "compact_rank" in options:  # no column of the factors is stuck at zero
        U, V = generator.out.bias.view(2, D, -1)
        assert U.any(dim=0).all()
        assert V.any(dim=0).all()


@pytest.mark.parametrize("share", [True, False])
def test_both_stacks_start_at_the_scores_of_the_input_with_itself(share):
    options = {"mlp_hidden": (4,), "identity_start": True, "share_mlp": share, "key_projection": True}
    decoder = Decoder(D, H, 8, 2, 0.0, attention="damcha", attention_options=options)
    sizes = {"img_size": 8, "patch_size": 4, "embed_dim": D, "depth": 2, "num_heads": H, "num_classes": 2}
    vision = VisionTransformer(**sizes, attention="damcha", attention_options=options)
    vision.init_weights()  # timm's own rule for linear layers doesn't have the last word
    x = torch.randn(1, 4, D)
    for layer in (*decoder.attentions, *vision.attentions):
        weights = layer.eval()(x, need_weights=True)[1]
        slices = x.view(1, 4, H, DH).transpose(1, 2)
        expected = (slices @ slices.transpose(-1, -2) / DH**0.5).softmax(dim=-1)
        torch.testing.assert_close(weights, expected)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"compact_rank": 1}, r"got True with compact_rank 1; a head's metric is 2 wide .* set compact_rank to 2 or"),
        ({"diag_scale": 0.0, "off_diag_scale": 0.0}, r"got True with diag_scale 0\.0 and off_diag_scale 0\.0; that"),
        ({"n_heads": 1, "diag_scale": 0.0}, r"got True with diag_scale 0\.0 and one head; that makes every metric"),
    ],
)
def test_a_start_that_cant_be_is_refused(arguments, said):
    with pytest.raises(ZooError, match=f"^identity_start: {said}"):
        StructuredMLPForM(**{"d_model": D, "n_heads": H, "identity_start": True, **arguments})


# ---------------------------------------------------------------------- key_projection


@pytest.mark.parametrize("pad", ["none", "scattered"])
def test_a_stack_with_projected_keys_follows_its_equations(pad):
    options = {"key_projection": True, "use_layer_bias": True, "layer_bias_rank": 2}
    decoder = randomized(Decoder(D, H, 5, 2, 0.0, mlp_hidden=(4,), **options), 3).eval()
    oracle = DecoderOracle(dict(decoder.named_parameters()), D, H, 2, options=options)
    x, real = torch.randn(2, 4, D, dtype=torch.float64, requires_grad=True), padding(2, 4, 0, pad)
    wanted = {"x": x, **oracle.params}
    assert "layers.1.attention.W_k.weight" in wanted
    # layer norms lose a few digits
    assert_same_with_gradients(decoder(x, real), oracle.run(x, real)[0], wanted, 0, rtol=1e-8, atol=1e-9)


def test_a_key_projection_of_the_identity_is_none():
    layer = create_attention("damcha", D, H, mlp_hidden=(4,), key_projection=True)
    plain = create_attention("damcha", D, H, mlp_hidden=(4,))
    plain.load_state_dict({name: t for name, t in layer.state_dict().items() if not name.startswith("W_k.")})
    with torch.no_grad():
        layer.W_k.weight.copy_(torch.eye(D))
    x = torch.randn(2, 5, D)
    torch.testing.assert_close(layer(x, Masks(True))[0], plain(x, Masks(True))[0])
    assert set(layer.projections()) == {"W_k", "W_v", "out_proj"}


def test_models_with_projected_keys_are_exported():
    given = {"attention": "damcha", "attention_options": {"mlp_hidden": (4,), "key_projection": True}}
    language = LanguageModel(7, D, H, 8, 1, **given).eval()
    vision = VisionTransformer(img_size=8, patch_size=4, embed_dim=D, depth=1, num_heads=H, num_classes=2, **given)
    for model, example in ((language, torch.tensor([[1, 2, 3]])), (vision.eval(), torch.rand(1, 3, 8, 8))):
        model.requires_grad_(False)
        torch.testing.assert_close(torch.export.export(model, (example,)).module()(example), model(example))


def test_the_methods_own_layer_takes_the_additions():
    generator = StructuredMLPForM(D, H, (4,), identity_start=True)
    layer = MBasedAttention(D, H, shared_mlp=generator, key_projection=True)
    assert isinstance(layer, DamchaAttention)
    assert torch.equal(layer.W_k.weight, torch.eye(D)), "as the generator starts, whose option it is"
    with pytest.raises(ZooError, match=r"^generator_lr_factor: given beside shared_mlp, which has its own options"):
        MBasedAttention(D, H, shared_mlp=generator, generator_lr_factor=0.5)
    for name, value in (("key_projection", True), ("identity_start", True), ("generator_lr_factor", 0.5)):
        with pytest.raises(ZooError, match=f"^{name}: got {value} with use_mlp False"):
            MBasedAttention(D, H, use_mlp=False, **{name: value})


# ---------------------------------------------------------------------- lr_factors


class _Gate(nn.Module):
    """A module that knows how fast it learns, its first layer apart."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

    def lr_factors(self):
        return {"": 0.5, "first.": 0.1}


def test_factors_are_those_of_the_module_that_has_the_parameters():
    network = nn.Sequential(nn.Linear(2, 2), _Gate())
    assert lr_factors(network) == {
        **{f"0.{name}": 1.0 for name in ("weight", "bias")},
        **{f"1.first.{name}": 0.05 for name in ("weight", "bias")},
        **{f"1.second.{name}": 0.5 for name in ("weight", "bias")},
    }
    network[1].lr_factors = lambda: {"": 0.0}
    with pytest.raises(ZooError, match=r"lr_factors: got 0\.0 for '' of 1; must be a positive number"):
        lr_factors(network)


@pytest.mark.parametrize("share", [True, False])
def test_the_generators_factor_is_of_the_generators_parameters_alone(share):
    options = {"share_mlp": share, "generator_lr_factor": 0.1, "mlp_hidden": (4,), "key_projection": True}
    sizes = {"img_size": 8, "patch_size": 4, "embed_dim": D, "depth": 2, "num_heads": H, "num_classes": 2}
    given = {"attention": "damcha", "attention_options": options}
    for network in (Decoder(D, H, 8, 2, 0.0, **given), VisionTransformer(**sizes, **given)):
        for name, factor in lr_factors(network).items():
            assert factor == (0.1 if "generator." in name or "shared_mlp." in name else 1.0), name
        assert set(lr_factors(network).values()) == {0.1, 1.0}


@pytest.mark.parametrize("value", [0, -1.0, float("inf"), float("nan")])
def test_a_factor_that_is_none_is_refused(value):
    with pytest.raises(ZooError, match=r"^generator_lr_factor: got .*; it multiplies the learning rate, so give a pos"):
        StructuredMLPForM(D, H, generator_lr_factor=value)
