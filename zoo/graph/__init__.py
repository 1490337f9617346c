"""Graphs of named nodes, as the indices that packed attention is built from."""

from zoo.graph.adjacency import AdjacencySpec, parse_adjacency

__all__ = ["AdjacencySpec", "parse_adjacency"]
