"""What hostile users found: each of these went wrong once."""

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.cli.test_lightning import CONFIGS, QUIET, refused
from tests.tasks.test_graph import EDGES, TINY, table
from tests.tasks.test_language import SILENT, altered
from zoo.checkpoint.identity import read_checkpoint
from zoo.checkpoint.writing import CheckedCheckpointIO
from zoo.cli import zoo_main
from zoo.errors import CheckpointMismatchError, ZooError
from zoo.tasks import GraphPredictionTask, LanguageModelTask

OWN = CONFIGS / "own_text.yaml"


# ---------------------------------------------------------------------- checkpoints


def test_a_write_that_fails_leaves_the_checkpoint_before(tmp_path, monkeypatch):
    CheckedCheckpointIO().save_checkpoint({"a": 1}, tmp_path / "last.ckpt")
    before = (tmp_path / "last.ckpt").read_bytes()

    def half(checkpoint, file):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(OSError, match="No space left"):
        CheckedCheckpointIO().save_checkpoint({"a": 2}, tmp_path / "last.ckpt")
    assert (tmp_path / "last.ckpt").read_bytes() == before
    assert os.listdir(tmp_path) == ["last.ckpt"]


def test_fit_writes_its_checkpoints_beside_their_place(lightning, tiny_arguments, monkeypatch):
    written = []
    original = CheckedCheckpointIO.save_checkpoint
    monkeypatch.setattr(
        CheckedCheckpointIO, "save_checkpoint", lambda self, *a, **k: written.append(a[1]) or original(self, *a, **k)
    )
    lightning("fit", "--config", OWN, *tiny_arguments, "--trainer.max_steps", 2, "--trainer.val_check_interval", 2)
    assert {Path(path).name for path in written} == {"best.ckpt", "last.ckpt"}


def test_last_that_was_cut_short_falls_back_to_the_run_before(lightning, tiny_arguments, tmp_path):
    config = ("--config", OWN, *tiny_arguments, "--trainer.limit_val_batches", 1)
    for _ in range(2):
        lightning("fit", *config, "--trainer.max_steps", 2, "--trainer.val_check_interval", 2)
    runs = tmp_path / "runs" / "lm" / "own_text"
    (runs / "version_1" / "checkpoints" / "last.ckpt").write_bytes(b"")
    lightning("fit", *config, "--trainer.max_steps", 4, "--trainer.val_check_interval", 2, "--ckpt_path", "last")
    assert read_checkpoint(runs / "version_0" / "checkpoints" / "last.ckpt")["global_step"] == 4


def test_load_from_checkpoint_makes_the_checks_of_the_command_line(trained, tmp_path):
    whole = bytearray(trained.read_bytes())
    whole[len(whole) // 2] ^= 0x10
    (tmp_path / "flipped.ckpt").write_bytes(whole)
    with pytest.raises(ZooError, match="no complete checkpoint"):
        LanguageModelTask.load_from_checkpoint(tmp_path / "flipped.ckpt")
    with pytest.raises(CheckpointMismatchError, match=r"is of zoo\.tasks\.language\.LanguageModelTask, not of"):
        GraphPredictionTask.load_from_checkpoint(trained)


def test_weights_alone_are_no_run_to_go_on_with(trained, tmp_path, lightning, capsys):
    bare = altered(trained, tmp_path, lambda checkpoint: checkpoint.pop("optimizer_states"))
    message = refused(lightning, capsys, "fit", "--ckpt_path", bare, "--trainer.max_steps", 6, *QUIET)
    assert "--ckpt_path: got a checkpoint of weights alone" in message


@pytest.mark.parametrize("name", ["this.X", "os.path", "X", "zoo.nowhere.X", "datamodules.Nothing"])
def test_modules_that_a_checkpoint_names_are_not_imported(name, trained, tmp_path, lightning, capsys):
    def rename(checkpoint):
        checkpoint["zoo"]["data"]["class_path"] = name

    sys.modules.pop("this", None)
    message = refused(lightning, capsys, "test", "--ckpt_path", altered(trained, tmp_path, rename), *QUIET)
    assert "no class of this zoo" in message
    assert "this" not in sys.modules


@pytest.mark.parametrize("part", ["task", "settings", "data"])
def test_incomplete_claims_are_refused(part, trained, tmp_path, lightning, capsys):
    path = altered(trained, tmp_path, lambda checkpoint: checkpoint["zoo"].pop(part))
    assert "lacks its task, settings, data or tensors" in refused(lightning, capsys, "test", "--ckpt_path", path)


def test_settings_that_a_resumed_optimizer_would_ignore_are_refused(trained, lightning, capsys):
    message = refused(
        *(lightning, capsys, "fit", "--ckpt_path", trained, "--trainer.max_steps", 6, "--model.lr", "1e-5"), *QUIET
    )
    assert "model.lr: 0.003 in the checkpoint, 1e-05 here" in message
    assert "goes on with the settings it had" in message


@pytest.mark.parametrize("word", ["best", "hpc", ""])
def test_other_keywords_for_a_checkpoint_are_refused(word, lightning, capsys, tiny_arguments):
    message = refused(lightning, capsys, "test", "--config", OWN, *tiny_arguments, f"--ckpt_path={word}")
    assert f"--ckpt_path: got {word!r}; name a checkpoint file, or last" in message


# ---------------------------------------------------------------------- runs


def test_a_run_that_was_told_to_stop_does_not_end_as_finished(tiny_arguments, tmp_path, shared_cache):
    command = [sys.executable, "-m", "zoo", "fit", "--config", str(OWN), *tiny_arguments]
    command += ["--trainer.max_steps", "100000", "--trainer.val_check_interval", "5"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ZOO_CACHE": str(shared_cache)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as run:
        deadline = time.monotonic() + 120
        while not list(tmp_path.glob("runs/lm/own_text/version_0/checkpoints/last.ckpt")):
            assert run.poll() is None, run.stderr.read().decode()
            assert time.monotonic() < deadline, "no checkpoint in two minutes"
            time.sleep(0.05)
        run.send_signal(signal.SIGTERM)
        error = run.stderr.read().decode()
    assert run.returncode == 143
    assert "error: fit was told to stop; --ckpt_path last goes on with it" in error


def test_diverged_training_is_refused_not_saved_as_best(lightning, capsys, tiny_arguments):
    message = refused(
        *(lightning, capsys, "fit", "--config", OWN, *tiny_arguments, "--model.lr", "1e38", "--model.warmup", "0"),
        *("--trainer.max_steps", "60", "--trainer.val_check_interval", "60", "--trainer.gradient_clip_val", "null"),
    )
    assert "training diverged, so lower it" in message


def test_learned_positions_leave_room_for_the_sample(lightning, tiny_arguments, tmp_path):
    lightning(
        *("fit", "--config", OWN, *tiny_arguments, "--model.positions", "learned", "--model.max_len", 16),
        *("--trainer.max_steps", 2, "--trainer.val_check_interval", 2),
    )
    assert (tmp_path / "runs/lm/own_text/version_0/checkpoints/best.ckpt").is_file()


def test_batches_of_prompts_draw_different_tokens(trained):
    task = LanguageModelTask.load_from_checkpoint(trained).eval()
    first, second = (task.predict_step(["def "], i)[0]["continuation"] for i in range(2))
    assert first != second


# ---------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--data.window", "1.5"), "window"),
        (("--data.foo", "1"), "foo"),
        (("--model.lr", "abc"), "lr"),
        (("--data.path=",), "data.path: got an empty text"),
        (("--data.split_seed", "99999999999999999999"), "data.split_seed: got 99999999999999999999"),
        (("--model.stop", '[""]'), "stop: got an empty text"),
    ],
)
def test_mistyped_arguments_end_in_one_line_without_the_usage(arguments, message, lightning, capsys, tiny_arguments):
    with pytest.raises(SystemExit) as ended:
        lightning("fit", "--config", OWN, *tiny_arguments, *arguments)
    assert ended.value.code == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("Seed set")]
    assert len(lines) == 1
    assert message in lines[0]


def test_a_command_without_config_or_checkpoint_says_what_it_needs(lightning, capsys):
    assert "--config: got none; name a config, or with --ckpt_path FILE" in refused(lightning, capsys, "test")


def test_unwritable_folders_end_in_one_line(trained, tmp_path, capsys, lightning):
    (tmp_path / "out.csv").mkdir()
    (tmp_path / "p.txt").write_text("def \n")
    message = refused(
        *(lightning, capsys, "predict", "--ckpt_path", trained, "--data.prompts", "p.txt", "--predictions.path"),
        *("out.csv", "--model.max_new_tokens", "2", *QUIET),
    )
    assert "out.csv" in message


def test_prompts_that_are_no_utf8_are_refused_before_anything_is_printed(trained, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9"), "utf-8", errors="surrogateescape"))
    with pytest.raises(SystemExit):
        zoo_main(["generate", "--ckpt", str(trained), "--prompt", "-"])
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "holds bytes that are no UTF-8" in shown.err


def test_seeds_beyond_64_bits_are_refused(trained, capsys):
    with pytest.raises(SystemExit):
        zoo_main(["generate", "--ckpt", str(trained), "--seed", "9" * 30])
    assert "it must fit 64 bits" in capsys.readouterr().err


def test_one_text_in_place_of_a_list_of_prompts_is_refused(trained):
    with pytest.raises(ZooError, match="prompts: got one text"):
        LanguageModelTask.load_from_checkpoint(trained).generate("abc")


def test_explain_takes_the_rows_of_the_checkpoints_own_table(tmp_path, capsys):
    import lightning.pytorch as pl

    table()[["a", "b", "c", "d", "multi"]].to_csv("t.csv", index=False)
    EDGES.to_csv("e.csv", index=False)
    from datamodules import GraphTableDataModule

    data = GraphTableDataModule(features="t.csv", edges="e.csv", label="multi", test_fraction=0.3)
    trainer = pl.Trainer(**SILENT, max_steps=2, limit_val_batches=0)
    trainer.fit(GraphPredictionTask(**TINY), data)
    trainer.save_checkpoint("g.ckpt")
    os.remove("e.csv")
    zoo_main(["explain", "--ckpt", "g.ckpt", "--out", "n.csv", "--target", "low"])
    assert "160 rows" not in capsys.readouterr().out
    assert (tmp_path / "n.csv").is_file()
    with pytest.raises(SystemExit):
        zoo_main(["explain", "--ckpt", "g.ckpt", "--data", "t.csv", "--out", "t.csv", "--target", "low"])
    assert "which is the table itself" in capsys.readouterr().err
