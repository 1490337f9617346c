"""Intervals hold what they say, and verdicts follow from them."""

import math

import numpy as np
import pytest

from zoo.errors import ZooError
from zoo.study import compare, interval

SEEDS = 5


def studies(n, effect=0.0, seeds=SEEDS):
    """Differences of simulated studies: seeds share batches, so arms have noise in common and some of their own."""
    random = np.random.default_rng(seeds)
    common = random.normal(size=(n, seeds))
    reference = 1.6 + 0.01 * common + 0.003 * random.normal(size=(n, seeds))
    return 1.6 + 0.01 * common + 0.003 * random.normal(size=(n, seeds)) + effect, reference


@pytest.mark.parametrize("seeds", [3, 5])
def test_of_studies_where_nothing_differs_19_of_20_show_no_difference(seeds):
    arms, references = studies(400, seeds=seeds)
    verdicts = [
        compare(a, r, lower_is_better=True, resamples=999).verdict for a, r in zip(arms, references, strict=True)
    ]
    assert verdicts.count("no difference shown") >= 0.93 * len(verdicts)  # 0.95, less two standard errors of 400


@pytest.mark.parametrize(("lower_is_better", "verdict"), [(True, "worse"), (False, "better")])
def test_a_planted_difference_is_called_what_it_is(lower_is_better, verdict):
    arms, references = studies(20, effect=0.03)
    for a, r in zip(arms, references, strict=True):
        found = compare(a, r, lower_is_better)
        assert found.verdict == verdict
        assert found.low < 0.03 < found.high or abs(found.mean - 0.03) < 0.01
        assert compare(r, a, lower_is_better).verdict == ("better" if verdict == "worse" else "worse")


def test_noise_in_common_goes_out_of_paired_differences():
    arms, references = studies(1)
    paired = compare(arms[0], references[0], True)
    shuffled = compare(np.sort(arms[0])[::-1], np.sort(references[0]), True)
    assert paired.high - paired.low < (shuffled.high - shuffled.low) / 2


def test_a_diverged_run_counts_as_the_worst():
    reference = [1.0, 1.1, 1.2, 1.3, 1.4]
    one = compare([1.0, 1.1, math.inf, 1.3, 1.4], reference, True)
    assert (one.mean, one.high, one.verdict) == (math.inf, math.inf, "no difference shown")
    assert compare([2.0, 2.1, math.inf, 2.3, 2.4], reference, True).verdict == "worse"
    assert compare([math.inf] * 5, reference, True).verdict == "worse"
    assert compare([-math.inf] * 5, reference, False).verdict == "worse"
    assert compare([math.inf] * 5, [math.inf] * 5, True).verdict == "no difference shown"


def test_two_seeds_say_little_and_one_nothing():
    assert compare([1.0], [2.0], True).verdict == "too few seeds"
    low, high = interval([0.9, 1.1])
    assert low < 0 < high


def test_equal_figures_are_no_difference():
    assert compare([1.0, 2.0], [1.0, 2.0], True).verdict == "no difference shown"
    assert interval([0.5, 0.5, 0.5]) == (0.5, 0.5)


@pytest.mark.parametrize(("arm", "reference"), [([1.0], [1.0, 2.0]), ([math.nan, 1.0], [1.0, 1.0])])
def test_figures_that_are_no_pairs_are_refused(arm, reference):
    with pytest.raises(ZooError, match="compare: got"):
        compare(arm, reference, True)
