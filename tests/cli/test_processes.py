"""Runs in two processes, compiled runs, and the checkpoints they share with plain ones."""

import os
import subprocess
import sys

import pytest

from tests.cli.test_lightning import CONFIGS, QUIET
from zoo.checkpoint.identity import read_checkpoint
from zoo.tasks import LanguageModelTask

GRAPH = CONFIGS.parent / "graph" / "breast_cancer.yaml"


def run(*args: object, folder) -> str:
    """``lightning`` in processes of its own."""
    command = [sys.executable, "-m", "zoo", *map(str, args)]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout + done.stderr


def two(n: int) -> tuple[str, ...]:
    return (
        "--trainer.accelerator",
        "cpu",
        "--trainer.devices",
        str(n),
        *(("--trainer.strategy", "ddp") if n > 1 else ()),
    )


@pytest.mark.parametrize("first", [1, 2])
def test_checkpoints_of_one_and_of_two_processes_are_the_same(first, tmp_path):
    run("fit", "--config", GRAPH, "--trainer.max_epochs", 1, *two(first), *QUIET[:2], folder=tmp_path)
    last = tmp_path / "runs" / "graph" / "breast_cancer" / "version_0" / "checkpoints" / "last.ckpt"
    before = read_checkpoint(last)
    more = ("--ckpt_path", "last", "--trainer.max_epochs", 2, *two(3 - first), *QUIET[:2])
    run("fit", "--config", GRAPH, *more, folder=tmp_path)
    after = read_checkpoint(max(last.parent.glob("*.ckpt"), key=lambda path: path.stat().st_mtime))
    assert after["epoch"] > before["epoch"]
    assert set(after["state_dict"]) == set(before["state_dict"])
    assert after["global_step"] > before["global_step"]


def test_checkpoints_of_compiled_and_plain_runs_are_the_same(lightning, tiny_arguments, tmp_path, capsys):
    steps = ("--trainer.val_check_interval", 2, "--trainer.limit_val_batches", 1)
    config = CONFIGS / "stdlib_damcha.yaml"
    lightning("fit", "--config", config, *tiny_arguments, "--trainer.max_steps", 2, "--model.compile", "true", *steps)
    compiled = tmp_path / "runs" / "lm" / "stdlib_damcha" / "version_0" / "checkpoints" / "last.ckpt"
    saved = read_checkpoint(compiled)
    task = LanguageModelTask.load_from_checkpoint(compiled)
    assert set(saved["state_dict"]) == set(task.state_dict())
    assert task.network._compiled_call_impl is None, "for training only"
    capsys.readouterr()
    lightning("test", "--ckpt_path", compiled, *QUIET)
    assert "test/bits_per_byte" in capsys.readouterr().out
    more = ("--ckpt_path", "last", "--trainer.max_steps", 4, "--model.compile", "false", *steps)
    lightning("fit", "--config", config, *tiny_arguments, *more)
    assert read_checkpoint(compiled)["global_step"] == 4
