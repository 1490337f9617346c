"""What a picture run shows in TensorBoard: confusions, the worst mistakes, metrics, and how fast it goes."""

from types import SimpleNamespace

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from matplotlib.backends.backend_agg import FigureCanvasAgg
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import zoo.callbacks.pictures as drawing
from datamodules import ImageDataModule, TextDataModule
from zoo.callbacks import MetricPictures, Mistakes, PicturesPerSecond
from zoo.callbacks.mistakes import confusion_figure, mistakes_figure
from zoo.errors import ZooError
from zoo.tasks import ImageClassificationTask, LanguageModelTask

TINY = {"img_size": 8, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 3}
SILENT = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
IDENTITY = {"classes": ["ant", "bee", "cow"], "mean": [0.5], "std": [0.25]}


def digits(**options):
    return ImageDataModule(**{"source": "digits", "batch_size": 64, **options})


# ---------------------------------------------------------------------- counting by hand


def shown(callback, batches, tmp_path, split="validation", identity=IDENTITY, **trainer):
    """The figures the callback draws of batches (probabilities, target, image, id), by name."""
    task = ImageClassificationTask(options=TINY)
    task.classes, task.identity = identity["classes"], identity
    logger, figures = TensorBoardLogger(tmp_path), {}
    logger.experiment.add_figure = lambda name, figure, step: figures.update({name: figure})
    trainer = SimpleNamespace(
        **{"sanity_checking": False, "is_global_zero": True, "loggers": [logger], "global_step": 7, **trainer}
    )
    getattr(callback, f"on_{split}_start")(trainer, task)
    for i, (probabilities, target, image, names) in enumerate(batches):
        batch = {"image": image, "target": torch.tensor(target), "id": names}
        outputs = {"loss": torch.tensor(0.0), "probabilities": torch.tensor(probabilities)}
        getattr(callback, f"on_{split}_batch_end")(trainer, task, outputs, batch, i)
    getattr(callback, f"on_{split}_end")(trainer, task)
    return figures


def titles(figure):
    return [axes.get_title() for axes in figure.axes]


def pictures(n, seed=0, channels=1):
    return torch.randn(n, channels, 4, 4, generator=torch.Generator().manual_seed(seed))


BATCHES = [
    (
        [[0.7, 0.2, 0.1], [0.1, 0.8, 0.1], [0.2, 0.5, 0.3], [0.6, 0.3, 0.1]],
        [0, 1, 2, 1],
        pictures(4),
        [f"first/{i}" for i in range(4)],
    ),
    (
        [[0.05, 0.9, 0.05], [0.3, 0.3, 0.4], [0.8, 0.15, 0.05], [0.8, 0.05, 0.15]],
        [0, 0, 2, 2],
        pictures(4, 1),
        [f"second/{i}" for i in range(4)],
    ),
]
COUNTS = [[1, 1, 1], [1, 1, 0], [2, 1, 0]]


@pytest.mark.parametrize("split", ["validation", "test"])
def test_confusions_of_all_batches_are_counted(split, tmp_path):
    callback = Mistakes()
    for _ in range(2):  # each time anew
        figures = shown(callback, BATCHES, tmp_path, split)
        name = {"validation": "val", "test": "test"}[split]
        assert set(figures) == {f"confusion/{name}", f"mistakes/{name}"}
        (axes,) = figures[f"confusion/{name}"].axes
        written = {(round(t.get_position()[1]), round(t.get_position()[0])): t.get_text() for t in axes.texts}
        assert written == {(i, j): str(n) for i, row in enumerate(COUNTS) for j, n in enumerate(row) if n}
        assert [label.get_text() for label in axes.get_yticklabels()] == ["ant", "bee", "cow"]
        assert [label.get_text() for label in axes.get_xticklabels()] == ["ant", "bee", "cow"]
        assert axes.get_ylabel() == "true class"
        shares = np.array(COUNTS) / np.array(COUNTS).sum(1, keepdims=True)
        np.testing.assert_allclose(axes.images[0].get_array(), np.sqrt(shares), rtol=1e-6)


def test_mistakes_are_shown_from_the_least_probability_of_the_true_class_on(tmp_path):
    figure = shown(Mistakes(), BATCHES, tmp_path)["mistakes/val"]
    assert titles(figure) == [
        "ant\nread as bee, 0.90\nsecond/0",  # 0.05
        "cow\nread as ant, 0.80\nsecond/2",  # 0.05 as well, and later
        "cow\nread as ant, 0.80\nsecond/3",  # 0.15
        "cow\nread as bee, 0.50\nfirst/2",  # 0.3
        "bee\nread as ant, 0.60\nfirst/3",  # 0.3
        "ant\nread as cow, 0.40\nsecond/1",  # 0.3
    ]


@pytest.mark.parametrize("places", [1, 5, 16])
@pytest.mark.parametrize("ties", [False, True])
def test_the_worst_of_many_mistakes_are_kept_whatever_their_order(places, ties, tmp_path):
    random = np.random.default_rng(0)
    true = random.permutation(60) / 300
    if ties:
        true = np.round(true, 2)  # three to five of each
    rows = [[p, (1 - p) * 0.6, (1 - p) * 0.4] for p in true]
    batches = [
        (rows[i : i + 7], [0] * len(rows[i : i + 7]), pictures(len(rows[i : i + 7])), [str(p) for p in true[i : i + 7]])
        for i in range(0, 60, 7)
    ]
    figure = shown(Mistakes(places), batches, tmp_path)["mistakes/val"]
    assert [float(title.splitlines()[-1]) for title in titles(figure)] == sorted(true)[:places]


@pytest.mark.parametrize(("channels", "mean", "std"), [(1, [0.5], [0.25]), (3, [0.4, 0.5, 0.6], [0.2, 0.3, 0.1])])
def test_pictures_are_shown_as_they_were_before_normalisation(channels, mean, std, tmp_path):
    original = torch.rand(1, channels, 4, 4)
    normal = (original - torch.tensor(mean).view(-1, 1, 1)) / torch.tensor(std).view(-1, 1, 1)
    identity = IDENTITY | {"mean": mean, "std": std}
    figure = shown(Mistakes(), [([[0.9, 0.1, 0.0]], [1], normal, ["a"])], tmp_path, identity=identity)["mistakes/val"]
    (image,) = figure.axes[0].images
    assert (image.norm.vmin, image.norm.vmax) == (0, 1)
    assert image.get_cmap().name == "gray"
    expected = original[0].permute(1, 2, 0)  # (4, 4, C)
    np.testing.assert_allclose(np.asarray(image.get_array()).reshape(expected.shape), expected, atol=1e-6)


def test_no_mistakes_no_grid(tmp_path):
    assert set(shown(Mistakes(), [([[0.9, 0.1, 0.0]], [0], pictures(1), ["a"])], tmp_path)) == {"confusion/val"}


@pytest.mark.parametrize("quiet", [{"sanity_checking": True}, {"is_global_zero": False}])
def test_nothing_is_drawn_in_the_sanity_check_or_by_other_processes(quiet, tmp_path):
    assert shown(Mistakes(), BATCHES, tmp_path, **quiet) == {}


@pytest.mark.parametrize("pictures", [0, -1])
def test_a_grid_without_places_is_refused(pictures):
    with pytest.raises(ZooError, match=rf"Mistakes\.pictures: got {pictures}; must be at least 1"):
        Mistakes(pictures)


# ---------------------------------------------------------------------- legibility


def extents(figure, artists):
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return [artist.get_window_extent(canvas.get_renderer()) for artist in artists], figure.bbox


def apart(boxes):
    return all(not a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])


@pytest.mark.parametrize("n", [1, 3, 5, 16])
def test_titles_of_long_names_are_whole_and_apart(n, tmp_path):
    names = ["Northern long-eared owl, juvenile male", "golden retriever of uncommon size", "cow"]
    rows = [[[0.05, 0.9, 0.05], [0.05, 0.05, 0.9], [0.9, 0.05, 0.05]][i % 3] for i in range(n)]
    ids = [f"a folder/in a folder/IMG_20240101_1234{i:02}.jpg" for i in range(n)]
    batch = (rows, [i % 3 for i in range(n)], pictures(n), ids)
    figure = shown(Mistakes(), [batch], tmp_path, identity=IDENTITY | {"classes": names})["mistakes/val"]
    assert len(figure.axes) == n
    boxes, page = extents(figure, [axes.title for axes in figure.axes])
    assert apart(boxes)
    assert all(page.x0 <= b.x0 and b.x1 <= page.x1 and page.y0 <= b.y0 and b.y1 <= page.y1 for b in boxes)
    assert titles(figure)[0].startswith("Northern long-eared owl, juve…\nread as golden retriever of…, 0.90\n")


@pytest.mark.parametrize("n", [2, 10, 20, 100, 1000])
def test_names_of_classes_are_whole_and_apart(n):
    names = [f"the class with number {i}" if i % 2 else f"class_{i}" for i in range(n)]
    figure = confusion_figure(torch.eye(n) * 100 + 1, names)
    (axes,) = figure.axes
    for labels in (axes.get_xticklabels(), axes.get_yticklabels()):
        boxes, page = extents(figure, labels)
        assert apart(boxes)
        assert all(page.x0 <= b.x0 and b.x1 <= page.x1 and page.y0 <= b.y0 and b.y1 <= page.y1 for b in boxes)
    places = axes.get_yticks()
    shown_names = [label.get_text() for label in axes.get_yticklabels()]
    assert all(names[i].startswith(text.rstrip("…")) for i, text in zip(places, shown_names, strict=True))
    assert len(axes.texts) == (n * n if n <= 20 else 0)


def test_a_dollar_in_a_name_is_no_formula(tmp_path):
    identity = IDENTITY | {"classes": ["$\\no$", "b", "c"]}
    figures = shown(Mistakes(), [([[0.1, 0.9, 0.0]], [0], pictures(1), ["$_$.png"])], tmp_path, identity=identity)
    for figure in figures.values():
        FigureCanvasAgg(figure).draw()
    assert titles(figures["mistakes/val"]) == ["$\\no$\nread as b, 0.90\n$_$.png"]


def test_a_grid_of_oblong_pictures_has_their_shape():
    figure = mistakes_figure([(torch.zeros(1, 4, 8), "a\nb\nc")] * 5, [0.5], [0.5])
    assert figure.get_size_inches().tolist() == pytest.approx([9.6, 2 * (1.2 + 0.7)])


# ---------------------------------------------------------------------- in a run


def events_of(logger):
    events = EventAccumulator(logger.log_dir, size_guidance={"images": 0})
    events.Reload()
    return events


def run(tmp_path, callbacks, options=None, logger=None, **settings):
    pl.seed_everything(0)
    small = {} if "resnet" in settings.get("name", "") else TINY
    task = ImageClassificationTask(options={**small, **(options or {})}, **settings)
    trainer = pl.Trainer(
        **SILENT,
        max_steps=4,
        val_check_interval=2,
        check_val_every_n_epoch=None,
        limit_val_batches=2,
        limit_test_batches=2,
        log_every_n_steps=1,
        logger=logger or TensorBoardLogger(tmp_path),
        callbacks=callbacks,
    )
    data = digits(image_size=8)
    trainer.fit(task, data)
    return task, data, trainer


def test_figures_are_in_tensorboard_after_each_validation_and_test_and_not_the_sanity_check(tmp_path):
    task, data, trainer = run(tmp_path, [Mistakes(4)])
    trainer.test(task, data, verbose=False)
    events = events_of(trainer.logger)
    assert set(events.Tags()["images"]) == {"confusion/val", "mistakes/val", "confusion/test", "mistakes/test"}
    for name in ("confusion/val", "mistakes/val"):
        assert [image.step for image in events.Images(name)] == [2, 4]
    assert [image.step for image in events.Images("confusion/test")] == [4]
    grid = events.Images("mistakes/val")[0]
    assert grid.width == 4 * 240


def test_a_run_without_tensorboard_goes_on(tmp_path):
    run(tmp_path, [Mistakes(), MetricPictures()], logger=CSVLogger(tmp_path))


def test_mistakes_of_another_task_are_refused_by_name(corpus, shared_cache):
    task = LanguageModelTask(d_model=16, n_heads=2, d_ff=32, n_layers=1, mlp_hidden=[8])
    data = TextDataModule(path=str(corpus), vocab_size=300, window=16, batch_size=4, cache_dir=str(shared_cache))
    trainer = pl.Trainer(**SILENT, logger=False, max_steps=1, callbacks=[Mistakes()])
    with pytest.raises(ZooError, match=r"^Mistakes: got LanguageModelTask; it shows an ImageClassificationTask's"):
        trainer.fit(task, data)


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({"share_mlp": False}, {"maps", "M", "head_metrics"}),
        ({}, {"maps", "M", "head_metrics"}),
        ({"use_layer_bias": True}, {"maps", "M", "head_metrics"}),
        ({"use_M": False}, {"maps"}),
    ],
)
def test_maps_and_whatever_an_attention_shows_are_pictures(options, shown, tmp_path):
    _, _, trainer = run(tmp_path, [MetricPictures()], options)
    events = events_of(trainer.logger)
    assert set(events.Tags()["images"]) == {f"attention/{name}" for name in shown}
    for name in shown:
        assert [image.step for image in events.Images(f"attention/{name}")] == [2, 4]


def test_metrics_shown_are_of_the_averaged_weights_that_were_validated(tmp_path, monkeypatch):
    drawn, look = [], drawing.look

    def watched(*args, **kwargs):
        looks = look(*args, **kwargs)
        drawn.append(looks[0].shown["M"].values.clone())
        return looks

    monkeypatch.setattr(drawing, "look", watched)
    average = EMAWeightAveraging(decay=0.5)
    task, _, _ = run(tmp_path, [average, MetricPictures()], {"use_mlp": False, "depth": 1}, lr=1e-2)
    assert torch.equal(drawn[-1], task.network.blocks[0].attn.M0), "at the end the task has the average"
    assert not torch.equal(drawn[0], drawn[-1])


def test_pictures_of_a_model_without_attention_are_refused_by_name(tmp_path):
    message = "^MetricPictures: got ImageClassificationTask around ResNet, which has no attention to draw"
    with pytest.raises(ZooError, match=message):
        run(tmp_path, [MetricPictures()], name="test_resnet")


def test_throughput_is_logged_as_pictures_a_second(tmp_path):
    _, _, trainer = run(tmp_path, [PicturesPerSecond()])
    values = [event.value for event in events_of(trainer.logger).Scalars("pictures_per_second")]
    assert len(values) == 4
    assert all(value > 64 for value in values), "a step of 64 pictures takes well below a second"


def test_throughput_counts_the_pictures_of_its_steps(monkeypatch):
    clock = iter([0.0, 2.0, 10.0, 14.0])
    monkeypatch.setattr("zoo.callbacks.throughput.time.perf_counter", lambda: next(clock))
    logged = []
    module = SimpleNamespace(log=lambda name, value, prog_bar: logged.append((name, value)))
    callback = PicturesPerSecond()
    for _ in range(2):
        batch = {"image": torch.zeros(5, 1, 8, 8), "target": torch.zeros(5), "id": ["x"] * 5}
        callback.on_train_batch_start(SimpleNamespace(world_size=3), module, batch, 0)
        callback.on_train_batch_end(SimpleNamespace(world_size=3), module, None, batch, 0)
    assert logged == [("pictures_per_second", 3 * 5 / 2.0), ("pictures_per_second", 2 * 3 * 5 / 6.0)]
