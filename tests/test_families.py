"""A fourth family is one file: trained, tested, checked and exported without an edit anywhere."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.test_contributing import EXAMPLES
from zoo.errors import ZooError
from zoo.families import FAMILIES, Family, families, family_of, register_family

ROOT = Path(__file__).parents[1]
LIGHTNING = [sys.executable, "-m", "zoo"]
ZOO = [sys.executable, "-c", "from zoo.cli import zoo_main; zoo_main()"]


def test_a_fourth_family_is_one_file(tmp_path):
    for name in ("adding.py", "adding.yaml"):
        (tmp_path / name).write_text(EXAMPLES[name], encoding="utf-8")
    environment = os.environ | {"ZOO_PLUGINS": str(tmp_path / "adding.py"), "PYTHONPATH": str(ROOT)}

    def run(*command: object) -> str:
        done = subprocess.run(
            list(map(str, command)), env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    run(*LIGHTNING, "fit", "--config", "adding.yaml")
    checkpoint = next(tmp_path.glob("runs/**/best.ckpt"))
    assert "test/loss" in run(*LIGHTNING, "test", "--ckpt_path", checkpoint, "--trainer.logger", "false")
    assert "loads, 16 parameters, AddingTask" in run(*ZOO, "verify", checkpoint)
    run(*LIGHTNING, "fit", "--config", "adding.yaml", "--model.pretrained", checkpoint, "--model.on_mismatch", "adapt")
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
