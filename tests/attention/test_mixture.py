"""What is special to the mixture of attention heads: router, losses and what a token computes."""

import copy
import pickle

import pytest
import torch
from torch import nn

from zoo.attention.base import Masks, create_attention
from zoo.attention.mixture import MixtureOptions
from zoo.errors import ZooError

INF = float("inf")


def layer(D=12, H=3, **options):
    torch.manual_seed(0)
    return create_attention("mixture", D, H, **options)


def n_parameters(attention):
    return sum(p.numel() for p in attention.parameters())


def test_costs_two_projections_an_expert_one_pair_of_keys_and_values_and_a_router():
    D, H, E, dh = 128, 4, 8, 32
    assert n_parameters(layer(D, H, bias=False)) == 2 * E * D * dh + 2 * D * dh + D * E == 74_752


def test_repository_variant_has_experts_of_its_own():
    D, H, E, dh = 128, 4, 8, 32
    attention = layer(D, H, bias=False, variant="damcha_repo")
    assert n_parameters(attention) == 3 * E * D * dh + (D * E + E) + H * dh * D


def test_active_parameters_are_those_of_the_chosen_experts():
    """A token's gradient reaches the queries and outputs of its k experts alone."""
    attention = layer(12, 3, bias=False).train()
    y, _ = attention(torch.randn(1, 1, 12))
    y.square().sum().backward()
    per_expert = attention.out_proj.weight.grad.view(12, 6, 4).abs().sum(dim=(0, 2))
    assert (per_expert > 0).sum() == 3


def test_two_tokens_choose_by_their_own_router_scores():
    attention = layer().eval()
    x = torch.randn(1, 6, 12)
    attention(x)
    taken = torch.zeros(6, 6)
    for t, best in enumerate(attention.router(x)[0].topk(3).indices):
        taken[t, best] = 1
    together = attention.matrices()["together"]
    torch.testing.assert_close(together, taken.T @ taken / 6)
    assert together.diagonal().sum() == pytest.approx(3)


def test_weights_are_those_of_the_chosen_likeliest_first():
    attention, x = layer(experts=5, chosen=2).eval(), torch.randn(2, 4, 12)
    weights = attention(x, need_weights=True)[1]
    assert weights.shape == (2, 2, 4, 4)
    best = attention.router(x).argmax(-1)
    with torch.no_grad():
        q = attention.W_q(x).view(2, 4, 5, 4).gather(2, best.view(2, 4, 1, 1).expand(-1, -1, -1, 4)).squeeze(2)
        wanted = (q @ attention.W_k(x).transpose(1, 2) / 2).softmax(-1)
    torch.testing.assert_close(weights[:, 0], wanted)


def test_gates_sum_to_one_and_their_sum_has_no_gradient():
    attention = layer(bias=False).double().eval()
    x = torch.randn(1, 1, 12, dtype=torch.float64)  # one token: every expert mixes the same value
    with torch.no_grad():
        attention.out_proj.weight.copy_(torch.eye(12, 4, dtype=torch.float64).repeat(1, 6))
    y, _ = attention(x)
    torch.testing.assert_close(y[0, 0, :4], attention.W_v(x)[0, 0])
    # with the sum held fixed, dy / dlogits is v sum_i (dp_i / dlogits) / sum: not zero, as with a free sum it would be
    (grad,) = torch.autograd.grad(y.sum(), attention.router.weight)
    p = attention.router(x).softmax(-1)[0, 0]
    best = p.topk(3).indices
    taken = torch.zeros(6, dtype=torch.float64).scatter(0, best, 1.0)
    share = (taken * p).sum()
    wanted = attention.W_v(x).sum() * (taken * p / share - p)
    torch.testing.assert_close(grad, torch.outer(wanted, x[0, 0]))


def test_losses_are_the_papers_over_real_tokens_only():
    attention, x = layer().train(), torch.randn(2, 4, 12)
    real = torch.tensor([[1, 1, 1, 0], [0, 1, 1, 0]]).bool()
    attention(x.masked_fill(~real.unsqueeze(-1), float("nan")), Masks(True, real))
    losses = {loss.name: loss for loss in attention.auxiliary_losses()}
    logits = attention.router(x[real])
    p, counts = logits.softmax(-1), torch.zeros(6)
    for row in logits:
        counts[row.topk(3).indices] += 1
    balance = 6 * (counts / counts.sum() * p.mean(0)).sum()
    torch.testing.assert_close(losses["balance"].value, balance)
    torch.testing.assert_close(losses["router_z"].value, logits.exp().sum(-1).log().square().mean())
    assert (losses["balance"].weight, losses["router_z"].weight) == (0.01, 0.001)


def test_balance_is_one_where_all_experts_are_taken_alike_and_more_where_not():
    attention = layer(8, 2).train()
    with torch.no_grad():
        attention.router.weight.copy_(20 * torch.eye(4, 8))
    two = torch.eye(4).unsqueeze(1) + torch.eye(4).roll(1, 0).unsqueeze(1)  # each pair of neighbours once
    attention(nn.functional.pad(two, (0, 4)))
    assert attention.auxiliary_losses()[0].value.item() == pytest.approx(1, abs=1e-4)
    attention(nn.functional.pad(two[:1].expand(4, -1, -1), (0, 4)))
    assert attention.auxiliary_losses()[0].value.item() == pytest.approx(2, abs=1e-4)


def test_losses_train_the_router_and_are_absent_elsewhere():
    attention = layer().train()
    assert attention.auxiliary_losses() == []
    attention(torch.randn(2, 4, 12))
    for loss in attention.auxiliary_losses():
        assert torch.autograd.grad(loss.value, attention.router.weight, retain_graph=True)[0].abs().sum() > 0
    attention.eval()(torch.randn(2, 4, 12))
    assert attention.auxiliary_losses() == []
    repository = layer(variant="damcha_repo").train()
    repository(torch.randn(2, 4, 12))
    assert repository.auxiliary_losses() == []


def test_layer_is_copied_and_pickled_after_a_step_of_training():
    attention, x = layer().train(), torch.randn(2, 4, 12)
    wanted, _ = attention(x)
    for again in (copy.deepcopy(attention), pickle.loads(pickle.dumps(attention))):
        torch.testing.assert_close(again(x)[0], wanted)
    assert len(attention.auxiliary_losses()) == 2


def test_cache_holds_one_head():
    attention, cache = layer(), layer().new_cache(4)
    attention.eval()(torch.randn(2, 4, 12), Masks(True), cache=cache)
    assert cache.keys.shape == (2, 1, 4, 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"experts": 0}, "experts: got 0"),
        ({"chosen": 0}, "chosen: got 0"),
        ({"experts": 2, "chosen": 3}, "chosen: got 3 of 2 experts"),
        ({"balance_weight": -0.1}, "balance_weight: got -0.1"),
        ({"z_weight": INF}, "z_weight: got inf"),
        ({"z_weight": 0.1, "variant": "damcha_repo"}, "z_weight: got 0.1 with variant damcha_repo"),
        ({"variant": "repo"}, "variant: got 'repo'"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ZooError, match=f"^{message}"):
        MixtureOptions(**options)


def test_more_chosen_than_twice_the_heads_is_refused():
    with pytest.raises(ZooError, match=r"^chosen: got 7 of 6 experts"):
        layer(chosen=7)


def test_fewer_experts_than_heads_are_all_chosen():
    assert layer(experts=2).chosen == 2
