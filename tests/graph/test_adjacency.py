"""What a table of edges is read as, against recorded values and the public reference, and what is refused."""

import dataclasses
import json
import pickle
import sys
from decimal import Decimal
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.oracles.compare import examples
from zoo.errors import Kpnn2Error
from zoo.graph import AdjacencySpec, parse_adjacency
from zoo.lookalikes import look_alikes

try:
    import kpnn2
except ImportError:
    kpnn2 = None
against_reference = pytest.mark.skipif(kpnn2 is None, reason="needs the reference: pip install kpnn2==0.3.0")

VECTORS = json.loads((Path(__file__).parents[1] / "data/packed_attention_vectors.json").read_text(encoding="utf-8"))
GRAPHS = {graph["name"]: graph for graph in VECTORS["graphs"]}
FEEDBACK = [("x", "a"), ("a", "b"), ("b", "a"), ("a", "y")]
FIELDS = ("nodes", "input_nodes", "hidden_nodes", "output_nodes", "source_index", "target_index")


def table(edges, **options):
    sources, targets = zip(*edges, strict=True)
    return pd.DataFrame({"source": pd.Series(sources, **options), "target": pd.Series(targets, **options)})


def object_table(edges):
    return table(edges, dtype=object)


# Few letters, so that nodes meet and cycles close; with white space, NUL and names beyond the basic plane.
NAMES = st.one_of(st.text("ab", min_size=1, max_size=2), st.text(min_size=1, max_size=3), st.sampled_from("é \x00😀10"))
EDGES = st.lists(st.tuples(NAMES, NAMES), min_size=1, max_size=12, unique=True)


# ---------------------------------------------------------------------- values


@pytest.mark.parametrize("name", GRAPHS)
def test_recorded_graph_is_read_as_recorded(name):
    graph = GRAPHS[name]
    spec = parse_adjacency(object_table(graph["edges"]))
    for field in FIELDS:
        assert list(getattr(spec, field)) == graph[field], field
    assert spec.fingerprint == graph["fingerprint"]
    assert spec.state_dim == len(graph["nodes"])


@against_reference
@examples(150)
@given(edges=EDGES, ends=st.booleans())
def test_random_graph_is_read_as_the_reference_reads_it(edges, ends):
    if ends:  # most random graphs lack an input or an output
        edges = [*edges, ("in", edges[0][0]), (edges[-1][1], "out")]
    frame = object_table(edges)
    if look_alikes(name for edge in edges for name in edge):  # the reference takes most of them for several nodes
        with pytest.raises(Kpnn2Error, match="differ"):
            parse_adjacency(frame)
        return
    try:
        expected = kpnn2.parse_adjacency(frame)
    except kpnn2.Kpnn2Error:
        with pytest.raises(Kpnn2Error):
            parse_adjacency(frame)
        return
    spec = parse_adjacency(frame)
    for field in (*FIELDS, "input_index", "output_index", "state_dim"):
        assert getattr(spec, field) == getattr(expected, field), field
        assert type(getattr(spec, field)) is type(getattr(expected, field)), field
    assert spec.fingerprint == expected.fingerprint
    assert spec.to_dict() == expected.to_dict()
    assert spec.to_edgelist().equals(expected.to_edgelist())
    for source, target in edges:
        assert spec.edge_location(source, target) == expected.edge_location(source, target)
    assert AdjacencySpec.from_dict(expected.to_dict()) == spec
    assert kpnn2.AdjacencySpec.from_dict(spec.to_dict()) == expected


@examples(50)
@given(edges=EDGES, seed=st.integers(0, 99))
def test_order_of_rows_and_other_columns_change_nothing(edges, seed):
    frame = object_table([*edges, ("in", edges[0][0]), (edges[-1][1], "out")])
    try:
        spec = parse_adjacency(frame)
    except Kpnn2Error:
        return
    shuffled = frame.sample(frac=1, random_state=seed).assign(weight=0.5)
    assert parse_adjacency(shuffled) == spec
    assert parse_adjacency(shuffled).fingerprint == spec.fingerprint


def test_renaming_a_node_changes_the_fingerprint_and_not_the_indices():
    spec = parse_adjacency(table(FEEDBACK))
    renamed = parse_adjacency(table([("xx" if s == "x" else s, t) for s, t in FEEDBACK]))
    assert renamed.source_index == spec.source_index
    assert renamed.target_index == spec.target_index
    assert renamed.fingerprint != spec.fingerprint


@pytest.mark.parametrize("dtype", ["int64", "int32", "uint8", "Int64", object, "category"])
def test_integer_names_become_text_whatever_their_column_is(dtype):
    spec = parse_adjacency(table([(1, 10), (10, 2), (2, 10), (10, 3)], dtype=dtype))
    assert spec.nodes == ("1", "10", "2", "3")  # as text: "10" before "2"
    assert spec == parse_adjacency(table([("1", "10"), ("10", "2"), ("2", "10"), ("10", "3")]))


@pytest.mark.parametrize("dtype", [object, "string", "category"])
def test_text_columns_of_every_kind_are_read_alike(dtype):
    assert parse_adjacency(table(FEEDBACK, dtype=dtype)) == parse_adjacency(object_table(FEEDBACK))


@pytest.mark.parametrize("value", [1.0, 2.5, True, np.float32(0.1), np.bool_(False)])
def test_fractions_and_booleans_become_text_with_a_warning(value):
    with pytest.warns(UserWarning, match=f"row 1, becomes the name '{value!s}'"):
        spec = parse_adjacency(object_table([("a", "b"), (value, "c")]))
    assert str(value) in spec.nodes
    if kpnn2 is not None:
        with pytest.warns(UserWarning, match="float or bool"):
            assert spec.fingerprint == kpnn2.parse_adjacency(object_table([("a", "b"), (value, "c")])).fingerprint


# ---------------------------------------------------------------------- the spec


def test_spec_survives_json_pickle_and_its_own_table():
    for graph in GRAPHS.values():
        spec = parse_adjacency(object_table(graph["edges"]))
        for twin in (
            AdjacencySpec.from_dict(json.loads(json.dumps(spec.to_dict()))),
            pickle.loads(pickle.dumps(spec)),
            parse_adjacency(spec.to_edgelist()),
        ):
            assert twin == spec
            assert hash(twin) == hash(spec)
            assert twin.fingerprint == spec.fingerprint


def test_spec_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        parse_adjacency(table(FEEDBACK)).nodes = ()


def test_edge_location_finds_every_edge_and_no_other():
    spec = parse_adjacency(table(FEEDBACK))
    for source in spec.nodes:
        for target in spec.nodes:
            if (source, target) in FEEDBACK:
                (place,) = spec.edge_location(source, target)
                assert spec.nodes[spec.source_index[place]] == source
                assert spec.nodes[spec.target_index[place]] == target
            else:
                with pytest.raises(Kpnn2Error, match=rf"{source}.*{target}.*no edge joins"):
                    spec.edge_location(source, target)


@pytest.mark.parametrize(
    ("edge", "unknown"), [(("q", "a"), "'q'"), (("a", "zz"), "'zz'"), ((1, "a"), "1"), (("", "a"), "''")]
)
def test_edge_location_names_the_unknown_node(edge, unknown):
    with pytest.raises(Kpnn2Error, match=f"no node {unknown}"):
        parse_adjacency(table(FEEDBACK)).edge_location(*edge)


# ---------------------------------------------------------------------- refusals

REFUSED = {
    "not a table": ({"source": ["a"], "target": ["b"]}, "expected a pandas DataFrame"),
    "nothing": (None, "expected a pandas DataFrame"),
    "column missing": (pd.DataFrame({"source": ["a"], "to": ["b"]}), "no column 'target' among 'source', 'to'"),
    "column twice": (
        pd.DataFrame([["a", "b", "c"]], columns=["source", "target", "target"]),
        "more than one column 't",
    ),
    "no rows": (pd.DataFrame({"source": [], "target": []}), "no rows"),
    "None": (object_table([("a", "b"), (None, "c")]), "missing names in column 'source', row 1"),
    "NaN": (object_table([("a", "b"), ("c", np.nan)]), "missing names in column 'target', row 1"),
    "NA": (table([(1, 2), (None, 3)], dtype="Int64"), "missing names in column 'source', row 1"),
    "empty": (table([("a", "b"), ("", "c")]), "empty name in column 'source', row 1"),
    "list": (object_table([("a", "b"), (["c"], "d")]), r"\['c'\] \(list\) in column 'source', row 1; a name is text"),
    "bytes": (object_table([("a", b"b")]), r"b'b' \(bytes\) in column 'target', row 0"),
    "decimal": (object_table([("a", Decimal(1))]), r"Decimal\('1'\).*row 0"),
    "date": (table([("a", "b")]).assign(target=pd.to_datetime(["2020-01-01"])), "Timestamp"),
    "complex": (table([(1j, 2)]), "complex"),
    "surrogate": (object_table([("a", "b\ud800")]), "surrogate"),
    "white space": (table([("a ", "b"), ("a", "c")]), "names 'a', 'a ' differ only by surrounding white space"),
    "white space across": (table([("a", "b"), ("b\u00a0", "c")]), "differ only by surrounding white space"),
    "zero width": (
        table([("a", "h\u200b"), ("b", "h")]),
        r"names look the same and differ: 'h' and 'h<U\+200B>'",
    ),
    "two spellings": (
        table([("a", "e\u0301"), ("b", "é")]),
        r"differ: 'e<U\+0301>' and '<U\+00E9>'; they look",
    ),
    "two alphabets": (table([("a", "\u0421D4"), ("b", "CD4")]), r"differ: 'CD4' and '<U\+0421>D4'"),
    "duplicate": (table([("a", "b"), ("a", "c"), ("a", "b")]), "duplicate edges 'a' -> 'b';"),
    "duplicate as text": (object_table([(1, "b"), ("1", "b")]), "duplicate edges '1' -> 'b';"),
    "no input": (table([("a", "b"), ("b", "a"), ("a", "y")]), "no input node"),
    "no output": (table([("x", "a"), ("a", "a")]), "no output node"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_table_is_refused_with_its_own_message(case):
    frame, message = REFUSED[case]
    with pytest.raises(Kpnn2Error, match=message) as refusal:
        parse_adjacency(frame)
    assert str(refusal.value).startswith("edgelist: ")
    assert "\n" not in str(refusal.value)


PAYLOAD = {"kpnn2_spec": 1, "layout": "adjacency", "edges": [["a", "b"]]}


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        ([1], "expected the dict"),
        ({**PAYLOAD, "kpnn2_spec": 2}, r"'kpnn2_spec': got 2 \(int\)"),
        ({"layout": "adjacency", "edges": []}, "'kpnn2_spec': got nothing"),
        ({**PAYLOAD, "layout": "layered"}, "'layout': got 'layered'"),
        ({**PAYLOAD, "edges": None}, "'edges': got None"),
        ({**PAYLOAD, "edges": "ab"}, "'edges': got 'ab'"),
        ({**PAYLOAD, "edges": [["a", "b"], ["c"]]}, r"'edges': got \['c'\] \(list\) at 1"),
        ({**PAYLOAD, "edges": ["ab"]}, "'edges': got 'ab'"),
        ({**PAYLOAD, "edges": []}, "no rows"),
        ({**PAYLOAD, "edges": [["a", "b"], ["a", "b"]]}, "duplicate"),
        ({**PAYLOAD, "edges": [["a", None]]}, "missing"),
    ],
)
def test_bad_payload_is_refused(payload, message):
    with pytest.raises(Kpnn2Error, match=message):
        AdjacencySpec.from_dict(payload)


def test_long_lists_of_offenders_are_cut_short():
    edges = [(f"n{i}", "t") for i in range(2000)]
    with pytest.raises(Kpnn2Error, match="and 1995 more") as refusal:
        parse_adjacency(table(edges + edges))
    assert len(str(refusal.value)) < 300


# ---------------------------------------------------------------------- scale


def test_million_edges_are_parsed_without_a_python_call_for_each():
    n_nodes, nnz = 50_000, 1_000_000
    pairs = np.random.default_rng(0).choice(n_nodes * n_nodes, nnz, replace=False)
    names = np.char.add("g", np.arange(n_nodes + 2).astype(str)).astype(object)
    source, target = pairs // n_nodes, pairs % n_nodes
    source[0], target[0], source[1], target[1] = n_nodes, 0, 0, n_nodes + 1  # an input and an output
    frame = pd.DataFrame({"source": names[source], "target": names[target]})
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += 1

    sys.setprofile(count)
    try:
        spec = parse_adjacency(frame)
    finally:
        sys.setprofile(None)
    assert calls < 10_000  # neither one an edge nor one a node
    named = np.array(spec.nodes, dtype=object)
    read = pd.DataFrame({"source": named[list(spec.source_index)], "target": named[list(spec.target_index)]})
    assert read.equals(frame.sort_values(["source", "target"], ignore_index=True))
