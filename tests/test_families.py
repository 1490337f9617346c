"""A fourth family is one file: trained, tested, checked and exported without an edit anywhere."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from zoo.errors import ZooError
from zoo.families import FAMILIES, Family, families, family_of, register_family

ROOT = Path(__file__).parents[1]
CONFIG = """
model:
  class_path: zoo_plugin_sums.SumTask
  init_args: {width: 3, lr: 0.05}
data:
  class_path: zoo_plugin_sums.SumData
trainer:
  max_steps: 2
  enable_progress_bar: false
  logger: {class_path: lightning.pytorch.loggers.CSVLogger, init_args: {save_dir: runs}}
  callbacks:
    - {class_path: zoo.callbacks.BestAndLastCheckpoint, init_args: {filename: best, monitor: val/loss, save_last: true}}
"""
PLUGIN = '''
from typing import Any

import torch
from torch import nn
from torch.export import Dim
from torch.utils.data import DataLoader, TensorDataset

from datamodules.base import ZooDataModule
from zoo.families import Family, register_family
from zoo.tasks.base import ExampleInputs
from zoo.tasks.scores import ScoredTask


class SumData(ZooDataModule):
    """Numbers and their sums."""

    def __init__(self, n: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()

    def identity(self) -> dict[str, Any]:
        return {"kind": "numbers", "n": self.hparams["n"]}

    def _loader(self) -> DataLoader:
        x = torch.arange(8.0 * self.hparams["n"]).view(8, -1) / 24
        return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4)

    train_dataloader = val_dataloader = test_dataloader = _loader


class SumTask(ScoredTask):
    """Add numbers up."""

    network_settings = ("width",)
    mismatch_advice = "Give as many numbers"

    def __init__(self, width: int = 3, lr: float = 0.1) -> None:
        super().__init__(lr, weight_decay=0.0, beta2=0.99, warmup=0.0, min_lr=0.0)

    def build(self, identity):
        width = self.settings["width"]
        self.network = nn.Sequential(nn.Linear(identity["n"], width), nn.Linear(width, 1))

    def depths(self):
        return {name: int(name[0]) for name, _ in self.network.named_parameters()}

    def heads(self):
        return ("1.",)

    def carry_over(self, source):
        raise NotImplementedError

    def forward(self, x):
        return self.network(x)

    def training_step(self, batch, batch_idx):
        return (self(batch[0]) - batch[1]).square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.training_step(batch, batch_idx))

    def test_step(self, batch, batch_idx):
        self.log("test/loss", self.training_step(batch, batch_idx))

    def example_inputs(self):
        return ExampleInputs("numbers", [torch.rand(n, self.data_identity["n"]) for n in (2, 1, 3)], {0: Dim("batch")})


register_family(Family("sums", SumTask, SumData))
'''
LIGHTNING = [sys.executable, "-m", "zoo"]
ZOO = [sys.executable, "-c", "from zoo.cli import zoo_main; zoo_main()"]


def test_a_fourth_family_is_one_file(tmp_path):
    (tmp_path / "sums.py").write_text(PLUGIN, encoding="utf-8")
    (tmp_path / "sums.yaml").write_text(CONFIG, encoding="utf-8")
    environment = os.environ | {"ZOO_PLUGINS": str(tmp_path / "sums.py"), "PYTHONPATH": str(ROOT)}

    def run(*command: object) -> str:
        done = subprocess.run(
            list(map(str, command)), env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    run(*LIGHTNING, "fit", "--config", "sums.yaml")
    checkpoint = next(tmp_path.glob("runs/**/best.ckpt"))
    assert "test/loss" in run(*LIGHTNING, "test", "--ckpt_path", checkpoint, "--trainer.logger", "false")
    assert "loads, 16 parameters, SumTask" in run(*ZOO, "verify", checkpoint)
    for to, out in (("safetensors", "sums.safetensors"), ("torch-export", "sums.pt2"), ("hub-folder", "sums")):
        run(*ZOO, "export", checkpoint, "--to", to, "--out", out)
    run(*ZOO, "import", "sums.safetensors", "--out", "again.ckpt")
    first, again = (torch.load(file, weights_only=True)["state_dict"] for file in (checkpoint, tmp_path / "again.ckpt"))
    assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())


def test_families_are_named_once():
    assert [family.name for family in families()] == ["graph", "language", "vision"]
    graph = FAMILIES.get("graph")
    assert register_family(graph) is graph


def test_a_task_of_no_family_is_refused():
    with pytest.raises(ZooError, match="task: got Linear, which is of no family"):
        family_of(torch.nn.Linear(1, 1))


def test_a_name_that_is_no_family_is_refused_with_the_nearest():
    with pytest.raises(ZooError, match=r"family: got 'grap', which is none; do you mean graph\?"):
        FAMILIES.get("grap")
    with pytest.raises(ZooError, match="family: can't be registered as 'A b'"):
        register_family(Family("A b", FAMILIES.get("graph").task, FAMILIES.get("graph").data))
