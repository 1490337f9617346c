"""Trained models by name: list them, load them, check them."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from torch import nn

from zoo.checkpoint.checkpoint import Checkpoint
from zoo.checkpoint.index import Entry, check_file, entry_of, read_index
from zoo.errors import CheckpointMismatchError, ZooError, listed
from zoo.families import FAMILIES, data_class, task_class
from zoo.tasks import ZooTask
from zoo.tasks.pretrained import not_finite

FIGURES_AGREE = 1e-3  # sums over batches in another order or on another machine differ by less


def list_models(family: str | None = None) -> list[str]:
    """Names of the trained models, of one family or of all.

    Args:
        family: such as language, vision or graph; None for all.

    Raises:
        ZooError: if the family is none, or there is no shelf.
    """
    if family is not None:
        FAMILIES.get(family)
    return [name for name, entry in read_index().items() if family in (None, entry.family)]


def load_pretrained(name_or_path: str | Path | Checkpoint) -> ZooTask:
    """The task of a trained model, in eval mode on the CPU.

    Args:
        name_or_path: a name on the shelf, whose file is then checked against the index, a checkpoint file, the address
            of one, or one that was opened.

    Raises:
        ZooError: if there is none, or its file isn't what it should be.
    """
    checkpoint = Checkpoint.open(name_or_path)
    task = task_class(checkpoint.claim, checkpoint.path).load_from_checkpoint(checkpoint)
    if wrong := not_finite(task.state_dict()):
        raise ZooError(
            f"{checkpoint.path} has numbers in {listed(wrong)} that aren't finite; take another", argument="checkpoint"
        )
    return task.eval()


def create_model(name: str, pretrained: bool = True, **overrides: Any) -> nn.Module:
    """The bare network of a model on the shelf, in eval mode.

    Args:
        name: its name.
        pretrained: with its weights; False draws them anew.
        overrides: settings of its task that replace the trained model's, such as ``dropout``.

    Raises:
        ZooError: if there is no such model or setting, or the weights don't fit the settings.
    """
    entry = entry_of(name)
    check_file(entry)
    checkpoint = Checkpoint.open(entry.path)
    task = FAMILIES.get(entry.family).task(**checkpoint.settings)
    if unknown := sorted(set(overrides) - set(task.settings)):
        raise ZooError(f"{unknown[0]}: no setting of {name}; it has {', '.join(sorted(task.settings))}")
    task = FAMILIES.get(entry.family).task(**{**checkpoint.settings, **overrides})
    if pretrained:
        contents = checkpoint.take()
        task.on_load_checkpoint(contents)
        task.load_state_dict(contents["state_dict"])
    else:
        task.build(checkpoint.identity)
    return task.network.eval()


def verify(entry: Entry) -> list[str]:
    """Check a model on the shelf: its file, the identity of its data, and that it loads. Returns what was checked.

    The file is hashed whole, since the index says what its bytes must be, and only then opened, which reads it once.

    Raises:
        ZooError: naming what isn't as the index says.
    """
    check_file(entry)
    checkpoint = Checkpoint.open(entry.path)
    if checkpoint.digest != entry.identity:
        raise CheckpointMismatchError(
            f"{entry.name}: the digest of its data's identity is {checkpoint.digest[:12]}..., not "
            f"{entry.identity[:12]}... as the index says; take the index or the file anew"
        )
    task = load_pretrained(checkpoint)
    if not isinstance(task, FAMILIES.get(entry.family).task):
        raise ZooError(f"{entry.name}: a {type(task).__name__}, not of the family {entry.family}; take the index anew")
    n = sum(p.numel() for p in task.parameters())
    if n != entry.parameters:
        raise ZooError(f"{entry.name}: {n:,} parameters, not {entry.parameters:,} as the index says; take it anew")
    return [f"SHA-256 {entry.sha256[:12]}...", f"identity {entry.identity[:12]}...", f"loads, {n:,} parameters"]


def verify_file(path: str) -> list[str]:
    """Check any checkpoint: whole, nothing but plain types and tensors, identity and digest agree, loads.

    Raises:
        ZooError: naming what is wrong.
    """
    checkpoint = Checkpoint.open(path)
    data_class(checkpoint.claim, checkpoint.path)
    task = load_pretrained(checkpoint)
    n = sum(p.numel() for p in task.parameters())
    return ["whole", f"identity {checkpoint.digest[:12]}...", f"loads, {n:,} parameters, {type(task).__name__}"]


def measure(entry: Entry) -> dict[str, float]:
    """The test figures of a model on its own data, as ``lightning test --ckpt_path`` gives them."""
    checkpoint = Checkpoint.open(entry.path)  # held until the trainer has asked for its tensors
    claim, path = checkpoint.claim, checkpoint.path
    kind, task = data_class(claim, path), task_class(claim, path)
    if kind is None:
        raise ZooError(f"{entry.name}: its checkpoint doesn't say what data it was tested on; take another copy")
    settings = checkpoint.data_settings | kind.as_in_checkpoint(path)
    trainer = pl.Trainer(logger=False, enable_progress_bar=False, enable_model_summary=False, inference_mode=True)
    return dict(trainer.test(task(**checkpoint.settings), kind(**settings), ckpt_path=path, verbose=False)[0])


def check_metrics(entry: Entry) -> list[str]:
    """Measure a model's test figures again; returns them.

    Raises:
        ZooError: naming the figures that aren't those of the index.
    """
    found = measure(entry)
    wrong, right = [], []
    for metric in entry.metrics:
        if metric["split"] != "test":
            continue
        name, value = metric["name"], metric["value"]
        now = found.get(f"test/{name}")
        if now is None or not abs(now - value) <= FIGURES_AGREE * max(1.0, abs(value)):  # NaN is no figure
            wrong.append(f"test/{name} is {'not there' if now is None else f'{now:.4f}'}, not {value:.4f}")
        else:
            right.append(f"test/{name} {now:.4f}")
    if wrong:
        raise ZooError(
            f"{entry.name}: {'; '.join(wrong)}, as the index says; the data here may be other than it was tested on"
        )
    return right
