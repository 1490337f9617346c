"""Which nodes and edges mattered to a prediction on a graph: as tables and as a picture."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from zoo.attention.packed import PackedMultiheadAttention
from zoo.errors import ZooError, listed
from zoo.models.graph_tokens import GraphTokenLayer, GraphTokenModel, distances_to_outputs
from zoo.tasks import GraphPredictionTask


def explain(
    task: GraphPredictionTask, batches: Iterable[Mapping[str, Any]], target: str | None = None
) -> tuple[pd.DataFrame, pd.DataFrame]:
    r"""Attributions of nodes and attention of edges, averaged over samples.

    Both kinds of node attribution are gradient x input, with y the logit of ``target`` (for regression the standardised
    prediction). At an input node the input is its standardised measurement v, so zero is the training rows' mean:
    :math:`v \, \partial y / \partial v`. At the other nodes it is the message m that attention brings there, summed
    over the blocks: :math:`\sum_l m_l \cdot \partial y / \partial m_l`. (Of the tokens it would be
    nearly zero: they are read through a LayerNorm, which ignores their length.) An edge's attention is the share of the
    target node's mix that comes from the source, averaged over heads, a column a block. Attention says where
    information could flow, not what it did.

    Args:
        task: a built task, in eval mode.
        batches: dicts with "values" (B, inputs).
        target: the class, label or target to explain; None is the positive class, or the only target.

    Returns:
        Nodes (node, role, attribution, attribution_abs, value) with the mean of the attribution, of its size, and of
        the standardised measurement; largest size first. Edges (source, target, attention, attention_1, ...), with
        self-loops; largest attention first.

    Raises:
        ZooError: for an unknown ``target``, or without samples.
    """
    network = task.network
    output, sign = _output(task, target)
    total: dict[str, Tensor] = {}
    count = 0
    for batch in batches:
        values = batch["values"].to(network.node_embedding.device).detach()
        attribution, weights = _attribute(network, values, output, sign)
        sums = {
            "attribution": attribution.sum(0),
            "attribution_abs": attribution.abs().sum(0),
            "value": values.nan_to_num(0).double().sum(0),
            "measured": (~values.isnan()).double().sum(0),
            "attention": torch.stack([w.detach().double().mean(-1).sum(0) for w in weights], dim=-1),  # (nnz, L)
        }
        total = {name: total[name] + value if name in total else value for name, value in sums.items()}
        count += len(values)
    if not count:
        raise ZooError("explain: got no samples; give a table with at least one row")
    return _node_table(network, total, count), _edge_table(network, total, count)


def _attribute(network: GraphTokenModel, values: Tensor, output: int, sign: float) -> tuple[Tensor, list[Tensor]]:
    """Gradient x input of every node (B, n), and the edge weights (B, nnz, H) of each block."""
    messages: list[Tensor] = []
    layers = [cast(GraphTokenLayer, layer) for layer in network.layers]
    hooks = [layer.attention.register_forward_hook(lambda _, __, out: messages.append(out[0])) for layer in layers]
    try:
        with torch.enable_grad():
            v = values.clone().requires_grad_()
            tokens, hidden_keys = network.tokens(v)
            y, weights = network.predict_from(tokens, hidden_keys, need_weights=True)
            gradients = torch.autograd.grad(sign * y[:, output].sum(), [v, *messages])
    finally:
        for hook in hooks:
            hook.remove()
    attribution = sum((m.detach() * g).sum(-1).double() for m, g in zip(messages, gradients[1:], strict=True))
    at_inputs = (gradients[0] * values).nan_to_num(0).double()
    return torch.as_tensor(attribution).index_copy(1, network.input_index, at_inputs), weights


def _output(task: GraphPredictionTask, target: str | None) -> tuple[int, float]:
    """Which output to explain, and its sign: a binary problem has one, for its second class."""
    names = task.names
    if target is None:
        if task.problem in ("multiclass", "multilabel"):
            raise ZooError(f"--target: got none; choose one of {listed(names, 50)}")
        return 0, 1.0
    if target not in names:
        raise ZooError(f"--target: got {target!r}; choose one of {listed(names, 50)}")
    if task.problem == "binary":
        return 0, 1.0 if target == names[1] else -1.0
    return (0 if task.problem == "regression" else names.index(target)), 1.0


def _node_table(network: GraphTokenModel, total: Mapping[str, Tensor], count: int) -> pd.DataFrame:
    spec = network.spec
    roles = dict.fromkeys(spec.input_nodes, "input") | dict.fromkeys(spec.output_nodes, "output")
    means = total["value"] / total["measured"].clamp(min=1)
    measured = total["measured"] > 0
    value = {n: v if m else None for n, v, m in zip(spec.input_nodes, means.tolist(), measured.tolist(), strict=True)}
    table = pd.DataFrame(
        {
            "node": list(spec.nodes),
            "role": [roles.get(name, "hidden") for name in spec.nodes],
            "attribution": (total["attribution"] / count).tolist(),
            "attribution_abs": (total["attribution_abs"] / count).tolist(),
            "value": [value.get(name) for name in spec.nodes],
        }
    )
    return table.sort_values("attribution_abs", ascending=False, ignore_index=True)


def _edge_table(network: GraphTokenModel, total: Mapping[str, Tensor], count: int) -> pd.DataFrame:
    attention: PackedMultiheadAttention = cast(GraphTokenLayer, network.layers[0]).attention
    nodes = np.array(network.spec.nodes, dtype=object)
    layers = total["attention"] / count
    table = pd.DataFrame(
        {
            "source": nodes[attention.source_index.cpu().numpy()],
            "target": nodes[attention.target_index.cpu().numpy()],
            "attention": layers.mean(-1).tolist(),
        }
        | {f"attention_{i + 1}": layers[:, i].tolist() for i in range(layers.shape[1])}
    )
    return table.sort_values("attention", ascending=False, ignore_index=True)


def draw(task: GraphPredictionTask, nodes: pd.DataFrame, edges: pd.DataFrame, path: Path, most: int = 60) -> None:
    """Draw the graph to a picture file: inputs on the left, outputs on the right.

    A node is red where it speaks for the target, blue where against, the larger the more; an edge is as dark as its
    attention. Of a graph with more than ``most`` nodes those with the largest attribution are drawn.
    """
    from matplotlib.figure import Figure  # takes a while, and only pictures need it

    spec = task.network.spec
    shown = nodes.head(most).set_index("node")
    distance = dict(zip(spec.nodes, distances_to_outputs(spec).tolist(), strict=True))
    farthest = max(distance.values())
    columns: dict[int, list[str]] = {}
    for name in spec.nodes:
        if name in shown.index:
            columns.setdefault(farthest - distance[name] if distance[name] >= 0 else 0, []).append(name)
    tallest = max(len(names) for names in columns.values())
    places = {
        name: (column, tallest * (i + 1) / (len(names) + 1))
        for column, names in columns.items()
        for i, name in enumerate(names)
    }
    figure = Figure(figsize=(3 * len(columns) + 2, max(4, 0.32 * tallest)), layout="constrained")
    axes = figure.add_subplot()
    drawn = edges[edges["source"].isin(shown.index) & edges["target"].isin(shown.index)]
    drawn = drawn[drawn["source"] != drawn["target"]]
    strongest = max(drawn["attention"].max(), 1e-12) if len(drawn) else 1.0
    for row in drawn.itertuples():
        (x0, y0), (x1, y1) = places[row.source], places[row.target]
        axes.plot(
            [x0, x1], [y0, y1], color="black", alpha=0.05 + 0.75 * row.attention / strongest, linewidth=1, zorder=1
        )
    size = shown["attribution_abs"] / max(shown["attribution_abs"].max(), 1e-12)
    largest = max(shown["attribution"].abs().max(), 1e-12)
    axes.scatter(
        [places[name][0] for name in shown.index],
        [places[name][1] for name in shown.index],
        s=30 + 300 * size,
        c=shown["attribution"],
        cmap="coolwarm",
        vmin=-largest,
        vmax=largest,
        edgecolors="black",
        linewidths=0.5,
        zorder=2,
    )
    for name in shown.index:
        axes.annotate(name, places[name], xytext=(8, 4), textcoords="offset points", fontsize=8)
    axes.set_axis_off()
    axes.margins(x=0.15)
    figure.savefig(path, dpi=130)
