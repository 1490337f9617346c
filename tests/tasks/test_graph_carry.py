"""Weights carried over to another graph, by the names of its nodes."""

from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zoo.errors import ZooError
from zoo.graph import parse_adjacency
from zoo.models.graph_tokens import GraphTokenModel
from zoo.tasks.graph_carry import adapt_table


def by_tensor(transfers):
    found = {transfer.tensor: transfer for transfer in transfers}
    assert len(found) == len(transfers)
    return found


def table(edges, problem="binary", classes=("no", "yes"), targets=("y",)):
    spec = parse_adjacency(pd.DataFrame(edges, columns=["source", "target"]))
    identity = {"graph": spec.to_dict(), "problem": problem, "targets": list(targets)}
    if problem in ("binary", "multiclass"):
        identity["classes"] = list(classes)
    outputs = {"binary": 1, "regression": 1, "multiclass": len(classes), "multilabel": len(targets)}[problem]
    return SimpleNamespace(spec=spec, identity=identity, outputs=outputs)


def graph_model(of, seed=0, readout="all"):
    torch.manual_seed(seed)
    model = GraphTokenModel(of.spec, 8, 2, 2, of.outputs, readout=readout, on_unseen_inputs="allow").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return model


def carried(source, there, here, renamed=None, readout=("all", "all")):
    target = graph_model(here, seed=1, readout=readout[1])
    state, transfers = adapt_table(target, source.state_dict(), there.identity, here.identity, readout, renamed or {})
    target.load_state_dict(state, strict=True)
    return target, by_tensor(transfers)


EDGES = [("a", "h"), ("b", "h"), ("b", "k"), ("c", "k"), ("h", "out"), ("k", "out")]


@st.composite
def graphs(draw):
    """Edges from earlier to later of a few nodes: no cycle, so there are inputs and outputs."""
    n = draw(st.integers(2, 7))
    pairs = [(i, j) for i in range(n) for j in range(i + 1, n)]
    return draw(st.lists(st.sampled_from(pairs), min_size=1, max_size=10, unique=True))


@settings(max_examples=30, deadline=None)
@given(graphs(), st.permutations(range(7)), st.integers(0, 2**16))
def test_a_graph_with_every_node_renamed_predicts_the_same(pairs, order, seed):
    """New names sort otherwise, so nodes, edges and inputs all come in another order."""
    old, new = [f"old{i}" for i in range(7)], [f"new{order[i]}" for i in range(7)]
    there = table([(old[i], old[j]) for i, j in pairs])
    here = table([(new[i], new[j]) for i, j in pairs])
    names = dict(zip(new, old, strict=True))
    source = graph_model(there, seed)
    target, _ = carried(source, there, here, {name: names[name] for name in here.spec.nodes})
    values = {name: torch.randn(3) for name in there.spec.input_nodes}
    mine = target(torch.stack([values[names[name]] for name in here.spec.input_nodes], dim=1))
    theirs = source(torch.stack([values[name] for name in there.spec.input_nodes], dim=1))
    torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)  # sums over edges in another order


@settings(max_examples=30, deadline=None)
@given(graphs(), graphs())
def test_rows_of_nodes_in_both_graphs_are_carried_over_and_no_others(pairs, others):
    there = table([(f"n{i}", f"n{j}") for i, j in pairs])
    here = table([(f"n{i}", f"n{j}") for i, j in others])
    source, fresh = graph_model(there), graph_model(here, seed=1)
    target, transfers = carried(source, there, here)
    for names, tensors in (("nodes", ("node_embedding", "readout_weight")), ("input_nodes", ("value_scale",))):
        old, new = getattr(there.spec, names), getattr(here.spec, names)
        for tensor in tensors:
            for i, name in enumerate(new):
                wanted = source.state_dict()[tensor][old.index(name)] if name in old else fresh.state_dict()[tensor][i]
                assert torch.equal(target.state_dict()[tensor][i], wanted), (tensor, name)
    assert all(transfers[name].outcome == "kept" for name in transfers if "proj" in name), (
        "packed layers take any graph"
    )
    assert torch.equal(target.layers[0].attention.source_index, fresh.layers[0].attention.source_index)


def test_what_is_new_and_gone_is_told_by_name():
    there, here = table(EDGES), table([*EDGES[1:], ("extra", "h")])
    _, transfers = carried(graph_model(there), there, here)
    assert transfers["value_scale"].note == "2 of 3 inputs by name, new: 'extra', gone: 'a'"
    assert transfers["edges"].note == "this graph's 6, 5 of them there too"


def test_readouts_go_by_the_node_that_is_read():
    there = table(EDGES)
    source = graph_model(there)
    target, transfers = carried(source, there, there, readout=("all", "outputs"))
    place = there.spec.nodes.index("out")
    assert torch.equal(target.readout_weight[0], source.readout_weight[place])
    assert transfers["readout_weight"].outcome == "moved"


def test_classes_in_another_order_give_the_same_answers():
    values = torch.randn(4, 3)
    three = table(EDGES, "multiclass", ("x", "y", "z"))
    source = graph_model(three)
    target, _ = carried(source, three, table(EDGES, "multiclass", ("z", "w", "x")))
    torch.testing.assert_close(target(values)[:, [0, 2]], source(values)[:, [2, 0]])
    target, transfers = carried(source, three, table(EDGES, "multiclass", ("z", "w", "ex")), {"ex": "x"})
    torch.testing.assert_close(target(values)[:, [0, 2]], source(values)[:, [2, 0]])
    assert transfers["readout_bias"].note == "2 of 3 classes by name, new: 'w', gone: 'y'"
    two = table(EDGES)
    source = graph_model(two)
    target, transfers = carried(source, two, table(EDGES, classes=("yes", "no")))
    torch.testing.assert_close(target(values), -source(values))
    assert transfers["readout_weight"].outcome == "moved"


@pytest.mark.parametrize(
    "other",
    [
        table(EDGES, classes=("maybe", "yes")),
        table(EDGES, "regression"),
        table(EDGES, "multiclass", ("no", "yes", "maybe")),
        table(EDGES, "multilabel", targets=("no", "yes")),
    ],
)
def test_another_question_gets_a_new_readout(other):
    there = table(EDGES)
    target, transfers = carried(graph_model(there), there, other)
    assert transfers["readout_weight"].outcome == transfers["readout_bias"].outcome == "new"
    assert torch.equal(target.readout_weight, graph_model(other, seed=1).readout_weight)


@pytest.mark.parametrize(
    ("renamed", "message"),
    [
        ({"q": "a"}, "got 'q', which is no node, class or target here"),
        ({"a": "q"}, "got 'q', which is no node, class or target in the pretrained model"),
        ({"a": "b", "c": "b"}, "two names stand for the same one"),
        ({"a": "b"}, "two names stand for the same one"),
    ],
)
def test_names_that_are_nowhere_are_refused(renamed, message):
    there = table(EDGES)
    with pytest.raises(ZooError, match=rf"model\.renamed: .*{message}"):
        carried(graph_model(there), there, there, renamed)
