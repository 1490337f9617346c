"""A user's table on a named graph: matched by name, split without leaks, scaled by training rows, or refused."""

import importlib.util
import json
import sys
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonargparse import ArgumentParser

from datamodules.sources.breast_cancer import breast_cancer_edges, breast_cancer_table
from datamodules.splits import split_rows
from datamodules.table_files import read_table
from datamodules.table_labels import decide_problem, sort_classes
from datamodules.tables import GraphTableDataModule
from zoo.checkpoint.identity import digest
from zoo.errors import CheckpointMismatchError, Kpnn2Error, ZooError
from zoo.graph import AdjacencySpec, parse_adjacency

INPUTS = ["a", "b", "c"]
EDGES = pd.DataFrame([("a", "h"), ("b", "h"), ("c", "h"), ("h", "out")], columns=["source", "target"])


def make_table(n=40, seed=0, **columns):
    """Columns c, a, b (not the graph's order), a label y, and whatever else."""
    random = np.random.default_rng(seed)
    frame = pd.DataFrame({name: random.normal(i, i + 1, n) for i, name in enumerate(["c", "a", "b"])})
    frame["y"] = np.where(np.arange(n) % 4 == 0, "sick", "well")
    return frame.assign(**columns)


def ready(features=None, stage="fit", edges=EDGES, label="y", **options):
    if features is None:
        features = make_table()
    data = GraphTableDataModule(features, edges, label, **options)
    data.setup(stage)
    return data


def gather(loader):
    """All batches as one: values, target, ids."""
    batches = list(loader)
    values = torch.cat([batch["values"] for batch in batches])
    target = torch.cat([batch["target"] for batch in batches]) if "target" in batches[0] else None
    return values, target, [name for batch in batches for name in batch["id"]]


def everything(data):
    return {split: gather(getattr(data, f"{split}_dataloader")()) for split in ("train", "val", "test")}


def rows_of(data):
    return {split: set(map(int, ids)) for split, (_, _, ids) in everything(data).items()}


def same_batches(one, other):
    for split, (values, target, ids) in everything(one).items():
        values2, target2, ids2 = everything(other)[split]
        assert ids == ids2
        assert torch.equal(target, target2)
        torch.testing.assert_close(values, values2, rtol=0, atol=0, equal_nan=True)


def save_checkpoint(path, identity, data=None):
    claim = {
        "identity": identity,
        "digest": digest(identity),
        "task": "zoo.tasks.graph.GraphPredictionTask",
        "settings": {},
        "data": data,
        "step_seed": 0,
    }
    torch.save({"zoo": claim, "state_dict": {}}, path)
    return str(path)


# ---------------------------------------------------------------------- what is embedded


def test_default_is_the_breast_cancer_table_on_the_graph_of_its_column_names():
    data = GraphTableDataModule()
    data.setup("fit")
    identity = data.identity()
    assert identity["classes"] == ["benign", "malignant"]
    assert identity["problem"] == "binary"
    assert identity["targets"] == ["diagnosis"]
    assert len(identity["inputs"]) == 30
    assert identity["source"]["rows"] == 569
    values, target, ids = gather(data.train_dataloader())
    malignant = breast_cancer_table()["diagnosis"] == "malignant"
    assert target.tolist() == [float(malignant[int(i)]) for i in ids]
    assert sum(malignant) == 212
    assert values.dtype == target.dtype == torch.float32


def test_breast_cancer_graph_leads_from_measurements_over_features_and_groups_to_the_diagnosis():
    spec = parse_adjacency(breast_cancer_edges())
    assert spec.output_nodes == ("diagnosis",)
    assert set(spec.input_nodes) == set(breast_cancer_table().columns) - {"diagnosis"}
    assert len(spec.source_index) == 30 + 10 + 3
    for edge in [("worst radius", "radius"), ("radius", "size"), ("size", "diagnosis"), ("radius error", "radius")]:
        assert spec.edge_location(*edge)
    assert spec.edge_location("fractal dimension", "shape")
    assert spec.edge_location("smoothness", "surface")


# ---------------------------------------------------------------------- matching


@given(st.permutations(["c", "a", "b", "y", "row"]), st.permutations(range(4)))
@settings(deadline=None, max_examples=25)
def test_order_of_columns_and_of_edges_never_matters(columns, edges):
    frame = make_table(row=[f"r{i}" for i in range(40)])
    frame.loc[3, "a"] = np.nan
    one = ready(frame, id_column="row")
    other = ready(frame[columns], edges=EDGES.iloc[list(edges)], id_column="row")
    assert one.identity() == other.identity()
    assert one.digest == other.digest
    same_batches(one, other)


def test_values_stand_in_the_order_of_the_input_nodes():
    frame = make_table(a=1.0, b=2.0, c=3.0)
    data = ready(frame, standardise=False)
    assert data.identity()["inputs"] == INPUTS
    assert gather(data.test_dataloader())[0].unique(dim=0).tolist() == [[1.0, 2.0, 3.0]]


def test_unmatched_columns_and_unmeasured_nodes_are_used_as_the_user_decides():
    frame = make_table(note="text", h=1.0).drop(columns="b")
    data = ready(frame, unmatched_columns="ignore", unmeasured_nodes="missing")
    values = gather(data.train_dataloader())[0]
    assert torch.isnan(values[:, 1]).all()
    assert not torch.isnan(values[:, [0, 2]]).any()
    assert (data.identity()["mean"][1], data.identity()["std"][1]) == (0.0, 1.0)


# ---------------------------------------------------------------------- standardisation


@given(
    seed=st.integers(0, 10_000),
    n=st.integers(20, 60),
    scale_and_shift=st.sampled_from([(1e-6, 0.0), (1.0, -3.0), (1.0, 1e9), (1e100, 0.0)]),
)
@settings(deadline=None, max_examples=25)
def test_scaling_is_numpys_over_the_measured_training_rows_alone(seed, n, scale_and_shift):
    frame = make_table(n, seed)
    scale, shift = scale_and_shift
    frame[INPUTS] = frame[INPUTS] * scale + shift
    frame[INPUTS] = frame[INPUTS].mask(np.random.default_rng(seed).random((n, 3)) < 0.2)
    data = ready(frame, split_seed=seed)
    train = sorted(rows_of(data)["train"])
    table = frame[INPUTS].to_numpy()
    # numpy rounds after every addition; beside a shift of 1e9 that is 1e-7 of a deviation of 1
    mean, std = np.nanmean(table[train], axis=0), np.nanstd(table[train], axis=0)
    np.testing.assert_allclose(data.identity()["mean"], mean, rtol=1e-9, atol=1e-12 * scale)
    np.testing.assert_allclose(data.identity()["std"], std, rtol=1e-9)
    for values, _, ids in everything(data).values():
        rows = list(map(int, ids))
        expected = (table[rows] - data.identity()["mean"]) / data.identity()["std"]
        np.testing.assert_array_equal(values.numpy(), expected.astype(np.float32))


def test_held_out_rows_leave_no_trace_in_the_scaling():
    frame = make_table()
    one = ready(frame)
    rows = rows_of(one)
    frame.loc[sorted(rows["val"] | rows["test"]), INPUTS] = 1e6
    two = ready(frame)
    assert rows_of(two) == rows
    assert one.identity()["mean"] == two.identity()["mean"]
    assert one.identity()["std"] == two.identity()["std"]


def test_scaling_is_the_same_to_the_last_bit_in_any_order_of_rows():
    frame = make_table(1000, part=["train"] * 980 + ["val", "test"] * 10)
    one = ready(frame, split_column="part").identity()
    two = ready(frame.sample(frac=1, random_state=0), split_column="part").identity()
    assert one["mean"] == two["mean"]
    assert one["std"] == two["std"]


def test_constant_columns_get_deviation_one_and_missing_values_stay_missing():
    frame = make_table(a=0.1)
    frame.loc[5, "b"] = np.nan
    data = ready(frame)
    assert data.identity()["std"][0] == 1.0
    for values, _, ids in everything(data).values():
        assert torch.equal(values[:, 0], torch.zeros(len(ids)))
        assert values.isnan().nonzero().tolist() == ([[ids.index("5"), 1]] if "5" in ids else [])


def test_without_standardising_numbers_stay_as_they_are():
    frame = make_table()
    data = ready(frame, standardise=False)
    values, _, ids = gather(data.val_dataloader())
    np.testing.assert_array_equal(values.numpy(), frame.loc[list(map(int, ids)), INPUTS].to_numpy(np.float32))
    assert data.identity()["mean"] == [0.0] * 3
    assert data.identity()["std"] == [1.0] * 3


def test_regression_targets_are_in_units_of_the_training_rows():
    frame = make_table(y=np.linspace(100.0, 300.0, 40))
    data = ready(frame)
    identity = data.identity()
    assert identity["problem"] == "regression"
    assert "classes" not in identity
    train = sorted(rows_of(data)["train"])
    assert identity["target_mean"] == pytest.approx(frame["y"][train].mean(), rel=1e-12)
    assert identity["target_std"] == pytest.approx(frame["y"][train].std(ddof=0), rel=1e-12)
    _, target, ids = gather(data.test_dataloader())
    restored = target.double() * identity["target_std"] + identity["target_mean"]
    np.testing.assert_allclose(restored, frame["y"][list(map(int, ids))], rtol=1e-6)  # float32
    assert target.dtype == torch.float32


# ---------------------------------------------------------------------- labels


@pytest.mark.parametrize(
    ("values", "problem", "classes", "dtype"),
    [
        (["no", "yes"] * 20, "binary", ["no", "yes"], torch.float32),
        ([True, False] * 20, "binary", ["False", "True"], torch.float32),
        ([7, 3] * 20, "binary", ["3", "7"], torch.float32),
        (["b", "a", "c", "a"] * 10, "multiclass", ["a", "b", "c"], torch.int64),
        ([10, 9, 2, 1] * 10, "multiclass", ["1", "2", "9", "10"], torch.int64),
        (pd.Categorical(["low", "high"] * 20), "binary", ["high", "low"], torch.float32),
        (np.linspace(0, 1, 40), "regression", None, torch.float32),
    ],
)
def test_problem_and_classes_follow_from_the_label(values, problem, classes, dtype):
    data = ready(make_table(y=values), val_fraction=0.2, test_fraction=0.2)
    assert data.identity()["problem"] == problem
    assert data.identity().get("classes") == classes
    _, target, ids = gather(data.train_dataloader())
    assert target.dtype == dtype
    assert target.shape == (len(ids),)
    if classes:
        assert [classes[int(t)] for t in target] == [str(values[int(i)]) for i in ids]
        counts = data.identity()["source"]["class_counts"]
        assert list(counts) == classes
        assert counts == {name: target.tolist().count(i) for i, name in enumerate(classes)}


def test_several_flags_are_a_multilabel_problem():
    random = np.random.default_rng(0)
    frame = make_table(p=random.integers(0, 2, 40), q=random.random(40) < 0.5, r=random.integers(0, 2, 40) * 1.0)
    data = ready(frame.drop(columns="y"), label=["p", "q", "r"])
    assert data.identity()["problem"] == "multilabel"
    assert data.identity()["targets"] == ["p", "q", "r"]
    _, target, ids = gather(data.train_dataloader())
    expected = frame.loc[list(map(int, ids)), ["p", "q", "r"]].to_numpy(np.float32)
    assert target.dtype == torch.float32
    np.testing.assert_array_equal(target.numpy(), expected)
    counts = data.identity()["source"]["class_counts"]
    assert counts == dict(zip("pqr", expected.sum(0).astype(int).tolist(), strict=True))


def test_a_stated_problem_overrules_the_look_of_the_label():
    frame = make_table(y=[0, 1] * 20)
    assert ready(frame, problem="regression").identity()["problem"] == "regression"
    assert ready(frame, problem="multiclass").identity()["classes"] == ["0", "1"]
    assert ready(frame, problem="multilabel").identity()["targets"] == ["y"]
    assert ready(make_table(y=[0.0, 1.0] * 20), problem="binary").identity()["classes"] == ["0", "1"]
    assert ready(make_table(n=120, y=list(range(60)) * 2), problem="regression").identity()["problem"] == "regression"


def test_what_was_decided_is_said(caplog):
    with caplog.at_level("INFO"):
        ready()
    assert "data.problem: binary, from the label 'y' (2 text values)" in caplog.text
    assert "28 train, 6 val, 6 test rows; 3 inputs" in caplog.text


def test_whole_numbers_sort_by_size_and_other_names_as_text():
    assert sort_classes(["10", "9", "-1"]) == ["-1", "9", "10"]
    assert sort_classes(["b10", "b9", "1"]) == ["1", "b10", "b9"]


# ---------------------------------------------------------------------- splits


@given(seed=st.integers(0, 1000), counts=st.lists(st.integers(8, 60), min_size=2, max_size=5))
@settings(deadline=None, max_examples=40)
def test_split_is_complete_stratified_and_repeatable(seed, counts):
    classes = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(counts)), counts))
    n = len(classes)
    splits = split_rows(n, 0.2, 0.2, seed, classes)
    assert (splits == split_rows(n, 0.2, 0.2, seed, classes)).all()
    assert np.bincount(splits).tolist() == [n - 2 * round(0.2 * n), round(0.2 * n), round(0.2 * n)]
    for number, count in enumerate(counts):
        shares = np.bincount(splits[classes == number], minlength=3)
        # each of the two divisions rounds to whole rows
        assert abs(shares[2] - 0.2 * count) <= 1
        assert abs(shares[1] - 0.2 * count) <= 2


def test_another_seed_gives_another_split():
    assert rows_of(ready(split_seed=0)) != rows_of(ready(split_seed=1))


@given(
    seed=st.integers(0, 1000),
    n_groups=st.integers(5, 30),
    kind=st.sampled_from(["binary", "regression"]),
    fraction=st.sampled_from([0.1, 0.15, 0.3]),
)
@settings(deadline=None, max_examples=40)
def test_no_group_comes_into_two_splits(seed, n_groups, kind, fraction):
    random = np.random.default_rng(seed)
    n = 120
    groups = np.concatenate([np.arange(n_groups), random.integers(0, n_groups, n - n_groups)]).astype(object)
    classes = random.integers(0, 2, n) if kind == "binary" else None
    splits = split_rows(n, fraction, fraction, seed, classes, groups)
    assert (splits == split_rows(n, fraction, fraction, seed, classes, groups)).all()
    found = [set(groups[splits == split]) for split in range(3)]
    assert all(found)
    assert sum(map(len, found)) == n_groups
    assert len(found[0]) > max(len(found[1]), len(found[2])) or fraction == 0.3


def test_group_column_is_used_and_is_no_measurement():
    frame = make_table(120, patient=np.repeat([f"{i:02}" for i in range(30)], 4))
    frame["y"] = np.where(np.arange(120) // 4 % 3 == 0, "sick", "well")
    rows = rows_of(ready(frame, group_column="patient"))
    patients = [{frame["patient"][row] for row in rows[split]} for split in rows]
    assert sum(map(len, patients)) == 30
    assert all(10 <= len(rows[split]) <= 30 for split in ("val", "test"))


def test_one_large_group_stays_in_training():
    groups = np.array(["big"] * 80 + [f"g{i}" for i in range(20)], dtype=object)
    classes = np.arange(100) % 2
    for seed in range(5):
        splits = split_rows(100, 0.15, 0.15, seed, classes, groups)
        assert (splits[:80] == 0).all()


def test_split_column_decides_every_row():
    wanted = ["train"] * 20 + ["val"] * 12 + ["test"] * 8
    rows = rows_of(ready(make_table(part=wanted), split_column="part"))
    assert rows == {"train": set(range(20)), "val": set(range(20, 32)), "test": set(range(32, 40))}


# ---------------------------------------------------------------------- loaders


def test_training_order_changes_with_the_epoch_alone_and_keeps_the_last_partial_batch():
    data = ready(batch_size=10)
    first, again = data.train_dataloader(), data.train_dataloader()
    ids = gather(first)[2]
    assert [len(batch["id"]) for batch in first] == [10, 10, 8]
    torch.manual_seed(5)
    assert gather(again)[2] == ids
    again.order.set_epoch(1)
    assert gather(again)[2] != ids
    assert sorted(gather(again)[2]) == sorted(ids)


def test_training_goes_on_in_the_middle_of_an_epoch():
    loader = ready(batch_size=5).train_dataloader()
    expected = gather(loader)[2]
    iterator = iter(loader)
    seen = [name for _ in range(2) for name in next(iterator)["id"]]
    resumed = ready(batch_size=5).train_dataloader()
    resumed.load_state_dict(loader.state_dict())
    assert seen + gather(resumed)[2] == expected


def test_held_out_rows_come_in_order_and_predict_has_no_target():
    data = ready(make_table(name=[f"p{i}" for i in range(40)]), id_column="name", stage="predict")
    _, _, ids = gather(data.test_dataloader())
    assert ids == sorted(ids, key=lambda name: int(name[1:]))
    values, target, predicted = gather(data.predict_dataloader())
    assert target is None
    assert predicted == ids
    assert torch.equal(values, gather(data.test_dataloader())[0])


def test_a_table_to_predict_needs_no_label_and_is_scaled_as_the_training_rows(tmp_path):
    asked = make_table(5, seed=9).drop(columns="y")[["b", "c", "a"]]
    asked.loc[:, "c"] = np.nan  # not measured in any of these rows: missing, nothing to refuse
    asked.to_csv(tmp_path / "new.csv", index=False)
    data = ready(stage="predict", predict_features=str(tmp_path / "new.csv"))
    values, target, ids = gather(data.predict_dataloader())
    assert target is None
    assert ids == ["0", "1", "2", "3", "4"]
    expected = (asked[INPUTS] - data.identity()["mean"]) / data.identity()["std"]
    torch.testing.assert_close(values.double(), torch.tensor(expected.to_numpy()), rtol=1e-6, atol=1e-6, equal_nan=True)


def test_lightning_calls_it_as_it_likes():
    class Count(pl.LightningModule):
        seen = 0

        def training_step(self, batch, index):
            self.seen += len(batch["id"])

        def validation_step(self, batch, index):
            assert batch["values"].shape[1] == 3

        test_step = validation_step

        def predict_step(self, batch, index):
            return batch["id"]

        def configure_optimizers(self):
            return None

    data = ready(batch_size=9)
    trainer = pl.Trainer(
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
    )
    module = Count()
    trainer.fit(module, data)
    assert module.seen == 2 * 28
    trainer.test(module, data, verbose=False)
    assert sum(map(len, trainer.predict(module, data))) == 6


# ---------------------------------------------------------------------- files


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".parquet"])
def test_a_file_gives_the_batches_of_its_table(tmp_path, suffix):
    if suffix == ".parquet":
        pytest.importorskip("pyarrow", reason="Parquet is read by pyarrow, of the extra bio")
    frame = make_table(key=[f"{i:03}" for i in range(40)])
    frame.loc[7, "b"] = np.nan
    features, edges = tmp_path / f"t{suffix}", tmp_path / f"e{suffix}"
    for table, path in ((frame, features), (EDGES, edges)):
        if suffix == ".parquet":
            table.to_parquet(path)
        else:
            table.to_csv(path, index=False, sep={".csv": ",", ".tsv": "\t"}[suffix])
    one = ready(str(features), edges=str(edges), id_column="key")
    two = ready(frame, id_column="key")
    same_batches(one, two)
    assert gather(one.test_dataloader())[2][0].startswith("0"), "leading zeros of an id are kept"
    first, second = one.identity(), two.identity()
    assert first.pop("source")["name"] == f"t{suffix}"
    second.pop("source")
    assert first == second


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("sparse", [False, True])
def test_h5ad_gives_genes_as_columns_and_obs_as_labels(tmp_path, sparse):
    anndata = pytest.importorskip("anndata", reason=".h5ad is read by anndata, of the extra bio")
    from scipy.sparse import csr_matrix

    frame = make_table()
    values = frame[["c", "a", "b"]].to_numpy(np.float32)
    names = [f"cell{i}" for i in range(40)]
    obs = pd.DataFrame({"y": pd.Categorical(frame["y"]), "other": 1.0}, index=names)
    cells = anndata.AnnData(csr_matrix(values) if sparse else values, obs, pd.DataFrame(index=["c", "a", "b"]))
    cells.write_h5ad(tmp_path / "t.h5ad")
    one = ready(str(tmp_path / "t.h5ad"))
    two = ready(frame.assign(name=names, **frame[INPUTS].astype(np.float32)), id_column="name")
    same_batches(one, two)
    assert one.identity()["classes"] == ["sick", "well"]
    with pytest.raises(ZooError, match=r"data\.label: got 'z', but t\.h5ad has the columns 'y', 'other'; name one"):
        ready(str(tmp_path / "t.h5ad"), label="z")


def test_pbmc_cells_of_scanpy_are_found_by_name():
    pytest.importorskip("anndata", reason=".h5ad is read by anndata, of the extra bio")
    if importlib.util.find_spec("scanpy") is None:
        pytest.skip("the cells come with scanpy, of the extra bio")
    edges = Path(__file__).parents[2] / "configs" / "graph" / "pbmc_edges.csv"
    data = ready("pbmc68k_reduced", edges=str(edges), label="bulk_labels")
    assert len(data.identity()["classes"]) == 10
    assert len(data.identity()["inputs"]) == 765
    assert {name: len(rows[2]) for name, rows in everything(data).items()} == {"train": 490, "val": 105, "test": 105}
    assert "scanpy" not in sys.modules


def test_pbmc_example_graph_is_made_of_training_cells_alone():
    pytest.importorskip("anndata", reason=".h5ad is read by anndata, of the extra bio")
    if importlib.util.find_spec("scanpy") is None:
        pytest.skip("the cells come with scanpy, of the extra bio")
    root = Path(__file__).parents[2]
    found = importlib.util.spec_from_file_location("make_pbmc_edges", root / "benchmarks" / "make_pbmc_edges.py")
    script = importlib.util.module_from_spec(found)
    found.loader.exec_module(script)
    table = read_table("pbmc68k_reduced", "data.features")
    trained = script.training_cells(table)
    shipped = root / "configs" / "graph" / "pbmc_edges.csv"
    data = ready("pbmc68k_reduced", edges=str(shipped), label="bulk_labels")
    names = set(gather(data.train_dataloader())[2])
    assert names == {name for name, used in zip(table.row_names, trained, strict=True) if used}
    made = script.module_edges(table.take(table.columns).to_numpy()[trained], table.columns)
    assert made.values.tolist() == pd.read_csv(shipped, keep_default_na=False).values.tolist()


def test_the_command_line_takes_a_file_by_its_name_not_by_its_content(tmp_path):
    (tmp_path / "t.csv").write_text("a,y\n1,2\n")
    parser = ArgumentParser()
    parser.add_class_arguments(GraphTableDataModule, "data")
    path = str(tmp_path / "t.csv")
    chosen = parser.parse_args(["--data.features", path, "--data.edges", path, "--data.label", "[y, z]"]).data
    assert (chosen.features, chosen.edges, chosen.label) == (path, path, ["y", "z"])


def test_a_dataframe_may_carry_its_ids_as_a_named_index():
    frame = make_table().set_index(pd.Index([f"r{i}" for i in range(40)], name="row"))
    same_batches(ready(frame, id_column="row"), ready(frame.reset_index(), id_column="row"))
    assert list(frame.columns) == ["c", "a", "b", "y"], "the user's table isn't touched"


def test_numbers_as_column_names_are_nodes_of_that_name():
    frame = make_table().rename(columns={"a": 1, "b": 2, "c": 3})
    edges = pd.DataFrame({"source": [1, 2, 3, "h"], "target": ["h", "h", "h", "out"]})
    assert ready(frame, edges=edges).identity()["inputs"] == ["1", "2", "3"]


@pytest.mark.parametrize(
    "column",
    [
        [1, 2] * 20,
        [True, False] * 20,
        ["1.5", "-2"] * 20,
        pd.array([1, None] * 20, dtype="Int64"),
        pd.array([True, None] * 20, dtype="boolean"),
        pd.Categorical([3, 4] * 20),
    ],
)
def test_every_kind_of_number_is_a_measurement(column):
    data = ready(make_table(a=column), standardise=False)
    values, _, ids = gather(data.train_dataloader())
    expected = [float("nan") if column[int(i)] is pd.NA else float(column[int(i)]) for i in ids]
    np.testing.assert_array_equal(values[:, 0].numpy(), expected)


# ---------------------------------------------------------------------- identity


def test_identity_survives_json_and_has_every_part():
    identity = ready().identity()
    assert json.loads(json.dumps(identity)) == identity
    assert identity["kind"] == "table"
    assert identity["graph"]["edges"] == [["a", "h"], ["b", "h"], ["c", "h"], ["h", "out"]]
    assert identity["graph"]["fingerprint"] == parse_adjacency(EDGES).fingerprint
    assert AdjacencySpec.from_dict(identity["graph"]) == parse_adjacency(EDGES)
    assert all(type(number) is float for number in identity["mean"] + identity["std"])
    assert identity["source"] == {
        "name": "DataFrame",
        "rows": 40,
        "sha256": identity["source"]["sha256"],
        "train_rows": 28,
        "class_counts": {"sick": 7, "well": 21},
    }
    regression = ready(make_table(y=np.linspace(0, 1, 40))).identity()
    assert json.loads(json.dumps(regression)) == regression


def test_identity_differs_for_what_a_model_depends_on():
    base = ready().digest
    assert ready(split_seed=1).digest != base
    assert ready(make_table(y=["sick", "ill"] * 20)).digest != base
    assert ready(edges=pd.concat([EDGES, pd.DataFrame({"source": ["a"], "target": ["out"]})])).digest != base


def test_settings_stay_plain_with_tables_in_memory():
    hparams = dict(ready().hparams)
    assert hparams["features"] == hparams["edges"] == "<DataFrame>"
    assert json.dumps(hparams)
    with pytest.raises(ZooError, match=r"table was a DataFrame, which it doesn't hold; name a file with data.features"):
        GraphTableDataModule("<DataFrame>", EDGES, "y").setup("fit")


# ---------------------------------------------------------------------- a checkpoint instead of graph and training rows


@pytest.fixture
def checkpoint(tmp_path):
    data = ready(make_table(seed=1))
    settings = {"class_path": "datamodules.tables.GraphTableDataModule", "init_args": dict(data.hparams)}
    return save_checkpoint(tmp_path / "model.ckpt", data.identity(), settings)


def trained_identity():
    return ready(make_table(seed=1)).identity()


@pytest.mark.parametrize("stage", ["validate", "test"])
def test_another_table_is_evaluated_whole_with_the_checkpoints_graph_classes_and_scaling(checkpoint, stage):
    frame = make_table(3, seed=2)[["y", "b", "a", "c"]].assign(y=["well", "well", "sick"])
    data = GraphTableDataModule(frame, from_checkpoint=checkpoint)
    data.setup(stage)
    saved, here = trained_identity(), data.identity()
    assert here["source"].pop("name") == "DataFrame"
    assert here["source"]["rows"] == 3
    assert here["source"]["class_counts"] == saved["source"]["class_counts"], "the loss's weights stay"
    assert {**here, "source": None} == {**saved, "source": None}
    for loader in (data.val_dataloader(), data.test_dataloader()):
        values, target, _ = gather(loader)
        assert target.tolist() == [1.0, 1.0, 0.0]
        expected = (frame[INPUTS] - saved["mean"]) / saved["std"]
        np.testing.assert_array_equal(values.numpy(), expected.to_numpy().astype(np.float32))
    with pytest.raises(ZooError, match="taken whole for evaluation"):
        data.train_dataloader()


def test_the_checkpoints_own_table_is_split_as_it_was(checkpoint):
    data = GraphTableDataModule(make_table(seed=1), from_checkpoint=checkpoint)
    data.setup("test")
    assert rows_of(data) == rows_of(ready(make_table(seed=1)))


def test_the_checkpoints_own_table_in_another_split_is_warned_of(checkpoint):
    with pytest.warns(UserWarning, match=r"split in another way \(data\.split_seed was 0\)"):
        GraphTableDataModule(make_table(seed=1), from_checkpoint=checkpoint, split_seed=3).setup("test")


def test_a_table_alone_is_predicted(checkpoint, tmp_path):
    frame = make_table(1, seed=3).drop(columns="y")
    frame.loc[0, "a"] = np.nan
    frame.to_csv(tmp_path / "one.csv", index=False)
    asked = GraphTableDataModule(predict_features=str(tmp_path / "one.csv"), from_checkpoint=checkpoint)
    given = GraphTableDataModule(str(tmp_path / "one.csv"), from_checkpoint=checkpoint)
    for data in (asked, given):
        data.setup("predict")
        values, target, ids = gather(data.predict_dataloader())
        assert target is None
        assert ids == ["0"]
        assert values.isnan().tolist() == [[True, False, False]]
        assert data.identity()["classes"] == ["sick", "well"]
        assert data.identity()["source"]["name"] == "one.csv"
    with pytest.raises(ZooError, match=r"data\.label: got 'y', but one\.csv has the columns"):
        given.setup("test")


@pytest.mark.parametrize("label", [None, "never seen"])
def test_labels_of_a_table_to_predict_are_not_looked_at(checkpoint, label):
    data = GraphTableDataModule(make_table(4, seed=3).assign(y=label), from_checkpoint=checkpoint)
    data.setup("predict")
    assert gather(data.predict_dataloader())[2] == ["0", "1", "2", "3"]


def test_only_test_rows_of_a_split_column_are_evaluated_and_predicted(checkpoint):
    frame = make_table(8, seed=3).assign(part=["train", "test"] * 4)
    for stage in ("test", "predict"):
        data = GraphTableDataModule(frame, from_checkpoint=checkpoint, split_column="part")
        data.setup(stage)
        assert gather(getattr(data, f"{stage}_dataloader")())[2] == ["1", "3", "5", "7"]
    data = GraphTableDataModule(frame.drop(columns="part"), from_checkpoint=checkpoint, split_column="part")
    data.setup("predict")
    assert len(gather(data.predict_dataloader())[2]) == 8
    with pytest.raises(ZooError, match=r"data\.split_column: got 'part', but DataFrame has the columns"):
        data.setup("test")


def test_fitting_on_another_table_splits_it_and_keeps_the_scaling(checkpoint):
    data = GraphTableDataModule(make_table(60, seed=4), from_checkpoint=checkpoint)
    data.setup("test")
    data.setup("fit")
    assert {name: len(rows) for name, rows in rows_of(data).items()} == {"train": 42, "val": 9, "test": 9}
    assert data.identity()["mean"] == trained_identity()["mean"]
    assert data.identity()["source"]["class_counts"] == {"sick": 11, "well": 31}
    data.setup("test")
    assert len(gather(data.test_dataloader())[2]) == 9, "what was trained on isn't evaluated"


def test_regression_keeps_the_checkpoints_units(tmp_path):
    data = ready(make_table(y=np.linspace(100.0, 300.0, 40)))
    path = save_checkpoint(tmp_path / "r.ckpt", data.identity())
    other = GraphTableDataModule(make_table(2, y=[200, 300]), from_checkpoint=path)
    other.setup("test")
    _, target, _ = gather(other.test_dataloader())
    expected = (np.array([200, 300]) - data.identity()["target_mean"]) / data.identity()["target_std"]
    np.testing.assert_allclose(target, expected, rtol=1e-6)  # float32
    with pytest.raises(ZooError, match=r"data\.label: the numbers are too large for float32"):
        GraphTableDataModule(make_table(2, y=[1.0, 1e60]), from_checkpoint=path).setup("test")


def test_a_checkpoint_of_something_else_or_at_odds_with_the_arguments_is_refused(checkpoint, trained, tmp_path):
    frame = make_table(4, seed=2)
    altered = save_checkpoint(tmp_path / "altered.ckpt", {**trained_identity(), "inputs": ["b", "a", "c"]})
    lacking = save_checkpoint(tmp_path / "lacking.ckpt", {"kind": "table"})
    rewired = pd.concat([EDGES, pd.DataFrame({"source": ["a"], "target": ["out"]})])
    for options, kind, message in [
        ({"from_checkpoint": str(trained)}, ZooError, r"data\.from_checkpoint: .* was trained on text, not on a table"),
        ({"from_checkpoint": altered}, CheckpointMismatchError, r"inputs in .* aren't those of its graph"),
        ({"from_checkpoint": lacking}, ZooError, r"lacks 'graph', 'inputs', 'mean', 'problem', 'std' and 1 more"),
        ({"from_checkpoint": str(tmp_path / "no.ckpt")}, ZooError, r"there is no file"),
        ({"label": "z"}, ZooError, r"data\.label: got 'z', but .* predicts 'y'"),
        ({"problem": "regression"}, ZooError, r"data\.problem: got regression, but .* trained for binary"),
        ({"edges": rewired}, CheckpointMismatchError, r"data\.edges: another graph than that of"),
        ({"features": frame.assign(y="ill")}, ZooError, r"has the classes 'ill', which the checkpoint doesn't know"),
        ({"features": frame.drop(columns="b")}, ZooError, r"1 input nodes have no column: 'b'"),
    ]:
        with pytest.raises(kind, match=message) as raised:
            GraphTableDataModule(**{"features": frame, "from_checkpoint": checkpoint, **options}).setup("test")
        assert "\n" not in str(raised.value)
    same = GraphTableDataModule(frame, edges=EDGES.iloc[::-1], from_checkpoint=checkpoint)
    same.setup("test")


# ---------------------------------------------------------------------- bad input


def changed(row, column, value):
    frame = make_table().astype({column: object})
    frame.loc[row, column] = value
    return frame


def twice(column):
    frame = make_table()
    return pd.concat([frame, frame[[column]]], axis=1)


@pytest.mark.parametrize(
    ("frame", "options", "message"),
    [
        # columns and nodes
        (make_table(v=1.0, w=2.0), {}, r"data\.features: DataFrame: 2 columns have no input node: 'v', 'w'; rename"),
        (make_table(**{f"x{i}": 1.0 for i in range(8)}), {}, r"8 columns .*: 'x0', 'x1', 'x2', 'x3', 'x4' and 3 more"),
        (make_table(h=1.0), {}, r"have no input node: 'h' \('h': edges enter there, so it is no input\)"),
        (make_table().drop(columns="b"), {}, r"1 input nodes have no column: 'b'; add .*unmeasured_nodes to missing"),
        (make_table().rename(columns={"b": "B"}), {}, r"no input node: 'B'; .*And 1 input nodes have no column: 'b'"),
        (
            make_table()[["y"]].assign(x=1.0),
            {"unmatched_columns": "ignore", "unmeasured_nodes": "missing"},
            r"no column is named as an input node, such as 'a', 'b', 'c'",
        ),
        (twice("a"), {}, r"data\.features: the DataFrame has more than one column 'a'; rename"),
        (make_table(0), {}, r"data\.features: DataFrame has no rows"),
        # cells
        (changed(3, "b", "high"), {}, r"data\.features: DataFrame: column 'b' has 'high' in row '3'; it must hold"),
        (changed(3, "b", np.inf), {}, r"column 'b' is infinite in row '3'"),
        (changed(3, "b", -np.inf), {}, r"column 'b' is infinite in row '3'"),
        (make_table(b=1e300, c=[1e300, -1e300] * 20), {"standardise": False}, r"column 'b' has numbers too large"),
        (make_table(b=[1e308, -1e308] * 20), {}, r"column 'b' has numbers too large for float32"),
        (make_table(b=np.nan), {}, r"column 'b' has no number in any row; drop it"),
        (make_table(b=np.nan), {"standardise": False}, r"column 'b' has no number in any row; drop it"),
        (
            make_table(b=[np.nan] * 20 + [1.0] * 20, s=["train"] * 20 + ["val", "test"] * 10),
            {"split_column": "s"},
            r"column 'b' has no number in any row of the training split",
        ),
        (make_table(b=pd.Timestamp("2020-01-01")), {}, r"column 'b' has datetime64\[\w+\] values; they must be real"),
        (make_table(b=1j), {}, r"column 'b' has complex128 values"),
        # ids
        (make_table(i=["x", "x", *map(str, range(38))]), {"id_column": "i"},
         r"data\.id_column: DataFrame has more than one row named 'x'"),
        (make_table(i=[None, *range(39)]), {"id_column": "i"}, r"data\.id_column: DataFrame has no 'i' in row 0"),
        (make_table(), {"id_column": "nix"}, r"data\.id_column: got 'nix', but DataFrame has the columns 'c', 'a'"),
        # labels
        (make_table(), {"label": "nix"}, r"data\.label: got 'nix', but DataFrame has the columns"),
        (changed(4, "y", None), {}, r"data\.label: column 'y' is empty in 1 rows: '4'; fill in or drop them"),
        (make_table(), {"label": "a"}, r"data\.label: got 'a', which is also an input node of the graph"),
        (make_table(), {"label": ["y", "y"]}, r"data\.label: got \['y', 'y'\]; name one column, or several different"),
        (make_table(), {"label": []}, r"data\.label: got \[\]; name one column"),
        (make_table(y="same"), {}, r"data\.problem: got auto, but column 'y' has 1 different text values; say which"),
        (make_table(120, y=list(range(60)) * 2), {}, r"column 'y' has 60 different integer values; say which with"),
        (make_table(y=[1, "a"] * 20), {}, r"column 'y' has 2 different mixed-integer values; say which"),
        (make_table(p=0, q=2), {"label": ["p", "q"]}, r"the label columns 'q' hold more than 0 and 1; say which"),
        (make_table(y=list("abcd") * 10), {"problem": "binary"}, r"binary needs exactly 2 classes, .* 4: 'a', 'b'"),
        (make_table(y="a"), {"problem": "multiclass"}, r"multiclass needs at least 2 classes"),
        (make_table(), {"problem": "regression"}, r"got regression, but column 'y' has text values"),
        (make_table(y=np.linspace(0, 1, 40)), {"problem": "multiclass"}, r"column 'y' holds fractions"),
        (make_table(y=2), {"problem": "multilabel"}, r"column 'y' holds more than 0 and 1"),
        (make_table(z=1), {"label": ["y", "z"], "problem": "binary"}, r"got 'y', 'z'; binary takes one column"),
        (make_table(y=[np.inf] + [1.0] * 39), {}, r"data\.label: column 'y' is infinite in row '0'"),
        (make_table(y=1.5), {}, r"data\.label: 'y' is 1\.5 in every row of the training split"),
        (make_table(y=[1e308, -1e308] * 20), {}, r"data\.label: the numbers are too large"),
        (make_table(p=[0] * 40, q=[0, 1] * 20), {"label": ["p", "q"], "unmatched_columns": "ignore"},
         r"data\.label: 'p' is 0 in every row of the training split"),
        # splits
        (changed(0, "y", "odd"), {}, r"data\.label: the classes 'odd' have only 1 row; a class needs 2"),
        (make_table(8), {}, r"data\.test_fraction: got 0\.15, which makes 1 of 8 rows of 2 classes; at least 2 must"),
        (make_table(2, y=[0.5, 1.5]), {}, r"data\.val_fraction: got 0\.15, which makes 1 of 1 rows"),
        (make_table(s=["train"] * 39 + ["dev"]), {"split_column": "s"},
         r"data\.split_column: column 's' has 'dev' in row '39'; every row must have train, val or test"),
        (make_table(s=["train"] * 39 + [None]), {"split_column": "s"}, r"column 's' has \w+ in row '39'"),
        (make_table(s="test"), {"split_column": "s"}, r"data\.split_column: no row of 's' says train"),
        (make_table(s=["test", "train", "train", "train"] * 10), {"split_column": "s"},
         r"data\.label: no row of 'sick' is in the training split; give it more rows"),
        (make_table(), {"split_column": "s"}, r"data\.split_column: got 's', but DataFrame has the columns"),
        (make_table(), {"split_column": "y"}, r"data\.split_column: got 'y', which is also data\.label"),
        (make_table(), {"group_column": "b"}, r"data\.group_column: got 'b', which is also an input node"),
        (make_table(), {"group_column": "g"}, r"data\.group_column: got 'g', but DataFrame has the columns"),
        (make_table(g=[None] + [1] * 39), {"group_column": "g"}, r"data\.group_column: column 'g' is empty in row '0'"),
        (make_table(g=[1, 2] * 20), {"group_column": "g"}, r"data\.group_column: got 2 groups in 40 rows"),
        # graph
        (make_table(), {"edges": pd.concat([EDGES, EDGES[:1]])}, r"data\.edges: edgelist: duplicate edges 'a' -> 'h'"),
        (make_table(), {"edges": EDGES.rename(columns={"target": "to"})}, r"data\.edges: .*no column 'target'"),
    ],
)  # fmt: skip
def test_bad_tables_are_refused_in_one_line_that_names_the_argument(frame, options, message):
    with pytest.raises(ZooError, match=message) as raised:
        ready(frame, **options)
    assert "\n" not in str(raised.value)
    assert str(raised.value).startswith("data.")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.csv", b"", r"data\.features: .*t\.csv is empty"),
        ("t.csv", b"a,b,c,y\n", r"t\.csv has no rows"),
        ("t.csv", b"a,b,a,y\n1,2,3,x\n", r"t\.csv has more than one column 'a'"),
        ("t.csv", b"a,b,c,y\n1,2,3,x\n1,2,3,x,9\n", r"t\.csv line 3 has 5 cells, but the header has 4; mend"),
        ("t.csv", b"a,b,c,y\n1,2,3,x,9\n", r"t\.csv line 2 has 5 cells"),
        ("t.csv", b"a,b,c,y\n1,2,3,x\n1,2", r"t\.csv line 3 has 2 cells"),
        ("t.csv", b"a,b,c,y\n1,2,3,\xff\n", r"t\.csv has bytes that are no UTF-8, the first at offset 14; convert"),
        ("t.csv", b'a,b,c,y\n1,2,3,"x\n', r"t\.csv is no readable CSV \(unexpected end of data\)"),
        ("t.tsv", b'a\tb\n1\t"2"x\n', r"t\.tsv is no readable TSV"),
        ("t.parquet", b"PAR1 and no more", r"t\.parquet is no readable Parquet \(.*\); write it again"),
        ("t.h5ad", b"\x89HDF\r\n and no more", r"t\.h5ad is no readable \.h5ad \(.*\); write it again"),
        ("t.xlsx", b"x", r"got .*t\.xlsx; must be a \.csv, \.tsv, \.parquet, \.h5ad file"),
    ],
)
def test_bad_files_are_refused_in_one_line(tmp_path, name, content, message):
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow", reason="Parquet is read by pyarrow, of the extra bio")
    if name.endswith(".h5ad"):
        pytest.importorskip("anndata", reason=".h5ad is read by anndata, of the extra bio")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ZooError, match=message) as raised:
        ready(str(tmp_path / name))
    assert "\n" not in str(raised.value)


def test_missing_files_are_refused_by_the_argument_that_names_them(tmp_path):
    make_table().to_csv(tmp_path / "t.csv", index=False)
    with pytest.raises(ZooError, match=r"data\.features: there is no file nowhere\.csv; check the path"):
        ready("nowhere.csv")
    with pytest.raises(ZooError, match=r"data\.edges: there is no file nowhere\.csv; check the path"):
        ready(str(tmp_path / "t.csv"), edges="nowhere.csv")
    with pytest.raises(ZooError, match=r"data\.predict_features: there is no file nowhere\.csv; check the path"):
        ready(stage="predict", predict_features="nowhere.csv")
    (tmp_path / "t.h5ad").touch()
    with pytest.raises(ZooError, match=r"data\.edges: got .*t\.h5ad; must be a \.csv, \.tsv, \.parquet file"):
        ready(str(tmp_path / "t.csv"), edges=str(tmp_path / "t.h5ad"))


def test_a_bad_graph_file_is_named_with_its_fault(tmp_path):
    (tmp_path / "e.csv").write_text("source,target\na,h\na,h\nh,out\n")
    with pytest.raises(Kpnn2Error, match=r"data\.edges: .*e\.csv: edgelist: duplicate edges 'a' -> 'h'"):
        ready(edges=str(tmp_path / "e.csv"))


def test_names_of_nodes_are_taken_as_they_stand(tmp_path):
    (tmp_path / "e.csv").write_text("source,target\nNA,h\n007,h\nnull,h\nh,out\n")
    frame = make_table().rename(columns={"a": "NA", "b": "007", "c": "null"})
    assert ready(frame, edges=str(tmp_path / "e.csv")).identity()["inputs"] == ["007", "NA", "null"]


def test_a_split_that_is_needed_and_empty_is_refused():
    data = ready(make_table(s=["train", "train", "val", "val", "val"] * 8), split_column="s")
    with pytest.raises(ZooError, match=r"data\.split_column: no row of 's' says test; some must for this command"):
        data.test_dataloader()


def test_bad_tables_to_predict_are_refused_by_their_own_argument(tmp_path):
    make_table(3).assign(a="high").to_csv(tmp_path / "new.csv", index=False)
    with pytest.raises(ZooError, match=r"data\.predict_features: new\.csv: column 'a' has 'high' in row '0'"):
        ready(stage="predict", predict_features=str(tmp_path / "new.csv"))


@pytest.mark.parametrize(
    ("name", "blocked", "message"),
    [
        ("t.parquet", "pyarrow.parquet", r"data\.features: reading .*t\.parquet needs pyarrow; pip install"),
        ("t.h5ad", "anndata", r"data\.features: reading .*t\.h5ad needs anndata; pip install 'damcha-zoo\[bio\]'"),
    ],
)
def test_a_missing_package_is_named_with_how_to_install_it(tmp_path, monkeypatch, name, blocked, message):
    (tmp_path / name).touch()
    monkeypatch.setitem(sys.modules, blocked, None)
    with pytest.raises(ZooError, match=message):
        ready(str(tmp_path / name))


def test_missing_scanpy_is_named_with_how_to_install_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ZooError, match=r"got pbmc68k_reduced, .*pip install 'damcha-zoo\[bio\]'"):
        ready("pbmc68k_reduced")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"val_fraction": 0.0}, r"data\.val_fraction: got 0\.0; must lie between 0 and 0\.5"),
        ({"test_fraction": 0.5}, r"data\.test_fraction: got 0\.5"),
        ({"batch_size": 0}, r"data\.batch_size: got 0; must be at least 1"),
        ({"num_workers": -1}, r"data\.num_workers: got -1"),
        ({"split_seed": -1}, r"data\.split_seed: got -1"),
        ({"problem": "guess"}, r"data\.problem: got 'guess'; must be auto or binary or"),
        ({"unmatched_columns": "drop"}, r"data\.unmatched_columns: got 'drop'"),
        ({"unmeasured_nodes": "ignore"}, r"data\.unmeasured_nodes: got 'ignore'; must be error or missing"),
        ({"edges": None}, r"data\.edges: got none; name the file with the graph"),
        ({"label": None}, r"data\.label: got none; name the column to predict"),
    ],
)
def test_arguments_out_of_range_are_refused_by_name(options, message):
    with pytest.raises(ZooError, match=message):
        ready(**options)


def test_nothing_is_known_before_setup():
    data = GraphTableDataModule()
    with pytest.raises(ZooError, match="identity: not known before setup"):
        data.identity()
    with pytest.raises(ZooError, match="no data yet"):
        data.train_dataloader()


def test_decisions_about_a_label_are_the_documented_ones():
    assert decide_problem(pd.DataFrame({"y": list(range(50))})) == "multiclass"
    with pytest.raises(ZooError, match="51 different integer"):
        decide_problem(pd.DataFrame({"y": list(range(51))}))
    with pytest.raises(ZooError, match="51 different text"):
        decide_problem(pd.DataFrame({"y": [f"c{i}" for i in range(51)]}))
    assert decide_problem(pd.DataFrame({"y": [0.5, 1.0]})) == "regression"
    assert decide_problem(pd.DataFrame({"y": [0.0, 1.0]})) == "binary"
    with pytest.raises(ZooError, match="3 different whole float"):
        decide_problem(pd.DataFrame({"y": [0.0, 1.0, 2.0]}))
    assert decide_problem(pd.DataFrame({"y": np.arange(51.0)})) == "regression"
    assert decide_problem(pd.DataFrame({"y": [1e300, -1e300]})) == "regression"
