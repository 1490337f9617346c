"""Write configs/graph/pbmc_edges.csv, an example graph for the 700-cell PBMC table, out of its own correlation.

    python benchmarks/make_pbmc_edges.py

It shows what such a file looks like and lets the config run; it is no biology. Genes whose expression rises and falls
together across the *training* cells (the data module's default split: validation and test cells are never looked at)
share one of 40 modules, found by Ward clustering of genes scaled to length one, where squared distance is
2 (1 - correlation). Edges go gene -> module -> cell_type. For work, take pathways or regulons from a database instead.
"""

import argparse
import inspect
from pathlib import Path

import numpy as np
import pandas as pd

from datamodules.splits import split_rows
from datamodules.table_files import Table, read_table
from datamodules.table_labels import encode_labels
from datamodules.tables import GraphTableDataModule

LABEL, N_MODULES = "bulk_labels", 40
TARGET = Path(__file__).parent.parent / "configs" / "graph" / "pbmc_edges.csv"


def training_cells(table: Table) -> np.ndarray:
    """A mask of the rows that GraphTableDataModule trains on if no split option is given."""
    arguments = inspect.signature(GraphTableDataModule).parameters
    val, test, seed = (arguments[name].default for name in ("val_fraction", "test_fraction", "split_seed"))
    labels = encode_labels(table.about[[LABEL]], "multiclass", table.row_ids(None))
    return split_rows(len(table), val, test, seed, labels.target) == 0


def module_edges(expression: np.ndarray, genes: list[str]) -> pd.DataFrame:
    """Edges gene -> module -> cell_type from the expression (cells, genes) of training cells."""
    from sklearn.cluster import AgglomerativeClustering

    centred = expression.astype(np.float64) - expression.mean(axis=0)
    profiles = (centred / np.linalg.norm(centred, axis=0)).T  # (genes, cells), of length one
    numbers = AgglomerativeClustering(n_clusters=N_MODULES, linkage="ward").fit_predict(profiles)
    # Modules are numbered by size, then by their first gene: clustering's own numbers have no meaning.
    members = sorted(
        (np.flatnonzero(numbers == number) for number in range(N_MODULES)), key=lambda found: (-len(found), found[0])
    )
    edges = []
    for i, found in enumerate(members, start=1):
        edges += [(genes[gene], f"module_{i:02}") for gene in found]
    edges += [(f"module_{i:02}", "cell_type") for i in range(1, N_MODULES + 1)]
    return pd.DataFrame(edges, columns=["source", "target"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=TARGET, help="default: %(default)s")
    out = parser.parse_args().out
    table = read_table("pbmc68k_reduced", "data.features")
    cells = training_cells(table)
    edges = module_edges(table.take(table.columns).to_numpy()[cells], table.columns)
    edges.to_csv(out, index=False, lineterminator="\n")
    sizes = edges["target"].value_counts().drop("cell_type")
    print(
        f"{out}: {len(table.columns)} genes in {len(sizes)} modules of {sizes.min()} to {sizes.max()}, from "
        f"{cells.sum()} training cells of {len(table)}"
    )


if __name__ == "__main__":
    main()
