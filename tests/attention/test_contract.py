"""Every registered attention keeps the contract. None is named here: one that is added is tested by being there."""

import pytest
import torch

from tests.attention import contract
from zoo.attention import Attention, Masks, list_attentions, mix
from zoo.attention.base import ATTENTIONS

NAMES = list_attentions()
CHOICES = [(name, options) for name in NAMES for options in contract.choices(name)]
ids = [f"{name}-{'-'.join(f'{k}={v}' for k, v in options.items()) or 'defaults'}" for name, options in CHOICES]
each = pytest.mark.parametrize("name", NAMES)
each_choice = pytest.mark.parametrize(("name", "options"), CHOICES, ids=ids)


@each_choice
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_values_and_gradients_are_those_of_the_equations(name, options, causal):
    for seed, kind in enumerate(("none", "left", "scattered")):
        contract.check_equations(name, options, causal, kind, seed)


@each_choice
def test_no_future_token_changes_an_earlier_output(name, options):
    contract.check_causal(name, options)


@each_choice
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_padding_never_leaks(name, options, causal):
    for kind in contract.KINDS:
        contract.check_padding(name, options, kind, causal)


@each_choice
def test_a_query_that_sees_nothing_gives_zero_and_finite_gradients(name, options):
    contract.check_blind(name, options)


@each_choice
def test_a_cache_gives_what_one_pass_gives(name, options):
    for kind, cuts in (("none", (2, 3)), ("left", (3, 4)), ("right", (1,)), ("scattered", (1, 2, 4))):
        contract.check_cache(name, options, kind, cuts)


@each_choice
def test_copies_are_the_same_layer(name, options):
    contract.check_copies(name, options)


@each_choice
def test_low_precision_stays_near(name, options):
    contract.check_low_precision(name, options)


@each
def test_options_are_checked_and_explained(name):
    contract.check_options(name)


@each
def test_dropout_acts_in_training_only(name):
    contract.check_dropout(name)


@each
def test_wrong_sizes_are_refused(name):
    contract.check_sizes(name)


@each_choice
def test_a_stack_sees_no_future(name, options):
    contract.check_stack_is_causal(name, options)


@each_choice
def test_cached_generation_is_uncached_generation(name, options):
    contract.check_generation(name, options)


@each_choice
def test_two_steps_lower_the_loss_of_a_batch(name, options):
    contract.check_learning(name, options)


@each
def test_matrices_and_losses_are_what_they_say(name):
    contract.check_shown(name)


@each
def test_a_compiled_model_is_the_same(name):
    contract.check_compiled(name)


@each
def test_a_model_is_exported_or_says_why_not(name):
    contract.check_exported(name)


@each
@pytest.mark.parametrize("settings", [{}, {"class_token": False, "global_pool": "avg"}], ids=["token", "average"])
def test_pictures_are_learned_with_and_without_checkpointing(name, settings):
    contract.check_pictures(name, **settings)


@each
def test_causal_pictures_see_no_later_patch(name):
    contract.check_causal_pictures(name)


# ---------------------------------------------------------------------- the checks catch what they are for


class _Flawed(Attention):
    """Ordinary attention, with a place for a flaw."""

    def build(self):
        self.W_q, self.W_k, self.W_v, self.out_proj = (self.linear() for _ in range(4))

    def attend(self, x, masks, shared, cache, need_weights):
        x = self.before(x, masks, cache)
        q, k, v = (self.split_heads(project(x)) for project in (self.W_q, self.W_k, self.W_v))
        keys_real = None
        if cache is not None:
            k, v, keys_real = cache.append(k, v, masks.padding)
        y, weights = mix(q, k, v, masks, keys_real, self.dropout_p, need_weights)
        return self.out_proj(self.merge_heads(y)), weights

    def before(self, x, masks, cache):
        return x


class _LooksAhead(_Flawed):
    def before(self, x, masks, cache):
        return x - x.mean(dim=1, keepdim=True)


class _CountsPadding(_Flawed):
    def before(self, x, masks, cache):
        return x / torch.arange(1, x.shape[1] + 1, dtype=x.dtype).view(1, -1, 1)


class _ForgetsItsPrefix(_Flawed):
    def before(self, x, masks, cache):
        return x if masks.padding is not None else x.cumsum(dim=1)


@pytest.fixture
def flawed(monkeypatch):
    """Register a flawed attention for the length of a test."""

    def register(kind):
        monkeypatch.setitem(ATTENTIONS._items, "flawed", kind)
        monkeypatch.setattr(kind, "name", "flawed")
        return "flawed"

    return register


def test_the_same_without_a_flaw_passes(flawed):
    name = flawed(_Flawed)
    contract.check_causal(name, {})
    contract.check_padding(name, {}, "left", True)
    contract.check_cache(name, {}, "none", (2,))
    contract.check_stack_is_causal(name, {})


def test_one_that_looks_ahead_is_caught(flawed):
    name = flawed(_LooksAhead)
    with pytest.raises(AssertionError):
        contract.check_causal(name, {})
    with pytest.raises(AssertionError):
        contract.check_stack_is_causal(name, {})
    with pytest.raises(AssertionError):
        contract.check_generation(name, {})


def test_one_that_counts_padding_is_caught(flawed):
    with pytest.raises(AssertionError):
        contract.check_padding(flawed(_CountsPadding), {}, "left", True)


def test_one_whose_cache_forgets_is_caught(flawed):
    with pytest.raises(AssertionError):
        contract.check_cache(flawed(_ForgetsItsPrefix), {}, "none", (2,))


def test_one_of_the_package_without_equations_fails(flawed, monkeypatch):
    name = flawed(_Flawed)
    monkeypatch.setattr(_Flawed, "__module__", "zoo.attention.flawed")
    with pytest.raises(pytest.fail.Exception, match=r"tests\.oracles\.attentions\.flawed isn't there"):
        contract.check_equations(name, {}, True, "none", 0)


def test_masks_of_any_kind_hide_the_same_keys():
    x, seen = contract.tokens(), torch.rand(contract.T, contract.T) < 0.6
    for name in NAMES:
        attention = contract.layer(name)
        added = torch.zeros(seen.shape, dtype=x.dtype).masked_fill(~seen, float("-inf"))
        expected = attention(x, Masks(extra=seen))[0]
        for mask in (seen.long(), added, seen.expand(2, -1, -1), seen.expand(2, 1, -1, -1)):
            torch.testing.assert_close(attention(x, Masks(extra=mask))[0], expected, **contract.SAME)
