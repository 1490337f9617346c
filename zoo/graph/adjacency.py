"""From a table of named edges to the packed indices of one attention layer."""

import hashlib
import json
import warnings
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from zoo.errors import Kpnn2Error
from zoo.lookalikes import refuse_look_alikes

_COLUMNS = ("source", "target")
_NAMES = (str, int, np.integer)
_NUMBERS = (float, np.floating, np.bool_)  # names too, but seldom meant to be: 1.0 is another node than 1
_VERSION, _LAYOUT = 1, "adjacency"
_SHOWN = 5  # how many offenders a message lists


@dataclass(frozen=True)
class AdjacencySpec:
    """A graph: its named nodes, and its edges as positions in them. Made by ``parse_adjacency``.

    Attributes:
        nodes: all names, sorted by code point; a node's position here is its index.
        input_nodes: nodes no edge enters, in node order.
        hidden_nodes: nodes that edges enter and leave.
        output_nodes: nodes no edge leaves.
        source_index: node index of each edge's source; edges are sorted by (source, target).
        target_index: node index of each edge's target.
        input_index: node indices of ``input_nodes``.
        output_index: node indices of ``output_nodes``.

    Source: packed attention, "Packed attention" of the facts.
    """

    nodes: tuple[str, ...]
    input_nodes: tuple[str, ...]
    hidden_nodes: tuple[str, ...]
    output_nodes: tuple[str, ...]
    source_index: tuple[int, ...]
    target_index: tuple[int, ...]
    input_index: tuple[int, ...]
    output_index: tuple[int, ...]

    @property
    def state_dim(self) -> int:
        """Number of nodes."""
        return len(self.nodes)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256, as hex, of the edges by name: what a checkpoint carries as its ``identity``."""
        # The format is fixed by checkpoints that exist, so it doesn't share code with digests that may yet change.
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()

    def to_edgelist(self) -> pd.DataFrame:
        """The edges as a table with columns ``source`` and ``target``; parsing it gives this graph again."""
        return pd.DataFrame({"source": self._named(self.source_index), "target": self._named(self.target_index)})

    def to_dict(self) -> dict[str, Any]:
        """The graph as plain types that JSON keeps: a version, a layout and the edges by name."""
        edges = zip(self._named(self.source_index), self._named(self.target_index), strict=True)
        return {"kpnn2_spec": _VERSION, "layout": _LAYOUT, "edges": list(map(list, edges))}

    @classmethod
    def from_dict(cls, payload: Mapping[str, Any]) -> "AdjacencySpec":
        """The graph that ``to_dict`` wrote.

        Raises:
            Kpnn2Error: if ``payload`` isn't of that form, or its edges are none that ``parse_adjacency`` takes.
        """
        if not isinstance(payload, Mapping):
            raise Kpnn2Error(f"payload: got {_show(payload)}; expected the dict that to_dict wrote, so pass that")
        for key, wanted in (("kpnn2_spec", _VERSION), ("layout", _LAYOUT)):
            if payload.get(key) != wanted:
                got = _show(payload[key]) if key in payload else "nothing"
                raise Kpnn2Error(f"payload: {key!r}: got {got}; expected {wanted!r}, so pass a dict that to_dict wrote")
        edges = payload.get("edges")
        if not isinstance(edges, Sequence) or isinstance(edges, str):
            raise Kpnn2Error(
                f"payload: 'edges': got {_show(edges)}; expected a list of [source, target] pairs, so pass a dict that "
                "to_dict wrote"
            )
        for place, edge in enumerate(edges):
            if not isinstance(edge, (list, tuple)) or len(edge) != 2:
                raise Kpnn2Error(
                    f"payload: 'edges': got {_show(edge)} at {place}; expected a pair [source, target], so pass a dict "
                    "that to_dict wrote"
                )
        sources, targets = [edge[0] for edge in edges], [edge[1] for edge in edges]
        return parse_adjacency(pd.DataFrame({"source": sources, "target": targets}, dtype=object))

    def edge_location(self, source: str, target: str) -> tuple[int, ...]:
        """Where an edge stands in ``source_index`` and ``target_index``: a tuple of one place.

        Raises:
            Kpnn2Error: if there is no such edge, saying which name is unknown if one is.
        """
        places = [self._node(source), self._node(target)]
        unknown = [name for name, place in zip((source, target), places, strict=True) if place is None]
        if unknown:
            raise Kpnn2Error(
                f"edge {source!r} -> {target!r}: there is no node {unknown[0]!r}; names are text as in spec.nodes, so "
                "take both from there"
            )
        s, t = places
        # Edges are sorted: the source's edges are a run, and the targets within it ascend.
        first, last = bisect_left(self.source_index, s), bisect_left(self.source_index, s + 1)  # type: ignore[operator, type-var]
        place = bisect_left(self.target_index, t, first, last)  # type: ignore[type-var]
        if place == last or self.target_index[place] != t:
            raise Kpnn2Error(
                f"edge {source!r} -> {target!r}: both nodes exist but no edge joins them; see to_edgelist() for those "
                "that do"
            )
        return (place,)

    def _node(self, name: object) -> int | None:
        if not isinstance(name, str):
            return None
        place = bisect_left(self.nodes, name)
        return place if place < len(self.nodes) and self.nodes[place] == name else None

    def _named(self, index: tuple[int, ...]) -> list[str]:
        return list(map(self.nodes.__getitem__, index))


def parse_adjacency(edgelist: pd.DataFrame) -> AdjacencySpec:
    """Read a graph from a table of its edges.

    Args:
        edgelist: one row an edge, from column ``source`` to column ``target``; other columns are ignored. Names are
            text; integers become text, and so do floats and booleans, with a warning. Cycles and self-loops are
            welcome.

    Returns:
        The graph, with nodes sorted by name and edges by (source, target). The order of rows doesn't matter.

    Raises:
        Kpnn2Error: not a DataFrame; a column missing or there twice; no rows; a name that is missing, empty, neither
            text nor a number, or not valid Unicode; names that differ only by surrounding white space, or only look
            alike (hidden characters, two spellings of a letter); an edge given twice; no node that no edge enters; no
            node that no edge leaves.

    Source: packed attention, "Packed attention" of the facts.
    """
    if not isinstance(edgelist, pd.DataFrame):
        raise Kpnn2Error(
            f"edgelist: got {_show(edgelist)}; expected a pandas DataFrame, so build one with columns source and target"
        )
    columns = list(edgelist.columns)
    for column in _COLUMNS:
        if columns.count(column) != 1:
            wrong = f"no column {column!r}" if column not in columns else f"more than one column {column!r}"
            raise Kpnn2Error(
                f"edgelist: {wrong} among {_some(columns)}; it takes one column 'source' and one 'target', so rename "
                "or drop columns"
            )
    if edgelist.empty:
        raise Kpnn2Error("edgelist: got no rows; a graph has at least one edge, so pass a table with edges in it")
    names = _names(edgelist["source"]) + _names(edgelist["target"])

    nodes = tuple(sorted(set(names)))
    _check_nodes(nodes)
    place = {name: index for index, name in enumerate(nodes)}
    index = np.fromiter(map(place.__getitem__, names), np.int64, len(names)).reshape(2, -1)
    source, target = index[:, np.lexsort(index[::-1])]

    again = (source[1:] == source[:-1]) & (target[1:] == target[:-1])
    if again.any():
        pairs = zip(source[1:][again].tolist(), target[1:][again].tolist(), strict=True)
        shown = _some([f"{nodes[s]!r} -> {nodes[t]!r}" for s, t in dict.fromkeys(pairs)], str)
        raise Kpnn2Error(f"edgelist: duplicate edges {shown}; an edge is given once, so drop the repeated rows")

    entered, left = np.bincount(target, minlength=len(nodes)) > 0, np.bincount(source, minlength=len(nodes)) > 0
    if entered.all():
        raise Kpnn2Error(
            "edgelist: no input node, an edge enters every node; values enter a graph at a node that no edge enters, "
            "so add edges whose source is no edge's target"
        )
    if left.all():
        raise Kpnn2Error(
            "edgelist: no output node, an edge leaves every node; results are read at a node that no edge leaves, so "
            "add edges whose target is no edge's source"
        )
    inputs, hidden, outputs = (np.flatnonzero(kind).tolist() for kind in (~entered, entered & left, ~left))
    return AdjacencySpec(
        nodes=nodes,
        input_nodes=tuple(map(nodes.__getitem__, inputs)),
        hidden_nodes=tuple(map(nodes.__getitem__, hidden)),
        output_nodes=tuple(map(nodes.__getitem__, outputs)),
        source_index=tuple(source.tolist()),
        target_index=tuple(target.tolist()),
        input_index=tuple(inputs),
        output_index=tuple(outputs),
    )


def _names(column: "pd.Series[Any]") -> list[str]:
    """The names in a column, as text."""
    where = f"in column {column.name!r}"
    missing = np.flatnonzero(column.isna()).tolist()
    if missing:
        raise Kpnn2Error(
            f"edgelist: missing names {where}, row {_some(missing)}; an edge names both its ends, so fill them in or "
            "drop those rows"
        )
    values = column.tolist()
    kinds = set(map(type, values))
    strange = {kind for kind in kinds if not issubclass(kind, _NAMES + _NUMBERS)}
    if strange:
        row = next(row for row, value in enumerate(values) if type(value) in strange)
        raise Kpnn2Error(
            f"edgelist: got {_show(values[row])} {where}, row {row}; a name is text or a number, so put one there"
        )
    doubtful = {kind for kind in kinds if issubclass(kind, (bool, *_NUMBERS))}
    if doubtful:
        row = next(row for row, value in enumerate(values) if type(value) in doubtful)
        warnings.warn(
            f"edgelist: {_show(values[row])} {where}, row {row}, becomes the name {str(values[row])!r}, another node "
            "than one named by an integer; convert the column to text if that isn't meant",
            stacklevel=3,
        )
    names = list(map(str, values))
    if "" in names:
        raise Kpnn2Error(
            f"edgelist: empty name {where}, row {names.index('')}; every edge names both its ends, so fill it in or "
            "drop the row"
        )
    return names


def _check_nodes(nodes: tuple[str, ...]) -> None:
    try:
        "".join(nodes).encode()
    except UnicodeEncodeError as error:
        raise Kpnn2Error(
            f"edgelist: a name holds the lone surrogate {error.object[error.start]!r}; a fingerprint is taken of names "
            "in UTF-8, so decode the table with the encoding it was written in"
        ) from None
    stripped = list(map(str.strip, nodes))
    if len(set(stripped)) < len(nodes):
        often = {name for name, count in Counter(stripped).items() if count > 1}
        alike = [name for name, bare in zip(nodes, stripped, strict=True) if bare in often]
        raise Kpnn2Error(
            f"edgelist: names {_some(alike)} differ only by surrounding white space; they look like one node and would "
            "be several, so strip both columns or rename"
        )
    refuse_look_alikes(
        nodes, "edgelist: names", Kpnn2Error, "they look like one node and would be several, so give both one spelling"
    )


def _some(items: Sequence[object], show: Callable[[object], str] = repr) -> str:
    shown = ", ".join(map(show, items[:_SHOWN]))
    return shown if len(items) <= _SHOWN else f"{shown} and {len(items) - _SHOWN} more"


def _show(value: object) -> str:
    text = " ".join(repr(value).split())
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"
