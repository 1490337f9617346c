"""The graph family's network: one token a node of a named graph, attention only along its edges."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from zoo.attention.packed import PackedMultiheadAttention
from zoo.errors import ZooError, listed
from zoo.graph import AdjacencySpec


def distances_to_outputs(spec: AdjacencySpec) -> np.ndarray:
    """Edges on the shortest path from each node to an output node, in node order; -1 where there is no path."""
    source, target = np.asarray(spec.source_index), np.asarray(spec.target_index)
    place = {name: i for i, name in enumerate(spec.nodes)}
    distance = np.full(len(spec.nodes), -1)
    reached = np.array([place[name] for name in spec.output_nodes])
    distance[reached] = 0
    steps = 0
    while len(reached):
        steps += 1
        fresh = np.zeros(len(distance), dtype=bool)
        into = np.zeros(len(distance), dtype=bool)
        into[reached] = True
        fresh[source[into[target]]] = True
        reached = np.flatnonzero(fresh & (distance < 0))
        distance[reached] = steps
    return distance


class GraphTokenLayer(nn.Module):
    """Packed attention and feed-forward with residuals, pre-norm."""

    def __init__(self, attention: PackedMultiheadAttention, d_ff: int, dropout: float) -> None:
        super().__init__()
        width = attention.embed_dim
        self.attention = attention
        self.feed_forward = nn.Sequential(
            nn.Linear(width, d_ff), nn.GELU(), nn.Dropout(dropout), nn.Linear(d_ff, width)
        )
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, hidden_keys: Tensor | None, need_weights: bool) -> tuple[Tensor, Tensor | None]:
        h = self.norm1(x)
        y, weights = self.attention(
            h, h, h, key_padding_mask=hidden_keys, need_weights=need_weights, average_attn_weights=False
        )
        x = x + self.dropout(y)
        return x + self.dropout(self.feed_forward(self.norm2(x))), weights


class GraphTokenModel(nn.Module):
    r"""A transformer whose tokens are the nodes of a graph and whose attention runs along its edges.

    Node n starts as its own learned embedding; an input node adds its measured value v through its own scale and shift:

    .. math:: x_n = e_n + v_n s_n + b_n

    Then come pre-norm blocks of packed attention (with self-loops) and feed-forward, and a readout of its own at every
    node that is read: :math:`y = c + \sum_n W_n x_n`.

    Args:
        spec: the graph, from ``parse_adjacency``.
        embed_dim: width E of a token.
        num_heads: number of attention heads; divides E.
        n_layers: number of blocks; information travels one edge a block.
        num_outputs: numbers to predict.
        d_ff: width of the feed-forward layers; None is 2 E.
        dropout: dropout probability, everywhere.
        readout: read the graph's output nodes (``outputs``) or ``all`` nodes.
        on_unseen_inputs: what to do about inputs from which no path of at most ``n_layers`` edges leads to a node that
            is read: ``error``, or ``allow`` them to have no effect.
        chunk_size: edges, or pairs of a mask, taken at once, see ``PackedMultiheadAttention``; None is what is faster.

    Raises:
        ZooError: for a value out of range, or inputs that can't be seen.
    """

    def __init__(
        self,
        spec: AdjacencySpec,
        embed_dim: int,
        num_heads: int,
        n_layers: int,
        num_outputs: int,
        d_ff: int | None = None,
        dropout: float = 0.0,
        readout: Literal["outputs", "all"] = "outputs",
        on_unseen_inputs: Literal["error", "allow"] = "error",
        chunk_size: int | None = None,
    ) -> None:
        super().__init__()
        for name, value in (
            ("n_layers", n_layers),
            ("num_outputs", num_outputs),
            ("d_ff", 1 if d_ff is None else d_ff),
        ):
            if value < 1:
                raise ZooError(f"{name}: got {value}; must be at least 1")
        if not 0 <= dropout < 1:
            raise ZooError(f"dropout: got {dropout}; must lie in [0, 1)")
        if readout not in ("outputs", "all"):
            raise ZooError(f"readout: got {readout!r}; choose outputs or all")
        if on_unseen_inputs not in ("error", "allow"):
            raise ZooError(f"on_unseen_inputs: got {on_unseen_inputs!r}; choose error or allow")
        self.spec = spec
        if readout == "outputs" and on_unseen_inputs == "error":
            check_depth(spec, n_layers)
        place = {name: i for i, name in enumerate(spec.nodes)}
        read: Sequence[str] = spec.nodes if readout == "all" else spec.output_nodes
        # Derived from the graph, which has its own place in a checkpoint.
        self.register_buffer("input_index", torch.tensor([place[n] for n in spec.input_nodes]), persistent=False)
        self.register_buffer("read_index", torch.tensor([place[n] for n in read]), persistent=False)

        self.node_embedding = nn.Parameter(torch.randn(len(spec.nodes), embed_dim) * 0.5)
        self.value_scale = nn.Parameter(torch.randn(len(spec.input_nodes), embed_dim) * 0.5)
        self.value_shift = nn.Parameter(torch.zeros(len(spec.input_nodes), embed_dim))
        self.layers = nn.ModuleList(
            GraphTokenLayer(
                PackedMultiheadAttention.from_adjacency(
                    spec, embed_dim, num_heads, dropout=dropout, add_self_loops=True, chunk_size=chunk_size
                ),
                d_ff or 2 * embed_dim,
                dropout,
            )
            for _ in range(n_layers)
        )
        self.norm = nn.LayerNorm(embed_dim)
        spread = (len(read) * embed_dim) ** -0.5
        self.readout_weight = nn.Parameter(torch.randn(len(read), embed_dim, num_outputs) * spread)
        self.readout_bias = nn.Parameter(torch.zeros(num_outputs))

    input_index: Tensor
    read_index: Tensor

    def forward(self, values: Tensor, need_weights: bool = False) -> Tensor | tuple[Tensor, list[Tensor]]:
        """Predict.

        Args:
            values: (B, inputs) in the order of ``spec.input_nodes``; NaN where nothing was measured. Such a node is no
                key for any other: it is left out, not imputed.
            need_weights: also return the attention along the edges.

        Returns:
            Predictions (B, num_outputs), and with ``need_weights`` a tensor (B, nnz, heads) a layer, aligned with the
            layer's ``source_index`` and ``target_index``.

        Raises:
            ZooError: if ``values`` has another shape.
        """
        tokens, hidden_keys = self.tokens(values)
        y, weights = self.predict_from(tokens, hidden_keys, need_weights)
        return (y, weights) if need_weights else y

    def tokens(self, values: Tensor) -> tuple[Tensor, Tensor | None]:
        """The tokens (B, n, E) that enter the first block, and which of them are no keys (B, n), if any."""
        if values.dim() != 2 or values.shape[1] != len(self.input_index):
            raise ZooError(f"values: got shape {tuple(values.shape)}; expected (batch, {len(self.input_index)} inputs)")
        missing = values.isnan()
        v = values.masked_fill(missing, 0).to(self.node_embedding.dtype).unsqueeze(-1)  # (B, inputs, 1)
        measured = v * self.value_scale + self.value_shift * ~missing.unsqueeze(-1)  # (B, inputs, E)
        x = self.node_embedding.expand(values.shape[0], -1, -1).index_add(1, self.input_index, measured)
        hidden_keys = None
        if torch.compiler.is_compiling() or bool(missing.any()):  # a traced program can't branch on values
            hidden_keys = missing.new_zeros(values.shape[0], len(self.spec.nodes))
            hidden_keys[:, self.input_index] = missing
        return x, hidden_keys

    def predict_from(
        self, tokens: Tensor, hidden_keys: Tensor | None = None, need_weights: bool = False
    ) -> tuple[Tensor, list[Tensor]]:
        """Predictions (B, num_outputs) from ``tokens``, and the edge weights of each layer if asked for."""
        x, weights = tokens, []
        for layer in self.layers:
            x, edge_weights = layer(x, hidden_keys, need_weights)
            if edge_weights is not None:
                weights.append(edge_weights)
        read = self.norm(x[:, self.read_index])  # (B, nodes read, E)
        return torch.einsum("bne,neo->bo", read, self.readout_weight) + self.readout_bias, weights


def check_depth(spec: AdjacencySpec, n_layers: int) -> None:
    """Raise ZooError if some input can't reach an output over ``n_layers`` edges, naming those and the depth to use."""
    distance = dict(zip(spec.nodes, distances_to_outputs(spec).tolist(), strict=True))
    lost = [name for name in spec.input_nodes if distance[name] < 0]
    far = [name for name in spec.input_nodes if distance[name] > n_layers]
    if not lost and not far:
        return
    parts = []
    if far:
        deep = max(distance[name] for name in far)
        parts.append(f"from {listed(far)} no path of {n_layers} edges leads to an output; n_layers: {deep} would do")
    if lost:
        parts.append(f"from {listed(lost)} no path at all leads to an output; mend the edges")
    raise ZooError(
        f"n_layers: got {n_layers}, but {' and '.join(parts)}, or read every node (readout: all), or set "
        "on_unseen_inputs: allow"
    )
