"""The graph task: its losses and figures, and checkpoints that load whole or not at all."""

import copy
import math

import lightning.pytorch as pl
import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import average_precision_score, f1_score, r2_score, roc_auc_score

from datamodules.tables import GraphTableDataModule
from zoo.checkpoint.identity import digest
from zoo.errors import CheckpointMismatchError, ZooError
from zoo.tasks import GraphPredictionTask, LanguageModelTask

TINY = {"embed_dim": 8, "num_heads": 2, "n_layers": 2, "dropout": 0.0, "lr": 1e-2}
SILENT = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
EDGES = pd.DataFrame(
    [("a", "p"), ("b", "p"), ("c", "q"), ("d", "q"), ("p", "y"), ("q", "y")], columns=["source", "target"]
)


def table(n=160, seed=0, **labels):
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame(rng.normal(3.0, 2.0, (n, 4)), columns=["a", "b", "c", "d"])
    score = frame["a"] - frame["c"] + 0.3 * rng.normal(size=n)
    frame["binary"] = np.where(score > 0, "yes", "no")
    frame["multi"] = pd.cut(score, [-100, -2, 2, 100], labels=["low", "mid", "high"]).astype(str)
    frame["number"] = 50 + 10 * score
    frame["one"], frame["two"] = (score > 0).astype(int), (frame["b"] > 3).astype(int)
    return frame


PROBLEMS = {
    "binary": "binary",
    "multiclass": "multi",
    "regression": "number",
    "multilabel": ["one", "two"],
}


def data_for(problem, frame=None, **options):
    label = PROBLEMS[problem]
    frame = table() if frame is None else frame
    labels = {"binary", "multi", "number", "one", "two"} - set([label] if isinstance(label, str) else label)
    return GraphTableDataModule(
        **{"features": frame.drop(columns=list(labels & set(frame.columns))), "edges": EDGES, "label": label, **options}
    )


def fitted(problem, steps=40, seed=0, frame=None, **options):
    pl.seed_everything(seed)
    task, data = GraphPredictionTask(**{**TINY, **options}), data_for(problem, frame)
    trainer = pl.Trainer(**SILENT, max_steps=steps, limit_val_batches=0)
    trainer.fit(task, data)
    return task, data, trainer


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    task, data, trainer = fitted("multiclass")
    path = tmp_path_factory.mktemp("graph") / "graph.ckpt"
    trainer.save_checkpoint(path)
    return path, task, data


def outputs_and_targets(task, data):
    data.setup("test")
    batches = list(data.test_dataloader())
    with torch.no_grad():
        return torch.cat([task.eval()(b["values"]) for b in batches]), torch.cat([b["target"] for b in batches])


# ---------------------------------------------------------------------- figures


@pytest.mark.parametrize("problem", PROBLEMS)
def test_training_learns_what_the_graph_shows(problem):
    task, data, _ = fitted(problem, steps=150)
    scores = pl.Trainer(**SILENT).test(task, data, verbose=False)[0]
    if problem == "regression":
        assert scores["test/r2"] > 0.6
    else:
        assert scores["test/auroc"] > 0.8


def test_binary_figures_are_those_of_scikit_learn():
    task, data, _ = fitted("binary")
    scores = pl.Trainer(**SILENT).test(task, data, verbose=False)[0]
    outputs, target = outputs_and_targets(task, data)
    p = outputs.squeeze(-1).sigmoid().double().numpy()
    assert task.names == ["no", "yes"]
    assert scores["test/auroc"] == pytest.approx(roc_auc_score(target, p), abs=1e-6)
    assert scores["test/average_precision"] == pytest.approx(average_precision_score(target, p), abs=1e-6)
    assert scores["test/f1"] == pytest.approx(f1_score(target, p > 0.5), abs=1e-6)


def test_multiclass_f1_is_the_macro_average_of_scikit_learn():
    task, data, _ = fitted("multiclass")
    scores = pl.Trainer(**SILENT).test(task, data, verbose=False)[0]
    outputs, target = outputs_and_targets(task, data)
    expected = f1_score(target, outputs.argmax(-1), average="macro", labels=range(3), zero_division=0)
    assert scores["test/f1"] == pytest.approx(expected, abs=1e-6)


def test_regression_is_scored_and_predicted_in_the_targets_own_units():
    task, data, _ = fitted("regression", steps=150)
    scores = pl.Trainer(**SILENT).test(task, data, verbose=False)[0]
    outputs, target = outputs_and_targets(task, data)
    mean, std = task.data_identity["target_mean"], task.data_identity["target_std"]
    truth, guess = (target * std + mean).numpy(), (outputs.squeeze(-1) * std + mean).numpy()
    assert scores["test/mae"] == pytest.approx(np.abs(truth - guess).mean(), rel=1e-4)
    assert scores["test/r2"] == pytest.approx(r2_score(truth, guess), rel=1e-4)
    rows = [row for batch in pl.Trainer(**SILENT).predict(task, data) for row in batch]
    assert [row["prediction"] for row in rows] == pytest.approx(guess.tolist(), rel=1e-4)


def test_small_probabilities_keep_their_digits():
    task = built("binary")
    p = task.probabilities(torch.tensor([[-20.0], [20.0], [60.0]]))
    torch.testing.assert_close(
        p[:, 0].double(), torch.tensor([20.0, -20.0, -60.0]).double().sigmoid(), rtol=1e-6, atol=0
    )
    torch.testing.assert_close(
        p[:, 1].double(), torch.tensor([-20.0, 20.0, 60.0]).double().sigmoid(), rtol=1e-6, atol=0
    )


def test_a_label_is_predicted_above_a_half_as_it_is_scored():
    task = built("multilabel")
    assert task.decided(torch.tensor([[0.5, 0.50001], [0.49, 1.0]])).tolist() == [[0, 1], [0, 1]]


def test_predictions_carry_ids_and_a_probability_for_each_class_by_name(saved):
    _, task, data = saved
    rows = [row for batch in pl.Trainer(**SILENT).predict(task, data) for row in batch]
    assert set(rows[0]) == {"id", "prediction", "p_high", "p_low", "p_mid"}
    for row in rows:
        ps = {name: row[f"p_{name}"] for name in task.names}
        assert sum(ps.values()) == pytest.approx(1, abs=1e-5)
        assert row["prediction"] == max(ps, key=ps.get)


# ---------------------------------------------------------------------- losses


def built(problem, frame=None, **options):
    data = data_for(problem, frame)
    data.prepare_data()
    data.setup("fit")
    task = GraphPredictionTask(**{**TINY, **options})
    task.identity = data.identity()
    task.configure_model()
    return task


def test_losses_are_the_standard_ones():
    torch.manual_seed(0)
    binary, many, number, labels = (built(problem) for problem in PROBLEMS)
    z = torch.randn(6, 3)
    y = torch.tensor([0, 1, 2, 2, 1, 0])
    assert many.loss(z, y) == F.cross_entropy(z, y)
    torch.testing.assert_close(
        binary.loss(z[:, :1], (y > 0).float()), F.binary_cross_entropy_with_logits(z[:, 0], (y > 0).float())
    )
    assert number.loss(z[:, :1], z[:, 1]) == F.mse_loss(z[:, 0], z[:, 1])
    assert labels.loss(z[:, :2], (z[:, 1:] > 0).float()) == F.binary_cross_entropy_with_logits(
        z[:, :2], (z[:, 1:] > 0).float()
    )


def test_balanced_weights_give_every_class_the_same_total():
    task = built("multiclass", class_weights="balanced")
    counts = task.data_identity["source"]["class_counts"]
    totals = [counts[name] * float(weight) for name, weight in zip(task.names, task.loss_weight, strict=True)]
    assert totals == pytest.approx([totals[0]] * 3)
    assert sum(totals) == pytest.approx(sum(counts.values()))


@pytest.mark.parametrize("factor", [1.0, 7.0, 1e300])
def test_given_weights_have_a_mean_of_one_over_the_training_rows_in_the_order_of_the_classes(factor):
    task = built("multiclass", class_weights=[0.0, 1.0 * factor, 2.0 * factor])
    counts = torch.tensor([task.data_identity["source"]["class_counts"][name] for name in task.names])
    weight = task.loss_weight
    assert float((weight * counts).sum() / counts.sum()) == pytest.approx(1.0)
    assert float(weight[0]) == 0
    assert float(weight[2] / weight[1]) == pytest.approx(2.0)
    z, y = torch.randn(4, 3), torch.tensor([0, 1, 2, 2])
    each = F.cross_entropy(z, y, reduction="none")
    assert float(task.loss(z, y)) == pytest.approx(float((weight[y] * each).mean()), rel=1e-5)


@pytest.mark.parametrize("problem", ["binary", "multiclass"])
def test_a_row_weighs_the_same_in_training_whatever_batch_it_comes_in(problem):
    task = built(problem, class_weights="balanced")
    z = torch.randn(8, 1 if problem == "binary" else 3)
    y = torch.arange(8) % (2 if problem == "binary" else 3)
    y = y.float() if problem == "binary" else y
    alone = torch.stack([task.loss(z[i : i + 1], y[i : i + 1]) for i in range(8)])
    torch.testing.assert_close(alone.mean(), task.loss(z, y))
    torch.testing.assert_close(alone, built(problem).losses(z, y)[0] * task.loss_weight[y.long()])


def test_a_batch_of_rows_that_weigh_nothing_has_no_loss():
    task = built("multiclass", class_weights=[1.0, 1.0, 0.0])
    z = torch.randn(3, 3, requires_grad=True)
    loss = task.loss(z, torch.tensor([2, 2, 2]))
    loss.backward()
    assert float(loss) == 0
    assert not z.grad.any()


@pytest.mark.parametrize(
    ("problem", "weights", "message"),
    [
        ("multiclass", [1.0], r"got \[1.0\] for the classes high, low, mid; give none, balanced or 3 numbers"),
        ("multiclass", [1.0, 1.0, -1.0], "numbers of at least 0"),
        ("multiclass", [1.0, 1.0, math.nan], "numbers of at least 0"),
        ("multiclass", [1.0, 1.0, math.inf], "numbers of at least 0"),
        ("multiclass", [0.0, 0.0, 0.0], "one of them above"),
        ("regression", "balanced", "for a regression problem; they need classes"),
    ],
)
def test_wrong_class_weights_are_refused(problem, weights, message):
    with pytest.raises(ZooError, match=message):
        built(problem, class_weights=weights)


# ---------------------------------------------------------------------- checkpoints


def test_checkpoint_alone_rebuilds_model_and_graph(saved):
    path, task, data = saved
    again = GraphPredictionTask.load_from_checkpoint(path).eval()
    assert again.network.spec.fingerprint == task.network.spec.fingerprint
    values = next(iter(data.test_dataloader()))["values"]
    with torch.no_grad():
        assert torch.equal(again(values), task.eval()(values))


def renamed(data, old, new):
    edges = EDGES.replace(old, new)
    return data_for("multiclass", table().rename(columns={old: new}), edges=edges)


def swapped_classes():
    frame = table()
    frame["multi"] = frame["multi"].replace({"low": "zlow"})
    return data_for("multiclass", frame)


def one_more_class():
    frame = table()
    frame.loc[frame.index[:40], "multi"] = "other"
    return data_for("multiclass", frame)


def with_edges(change):
    return lambda: data_for("multiclass", edges=change(EDGES.copy()))


def added(edges):
    return pd.concat([edges, pd.DataFrame([("a", "q")], columns=edges.columns)])


def removed_and_moved(edges):
    return edges.replace({"source": {"b": "b"}}).assign(target=["p", "q", "q", "q", "y", "y"])


def reversed_edge(edges):
    return pd.concat([edges, pd.DataFrame([("q", "p")], columns=edges.columns)])


MUTATIONS = {
    "input renamed": (lambda: renamed(None, "a", "alpha"), r"only in the checkpoint: 'a'.*only here: 'alpha'"),
    "hidden node renamed": (lambda: data_for("multiclass", edges=EDGES.replace("p", "pp")), r"'p', 'y'.*'pp', 'y'"),
    "edge added": (with_edges(added), r"graph\.edges: only here: \['a', 'q'\]"),
    "edge moved": (with_edges(removed_and_moved), r"only in the checkpoint: \['b', 'p'\].*only here: \['b', 'q'\]"),
    "edge between hidden nodes": (with_edges(reversed_edge), r"only here: \['q', 'p'\]"),
    "class renamed": (swapped_classes, r"classes: only in the checkpoint: 'low'; classes: only here: 'zlow'"),
    "one more class": (one_more_class, r"classes: 3 in the checkpoint, 4 here; classes: only here: 'other'"),
    "another problem": (lambda: data_for("binary"), r"problem: 'multiclass' in the checkpoint, 'binary' here"),
    "other rows": (lambda: data_for("multiclass", table(seed=1)), r"mean: "),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_checkpoint_of_other_data_is_refused_by_name_and_nothing_is_copied(mutation, saved):
    make, message = MUTATIONS[mutation]
    path = saved[0]
    data = make()
    pl.seed_everything(1)
    task = GraphPredictionTask(**TINY)
    pl.Trainer(**SILENT, max_steps=0).fit(task, data)
    before = {name: value.clone() for name, value in task.state_dict().items()}
    with pytest.raises(CheckpointMismatchError, match=message):
        pl.Trainer(**SILENT, max_steps=9).fit(task, data, ckpt_path=path)
    assert all(torch.equal(before[name], value) for name, value in task.state_dict().items())


def test_reordered_columns_load(saved):
    path, task, _ = saved
    frame = table()
    data = data_for("multiclass", frame[list(reversed(frame.columns))])
    other = GraphPredictionTask(**TINY)
    scores = pl.Trainer(**SILENT).test(other, data, ckpt_path=path, verbose=False)[0]
    assert scores == pl.Trainer(**SILENT).test(task, saved[2], verbose=False)[0]


def other_heads(state):
    return GraphPredictionTask(**{**TINY, "num_heads": 4}), state, r"attention.*|num_heads"


def second_layers_digest(state):
    key = "network.layers.1.attention.index_digest"
    state[key] = state[key].clone()
    state[key][3] ^= 1
    return GraphPredictionTask(**TINY), state, r"network\.layers\.1\.attention"


def truncated_digest(state):
    key = "network.layers.0.attention.index_digest"
    state[key] = state[key][:31]
    return GraphPredictionTask(**TINY), state, r"network\.layers\.0\.attention"


def bad_utf8(state):
    key = "network.layers.1.attention.identity"
    state[key] = torch.full_like(state[key], 255)
    return GraphPredictionTask(**TINY), state, r"network\.layers\.1\.attention"


def damaged_identity(state):
    state["data_identity"] = torch.full_like(state["data_identity"], 255)
    return GraphPredictionTask(**TINY), state, "not the UTF-8 text of an identity"


@pytest.mark.parametrize("mutate", [other_heads, second_layers_digest, truncated_digest, bad_utf8, damaged_identity])
def test_bare_state_dict_passes_the_same_checks_over_all_layers_first(mutate, saved):
    _, trained, data = saved
    task, state, message = mutate(copy.deepcopy(trained.state_dict()))
    pl.seed_everything(1)
    task.identity = data.identity()
    task.configure_model()
    before = {name: value.clone() for name, value in task.state_dict().items()}
    with pytest.raises(CheckpointMismatchError, match=message):
        task.load_state_dict(state)
    assert all(torch.equal(before[name], value) for name, value in task.state_dict().items())


def test_bare_state_dict_of_another_vocabulary_or_family_is_refused_by_name(saved, trained):
    language = LanguageModelTask.load_from_checkpoint(trained)
    graph = saved[1]
    with pytest.raises(CheckpointMismatchError, match=r"kind: 'table' in the checkpoint, 'text' here"):
        language.load_state_dict(graph.state_dict())
    with pytest.raises(CheckpointMismatchError, match=r"kind: 'text' in the checkpoint, 'table' here"):
        graph.load_state_dict(language.state_dict())


def test_bare_state_dict_without_identities_loads(saved):
    trained_task, data = saved[1], saved[2]
    state = {
        name: value
        for name, value in trained_task.state_dict().items()
        if not name.endswith(("identity", "index_digest"))
    }
    task = GraphPredictionTask(**TINY)
    task.identity = data.identity()
    task.configure_model()
    task.load_state_dict(state)
    values = next(iter(data.test_dataloader()))["values"]
    assert torch.equal(task.eval()(values), trained_task.eval()(values))


def test_chunks_of_edges_change_no_number(saved):
    path, task, data = saved
    chunked = GraphPredictionTask.load_from_checkpoint(path, chunk_size=2).eval()
    assert chunked.network.layers[0].attention.chunk_size == 2
    values = next(iter(data.test_dataloader()))["values"]
    # float32, sums in another order
    torch.testing.assert_close(chunked(values), task.eval()(values), rtol=1e-5, atol=1e-6)


def test_identity_survives_the_checkpoint(saved):
    path, task, data = saved
    from zoo.checkpoint.identity import read_checkpoint

    claim = read_checkpoint(path)["zoo"]
    assert claim["digest"] == digest(data.identity()) == digest(task.data_identity)
    assert math.isfinite(claim["identity"]["mean"][0])
