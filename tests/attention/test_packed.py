"""Packed attention against its equations, recorded values and the public reference; memory, numerics and refusals."""

import copy
import hashlib
import io
import json
import math
import pickle
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.oracles.compare import (
    SEEDS,
    LargestTensor,
    assert_same_with_gradients,
    examples,
    gradients,
    randomized,
)
from tests.oracles.packed import packed_attention
from zoo.attention.packed import PackedMultiheadAttention, check_packed_layers, edges
from zoo.attention.packed import attention as packed
from zoo.attention.packed.edges import IndexedEdges
from zoo.errors import CheckpointMismatchError, Kpnn2Error, ZooError
from zoo.graph import parse_adjacency

try:
    import kpnn2
except ImportError:
    kpnn2 = None
against_reference = pytest.mark.skipif(kpnn2 is None, reason="needs the reference: pip install kpnn2==0.3.0")

VECTORS = json.loads((Path(__file__).parents[1] / "data/packed_attention_vectors.json").read_text(encoding="utf-8"))
GRAPHS = {graph["name"]: graph for graph in VECTORS["graphs"]}
FEEDBACK = [("x", "a"), ("a", "b"), ("b", "a"), ("a", "y")]
# Rows of a few edges and values of order one: float64 rounding stays some hundred times below this.
EXACT = {"rtol": 1e-12, "atol": 1e-12}


def spec_of(edges):
    return parse_adjacency(pd.DataFrame(edges, columns=["source", "target"], dtype=object))


def feedback_layer(dtype=torch.float64, seed=0, **options):
    torch.manual_seed(seed)
    layer = PackedMultiheadAttention.from_adjacency(spec_of(FEEDBACK), 8, 2, **options)
    return randomized(layer, seed, dtype).eval()


def tensor(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def contents(module):
    """Every tensor of a module, copied."""
    return {name: value.clone() for name, value in module.state_dict().items()}


def assert_unchanged(module, before):
    after = module.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())


@st.composite
def layers(draw, classes=(PackedMultiheadAttention,)):
    """Layers of each class with the same random edges and weights: cycles, self-loops, queries without keys."""
    L = draw(st.integers(1, 5))
    S = draw(st.one_of(st.just(L), st.integers(1, 5)))
    H, dh = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    pairs = draw(st.lists(st.integers(0, L * S - 1), min_size=1, max_size=L * S, unique=True))
    source, target = [pair % S for pair in pairs], [pair // S for pair in pairs]
    options = {
        "bias": draw(st.booleans()),
        "batch_first": draw(st.booleans()),
        "add_self_loops": L == S and draw(st.booleans()),
        "chunk_size": draw(st.sampled_from([None, 1, 2, 3, 100])),
        "identity": draw(st.sampled_from([None, "", "graph", "Füße"])),
    }
    made = [cls(source, target, L, S, H * dh, H, **options).double().eval() for cls in classes]
    randomized(made[0], draw(SEEDS))
    for other in made[1:]:
        other.load_state_dict(made[0].state_dict())
    return made


@st.composite
def inputs(draw, layer):
    """Query, key, value and mask in one of the layouts the layer takes, and the batch shape."""
    shapes = [(), (0,), (1,), (2,), (2, 2), (1, 2, 1)] if layer.batch_first else [(), (0,), (1,), (3,)]
    batch = draw(st.sampled_from(shapes))
    seed = draw(SEEDS)

    def one(length, seed):
        x = tensor(*batch, length, layer.embed_dim, seed=seed)
        return (x if layer.batch_first or not batch else x.transpose(0, 1).contiguous()).requires_grad_()

    query, key = one(layer.query_features, seed), one(layer.key_features, seed + 1)
    value = key if draw(st.booleans()) else one(layer.key_features, seed + 2)
    if layer.query_features == layer.key_features and draw(st.booleans()):
        key = value = query
    hidden = torch.rand(*batch, layer.key_features, generator=torch.Generator().manual_seed(seed))
    mask = draw(st.sampled_from([None, hidden < 0.4, hidden < 0.8, hidden < 2]))
    return query, key, value, mask, batch


# ---------------------------------------------------------------------- the equations


def along(road, patch):
    """Have layers compute by sparse rows, as on any CPU, by index, as elsewhere, or densely where that is possible."""
    if road == "index":
        patch.setattr(packed, "CompressedEdges", lambda s, t, _, n, chunk: IndexedEdges.sort(s, t, n, chunk))
    patch.setattr(edges, "_DENSE_FROM", 0 if road == "dense" else math.inf)
    patch.setattr(edges, "_DENSE", 0)


@pytest.mark.parametrize(
    ("road", "together"), [("rows", 1), ("rows", 40), ("rows", 1 << 20), ("index", 1 << 20), ("dense", 1 << 20)]
)
@examples(40)
@given(data=st.data())
def test_layer_follows_its_equations(road, together, data):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(edges, "_TOGETHER", together)
        along(road, patch)
        check_layer_against_its_equations(data)


def check_layer_against_its_equations(data):
    (layer,) = data.draw(layers())
    query, key, value, mask, batch = data.draw(inputs(layer))
    if 0 in batch:
        return
    first = layer.batch_first or not batch
    y, weights = layer(query, key, value, mask, need_weights=True, average_attn_weights=False)
    given_first = [x if first else x.transpose(0, 1) for x in (query, key, value)]
    expected, expected_weights = packed_attention(layer, *given_first, mask)
    wanted = dict(layer.named_parameters()) | {"query": query, "key": key, "value": value}
    for got, want in ((y, expected), (weights, expected_weights)):
        assert_same_with_gradients(got if first else got.transpose(0, 1), want, wanted, 0, **EXACT)
    short, none = layer(query, key, value, mask)
    assert none is None
    assert_same_with_gradients(short if first else short.transpose(0, 1), expected, wanted, 0, **EXACT)
    mean = layer(query, key, value, mask, need_weights=True)[1]
    torch.testing.assert_close(mean, weights.mean(-1), **EXACT)


@against_reference
@examples(60)
@given(data=st.data())
def test_layer_and_reference_agree_in_outputs_gradients_and_state(data):
    ours, theirs = data.draw(layers((PackedMultiheadAttention, kpnn2.PackedMultiheadAttention if kpnn2 else None)))
    query, key, value, mask, _ = data.draw(inputs(ours))
    average = data.draw(st.booleans())
    results = [
        layer(query, key, value, mask, need_weights=True, average_attn_weights=average) for layer in (ours, theirs)
    ]
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, **EXACT)
    points = [query, key, value, *ours.parameters()], [query, key, value, *theirs.parameters()]
    for part in (0, 1):
        for got, want in zip(
            gradients(results[0][part], points[0], 1), gradients(results[1][part], points[1], 1), strict=True
        ):
            torch.testing.assert_close(got, want, **EXACT)
    here, there = ours.state_dict(), theirs.state_dict()
    assert list(here) == list(there)
    assert all(torch.equal(here[k], there[k]) and here[k].dtype == there[k].dtype for k in here)
    ours.load_state_dict(there)


@against_reference
@pytest.mark.parametrize("seed", [None, 7])
def test_initial_weights_are_those_of_the_reference(seed):
    made = []
    for cls in (PackedMultiheadAttention, kpnn2.PackedMultiheadAttention):
        torch.manual_seed(3)
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        made.append((contents(cls([0], [0], 1, 1, 8, 2, generator=generator)), torch.rand(1)))
    (ours, after_ours), (theirs, after_theirs) = made
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert torch.equal(after_ours, after_theirs)  # and as much was taken from the global state


@pytest.mark.parametrize("name", GRAPHS)
def test_recorded_layers_have_the_recorded_digests(name):
    spec = spec_of(GRAPHS[name]["edges"])
    for recorded in GRAPHS[name]["layers"]:
        layer = PackedMultiheadAttention.from_adjacency(
            spec, recorded["embed_dim"], recorded["num_heads"], add_self_loops=recorded["add_self_loops"]
        )
        state = layer.state_dict()
        assert layer.nnz == recorded["nnz"]
        assert layer.source_index.tolist() == recorded["source_index"]
        assert layer.target_index.tolist() == recorded["target_index"]
        assert bytes(state["index_digest"].tolist()).hex() == recorded["index_digest"]
        assert bytes(state["identity"].tolist()).decode() == recorded["identity_utf8"]


@pytest.mark.parametrize("road", ["rows", "index", "dense"])
@pytest.mark.parametrize("chunk_size", [None, 2])
def test_gradients_and_second_gradients_are_those_of_finite_differences(chunk_size, road, monkeypatch):
    along(road, monkeypatch)
    layer = PackedMultiheadAttention([0, 1, 1, 2], [1, 0, 1, 1], 3, 3, 4, 2, chunk_size=chunk_size)
    randomized(layer, 0).eval()
    mask = torch.tensor([[False, False, True]])
    points = [tensor(1, 3, 4, seed=s).requires_grad_() for s in range(3)]

    def run(q, k, v):
        return layer(q, k, v, mask, need_weights=True, average_attn_weights=False)

    def run_short(q, k, v):
        return layer(q, k, v)[0]

    for function in (run, run_short):
        assert torch.autograd.gradcheck(function, points)
        assert torch.autograd.gradgradcheck(function, points)


def dense_layer(n=300, share=0.1, dtype=torch.float32, **options):
    return PackedMultiheadAttention(*random_edges(n, int(n * n * share)), n, n, 8, 2, **options).to(dtype)


def test_dense_graph_takes_the_dense_kernel_unless_weights_are_dropped_hidden_or_wanted(monkeypatch):
    layer, x, calls = dense_layer(dropout=0.5), tensor(300, 8, dtype=torch.float32), []
    softmax = edges.CompressedEdges.softmax
    monkeypatch.setattr(edges.CompressedEdges, "softmax", lambda *a: calls.append(1) or softmax(*a))
    layer(x, x, x)
    layer.eval()(x, x, x, torch.zeros(300, dtype=torch.bool))
    by_rows = layer(x, x, x, need_weights=True)[0]
    assert len(calls) == 3
    torch.testing.assert_close(layer(x, x, x)[0], by_rows)
    assert len(calls) == 3
    dense_layer(share=0.02)(x, x, x)
    assert len(calls) == 4


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_with_those_who_see_it_in_a_dense_graph(value):
    layer = dense_layer()
    x = tensor(300, 8, dtype=torch.float32)
    spoiled = x.clone()
    spoiled[5] = value
    query = x.clone().requires_grad_()
    y = layer(query, spoiled, spoiled)[0]
    sees = layer.target_index[layer.source_index == 5]
    unspoiled = torch.ones(300, dtype=torch.bool).index_fill(0, sees, False)
    assert 0 < len(sees) < 100
    assert y[unspoiled].isfinite().all()
    assert not y[sees].isfinite().any()
    y[unspoiled].sum().backward()
    assert query.grad[unspoiled].isfinite().all()


def test_a_gradient_that_is_not_finite_stays_with_its_edges_in_a_dense_graph():
    layer, x = dense_layer(), tensor(300, 8, dtype=torch.float32)
    value = x.clone().requires_grad_()
    grad = torch.zeros(300, 8)
    grad[7] = math.nan
    (got,) = torch.autograd.grad(layer(x, x, value)[0], value, grad)
    seen = layer.source_index[layer.target_index == 7]
    assert got[seen].isnan().all()
    assert got.isnan().any(-1).sum() == len(seen)


@pytest.mark.parametrize("frozen", ["q_proj", "k_proj", "v_proj"])
def test_second_gradient_in_a_dense_graph_asks_for_what_is_trained_only(frozen):
    layer, x = dense_layer(dtype=torch.float64), tensor(300, 8)
    getattr(layer, frozen).requires_grad_(False)
    wanted = [p for p in layer.parameters() if p.requires_grad]
    found = []
    for dense in (0.05, math.inf):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(edges, "_DENSE", dense)
            first = torch.autograd.grad(layer(x, x, x)[0].square().sum(), wanted, create_graph=True)
            found.append(torch.autograd.grad(sum(g.square().sum() for g in first), wanted))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-8)


def test_dense_graph_frees_its_graph_and_is_seen_through_by_functional_transforms():
    layer, x = dense_layer(dtype=torch.float64), tensor(300, 8)
    q, k, v = (x.view(1, 300, 2, 4).clone().requires_grad_() for _ in range(3))
    y = layer._sorted_edges().attend(q, k, v, 0.5).sum()
    y.backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()
    query = x.clone().requires_grad_()
    (want,) = torch.autograd.grad(layer(query, x, x)[0].square().sum(), query)
    torch.testing.assert_close(torch.func.grad(lambda q: layer(q, x, x)[0].square().sum())(x), want, **EXACT)


# ---------------------------------------------------------------------- the mask of a dense graph


def pairs_at_once(layer, x):
    """The largest tensor, forward and backward, of a call that finds the edges sorted."""
    layer._sorted_edges()
    x = x.clone().requires_grad_()
    with LargestTensor() as seen:
        layer(x, x, x)[0].square().sum().backward()
    assert seen.operations > 40
    return seen.numel


@pytest.mark.parametrize("chunk_size", [1, 4000, 90_000])
def test_chunk_bounds_the_mask_of_a_dense_graph(chunk_size):
    n, x = 300, tensor(300, 8, dtype=torch.float32)
    largest = pairs_at_once(dense_layer(n, chunk_size=chunk_size), x)
    assert largest <= max(chunk_size, n * 8)  # down to one query's mask, which is less than the tokens
    assert pairs_at_once(dense_layer(n), x) == n * n


def test_no_mask_is_larger_than_what_is_said_and_none_of_that_size_is_kept(monkeypatch):
    monkeypatch.setattr(edges, "MASK_PAIRS", 10_000)
    layer, x = dense_layer(), tensor(300, 8, dtype=torch.float32)
    assert pairs_at_once(layer, x) <= 10_000
    assert layer._sorted.edges._mask is None
    monkeypatch.setattr(edges, "MASK_PAIRS", 90_000)
    layer(x, x, x)
    mask = layer._sorted.edges._mask
    layer(x, x, x)
    assert layer._sorted.edges._mask is mask
    assert mask.numel() == 90_000
    assert "_sorted" not in copy.deepcopy(layer).__dict__


def test_what_a_layer_keeps_of_a_large_dense_graph_grows_with_its_edges():
    n = 2100
    layer, x = dense_layer(n, 0.06), tensor(n, 8, dtype=torch.float32).requires_grad_()
    assert n * n > edges.MASK_PAIRS
    layer(x, x, x)[0].sum().backward()
    own = [value for value in vars(layer._sorted.edges).values() if isinstance(value, torch.Tensor)]
    assert layer._sorted.edges._mask is None
    assert max(value.numel() for value in own) == layer.nnz
    assert layer._sorted.edges._cache == {}


@pytest.mark.parametrize("chunk_size", [1, 700, 12_345])
def test_blocks_of_queries_change_no_number_in_a_dense_graph(chunk_size):
    whole, found = randomized(dense_layer(dtype=torch.float64), 0), []
    for size in (None, chunk_size):
        layer = dense_layer(dtype=torch.float64, chunk_size=size)
        layer.load_state_dict(whole.state_dict())
        x = tensor(2, 300, 8).requires_grad_()
        wanted = [x, *layer.parameters()]
        y = layer(x, x, x)[0]
        first = torch.autograd.grad(y.square().mean(), wanted, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), wanted)
        plain = torch.autograd.grad(layer(x, x, x)[0].square().mean(), wanted)
        found.append([y, *first, *second, *plain])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, **EXACT)


def test_query_without_keys_mixes_to_zero_in_every_block():
    source, target = random_edges(300, 9000)
    kept = (target < 40) | (target > 80)
    made = [
        PackedMultiheadAttention(source[kept], target[kept], 300, 300, 8, 2, chunk_size=size).double()
        for size in (None, 3000)
    ]
    made[1].load_state_dict(made[0].state_dict())
    x = tensor(300, 8)
    y = [layer(x, x, x)[0] for layer in made]
    assert torch.equal(y[0][40:81], made[0].out_proj.bias.expand(41, 8))
    torch.testing.assert_close(y[1], y[0], **EXACT)


def test_functional_transforms_see_through_the_layer():
    layer, x = feedback_layer(), tensor(2, 4, 8)
    parameters = dict(layer.named_parameters())

    def loss(parameters):
        return torch.func.functional_call(layer, parameters, (x, x, x))[0].square().sum()

    expected = torch.autograd.grad(loss(parameters), list(parameters.values()))
    got = torch.func.grad(loss)(parameters)
    for name, want in zip(parameters, expected, strict=True):
        torch.testing.assert_close(got[name], want, **EXACT)


# ---------------------------------------------------------------------- construction


def test_attributes_say_what_was_asked_for():
    layer = PackedMultiheadAttention(
        [0, 1], [1, 1], 2, 2, 6, 3, 0.25, False, 6, 6, False, True, identity="graph", chunk_size=5
    )
    assert (layer.query_features, layer.key_features, layer.embed_dim, layer.num_heads) == (2, 2, 6, 3)
    assert (layer.head_dim, layer.nnz, layer.dropout) == (2, 3, 0.25)
    assert (layer.batch_first, layer.add_self_loops, layer.identity, layer.chunk_size) == (False, True, "graph", 5)
    assert layer.q_proj.bias is layer.k_proj.bias is layer.v_proj.bias is layer.out_proj.bias is None
    plain = PackedMultiheadAttention([0], [0], 1, 1, 4, 1)
    assert (plain.dropout, plain.batch_first, plain.add_self_loops) == (0.0, True, False)
    assert plain.identity is plain.chunk_size is None
    assert plain.q_proj.bias is not None


def test_layer_takes_a_graph_with_its_fingerprint():
    spec = spec_of(FEEDBACK)
    layer = PackedMultiheadAttention.from_adjacency(spec, 8, 2, dropout=0.5, chunk_size=3, batch_first=False)
    assert layer.identity == spec.fingerprint
    assert layer.query_features == layer.key_features == spec.state_dim
    assert layer.source_index.tolist() == list(spec.source_index)
    assert (layer.dropout, layer.chunk_size, layer.batch_first) == (0.5, 3, False)


@pytest.mark.parametrize(
    "form",
    [
        list,
        tuple,
        iter,
        np.array,
        pd.Series,
        torch.tensor,
        lambda v: torch.tensor(v, dtype=torch.uint8),
        lambda v: np.array(v, dtype=np.int16),
        lambda v: [np.int64(i) for i in v],
        lambda v: dict(enumerate(v)).values(),
    ],
)
def test_indices_come_in_any_integer_form_and_are_copied(form):
    source, target = form([0, 0, 1, 2]), form([1, 3, 0, 0])
    layer = PackedMultiheadAttention(source, target, 4, 4, 8, 2)
    if isinstance(source, (np.ndarray, torch.Tensor)):
        source[0] = 3
    assert layer.source_index.dtype == layer.target_index.dtype == torch.int64
    assert layer.source_index.tolist() == [0, 0, 1, 2]
    assert layer.target_index.tolist() == [1, 3, 0, 0]
    assert {name for name, _ in layer.named_buffers()} == {"source_index", "target_index"}


def test_self_loops_are_added_once_and_at_the_end():
    source, target = torch.tensor([2, 1, 0]), torch.tensor([0, 1, 2])
    layer = PackedMultiheadAttention(source, target, 4, 4, 8, 2, add_self_loops=True)
    assert layer.source_index.tolist() == [2, 1, 0, 0, 2, 3]
    assert layer.target_index.tolist() == [0, 1, 2, 0, 2, 3]
    assert (source.tolist(), target.tolist()) == ([2, 1, 0], [0, 1, 2])


def test_generator_replays_the_weights_and_leaves_the_global_state():
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    layer = feedback_layer_with(torch.Generator().manual_seed(5))
    assert torch.equal(torch.rand(1), expected)
    before = contents(layer)
    nn.init.ones_(layer.q_proj.bias)
    layer.reset_parameters()
    assert not torch.equal(layer.q_proj.weight, before["q_proj.weight"])
    layer.reset_parameters(torch.Generator().manual_seed(5))
    assert_unchanged(layer, before)
    bound = math.sqrt(6 / (8 + 8))  # Xavier-uniform
    assert 0.8 * bound < layer.k_proj.weight.abs().max() <= bound
    assert (layer.k_proj.bias == 0).all()


def feedback_layer_with(generator):
    return PackedMultiheadAttention([0, 0, 1, 2], [1, 3, 0, 0], 4, 4, 8, 2, generator=generator)


BAD_ARGUMENTS = [
    ({"source_index": []}, "source_index, target_index: got 0 and 4"),
    ({"source_index": [], "target_index": []}, "source_index, target_index: got no entries"),
    ({"source_index": torch.zeros(2, 2, dtype=torch.long)}, r"source_index: got shape \(2, 2\)"),
    ({"target_index": [[0], [1]]}, r"target_index: got \[0\] \(list\) at 0"),
    ({"source_index": [0.0, 0, 1, 2]}, r"source_index: got 0.0 \(float\) at 0"),
    ({"source_index": [0, True, 1, 2]}, r"source_index: got True \(bool\) at 1"),
    ({"source_index": ["0", 0, 1, 2]}, "source_index: got '0'"),
    ({"source_index": torch.zeros(4)}, "source_index: got a tensor.*float32"),
    ({"source_index": torch.zeros(4, dtype=torch.bfloat16)}, "source_index: got a tensor.*bfloat16"),
    ({"source_index": torch.zeros(4, dtype=torch.bool)}, "source_index: got.*bool"),
    ({"source_index": np.zeros(4)}, "source_index: got.*float64"),
    ({"source_index": "0012"}, "source_index: got '0012'"),
    ({"source_index": None}, "source_index: got None"),
    ({"source_index": {0, 1, 2, 3}}, r"source_index: got \{0, 1, 2, 3\} \(set\); edge e .* a set has no order"),
    ({"target_index": {0, 1, 2, 3}}, r"target_index: got .*\(set\).*so pass spec.target_index"),
    ({"source_index": frozenset(range(4))}, r"source_index: got .*\(frozenset\).*no order"),
    ({"target_index": iter({0, 1, 2, 3})}, r"target_index: got .*no order"),
    ({"target_index": set()}, r"target_index: got set\(\).*no order"),
    ({"source_index": 3}, "source_index: got 3"),
    ({"source_index": [0, 0, 1, 2**70]}, "source_index: got 1180591620717411303424.*64 bits"),
    ({"source_index": [0, 0, 1]}, "source_index, target_index: got 3 and 4"),
    ({"source_index": [0, 0, 1, 4]}, r"source_index: got 4 at 3.*key_features - 1 = 3"),
    ({"source_index": [0, -1, 1, 2]}, r"source_index: got -1 at 1"),
    ({"target_index": [1, 4, 0, 0]}, r"target_index: got 4 at 1.*query_features - 1 = 3"),
    ({"key_features": 2}, r"source_index: got 2 at 3.*key_features - 1 = 1"),
    ({"source_index": [0, 0, 1, 1]}, r"pair \(1, 0\) more than once"),
    ({"query_features": 0}, "query_features: got 0"),
    ({"query_features": True}, r"query_features: got True \(bool\)"),
    ({"key_features": 4.0}, "key_features: got 4.0"),
    ({"embed_dim": -8}, "embed_dim: got -8"),
    ({"embed_dim": "8"}, "embed_dim: got '8'"),
    ({"num_heads": 0}, "num_heads: got 0"),
    ({"num_heads": None}, "num_heads: got None"),
    ({"num_heads": 3}, "embed_dim: got 8 with num_heads 3"),
    ({"dropout": True}, "dropout: got True"),
    ({"dropout": -0.1}, "dropout: got -0.1"),
    ({"dropout": 1.5}, "dropout: got 1.5"),
    ({"dropout": math.nan}, "dropout: got nan"),
    ({"dropout": "0"}, "dropout: got '0'"),
    ({"bias": 1}, "bias: got 1"),
    ({"kdim": 4}, "kdim: got 4"),
    ({"vdim": 8.0}, "vdim: got 8.0"),
    ({"batch_first": None}, "batch_first: got None"),
    ({"add_self_loops": 1}, "add_self_loops: got 1"),
    (
        {"add_self_loops": True, "query_features": 5},
        "add_self_loops: got True with query_features 5 and key_features 4",
    ),
    ({"identity": 1}, "identity: got 1"),
    ({"identity": b"graph"}, "identity: got b'graph'"),
    ({"identity": "\ud800"}, "identity: got.*UTF-8"),
    ({"generator": 1}, r"generator: got 1.*manual_seed"),
    ({"chunk_size": 0}, "chunk_size: got 0"),
    ({"chunk_size": -1}, "chunk_size: got -1"),
    ({"chunk_size": True}, "chunk_size: got True"),
    ({"chunk_size": 2.0}, "chunk_size: got 2.0"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_ARGUMENTS)
def test_bad_argument_is_refused_by_name(arguments, message):
    good = {
        "source_index": [0, 0, 1, 2],
        "target_index": [1, 3, 0, 0],
        "query_features": 4,
        "key_features": 4,
        "embed_dim": 8,
        "num_heads": 2,
    }
    with pytest.raises(Kpnn2Error, match=message) as refusal:
        PackedMultiheadAttention(**{**good, **arguments})
    assert "\n" not in str(refusal.value)


def test_integer_dropout_and_matching_widths_are_taken():
    layer = PackedMultiheadAttention([0], [0], np.int64(1), 1, 8, 2, dropout=0, kdim=8, vdim=8, chunk_size=np.int64(2))
    assert layer.dropout == 0.0
    assert layer.chunk_size == 2


def test_bad_generator_for_a_reset_is_refused():
    with pytest.raises(Kpnn2Error, match="generator: got 5"):
        feedback_layer().reset_parameters(5)


# ---------------------------------------------------------------------- forward: layouts and refusals

NO_MASK = torch.zeros(2, 4, dtype=torch.bool)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"query": tensor(8)}, r"query: got shape \(8,\)"),
        ({"query": tensor(2, 4, 7)}, r"query: got shape \(2, 4, 7\)"),
        ({"query": tensor(2, 5, 8)}, r"query: got shape \(2, 5, 8\)"),
        ({"key": tensor(2, 5, 8)}, r"key: got shape \(2, 5, 8\)"),
        ({"value": tensor(2, 3, 8)}, r"value: got shape \(2, 3, 8\)"),
        ({"key": tensor(3, 4, 8)}, r"query, key, value: got batch shapes \(2,\), \(3,\), \(2,\)"),
        ({"value": tensor(1, 4, 8)}, "query, key, value: got batch shapes"),
        ({"key": tensor(4, 8), "value": tensor(4, 8)}, r"query, key, value: got batch shapes \(2,\), \(\), \(\)"),
        ({"query": [1.0]}, "query: got"),
        ({"query": torch.ones(2, 4, 8, dtype=torch.long)}, "query: got.*int64"),
        ({"value": tensor(2, 4, 8).to(torch.complex64)}, "value: got.*complex64"),
        ({"attn_mask": torch.zeros(4, 4)}, r"attn_mask: got a tensor of shape \(4, 4\)"),
        ({"is_causal": True}, "is_causal: got True"),
        ({"is_causal": None}, "is_causal: got None"),
        ({"need_weights": 1}, "need_weights: got 1"),
        ({"average_attn_weights": None}, "average_attn_weights: got None"),
        ({"key_padding_mask": torch.zeros(2, 4)}, "key_padding_mask: got.*float32"),
        ({"key_padding_mask": torch.zeros(2, 4, dtype=torch.long)}, "key_padding_mask: got.*int64"),
        ({"key_padding_mask": [[False] * 4] * 2}, r"key_padding_mask: got.*list"),
        ({"key_padding_mask": NO_MASK[0]}, r"key_padding_mask: got shape \(4,\); expected \(2, 4\)"),
        ({"key_padding_mask": NO_MASK[:1]}, r"key_padding_mask: got shape \(1, 4\)"),
        ({"key_padding_mask": NO_MASK[:, :3]}, r"key_padding_mask: got shape \(2, 3\)"),
    ],
)
def test_bad_input_is_refused_by_name(arguments, message):
    x = tensor(2, 4, 8)
    with pytest.raises(Kpnn2Error, match=message):
        feedback_layer()(**{"query": x, "key": x, "value": x, **arguments})


def test_more_than_one_batch_axis_needs_batch_first():
    x = tensor(4, 3, 2, 8)
    with pytest.raises(Kpnn2Error, match=r"query: got shape \(4, 3, 2, 8\).*batch_first False"):
        feedback_layer(batch_first=False)(x, x, x)


@pytest.mark.parametrize(
    ("batch_first", "shape", "output", "weights"),
    [
        (True, (4, 8), (4, 8), (5,)),
        (True, (3, 4, 8), (3, 4, 8), (3, 5)),
        (True, (2, 3, 4, 8), (2, 3, 4, 8), (2, 3, 5)),
        (False, (4, 8), (4, 8), (5,)),
        (False, (4, 3, 8), (4, 3, 8), (5, 3)),
    ],
)
def test_weights_follow_the_layout_of_the_output(batch_first, shape, output, weights):
    layer = PackedMultiheadAttention([0, 0, 1, 2, 3], [1, 3, 0, 0, 3], 4, 4, 8, 2, batch_first=batch_first).double()
    x = tensor(*shape)
    y, averaged = layer(x, x, x, need_weights=True)
    assert y.shape == output
    assert averaged.shape == weights
    assert layer(x, x, x, need_weights=True, average_attn_weights=False)[1].shape == (*weights, 2)


def test_weights_stand_in_the_order_the_edges_were_given():
    layer = PackedMultiheadAttention([0, 1, 2, 0], [2, 0, 2, 1], 3, 3, 4, 1).double()  # targets 2 0 2 1
    x = tensor(3, 4)
    weights = layer(x, x, x, need_weights=True)[1]
    torch.testing.assert_close(weights[[1, 3]], torch.ones(2, dtype=torch.float64))  # the only edge of their queries
    torch.testing.assert_close(weights[0] + weights[2], torch.ones((), dtype=torch.float64))
    assert weights[0] != weights[2]


def test_query_without_visible_keys_gives_the_output_bias_and_finite_gradients():
    layer, x = feedback_layer(), tensor(2, 4, 8).requires_grad_()
    hidden = torch.tensor([[True, True, True, True], [False, False, True, False]])
    y, weights = layer(x, x, x, hidden, need_weights=True)
    assert torch.equal(y[0], layer.out_proj.bias.expand(4, 8))
    assert torch.equal(y[:, 2], layer.out_proj.bias.expand(2, 8))  # an input node, entered by no edge
    assert (weights[0] == 0).all()
    assert all(g.isfinite().all() for g in gradients(y, [x, *layer.parameters()], 0))


def test_layer_with_all_edges_is_ordinary_attention():
    n, D, H = 4, 6, 3
    grid = torch.cartesian_prod(torch.arange(n), torch.arange(n))
    layer = randomized(PackedMultiheadAttention(grid[:, 0], grid[:, 1], n, n, D, H), 0).eval()
    dense = nn.MultiheadAttention(D, H, batch_first=True, dtype=torch.float64).eval()
    with torch.no_grad():
        dense.in_proj_weight.copy_(torch.cat([layer.q_proj.weight, layer.k_proj.weight, layer.v_proj.weight]))
        dense.in_proj_bias.copy_(torch.cat([layer.q_proj.bias, layer.k_proj.bias, layer.v_proj.bias]))
        dense.out_proj.weight.copy_(layer.out_proj.weight)
        dense.out_proj.bias.copy_(layer.out_proj.bias)
    x, hidden = tensor(2, n, D), torch.tensor([[False, True, False, False]] * 2)
    expected, expected_weights = dense(x, x, x, hidden)
    y, weights = layer(x, x, x, hidden, need_weights=True)
    torch.testing.assert_close(y, expected, **EXACT)
    torch.testing.assert_close(weights.view(2, n, n).transpose(1, 2), expected_weights, **EXACT)


# ---------------------------------------------------------------------- dropout


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_dropout_acts_on_the_weights_in_training_only(chunk_size):
    layer, x = feedback_layer(dropout=0.5, chunk_size=chunk_size), tensor(50, 4, 8)
    y, exact = layer(x, x, x, need_weights=True, average_attn_weights=False)
    assert torch.equal(layer(x, x, x)[0], y)
    layer.train()
    torch.manual_seed(0)
    y, weights = layer(x, x, x, need_weights=True, average_attn_weights=False)
    kept = weights != 0
    assert 0.3 < kept.double().mean() < 0.7
    torch.testing.assert_close(weights[kept], 2 * exact[kept], **EXACT)
    values = layer.v_proj(x).view(50, 4, 2, 4)
    mix = torch.zeros(50, 4, 2, 4, dtype=torch.float64)
    for e in range(layer.nnz):
        mix[:, layer.target_index[e]] += weights[:, e, :, None] * values[:, layer.source_index[e]]
    torch.testing.assert_close(y, layer.out_proj(mix.flatten(2)), **EXACT)


def test_dropout_of_everything_leaves_the_output_bias():
    layer, x = feedback_layer(dropout=1.0).train(), tensor(2, 4, 8)
    assert torch.equal(layer(x, x, x)[0], layer.out_proj.bias.expand(2, 4, 8))


# ---------------------------------------------------------------------- numerics

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def plain_layer(dtype, **options):
    """One head and identities for projections: the scores are half the products of the tokens themselves."""
    layer = PackedMultiheadAttention([0, 1, 2, 0], [2, 2, 2, 1], 3, 3, 4, 1, **options)
    for proj in (layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj):
        nn.init.eye_(proj.weight)
    return layer.to(dtype).eval()


@pytest.mark.parametrize("chunk_size", [None, 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_far_apart_give_finite_outputs_and_gradients(dtype, chunk_size):
    layer = plain_layer(dtype, chunk_size=chunk_size)
    x = torch.zeros(1, 3, 4, dtype=dtype)
    x[0, 0, 0], x[0, 1, 0], x[0, 2, 0] = -200, 200, 100  # scores of query 2: -1e4, 1e4 and 5e3
    x.requires_grad_()
    y, weights = layer(x, x, x, need_weights=True)
    assert weights[0].tolist() == [0, 1, 0, 1]
    assert y[0, 2, 0] == 200
    assert all(g.isfinite().all() for g in gradients(y, [x, *layer.parameters()], 0))


@pytest.mark.parametrize("chunk_size", [None, 1])
@pytest.mark.parametrize("far", [200.0, 1e4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_hidden_key_far_above_the_visible_ones_leaves_no_trace(dtype, far, chunk_size):
    layer, hidden = plain_layer(dtype, chunk_size=chunk_size), torch.tensor([[False, True, False]])
    x = tensor(1, 3, 4, dtype=dtype)
    x[0, 2] = 2.0
    low, high = x.clone(), x.clone()
    low[0, 1], high[0, 1] = 0.0, far  # the score of query 2 and key 1, up to 4e4; exp of 89 overflows float32
    results = []
    for tokens in (low, high):
        query, key = x.clone().requires_grad_(), tokens.clone().requires_grad_()
        y, weights = layer(query, key, key, hidden, need_weights=True)
        grads = gradients(y, [query, key, *layer.parameters()], 0)
        assert all(t.isfinite().all() for t in (y, weights, *grads))
        assert (grads[1][0, 1] == 0).all()
        results.append((y, weights))
    for got, want in zip(results[1], results[0], strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("rubbish", [math.nan, math.inf])
@pytest.mark.parametrize("batch_first", [True, False])
def test_rubbish_in_a_hidden_key_leaves_no_trace(batch_first, rubbish):
    layer, hidden = feedback_layer(batch_first=batch_first), torch.tensor([[False, True, False, False]] * 3)
    query, clean = (
        tensor(*((3, 4, 8) if batch_first else (4, 3, 8))),
        tensor(*((3, 4, 8) if batch_first else (4, 3, 8))),
    )
    dirty = clean.clone()
    (dirty[:, 1] if batch_first else dirty[1]).fill_(rubbish)
    results = []
    for tokens in (clean.requires_grad_(), dirty.requires_grad_()):
        y, _ = layer(query, tokens, tokens, hidden)
        results.append([y, *gradients(y, [tokens, *layer.parameters()], 0)])
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_sums_thousands_of_edges_as_float32_does(dtype):
    n, D = 5000, 4
    layer = PackedMultiheadAttention(range(n), [0] * n, 1, n, D, 2)
    randomized(layer, 0, torch.float32).to(dtype).eval()
    single = copy.deepcopy(layer).float()
    query, key = tensor(1, D, dtype=dtype), tensor(n, D, dtype=dtype)
    y, weights = layer(query, key, key, need_weights=True)
    expected, exact = single(query.float(), key.float(), key.float(), need_weights=True)
    assert y.dtype == weights.dtype == dtype
    # A dozen roundings of projections and result; sums of 5000 weights in half precision would be off by far more.
    precision = torch.finfo(dtype).eps
    torch.testing.assert_close(y.float(), expected, rtol=12 * precision, atol=12 * precision)
    torch.testing.assert_close(weights.float(), exact, rtol=30 * precision, atol=1e-6)
    assert weights.float().sum().item() == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("dtype", DTYPES)
def test_autocast_around_the_layer_changes_nothing(dtype):
    layer, x = feedback_layer(dtype), tensor(2, 4, 8, dtype=dtype).requires_grad_()
    expected = layer(x, x, x, need_weights=True)
    with torch.autocast("cpu", torch.bfloat16):
        got = layer(x, x, x, need_weights=True)
        assert torch.is_autocast_enabled("cpu")
    assert all(torch.equal(a, b) and a.dtype == dtype for a, b in zip(got, expected, strict=True))
    for a, b in zip(gradients(got[0], [x], 0), gradients(expected[0], [x], 0), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_are_cast_to_the_dtype_of_the_parameters(dtype):
    layer = feedback_layer(dtype)
    for given_dtype in DTYPES:
        x = tensor(2, 4, 8, dtype=given_dtype)
        y, weights = layer(x, x, x, need_weights=True)
        assert y.dtype == weights.dtype == dtype
        cast = x.to(dtype)
        assert torch.equal(y, layer(cast, cast, cast)[0])
        assert torch.equal(y, layer(x, cast, x)[0])


@pytest.mark.parametrize("change", [lambda m: m.half(), lambda m: m.bfloat16(), lambda m: m.to(torch.float32)])
def test_casting_the_module_leaves_its_indices_and_digest(change):
    layer = feedback_layer(add_self_loops=True)
    before = contents(layer)
    change(layer)
    for name in ("source_index", "target_index", "index_digest", "identity"):
        assert torch.equal(layer.state_dict()[name], before[name])
        assert layer.state_dict()[name].dtype == before[name].dtype


# ---------------------------------------------------------------------- scale


def random_edges(n, nnz, seed=0):
    pairs = torch.randint(0, n * n, (nnz + nnz // 10,), generator=torch.Generator().manual_seed(seed)).unique()
    pairs = pairs[torch.randperm(len(pairs), generator=torch.Generator().manual_seed(seed))][:nnz]
    return pairs % n, pairs // n


@pytest.mark.parametrize("form", ["tensors", "tuples"])
def test_million_edges_are_taken_without_a_python_call_for_each(form):
    n, nnz = 50_000, 1_000_000
    source, target = random_edges(n, nnz)
    given_as = (source, target) if form == "tensors" else (tuple(source.tolist()), tuple(target.tolist()))
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += 1

    sys.setprofile(count)
    try:
        layer = PackedMultiheadAttention(*given_as, n, n, 8, 2, add_self_loops=True, identity="graph")
        state = layer.state_dict()
        layer.load_state_dict(state)
    finally:
        sys.setprofile(None)
    assert calls < 5_000  # a call an edge would be a million
    loops = np.setdiff1d(np.arange(n), source[source == target])
    expected = [np.concatenate([index.numpy(), loops]) for index in (source, target)]
    assert layer.nnz == len(expected[0])
    assert np.array_equal(layer.source_index, expected[0])
    assert np.array_equal(layer.target_index, expected[1])
    text = expected[0].tobytes() + expected[1].tobytes() + np.array([n, n, 8, 2]).tobytes()
    assert bytes(state["index_digest"].tolist()) == hashlib.sha256(text).digest()
    layer.load_state_dict(state)


def test_duplicate_among_a_million_edges_is_found():
    source, target = random_edges(50_000, 1_000_000)
    source[-1], target[-1] = source[5], target[5]
    with pytest.raises(Kpnn2Error, match=rf"pair \({source[5]}, {target[5]}\) more than once, 1 repeats"):
        PackedMultiheadAttention(source, target, 50_000, 50_000, 8, 2)


@pytest.mark.parametrize("chunk_size", [None, 1000])
@pytest.mark.parametrize("need_weights", [False, True])
def test_memory_grows_with_edges_and_a_chunk_bounds_the_gathers(chunk_size, need_weights):
    n, nnz, D, H = 20_000, 200_000, 16, 2
    source, target = random_edges(n, nnz)
    layer = PackedMultiheadAttention(source, target, n, n, D, H, chunk_size=chunk_size)
    x, hidden = tensor(n, D, dtype=torch.float32).requires_grad_(), torch.arange(n) % 7 == 0
    with LargestTensor() as forward:
        y, weights = layer(x, x, x, hidden, need_weights=need_weights, average_attn_weights=False)
    with LargestTensor() as backward:
        (y.sum() + (weights.square().sum() if need_weights else 0)).backward()
    # Gathers hold nnz D numbers, unless in chunks: then scores and weights, nnz H, are largest, or the tokens, n D.
    bound = nnz * D if chunk_size is None else max(nnz * H, n * D)
    assert forward.numel <= bound
    assert backward.numel <= bound
    assert bound < n * n / 100
    assert backward.operations > 20  # the backward pass was watched indeed


@pytest.mark.parametrize("chunk_size", [None, 1000])
def test_no_gather_is_kept_for_the_backward_pass(chunk_size):
    n, nnz, D, H = 500, 10_000, 16, 2
    layer = PackedMultiheadAttention(*random_edges(n, nnz), n, n, D, H, chunk_size=chunk_size)
    x = tensor(n, D, dtype=torch.float32).requires_grad_()
    kept = []

    def note(saved):
        kept.append(saved.numel())
        return saved

    with torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved):
        layer(x, x, x)
    assert max(kept) == nnz * H  # the weights
    assert nnz * H > n * D


@pytest.mark.parametrize("chunk_size", [1, 7, 1000])
def test_chunks_change_no_number(chunk_size):
    source, target = random_edges(50, 400)
    whole = randomized(PackedMultiheadAttention(source, target, 50, 50, 6, 3), 0).eval()
    parts = PackedMultiheadAttention(source, target, 50, 50, 6, 3, chunk_size=chunk_size).double().eval()
    parts.load_state_dict(whole.state_dict())
    x = tensor(2, 50, 6).requires_grad_()
    results = []
    for layer in (whole, parts):
        y, weights = layer(x, x, x, need_weights=True)
        results.append([y, weights, *gradients(y, [x, *layer.parameters()], 0)])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, **EXACT)


# ---------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("identity", [None, "", "graph", "Füße"])
def test_state_has_digest_and_identity_as_bytes_and_loads_back(identity):
    layer = PackedMultiheadAttention([1, 0], [0, 1], 2, 2, 4, 2, identity=identity)
    state = layer.state_dict(prefix="deep.")
    digest = hashlib.sha256(np.array([1, 0, 0, 1, 2, 2, 4, 2], dtype="<i8").tobytes()).digest()
    assert bytes(state["deep.index_digest"].tolist()) == digest
    assert ("deep.identity" in state) == (identity is not None)
    names = ["index_digest"] if identity is None else ["index_digest", "identity"]
    for name in names:
        saved = state[f"deep.{name}"]
        assert (saved.dtype, saved.dim(), saved.device.type) == (torch.uint8, 1, "cpu")
    if identity is not None:
        assert bytes(state["deep.identity"].tolist()) == identity.encode()
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    twin = PackedMultiheadAttention([1, 0], [0, 1], 2, 2, 4, 2, identity=identity)
    assert str(twin.load_state_dict(torch.load(file, weights_only=True))) == "<All keys matched successfully>"
    assert_unchanged(twin, contents(layer))


@pytest.mark.parametrize("lacking", [["index_digest"], ["identity"], ["index_digest", "identity"]])
def test_what_a_checkpoint_does_not_claim_is_no_error(lacking):
    layer, other = feedback_layer(), feedback_layer(seed=1)
    state = {name: value for name, value in other.state_dict().items() if name not in lacking}
    result = layer.load_state_dict(state, strict=True)
    assert not result.missing_keys
    assert not result.unexpected_keys
    assert_unchanged(layer, contents(other))


def test_keys_that_are_missing_or_unexpected_are_still_reported():
    state = feedback_layer().state_dict()
    del state["q_proj.weight"]
    state["index_digests"] = torch.zeros(1)
    result = feedback_layer().load_state_dict(state, strict=False)
    assert result.missing_keys == ["q_proj.weight"]
    assert result.unexpected_keys == ["index_digests"]


def other_graph(edges, embed_dim=8, num_heads=2, **options):
    layer = PackedMultiheadAttention.from_adjacency(spec_of(edges), embed_dim, num_heads, **options)
    return randomized(layer, 1, torch.float64).state_dict()


def changed(**entries):
    return {**feedback_layer(seed=1).state_dict(), **entries}


def swapped(edges, a, b):
    return [tuple({a: b, b: a}.get(name, name) for name in edge) for edge in edges]


def without_edge(edges, source, target):
    return [edge for edge in edges if edge != (source, target)]


def without(state, *names):
    return {name: value for name, value in state.items() if name not in names}


DIGEST = feedback_layer().state_dict()["index_digest"]
MUTATIONS = {
    "a node renamed": (other_graph([("xx", "a"), *FEEDBACK[1:]]), "identity: '.{64}' in the checkpoint, '.{64}' here"),
    "two nodes swapped": (
        other_graph(swapped(FEEDBACK, "a", "b")),
        "edges: 4 .*, 4 here; first difference at edge 1: ",
    ),
    "an edge added": (other_graph([*FEEDBACK, ("b", "y")]), "edges: 5 .*, 4 here; first difference at edge 3: 1 -> 3 "),
    "an edge removed": (
        other_graph(without_edge(FEEDBACK, "b", "a")),
        "edges: 3 .*, 4 here; first difference at edge 2: 2 -> 0 in the checkpoint, 1 -> 0 here",
    ),
    "a longer graph": (other_graph([*FEEDBACK, ("x", "y")]), "edges: 5 .*: 2 -> 3 in the checkpoint, no edge here"),
    "an edge reversed": (
        PackedMultiheadAttention([0, 3, 1, 2], [1, 0, 0, 0], 4, 4, 8, 2).double().state_dict(),
        "edges: 4 .*, 4 here; first difference at edge 1: 3 -> 0 in the checkpoint, 0 -> 3 here",
    ),
    "self-loops": (other_graph(FEEDBACK, add_self_loops=True), "edges: 8 in the checkpoint, 4 here.*0 -> 0"),
    "other heads": (other_graph(FEEDBACK, 8, 4), "embed_dim 8 and num_heads 4 in the checkpoint, 8 and 2 here"),
    "another width": (other_graph(FEEDBACK, 4, 2), "embed_dim 4 and num_heads 2 in the checkpoint, 8 and 2 here"),
    "digest truncated": (
        changed(index_digest=DIGEST[:31]),
        r"index_digest: a tensor of shape \(31,\) .*uint8 in the ch",
    ),
    "digest of another type": (changed(index_digest=DIGEST.long()), r"index_digest: a tensor of .*int64 in the check"),
    "digest as text": (changed(index_digest="74ba"), r"index_digest: '74ba' \(str\) in the checkpoint"),
    "digest one bit off": (changed(index_digest=DIGEST ^ 1), "index_digest: 75bb.*here: other sizes"),
    "identity not UTF-8": (changed(identity=torch.tensor([255, 254], dtype=torch.uint8)), "identity: unreadable"),
    "identity as text": (changed(identity="graph"), "identity: unreadable"),
    "edges without digest": (
        without(other_graph(swapped(FEEDBACK, "a", "b")), "index_digest", "identity"),
        "edges: 4 .*, 4 here; first difference at edge 1",
    ),
    "edges of another type": (changed(source_index=torch.zeros(4)), "source_index, target_index: no 1-D integer"),
}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_checkpoint_of_something_else_is_refused_and_changes_no_weight(mutation, strict):
    state, message = MUTATIONS[mutation]
    layer = feedback_layer()
    before, x = contents(layer), tensor(2, 4, 8)
    output = layer(x, x, x)[0]
    with pytest.raises(CheckpointMismatchError, match=message) as refusal:
        layer.load_state_dict(state, strict=strict)
    assert "\n" not in str(refusal.value)
    assert isinstance(refusal.value, Kpnn2Error)
    assert isinstance(refusal.value, ZooError)
    assert_unchanged(layer, before)
    assert torch.equal(layer(x, x, x)[0], output)
    with pytest.raises(CheckpointMismatchError, match=message):
        check_packed_layers(layer, state)

    parent = nn.ModuleDict({"first": nn.Linear(2, 2), "deep": nn.Sequential(feedback_layer())})
    inner = parent["deep"][0]
    before = contents(inner)
    whole = {name: torch.ones_like(value) for name, value in parent["first"].state_dict(prefix="first.").items()}
    whole |= {f"deep.0.{name}": value for name, value in state.items()}
    with pytest.raises(CheckpointMismatchError, match=f"deep.0: .*{message}"):
        parent.load_state_dict(whole, strict=strict)
    assert_unchanged(inner, before)


def test_claim_of_identity_is_refused_by_a_layer_that_has_none():
    layer = PackedMultiheadAttention([0, 0, 1, 2], [1, 3, 0, 0], 4, 4, 8, 2).double()
    before = contents(layer)
    with pytest.raises(CheckpointMismatchError, match=r"identity: '.{64}' in the checkpoint, none here"):
        layer.load_state_dict(feedback_layer().state_dict())
    assert_unchanged(layer, before)


def two_layers():
    torch.manual_seed(0)
    return nn.ModuleDict({"one": feedback_layer(), "more": nn.ModuleDict({"two": feedback_layer(seed=2)})})


def test_all_layers_are_checked_before_anything_is_loaded():
    model = two_layers()
    before, state = contents(model), {name: torch.zeros_like(value) for name, value in contents(model).items()}
    for name in ("one.", "more.two."):
        state |= {
            f"{name}{key}": changed()[key] for key in ("source_index", "target_index", "index_digest", "identity")
        }
    check_packed_layers(model, state)
    state["more.two.index_digest"] = DIGEST ^ 1
    with pytest.raises(CheckpointMismatchError, match=r"more\.two: index_digest") as refusal:
        check_packed_layers(model, state)
    assert "one:" not in str(refusal.value)
    assert_unchanged(model, before)
    state["one.identity"] = torch.tensor([65], dtype=torch.uint8)
    state["more.two.identity"] = torch.tensor([255], dtype=torch.uint8)
    with pytest.raises(CheckpointMismatchError) as refusal:
        check_packed_layers(model, state)
    for part in ("one: identity: 'A' in", "more.two: index_digest: ", "; identity: unreadable"):
        assert part in str(refusal.value)
    assert_unchanged(model, before)


def test_prefix_says_where_in_the_checkpoint_a_module_is():
    model = two_layers()
    state = {f"network.{name}": value for name, value in contents(model).items()}
    state["network.one.index_digest"] = DIGEST ^ 1
    check_packed_layers(model, state)  # nothing of that name: nothing is claimed
    with pytest.raises(CheckpointMismatchError, match=r"network\.one: index_digest"):
        check_packed_layers(model, state, "network.")
    with pytest.raises(CheckpointMismatchError, match=r"network\.one: index_digest"):
        nn.ModuleDict({"network": model}).load_state_dict(state)


def test_layer_under_two_names_is_checked_under_both():
    layer = feedback_layer()
    model = nn.ModuleDict({"a": layer, "b": layer})
    with pytest.raises(CheckpointMismatchError, match="b: index_digest"):
        check_packed_layers(model, {**model.state_dict(), "b.index_digest": DIGEST ^ 1})


@against_reference
def test_reference_refuses_what_is_refused_here():
    """The claims mean the same on both sides: but for edges without a digest, which the reference rewires itself to."""
    spec = kpnn2.parse_adjacency(pd.DataFrame(FEEDBACK, columns=["source", "target"]))
    layer = kpnn2.PackedMultiheadAttention(spec.source_index, spec.target_index, 4, 4, 8, 2, identity=spec.fingerprint)
    layer.double().load_state_dict(feedback_layer().state_dict())
    for name, (state, _) in MUTATIONS.items():
        if name not in ("edges without digest", "edges of another type"):
            with pytest.raises(kpnn2.Kpnn2Error):
                layer.load_state_dict(state)


# ---------------------------------------------------------------------- copies, devices, rewiring


@pytest.mark.parametrize("used", [True, False])
@pytest.mark.parametrize("duplicate", [copy.deepcopy, copy.copy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copy_gives_the_same(duplicate, used):
    layer, x = feedback_layer(), tensor(2, 4, 8)
    if used:
        layer(x, x, x)
    twin = duplicate(layer)
    assert_unchanged(twin, contents(layer))
    assert torch.equal(twin(x, x, x)[0], layer(x, x, x)[0])
    assert twin.identity == layer.identity
    if duplicate is not copy.copy:
        with torch.no_grad():
            twin.v_proj.weight.add_(1)
        assert not torch.equal(twin(x, x, x)[0], layer(x, x, x)[0])


def test_writing_to_the_indices_rewires_the_layer():
    layer, x = feedback_layer(), tensor(2, 4, 8)
    layer(x, x, x)
    layer.source_index[0], layer.target_index[1] = 3, 2
    expected = packed_attention(layer, x, x, x)[0]
    torch.testing.assert_close(layer(x, x, x)[0], expected, **EXACT)
    with pytest.raises(CheckpointMismatchError, match="edges: 4"):
        layer.load_state_dict(feedback_layer().state_dict())
    layer.source_index[0] = 4
    with pytest.raises(Kpnn2Error, match="source_index: got 4 at 0"):
        layer(x, x, x)


def test_edges_are_sorted_once_for_the_same_indices():
    layer = feedback_layer()
    edges = layer._sorted_edges()
    assert layer._sorted_edges() is edges
    layer.load_state_dict(layer.state_dict())  # writes what is there already
    assert layer._sorted_edges() is edges
    layer.target_index[0] = 2
    assert layer._sorted_edges() is not edges


def test_keys_of_a_dictionary_have_an_order():
    layer = PackedMultiheadAttention({2: 0, 0: 0, 1: 0}.keys(), [0, 1, 2], 3, 3, 8, 2)
    assert layer.source_index.tolist() == [2, 0, 1]


def test_edges_are_sorted_anew_for_another_chunk():
    layer, x = dense_layer(), tensor(300, 8, dtype=torch.float32)
    assert pairs_at_once(layer, x) == 300 * 300
    layer.chunk_size = 3000
    assert pairs_at_once(layer, x) == 3000
    layer.chunk_size = None
    assert pairs_at_once(layer, x) == 300 * 300


@pytest.mark.parametrize("again", [lambda old: torch.tensor([0, 2, 3, 1]), lambda old: old.flip(0)])
def test_swapped_indices_rewire_the_layer(again):
    layer, x = feedback_layer(), tensor(2, 4, 8)
    before = layer(x, x, x)[0]
    layer.source_index.data = again(layer.source_index.data)
    y = layer(x, x, x)[0]
    torch.testing.assert_close(y, packed_attention(layer, x, x, x)[0], **EXACT)
    assert not torch.allclose(y, before)


def test_layer_made_and_run_in_inference_mode_works():
    expected, x = feedback_layer(), tensor(2, 4, 8)
    with torch.inference_mode():
        made_here = feedback_layer()
        y = made_here(x, x, x)[0]
        torch.testing.assert_close(y, made_here(x, x, x)[0], **EXACT)
    torch.testing.assert_close(y, expected(x, x, x)[0], **EXACT)  # inference mode takes another matrix product


def test_layer_first_used_in_inference_mode_trains_afterwards():
    layer, x = feedback_layer(), tensor(2, 4, 8)
    with torch.inference_mode():
        layer(x, x, x)
    y = layer(x, x, x)[0]
    expected = feedback_layer()(x, x, x)[0]
    assert torch.equal(y, expected)
    y.sum().backward()
    assert layer.k_proj.weight.grad.isfinite().all()


def test_rewiring_is_seen_in_inference_mode_too():
    x = tensor(2, 4, 8)
    with torch.inference_mode():
        layer = feedback_layer()
        layer(x, x, x)
        layer.source_index[0] = 3
        torch.testing.assert_close(layer(x, x, x)[0], packed_attention(layer, x, x, x)[0], **EXACT)


@pytest.mark.parametrize("generator", [None, torch.Generator()])
def test_layer_made_without_storage_takes_a_checkpoint_and_still_checks_it(generator):
    with torch.device("meta"):
        layer = PackedMultiheadAttention.from_adjacency(spec_of(FEEDBACK), 8, 2, generator=generator)
    assert layer.q_proj.weight.is_meta
    with pytest.raises(CheckpointMismatchError, match="edges: 5"):
        layer.load_state_dict(MUTATIONS["an edge added"][0], assign=True)
    layer.load_state_dict(feedback_layer().state_dict(), assign=True)
    x = tensor(2, 4, 8)
    assert torch.equal(layer.eval()(x, x, x)[0], feedback_layer()(x, x, x)[0])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("chunk_size", [None, 2])
def test_layer_moved_to_a_gpu_gives_the_same(chunk_size):
    layer, x, hidden = feedback_layer(chunk_size=chunk_size), tensor(2, 4, 8), torch.tensor([[True] + [False] * 3] * 2)
    expected = layer(x, x, x, hidden)[0]
    layer.cuda()
    assert layer.source_index.is_cuda
    x = x.cuda().requires_grad_()
    with torch.autocast("cuda", torch.float16):
        y = layer(x, x, x, hidden)[0]  # the mask is copied over
    torch.testing.assert_close(y.cpu(), expected, **EXACT)
    assert all(g.isfinite().all() for g in gradients(y, [x, *layer.parameters()], 0))
    assert layer.state_dict()["index_digest"].device.type == "cpu"
    layer.load_state_dict(feedback_layer().state_dict())
