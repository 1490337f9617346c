"""Fixtures of the whole suite: one thread a worker, a small corpus, a cache of its own, the CLI in this process."""

import sys
from pathlib import Path

import lightning.pytorch as pl  # here, so that its log isn't bound to the captured output of a single test
import pytest
import torch

from zoo.cli import lightning_main

torch.set_num_threads(1)

WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda", "mu"]


def write_corpus(folder: Path, n_files: int = 24, lines: int = 60) -> Path:
    """Small but real Python, every file different, some of it not ASCII."""
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(n_files):
        rows = [f"def {WORDS[(i + j) % 12]}_{j}(x):\n    return x * {i + j}  # grün\n" for j in range(lines)]
        (folder / f"file_{i:02}.py").write_text("".join(rows), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _no_traces(tmp_path, shared_cache, monkeypatch):
    """Run in an empty folder, with a cache that isn't the user's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ZOO_CACHE", str(shared_cache))


TINY_MODEL = {
    "d_model": 16,
    "n_heads": 2,
    "d_ff": 32,
    "n_layers": 2,
    "mlp_hidden": "[8]",
    "max_len": 64,
}


@pytest.fixture
def lightning(monkeypatch):
    """Run ``lightning ARGS`` in this process; raises SystemExit as the real one does."""

    def run(*args: object) -> None:
        monkeypatch.setattr(sys, "argv", ["lightning", *map(str, args)])
        lightning_main()

    return run


@pytest.fixture(scope="session")
def tiny_arguments(corpus):
    """Arguments that make any language config small and its data the test corpus."""
    return [
        *(part for name, value in TINY_MODEL.items() for part in (f"--model.{name}", str(value))),
        *("--data.path", str(corpus), "--data.vocab_size", "300", "--data.window", "16", "--data.batch_size", "4"),
        *("--trainer.enable_progress_bar", "false", "--trainer.enable_model_summary", "false"),
    ]


@pytest.fixture(scope="session")
def trained(tmp_path_factory, corpus, shared_cache) -> Path:
    """A checkpoint of a tiny DAMCHA language model, trained for a few steps on the test corpus."""
    from datamodules import TextDataModule
    from zoo.tasks import LanguageModelTask

    folder = tmp_path_factory.mktemp("trained")
    pl.seed_everything(0)
    data = TextDataModule(path=str(corpus), vocab_size=300, window=16, batch_size=4, cache_dir=str(shared_cache))
    task = LanguageModelTask(d_model=16, n_heads=2, d_ff=32, n_layers=2, mlp_hidden=[8], dropout=0.0)
    trainer = pl.Trainer(
        max_steps=4, logger=False, enable_checkpointing=False, enable_progress_bar=False, limit_val_batches=1
    )
    trainer.fit(task, data)
    trainer.save_checkpoint(folder / "tiny.ckpt")
    return folder / "tiny.ckpt"
