"""What ``zoo study`` starts in processes of its own: one run, or the measuring of one arm.

A task comes as a line of JSON on standard input; the process ends when that closes, so no run outlives its study.
"""

import hashlib
import json
import math
import os
import shutil
import sys
import threading
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

import zoo
from zoo.callbacks.finite import DivergedError
from zoo.cli.lightning import ZooCLI, classes_of
from zoo.cli.zoo import one_line
from zoo.errors import ZooError
from zoo.study.plan import BATCHES

_NUMBERS = 4096


class BatchDigest(pl.Callback):
    """SHA-256 of the first batches a run trains on (of each tensor, the first numbers)."""

    def __init__(self) -> None:
        self.sha = hashlib.sha256()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if trainer.fit_loop.total_batch_idx < BATCHES:
            self._add(batch)

    def _add(self, item: Any) -> None:
        if isinstance(item, Tensor):
            first = item.detach().flatten()[:_NUMBERS].cpu()
            self.sha.update(f"{item.dtype}{tuple(item.shape)}".encode())
            self.sha.update(first.to(torch.float64 if first.is_floating_point() else torch.int64).numpy().tobytes())
        elif isinstance(item, dict):
            for name in sorted(item):
                self._add(item[name])
        elif isinstance(item, (list, tuple)):
            for part in item:
                self._add(part)


class _Watched(ZooCLI):
    """``lightning``, with one more callback, which changes nothing."""

    watch: BatchDigest

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        trainer = super().instantiate_trainer(**kwargs)
        callbacks: list[pl.Callback] = getattr(trainer, "callbacks", [])
        callbacks.insert(0, self.watch)
        return trainer


def run(task: dict[str, Any]) -> None:
    """Fit, and test the best weights where that is asked for; write result.json."""
    folder, watch = Path(task["folder"]), BatchDigest()
    _Watched.watch = watch
    result: dict[str, Any] = {
        "versions": {"zoo": zoo.__version__, **{name: version(name) for name in ("torch", "lightning")}}
    }
    try:
        cli = _lightning(task["fit"])
        figures = _figures(cli.trainer)
        keeper, best = cli.trainer.checkpoint_callback, ""
        if isinstance(keeper, ModelCheckpoint) and keeper.monitor and keeper.best_model_score is not None:
            best, figures[keeper.monitor] = keeper.best_model_path, float(keeper.best_model_score)
        if task["test"] and best:
            quiet = ["--trainer.logger", "false", "--trainer.enable_progress_bar", "false"]
            figures |= _figures(_lightning(["test", "--ckpt_path", best, *quiet]).trainer)
        result["figures"] = figures
        if not best and any(math.isnan(value) for value in figures.values()):
            result["diverged"] = "no validation gave a finite number"
    except DivergedError as error:
        result["diverged"] = str(error)
    result["batches"] = watch.sha.hexdigest()
    if not task["keep"]:
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    _write(folder / "result.json", result)


def _lightning(arguments: list[str]) -> _Watched:
    sys.argv = ["lightning", *arguments]
    return _Watched()


def _figures(trainer: pl.Trainer) -> dict[str, float]:
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def size(task: dict[str, Any]) -> None:
    """Find the value of a setting that makes a model as large as it should be."""
    from zoo.study.measuring import built, find_size, parameters_of

    model, data = classes_of(task["fit"])
    identity = built(model, data)
    name = task["setting"]
    start: Any = model.settings
    for part in name.removeprefix("model.").split("."):
        start = start.get(part) if isinstance(start, dict) else None
    if isinstance(start, bool) or not isinstance(start, (int, float)):
        raise ZooError(f"got {name}, which is {start!r} here; name a setting that is a number", argument="size_setting")

    def count(value: float) -> int:
        sized, _ = classes_of([*task["fit"], f"--{name}", str(value)])
        sized.build_and_freeze(identity)
        return parameters_of(sized)

    found, parameters = find_size(count, start, task["target"])
    _write(Path(task["out"]), {"size": found, "parameters": parameters})


def measure(task: dict[str, Any]) -> None:
    """Measure an arm beside the reference."""
    from zoo.study.measuring import measure as measured

    _write(Path(task["out"]), measured(*classes_of(task["fit"]), *classes_of(task["reference"])))


def _write(path: Path, found: dict[str, Any]) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(found), encoding="utf-8")
    os.replace(part, path)


def _end_with_parent() -> None:
    while os.read(0, 1024):  # not through sys.stdin, whose lock the interpreter wants when it ends
        continue
    os._exit(143)


TASKS = {"run": run, "size": size, "measure": measure}


def main() -> None:
    """Do the one task that standard input names."""
    task = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    one_line(lambda: TASKS[task["do"]](task))


if __name__ == "__main__":
    main()
