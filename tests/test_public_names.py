"""The public names: listed, there, and described."""

import importlib
import subprocess
from pathlib import Path

import pytest

import zoo

ROOT = Path(__file__).parents[1]
MODULES = ["zoo", "zoo.attention", "zoo.callbacks", "zoo.checkpoint", "zoo.exchange", "zoo.graph", "zoo.tasks"]
MODULES += ["datamodules", "datamodules.sources"]
# What a run or a tool leaves, or the house is made of; anything else at the top is a mistake.
TOP = {
    *(".ci", ".gitignore", ".pre-commit-config.yaml", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "MANIFEST.in"),
    *("Makefile", "README.md", "benchmarks", "checkpoints", "configs", "datamodules", "docs", "pyproject.toml"),
    *("setup.py", "tests", "zoo"),
}


@pytest.mark.parametrize("module", MODULES)
def test_public_names_are_there_and_described(module):
    found = importlib.import_module(module)
    for name in found.__all__:
        item = getattr(found, name)
        assert not (isinstance(item, type) or callable(item)) or item.__doc__, f"{module}.{name} has no docstring"


def test_the_version_is_the_packages():
    line = next(line for line in (ROOT / "pyproject.toml").read_text().splitlines() if line.startswith("version = "))
    assert zoo.__version__ == line.split('"')[1]
    assert f"## [{zoo.__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_a_name_that_is_none_is_refused():
    with pytest.raises(AttributeError, match="has no attribute 'no_such'"):
        zoo.no_such  # noqa: B018


def test_nothing_that_a_run_writes_is_kept_at_the_top():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("no clone of git's, so nothing says which files are kept")
    assert {line.partition("/")[0] for line in listed.stdout.splitlines()} <= TOP


def test_pre_commit_runs_what_ci_runs():
    hooks = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    for line in (ROOT / "Makefile").read_text(encoding="utf-8").partition("\nlint:")[2].splitlines()[1:4]:
        assert line.split("/", 1)[1].strip() in hooks
