"""Every score against scikit-learn on the predictions file, in every precision, on rows that make scores go wrong."""

import copy
import math

import lightning.pytorch as pl
import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping
from sklearn.metrics import (
    accuracy_score,
    average_precision_score,
    f1_score,
    mean_absolute_error,
    r2_score,
    roc_auc_score,
)

from datamodules import ImageDataModule, TextDataModule
from datamodules.tables import GraphTableDataModule
from zoo.callbacks import PredictionWriter
from zoo.tasks import GraphPredictionTask, ImageClassificationTask, LanguageModelTask
from zoo.tasks.language import BitsPerByte, CrossEntropy, Perplexity
from zoo.tasks.scores import AccuracyOfBest, CalibrationError, MeanLoss, as_written, best
from zoo.tasks.vision import metrics_for as picture_metrics

TINY = {"embed_dim": 8, "num_heads": 2, "n_layers": 2, "dropout": 0.0, "lr": 1e-2}
SILENT = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
EDGES = pd.DataFrame([("a", "p"), ("b", "p"), ("c", "q"), ("p", "y"), ("q", "y")], columns=["source", "target"])
PRECISIONS = ["32-true", "bf16-mixed", "bf16-true"]
CLASSES = {"binary": "binary", "multiclass": "multi", "multilabel": ["one", "two"]}
# Far from zero, with a spread that float32 can't tell apart from there: seconds since 1970, pressures, years, and a
# spread of the held-out rows that is nothing beside that of the training rows.
NUMBERS = {
    "seconds": lambda z: 1.7e9 + 60 * z,
    "pressure": lambda z: 101325 + 10 * z,
    "years": lambda z: 1990 + 4 * z,
    "tiny": lambda z: 1e-9 * z,
    "close": lambda z: np.where(np.arange(len(z)) < 120, 1000 * z, 7 + 1e-6 * z),
}
TRAIN = 120  # the first rows; then come those to be scored


def table():
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.normal(size=(170, 3)), columns=["a", "b", "c"])
    z = (frame["a"] - frame["c"] + 0.3 * rng.normal(size=170)).to_numpy()
    frame["binary"] = np.where(z > 0, "yes", "no")
    frame["multi"] = np.select([z < -1, z > 1], ["low", "high"], "mid")
    frame["one"], frame["two"] = (z > 0).astype(int), (frame["b"] > 0).astype(int)
    return frame.assign(**{name: make(z) for name, make in NUMBERS.items()})


def data_of(label, rows=lambda held_out: held_out, batch_size=16, problem="auto"):
    """The table with these of its last rows for validation and test."""
    frame = table()
    held_out = rows(frame[TRAIN:])
    frame = pd.concat([frame[:TRAIN], held_out, held_out])
    frame["split"] = ["train"] * TRAIN + ["val"] * len(held_out) + ["test"] * len(held_out)
    frame["row"] = [*range(TRAIN), *(f"v{i}" for i in held_out.index), *(f"t{i}" for i in held_out.index)]
    labels = [label] if isinstance(label, str) else label
    data = GraphTableDataModule(
        features=frame[["a", "b", "c", "split", "row", *labels]],
        edges=EDGES,
        label=label,
        split_column="split",
        id_column="row",
        batch_size=batch_size,
        problem=problem,
    )
    return data, held_out.set_axis([f"t{i}" for i in held_out.index])[labels]


@pytest.fixture(scope="module")
def task_of():
    """Makes a task of a label after a few steps, its answers made sharper (0: the same for every row)."""
    trained = {}

    def make(label, sharpness=1.0, **settings):
        key = str((label, settings))
        if key not in trained:
            pl.seed_everything(0)
            trained[key] = GraphPredictionTask(**{**TINY, **settings})
            pl.Trainer(**SILENT, max_steps=20, limit_val_batches=0).fit(trained[key], data_of(label)[0])
            trained[key].trainer = None
        task = copy.deepcopy(trained[key])
        with torch.no_grad():
            task.network.readout_weight.mul_(sharpness)
            task.network.readout_bias.mul_(sharpness)
        return task

    return make


def measured(task, data, precision="32-true"):
    """Scores of the test rows, the losses' float64 mean from the network's own answers, and the predictions file."""
    outputs = []
    hook = task.network.register_forward_hook(lambda module, args, found: outputs.append(found.detach().double()))
    scores = pl.Trainer(**SILENT, precision=precision).test(task, data, verbose=False)[0]
    hook.remove()
    writer = PredictionWriter("predictions.csv")
    pl.Trainer(**SILENT, precision=precision, callbacks=[writer]).predict(task, data, return_predictions=False)
    task.float()
    return {name.removeprefix("test/"): value for name, value in scores.items()}, torch.cat(outputs)


def calibration_error(probability, hit, bins=15):
    place = np.minimum((probability * bins).astype(int), bins - 1)
    gaps = [(place == b).mean() * abs(probability[place == b].mean() - hit[place == b].mean()) for b in set(place)]
    return sum(gaps)


def mean_over(figure, columns):
    """The mean of a figure of scikit-learn's over columns (hits, predictions); NaN if there are none."""
    each = [figure(hits, predicted) for hits, predicted in columns]
    return np.mean(each) if each else math.nan


def expected_of_classes(kind, names, truth, file):
    """All figures of classes but the loss, from true labels and the predictions file."""
    p = file[[f"p_{name}" for name in names]].to_numpy()
    if kind == "multilabel":
        hits = truth.to_numpy()
        read = np.array([[name in str(text).split(";") for name in names] for text in file["prediction"]]).astype(int)
        figures = {"accuracy": (hits == read).mean()}
    else:
        labels, guesses = truth.iloc[:, 0].to_numpy(), file["prediction"].to_numpy()
        hits, read = (np.array([[name == label for name in names] for label in of]) for of in (labels, guesses))
        figures = {"accuracy": accuracy_score(labels, guesses)}
        if kind == "binary":
            figures["calibration_error"] = calibration_error(p[:, 1], hits[:, 1])
            p, hits, read = p[:, 1:], hits[:, 1:], read[:, 1:]
        else:
            figures["calibration_error"] = calibration_error(p.max(1), labels == guesses)
    with_some = [(h, q) for h, q in zip(hits.T, p.T, strict=True) if h.any()]
    return figures | {
        "f1": mean_over(f1_score, [(h, r) for h, r in zip(hits.T, read.T, strict=True) if h.any() or r.any()]),
        "auroc": mean_over(roc_auc_score, [(h, q) for h, q in with_some if not h.all()]),
        "average_precision": mean_over(average_precision_score, with_some),
    }


def loss_of_classes(kind, names, truth, outputs):
    """The mean loss in float64, from labels and the network's own answers."""
    if kind == "multilabel":
        return F.binary_cross_entropy_with_logits(outputs, torch.tensor(truth.to_numpy()).double())
    target = torch.tensor([names.index(label) for label in truth.iloc[:, 0]])
    if kind == "binary":
        return F.binary_cross_entropy_with_logits(outputs[:, 0], target.double())
    return F.cross_entropy(outputs, target)


def only(column, *values):
    return lambda held_out: held_out[held_out[column].isin(values)]


HELD_OUT = {
    "all": lambda held_out: held_out,
    "one row": lambda held_out: held_out[:1],
    "one class": lambda held_out: held_out[(held_out["binary"] == "no") & (held_out["multi"] == "low")],
    "the other class": lambda held_out: held_out[(held_out["binary"] == "yes") & (held_out["multi"] == "high")],
    "a class absent": only("multi", "low", "high"),
}


SHARPNESS = {"as trained": 1.0, "all tied": 0.0, "0 and 1": 1e3}
CASES = [("all", sharpness, precision) for sharpness in SHARPNESS for precision in PRECISIONS]
CASES += [(rows, sharpness, "bf16-true") for rows in list(HELD_OUT)[1:] for sharpness in ("as trained", "0 and 1")]


@pytest.mark.parametrize(("rows", "sharpness", "precision"), CASES)
@pytest.mark.parametrize("kind", CLASSES)
def test_scores_of_classes_are_those_of_scikit_learn_on_the_predictions_file(kind, rows, sharpness, precision, task_of):
    task = task_of(CLASSES[kind], SHARPNESS[sharpness])
    data, truth = data_of(CLASSES[kind], HELD_OUT[rows])
    scores, outputs = measured(task, data, precision)
    file = pd.read_csv("predictions.csv", index_col="id", keep_default_na=False)
    assert file.index.tolist() == truth.index.tolist()
    expected = expected_of_classes(kind, task.names, truth, file)
    expected["loss"] = float(loss_of_classes(kind, task.names, truth, outputs))
    # float32 sums; the file has every digit
    assert scores == pytest.approx(expected, rel=2e-6, abs=1e-6, nan_ok=True)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("label", NUMBERS)
def test_scores_of_numbers_are_those_of_scikit_learn_on_the_predictions_file(label, precision, task_of):
    task = task_of(label)
    data, truth = data_of(label)
    scores, outputs = measured(task, data, precision)
    file = pd.read_csv("predictions.csv", index_col="id")["prediction"]
    y, mean, std = truth[label].to_numpy(), task.data_identity["target_mean"], task.data_identity["target_std"]
    assert file.to_numpy() == pytest.approx(outputs[:, 0].numpy() * std + mean, rel=1e-15), "units add no rounding"
    assert scores["r2"] == pytest.approx(r2_score(y, file), rel=1e-5)
    assert scores["mae"] == pytest.approx(mean_absolute_error(y, file), rel=1e-5)
    assert scores["loss"] == pytest.approx(np.mean(((y - mean) / std - outputs[:, 0].numpy()) ** 2), rel=1e-5)


@pytest.mark.parametrize("label", [*CLASSES.values(), "pressure"], ids=[*CLASSES, "regression"])
def test_scores_do_not_depend_on_the_batches(label, task_of):
    settings = {} if label in ("pressure", CLASSES["multilabel"]) else {"class_weights": "balanced"}
    task = task_of(label, **settings)
    one, seven, all_rows = (measured(task, data_of(label, batch_size=n)[0])[0] for n in (1, 7, 64))
    # a batch of another size goes through other kernels
    assert one == pytest.approx(all_rows, rel=2e-6)
    assert seven == pytest.approx(all_rows, rel=2e-6)


def test_one_label_alone_is_scored_like_several():
    pl.seed_everything(0)
    task, data = GraphPredictionTask(**TINY), data_of(["one"], problem="multilabel")[0]
    pl.Trainer(**SILENT, max_steps=20, limit_val_batches=1).fit(task, data)
    scores, outputs = measured(task, data)
    file, truth = pd.read_csv("predictions.csv", index_col="id", keep_default_na=False), data_of(["one"])[1]
    expected = expected_of_classes("multilabel", ["one"], truth, file)
    expected["loss"] = float(loss_of_classes("multilabel", ["one"], truth, outputs))
    assert scores == pytest.approx(expected, rel=2e-6, abs=1e-6)


def test_a_weighted_loss_is_one_mean_over_the_split(task_of):
    task = task_of("multi", class_weights=[0.0, 1.0, 3.0])
    data, truth = data_of("multi")
    scores, outputs = measured(task, data, "bf16-true")
    target = torch.tensor([task.names.index(label) for label in truth["multi"]])
    weight = torch.tensor([0.0, 1.0, 3.0]).double()
    assert scores["loss"] == pytest.approx(float(F.cross_entropy(outputs, target, weight=weight)), rel=1e-6)


# ---------------------------------------------------------------------- what isn't defined

UNDEFINED = {
    "binary, none of the second": (
        "binary",
        only("binary", "no"),
        "test/auroc, test/average_precision, test/f1: NaN, as the test split has no row of 'yes'",
    ),
    "binary, none of the first": (
        "binary",
        only("binary", "yes"),
        "test/auroc: NaN, as the test split has no row of 'no'",
    ),
    "multiclass, one absent": (
        "multi",
        only("multi", "low", "high"),
        "test/auroc, test/average_precision, test/f1: without some classes, as the test split has no row of 'mid'",
    ),
    "a label in every row": (
        ["one", "two"],
        only("one", 1),
        "test/auroc: without some classes, as the test split has no row without 'one'",
    ),
    "one number": ("pressure", lambda held_out: held_out[:1], "test/r2: NaN, as the test split has 1 row"),
    "equal numbers": (
        "pressure",
        lambda held_out: held_out.assign(pressure=101325.0),
        "test/r2: NaN, as the test split has no two numbers that differ",
    ),
}


@pytest.fixture
def said(monkeypatch):
    """What is said of scores, warnings and notes."""
    lines = []
    for name in ("rank_zero_warn", "rank_zero_info"):
        monkeypatch.setattr(f"zoo.tasks.scores.{name}", lambda line, **_: lines.append(line))
    return lines


@pytest.mark.parametrize("case", UNDEFINED)
def test_one_line_names_the_scores_and_what_they_lack(case, said, task_of):
    label, rows, line = UNDEFINED[case]
    task = task_of(label)
    with torch.no_grad():  # of the classes that are there, whatever the row
        task.network.readout_bias.copy_(torch.tensor([9.0, 9.0, -9.0]) if label == "multi" else torch.tensor(-9.0))
    said.clear()
    scores, _ = measured(task, data_of(label, rows)[0])
    assert said == [line]
    names = [name.removeprefix("test/") for name in line.partition(":")[0].split(", ")]
    assert {name for name in scores if math.isnan(scores[name])} == (set(names) if "NaN" in line else set())


def test_a_loss_of_rows_that_weigh_nothing_is_nan_and_said(said, task_of):
    task = task_of("multi", class_weights=[1.0, 1.0, 0.0])
    scores, _ = measured(task, data_of("multi", only("multi", "mid"))[0])
    assert math.isnan(scores["loss"])
    assert "test/loss: NaN, as the test split has only rows of classes that weigh nothing" in said


def test_answers_that_are_no_numbers_make_no_score(said, task_of):
    task = task_of("binary")
    forward = task.forward
    task.forward = lambda values: forward(values).index_fill(0, torch.tensor([1]), math.nan)
    scores = pl.Trainer(**SILENT).test(task, data_of("binary")[0], verbose=False)[0]
    undefined = {name for name, value in scores.items() if math.isnan(value)}
    assert undefined == {f"test/{name}" for name in ("loss", "auroc", "average_precision", "calibration_error")}
    assert [line.partition(": ")[2].partition(" (")[0] for line in said] == [
        "NaN, as the test split has predictions that are no finite numbers"
    ]


def test_a_run_says_it_once_and_not_in_its_sanity_check(said):
    data, _ = data_of("pressure", lambda held_out: held_out[:1])
    checks = []

    class Watch(pl.Callback):
        def on_sanity_check_end(self, trainer, pl_module):
            checks.append(list(said))

    stop = EarlyStopping("val/r2", mode="max")
    task = GraphPredictionTask(**TINY)
    pl.Trainer(**SILENT, max_epochs=3, callbacks=[stop, Watch()]).fit(task, data)
    assert checks == [[]]
    assert said == [
        "val/r2: NaN, as the val split has 1 row; EarlyStopping can't compare it, so give a monitor that has a value"
    ]


# ---------------------------------------------------------------------- pictures and text


@pytest.mark.parametrize(
    ("sharpness", "precision"),
    [*((1.0, precision) for precision in PRECISIONS), (0.0, "32-true"), (300.0, "bf16-true")],
)
def test_scores_of_pictures_are_those_of_scikit_learn_on_the_predictions_file(sharpness, precision):
    pl.seed_everything(0)
    options = {"img_size": 8, "patch_size": 4, "embed_dim": 24, "depth": 1, "num_heads": 3}
    task, data = ImageClassificationTask(options=options, lr=3e-3), ImageDataModule(source="digits", batch_size=50)
    pl.Trainer(**SILENT, max_steps=15, limit_val_batches=0).fit(task, data)
    with torch.no_grad():
        task.network.head.weight.mul_(sharpness)
        task.network.head.bias.mul_(sharpness)
    scores, outputs = measured(task, data, precision)
    file = pd.read_csv("predictions.csv", dtype=str)
    target = torch.cat([batch["target"] for batch in data.test_dataloader()])
    truth = np.array([task.classes[i] for i in target])
    places = [file[f"class{suffix}"] for suffix in ("", "_2", "_3", "_4", "_5")]
    expected = {
        "accuracy": accuracy_score(truth, file["class"]),
        "accuracy_top5": np.mean(np.any([place == truth for place in places], axis=0)),
        "f1": f1_score(truth, file["class"], average="macro"),  # of classes that are there or were read
        "calibration_error": calibration_error(
            file["probability"].to_numpy(float), (file["class"] == truth).to_numpy()
        ),
        "loss": float(F.cross_entropy(outputs, target)),
    }
    assert scores == pytest.approx(expected, rel=2e-6, abs=1e-6)


@pytest.mark.parametrize(
    ("sharpness", "precision"), [*((1.0, precision) for precision in PRECISIONS), (50.0, "32-true")]
)
def test_scores_of_text_are_those_of_a_float64_loop(sharpness, precision, trained, corpus):
    task = LanguageModelTask.load_from_checkpoint(trained)
    with torch.no_grad():
        task.network.head.weight.mul_(sharpness)  # sharper, some tokens' probability is 0 in float32
    data = TextDataModule(path=str(corpus), tokenizer=str(trained), window=16, batch_size=5)
    outputs = []
    task.network.register_forward_hook(lambda module, args, found: outputs.append(found.detach().double()))
    scores = pl.Trainer(**SILENT, precision=precision).test(task, data, verbose=False)[0]
    nats, n_bytes, tokens = 0.0, 0, 0
    for logits, batch in zip(outputs, data.test_dataloader(), strict=True):
        for scored, token in zip(logits.flatten(0, 1).log_softmax(-1), batch[:, 1:].flatten().tolist(), strict=True):
            nats -= float(scored[token])
            n_bytes += len(task.tokenizer.token_bytes[token])
            tokens += 1
    assert scores["test/loss"] == pytest.approx(nats / tokens, rel=1e-6)
    assert scores["test/bits_per_byte"] == pytest.approx(nats / n_bytes / math.log(2), rel=1e-6)
    assert scores["test/perplexity"] == pytest.approx(math.exp(nats / tokens), rel=1e-4)
    assert sharpness == 1 or max(float((-found.log_softmax(-1)).max()) for found in outputs) > 104, "exp(-104) is 0"


# ---------------------------------------------------------------------- the metrics alone


@pytest.mark.parametrize("make", [CrossEntropy, Perplexity, BitsPerByte, MeanLoss, lambda: AccuracyOfBest(5)])
def test_sums_stay_in_float32_whatever_the_model_is_cast_to(make):
    metric = make().to(torch.bfloat16).half().to(dtype=torch.float64)
    metric.reset()
    assert {getattr(metric, name).dtype for name in metric._defaults} == {torch.float32}


def test_a_mean_over_many_batches_does_not_drift():
    metric = MeanLoss()
    metric.update(torch.full((1,), 0.1), torch.full((1,), 3e7))
    for _ in range(3_000):
        metric.update(torch.tensor([0.7]), torch.tensor([1.1]))  # below the last bit of what there is
    expected = (0.1 * 3e7 + 3_000 * 0.7 * 1.1) / (3e7 + 3_000 * 1.1)
    assert float(metric.compute()) == pytest.approx(expected, rel=2e-7)


def test_of_equal_probabilities_the_first_classes_are_best():
    values, places = best(torch.tensor([[0.1, 0.3, 0.3, 0.3], [0.25] * 4]), 2)
    assert places.tolist() == [[1, 2], [0, 1]]
    assert values.tolist() == torch.tensor([[0.3, 0.3], [0.25, 0.25]]).tolist()


def test_written_numbers_give_back_every_float():
    numbers = torch.rand(200, 2).pow(12)
    written = torch.tensor([[float(repr(value)) for value in row] for row in as_written(numbers)])
    assert torch.equal(written, numbers)
    assert as_written(torch.tensor([[0.1]])) == [[0.1]], "and no more digits than that takes"


def test_macro_f1_of_pictures_leaves_out_classes_that_are_neither_there_nor_read():
    scores = picture_metrics(["ant", "bee", "cow"], "test/")
    probabilities = torch.tensor([[0.8, 0.1, 0.1], [0.7, 0.2, 0.1], [0.1, 0.8, 0.1]])
    target = torch.tensor([0, 1, 1])
    losses = -probabilities.log().gather(1, target.unsqueeze(1)).squeeze(1)
    scores.update(
        losses=losses, weights=torch.ones(3), preds=torch.tensor([0, 0, 1]), probabilities=probabilities, target=target
    )
    assert float(scores.compute()["test/f1"]) == pytest.approx(2 / 3)
    assert scores["f1"].reason == "no row of 'cow'"


def test_what_is_said_of_a_score_is_not_said_again_in_other_words(said):
    data, _ = data_of("multi", only("multi", "low", "high"))

    class Turn(pl.Callback):
        """Lets the network see the absent class at the second validation, and then no more."""

        def on_validation_start(self, trainer, pl_module):
            with torch.no_grad():
                pl_module.network.readout_bias[2] = 50.0 if trainer.current_epoch == 1 else -50.0

    task = GraphPredictionTask(**TINY)
    pl.Trainer(**SILENT, max_epochs=3, num_sanity_val_steps=0, callbacks=[Turn()]).fit(task, data)
    assert [line.partition(":")[0] for line in said] == ["val/auroc, val/average_precision, val/f1"]


@pytest.mark.parametrize("classes", [2, 3])
def test_a_probability_of_one_is_in_the_last_bin_with_its_neighbours(classes):
    metric = CalibrationError()
    if classes == 2:
        metric.update(torch.tensor([1.0, 0.95]), torch.tensor([0, 1]))
    else:
        metric.update(torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.95, 0.05]]), torch.tensor([1, 1]))
    assert float(metric.compute()) == pytest.approx(0.975 - 0.5)
