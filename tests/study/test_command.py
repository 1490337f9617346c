"""zoo study from the command line: run, killed, shared, repeated, reported."""

import contextlib
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
import yaml

from zoo.cli import worker, zoo_main
from zoo.study.running import Runner

ROOT = Path(__file__).parents[2]
# A figure that depends on rate and seed alone, told to a file of all executions.
PROGRAM = """
import json, math, sys, time, zlib
name, lr, seed, steps, effect, seconds, ran = sys.argv[1:]
with open(ran, "a") as file:
    file.write(f"{name} {lr} {seed} {steps}\\n")
time.sleep(float(seconds))
if effect == "diverge" and float(lr) > 1.5:
    print(json.dumps({"val/loss": math.nan, "test/loss": math.nan}))
    sys.exit()
if effect == "break":
    sys.exit("out of luck")
noise = zlib.crc32(seed.encode()) / 2**32 / 100 + zlib.crc32((name + seed).encode()) / 2**32 / 300
loss = 1 + abs(math.log(float(lr) / 2)) + noise + (0 if effect == "diverge" else float(effect))
print("training")
print(json.dumps({"val/loss": loss, "test/loss": loss}))
"""


@pytest.fixture
def study(tmp_path):
    """Writes a study whose arms are programs, each with its effect on the figure; returns its file."""
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "base.yaml").write_text("model: {}\n")

    def make(effects, seconds=0.0, name="programs", **changes):
        words = ["{lr}", "{seed}", "{steps}"]
        arms = {
            arm: {"command": [sys.executable, "program.py", arm, *words, str(effect), str(seconds), "ran.txt"]}
            for arm, effect in effects.items()
        }
        found = {"base": "base.yaml", "figure": "loss", "steps": 9, "lrs": [1.0, 2.0, 4.0], "matched": ["steps"]}
        found |= {"reference": next(iter(effects)), "seeds": [0, 1, 2, 3, 4], "arms": arms, **changes}
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(found, sort_keys=False))
        return path

    return make


def results(tmp_path, name="programs"):
    return pd.read_csv(tmp_path / "runs" / "studies" / name / "results.csv").set_index("arm")


def executions(tmp_path):
    return (tmp_path / "ran.txt").read_text().splitlines()


def started(*args):
    """``zoo ARGS`` in a process of its own, which takes one that is silent for four seconds for dead."""
    code = "import zoo.study.storage as s; s.HEARTBEAT_SECONDS = 1; from zoo.cli import zoo_main; zoo_main()"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, *map(str, args)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def test_a_planted_difference_and_noise_are_told_apart(study, tmp_path, capsys):
    zoo_main(["study", str(study({"plain": 0, "crippled": 0.05, "same": 0})), "--jobs", "2"])
    out = capsys.readouterr().out
    found = results(tmp_path)
    assert found.loc["crippled", "verdict"] == "worse"
    assert found.loc["same", "verdict"] == "no difference shown"
    assert found.loc["plain again", "verdict"] == "no difference shown"
    assert found.loc["crippled", "low"] > 0
    assert "At equal steps" in out
    assert "A/A" in out
    folder = tmp_path / "runs" / "studies" / "programs"
    for name in ("report.md", "report.html", "runs.csv", "tuning.png", "intervals_steps.png", "study.db"):
        assert (folder / name).stat().st_size > 500, name
    page = (folder / "report.html").read_text()
    assert "data:image/png;base64," in page
    assert "http" not in page.replace("https://optuna.org", ""), "needs nothing from elsewhere"
    # every run is named with a command that anyone can repeat, and gives the same again
    runs = pd.read_csv(folder / "runs.csv")
    row = runs[(runs.arm == "crippled") & (runs.stage == "confirm")].iloc[0]
    again = subprocess.run(shlex.split(row.command), capture_output=True, text=True, check=True)
    assert json.loads(again.stdout.splitlines()[-1])["test/loss"] == pytest.approx(row.value)
    before = len(executions(tmp_path))
    zoo_main(["study", str(study({"plain": 0, "crippled": 0.05, "same": 0}))])
    assert len(executions(tmp_path)) == before, "nothing was missing"


def test_a_diverged_and_a_failed_run_are_named_and_hold_nothing_up(study, tmp_path, capsys):
    path = study({"plain": 0, "wild": "diverge", "broken": "break"}, extensions=1)
    with pytest.raises(SystemExit) as ended:
        zoo_main(["study", str(path)])
    assert ended.value.code == 1
    out = capsys.readouterr().out
    assert "failed: out of luck; see " in out
    assert "broken" in out
    found = results(tmp_path)
    assert found.loc["plain", "seeds"] == 5
    assert found.loc["wild", "lr"] == 1.0, "of what did not diverge the best"
    assert found.loc["broken", "seeds"] == 0
    assert "is due again" in out


def test_a_study_that_is_killed_ends_with_the_table_of_an_unbroken_one(study, tmp_path):
    effects = {"plain": 0, "better": -0.05}
    zoo_main(["study", str(study(effects, name="unbroken", seeds=[0, 1]))])
    whole = results(tmp_path, "unbroken")
    path = study(effects, seconds=0.1, seeds=[0, 1])
    count = len(executions(tmp_path))
    with started("study", path) as run:
        deadline = time.monotonic() + 120
        while len(executions(tmp_path)) < count + 3:
            assert run.poll() is None, run.stdout.read().decode()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        run.kill()
    assert len(executions(tmp_path)) < 2 * count, "it was to be killed before its end"
    with started("study", path) as run:
        out = run.communicate(timeout=300)[0].decode()
    assert run.returncode == 0, out
    pd.testing.assert_frame_equal(results(tmp_path), whole)


def test_two_processes_share_a_study_and_never_run_a_run_twice(study, tmp_path):
    path = study({"plain": 0, "other": 0.01}, seconds=0.1, seeds=[0, 1])
    both = [started("study", path, "--jobs", 2) for _ in range(2)]
    outs = [run.communicate(timeout=300)[0].decode() for run in both]
    assert [run.returncode for run in both] == [0, 0], outs
    ran = executions(tmp_path)
    assert len(ran) == len(set(ran)) == 2 * 3 + 3 * 2
    assert results(tmp_path).loc["other", "seeds"] == 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--jobs", "0"], "error: --jobs: got 0; must be at least 1"),
        (["--report"], "error: --report: there is no runs/studies/programs; run the study first"),
        (["--storage", "nonsense://x"], "error: --storage: can't use nonsense://x"),
        (["--out", "base.yaml"], "error: --out: base.yaml is a file"),
    ],
)
def test_a_mistake_ends_in_one_line(given, message, study, capsys):
    with pytest.raises(SystemExit) as ended:
        zoo_main(["study", str(study({"plain": 0})), *given])
    assert ended.value.code == 2
    line = capsys.readouterr().err.strip()
    assert line.startswith(message)
    assert "\n" not in line


# ---------------------------------------------------------------------- arms of lightning fit


@pytest.fixture
def here(monkeypatch, capsys):
    """Workers' tasks are done in this process, which has imported everything."""

    def process(self, words, task, log, environment=None):
        try:
            with contextlib.redirect_stdout(None):
                worker.TASKS[task["do"]](task)
        except SystemExit as ended:
            log.write(capsys.readouterr().err.encode())
            return ended.code or 0
        except Exception as error:
            log.write(f"error: {error}\n".encode())
            return 2
        return 0

    monkeypatch.setattr(Runner, "_process", process)


GRAPH = {
    "base": str(ROOT / "configs" / "graph" / "breast_cancer.yaml"),
    "figure": "loss",
    "steps": 12,
    "lrs": [0.001, 0.003, 0.01],
    "extensions": 0,
    "seeds": [0, 1],
    "again": False,
    "reference": "two layers",
    "settings": {
        "model.d_ff": 32,
        "model.embed_dim": 8,
    },
    "arms": {"two layers": {"model.n_layers": 2}, "one layer": {"model.n_layers": 1}},
}


def graph_study(tmp_path, **changes):
    path = tmp_path / "graph.yaml"
    path.write_text(yaml.safe_dump({**GRAPH, **changes}, sort_keys=False))
    return str(path)


def test_arms_of_lightning_fit_are_measured_sized_run_and_tested(here, tmp_path, capsys):
    path = graph_study(tmp_path, matched=["steps", "parameters", "time"])
    zoo_main(["study", path])
    out = capsys.readouterr().out
    table = pd.read_csv(tmp_path / "runs/studies/graph/results.csv").set_index(["match", "arm"])
    assert set(table.seeds) == {2}
    assert table.loc[("parameters", "one layer"), "note"].startswith("model.d_ff ")
    assert table.loc[("time", "one layer"), "steps"] > 12
    assert table.loc[("steps", "one layer"), "mean"] != table.loc[("parameters", "one layer"), "mean"]
    assert "All arms saw the same batches in the same order" in out
    for column in ("parameters", "GFLOP a step", "step time", "training memory"):
        assert column in out
    assert not list(tmp_path.glob("runs/studies/graph/runs/*/checkpoints")), "weights are not kept"
    # a run is what its command says: the same figure from the command line
    row = (
        pd.read_csv(tmp_path / "runs/studies/graph/runs.csv").query("stage == 'confirm' and arm == 'one layer'").iloc[0]
    )
    folder = tmp_path / "runs/studies/graph/runs" / row.key
    again = {"fit": shlex.split((folder / "command.txt").read_text())[1:], "test": True, "keep": True}
    worker.TASKS["run"]({**again, "folder": str(folder)})
    assert json.loads((folder / "result.json").read_text())["figures"]["test/loss"] == pytest.approx(
        row.value, rel=1e-6
    )
    capsys.readouterr()
    zoo_main(["study", path, "--dry-run"])
    assert "# 0 runs" in capsys.readouterr().out


def test_a_setting_that_an_arm_can_not_have_is_refused_before_anything_runs(here, tmp_path, capsys):
    arms = {"two layers": None, "odd": {"model.num_heads": 3}}
    with pytest.raises(SystemExit) as ended:
        zoo_main(["study", graph_study(tmp_path, arms=arms)])
    assert ended.value.code == 2
    assert "error: arms.odd: " in capsys.readouterr().err
    assert not (tmp_path / "runs/studies/graph/runs").exists()
