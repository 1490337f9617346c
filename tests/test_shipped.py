"""The trained weights in checkpoints/ load, are what their config says, and write text that was learned."""

from pathlib import Path

import pytest
import yaml

from zoo.identity import read_checkpoint
from zoo.tasks import LanguageModelTask

SHELF = Path(__file__).parents[1] / "checkpoints"
MODELS = sorted(path.parent.name for path in SHELF.glob("*/model.ckpt"))


def test_there_are_trained_weights_and_they_are_small():
    assert MODELS == ["stdlib_damcha", "stdlib_standard", "stdlib_static"]
    assert all((SHELF / name / "model.ckpt").stat().st_size < 20_000_000 for name in MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_weights_are_those_of_their_config(name):
    config = yaml.safe_load((SHELF / name / "config.yaml").read_text())["model"]["init_args"]
    claim = read_checkpoint(SHELF / name / "model.ckpt")["zoo"]
    assert {key: claim["settings"][key] for key in config} == config
    assert (SHELF / name / "log.csv").read_text().startswith("step,")


@pytest.mark.parametrize("name", MODELS)
def test_trained_model_knows_python(name):
    task = LanguageModelTask.load_from_checkpoint(SHELF / name / "model.ckpt").eval()
    assert task.generate(["import sys\nimport "], max_new_tokens=1, temperature=0)[0].strip().isidentifier()
    assert task.generate(["    def __init__(self"], max_new_tokens=1, temperature=0)[0][0] in ",)"
