"""A label is the text it is, in whatever format; names that only look alike, and files that are something else, are
refused in one line."""

import gzip
from itertools import chain

import numpy as np
import pandas as pd
import pytest
import torch

from datamodules.tables import GraphTableDataModule
from tests.datamodules.test_tables import EDGES, gather, make_table, ready, rows_of, save_checkpoint
from zoo.errors import Kpnn2Error, ZooError

FORMATS = [".csv", ".tsv", ".parquet", ".h5ad", "DataFrame"]
NFD = "e\u0301"  # é in two code points


def written(frame, path):
    """The table in a file of any format, or as it is."""
    if path.suffix == ".parquet":
        pytest.importorskip("pyarrow", reason="Parquet is read by pyarrow, of the extra bio")
        frame.to_parquet(path)
    elif path.suffix == ".h5ad":
        anndata = pytest.importorskip("anndata", reason=".h5ad is read by anndata, of the extra bio")
        obs = frame.drop(columns=["a", "b", "c"]).astype("category").set_axis(list(map(str, frame.index)))
        values = frame[["c", "a", "b"]].to_numpy()
        anndata.AnnData(values, obs, pd.DataFrame(index=["c", "a", "b"])).write_h5ad(path)
    elif path.suffix in (".csv", ".tsv"):
        frame.to_csv(path, index=False, sep="\t" if path.suffix == ".tsv" else ",")
    else:
        return frame
    return str(path)


def cells(*texts, n=40):
    return (list(texts) * n)[:n]


# ---------------------------------------------------------------------- a label is the text it is

LABELS = {
    "leading zeros": (["001", "010", "100"], "multiclass", ["001", "010", "100"]),
    "some leading zeros": (["01", "1", "2"], "multiclass", ["01", "1", "2"]),
    "exponents": (["1E1", "1E2", "2E1"], "multiclass", ["1E1", "1E2", "2E1"]),
    "signs": (["+1", "-1"], "binary", ["+1", "-1"]),
    "capitals": (["TRUE", "FALSE"], "binary", ["FALSE", "TRUE"]),
    "yes and no": (["true", "false"], "binary", ["false", "true"]),
    "whole numbers with a point": (["0.0", "1.0"], "binary", ["0.0", "1.0"]),
    "whole numbers": (["10", "9", "1"], "multiclass", ["1", "9", "10"]),
    "two whole numbers": (["1", "0"], "binary", ["0", "1"]),
    "words for nothing": (["None", "NA", "nan"], "multiclass", ["NA", "None", "nan"]),
    "a word for nothing": (["hi", "NA", "lo"], "multiclass", ["NA", "hi", "lo"]),
    "infinity": (["inf", "-inf"], "binary", ["-inf", "inf"]),
    "dates": (["2020-01-01", "2020-01-02"], "binary", ["2020-01-01", "2020-01-02"]),
    "hexadecimal": (["0x10", "0x11"], "binary", ["0x10", "0x11"]),
    "underscores": (["1_0", "10"], "binary", ["10", "1_0"]),
    "blanks within and around": ([" hi there", " lo"], "binary", [" hi there", " lo"]),
    "quotes and commas": (['a "b", c', "d"], "binary", ['a "b", c', "d"]),
    "letters of the world": (["良性", "悪性"], "binary", ["悪性", "良性"]),
    "fractions": (["0.5", "1.0", "2.25"], "regression", None),
    "fractions with exponents": (["1e-05", "2.5", "3"], "regression", None),
}


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("case", LABELS)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_labels_are_the_text_they_are_in_every_format(tmp_path, case, format):
    texts, problem, classes = LABELS[case]
    frame = make_table(y=cells(*texts))
    data = ready(written(frame, tmp_path / f"t{format}"), val_fraction=0.2, test_fraction=0.2)
    assert data.identity()["problem"] == problem
    assert data.identity().get("classes") == classes
    for loader in (data.train_dataloader(), data.test_dataloader()):
        _, target, ids = gather(loader)
        if classes is None:
            target = target.double() * data.identity()["target_std"] + data.identity()["target_mean"]
            numbers = frame["y"][list(map(int, ids))].astype(float)
            np.testing.assert_allclose(target, numbers, rtol=1e-6, atol=1e-6)  # float32
        else:
            assert [classes[int(number)] for number in target] == [frame["y"][int(i)] for i in ids]


@pytest.mark.parametrize("format", [".csv", ".tsv", ".parquet"])
@pytest.mark.parametrize(
    ("values", "classes"),
    [
        ([1, 0], ["0", "1"]),
        ([True, False], ["False", "True"]),
        ([10, 9, 1], ["1", "9", "10"]),
        (["b", "a"], ["a", "b"]),
    ],
)
def test_a_table_in_memory_and_its_file_have_the_same_classes(tmp_path, values, classes, format):
    frame = make_table(y=cells(*values))
    assert ready(frame).identity()["classes"] == classes
    assert ready(written(frame, tmp_path / f"t{format}")).identity()["classes"] == classes


def test_numbers_of_any_kind_are_one_class_in_a_table_that_keeps_numbers():
    for y in ([1, 0] * 20, [1.0, 0.0] * 20, pd.array([1, 0] * 20, dtype="Int64"), pd.Categorical([1, 0] * 20)):
        assert ready(make_table(y=y)).identity()["classes"] == ["0", "1"]
    mixed = pd.Series([1, 0.0, "1", 0] * 10, dtype=object)
    assert ready(make_table(y=mixed), problem="binary").identity()["classes"] == ["0", "1"]


def test_what_a_word_for_nothing_became_is_said(tmp_path, caplog):
    with caplog.at_level("INFO"):
        ready(written(make_table(y=cells("hi", "lo", "NA")), tmp_path / "t.csv"))
    assert "data.label: class 'NA'; if that means no label, name it in data.missing_labels" in caplog.text
    assert "3 inputs; multiclass of 'NA', 'hi', 'lo'" in caplog.text


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_what_means_no_label_is_a_setting(tmp_path, format):
    frame = make_table(y=cells("hi", "lo", "NA", "", n=40))
    frame.loc[40 - 4 :, "y"] = ["hi", "lo", "hi", "lo"]
    features = written(frame, tmp_path / f"t{format}")
    with pytest.raises(
        ZooError, match=r"data\.label: column 'y' is empty in 9 rows: '3', '7'.* data\.missing_labels: ''"
    ):
        ready(features)
    with pytest.raises(ZooError, match=r"is empty in 18 rows: '2', '3', .* data\.missing_labels: '', 'NA'\)$"):
        ready(features, missing_labels=["", "NA"])
    with pytest.raises(ZooError, match=r"is empty in 18 rows"):
        ready(features, missing_labels=["", "NA\u200b "])
    assert ready(features, missing_labels=[]).identity()["classes"] == ["", "NA", "hi", "lo"]
    assert ready(features, missing_labels=[]).hparams["missing_labels"] == []


def test_numbers_may_mean_no_label_too(tmp_path):
    frame = make_table(y=cells(1, 0, -9))
    for features in (frame, written(frame, tmp_path / "t.csv"), frame.astype({"y": float})):
        with pytest.raises(ZooError, match="column 'y' is empty in 13 rows: '2'"):
            ready(features, missing_labels=["-9"])


def test_labels_that_are_missing_in_memory_stay_missing():
    for nothing in (None, np.nan, pd.NA, pd.NaT):
        frame = make_table().astype({"y": object})
        frame.loc[3, "y"] = nothing
        with pytest.raises(ZooError, match="column 'y' is empty in 1 rows: '3'"):
            ready(frame, missing_labels=[])


def test_a_table_to_predict_may_have_no_labels(tmp_path):
    path = save_checkpoint(tmp_path / "m.ckpt", ready(make_table(seed=1)).identity())
    features = written(make_table(1, y=""), tmp_path / "t.csv")
    data = GraphTableDataModule(features, from_checkpoint=path)
    data.setup("predict")
    assert gather(data.predict_dataloader())[2] == ["0"]
    with pytest.raises(ZooError, match="column 'y' is empty in 1 rows"):
        data.setup("test")


# ---------------------------------------------------------------------- what is asked


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (
            ["1", "2", "NA"],
            r"holds '1', '2' and 'NA'; if that means no label, name it in data\.missing_labels; else say",
        ),
        (["TRUE", "FALSE", "NA"], r"holds 'FALSE', 'TRUE' and 'NA'; if that means no label"),
        (["0.5", "1.5", "n.d."], r"holds '0\.5', '1\.5' and 'n\.d\.'; if that means no label"),
        (["001", "010", "-"], r"holds '001', '010' and '-'; if that"),
        (["1,5", "2,0"], r"has '1,5', as numbers with a decimal comma are written; write them with a point"),
        (["1.234,5", "2"], r"has '1\.234,5', as numbers with a decimal comma"),
        (["1.0", "2.0", "3.0"], r"has 3 different whole float values; say which with data\.problem"),
        ([f"c{i}" for i in range(51)], r"has 51 different text values"),
        ([str(i) for i in range(51)], r"has 51 different integer values"),
        (["one"], r"has 1 different text values"),
    ],
)
def test_what_is_in_doubt_is_asked(tmp_path, texts, message):
    features = written(make_table(204, y=cells(*texts, n=204)), tmp_path / "t.csv")
    with pytest.raises(ZooError, match=rf"data\.problem: got auto, but column 'y' {message}") as raised:
        ready(features)
    assert "\n" not in str(raised.value)


def test_the_answer_is_taken(tmp_path):
    features = written(make_table(y=cells("1", "2", "NA")), tmp_path / "t.csv")
    assert ready(features, problem="multiclass").identity()["classes"] == ["1", "2", "NA"]
    features = written(make_table(y=cells("1,5", "2,0")), tmp_path / "t.csv")
    assert ready(features, problem="binary").identity()["classes"] == ["1,5", "2,0"]
    features = written(make_table(y=cells("1.1", "1.2", "1.10")), tmp_path / "t.csv")
    with pytest.raises(
        ZooError, match=r"one number in several spellings: '1\.1', '1\.10', in rows '0', '2'; give it one"
    ):
        ready(features, problem="multiclass")


@pytest.mark.parametrize("format", [".csv", ".parquet", "DataFrame"])
def test_a_stated_regression_reads_numbers_however_they_are_written(tmp_path, format):
    texts = ["1E1", "1.5", " 2 ", "-.5", "+3", "007", "1e-3", "4."]
    data = ready(written(make_table(y=cells(*texts)), tmp_path / f"t{format}"), problem="regression")
    _, target, ids = gather(data.train_dataloader())
    target = target.double() * data.identity()["target_std"] + data.identity()["target_mean"]
    numbers = [10, 1.5, 2, -0.5, 3, 7, 1e-3, 4]
    np.testing.assert_allclose(target, [numbers[int(i) % 8] for i in ids], rtol=1e-6, atol=1e-6)  # float32


def test_a_regression_target_is_the_nearest_number_to_its_text(tmp_path):
    numbers = np.random.default_rng(0).normal(size=200) * 10.0 ** np.random.default_rng(1).integers(-9, 9, 200)
    frame = make_table(200, y=numbers)
    for features in (written(frame, tmp_path / "t.csv"), frame.assign(y=list(map(repr, numbers.tolist())))):
        for name in ("target_mean", "target_std"):
            assert ready(features).identity()[name] == ready(frame).identity()[name]


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["1.5", "1,5"], r"data\.label: column 'y' has '1,5' in row '1', which is no number; write .* decimal point"),
        (["1,5", "2,5"], r"data\.label: column 'y' has '1,5' in row '0', which is no number; write .* decimal point"),
        (["1.5", "NA"], r"has 'NA' in row '1', which is no number; .*name it in data\.missing_labels"),
        (["1.5", "1_5"], r"has '1_5' in row '1', which is no number"),
        (["1.5", "٣"], r"has '٣' in row '1', which is no number"),
        (["1.5", "inf"], r"data\.label: column 'y' is infinite in row '1'"),
        (["1.5", "1e999"], r"data\.label: column 'y' is infinite in row '1'"),
        (["hi", "lo"], r"data\.problem: got regression, but column 'y' has text values"),
        (["TRUE", "FALSE"], r"data\.problem: got regression, but column 'y' has text values"),
    ],
)
def test_a_stated_regression_refuses_what_is_no_number(tmp_path, texts, message):
    features = written(make_table(y=cells(*texts)), tmp_path / "t.csv")
    with pytest.raises(ZooError, match=message):
        ready(features, problem="regression")


@pytest.mark.parametrize("format", [".csv", ".parquet", "DataFrame"])
@pytest.mark.parametrize(
    "ones_and_zeros", ["10", ["1.0", "0.0"], ["TRUE", "FALSE"], ["true", "false"], ["True", "False"]]
)
def test_flags_are_written_as_numbers_or_booleans(tmp_path, ones_and_zeros, format):
    p, q = [1, 0] * 20, [1, 1, 0, 0] * 10
    one, zero = ones_and_zeros
    frame = make_table(p=[one if flag else zero for flag in p], q=[one if flag else zero for flag in q])
    data = ready(written(frame.drop(columns="y"), tmp_path / f"t{format}"), label=["p", "q"])
    assert data.identity()["problem"] == "multilabel"
    _, target, ids = gather(data.train_dataloader())
    assert target.tolist() == [[p[int(i)], q[int(i)]] for i in ids]


@pytest.mark.parametrize("texts", [["0", "2"], ["yes", "no"], ["0", "1", "NA"]])
def test_other_texts_are_no_flags(tmp_path, texts):
    features = written(make_table(y=cells(*texts)), tmp_path / "t.csv")
    with pytest.raises(ZooError, match=r"data\.label: column 'y' holds more than 0 and 1; .* or true and false"):
        ready(features, problem="multilabel")


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_values_that_are_no_label_are_refused_in_one_line():
    for value in (b"hi", [1], {"a": 1}, np.array([1, 2])):
        frame = make_table()
        frame["y"] = pd.Series([value] * 40, dtype=object)
        with pytest.raises(
            ZooError, match=r"data\.label: column 'y' holds values of type \w+; a label is text or a numb"
        ):
            ready(frame)


@pytest.mark.parametrize("missing", ["NA", [1], [None]])
def test_missing_labels_are_a_list_of_texts(missing):
    with pytest.raises(ZooError, match=r"data\.missing_labels: got .*; must be a list of texts, such as \['', 'NA'\]"):
        ready(missing_labels=missing)


# ---------------------------------------------------------------------- a checkpoint's classes

SAME_CLASS = [
    (cells(1, 10), ["1", "10"], ["001", "010"], "data.label: '001', '010' taken as the checkpoint's classes '1', '10'"),
    (cells(True, False), ["False", "True"], ["FALSE", "TRUE"], "'FALSE', 'TRUE' taken as the checkpoint's classes"),
    (cells(0.0, 1.0), ["0", "1"], ["0.0", "1.0"], "'0.0', '1.0' taken as the checkpoint's classes '0', '1'"),
    (cells("0.0", "1.0"), ["0.0", "1.0"], ["0", "1"], "'0', '1' taken as the checkpoint's classes '0.0', '1.0'"),
    (cells("lo", "hi"), ["hi", "lo"], ["hi", "lo"], None),
]


@pytest.mark.parametrize(("trained", "classes", "texts", "said"), SAME_CLASS)
def test_a_checkpoint_takes_its_classes_from_a_file_that_writes_them_otherwise(
    tmp_path, caplog, trained, classes, texts, said
):
    data = ready(make_table(y=trained))
    assert data.identity()["classes"] == classes
    path = save_checkpoint(tmp_path / "m.ckpt", data.identity())
    other = GraphTableDataModule(written(make_table(4, y=cells(*texts, n=4)), tmp_path / "t.csv"), from_checkpoint=path)
    with caplog.at_level("INFO"):
        other.setup("test")
    assert gather(other.test_dataloader())[1].tolist() == [0, 1, 0, 1]
    assert ("taken as" in caplog.text) == (said is not None)
    assert said is None or said in caplog.text


@pytest.mark.parametrize(
    ("trained", "texts", "message"),
    [
        (cells(1, 10), ["1", "01"], r"has the classes '01', which the checkpoint doesn't know \(it knows '1', '10'\)"),
        (cells(1, 10), ["01", "001"], r"has the classes '001', '01', which the checkpoint doesn't know"),
        (cells(1, 10), ["1", "x"], r"has the classes 'x', which the checkpoint doesn't know"),
        (cells("a", NFD), ["a", "é"], r"of column 'y' and of the checkpoint .*'e<U\+0301>' and '<U\+00E9>'"),
        (cells("a", "b"), ["a", "b "], r"of column 'y' and of the checkpoint look the same and differ: 'b' and 'b '"),
    ],
)
def test_labels_a_checkpoint_does_not_know_stay_refused(tmp_path, trained, texts, message):
    path = save_checkpoint(tmp_path / "m.ckpt", ready(make_table(y=trained)).identity())
    features = written(make_table(4, y=cells(*texts, n=4)), tmp_path / "t.csv")
    with pytest.raises(ZooError, match=message):
        GraphTableDataModule(features, from_checkpoint=path).setup("test")


def test_a_checkpoint_of_two_labels_that_look_alike_still_takes_both(tmp_path):
    identity = ready(make_table(y=cells("a", "b"))).identity() | {"classes": ["a", "a "]}
    path = save_checkpoint(tmp_path / "m.ckpt", identity)
    data = GraphTableDataModule(make_table(2, y=["a", "a "]), from_checkpoint=path)
    data.setup("test")
    assert gather(data.test_dataloader())[1].tolist() == [0, 1]


# ---------------------------------------------------------------------- names that only look alike

TWINS = {"zero width": ("h", "h\u200b"), "forms": ("é", NFD), "blank": ("h", "h "), "alphabet": ("cat", "\u0441at")}


@pytest.fixture(params=TWINS)
def twins(request):
    return TWINS[request.param]


def refused(message, *arguments, **options):
    with pytest.raises(ZooError, match=message) as raised:
        ready(*arguments, **options)
    assert "\n" not in str(raised.value)
    assert str(raised.value).isascii()
    return str(raised.value)


@pytest.mark.parametrize("format", [".csv", ".parquet", "DataFrame"])
def test_classes_that_look_alike_are_refused_with_their_rows(tmp_path, twins, format):
    features = written(make_table(y=cells(*twins, "other")), tmp_path / f"t{format}")
    refused(
        r"^data\.label: classes of column 'y' look the same and differ: .*; give both .*, in rows '0', '1'", features
    )


@pytest.mark.parametrize("format", [".csv", ".parquet", "DataFrame"])
def test_groups_that_look_alike_are_refused(tmp_path, twins, format):
    frame = make_table(g=[twins[i % 2] if i < 4 else f"P{i // 4}" for i in range(40)])
    refused(
        r"^data\.group_column: groups of column 'g' look the same and differ",
        written(frame, tmp_path / f"t{format}"),
        group_column="g",
    )


@pytest.mark.parametrize("format", [".csv", ".parquet", "DataFrame"])
def test_ids_that_look_alike_are_refused(tmp_path, twins, format):
    frame = make_table(i=[*twins, *(f"r{i}" for i in range(38))])
    refused(
        r"^data\.id_column: names of rows in .* look the same and differ",
        written(frame, tmp_path / f"t{format}"),
        id_column="i",
    )


@pytest.mark.parametrize("value", ["train ", "\u0442est", "test\u200b", "Train", "", "NA"])
def test_splits_that_only_look_like_one_are_refused(tmp_path, value):
    frame = make_table(s=["train"] * 20 + ["val"] * 10 + ["test"] * 9 + [value])
    refused(
        r"^data\.split_column: column 's' has '.*' in row '39'; every row must",
        written(frame, tmp_path / "t.csv"),
        split_column="s",
    )


@pytest.mark.parametrize("ignore", [False, True])
def test_a_column_that_only_looks_like_a_node_is_refused_whatever_is_ignored(tmp_path, twins, ignore):
    node, column = twins
    edges = EDGES.replace({"h": "inner", "a": node})
    options = {"unmatched_columns": "ignore", "unmeasured_nodes": "missing"} if ignore else {}
    message = r"^data\.features: .*names of columns and input nodes look the same and differ: '"
    features = written(make_table().rename(columns={"a": column}), tmp_path / "t.csv")
    refused(message, features, edges=edges, **options)
    both = make_table().rename(columns={"a": node})
    refused(message, written(both.assign(**{column: 1.0}), tmp_path / "t.csv"), edges=edges, **options)


def test_a_label_that_only_looks_like_a_column_is_refused_with_code_points(tmp_path, twins):
    there, asked = twins
    features = written(make_table().rename(columns={"y": there}), tmp_path / "t.csv")
    refused(r"^data\.label: got '.*', but t\.csv has '.*', which only looks the same", features, label=asked)
    both = make_table().rename(columns={"y": there}).assign(**{asked: cells("x", "y")})
    refused(r"columns and input nodes look the same", both, label=asked, unmatched_columns="ignore")


def test_columns_that_nobody_uses_may_look_alike():
    frame = make_table(**{"note": "x", "note ": "y"})
    assert ready(frame, unmatched_columns="ignore").identity()["inputs"] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("edges", "shown"),
    [("a,h\u200b\nb,h\nc,h\nh,out\n", r"'h' and 'h<U\+200B>'"), (f"a,{NFD}\nb,é\nc,é\né,out\n", r"'e<U\+0301>' and")],
)
def test_nodes_that_look_alike_are_refused(tmp_path, edges, shown):
    (tmp_path / "e.csv").write_text("source,target\n" + edges, encoding="utf-8")
    with pytest.raises(Kpnn2Error, match=rf"data\.edges: .*e\.csv: edgelist: names look the same and differ: {shown}"):
        ready(edges=str(tmp_path / "e.csv"))


# ---------------------------------------------------------------------- what is left out is said


def test_columns_and_nodes_left_out_are_named(caplog):
    frame = make_table(note="text", more=1).drop(columns="b")
    with caplog.at_level("INFO"):
        ready(frame, unmatched_columns="ignore", unmeasured_nodes="missing")
    assert "data.unmatched_columns: 2 columns ignored: 'note', 'more'" in caplog.text
    assert "data.unmeasured_nodes: 1 input nodes missing: 'b'" in caplog.text


# ---------------------------------------------------------------------- absent classes, one row, odd sizes


@pytest.mark.parametrize(("lacks", "split"), [("val", 1), ("test", 2)])
def test_a_class_that_a_held_out_split_lacks_is_fine(lacks, split):
    y = np.array(cells("A", "B", "C", n=60), dtype=object)
    part = np.array(["train"] * 36 + ["val"] * 12 + ["test"] * 12, dtype=object)
    part[(part == lacks) & (y == "C")] = "train"
    data = ready(make_table(60, y=y, part=part), split_column="part")
    assert data.identity()["classes"] == ["A", "B", "C"]
    loader = [data.train_dataloader, data.val_dataloader, data.test_dataloader][split]()
    assert set(gather(loader)[1].tolist()) == {0, 1}


@pytest.mark.parametrize("problem", ["binary", "multiclass", "regression", "multilabel"])
@pytest.mark.parametrize("batch_size", [1, 7, 1000])
def test_one_row_in_a_held_out_split_and_odd_batches_work(problem, batch_size):
    y = {"binary": cells("a", "b"), "multiclass": cells("a", "b", "c"), "regression": np.linspace(0.5, 9, 40)}
    y["multilabel"] = cells(0, 1)
    part = ["train"] * 38 + ["val", "test"]
    data = ready(make_table(y=y[problem], part=part), split_column="part", problem=problem, batch_size=batch_size)
    assert rows_of(data) == {"train": set(range(38)), "val": {38}, "test": {39}}
    for loader in (data.val_dataloader(), data.test_dataloader()):
        (batch,) = loader
        assert batch["values"].shape == (1, 3)
        assert torch.isfinite(batch["target"]).all()
        assert len(batch["target"]) == 1


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (["a", "b", "b"], "no row of 'b' is in the training split"),
        ([0.5, 1.5, 2.5], "'y' is 0.5 in every row of the training split"),
    ],
)
def test_one_row_to_train_on_is_refused(y, message):
    with pytest.raises(ZooError, match=message):
        ready(make_table(3, y=y, part=["train", "val", "test"]), split_column="part")


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("kind", ["text", "fractions"])
def test_too_few_rows_are_refused_in_one_line(n, kind):
    y = cells("a", "b", n=n) if kind == "text" else np.linspace(0.5, 1.25, n)
    with pytest.raises(ZooError, match=r"^data\.\w+: [^\n]*$"):
        ready(make_table(n, y=y))


# ---------------------------------------------------------------------- cells and bytes


def test_ids_groups_and_splits_are_the_text_they_are(tmp_path):
    n = 120
    names = ["NA", "None", "nan", *(f"{i:03}" for i in range(n - 3))]
    groups = np.repeat(["NA", "null", "nan", "01", "1", "1E1", *(f"g{i}" for i in range(24))], 4)
    frame = make_table(n, i=names, g=groups)
    data = ready(written(frame, tmp_path / "t.csv"), id_column="i", group_column="g")
    found = {split: gather(getattr(data, f"{split}_dataloader")())[2] for split in ("train", "val", "test")}
    assert sorted(chain(*found.values())) == sorted(names)
    of = dict(zip(names, groups, strict=True))
    assert sum(len({of[name] for name in ids}) for ids in found.values()) == 30


@pytest.mark.parametrize(
    ("column", "options", "message"),
    [
        ("i", {"id_column": "i"}, r"data\.id_column: t\.csv has no 'i' in row 3; give every row one"),
        ("g", {"group_column": "g"}, r"data\.group_column: column 'g' is empty in row '3'; fill it in"),
        ("s", {"split_column": "s"}, r"data\.split_column: column 's' has '' in row '3'"),
        ("y", {}, r"data\.label: column 'y' is empty in 1 rows: '3'"),
    ],
)
def test_empty_cells_are_refused_by_what_they_lack(tmp_path, column, options, message):
    rows = range(40)
    frame = make_table(i=[f"r{i}" for i in rows], g=[f"g{i // 2}" for i in rows], s=cells("train", "val", "test"))
    frame.loc[3, column] = ""
    frame = frame[["a", "b", "c", "y", *([column] if column != "y" else [])]]
    with pytest.raises(ZooError, match=message):
        ready(written(frame, tmp_path / "t.csv"), **options)


def test_an_empty_cell_and_the_words_for_one_are_no_measurement(tmp_path):
    frame = make_table().astype({"a": object})
    frame.loc[:3, "a"] = ["", "NA", "nan", "None"]
    values, _, ids = gather(ready(written(frame, tmp_path / "t.csv"), split_column=None).train_dataloader())
    assert {ids[row] for row in values.isnan().nonzero()[:, 0].tolist()} == {"0", "1", "2", "3"} & set(ids)


@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
def test_a_byte_order_mark_is_no_part_of_a_name(tmp_path, suffix):
    for name, table in (("t", make_table(y=cells("001", "010"))[["y", "a", "b", "c"]]), ("e", EDGES)):
        table.to_csv(
            tmp_path / (name + suffix), index=False, sep="\t" if suffix == ".tsv" else ",", encoding="utf-8-sig"
        )
    data = ready(str(tmp_path / f"t{suffix}"), edges=str(tmp_path / f"e{suffix}"))
    assert data.identity()["classes"] == ["001", "010"]
    text = (tmp_path / f"t{suffix}").read_bytes()
    (tmp_path / f"t{suffix}").write_bytes(b"\xef\xbb\xbf" + text)
    with pytest.raises(ZooError, match=r"data\.label: got 'y', but .* has '<U\+FEFF>y', which only looks the same"):
        ready(str(tmp_path / f"t{suffix}"))


CSV = "a,b,c,y\n1,2,3,x\n"
TSV = "a\tb\tc\ty\n1,5\t2\t3\t1.5\n" + "1\t2\t3\t4.5\n" * 30
FILES = {
    "semicolons": (
        "t.csv",
        b"a;b;c;y\n1,5;2,0;3;x\n",
        r"is separated by ';', .* decimal mark; save it with ',' and dec",
    ),
    "semicolons in quotes": ("t.csv", b'"a";"b";"c"\n1;2;3\n', r"is separated by ';'"),
    "semicolons and commas": ("t.csv", b"a (x, y);b\n1,5;2,0\n", r"is separated by ';'"),
    "sep line": ("t.csv", b"sep=;\na;b\n1;2\n", r"is separated by ';'"),
    "semicolons in tsv": ("t.tsv", b"a;b\n1;2\n", r"is separated by ';'"),
    "tabs": ("t.csv", b"a\tb\n1\t2\n", r"is separated by '\\t'; rename it to \.tsv"),
    "commas": ("t.tsv", b"a,b\n1,2\n", r"is separated by ','; rename it to \.csv"),
    "bars": ("t.csv", b"a|b\n1|2\n", r"is separated by '\|'; separate it by ','"),
    "decimal commas": ("t.tsv", TSV.encode(), r"column 'a' has '1,5' in row '0'; it must .* decimal point"),
    "UTF-16": ("t.csv", CSV.encode("utf-16"), r"is UTF-16, not UTF-8; convert it \(iconv -f utf-16 -t utf-8"),
    "UTF-16LE": ("t.csv", CSV.encode("utf-16-le"), r"like UTF-16 .*, not UTF-8; convert it \(iconv -f utf-16le"),
    "UTF-16BE": ("t.csv", CSV.encode("utf-16-be"), r"like UTF-16 .*, not UTF-8; convert it \(iconv -f utf-16be"),
    "zero byte": ("t.csv", CSV.encode() * 5 + b"1,2,3,x\0y\n", r"has NUL bytes, the first at offset 87; drop them"),
    "gzip": ("t.csv.gz", gzip.compress(CSV.encode()), r"must be a .* file, so unpack it: gunzip t\.csv\.gz$"),
    "zip": ("t.zip", b"PK\x03\x04", r"must be a .* file, so unpack it: unzip t\.zip$"),
    "gzip by another name": (
        "t.csv",
        gzip.compress(CSV.encode()),
        r"is compressed by gzip; unpack it \(gunzip",
    ),
    "workbook": ("t.xlsx", b"PK\x03\x04", r"must be a \.csv, .* file, so save the sheet as CSV \(UTF-8, separated by"),
    "workbook by another name": (
        "t.csv",
        b"PK\x03\x04\x00",
        r"is a zip archive or a document in one; .* a sheet as CSV",
    ),
    "Parquet by another name": (
        "t.csv",
        b"PAR1\x15\x00",
        r"is a Parquet file; rename it to \.parquet",
    ),
    "text": ("t.txt", CSV.encode(), r"must be a .* file, so rename it to \.csv if commas separate its fields"),
    "another": ("t.sav", b"x", r"must be a \.csv, \.tsv, \.parquet, \.h5ad file, so convert it to one"),
}


@pytest.mark.parametrize("case", FILES)
def test_files_of_another_kind_are_refused_with_what_to_do(tmp_path, case):
    name, content, message = FILES[case]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ZooError, match=message) as raised:
        ready(str(tmp_path / name), problem="regression")
    assert "\n" not in str(raised.value)
    assert str(raised.value).startswith("data.features: ")


def test_the_same_holds_for_edges(tmp_path):
    (tmp_path / "e.csv").write_text("source;target\na;h\n")
    with pytest.raises(ZooError, match=r"data\.edges: .*e\.csv is separated by ';'"):
        ready(edges=str(tmp_path / "e.csv"))
    (tmp_path / "e.csv").write_text("source,target\na,h\n", encoding="utf-16")
    with pytest.raises(ZooError, match=r"data\.edges: .*e\.csv is UTF-16, not UTF-8"):
        ready(edges=str(tmp_path / "e.csv"))


def test_the_offset_of_an_odd_byte_counts_from_the_start_of_the_file(tmp_path):
    text = b"a,b,c,y\n" + b"1,2,3,x\n" * 50_000
    (tmp_path / "t.csv").write_bytes(text + b"1,2,3,\xff\n")
    with pytest.raises(ZooError, match=rf"no UTF-8, the first at offset {len(text) + 6}; convert it \(iconv"):
        ready(str(tmp_path / "t.csv"))


def test_a_column_may_be_named_as_a_format_begins(tmp_path):
    frame = make_table().rename(columns={"a": "PAR1"})[["PAR1", "b", "c", "y"]]
    data = ready(written(frame, tmp_path / "t.csv"), edges=EDGES.replace({"a": "PAR1"}))
    assert data.identity()["inputs"] == ["PAR1", "b", "c"]
