"""The worked examples of CONTRIBUTING.md do what it says, in one process that knows them by ``ZOO_PLUGINS`` alone."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import TINY_MODEL

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
EXAMPLES = dict(re.findall(r"<!-- example: (\S+) -->\n```\w+\n(.*?)```", TEXT, re.DOTALL))
DOCUMENTED = [
    line
    for block in re.findall(r"<!-- run: ZOO_PLUGINS=\S+ -->\n```sh\n(.*?)```", TEXT, re.DOTALL)
    for line in block.replace("\\\n", " ").strip().splitlines()
]
SHORT = [
    *("--trainer.max_steps", 2, "--trainer.val_check_interval", 1, "--trainer.check_val_every_n_epoch", 1),
    *("--trainer.limit_val_batches", 1, "--trainer.enable_progress_bar", "false"),
]
ONE_BY_ONE = """
import contextlib, io, json, os, sys, traceback
from zoo.cli import lightning_main, zoo_main

def run(program, *arguments):
    out, code = io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            if program == "zoo":
                zoo_main(arguments)
            else:
                sys.argv = [program, *arguments]
                lightning_main()
        except SystemExit as ended:
            code = ended.code or 0
        except BaseException:
            code = traceback.format_exc()
    return [code, out.getvalue()]

os.makedirs("ran")
for number, line in enumerate(json.load(sys.stdin)):
    with open(f"ran/{number}.json", "w") as file:
        json.dump(run(*line), file)

import pytest
sys.exit(pytest.main([os.environ["CONTRACT"], *"-k cosine -q -p no:cacheprovider -p no:xdist".split()]))
"""
LANGUAGE = next(line for line in DOCUMENTED if "configs/lm" in line and "--model.attention cosine" in line)
WRITER, ADDER = "writer.ckpt", "adder.ckpt"
AFTER = [
    f"lightning test --ckpt_path {WRITER} --trainer.logger false",
    f"zoo generate --ckpt {WRITER} --prompt 'def ' --max-new-tokens 5 --seed 0",
    f"lightning test --ckpt_path {ADDER} --trainer.logger false",
    f"zoo verify {ADDER}",
    f"lightning fit --config adding.yaml --model.pretrained {ADDER} --model.on_mismatch adapt",
    f"zoo export {ADDER} --to safetensors --out sums.safetensors",
    f"zoo export {ADDER} --to torch-export --out sums.pt2",
    f"zoo export {ADDER} --to hub-folder --out sums",
    "zoo import sums.safetensors --out again.ckpt",
]


def small(line: str, corpus: Path) -> list[object]:
    """What makes a documented command short."""
    if not line.startswith("lightning fit"):
        return []
    made: list[object] = [*SHORT]
    if "configs/lm" in line:
        made += [part for name, value in TINY_MODEL.items() for part in (f"--model.{name}", value)]
        made += ["--data.window", 16, "--data.batch_size", 4, "--data.vocab_size", 300]
        made += [] if "--data.source" in line else ["--data.path", corpus]
    return made


def saving(file: str) -> list[object]:
    return [
        *("--trainer.callbacks+", "lightning.pytorch.callbacks.ModelCheckpoint"),
        *("--trainer.callbacks.dirpath", ".", "--trainer.callbacks.filename", Path(file).stem),
    ]


@pytest.fixture(scope="module")
def ran(tmp_path_factory, corpus, shared_cache):
    """The folder of the examples, each command's exit code and output, and pytest's on the example attention."""
    folder = tmp_path_factory.mktemp("examples")
    for name, code in EXAMPLES.items():
        (folder / name).write_text(code, encoding="utf-8")
    (folder / "configs").symlink_to(ROOT / "configs")
    lines = []
    for line in DOCUMENTED + AFTER:
        kept = {LANGUAGE: saving(WRITER), "lightning fit --config adding.yaml": saving(ADDER)}.get(line, [])
        lines.append([*shlex.split(line), *map(str, [*(small(line, corpus) if line in DOCUMENTED else []), *kept])])
    environment = os.environ | {
        "ZOO_PLUGINS": os.pathsep.join(str(folder / name) for name in EXAMPLES if name.endswith(".py")),
        "CONTRACT": str(ROOT / "tests" / "attention" / "test_contract.py"),
        "PYTHONPATH": str(ROOT),
        "ZOO_CACHE": str(shared_cache),
    }
    done = subprocess.run(
        [sys.executable, "-c", ONE_BY_ONE],
        input=json.dumps(lines),
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
    )
    results = {
        line: json.loads((folder / "ran" / f"{i}.json").read_text())
        for i, line in enumerate(DOCUMENTED + AFTER)
        if (folder / "ran" / f"{i}.json").is_file()
    }
    return folder, results, done


@pytest.mark.parametrize("line", DOCUMENTED + AFTER, ids=lambda line: line[:60])
def test_a_documented_command_runs(line, ran):
    _, results, done = ran
    assert line in results, done.stderr[-2000:]
    code, out = results[line]
    assert code == 0, f"{code}\n{out[-2000:]}"


def test_the_example_attention_writes_from_its_checkpoint(ran):
    _, results, _ = ran
    assert "test/bits_per_byte" in results[AFTER[0]][1]
    assert results[AFTER[1]][1].startswith("def ")


def test_the_example_attention_passes_the_tests_of_all_attentions(ran):
    _, _, done = ran
    assert done.returncode == 0, done.stdout[-3000:]
    assert re.search(r"\b\d\d+ passed", done.stdout)


def test_the_example_family_is_tested_checked_exported_and_imported(ran):
    folder, results, _ = ran
    assert "test/loss" in results[AFTER[2]][1]
    assert "loads, 16 parameters, AddingTask" in results[AFTER[3]][1]
    assert all((folder / made).exists() for made in ("sums.safetensors", "sums.pt2", "sums"))
    first, again = (torch.load(folder / file, weights_only=True)["state_dict"] for file in (ADDER, "again.ckpt"))
    assert first
    assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())
