"""Weights of a graph model carried over to another graph, by the names of nodes, inputs and classes."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from zoo.checkpoint.transfer import Axis, TensorTransfer, carry
from zoo.errors import ZooError, listed
from zoo.graph import AdjacencySpec


def adapt_table(
    network: nn.Module,
    saved: Mapping[str, Tensor],
    saved_identity: Mapping[str, Any],
    identity: Mapping[str, Any],
    readout: tuple[str, str],
    renamed: Mapping[str, str],
) -> tuple[dict[str, Tensor], list[TensorTransfer]]:
    """A state dict for ``network`` from the weights of a model on another graph.

    Embeddings go by the name of their node, scales and shifts by that of their input, readouts by node and by class or
    target. Packed layers keep their own edges and take the other's projections.

    Args:
        network: the ``GraphTokenModel`` to fill; it isn't changed.
        saved: the other model's state dict.
        saved_identity: the identity of the table it was trained on.
        identity: that of the table of ``network``.
        readout: which nodes are read, there and here: outputs or all.
        renamed: names of nodes, classes and targets here that were others there.

    Returns:
        The state dict, and what became of each tensor.

    Raises:
        ZooError: for a name in ``renamed`` that isn't there.
    """
    specs = [AdjacencySpec.from_dict(one["graph"]) for one in (saved_identity, identity)]
    what, answers = _answers(identity, renamed)
    answers_there = _answers(saved_identity, {})[1] if saved_identity["problem"] == identity["problem"] else []
    _check_renamed(
        renamed,
        [*specs[1].nodes, *identity.get("classes", ()), *identity["targets"]],
        [*specs[0].nodes, *saved_identity.get("classes", ()), *saved_identity["targets"]],
    )

    def axis(dim: int, what: str, there: Sequence[str], here: Sequence[str]) -> Axis:
        return Axis(dim, what, [renamed.get(name, name) for name in here], there)

    read = [spec.nodes if which == "all" else spec.output_nodes for spec, which in zip(specs, readout, strict=True)]
    nodes, inputs = [spec.nodes for spec in specs], [spec.input_nodes for spec in specs]
    axes = {
        "node_embedding": [axis(0, "nodes", *nodes)],
        "value_scale": [axis(0, "inputs", *inputs)],
        "value_shift": [axis(0, "inputs", *inputs)],
        "readout_weight": [axis(0, "nodes", *read), Axis(2, what, answers, answers_there)],
        "readout_bias": [Axis(0, what, answers, answers_there)],
    }
    source = {name: tensor for name, tensor in saved.items() if not name.endswith(_EDGES)}
    # a binary problem has one number, for the second class against the first
    turned = (
        identity["problem"] == "binary"
        and answers == answers_there
        and ([renamed.get(name, name) for name in identity["classes"]] != saved_identity["classes"])
    )
    if turned:
        source |= {name: -source[name] for name in _READOUT}
    own = {name: tensor.detach() for name, tensor in network.state_dict().items()}
    weights = {name: tensor for name, tensor in own.items() if not name.endswith(_EDGES)}
    filled, transfers = carry(weights, source, axes)
    for transfer in transfers:
        if turned and transfer.tensor in _READOUT and transfer.outcome != "new":
            transfer.outcome = "moved"
            transfer.note = "; ".join(["turned, as the classes are", *filter(None, [transfer.note])])
    if specs[0].fingerprint != specs[1].fingerprint:
        there = {(a, b) for a, b in specs[0].to_dict()["edges"]}
        here = {(renamed.get(a, a), renamed.get(b, b)) for a, b in specs[1].to_dict()["edges"]}
        transfers.append(
            TensorTransfer("edges", "moved", f"this graph's {len(here)}, {len(here & there)} of them there too")
        )
    return own | filled, transfers


_READOUT = ("readout_weight", "readout_bias")
_EDGES = ("source_index", "target_index", "index_digest", "identity")


def _answers(identity: Mapping[str, Any], renamed: Mapping[str, str]) -> tuple[str, list[str]]:
    """What the readout's columns are, and their names as the other model has them."""
    problem = identity["problem"]
    names = [renamed.get(name, name) for name in identity["classes" if problem == "multiclass" else "targets"]]
    if problem == "binary":
        return "pairs of classes", [" or ".join(sorted(renamed.get(name, name) for name in identity["classes"]))]
    return ("classes" if problem == "multiclass" else "targets"), names


def _check_renamed(renamed: Mapping[str, str], here: Sequence[str], there: Sequence[str]) -> None:
    for names, known, where in ((renamed.keys(), here, "here"), (renamed.values(), there, "in the pretrained model")):
        if unknown := [name for name in names if name not in set(known)]:
            raise ZooError(
                f"model.renamed: got {listed(unknown)}, which is no node, class or target {where}; give names here "
                "with the names they had there"
            )
    taken = [renamed.get(name, name) for name in dict.fromkeys(here)]
    if len(set(taken)) < len(taken):
        raise ZooError("model.renamed: two names stand for the same one of the pretrained model; each can have one")
