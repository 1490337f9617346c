"""Private names of other packages are used in one module a package, and are what they were when it was written."""

import inspect
import re
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector

import zoo
from zoo.private import timm as private_timm
from zoo.private import torch as private_torch

ROOT = Path(zoo.__file__).parents[1]
PACKAGES = ("torch", "lightning", "jsonargparse", "timm", "torchmetrics", "peft")
IMPORTED = re.compile(
    rf"^\s*(?:from|import) (?:{'|'.join(PACKAGES)})(?:\.\w+)*(?:\._\w+|[\w.]* import (?:[\w, ]*\b)?_[a-z_A-Z])",
    re.MULTILINE,
)
REACHED = re.compile(r"\btorch\._(?!dynamo)\w+|\b(?:trainer|callback|loop|signals|connector)\._[a-z]\w+")


def python_files():
    return [*ROOT.glob("zoo/**/*.py"), *ROOT.glob("datamodules/**/*.py")]


def test_private_names_are_used_behind_the_fences_only():
    found = []
    for file in python_files():
        text = file.read_text(encoding="utf-8")
        if file.parent.name != "private":
            found += [
                f"{file.relative_to(ROOT)}: {m[0].strip()}" for m in [*IMPORTED.finditer(text), *REACHED.finditer(text)]
            ]
    assert found == [], "move these to zoo/private, and let a test here watch them"


@pytest.mark.parametrize(
    ("owner", "name", "where"),
    [
        (pl.Trainer(logger=False, enable_checkpointing=False), "_signal_connector", "put_off_stop, stop"),
        (_SignalConnector, "received_sigterm", "put_off_stop, stop"),
        (pl.Trainer._run, "ckpt_path", "checkpoint_to_load"),
        (LightningCLI, "_add_configure_optimizers_method_to_model", "ZooCLI, which overrides it"),
        (LightningCLI, "_parse_ckpt_path", "ZooCLI, which overrides it"),
        (ModelCheckpoint, "_save_last_checkpoint", "BestAndLastCheckpoint, which overrides it"),
        (_Loop, "restarting", "close_finished_epoch"),
        (_Loop, "reset_restart_stage", "close_finished_epoch"),
        (torch._C, "_current_graph_task_id", "backward_pass"),
        (torch.amp.autocast_mode, "is_autocast_available", "has_autocast"),
    ],
)
def test_a_private_name_is_still_there(owner, name, where):
    has_source = inspect.isclass(owner) or inspect.isfunction(owner)
    there = hasattr(owner, name) or name in inspect.getsource(owner if has_source else type(owner))
    assert there, f"{name} moved in a new release; look at {where} in zoo/private"


def test_averages_are_still_kept_where_they_were():
    assert "_average_model" in inspect.getsource(WeightAveraging), (
        "look at average_no_indices in zoo/private/lightning.py"
    )


def test_a_backward_pass_still_has_a_number():
    seen = []

    class Watch(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            seen.append(private_torch.backward_pass())
            return grad

    for _ in range(2):
        x = torch.ones(1, requires_grad=True)
        (Watch.apply(x) + Watch.apply(x)).sum().backward()
    assert seen[0] == seen[1] != seen[2] == seen[3], "look at backward_pass in zoo/private/torch.py"
    assert private_torch.backward_pass() == -1


def test_timm_still_takes_features_by_number():
    assert private_timm.feature_take_indices(4, 2) == ([2, 3], 3), "look at zoo/private/timm.py"
