"""The trained weights in checkpoints/ load, are what their config says, and write text that was learned."""

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import yaml

from zoo.catalogue import check_metrics
from zoo.checkpoint.identity import read_checkpoint
from zoo.checkpoint.index import read_index
from zoo.tasks import LanguageModelTask

SHELF = Path(__file__).parents[1] / "checkpoints"
MODELS = sorted(path.parent.name for path in SHELF.glob("*/model.ckpt"))
LANGUAGE = [name for name in MODELS if name.startswith("stdlib")]


@pytest.mark.parametrize("name", MODELS)
def test_weights_are_those_of_their_config(name):
    config = yaml.safe_load((SHELF / name / "config.yaml").read_text())["model"]["init_args"]
    claim = read_checkpoint(SHELF / name / "model.ckpt")["zoo"]
    assert {key: claim["settings"][key] for key in config} == config
    assert (SHELF / name / "log.csv").read_text().startswith("step,")


CODE = """import os


def read_all(paths):
    \"\"\"Return the contents of all files as a list of strings.\"\"\"
    result = []
    for path in paths:
        if not os.path.exists(path):
            raise FileNotFoundError(path)
        with open(path) as f:
            result.append(f.read())
    return result
"""


@pytest.mark.parametrize("name", ["digits_damcha", "digits_standard", "breast_cancer"])
def test_figures_of_what_needs_no_files_come_out_again(name):
    entry = read_index(SHELF)[name]
    assert len(check_metrics(entry)) == len(entry.metrics)


@pytest.mark.parametrize("name", LANGUAGE)
def test_trained_model_expects_python(name):
    task = LanguageModelTask.load_from_checkpoint(SHELF / name / "model.ckpt").eval()

    def bits_per_byte(text):
        tokens = torch.tensor([task.encode_prompt(text)])
        with torch.no_grad():
            nats = F.cross_entropy(task(tokens[:, :-1])[0], tokens[0, 1:], reduction="sum")
        return float(nats) / math.log(2) / len(text.encode())

    # an untrained model of 2,048 tokens has 11 bits a token, some 4 a byte
    assert bits_per_byte(CODE) < 2
    assert bits_per_byte(CODE) < bits_per_byte(CODE[::-1]) / 2
