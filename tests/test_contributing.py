"""The worked examples of CONTRIBUTING.md do what it says."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import TINY_MODEL

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
EXAMPLES = dict(re.findall(r"<!-- example: (\S+) -->\n```\w+\n(.*?)```", TEXT, re.DOTALL))
RUNS = [
    (plugins, line)
    for plugins, block in re.findall(r"<!-- run: ZOO_PLUGINS=(\S+) -->\n```sh\n(.*?)```", TEXT, re.DOTALL)
    for line in block.replace("\\\n", " ").strip().splitlines()
]
SHORT = [
    *("--trainer.max_steps", "2", "--trainer.val_check_interval", "1", "--trainer.check_val_every_n_epoch", "1"),
    *("--trainer.limit_val_batches", "1", "--trainer.enable_progress_bar", "false"),
]
PROGRAMS = {
    "zoo": [sys.executable, "-c", "from zoo.cli import zoo_main; zoo_main()"],
    "lightning": [sys.executable, "-m", "zoo"],
}


@pytest.fixture
def run(tmp_path):
    """Run a command of CONTRIBUTING.md in a folder with its examples and the configs."""
    for name, code in EXAMPLES.items():
        (tmp_path / name).write_text(code, encoding="utf-8")
    (tmp_path / "configs").symlink_to(ROOT / "configs")

    def command(plugins: str, line: str, *more: object) -> str:
        name, *arguments = shlex.split(line)
        environment = os.environ | {"ZOO_PLUGINS": plugins, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [*PROGRAMS[name], *arguments, *map(str, more)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout + done.stderr

    return command


@pytest.mark.parametrize(("plugins", "line"), RUNS, ids=[line[:60] for _, line in RUNS])
def test_a_documented_command_runs(plugins, line, run, corpus):
    small: list[object] = []
    if line.startswith("lightning fit"):
        small = list(SHORT)
        if "configs/lm" in line:
            small += [part for name, value in TINY_MODEL.items() for part in (f"--model.{name}", value)]
            small += ["--data.window", 16, "--data.batch_size", 4, "--data.vocab_size", 300]
            small += [] if "--data.source" in line else ["--data.path", corpus]
    run(plugins, line, *small)


def test_the_example_attention_is_tested_and_writes_from_its_checkpoint(run, corpus, tmp_path):
    line = next(line for _, line in RUNS if "configs/lm" in line and "cosine" in line)
    test_a_documented_command_runs("cosine.py", line, run, corpus)
    checkpoint = next(tmp_path.glob("runs/**/best.ckpt"))
    run("cosine.py", f"lightning test --ckpt_path {checkpoint} --trainer.logger false")
    written = run("cosine.py", f"zoo generate --ckpt {checkpoint} --prompt 'def ' --max-new-tokens 5 --seed 0")
    assert "def " in written


def test_the_example_attention_passes_the_tests_of_all_attentions(tmp_path):
    (tmp_path / "cosine.py").write_text(EXAMPLES["cosine.py"], encoding="utf-8")
    environment = os.environ | {"ZOO_PLUGINS": str(tmp_path / "cosine.py"), "PYTHONPATH": str(ROOT)}
    tests = [
        str(ROOT / "tests/attention/test_contract.py"),
        "-k",
        "cosine",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *tests], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert re.search(r"\b\d\d+ passed", done.stdout)
