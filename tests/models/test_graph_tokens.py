"""One token a node: what is measured enters by name, what isn't is left out, and depth must reach the outputs."""

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zoo.errors import ZooError
from zoo.graph import parse_adjacency
from zoo.models.graph_tokens import GraphTokenModel, check_depth, distances_to_outputs


def graph(*edges):
    return parse_adjacency(pd.DataFrame(edges, columns=["source", "target"]))


TREE = graph(("a", "p"), ("b", "p"), ("c", "q"), ("p", "y"), ("q", "y"), ("d", "y"))


def make(spec=TREE, n_layers=2, seed=0, **options):
    torch.manual_seed(seed)
    return GraphTokenModel(spec, 8, 2, n_layers, **{"num_outputs": 3, **options}).double().eval()


def values(n, missing=(), seed=0):
    v = torch.randn(n, len(TREE.input_nodes), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    v[:, list(missing)] = float("nan")
    return v


def by_hand(model, row):
    """One sample, node by node, from the model's parameters."""
    spec, p = model.spec, dict(model.named_parameters())
    x = {name: p["node_embedding"][i] for i, name in enumerate(spec.nodes)}
    seen = set(spec.nodes)
    for i, name in enumerate(spec.input_nodes):
        if torch.isnan(row[i]):
            seen.discard(name)
        else:
            x[name] = x[name] + row[i] * p["value_scale"][i] + p["value_shift"][i]
    edges = [(spec.nodes[s], spec.nodes[t]) for s, t in zip(spec.source_index, spec.target_index, strict=True)]
    for layer in model.layers:
        h = {name: layer.norm1(token) for name, token in x.items()}
        a = layer.attention
        mixed = {}
        for name in spec.nodes:
            keys = [s for s, t in edges if t == name and s in seen] + ([name] if name in seen else [])
            if (name, name) in edges:
                keys = keys[:-1]
            heads = []
            for i in range(2):
                part = slice(i * 4, i * 4 + 4)
                if not keys:
                    heads.append(torch.zeros(4, dtype=row.dtype))
                    continue
                scores = torch.stack([a.q_proj(h[name])[part] @ a.k_proj(h[k])[part] / 2 for k in keys])
                heads.append(sum(w * a.v_proj(h[k])[part] for w, k in zip(scores.softmax(0), keys, strict=True)))
            mixed[name] = a.out_proj(torch.cat(heads))
        x = {name: token + mixed[name] for name, token in x.items()}
        x = {name: token + layer.feed_forward(layer.norm2(token)) for name, token in x.items()}
    read = [spec.nodes[i] for i in model.read_index]
    y = p["readout_bias"]
    for weight, name in zip(p["readout_weight"], read, strict=True):
        y = y + model.norm(x[name]) @ weight
    return y


@pytest.mark.parametrize("readout", ["outputs", "all"])
@pytest.mark.parametrize("missing", [(), (1,), (0, 1, 2, 3)])
def test_prediction_equals_the_one_made_node_by_node(readout, missing):
    model = make(readout=readout)
    v = values(3, missing)
    expected = torch.stack([by_hand(model, row) for row in v])
    # float64, sums in another order
    torch.testing.assert_close(model(v), expected, rtol=0, atol=1e-10)


def test_missing_measurement_is_left_out_not_imputed():
    model = make()
    without = model(values(2, missing=(0,)))
    for imputed in (0.0, 1.0):
        filled = values(2)
        filled[:, 0] = imputed
        assert not torch.allclose(model(filled), without)


def test_missing_measurement_leaves_finite_gradients():
    model = make()
    model(values(4, missing=(0, 2))).sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def test_rows_with_and_without_missing_values_do_not_touch_each_other():
    model = make()
    v = values(3)
    v[1, 2] = float("nan")
    alone = torch.cat([model(row.unsqueeze(0)) for row in v])
    torch.testing.assert_close(model(v), alone, rtol=0, atol=1e-12)


def test_information_travels_one_edge_a_block():
    model = make(n_layers=1, on_unseen_inputs="allow")
    v = values(1)
    changed = v.clone()
    changed[:, TREE.input_nodes.index("a")] += 3.0
    assert torch.equal(model(v), model(changed)), "a -> p -> y takes two blocks"
    changed = v.clone()
    changed[:, TREE.input_nodes.index("d")] += 3.0
    assert not torch.allclose(model(v), model(changed)), "d -> y takes one"


def test_too_few_layers_are_refused_with_the_inputs_and_the_depth_that_would_do():
    with pytest.raises(
        ZooError, match=r"n_layers: got 1, but from 'a', 'b', 'c' no path of 1 edges .* n_layers: 2 would do"
    ):
        make(n_layers=1)
    make(n_layers=1, readout="all")


def test_inputs_that_lead_nowhere_are_named():
    spec = graph(("a", "y"), ("b", "loop"), ("loop", "loop2"), ("loop2", "loop"))
    with pytest.raises(ZooError, match=r"from 'b' no path at all leads to an output; mend the edges"):
        check_depth(spec, 5)


@given(seed=st.integers(0, 10_000), n=st.integers(3, 12), density=st.floats(0.1, 0.6))
@settings(deadline=None, max_examples=60)
def test_distances_equal_those_of_a_search_from_every_node(seed, n, density):
    rng = np.random.default_rng(seed)
    edges = [(f"n{i:02}", f"n{j:02}") for i in range(n) for j in range(n) if rng.random() < density and i != j]
    edges += [("in", "n00"), ("n00", "out")]
    spec = graph(*edges)
    found = dict(zip(spec.nodes, distances_to_outputs(spec), strict=True))
    for start in spec.nodes:
        frontier, seen, steps = {start}, {start}, 0
        while frontier and not frontier & set(spec.output_nodes):
            frontier = {t for s, t in edges if s in frontier} - seen
            seen |= frontier
            steps += 1
        assert found[start] == (steps if frontier else -1)


def test_edge_weights_come_a_layer_and_sum_to_one_at_every_node_with_a_key():
    model = make()
    y, weights = model(values(2), need_weights=True)
    torch.testing.assert_close(y, model(values(2)))
    attention = model.layers[0].attention
    assert [tuple(w.shape) for w in weights] == [(2, attention.nnz, 2)] * 2
    total = torch.zeros(2, len(TREE.nodes), 2, dtype=torch.float64).index_add(1, attention.target_index, weights[1])
    torch.testing.assert_close(total, torch.ones_like(total))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_layers": 0}, "n_layers: got 0"),
        ({"num_outputs": 0}, "num_outputs: got 0"),
        ({"d_ff": 0}, "d_ff: got 0"),
        ({"dropout": 1.0}, "dropout: got 1.0"),
        ({"readout": "none"}, "readout: got 'none'"),
        ({"on_unseen_inputs": "x"}, "on_unseen_inputs: got 'x'"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(options, message):
    with pytest.raises(ZooError, match=message):
        make(**options)


@pytest.mark.parametrize("shape", [(4,), (2, 3), (2, 5), (1, 2, 4)])
def test_values_of_another_shape_are_refused(shape):
    with pytest.raises(ZooError, match=r"values: got shape .*; expected \(batch, 4 inputs\)"):
        make()(torch.zeros(shape, dtype=torch.float64))
