"""What others may build on: the public names, and what belongs at the top of the repository."""

import importlib
import pkgutil
import subprocess
from pathlib import Path

import pytest

import datamodules
import zoo

ROOT = Path(__file__).parents[1]
ROOMS = [
    name
    for package in (zoo, datamodules)
    for name in [package.__name__, *(m.name for m in pkgutil.walk_packages(package.__path__, f"{package.__name__}."))]
    if not name.endswith("__main__")
]
PUBLIC = [room for room in ROOMS if hasattr(importlib.import_module(room), "__all__")]
TOP = {
    *(".ci", ".gitignore", ".pre-commit-config.yaml", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "MANIFEST.in"),
    *("Makefile", "README.md", "benchmarks", "checkpoints", "configs", "datamodules", "docs", "pyproject.toml"),
    *("setup.py", "tests", "zoo"),
}


@pytest.mark.parametrize("room", PUBLIC)
def test_every_public_name_is_there_and_says_what_it_is(room):
    module = importlib.import_module(room)
    assert module.__doc__
    assert len(module.__all__) == len(set(module.__all__))
    for name in module.__all__:
        found = getattr(module, name)
        if callable(found):
            own = found.__dict__.get("__doc__") if isinstance(found, type) else found.__doc__
            assert own, f"{room}.{name} has no docstring of its own"


def test_the_usual_names_are_public():
    assert {"zoo", "zoo.attention", "zoo.graph", "zoo.tasks", "zoo.callbacks", "datamodules"} <= set(PUBLIC)
    expected = {"create_model", "list_models", "load_pretrained", "list_attentions", "create_attention"}
    expected |= {"register_attention", "ZooError", "Kpnn2Error", "CheckpointMismatchError", "__version__"}
    assert expected <= set(zoo.__all__) <= set(dir(zoo))
    from zoo.attention import PackedMultiheadAttention

    assert zoo.PackedMultiheadAttention is PackedMultiheadAttention


def test_a_name_that_is_not_there_is_an_ordinary_error():
    with pytest.raises(AttributeError, match="module 'zoo' has no attribute 'create_modl'"):
        zoo.create_modl  # noqa: B018
    with pytest.raises(ImportError, match="nonsense"):
        exec("from zoo import nonsense")


def test_the_top_of_the_repository_holds_what_belongs_there():
    """A run's config.yaml, predictions and the like lie with the run."""
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("no clone")
    assert {name.partition("/")[0] for name in done.stdout.split("\0") if name} == TOP
