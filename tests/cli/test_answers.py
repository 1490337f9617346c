"""Pairs and sequences from the command line: a checkpoint alone is enough, or is refused in one line."""

import json
from pathlib import Path

import pytest
import torch

from zoo.cli import zoo_main

QUIET = ("--trainer.max_steps", "2", "--trainer.limit_val_batches", "1", "--trainer.val_check_interval", "2")


def refused(capsys, run, *args):
    with pytest.raises(SystemExit) as ended:
        run(*args)
    assert ended.value.code == 2
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert message.startswith("error: ")
    return message


@pytest.fixture
def recall(lightning, small):
    lightning("fit", *small("lm/associative_recall.yaml"), *QUIET)
    return Path("runs/lm/associative_recall/version_0/checkpoints/last.ckpt")


def test_a_checkpoint_of_sequences_is_tested_generated_from_exported_and_loaded_onto_nothing_else(
    recall, lightning, small, capsys, corpus
):
    capsys.readouterr()
    lightning("test", "--ckpt_path", recall, "--data.source_options", '{"n_pairs": 9, "n_queries": 3}')
    told = capsys.readouterr()
    assert "test/accuracy" in told.out
    assert "bits_per_byte" not in told.out
    lightning("predict", "--ckpt_path", recall, "--predictions.path", "p.jsonl")
    rows = [json.loads(line) for line in Path("p.jsonl").read_text().splitlines()]
    assert len(rows) == 20
    assert all(set(row) == {"sequence", "answer", "output", "exact_match"} for row in rows)
    assert all(row["exact_match"] == (row["answer"] == row["output"]) for row in rows)
    capsys.readouterr()
    zoo_main(["generate", "--ckpt", str(recall), "--prompt", "k1 v2 k1", "--max-new-tokens", "1", "--temperature", "0"])
    assert capsys.readouterr().out.startswith("k1 v2 k1")
    zoo_main(["verify", str(recall)])
    zoo_main(["export", str(recall), "--to", "safetensors", "--out", "r.safetensors"])
    zoo_main(["import", "r.safetensors", "--out", "again.ckpt"])
    capsys.readouterr()
    for what, args, words in (
        ("generate", ["--prompt", "hello"], "got 'hello', which is no symbol"),
        ("explain", ["--out", "n.csv"], "LanguageModelTask"),
    ):
        assert words in refused(capsys, zoo_main, [what, "--ckpt", str(recall), *args])
    other = small("lm/induction.yaml")
    assert "made for other data" in refused(capsys, lightning, "test", *other, "--ckpt_path", recall)
    bigger = ("--data.source_options", '{"n_keys": 17}')
    assert "options.n_keys: 16" in refused(capsys, lightning, "test", "--ckpt_path", recall, *bigger)
    text = ("fit", *small("lm/own_text.yaml"), "--data.tokenizer", recall)
    assert "data.tokenizer: got" in refused(capsys, lightning, *text)


def test_pairs_are_tested_and_written_by_a_checkpoint_alone(lightning, small, capsys):
    lightning("fit", *small("lm/pairs_stdlib.yaml"), *QUIET)
    last = Path("runs/lm/pairs_stdlib/version_0/checkpoints/last.ckpt")
    lightning("test", "--ckpt_path", last)
    told = capsys.readouterr().out
    for figure in ("loss", "bits_per_byte", "exact_match", "nll", "nll_q1", "nll_median", "nll_q3", "generated_match"):
        assert f"test/{figure} " in told
    lightning("predict", "--ckpt_path", last, "--model.max_new_tokens", 5)
    rows = [json.loads(line) for line in Path("predictions.jsonl").read_text().splitlines()]
    assert len(rows) == 5
    assert all(set(row) == {"source", "output", "target", "exact_match"} for row in rows)
    Path("mine.txt").write_text("say 1\nsay it again\n")
    lightning("predict", "--ckpt_path", last, "--data.prompts", "mine.txt", "--model.max_new_tokens", 5)
    rows = [json.loads(line) for line in Path("predictions.jsonl").read_text().splitlines()]
    assert [row["source"] for row in rows] == ["say 1", "say it again"]
    assert "target" not in rows[0]


def test_a_model_of_text_is_tuned_on_pairs_with_its_own_vocabulary(lightning, small, trained):
    shape = (
        "--model.attention",
        "null",
        "--model.pretrained",
        trained,
        "--data.tokenizer",
        trained,
        "--model.max_len",
        1024,
    )
    lightning("fit", *small("lm/pairs_stdlib.yaml"), *QUIET, *shape)
    last = torch.load("runs/lm/pairs_stdlib/version_0/checkpoints/last.ckpt", weights_only=True)
    assert last["zoo"]["identity"]["kind"] == "text"
