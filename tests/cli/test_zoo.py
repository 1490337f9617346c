"""The ``zoo`` command."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from zoo.cli import zoo_main

ZOO = Path(sys.executable).with_name("zoo")


def generate(capsys, *args):
    zoo_main(["generate", *map(str, args)])
    return capsys.readouterr().out


def test_generate_continues_a_prompt_repeatably(trained, capsys):
    first, again, other = (
        generate(capsys, "--ckpt", trained, "--prompt", "def ", "--max-new-tokens", 20, "--seed", seed)
        for seed in (1, 1, 2)
    )
    assert first == again != other
    assert first.startswith("def ")
    assert len(first) > len("def \n")


def test_generate_reads_the_prompt_from_standard_input_and_stops(trained, capsys, monkeypatch):
    import io

    greedy = ("--ckpt", trained, "--temperature", 0, "--max-new-tokens", 30)
    whole = generate(capsys, *greedy, "--prompt", "def a")
    monkeypatch.setattr(sys, "stdin", io.StringIO("def a"))
    assert generate(capsys, *greedy, "--prompt", "-") == whole
    written = whole[len("def a") : -1]
    stop = written[4:7]
    assert generate(capsys, *greedy, "--prompt", "def a", "--stop", stop) == f"def a{written[: written.find(stop)]}\n"


def test_generate_prints_each_piece_as_it_is_made(trained, monkeypatch):
    written = []
    monkeypatch.setattr(sys.stdout, "write", lambda text: written.append(text) or len(text))
    zoo_main(["generate", "--ckpt", str(trained), "--prompt", "x", "--max-new-tokens", "12", "--seed", "0"])
    assert len(written) > 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--ckpt", "nowhere.ckpt"), "there is no file nowhere.ckpt"),
        (("--ckpt", "CKPT", "--temperature", "-1"), "temperature: got -1.0"),
        (("--ckpt", "CKPT", "--max-new-tokens", "-3"), "max_new_tokens: got -3"),
        (("--ckpt", "CKPT", "--top-k", "0"), "top_k: got 0"),
        (("--ckpt", "CKPT", "--device", "abacus"), "--device: got 'abacus'"),
        (("--ckpt", "CKPT", "--stop", ""), "stop: got"),
    ],
)
def test_mistakes_end_in_one_line(arguments, message, trained, capsys):
    arguments = [str(trained) if argument == "CKPT" else argument for argument in arguments]
    with pytest.raises(SystemExit) as ended:
        zoo_main(["generate", *arguments])
    assert ended.value.code == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: ")
    assert message in error
    assert "\n" not in error


def test_checkpoint_of_another_family_is_refused(trained, tmp_path, capsys):
    checkpoint = torch.load(trained, weights_only=True)
    checkpoint["zoo"]["task"] = "zoo.tasks.graph.GraphPredictionTask"
    torch.save(checkpoint, tmp_path / "graph.ckpt")
    with pytest.raises(SystemExit):
        zoo_main(["generate", "--ckpt", str(tmp_path / "graph.ckpt")])
    assert "this command needs one of LanguageModelTask" in capsys.readouterr().err


def test_a_closed_pipe_is_no_traceback_of_the_installed_command(trained):
    piped = subprocess.run(
        f"{ZOO} generate --ckpt {trained} --max-new-tokens 200 --seed 0 | head -c 1",
        shell=True,
        capture_output=True,
    )
    assert len(piped.stdout) == 1
    assert b"Traceback" not in piped.stderr
    assert b"Exception" not in piped.stderr
