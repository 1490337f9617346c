"""The benchmarks' baselines compute what they are said to, and the command says what it can't do."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.oracles.compare import randomized
from zoo.attention.packed import PackedMultiheadAttention
from zoo.models.decoder import Decoder

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def load(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


@pytest.mark.parametrize("share", [True, False])
def test_literal_decoder_is_the_decoder(share, load):
    decoder = randomized(Decoder(6, 3, 5, 2, 0.0, share_mlp=share, mlp_hidden=(4,)), 0)
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    torch.testing.assert_close(load("literal").LiteralDecoder(decoder)(x), decoder(x), rtol=1e-10, atol=1e-10)


def test_dense_baseline_is_packed_attention(load):
    literal = load("literal")
    source, target = literal.power_law_graph(20, 3)
    dense = literal.DenseMasked(source, target, 20, 8, 2).double()
    packed = PackedMultiheadAttention(source, target, 20, 20, 8, 2).double()
    with torch.no_grad():
        for name in ("q", "k", "v", "out"):
            getattr(packed, f"{name}_proj").load_state_dict(getattr(dense, name).state_dict())
    x = torch.randn(3, 20, 8, dtype=torch.float64)
    torch.testing.assert_close(dense(x), packed(x, x, x)[0], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("n", "degree"), [(50, 4), (300_000, 4)])
def test_power_law_graph_has_distinct_edges_and_a_key_for_every_node(n, degree, load):
    source, target = load("literal").power_law_graph(n, degree)
    assert len(np.unique(source * n + target)) == len(source)
    counts = np.bincount(target, minlength=n)
    assert counts.min() >= 1
    assert 0.8 * degree < counts.mean() < 1.4 * degree
    assert counts.max() > 10 * degree or n == 50


def test_ratios_are_taken_round_by_round_and_the_best_setting_of_a_baseline_counts(load, monkeypatch):
    measure = load("measure")
    times = {"zoo": [1.0, 2.0, 4.0], "base|1": [3.0, 6.0, 12.0], "base|2": [2.0, 4.0, 8.0], "other": [0.5, 1.0, 2.0]}
    monkeypatch.setattr(measure, "interleaved", lambda steps, rounds, device: {k: list(v) for k, v in times.items()})
    nothing = {name: lambda device: lambda: None for name in times}
    aims = [measure.Aim("base", at_least=2.5), measure.Aim("other", at_most=2.5)]
    base, other = measure.run_case(measure.Case("c", "work", nothing, aims), 3, "cpu")
    assert (base.baseline, base.ratio, base.met) == ("base, chunks of 2", 2.0, False)
    assert (other.ratio, other.met) == (0.5, True)
    lines = measure.table([base, other]).splitlines()
    assert "2.00 x as fast" in lines[2]
    assert lines[2].endswith("| no |")
    assert "2.00 x its time" in lines[3]
    assert lines[3].endswith("| yes |")


def test_figures_of_cases_not_run_this_time_stay(load, tmp_path):
    measure = load("measure")

    def result(name, ratio):
        return measure.Result(name, name, "base", ratio, ratio, ratio, 1.0, ratio, "", None)

    path = tmp_path / "cpu.json"
    measure.save(path, {}, [result("a", 1.0), result("b", 2.0)], {"tokens": {}})
    measure.save(path, {}, [result("a", 3.0)], {})
    saved = json.loads(path.read_text())
    assert {row["name"]: row["ratio"] for row in saved["results"]} == {"a": 3.0, "b": 2.0}
    assert "tokens" in saved["curves"]


def test_a_case_runs_and_leaves_a_table_and_json(tmp_path):
    command = [sys.executable, str(BENCHMARKS / "run.py"), "generation", "--rounds", "2", "--threads", "1"]
    done = subprocess.run([*command, "--out", str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "| one more token after 1,024" in done.stdout
    saved = json.loads((tmp_path / "cpu.json").read_text())
    assert saved["machine"]["threads"] == 1
    assert {row["baseline"] for row in saved["results"]} == {"no cache", "standard attention"}
    assert all(row["ratio"] > 0 for row in saved["results"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nonsense"], "nonsense: no such case"),
        (["generation", "--rounds", "1"], "--rounds: got 1"),
        (["generation", "--threads", "0"], "--threads: got 0"),
        pytest.param(
            ["generation", "--device", "cuda"],
            "--device: got cuda",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here"),
        ),
    ],
)
def test_what_it_can_not_do_is_said_in_a_line(words, message, load, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["run.py", *words])
    with pytest.raises(SystemExit) as stop:
        load("run").main()
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
