"""The checks of the contract catch what they are for: attentions with a flaw, from a file as ``ZOO_PLUGINS`` names."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.attention import contract
from tests.oracles.attentions import standard
from zoo.attention.base import ATTENTIONS
from zoo.registry import PLUGINS, load_plugin

ROOT = Path(__file__).parents[2]
PLUGIN = '''
"""Ordinary attention, and what goes wrong when one line is."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from zoo.attention import Attention, mix, option, register_attention


@register_attention("sound")
class Sound(Attention):
    def build(self):
        self.W_q, self.W_k, self.W_v, self.out_proj = (self.linear() for _ in range(4))

    def attend(self, x, masks, shared, cache, need_weights):
        x = self.before(x, masks, cache)
        q, k, v = (self.split_heads(project(x)) for project in (self.W_q, self.W_k, self.W_v))
        keys_real = None
        if cache is not None:
            k, v, keys_real = cache.append(k, v, masks.padding)
        y, weights = self.mix(q, k, v, masks, keys_real, need_weights)
        return self.out_proj(self.merge_heads(y)), weights

    def before(self, x, masks, cache):
        return x

    def mix(self, q, k, v, masks, keys_real, need_weights):
        return mix(q, k, v, masks, keys_real, self.dropout_p, need_weights)


@register_attention("looks_ahead")
class LooksAhead(Sound):
    """Centred by the mean of all tokens: of later ones too."""

    def before(self, x, masks, cache):
        return x - x.mean(dim=1, keepdim=True)


@register_attention("looks_ahead_when_shown")
class LooksAheadWhenShown(Sound):
    """Causal on one road only."""

    def mix(self, q, k, v, masks, keys_real, need_weights):
        if not need_weights:
            return super().mix(q, k, v, masks, keys_real, need_weights)
        weights = (q @ k.transpose(-1, -2) / self.head_dim**0.5).softmax(dim=-1)
        return weights @ v, weights


@register_attention("counts_padding")
class CountsPadding(Sound):
    """Scaled by the place of a token in its row, padding counted."""

    def before(self, x, masks, cache):
        start = 0 if cache is None else cache.length
        return x / torch.arange(start + 1, start + x.shape[1] + 1, dtype=x.dtype).view(1, -1, 1)


@register_attention("averages_padding")
class AveragesPadding(Sound):
    """Centred by a mean that divides by all tokens, padding included."""

    def before(self, x, masks, cache):
        return x - x.mean(dim=1, keepdim=True) if not masks.causal else x


@register_attention("forgets_its_prefix")
class ForgetsItsPrefix(Sound):
    """A running sum that starts anew with every call."""

    def before(self, x, masks, cache):
        return x if masks.padding is not None else x.cumsum(dim=1)


@register_attention("forgets_padding_in_its_cache")
class ForgetsPaddingInItsCache(Sound):
    """What was padding is a key again once it is in the cache."""

    def mix(self, q, k, v, masks, keys_real, need_weights):
        real = None if keys_real is None else torch.ones_like(keys_real)
        return super().mix(q, k, v, masks, masks.padding if k.shape[2] == q.shape[2] else real, need_weights)


@register_attention("is_nan_for_blind_queries")
class IsNanForBlindQueries(Sound):
    """A query that sees nothing has a softmax over nothing, which is NaN."""

    def mix(self, q, k, v, masks, keys_real, need_weights):
        scores = q @ k.transpose(-1, -2) / self.head_dim**0.5
        if masks.extra is not None:
            scores = scores.masked_fill(~masks.extra.bool(), float("-inf"))
        weights = scores.softmax(dim=-1)
        return weights @ v, weights if need_weights else None


@register_attention("drops_out_always")
class DropsOutAlways(Sound):
    """Dropout in evaluation too."""

    def mix(self, q, k, v, masks, keys_real, need_weights):
        return mix(q, k, F.dropout(v, self.dropout), masks, keys_real, 0.0, need_weights)


@dataclass(frozen=True)
class IdleOptions:
    width: int = option(4, "a width that nothing reads")


@register_attention("has_an_idle_option")
class HasAnIdleOption(Sound):
    Options = IdleOptions


@register_attention("has_an_idle_weight")
class HasAnIdleWeight(Sound):
    """A parameter that no output depends on."""

    def build(self):
        super().build()
        self.W_idle = self.linear()
'''


@pytest.fixture(scope="module")
def plugin(tmp_path_factory):
    """The flawed attentions, registered while this module's tests run."""
    file = tmp_path_factory.mktemp("plugin") / "flawed.py"
    file.write_text(PLUGIN, encoding="utf-8")
    ATTENTIONS.names()
    there = dict(ATTENTIONS._items)
    module = load_plugin(str(file))
    yield file
    ATTENTIONS._items.clear()
    ATTENTIONS._items.update(there)
    del sys.modules[module.__name__]


def checks(name):
    """Each check with the arguments that its flaw needs."""
    return {
        "causal": lambda: contract.check_causal(name, {}),
        "padding": lambda: contract.check_padding(name, {}, "left", False),
        "blind": lambda: contract.check_blind(name, {}),
        "cache": lambda: contract.check_cache(name, {}, "none", (2,)),
        "padded cache": lambda: contract.check_cache(name, {}, "left", (3, 4), seed=2),
        "dropout": lambda: contract.check_dropout(name),
        "options": lambda: contract.check_options_act(name),
        "copies": lambda: contract.check_copies(name, {}),
        "stack": lambda: contract.check_stack_is_causal(name, {}),
        "generation": lambda: contract.check_generation(name, {}),
        "learning": lambda: contract.check_learning(name, {}),
        "causal pictures": lambda: contract.check_causal_pictures(name),
    }


CAUGHT = [
    ("looks_ahead", "causal"),
    ("looks_ahead", "padding"),
    ("looks_ahead", "cache"),
    ("looks_ahead", "stack"),
    ("looks_ahead", "generation"),
    ("looks_ahead", "causal pictures"),
    ("looks_ahead_when_shown", "causal"),
    ("counts_padding", "padding"),
    ("counts_padding", "generation"),
    ("averages_padding", "padding"),
    ("forgets_its_prefix", "cache"),
    ("forgets_its_prefix", "generation"),
    ("forgets_padding_in_its_cache", "padded cache"),
    ("forgets_padding_in_its_cache", "generation"),
    ("is_nan_for_blind_queries", "blind"),
    ("drops_out_always", "dropout"),
    ("has_an_idle_option", "options"),
    ("has_an_idle_weight", "learning"),
]


@pytest.mark.parametrize("check", checks(""))
def test_one_without_a_flaw_passes(check, plugin):
    checks("sound")[check]()


@pytest.mark.parametrize(("name", "check"), CAUGHT)
def test_a_flaw_is_caught(name, check, plugin):
    with pytest.raises(AssertionError):
        checks(name)[check]()


def test_one_of_the_package_without_equations_fails(plugin, monkeypatch):
    monkeypatch.setattr(ATTENTIONS.get("sound"), "__module__", "zoo.attention.sound")
    with pytest.raises(pytest.fail.Exception, match=r"tests\.oracles\.attentions\.sound isn't there"):
        contract.check_equations("sound", {}, True, "none", 0)


def test_one_from_elsewhere_is_let_off_its_equations_with_a_reason(plugin):
    with pytest.raises(pytest.skip.Exception, match="sound is no attention of this package"):
        contract.check_equations("sound", {}, True, "none", 0)


def test_one_that_isnt_what_its_equations_say_is_caught(plugin, monkeypatch):
    monkeypatch.setattr(contract.importlib.util, "find_spec", lambda module: True)
    monkeypatch.setattr(contract.importlib, "import_module", lambda module: standard)
    contract.check_equations("sound", {}, True, "left", 0)
    with pytest.raises(AssertionError):
        contract.check_equations("looks_ahead", {}, True, "left", 0)


def test_a_file_that_looks_ahead_fails_the_common_tests_without_a_line_of_test(tmp_path):
    file = tmp_path / "flawed.py"
    file.write_text(PLUGIN, encoding="utf-8")
    tests = [str(ROOT / "tests/attention/test_contract.py"), "-k", "(looks_ahead- or sound-) and future", "-q", "-rfp"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *tests, "-p", "no:cacheprovider", "-p", "no:xdist"],
        cwd=ROOT,
        env=os.environ | {PLUGINS: str(file), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1, done.stdout[-3000:] + done.stderr[-3000:]
    found = set(re.findall(r"^(PASSED|FAILED) \S+::(\w+)\[(\w+)-defaults\]", done.stdout, re.MULTILINE))
    tests_of_future = ("test_no_future_token_changes_an_earlier_output", "test_a_stack_sees_no_future")
    assert found == {
        (result, test, name)
        for result, name in (("PASSED", "sound"), ("FAILED", "looks_ahead"))
        for test in tests_of_future
    }
