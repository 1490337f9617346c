"""AUROC on scikit-learn's breast cancer table over seeded splits.

Of the graph model of configs/graph/breast_cancer.yaml, of the same model on random graphs with about as many edges, and
of logistic regression on the same splits.

    python benchmarks/breast_cancer_splits.py            # 5 splits, some minutes on 2 cores

Each random graph keeps the nodes and, to one or two, the number of edges: every measurement gets an edge into a random
feature node, every feature node into a random group, every group into the diagnosis, and what is left over goes between
random layers in order. So it has the depth of the real one, and names that mean nothing.
"""

import argparse
import logging
import statistics
import warnings
from itertools import pairwise

import lightning.pytorch as pl
import numpy as np
import pandas as pd
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from datamodules.sources.breast_cancer import breast_cancer_edges, breast_cancer_table
from datamodules.tables import GraphTableDataModule
from zoo.tasks import GraphPredictionTask


def layers_of(edges: pd.DataFrame) -> list[list[str]]:
    """Node names from the measurements to the diagnosis."""
    layers = [["diagnosis"]]
    while True:
        below = sorted(set(edges.loc[edges["target"].isin(layers[0]), "source"]))
        if not below:
            return layers
        layers.insert(0, below)


def random_edges(edges: pd.DataFrame, seed: int) -> pd.DataFrame:
    """As many edges between the same layers, drawn at random."""
    rng = np.random.default_rng(seed)
    layers = layers_of(edges)
    drawn = set()
    for below, above in pairwise(layers):
        for name in below:
            drawn.add((name, str(rng.choice(above))))
        for name in above:  # nobody is left without an edge, which would make it an input
            if not any(target == name for _, target in drawn):
                drawn.add((str(rng.choice(below)), name))
    while len(drawn) < len(edges):
        level = int(rng.integers(len(layers) - 1))
        drawn.add((str(rng.choice(layers[level])), str(rng.choice(layers[level + 1]))))
    return pd.DataFrame(sorted(drawn), columns=["source", "target"])


def auroc_of_graph(edges: pd.DataFrame, seed: int, epochs: int) -> float:
    """Test AUROC of the config's model at the end of training: 85 validation rows are too few to choose an epoch by."""
    pl.seed_everything(seed)
    data = GraphTableDataModule(features=breast_cancer_table(), edges=edges, label="diagnosis", split_seed=seed)
    task = GraphPredictionTask(embed_dim=16, num_heads=4, n_layers=3, dropout=0.1, readout="all", lr=3e-3)
    trainer = pl.Trainer(
        max_epochs=epochs,
        gradient_clip_val=1.0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(task, data)
    return trainer.test(task, data, verbose=False)[0]["test/auroc"]


def auroc_of_regression(seed: int) -> float:
    """Test AUROC of logistic regression on the same split and scaling, training rows only."""
    data = GraphTableDataModule(
        features=breast_cancer_table(), edges=breast_cancer_edges(), label="diagnosis", split_seed=seed, batch_size=1000
    )
    data.setup("fit")
    train, test = next(iter(data.train_dataloader())), next(iter(data.test_dataloader()))
    model = LogisticRegression(max_iter=10_000).fit(train["values"].numpy(), train["target"].numpy())
    return float(roc_auc_score(test["target"], model.predict_proba(test["values"].numpy())[:, 1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--splits", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=30)
    chosen = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    edges = breast_cancer_edges()
    rows = []
    for seed in range(chosen.splits):
        rows.append(
            {
                "split": seed,
                "graph": auroc_of_graph(edges, seed, chosen.epochs),
                "random graph": auroc_of_graph(random_edges(edges, seed), seed, chosen.epochs),
                "logistic regression": auroc_of_regression(seed),
            }
        )
        print(
            "  ".join(
                f"{name} {value:.4f}" if name != "split" else f"split {value}" for name, value in rows[-1].items()
            )
        )
    for name in list(rows[0])[1:]:
        values = [row[name] for row in rows]
        print(f"{name}: mean {statistics.mean(values):.4f}, standard deviation {statistics.stdev(values):.4f}")


if __name__ == "__main__":
    main()
