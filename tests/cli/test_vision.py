"""The vision family's commands, as a user gives them."""

import csv
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from datamodules.image_files import Pictures
from tests.cli.test_lightning import CONFIGS, QUIET, refused
from zoo.checkpoint.identity import read_checkpoint
from zoo.cli import lightning_main
from zoo.errors import ZooError

DIGITS = CONFIGS.parent / "vit" / "digits_damcha.yaml"
OWN = CONFIGS.parent / "vit" / "own_folder.yaml"
NO_BAR = QUIET[:2]
SMALL = ("--model.options", '{"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3}')


def paint(folder: Path, classes: dict[str, int], n: int = 8) -> Path:
    """Pictures of about one colour a class, easy to tell apart."""
    random = np.random.default_rng(0)
    for name, level in classes.items():
        (folder / name).mkdir(parents=True)
        for i in range(n):
            pixels = np.clip(random.normal(level, 10, (20, 24, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{i}.png")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return paint(tmp_path_factory.mktemp("pictures") / "mine", {"dark": 40, "light": 210})


@pytest.fixture(scope="module")
def trained_once(folder, tmp_path_factory, shared_cache) -> Path:
    """The run of a model that was trained on the folder."""
    given = ("fit", "--config", OWN, "--data.path", folder, "--data.batch_size", 4, "--trainer.max_epochs", 6)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("trained"))
        patch.setenv("ZOO_CACHE", str(shared_cache))
        patch.setattr(sys, "argv", ["lightning", *map(str, (*given, *SMALL, *NO_BAR))])
        lightning_main()
        return Path("runs").resolve()


@pytest.fixture
def fitted(trained_once, tmp_path) -> Path:
    """The checkpoint of a copy of that run."""
    shutil.copytree(trained_once, tmp_path / "runs")
    return tmp_path / "runs" / "vit" / "own_folder" / "version_0" / "checkpoints" / "last.ckpt"


def test_a_checkpoint_alone_tests_its_own_pictures_and_another_folder(
    lightning, fitted, folder, tmp_path, capsys, caplog
):
    lightning("test", "--ckpt_path", fitted, *QUIET)
    assert "test/accuracy" in capsys.readouterr().out
    other = paint(tmp_path / "other", {"dark": 60, "light": 190}, n=3)
    lightning("test", "--ckpt_path", fitted, "--data.path", other, *QUIET)
    assert "6 pictures, all of them used" in caplog.text


def test_predict_names_each_picture_and_its_class(lightning, fitted, tmp_path):
    new = paint(tmp_path / "new", {"sunday": 215}, n=3)  # no class of the model
    lightning("predict", "--ckpt_path", fitted, "--data.path", new, "--predictions.path", "out.csv", *QUIET)
    rows = list(csv.DictReader(open("out.csv", encoding="utf-8")))
    assert [row["path"] for row in rows] == ["sunday/0.png", "sunday/1.png", "sunday/2.png"]
    assert list(rows[0]) == ["path", "class", "probability", "class_2", "probability_2"]
    assert {row["class"] for row in rows} == {"light"}
    assert all(float(row["probability"]) >= float(row["probability_2"]) for row in rows)


def test_pretrained_weights_start_a_run_on_other_classes(lightning, fitted, tmp_path, caplog):
    new = paint(tmp_path / "new", {"light": 220, "middle": 128})
    lightning(
        *("fit", "--config", OWN, "--data.path", new, "--data.batch_size", 4, "--model.pretrained", fitted),
        *("--trainer.max_epochs", 1, "--trainer.logger.name", "vit/tuned", *NO_BAR),
    )
    assert "rows of 1 of 2 classes" in caplog.text
    tuned = tmp_path / "runs" / "vit" / "tuned" / "version_0" / "checkpoints" / "last.ckpt"
    claim = read_checkpoint(tuned)["zoo"]
    assert claim["settings"]["options"]["embed_dim"] == 24
    assert {fate["tensor"]: fate["fate"] for fate in claim["transfer"]}["head.weight"] == "moved"
    fitted.unlink()
    lightning("test", "--ckpt_path", tuned, *QUIET)  # needs the weights it started from no more


def test_other_classes_are_refused_without_adapt(lightning, fitted, tmp_path, capsys):
    new = paint(tmp_path / "new", {"light": 220, "middle": 128})
    more = ("--data.batch_size", 4, "--model.on_mismatch", "error", *NO_BAR)
    given = ("fit", "--config", OWN, "--data.path", new, "--model.pretrained", fitted, *more)
    assert "model.pretrained" in (message := refused(lightning, capsys, *given))
    assert "set model.on_mismatch to adapt" in message
    given = ("fit", "--config", OWN, "--data.path", new, "--ckpt_path", fitted, "--data.batch_size", 4, *NO_BAR)
    assert "middle" in refused(lightning, capsys, *given)


def test_weights_to_start_from_and_a_run_to_go_on_with_exclude_each_other(lightning, fitted, folder, capsys):
    given = (
        "--data.path",
        folder,
        "--data.batch_size",
        4,
        "--ckpt_path",
        fitted,
        "--model.pretrained",
        fitted,
        *NO_BAR,
    )
    message = refused(lightning, capsys, "fit", "--config", OWN, *given)
    assert "beside --ckpt_path" in message


@pytest.mark.parametrize("command", ["test", "predict", "validate"])
def test_no_figures_of_weights_that_nobody_trained(command, lightning, fitted, folder, capsys):
    given = ("--config", OWN, "--data.path", folder, "--model.pretrained", fitted, *QUIET)
    assert "--ckpt_path: got none" in refused(lightning, capsys, command, *given)


def test_predictions_do_not_replace_what_they_are_made_of(lightning, fitted, folder, tmp_path, capsys):
    labels = tmp_path / "labels.csv"
    labels.write_text("path,label\ndark/0.png,dark\nlight/3.png,light\n")
    given = ("predict", "--ckpt_path", fitted, "--data.path", folder, "--data.labels", labels, *QUIET)
    assert "which is data.labels itself" in refused(lightning, capsys, *given, "--predictions.path", labels)
    assert labels.read_text().startswith("path,label")
    (tmp_path / "out.csv").mkdir()
    assert "is a folder" in refused(lightning, capsys, *given, "--predictions.path", tmp_path / "out.csv")


def test_a_csv_file_says_which_pictures_to_predict(lightning, fitted, tmp_path):
    new = paint(tmp_path / "new", {"a": 40, "b": 210})
    (tmp_path / "some.csv").write_text("path,label\na/5.png,unknown\nb/2.png,unknown\n")
    given = ("--data.path", new, "--data.labels", tmp_path / "some.csv", "--predictions.path", "out.csv", *QUIET)
    lightning("predict", "--ckpt_path", fitted, *given)
    assert [row["path"] for row in csv.DictReader(open("out.csv"))] == ["a/5.png", "b/2.png"]


@pytest.mark.parametrize("changed", [("--model.layer_decay", 0.1), ("--model.train", "head"), ("--model.lr", 0.1)])
def test_a_run_keeps_its_optimizers_settings(changed, lightning, fitted, capsys):
    message = refused(lightning, capsys, "fit", "--ckpt_path", fitted, *changed, "--trainer.max_epochs", 7, *NO_BAR)
    assert f"{str(changed[0]).removeprefix('--')}: " in message
    assert "leave these settings out" in message


def test_gradients_are_clipped_in_mixed_precision(lightning, folder, tmp_path):
    given = ("--data.path", folder, "--data.batch_size", 4, *SMALL, "--trainer.max_steps", 2, *NO_BAR)
    lightning("fit", "--config", OWN, *given, "--trainer.precision", "bf16-mixed", "--trainer.accelerator", "cpu")
    assert (tmp_path / "runs" / "vit" / "own_folder" / "version_0" / "checkpoints" / "last.ckpt").is_file()


def test_a_run_that_diverged_before_its_first_validation_is_no_success(lightning, folder, capsys):
    given = (
        "--data.path",
        folder,
        "--data.batch_size",
        4,
        *SMALL,
        "--model.lr",
        1e30,
        "--trainer.max_epochs",
        2,
        *NO_BAR,
    )
    assert "training diverged" in refused(lightning, capsys, "fit", "--config", OWN, *given)


def test_the_size_that_the_data_decided_is_the_size_in_the_checkpoint(lightning, folder, tmp_path):
    given = ("--data.path", folder, "--data.batch_size", 4, "--data.image_size", 24, *SMALL)
    lightning("fit", "--config", OWN, *given, "--trainer.max_steps", 2, *NO_BAR)
    last = tmp_path / "runs" / "vit" / "own_folder" / "version_0" / "checkpoints" / "last.ckpt"
    assert read_checkpoint(last)["zoo"]["settings"]["options"]["img_size"] == 24


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ('{"drop_path_rate": 2}', "drop_path_rate 2; must lie in"),
        ('{"global_pool": ""}', "not with a number for each of 2 classes"),
        ('{"features_only": true}', "a classifier needs its head"),
        ('{"checkpoint_path": "x"}', "model.pretrained does that"),
        ('{"depth": -1}', "model.options: got depth -1; must be a number of blocks"),
        ('{"depth": "two"}', "model.options: "),
        ("foo", "got foo; expected dict"),
    ],
)
def test_options_that_cannot_be_are_refused_before_the_run(options, reason, lightning, folder, capsys):
    given = ("--data.path", folder, "--data.image_size", 16, "--model.options", options, "--trainer.max_steps", 1)
    assert reason in refused(lightning, capsys, "fit", "--config", OWN, *given, *NO_BAR)


def test_weights_of_which_nothing_fits_start_no_run(lightning, fitted, folder, capsys):
    given = ("--model.name", "resnet18", "--model.pretrained", fitted, "--data.image_size", 32, "--data.path", folder)
    message = refused(lightning, capsys, "fit", "--config", OWN, *given, "--data.batch_size", 4, *NO_BAR)
    assert "has nothing that fits resnet18" in message


def test_an_error_in_a_loaders_process_is_one_line_too(lightning, folder, monkeypatch, capsys):
    def open_nothing(self, row, channels):
        raise ZooError(f"data.path: {self.ids[row]} can't be read any more; put it back")

    monkeypatch.setattr(Pictures, "open", open_nothing)
    given = ("--data.path", folder, "--data.batch_size", 4, "--data.num_workers", 1, *SMALL, *NO_BAR)
    message = refused(lightning, capsys, "fit", "--config", OWN, *given)
    assert message.startswith("error: data.path: ")
    assert message.strip().endswith("put it back")


def test_help_describes_the_settings(lightning, capsys):
    with pytest.raises(SystemExit) as end:
        lightning("fit", "--model.help", "zoo.tasks.ImageClassificationTask")
    assert end.value.code == 0
    assert "carry over what fits" in " ".join(capsys.readouterr().out.split())
