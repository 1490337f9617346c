"""Test accuracy on scikit-learn's digits over seeded splits, of the configs and of a support vector classifier.

    python benchmarks/digits_splits.py                   # 4 configs, 5 splits, 2 at a time

Each run is `lightning fit --config configs/vit/NAME.yaml --data.split_seed S --seed_everything S`, and its figure the
accuracy of the averaged weights at the end of training: no epoch is chosen. The classifier is scikit-learn's with RBF
kernel, once as it comes and once with C and gamma chosen on each split's validation pictures; it learns from the
training pictures alone, as the models do.
"""

import argparse
import json
import logging
import os
import statistics
import tempfile
import warnings
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import torch
from sklearn.svm import SVC

from datamodules import ImageDataModule
from zoo.cli.lightning import ZooCLI

CONFIGS = Path(__file__).parents[1] / "configs" / "vit"
NAMES = ("digits_damcha", "digits_damcha_independent", "digits_static", "digits_standard")


def accuracy_of_config(job: tuple[str, int], epochs: int | None) -> float:
    """Test accuracy of a config on a split."""
    name, seed = job
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    given = ["--config", str(CONFIGS / f"{name}.yaml"), "--data.split_seed", str(seed), "--seed_everything", str(seed)]
    quiet = ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")
    settings = [part for option in quiet for part in (f"--trainer.{option}", "false")]
    average = [{"class_path": "lightning.pytorch.callbacks.EMAWeightAveraging", "init_args": {"decay": 0.99}}]
    more = [] if epochs is None else ["--trainer.max_epochs", str(epochs)]
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        cli = ZooCLI(args=["fit", *given, *settings, f"--trainer.callbacks={json.dumps(average)}", *more])
        return cli.trainer.test(cli.model, cli.datamodule, verbose=False)[0]["test/accuracy"]


def accuracy_of_classifier(seed: int) -> tuple[float, float]:
    """Test accuracy of the support vector classifier on a split: as it comes, and chosen on the validation pictures."""
    data = ImageDataModule(split_seed=seed, batch_size=2000)
    data.setup("fit")
    parts = []
    for loader in (data.train_dataloader(), data.val_dataloader(), data.test_dataloader()):
        batch = next(iter(loader))
        parts.append((batch["image"].flatten(1).numpy(), batch["target"].numpy()))
    train, val, test = parts
    grid = [SVC(C=C, gamma=gamma).fit(*train) for C, gamma in product((1, 3, 10, 100), ("scale", 0.003, 0.01, 0.03))]
    best = max(grid, key=lambda model: model.score(*val))
    return float(SVC().fit(*train).score(*test)), float(best.score(*test))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--splits", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, help="in place of the configs'")
    parser.add_argument("--configs", nargs="+", default=NAMES, choices=NAMES, metavar="NAME")
    parser.add_argument("--jobs", type=int, default=2)
    chosen = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    seeds = range(chosen.first_seed, chosen.first_seed + chosen.splits)
    figures: dict[str, list[float]] = {"RBF classifier": [], "RBF classifier, chosen": []}
    for seed in seeds:
        for name, value in zip(list(figures), accuracy_of_classifier(seed), strict=True):
            figures[name].append(value)
    jobs = list(product(chosen.configs, seeds))
    with ProcessPoolExecutor(chosen.jobs, mp_context=get_context("spawn")) as pool:
        run = partial(accuracy_of_config, epochs=chosen.epochs)
        for (name, seed), value in zip(jobs, pool.map(run, jobs), strict=True):
            figures.setdefault(name, []).append(value)
            print(f"{name} split {seed}: {value:.4f}", flush=True)
    for name, values in figures.items():
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        print(f"{name}: mean {statistics.mean(values):.4f}, standard deviation {spread:.4f}")


if __name__ == "__main__":
    main()
