"""A table with a graph that every machine with the zoo has."""

import numpy as np
import pandas as pd

from datamodules.sources.base import TableData, TableSource, register_table


def breast_cancer_table() -> pd.DataFrame:
    """Scikit-learn's breast cancer table: 569 rows, 30 named measurements and the column "diagnosis" as text."""
    from sklearn.datasets import load_breast_cancer

    data = load_breast_cancer(as_frame=True)
    names = np.array(data.target_names, dtype=object)
    return data.data.assign(diagnosis=names[data.target])


def breast_cancer_edges() -> pd.DataFrame:
    """The graph in that table's column names: "worst radius" -> "radius" -> "size" -> "diagnosis", and so on."""
    groups = {
        "size": ("radius", "perimeter", "area"),
        "shape": ("compactness", "concavity", "concave points", "symmetry", "fractal dimension"),
        "surface": ("texture", "smoothness"),
    }
    edges = [(group, "diagnosis") for group in groups]
    for group, features in groups.items():
        for feature in features:
            edges += [(feature, group)]
            edges += [(column, feature) for column in (f"mean {feature}", f"{feature} error", f"worst {feature}")]
    return pd.DataFrame(edges, columns=["source", "target"])


@register_table("breast_cancer")
class BreastCancer(TableSource):
    """Scikit-learn's breast cancer table, on the graph of its column names.

    Source: Breast Cancer Wisconsin (Diagnostic) (W. Wolberg, O. Mangasarian, N. Street, W. Street), UCI Machine
    Learning Repository, CC BY 4.0, as scikit-learn carries it.
    """

    title = "breast-cancer"

    def load(self) -> TableData:
        return TableData(breast_cancer_table(), breast_cancer_edges(), "diagnosis")
