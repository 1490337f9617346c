"""What importing the zoo does, in a fresh process: as little as it can."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models.test_vision_transformer import SIZES

ROOT = Path(__file__).parents[1]
CHOICES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
LOOK = f"""
import json, os, sys, warnings
warnings.simplefilter("ignore")
heavy = lambda: sorted({{"lightning", "lightning.pytorch", "pandas", "datamodules", "zoo.tasks"}} & set(sys.modules))
import zoo
found = {{"threads": {{name: os.environ.get(name) for name in {CHOICES}}}, "zoo": heavy()}}
import zoo.checkpoint
found["zoo.checkpoint"] = heavy()
import timm
found["timm"] = sorted(timm.list_models("damcha_vit*"))
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found():
    environment = {name: value for name, value in os.environ.items() if name not in CHOICES}
    done = subprocess.run(
        [sys.executable, "-c", LOOK], capture_output=True, text=True, cwd=ROOT, env=environment, check=True
    )
    return json.loads(done.stdout)


def test_importing_the_zoo_brings_neither_lightning_nor_pandas(found):
    assert found["zoo"] == []


def test_importing_checkpoints_brings_no_trainer(found):
    assert not {"lightning", "datamodules", "zoo.tasks"} & set(found["zoo.checkpoint"])


def test_importing_the_zoo_registers_the_models_of_pictures(found):
    assert found["timm"] == sorted(SIZES)


def test_threads_spin_for_a_moment(found):
    assert found["threads"] == {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "4000"}


@pytest.mark.parametrize("chosen", [{"OMP_WAIT_POLICY": "ACTIVE"}, {"GOMP_SPINCOUNT": "7"}])
def test_threads_wait_as_the_user_chose(chosen, monkeypatch):
    for name in CHOICES:
        monkeypatch.delenv(name, raising=False)
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    runpy.run_path(str(ROOT / "zoo" / "__init__.py"))
    assert {name: os.environ[name] for name in CHOICES if name in os.environ} == chosen
