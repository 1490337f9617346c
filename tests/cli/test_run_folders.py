"""Where a run leaves its states and settings, how it is found again, and with which settings it goes on."""

import json
import os
import re
from pathlib import Path

import pandas as pd
import pytest
import torch
import yaml
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.cli.conftest import CONFIGS, NAMES
from tests.cli.test_lightning import refused
from zoo.checkpoint.identity import read_checkpoint

GRAPH = ("--config", CONFIGS / "graph" / "breast_cancer.yaml", "--trainer.enable_progress_bar", "false")
GRAPH += ("--trainer.enable_model_summary", "false", "--trainer.limit_train_batches", "4")
TWO, FOUR = ("--trainer.max_epochs", "2"), ("--trainer.max_epochs", "4")
LAST = ("--ckpt_path", "last")
CSV = {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": "runs", "name": "table"}}
BOARD = {
    "class_path": "lightning.pytorch.loggers.TensorBoardLogger",
    "init_args": {"save_dir": "runs", "name": "board"},
}
BEST = {"class_path": "ModelCheckpoint", "init_args": {"monitor": "val/loss", "filename": "best", "save_last": True}}


def logger(*which):
    return "--trainer.logger", json.dumps(list(which))


def step_of(file):
    return read_checkpoint(file)["global_step"]


def files():
    return sorted(path.as_posix() for path in Path().rglob("*") if path.is_file())


# ---------------------------------------------------------------------- the newest state


@pytest.mark.parametrize("config", NAMES)
def test_every_config_keeps_its_newest_state(config):
    callbacks = yaml.safe_load((CONFIGS / config).read_text())["trainer"]["callbacks"]
    (keeping,) = [each for each in callbacks if "Checkpoint" in each["class_path"]]
    assert keeping["class_path"] == "zoo.callbacks.BestAndLastCheckpoint"
    assert keeping["init_args"]["save_last"] is True


@pytest.fixture
def overfitting(monkeypatch):
    """Every epoch but the first makes a model worse."""
    monkeypatch.setattr(
        ModelCheckpoint, "check_monitor_top_k", lambda self, _, current: current is not None and not self.best_k_models
    )


def test_a_killed_run_goes_on_from_its_newest_state_not_from_its_best(overfitting, lightning, tmp_path):
    lightning("fit", *GRAPH, *FOUR)
    run = tmp_path / "runs/graph/breast_cancer/version_0/checkpoints"
    assert step_of(run / "best.ckpt") == 4
    assert step_of(run / "last.ckpt") == 16
    lightning("fit", *GRAPH, "--trainer.max_epochs", "5", *LAST)
    assert step_of(run / "last.ckpt") == 20


def test_lightnings_own_callback_in_a_config_keeps_the_newest_state_too(overfitting, lightning, tmp_path):
    callbacks = json.dumps([{**BEST, "class_path": "lightning.pytorch.callbacks.ModelCheckpoint"}])
    lightning("fit", *GRAPH, *FOUR, "--trainer.callbacks", callbacks)
    (run,) = tmp_path.glob("runs/graph/breast_cancer/version_0/checkpoints")
    assert step_of(run / "last.ckpt") == 16


def test_a_run_that_ends_between_two_validations_leaves_its_last_step(lightning, tmp_path):
    ends = ("--trainer.val_check_interval", "2", "--trainer.max_steps", "7", "--trainer.max_epochs", "-1")
    lightning("fit", *GRAPH, *ends)
    assert step_of(tmp_path / "runs/graph/breast_cancer/version_0/checkpoints/last.ckpt") == 7


def test_a_checkpoint_from_before_goes_on_with_its_best_score(lightning, tmp_path):
    lightning("fit", *GRAPH, *TWO)
    (folder,) = tmp_path.glob("runs/graph/breast_cancer/version_0/checkpoints")
    states = read_checkpoint(folder / "last.ckpt")["callbacks"]
    assert [name for name in states if name.startswith("ModelCheckpoint{'monitor': 'val/loss'")]


# ---------------------------------------------------------------------- found again


@pytest.mark.parametrize(
    "arguments",
    [
        logger(BOARD, CSV),
        logger(CSV, BOARD),
        ("--trainer.logger", "false"),
        ("--trainer.logger", "true"),
        ("--trainer.callbacks", json.dumps([{**BEST, "init_args": {**BEST["init_args"], "dirpath": "mine"}}])),
        ("--trainer.logger", "false", "--trainer.default_root_dir", "elsewhere"),
    ],
)
def test_last_is_found_wherever_a_run_keeps_its_states(arguments, lightning, tmp_path):
    lightning("fit", *GRAPH, *TWO, *arguments)
    (before,) = tmp_path.rglob("last.ckpt")
    assert step_of(before) == 8
    lightning("fit", *GRAPH, *FOUR, *arguments, *LAST)
    (after,) = tmp_path.rglob("last.ckpt")
    assert after == before, "the run goes on in its own folder"
    assert step_of(after) == 16
    lightning("test", *GRAPH, *arguments, *LAST)


def test_a_table_of_figures_is_not_lost_when_its_run_goes_on(lightning, capsys, tmp_path):
    arguments = (*logger(CSV), "--trainer.log_every_n_steps", "1")
    lightning("fit", *GRAPH, *TWO, *arguments)
    before = (tmp_path / "runs/table/version_0/metrics.csv").read_text()
    lightning("fit", *GRAPH, *FOUR, *arguments, *LAST)
    assert (tmp_path / "runs/table/version_0/metrics.1.csv").read_text() == before
    assert "Figures of the run so far: runs/table/version_0/metrics.1.csv" in capsys.readouterr().err
    assert pd.read_csv(tmp_path / "runs/table/version_0/metrics.csv")["step"].max() == 15


def test_a_run_whose_folder_was_renamed_goes_on_with_its_best(overfitting, lightning):
    lightning("fit", *GRAPH, *TWO)
    Path("runs/graph/breast_cancer/version_0").rename("runs/graph/breast_cancer/mine")
    lightning("fit", *GRAPH, *FOUR, *LAST)
    folder = Path("runs/graph/breast_cancer/mine/checkpoints")
    assert (step_of(folder / "best.ckpt"), step_of(folder / "last.ckpt")) == (4, 16)


def test_a_home_folder_is_expanded_in_the_folder_of_a_logger(lightning, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    arguments = logger({**CSV, "init_args": {"save_dir": "~/r", "name": "n"}})
    lightning("fit", *GRAPH, *TWO, *arguments)
    lightning("fit", *GRAPH, *FOUR, *arguments, *LAST)
    assert step_of(tmp_path / "home/r/n/version_0/checkpoints/last.ckpt") == 16
    assert not Path("~").exists()


def test_last_says_where_it_looked(lightning, capsys):
    message = refused(lightning, capsys, "fit", *GRAPH, *logger(BOARD), *LAST)
    assert re.search(r"--ckpt_path: got last, but no run under 'runs.board' has a last.ckpt", message)


def test_a_home_folder_is_expanded_in_the_path_of_a_checkpoint(lightning, tmp_path, monkeypatch):
    lightning("fit", *GRAPH, *TWO)
    (tmp_path / "runs/graph/breast_cancer/version_0/checkpoints/last.ckpt").rename(tmp_path / "mine.ckpt")
    monkeypatch.setenv("HOME", str(tmp_path))
    lightning("test", "--ckpt_path", "~/mine.ckpt", "--trainer.logger", "false")
    lightning("fit", *GRAPH, "--model.pretrained", "~/mine.ckpt", "--trainer.max_steps", "1")


# ---------------------------------------------------------------------- nothing outside of it


@pytest.mark.parametrize("command", ["fit", "test", "validate", "predict"])
def test_a_users_own_config_stays_as_it_is(command, lightning, tmp_path):
    text = (CONFIGS / "graph" / "breast_cancer.yaml").read_text()
    Path("config.yaml").write_text(text)
    arguments = ("--config", "config.yaml", "--trainer.logger", "false", *TWO, "--trainer.limit_train_batches", "2")
    lightning("fit", *arguments)
    if command != "fit":
        lightning(command, *arguments, *LAST)
    assert Path("config.yaml").read_text() == text
    kept = [name for name in files() if not name.startswith("lightning_logs/version_0/")]
    assert kept == ["config.yaml", *(["predictions.csv"] if command == "predict" else [])]
    assert "max_epochs: 2" in Path("lightning_logs/version_0/config.yaml").read_text()


@pytest.mark.parametrize("arguments", [(), ("--trainer.logger", "false")])
def test_a_trial_run_leaves_nothing(arguments, lightning):
    lightning("fit", *GRAPH, "--trainer.fast_dev_run", "1", *arguments)
    assert files() == []


def test_a_name_that_is_no_utf8_is_refused_in_words(lightning, capsys):
    message = refused(lightning, capsys, "fit", *GRAPH, "--data.features", "caf\udce9.csv")
    assert "got a name whose bytes are no UTF-8; rename that file or folder" in message


def test_two_runs_without_a_logger_have_a_folder_each(lightning):
    for _ in range(2):
        lightning("fit", *GRAPH, *TWO, "--trainer.logger", "false")
    for number in range(2):
        assert step_of(f"lightning_logs/version_{number}/checkpoints/last.ckpt") == 8
    assert {name.split("/")[0] for name in files()} == {"lightning_logs"}


# ---------------------------------------------------------------------- with the settings it had

CHANGED = {
    "graph/breast_cancer.yaml": [
        *("data.batch_size=16", "data.split_seed=1", "data.val_fraction=0.2", "model.dropout=0.2", "model.warmup=0.3"),
        *("model.min_lr=0.1", "model.class_weights=balanced", "model.weight_decay=0.2", "model.lr=0.1"),
    ],
    "lm/own_text.yaml": ["data.window=8", "data.batch_size=2", "model.dropout=0.2", "data.split_seed=1"],
    "vit/own_folder.yaml": [
        *("model.mixup=0.3", "model.cutmix=0.3", "model.label_smoothing=0.2", "data.rotate=5", "data.split_seed=3"),
    ],
}


@pytest.fixture(scope="module")
def states(tmp_path_factory):
    return tmp_path_factory.mktemp("states")


@pytest.mark.parametrize(("config", "setting"), [(name, each) for name in CHANGED for each in CHANGED[name]])
def test_a_run_goes_on_with_no_other_settings(config, setting, states, small, lightning, capsys):
    file = states / f"{Path(config).stem}.ckpt"
    arguments = (*small(config), "--trainer.max_epochs", "-1", "--trainer.limit_val_batches", "1")
    if not file.exists():
        lightning("fit", *arguments, "--trainer.max_steps", "2")
        (last,) = Path("runs").rglob("last.ckpt")
        last.rename(file)
    name = setting.partition("=")[0]
    message = refused(
        lightning, capsys, "fit", *arguments, "--trainer.max_steps", "3", "--ckpt_path", file, f"--{setting}"
    )
    assert f"{name}: " in message
    assert "A run goes on with the settings it had" in message


def test_settings_that_change_no_training_may_change(lightning, small, tmp_path):
    arguments = (*small("lm/own_text.yaml"), "--trainer.limit_val_batches", "1", "--trainer.val_check_interval", "2")
    lightning("fit", *arguments, "--trainer.max_steps", "2")
    free = ("--model.temperature", "0.5", "--model.chunk_size", "4", "--data.num_workers", "1")
    lightning("fit", *arguments, *free, "--trainer.max_steps", "4", *LAST)
    assert step_of(tmp_path / "runs/lm/own_text/version_0/checkpoints/last.ckpt") == 4


def test_a_changed_trainer_and_seed_are_said(lightning, capsys, caplog, recwarn):
    lightning("fit", *GRAPH, *TWO)
    caplog.clear()
    changed = ("--trainer.accumulate_grad_batches", "2", "--trainer.gradient_clip_val", "0.5", "--seed_everything", "7")
    lightning("fit", *GRAPH, *FOUR, *changed, *LAST)
    said = " ".join(str(warning.message) for warning in recwarn)
    assert "goes on with accumulate_grad_batches 2, which was 1; gradient_clip_val 0.5, which was 1.0" in said
    assert "seed_everything: 7 here, but a run keeps the seed it began with, 0" in caplog.text


# ---------------------------------------------------------------------- what people try first


@pytest.mark.parametrize("config", ["graph/breast_cancer.yaml", "lm/own_text.yaml", "vit/own_folder.yaml"])
def test_one_batch_can_be_learned_by_heart(config, small, lightning, tmp_path):
    seen = []
    from zoo.tasks import ZooTask

    def keep(self, batch, number):
        found = batch if isinstance(batch, torch.Tensor) else batch.get("image", batch.get("values"))
        seen.append(found.clone())

    original, ZooTask.on_train_batch_start = ZooTask.on_train_batch_start, keep
    try:
        lightning(
            *("fit", *small(config), "--trainer.overfit_batches", "1", "--trainer.max_epochs", "3"),
            *("--trainer.val_check_interval", "1.0", "--trainer.check_val_every_n_epoch", "1"),
        )
    finally:
        ZooTask.on_train_batch_start = original
    assert len(seen) == 3
    assert all(torch.equal(batch.nan_to_num(), seen[0].nan_to_num()) for batch in seen)


def test_a_monitor_that_is_no_figure_is_refused_in_one_line(lightning, capsys):
    stopping = ("--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor", "val/los")
    message = refused(lightning, capsys, "fit", *GRAPH, *TWO, *stopping)
    assert "EarlyStopping.monitor: got 'val/los'; this run has" in message
    assert "'val/loss'" in message


def test_averages_of_the_weights_leave_indices_alone(small, lightning, tmp_path):
    averaged = ("--trainer.callbacks+=EMAWeightAveraging", "--trainer.callbacks.decay=0.9")
    lightning("fit", *GRAPH, *TWO, *averaged)
    checkpoint = read_checkpoint(tmp_path / "runs/graph/breast_cancer/version_0/checkpoints/last.ckpt")
    for name, tensor in checkpoint["state_dict"].items():
        if not tensor.is_floating_point():
            assert torch.equal(tensor, checkpoint["current_model_state"][name]), name
    lightning("test", *GRAPH, *LAST)


def test_averages_of_a_language_model_count_the_bytes_of_its_tokens(small, lightning, monkeypatch):
    from zoo.tasks import LanguageModelTask

    sizes = []
    original = LanguageModelTask._evaluate
    monkeypatch.setattr(
        LanguageModelTask, "_evaluate", lambda self, *given: (sizes.append(self.bytes_of_token), original(self, *given))
    )
    averaged = ("--trainer.callbacks+=EMAWeightAveraging", "--trainer.callbacks.decay=0.9")
    lightning(
        "fit", *small("lm/own_text.yaml"), *averaged, "--trainer.max_steps", "6", "--trainer.val_check_interval", "3"
    )
    assert len(sizes) > 2
    assert all(torch.equal(each, sizes[0]) for each in sizes)


def test_no_run_leaves_its_config_at_the_top_of_the_repository():
    root = CONFIGS.parent
    assert not (root / "config.yaml").exists() or os.path.islink(root / "config.yaml")
    assert "/config.yaml" in (root / ".gitignore").read_text().split()
