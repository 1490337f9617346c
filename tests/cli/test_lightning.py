"""The ``lightning`` command: a checkpoint alone is enough, and a user's mistake ends in one line."""

import json
import subprocess
import sys
from importlib.metadata import distribution, entry_points
from pathlib import Path

import pytest
import torch
import yaml

from zoo.checkpoint.identity import read_checkpoint

CONFIGS = Path(__file__).parents[2] / "configs" / "lm"
QUIET = ("--trainer.enable_progress_bar", "false", "--trainer.logger", "false")


def test_no_other_installed_distribution_owns_the_name_lightning():
    owners = {point.dist.name for point in entry_points(group="console_scripts", name="lightning")}
    assert owners == {"damcha-zoo"}
    assert "lightning" not in {point.name for point in distribution("lightning").entry_points}


def test_help_names_what_is_ours_and_what_is_lightnings(lightning, capsys):
    with pytest.raises(SystemExit) as ended:
        lightning("fit", "--help")
    assert ended.value.code == 0
    shown = capsys.readouterr()
    assert "--predictions.path" in shown.out
    assert "--trainer.max_steps" in shown.out
    assert shown.err == ""


@pytest.mark.parametrize("given", [("--help",), ("fitt",)])
def test_all_subcommands_are_told_where_none_is_given(given, lightning, capsys):
    with pytest.raises(SystemExit):
        lightning(*given)
    shown = capsys.readouterr()
    assert all(name in shown.out + shown.err for name in ("fit", "validate", "test", "predict"))


def test_model_help_describes_every_setting(lightning, capsys):
    with pytest.raises(SystemExit) as ended:
        lightning("fit", "--model.help", "zoo.tasks.LanguageModelTask")
    assert ended.value.code == 0
    out = capsys.readouterr().out
    for phrase in ("one generator for the stack", "--model.share_mlp", "rises to lr"):
        assert phrase in " ".join(out.split())


def test_print_config_shows_every_setting_with_its_value(lightning, capsys):
    with pytest.raises(SystemExit) as ended:
        lightning("fit", "--config", CONFIGS / "stdlib_damcha.yaml", "--model.n_heads", "8", "--print_config")
    assert ended.value.code == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["model"]["init_args"]["n_heads"] == 8
    assert shown["model"]["init_args"]["share_mlp"] is True
    assert shown["data"]["init_args"]["window"] == 128


# ---------------------------------------------------------------------- a checkpoint alone


@pytest.mark.parametrize("command", ["validate", "test"])
def test_checkpoint_alone_is_evaluated(command, trained, lightning, capsys):
    lightning(command, "--ckpt_path", trained, *QUIET)
    assert "bits_per_byte" in capsys.readouterr().out


def test_checkpoint_alone_gives_the_figure_its_config_gives(trained, lightning, corpus, capsys, tiny_arguments):
    def score(*args):
        lightning("test", *args, "--trainer.logger", "false")
        line = next(line for line in capsys.readouterr().out.splitlines() if "test/bits_per_byte" in line)
        return line.split()[-1]

    alone = score("--ckpt_path", trained, "--trainer.enable_progress_bar", "false")
    config = CONFIGS / "stdlib_damcha.yaml"
    arguments = [*tiny_arguments, "--model.max_len", "1024"]
    assert score("--config", config, *arguments, "--trainer.callbacks", "null", "--ckpt_path", trained) == alone


def test_checkpoint_evaluates_other_text_with_its_own_vocabulary(trained, lightning, tmp_path, capsys):
    (tmp_path / "other.txt").write_text("something else entirely\n" * 300)
    lightning("test", "--ckpt_path", trained, "--data.path", tmp_path / "other.txt", *QUIET)
    assert "bits_per_byte" in capsys.readouterr().out


def test_predict_writes_a_continuation_for_each_prompt(trained, lightning, tmp_path):
    (tmp_path / "prompts.txt").write_text("def \nimport\nx = 'ä'\n", encoding="utf-8")
    lightning(
        *("predict", "--ckpt_path", trained, "--data.prompts", "prompts.txt", "--predictions.path", "out/p.jsonl"),
        *("--model.max_new_tokens", 5, *QUIET),
    )
    rows = [json.loads(line) for line in (tmp_path / "out" / "p.jsonl").read_text().splitlines()]
    assert [row["prompt"] for row in rows] == ["def ", "import", "x = 'ä'"]
    assert all(row["continuation"] for row in rows)
    assert not (tmp_path / "out" / "p.jsonl.part").exists()


def test_predict_needs_no_corpus(trained, lightning, tmp_path):
    (tmp_path / "prompts.txt").write_text("def \n")
    lightning("predict", "--ckpt_path", trained, "--data.path", "nowhere", "--data.prompts", "prompts.txt", *QUIET)
    assert (tmp_path / "predictions.jsonl").is_file()


def test_fit_goes_on_from_a_named_checkpoint(trained, lightning, capfd):
    lightning("fit", "--ckpt_path", trained, "--trainer.max_steps", 6, "--trainer.limit_val_batches", 1, *QUIET)
    saved = list(Path("checkpoints").glob("*.ckpt"))
    assert read_checkpoint(saved[0])["global_step"] == 6


def test_last_is_the_newest_run_and_goes_on_in_its_folder(lightning, tiny_arguments, tmp_path, capsys):
    config = ("--config", CONFIGS / "stdlib_damcha.yaml", *tiny_arguments, "--trainer.limit_val_batches", 1)
    for _ in range(2):
        lightning("fit", *config, "--trainer.max_steps", 2, "--trainer.val_check_interval", 2)
    lightning("fit", *config, "--trainer.max_steps", 4, "--trainer.val_check_interval", 2, "--ckpt_path", "last")
    runs = tmp_path / "runs" / "lm" / "stdlib_damcha"
    assert sorted(path.name for path in runs.iterdir()) == ["version_0", "version_1"]
    steps = [
        read_checkpoint(runs / run / "checkpoints" / "last.ckpt")["global_step"] for run in ("version_0", "version_1")
    ]
    assert steps == [2, 4]
    assert "Best checkpoint: runs/lm/stdlib_damcha/version_1/checkpoints/best.ckpt" in capsys.readouterr().out


# ---------------------------------------------------------------------- mistakes


def refused(lightning, capsys, *args):
    with pytest.raises(SystemExit) as ended:
        lightning(*args)
    assert ended.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    assert len(errors) == 1
    assert not any(line.startswith("Traceback") for line in lines)
    return errors[0]


def test_last_without_a_run_is_refused(lightning, capsys, tiny_arguments):
    message = refused(
        lightning, capsys, "fit", "--config", CONFIGS / "stdlib_damcha.yaml", *tiny_arguments, "--ckpt_path", "last"
    )
    assert "no run under 'runs/lm/stdlib_damcha' has a last.ckpt" in message


@pytest.mark.parametrize("command", ["fit", "validate", "test", "predict"])
def test_missing_checkpoint_is_refused(command, lightning, capsys):
    assert "there is no file nowhere.ckpt" in refused(lightning, capsys, command, "--ckpt_path", "nowhere.ckpt")


def test_truncated_checkpoint_is_refused(trained, lightning, capsys, tmp_path):
    (tmp_path / "cut.ckpt").write_bytes(trained.read_bytes()[:5000])
    assert "no complete checkpoint" in refused(lightning, capsys, "test", "--ckpt_path=cut.ckpt")


def test_checkpoint_in_a_config_file_is_checked_too(lightning, capsys, tiny_arguments, tmp_path):
    (tmp_path / "more.yaml").write_text("ckpt_path: nowhere.ckpt\n")
    configs = ("--config", CONFIGS / "stdlib_damcha.yaml", "--config", "more.yaml")
    assert "there is no file nowhere.ckpt" in refused(lightning, capsys, "test", *configs, *tiny_arguments)


def test_other_vocabulary_is_refused_with_the_differing_tokens(trained, lightning, capsys, tmp_path):
    (tmp_path / "other.txt").write_text("wholly different words here\n" * 300)
    message = refused(
        *(lightning, capsys, "fit", "--ckpt_path", trained, "--data.path", "other.txt"),
        *("--data.tokenizer", "bpe", *QUIET),
    )
    assert "first difference at" in message
    assert "set data.tokenizer to the checkpoint file" in message


def test_byte_checkpoint_settings_are_named_when_the_network_differs(trained, lightning, capsys):
    message = refused(lightning, capsys, "test", "--ckpt_path", trained, "--model.n_heads", "4", *QUIET)
    assert "n_heads: 2 in the checkpoint, 4 here" in message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--data.path", "nowhere"), "data.path: nowhere is no file"),
        (("--data.window", "0"), "data.window: got 0"),
        (("--data.tokenizer", "word"), "data.tokenizer: got 'word'"),
        (("--model.n_heads", "3"), "n_heads: got 3 for d_model 16"),
        (("--model.use_mlp", "false"), "share_mlp: got True with use_mlp False"),
        (("--model.off_diag_mode", "x"), "off_diag_mode: got 'x'"),
        (("--model.lr", "-1"), "model.lr: got -1.0"),
        (("--model.warmup", "2"), "model.warmup: got 2.0"),
        (("--model.temperature", "-1"), "temperature: got -1.0"),
        (("--trainer.devices", "0"), "devices"),
    ],
)
def test_bad_settings_are_refused_by_name_in_one_line(arguments, message, lightning, capsys, tiny_arguments):
    config = ("--config", CONFIGS / "stdlib_damcha.yaml", *tiny_arguments)
    assert message in refused(lightning, capsys, "fit", *config, *arguments)


def test_own_text_config_asks_for_a_path(lightning, capsys):
    assert "data.path: FOLDER is no file, no folder" in refused(
        lightning, capsys, "fit", "--config", CONFIGS / "own_text.yaml"
    )


def test_predict_without_prompts_is_refused(trained, lightning, capsys):
    message = refused(lightning, capsys, "predict", "--ckpt_path", trained, *QUIET)
    assert "data.prompts: got none" in message


def test_a_refused_command_exits_with_2_and_no_traceback_in_a_real_process(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "zoo", "test", "--ckpt_path", "nowhere.ckpt"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: checkpoint: there is no file nowhere.ckpt")
    assert "Traceback" not in done.stderr


def test_checkpoint_is_plain_types_and_tensors(trained):
    checkpoint = torch.load(trained, weights_only=True)
    json.dumps(checkpoint["zoo"])
    json.dumps(checkpoint["hyper_parameters"])
