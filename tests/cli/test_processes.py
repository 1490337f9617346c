"""Runs in two processes, compiled runs, and the checkpoints they share with plain ones."""

import os
import subprocess
import sys
from itertools import pairwise

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


def test_checkpoints_of_one_and_of_two_processes_are_the_same(lightning, tmp_path):
    """One goes on with what two have left, and two with what one has."""
    last = tmp_path / "runs" / "graph" / "breast_cancer" / "version_0" / "checkpoints" / "last.ckpt"
    seen = []
    for epochs, processes in ((1, 1), (2, 2), (3, 1)):
        on = ("--ckpt_path", "last") if seen else ()
        arguments = ("fit", "--config", GRAPH, *on, "--trainer.max_epochs", epochs, *two(processes), *QUIET[:2])
        lightning(*arguments) if processes == 1 else run(*arguments, folder=tmp_path)
        seen.append(read_checkpoint(max(last.parent.glob("*.ckpt"), key=lambda path: path.stat().st_mtime)))
    for before, after in pairwise(seen):
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
