"""What every named corpus, picture set and table has to keep to, none of them by name; and the example of the docs."""

import dataclasses
import hashlib
import re
import sys
import textwrap
import urllib.request
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml

import datamodules
from datamodules import (
    GraphTableDataModule,
    ImageDataModule,
    SequenceDataModule,
    TextDataModule,
    TextPairDataModule,
)
from datamodules.sources import (
    CORPORA,
    PAIRS,
    PICTURES,
    SEQUENCES,
    TABLES,
    CorpusData,
    CorpusSource,
    PairData,
    PictureData,
    PictureSource,
    TableData,
    TableSource,
    list_corpora,
    list_pairs,
    list_pictures,
    list_sequences,
    list_tables,
    make_source,
    register_corpus,
    register_pictures,
    register_table,
)
from zoo.checkpoint.identity import read_checkpoint, read_claim
from zoo.errors import ZooError

REGISTERS = {"corpus": CORPORA, "pairs": PAIRS, "sequences": SEQUENCES, "pictures": PICTURES, "table": TABLES}
MODULES = {
    "corpus": TextDataModule,
    "pairs": TextPairDataModule,
    "sequences": SequenceDataModule,
    "pictures": ImageDataModule,
    "table": GraphTableDataModule,
}
OPTIONS = {
    "corpus": {"tokenizer": "byte", "window": 16},
    "pairs": {"tokenizer": "byte", "window": 256},
    "sequences": {"n_train": 20, "n_val": 5, "n_test": 5},
}
ALL = [
    *(("corpus", name) for name in list_corpora()),
    *(("pairs", name) for name in list_pairs()),
    *(("sequences", name) for name in list_sequences()),
    *(("pictures", name) for name in list_pictures()),
    *(("table", name) for name in list_tables()),
]
DOCS = Path(__file__).parents[2] / "docs" / "data.md"


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError("no network in tests")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    monkeypatch.setattr("socket.socket.connect", refuse)


@pytest.fixture
def registers(monkeypatch):
    """Registers that forget what a test enters."""
    for register in REGISTERS.values():
        register.names()
        monkeypatch.setattr(register, "_items", dict(register._items))
    return REGISTERS


def of_name(kind, name, folder=None):
    return make_source(REGISTERS[kind], name, folder if REGISTERS[kind].get(name).own_folder else None)


def at_hand(kind, name):
    """A source's data; its test is skipped where that isn't here, and may not be."""
    source = of_name(kind, name)
    try:
        return source, source.read()
    except ZooError as error:
        if not re.search(r"--data\.download true fetches it|pip install", str(error)):
            raise
        pytest.skip(str(error))


def digest(value):
    """A fingerprint of data, whatever it is made of."""
    found = hashlib.sha256()

    def add(part):
        if dataclasses.is_dataclass(part):
            part = {item.name: getattr(part, item.name) for item in dataclasses.fields(part)}
        if isinstance(part, dict):
            for name, item in sorted(part.items()):
                found.update(f"{name}:".encode())
                add(item)
        elif isinstance(part, np.ndarray):
            found.update(f"{part.dtype}{part.shape}".encode() + part.tobytes())
        elif isinstance(part, pd.DataFrame):
            found.update(part.to_csv().encode())
        elif isinstance(part, (list, tuple)):
            for item in part:
                add(item)
        elif isinstance(part, Path):
            found.update(part.read_bytes())
        else:
            found.update(f"{part!r};".encode())

    add(value)
    return found.hexdigest()


# ---------------------------------------------------------------------- every source


@pytest.mark.parametrize(("kind", "name"), ALL)
def test_it_says_what_it_is_and_whose(kind, name):
    text = REGISTERS[kind].get(name).__doc__
    assert re.match(r"\S.{10,110}\.\n", text), "one line for the help"
    assert "Source: " in text
    assert name in MODULES[kind].sources.names()


@pytest.mark.parametrize(("kind", "name"), ALL)
def test_it_gives_the_same_every_time(kind, name):
    source, data = at_hand(kind, name)
    assert digest(of_name(kind, name).read()) == digest(data)
    assert source.shown


@pytest.mark.parametrize(("kind", "name"), ALL)
def test_without_a_network_it_is_at_hand_or_says_how_to_get_it(kind, name, tmp_path):
    source = of_name(kind, name, tmp_path)
    if not source.own_folder:
        source.fetch()
        at_hand(kind, name)
        return
    with pytest.raises(ZooError, match=rf"data\.path: there is no {name} in .* --data\.download true fetches it"):
        source.read()
    with pytest.raises(ZooError, match=rf"data\.download: {name} couldn't be downloaded .* by hand: "):
        source.fetch()
    assert not list(tmp_path.iterdir()), "nothing half-written is left"


@pytest.mark.parametrize(("kind", "name"), ALL)
def test_its_data_module_makes_batches_of_it(kind, name, shared_cache):
    _, given = at_hand(kind, name)
    if kind == "table" and (given.label is None or given.edges is None):
        with pytest.raises(ZooError, match=r"data\.(label|edges): got none"):
            GraphTableDataModule(source=name).setup("fit")
        return
    data = MODULES[kind](source=name, batch_size=2, **OPTIONS.get(kind, {}))
    data.prepare_data()
    data.setup("fit")
    assert data.identity()["source"]["name"]
    assert data.digest
    for loader in (data.train_dataloader(), data.val_dataloader(), data.test_dataloader()):
        batch = next(iter(loader))
        if kind == "pictures":
            targets = batch["target"]
            assert 0 <= targets.min() <= targets.max() < len(given.classes)
            channels = REGISTERS[kind].get(name).usual.channels
            assert batch["image"].shape[1:] == (channels, *data.identity()["image_size"])


@pytest.mark.parametrize("kind", REGISTERS)
def test_the_help_names_all_of_them_once(kind):
    for _ in range(2):
        MODULES[kind].name_sources()
    for name in REGISTERS[kind].names():
        assert MODULES[kind].__doc__.count(f"{name} ({REGISTERS[kind].get(name).__doc__.partition('.')[0]}") == 1


# ---------------------------------------------------------------------- what is refused


def test_an_unknown_name_is_refused_with_the_nearest():
    for make, message in (
        (lambda: ImageDataModule("cifar"), "data.source: got 'cifar', which is none; do you mean cifar1"),
        (lambda: TextDataModule(source="stdlb"), "data.source: got 'stdlb', which is none; do you mean stdlib"),
        (
            lambda: GraphTableDataModule(source="breast"),
            "data.source: got 'breast', which is none; do you mean breast_",
        ),
    ):
        with pytest.raises(ZooError, match=re.escape(message)):
            make()


def test_what_a_source_does_not_take_is_refused(tmp_path):
    for make, message in (
        (lambda: TextDataModule(path="x", source="stdlib"), r"data\.path: got 'x' with source stdlib, .* leave"),
        (lambda: GraphTableDataModule("x.csv", source="breast_cancer"), r"'x\.csv' with source breast_cancer"),
        (lambda: GraphTableDataModule(pd.DataFrame(), source="breast_cancer"), r"data\.features: got a DataFrame with"),
        (lambda: ImageDataModule("digits", source_options={"a": 1}), r"data\.source_options: got 'a', .* of digits"),
        (lambda: ImageDataModule(path="x", source_options={"a": 1}), r"data\.source_options: .* with source folder"),
        (lambda: TextDataModule("x", source_options={"a": 1}), r"data\.source_options: .* leave them out"),
        (lambda: GraphTableDataModule("x.csv", source_options={"a": 1}), r"data\.source_options: .* leave them out"),
    ):
        with pytest.raises(ZooError, match=message):
            make()


PIXELS = np.zeros((4, 2, 2), dtype=np.uint8)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CorpusData({}), "at least one"),
        (lambda: CorpusData({"a": 1}), "document 'a' is a int"),
        (lambda: PairData([]), "at least one"),
        (lambda: PairData([("a", "")]), "pair 0 is .*, and must be two texts"),
        (lambda: PairData([("a", 1)]), "pair 0 is .*, and must be two texts"),
        (lambda: PictureData(PIXELS, [0, 1, 0], ["a", "b"]), "not a label for each picture: 3 for 4"),
        (lambda: PictureData(PIXELS, [0, 1, 0, 2], ["a", "b"]), "labels of no class"),
        (lambda: PictureData(PIXELS, ["a", "b", "a", "b"], ["a", "b"]), "labels of no class"),
        (lambda: PictureData(PIXELS, [0, 1, 0, 1], ["a", "a"]), "classes must be different"),
        (lambda: PictureData(PIXELS.astype(float), [0, 1, 0, 1], ["a", "b"]), r"in uint8"),
        (lambda: PictureData(PIXELS[0], [0, 1], ["a", "b"]), r"in uint8"),
        (lambda: PictureData(PIXELS, [0, 1, 0, 1], ["a", "b"], ["train"] * 3), "splits must be"),
        (lambda: PictureData(PIXELS, [0, 1, 0, 1], ["a", "b"], ["training"] * 4), "splits must be"),
        (lambda: TableData("t.csv"), "table is a str"),
        (lambda: TableData(pd.DataFrame(), edges="e.csv"), "edges is a str"),
    ],
)
def test_data_that_does_not_agree_is_refused_by_what_is_wrong(registers, make, message):
    with pytest.raises(ValueError, match=message):
        make()

    @register_table("wrong")
    class Wrong(TableSource):
        """Data that does not agree."""

        def load(self):
            return make()

    with pytest.raises(ZooError, match=rf"data\.source: wrong gives no data \(ValueError: .*{message}.*mend .*load"):
        GraphTableDataModule(source="wrong").setup("fit")


def test_a_class_that_is_no_source_is_not_registered(registers):
    class Bare(CorpusSource):
        def load(self):
            return CorpusData({"a": "b"})

    for register, thing, message in (
        (register_corpus("bare"), Bare, "bare has no docstring"),
        (register_pictures("bare"), Bare, "bare is no PictureSource"),
        (register_corpus("bare"), lambda: None, "bare is no CorpusSource"),
    ):
        with pytest.raises(ZooError, match=message):
            register(thing)


# ---------------------------------------------------------------------- fetched, and in files


@pytest.fixture
def fetched(registers):
    @register_corpus("fetched")
    class Fetched(CorpusSource):
        """A corpus that is fetched."""

        own_folder = "poems"
        breaks_off = False
        fetches = 0

        def download(self, into):
            type(self).fetches += 1
            (into / "poems").mkdir()
            if self.breaks_off:
                raise TimeoutError("silent")
            (into / "poems" / "poems.txt").write_text("a line\n" * 200)

        def load(self):
            return CorpusData({"poems": self.files / "poems.txt"} if self.files.joinpath("poems.txt").is_file() else {})

    return Fetched


def test_a_corpus_is_fetched_once_and_only_if_asked(fetched, tmp_path):
    settings = {"source": "fetched", "tokenizer": "byte", "window": 8, "cache_dir": str(tmp_path / "cache")}
    with pytest.raises(ZooError, match=r"there is no fetched in .*--data\.download true fetches it"):
        TextDataModule(path=str(tmp_path), **settings).prepare_data()
    fetched.breaks_off = True
    with pytest.raises(ZooError, match=r"data\.download: fetched couldn't be downloaded to .* \(silent\)"):
        TextDataModule(path=str(tmp_path), download=True, **settings).prepare_data()
    assert not list(tmp_path.iterdir())
    fetched.breaks_off = False
    for download in (True, True, False):
        data = TextDataModule(path=str(tmp_path), download=download, **settings)
        data.prepare_data()
        data.setup("fit")
    assert fetched.fetches == 2
    assert data.identity()["source"]["name"] == "fetched"
    (tmp_path / "poems" / "poems.txt").unlink()
    with pytest.raises(ZooError, match=r"fetched in .*poems is incomplete or damaged"):
        TextDataModule(path=str(tmp_path), **settings).prepare_data()


def test_fetched_data_is_looked_for_in_the_cache(fetched, monkeypatch, tmp_path):
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "cache"))
    source = make_source(CORPORA, "fetched")
    source.fetch()
    assert source.files == tmp_path / "cache" / "corpora" / "poems"
    assert list(source.read().documents) == ["poems"]


def test_texts_in_memory_are_as_good_as_files(registers, tmp_path):
    texts = {f"{i:02}.txt": "".join(f"line {i} {j} grün\n" for j in range(50)) for i in range(24)}
    for name, text in texts.items():
        (tmp_path / name).write_text(text, encoding="utf-8")

    @register_corpus("told")
    class Told(CorpusSource):
        """Texts in memory."""

        def load(self):
            return CorpusData(dict(reversed(texts.items())))

    options = {"tokenizer": "byte", "window": 8}
    tokens = []
    for made in (TextDataModule(str(tmp_path), **options), TextDataModule(source="told", **options)):
        made.prepare_data()
        made.setup("fit")
        tokens.append(
            [
                made.identity()["source"]["sha256"],
                *(made._windows(part, 1).tokens.tobytes() for part in ("train", "val", "test")),
            ]
        )
    assert tokens[0] == tokens[1]


def test_a_text_in_memory_is_checked_as_a_file_is(registers):
    for name, text, message in (
        ("half", "a\ud83d", "document 'a' has half of a surrogate"),
        ("nul", "a\0b" * 99, "a has NUL"),
    ):

        @register_corpus(name)
        class Odd(CorpusSource):
            """Text that is none."""

            def load(self, text=text):
                return CorpusData({"a": text})

        with pytest.raises(ZooError, match=message):
            TextDataModule(source=name, tokenizer="byte").prepare_data()
        TextDataModule(source=name, tokenizer="byte", encoding_errors="ignore").prepare_data()


def test_pictures_in_files_keep_labels_and_splits_of_the_set(registers, tmp_path):
    from PIL import Image

    files, labels, splits = [], [], []
    for i in range(24):
        label, split = i % 2, ("train", "train", "test")[i % 3]
        place = tmp_path / split / f"{i}.png"
        place.parent.mkdir(exist_ok=True)
        Image.new("L", (8, 8), 200 * label).save(place)
        files.append(place)
        labels.append(label)
        splits.append(split)

    @register_pictures("filed")
    class Filed(PictureSource):
        """Dark and light pictures in files."""

        def load(self):
            return PictureData(files, labels, ["light", "dark"][::-1], splits)

    data = ImageDataModule("filed", image_size=8, channels=1, batch_size=4)
    data.prepare_data()
    data.setup("fit")
    assert data.identity()["classes"] == ["dark", "light"]
    held = [row for batch in data.test_dataloader() for row in zip(batch["id"], batch["target"].tolist(), strict=True)]
    assert sorted(held) == sorted((f"test/{i}.png", i % 2) for i in range(24) if i % 3 == 2)
    for batch in data.test_dataloader():
        assert ((batch["image"].mean((1, 2, 3)) > -0.5).int().tolist()) == batch["target"].tolist()
    files[0].write_bytes(b"")
    with pytest.raises(ZooError, match=r"1 of 24 pictures in filed can't be read: 'train/0\.png' \(empty\)"):
        ImageDataModule("filed").setup("fit")


def test_a_table_in_a_file_brings_graph_and_label(registers, tmp_path):
    from datamodules.sources.breast_cancer import breast_cancer_edges, breast_cancer_table

    breast_cancer_table().head(200).to_csv(tmp_path / "t.csv", index=False)
    breast_cancer_edges().to_csv(tmp_path / "e.csv", index=False)

    @register_table("filed")
    class Filed(TableSource):
        """A table in files."""

        def load(self):
            return TableData(tmp_path / "t.csv", tmp_path / "e.csv", ["diagnosis"])

    for given in ({"source": "filed"}, {"features": "filed"}):
        data = GraphTableDataModule(**given)
        data.setup("fit")
        assert data.identity()["source"]["name"] == "filed"
        assert data.identity()["targets"] == ["diagnosis"]
        assert data.spec.output_nodes == ("diagnosis",)


# ---------------------------------------------------------------------- one of your own, from the docs


@pytest.fixture
def mine(registers, monkeypatch, tmp_path):
    """The file of the docs, named by ZOO_PLUGINS and not yet looked for."""
    code = re.search(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.S)[1]
    (tmp_path / "mine.py").write_text(code, encoding="utf-8")
    monkeypatch.setenv("ZOO_PLUGINS", str(tmp_path / "mine.py"))
    for register in registers.values():
        monkeypatch.setattr(register, "_is_complete", False)
    yield tmp_path
    sys.modules.pop("zoo_plugin_mine", None)


LANGUAGE = """\
    class_path: zoo.tasks.LanguageModelTask
    init_args: {d_model: 16, n_heads: 2, d_ff: 32, n_layers: 2, mlp_hidden: [8], max_len: 64}
"""
VISION = """\
    class_path: zoo.tasks.ImageClassificationTask
    init_args: {options: {img_size: 8, patch_size: 4, embed_dim: 16, depth: 2, num_heads: 2}}
"""
GRAPH = """\
    class_path: zoo.tasks.GraphPredictionTask
"""
OWN = {
    "counting": (
        LANGUAGE,
        "TextDataModule",
        "{source: counting, source_options: {upto: 3000}, window: 16, tokenizer: byte}",
    ),
    "bars": (VISION, "ImageDataModule", "{source: bars, batch_size: 8}"),
    "scales": (GRAPH, "GraphTableDataModule", "{source: scales}"),
}


@pytest.mark.parametrize("name", OWN)
def test_one_file_adds_data_that_a_config_names(mine, lightning, capsys, name):
    model, module, settings = OWN[name]
    config = f"model:\n{model}data:\n    class_path: datamodules.{module}\n    init_args: {settings}\n"
    (mine / "own.yaml").write_text(textwrap.dedent(config))
    quiet = ["--trainer.enable_progress_bar", "false", "--trainer.enable_model_summary", "false"]
    quiet += ["--trainer.logger", "false", "--trainer.accelerator", "cpu"]
    lightning("fit", "--config", "own.yaml", "--trainer.max_steps", 2, "--trainer.limit_val_batches", 1, *quiet)
    (file,) = mine.rglob("*.ckpt")
    claim = read_claim(read_checkpoint(str(file)), str(file))
    assert claim["identity"]["source"]["name"] == name
    assert claim["data"]["init_args"]["source"] == name
    if name == "counting":
        assert claim["identity"]["source"]["files"] == 30
    lightning("test", "--ckpt_path", file, *quiet)
    assert "test/loss" in capsys.readouterr().out
    if name == "scales":  # other rows, read as the checkpoint's were
        make_source(TABLES, "scales").read().table.head(7).to_csv("new.csv", index=False)
        lightning("test", "--ckpt_path", file, "--data.features", "new.csv", *quiet)
        assert "test/loss" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        lightning("fit", "--data.help", module)
    told = " ".join(capsys.readouterr().out.split())
    assert f"{name} (" in told
    assert ("100% by hand" in told) == (name == "counting")


def test_options_of_a_source_are_checked_by_name(mine):
    for options, message in (
        ({"upto": 50}, r"data\.source_options\.upto: got 50; must be at least 100"),
        ({"upt": 500}, r"data\.source_options: got 'upt', which is no option of counting; do you mean upto"),
    ):
        with pytest.raises(ZooError, match=message):
            TextDataModule(source="counting", source_options=options)


def test_the_yaml_of_the_docs_is_one(mine):
    block = re.search(r"```yaml\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.S)[1]
    given = yaml.safe_load(block)["data"]
    made = getattr(datamodules, given["class_path"].rpartition(".")[2])(**given["init_args"])
    assert len(made._corpus_source.read().documents) == 30
