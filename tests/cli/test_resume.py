"""A run killed at any moment goes on from its last checkpoint to the losses of an unbroken one."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
import yaml

from zoo.cli import lightning_main

CONFIG = Path(__file__).parents[2] / "configs" / "lm" / "stdlib_damcha.yaml"
STEPS = 120


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """The default config with dropout, losses in a CSV file, and a checkpoint every 7 steps, in mid-epoch too."""
    settings = yaml.safe_load(CONFIG.read_text())
    settings["model"]["init_args"]["dropout"] = 0.1
    settings["trainer"] |= {"log_every_n_steps": 1, "max_steps": STEPS, "val_check_interval": 25}
    settings["trainer"]["limit_val_batches"] = 2
    settings["trainer"]["logger"] = {
        "class_path": "lightning.pytorch.loggers.CSVLogger",
        "init_args": {"save_dir": "runs", "name": "r", "flush_logs_every_n_steps": 1},
    }
    settings["trainer"]["callbacks"] = [
        {
            "class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
            "init_args": {"filename": "{step}", "every_n_train_steps": 7, "save_top_k": -1, "save_last": True},
        }
    ]
    path = tmp_path_factory.mktemp("config") / "resume.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


@pytest.fixture(scope="module")
def small(tiny_arguments):
    # Some 50 batches an epoch: the run crosses two ends of one.
    return [*tiny_arguments, "--data.window", "64", "--data.batch_size", "8"]


def losses(folder):
    table = pd.read_csv(folder / "runs" / "r" / "version_0" / "metrics.csv")
    return table.dropna(subset="train/loss").set_index("step")["train/loss"]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory, config, small, shared_cache):
    folder = tmp_path_factory.mktemp("unbroken")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("ZOO_CACHE", str(shared_cache))
        patch.setattr(sys, "argv", ["lightning", "fit", "--config", str(config), *small])
        lightning_main()
    return losses(folder)


@pytest.mark.parametrize("kill_at", [7, 70])
def test_killed_run_resumes_to_the_same_losses(kill_at, config, small, unbroken, lightning, tmp_path, shared_cache):
    command = [sys.executable, "-m", "zoo", "fit", "--config", str(config), *small]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ZOO_CACHE": str(shared_cache)}
    checkpoints = tmp_path / "runs" / "r" / "version_0" / "checkpoints"

    def newest():
        return max((int(re.search(r"\d+", path.stem)[0]) for path in checkpoints.glob("step=*.ckpt")), default=0)

    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as run:
        deadline = time.monotonic() + 120
        while newest() < kill_at or not (checkpoints / "last.ckpt").exists():
            assert run.poll() is None, run.stderr.read().decode()
            assert time.monotonic() < deadline, "no checkpoint in two minutes"
            time.sleep(0.005)
        run.send_signal(signal.SIGKILL)
    start = newest()
    assert kill_at <= start < STEPS, "the run was to be killed before its end"

    lightning("fit", "--config", config, *small, "--ckpt_path", "last")
    resumed = losses(tmp_path)
    assert resumed.index.max() == STEPS - 1
    rest = resumed[resumed.index >= start]
    assert len(rest) >= STEPS - start - 7
    # the same arithmetic in the same order: the printed losses are the same to the last digit
    pd.testing.assert_series_equal(rest, unbroken[rest.index], rtol=0, atol=0)
