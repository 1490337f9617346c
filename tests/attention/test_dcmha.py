"""What is special to attention composed by maps that the input decides."""

import pytest
import torch

from zoo.attention.base import Masks, create_attention
from zoo.attention.dcmha import DcmhaOptions
from zoo.attention.standard import StandardAttention
from zoo.errors import ZooError


def layer(D=12, H=3, **options):
    torch.manual_seed(0)
    return create_attention("dcmha", D, H, **options)


@pytest.mark.parametrize("heads", [4, 8])
def test_maps_cost_20_d_h_and_64_h_squared(heads):
    D = 128
    n = sum(p.numel() for p in layer(D, heads, bias=False).parameters())
    assert n == 4 * D * D + 20 * D * heads + 64 * heads**2
    assert heads != 4 or n == 76_800


def test_repository_variant_costs_its_router_and_gate():
    D, H, rank = 128, 4, 4
    n = sum(p.numel() for p in layer(D, H, bias=False, variant="damcha_repo").parameters())
    assert n == 4 * D * D + (D * rank + rank) + (rank * H * H + H * H) + (D * H + H)


def test_starts_close_to_standard_attention():
    attention, x = layer(128, 4).eval(), torch.randn(2, 6, 128)
    standard = StandardAttention(128, 4).eval()
    standard.load_state_dict(attention.state_dict(), strict=False)
    with torch.no_grad():
        torch.testing.assert_close(attention(x)[0], standard(x)[0], atol=0.02, rtol=0.02)


@pytest.mark.parametrize(("variant", "names"), [("paper", ["pre", "post"]), ("damcha_repo", ["pre"])])
def test_matrices_are_the_mean_maps_of_real_tokens(variant, names):
    attention, x = layer(variant=variant).eval(), torch.randn(2, 5, 12)
    assert attention.matrices() == {}
    real = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]).bool()
    attention(x, Masks(True, real))
    padded = attention.matrices()
    assert list(padded) == names
    rows = torch.cat([x[0, 2:], x[1]]).unsqueeze(0)
    attention(rows)
    for name, matrix in attention.matrices().items():
        torch.testing.assert_close(padded[name], matrix)


def test_gate_of_the_repository_variant_closed_leaves_standard_attention():
    attention, x = layer(variant="damcha_repo").eval(), torch.randn(2, 5, 12)
    standard = StandardAttention(12, 3).eval()
    standard.load_state_dict(attention.state_dict(), strict=False)
    with torch.no_grad():
        attention.gate.bias.fill_(-100)
    torch.testing.assert_close(attention(x, Masks(True))[0], standard(x, Masks(True))[0])


def test_key_brings_its_map_along_into_a_cache():
    attention, x = layer().double().eval(), torch.randn(2, 6, 12, dtype=torch.float64)
    with torch.no_grad():
        attention.low_rank.normal_()  # maps far from none
    whole, cache = attention(x, Masks(True))[0], attention.new_cache(6)
    steps = [attention(x[:, t : t + 1], Masks(True), cache=cache)[0] for t in range(6)]
    torch.testing.assert_close(torch.cat(steps, dim=1), whole)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_are_finite_in_half_precision_where_maps_are_zero(dtype):
    attention, x = layer(), torch.randn(2, 5, 12, requires_grad=True)
    real = torch.tensor([[0, 0, 1, 1, 1], [0, 0, 0, 0, 0]]).bool()
    with torch.autocast("cpu", dtype=dtype):
        y, _ = attention(x, Masks(True, real))
    wanted = [x, *attention.parameters()]
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(y.float().square().sum(), wanted))


def test_unknown_variant_is_refused():
    with pytest.raises(ZooError, match=r"^variant: got 'repo'"):
        DcmhaOptions(variant="repo")
