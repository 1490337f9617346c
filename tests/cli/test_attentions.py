"""Any attention from the command line: trained, tested and used from the checkpoint alone."""

import json

import pytest
import torch

import zoo
from tests.cli.conftest import CONFIGS
from zoo.attention import create_attention, list_attentions
from zoo.cli import zoo_main
from zoo.errors import ZooError

TWO_STEPS = ["--trainer.max_steps", "2", "--trainer.limit_val_batches", "1", "--trainer.val_check_interval", "2"]
OFF = ["--trainer.logger", "false"]


@pytest.mark.parametrize("name", list_attentions())
def test_text_is_learned_tested_and_written_with_every_attention(name, small, lightning, capsys, tmp_path):
    lightning("fit", *small("lm/stdlib_standard.yaml"), "--model.attention", name, *TWO_STEPS)
    checkpoint = next(tmp_path.glob("runs/**/best.ckpt"))
    lightning("test", "--ckpt_path", checkpoint, "--trainer.limit_test_batches", "1", *OFF)
    capsys.readouterr()
    zoo_main(["generate", "--ckpt", str(checkpoint), "--prompt", "def ", "--max-new-tokens", "5", "--seed", "0"])
    assert capsys.readouterr().out.startswith("def ")


@pytest.mark.parametrize("name", list_attentions())
def test_pictures_are_learned_and_tested_with_every_attention(name, small, lightning, capsys, tmp_path):
    few = ["--trainer.max_epochs", "1", "--trainer.limit_train_batches", "2", "--trainer.limit_val_batches", "1"]
    size = ["--model.options", '{"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 4}']
    often = ["--trainer.check_val_every_n_epoch", "1"]
    arguments = [*small("vit/digits_standard.yaml"), *size, *few, *often]
    lightning("fit", *arguments, "--model.attention", name)
    checkpoint = next(tmp_path.glob("runs/**/best.ckpt"))
    lightning("test", "--ckpt_path", checkpoint, "--trainer.limit_test_batches", "1", *OFF)
    assert "test/accuracy" in capsys.readouterr().out


def test_options_reach_the_attention_and_come_back_from_the_checkpoint(small, lightning, tmp_path):
    given = {"share_mlp": False, "mlp_hidden": [8], "key_projection": True, "identity_start": True}
    options = ["--model.attention", "damcha", "--model.attention_options", json.dumps(given)]
    lightning("fit", *small("lm/stdlib_standard.yaml"), *options, *TWO_STEPS)
    task = zoo.load_pretrained(next(tmp_path.glob("runs/**/best.ckpt")))
    layer = task.network.decoder.layers[0].attention
    assert layer.name == "damcha"
    assert layer.generator.hidden[0].out_features == 8
    assert layer.generator.identity_start
    assert layer.W_k.weight.shape == (16, 16)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model.attention", "standrad"], "attention: got 'standrad', which is none; do you mean standard"),
        (
            ["--model.attention", "damcha", "--model.attention_options", '{"compact_rnk": 2}'],
            "attention_options: got 'compact_rnk', which is no option of damcha; do you mean compact_rank",
        ),
        (
            ["--model.attention", "damcha", "--model.attention_options", '{"compact_rank": "two"}'],
            "attention_options.compact_rank: got 'two'; must be a whole number",
        ),
        (
            ["--model.attention", "damcha", "--model.attention_options", '{"compact_rank": -1}'],
            "attention_options.compact_rank: got -1; give 0",
        ),
    ],
)
@pytest.mark.parametrize("config", ["lm/stdlib_standard.yaml", "vit/digits_standard.yaml"])
def test_a_wrong_attention_or_option_is_refused_in_one_line(arguments, said, config, lightning, capsys):
    with pytest.raises(SystemExit) as end:
        lightning("fit", "--config", CONFIGS / config, *arguments)
    error = capsys.readouterr().err.strip()
    assert end.value.code == 2
    assert said in error
    assert len(error.splitlines()) == 1


def test_an_attention_for_a_model_of_timms_own_is_refused(lightning, capsys):
    model = ["--model", "zoo.tasks.ImageClassificationTask", "--model.name", "resnet18", "--model.attention", "static"]
    with pytest.raises(SystemExit):
        lightning("fit", *model, "--data", "datamodules.ImageDataModule")
    assert "model.attention: got 'static' for resnet18" in capsys.readouterr().err


@pytest.mark.parametrize("name", list_attentions())
def test_help_describes_an_attention_and_every_option(name, lightning, capsys):
    with pytest.raises(SystemExit) as end:
        lightning("fit", "--model.attention.help", name)
    assert not end.value.code
    text = capsys.readouterr().out
    zoo_main(["attentions", name])
    assert capsys.readouterr().out == text
    for option in vars(create_attention(name, 16, 4).options):
        assert f"  {option}: " in text


def test_help_without_a_name_lists_all(lightning, capsys):
    with pytest.raises(SystemExit):
        lightning("fit", "--model.attention.help")
    text = capsys.readouterr().out
    assert all(name in text for name in list_attentions())


def test_switches_that_a_named_attention_replaces_are_said(small, lightning, caplog):
    with caplog.at_level("INFO"):
        lightning(
            "fit", *small("lm/stdlib_damcha.yaml"), "--model.attention", "standard", "--trainer.fast_dev_run", "1"
        )
    assert "standard takes the place of mlp_hidden, which isn't read" in caplog.text


@pytest.mark.parametrize("given", [["--use_multihead_M"], ["--use_multihead_M", "false"]])
def test_the_methods_own_flag_is_accepted_and_changes_nothing(given, small, lightning, tmp_path):
    for i, extra in enumerate(([], given)):
        lightning(
            "fit", *small("lm/stdlib_damcha.yaml"), *TWO_STEPS, "--trainer.logger.init_args.save_dir", f"r{i}", *extra
        )
    first, second = (torch.load(next(tmp_path.glob(f"r{i}/**/best.ckpt")), weights_only=True) for i in (0, 1))
    assert all(torch.equal(tensor, second["state_dict"][name]) for name, tensor in first["state_dict"].items())


def test_blocks_of_a_trained_models_metric_are_switched_off(trained, lightning, capsys):
    def loss(*arguments):
        lightning("test", "--ckpt_path", trained, *OFF, *arguments)
        rows = [line for line in capsys.readouterr().out.splitlines() if "test/loss" in line]
        return float(rows[0].split()[-2])

    assert loss() != loss("--model.off_diag_scale", "0")


def test_a_run_does_not_go_on_with_other_scales(trained, lightning, capsys):
    with pytest.raises(SystemExit):
        lightning("fit", "--ckpt_path", trained, "--model.off_diag_scale", "0", "--trainer.max_steps", "6", *OFF)
    assert "model.off_diag_scale: 1.0 in the checkpoint, 0.0 here" in capsys.readouterr().err


def test_blocks_are_switched_off_from_python():
    whole, cut = (zoo.create_model("stdlib_damcha", **kept) for kept in ({}, {"off_diag_scale": 0.0}))
    x = torch.arange(12).view(1, 12)
    with torch.inference_mode():
        assert not torch.allclose(whole(x), cut(x))
    pictures = torch.rand(2, 1, 16, 16)
    options = {"attention_options": {"off_diag_scale": 0.0}}
    whole, cut = (zoo.create_model("digits_damcha", **kept) for kept in ({}, options))
    with torch.inference_mode():
        assert not torch.allclose(whole(pictures), cut(pictures))
    with pytest.raises(ZooError, match="of another network"):
        zoo.create_model("stdlib_damcha", compact_rank=2)
