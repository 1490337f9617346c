"""Every registered attention keeps the contract. None is named here: one that is added is tested by being there."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.attention import contract
from tests.oracles.compare import SEEDS, examples
from zoo.attention import list_attentions

NAMES = list_attentions()
CHOICES = [(name, options) for name in NAMES for options in contract.choices(name)]
IDS = [f"{name}-{'-'.join(f'{k}={v}' for k, v in options.items()) or 'defaults'}" for name, options in CHOICES]
PADDINGS = st.sampled_from(["none", *contract.KINDS])
SIZES = st.tuples(st.integers(1, 2), st.integers(1, 3), st.sampled_from([1, 2, 3, 4]), st.sampled_from([1, 2, 3, 4]))
each = pytest.mark.parametrize("name", NAMES)
each_choice = pytest.mark.parametrize(("name", "options"), CHOICES, ids=IDS)
both_ways = pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])


# ---------------------------------------------------------------------- a layer


@each_choice
@both_ways
def test_values_and_gradients_are_those_of_the_equations(name, options, causal):
    contract.check_equations(name, options, causal, "scattered", 0)


@each_choice
@examples(3)
@given(size=SIZES, causal=st.booleans(), kind=PADDINGS, bias=st.booleans(), layer_idx=st.integers(0, 2), seed=SEEDS)
def test_values_and_gradients_are_those_of_the_equations_at_any_size(
    name, options, size, causal, kind, bias, layer_idx, seed
):
    contract.check_equations(name, options, causal, kind, seed, size, bias, layer_idx)


@each_choice
def test_no_future_token_changes_an_earlier_output(name, options):
    contract.check_causal(name, options)


@each_choice
@both_ways
def test_padding_never_leaks(name, options, causal):
    for kind in contract.KINDS:
        contract.check_padding(name, options, kind, causal)


@each_choice
def test_a_query_that_sees_nothing_gives_zero_and_finite_gradients(name, options):
    contract.check_blind(name, options)


@each
def test_masks_of_any_kind_hide_the_same_keys(name):
    contract.check_masks(name)


@each_choice
@examples(5)
@given(
    kind=st.sampled_from(["none", *contract.KINDS, "then none"]),
    cuts=st.sets(st.integers(1, contract.T - 1), min_size=1),
    seed=SEEDS,
)
def test_a_cache_gives_what_one_pass_gives(name, options, kind, cuts, seed):
    contract.check_cache(name, options, kind, sorted(cuts), seed)


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
def test_every_option_changes_something(name):
    contract.check_options_act(name)


@each
def test_dropout_acts_in_training_only(name):
    contract.check_dropout(name)


@each
def test_wrong_sizes_are_refused(name):
    contract.check_sizes(name)


@each_choice
def test_weights_matrices_and_losses_are_what_they_say(name, options):
    contract.check_shown(name, options)


# ---------------------------------------------------------------------- a language model


@each_choice
def test_a_stack_sees_no_future(name, options):
    contract.check_stack_is_causal(name, options)


@each_choice
def test_cached_generation_is_uncached_generation(name, options):
    contract.check_generation(name, options)


@each_choice
def test_three_steps_lower_the_loss_of_a_batch(name, options):
    contract.check_learning(name, options)


@each
def test_order_is_known(name):
    contract.check_positions(name)


@each
def test_a_compiled_layer_is_the_same(name):
    contract.check_compiled(name)


@each
def test_a_model_is_exported_or_says_why_not(name):
    contract.check_exported(name)


# ---------------------------------------------------------------------- a vision transformer


@each
@pytest.mark.parametrize("settings", [{}, {"class_token": False, "global_pool": "avg"}], ids=["token", "average"])
def test_pictures_are_learned_with_and_without_checkpointing(name, settings):
    contract.check_pictures(name, **settings)


@each
def test_causal_pictures_see_no_later_patch(name):
    contract.check_causal_pictures(name)


@each
def test_pictures_of_another_size_are_taken(name):
    contract.check_picture_sizes(name)


@each
def test_timm_makes_the_model_by_name(name):
    contract.check_timm(name)
