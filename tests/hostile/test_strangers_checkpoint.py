"""Opening a stranger's checkpoint runs nothing that it says, on whichever road it is opened."""

import contextlib
import copy
import functools
import hashlib
import http.server
import inspect
import io
import json
import os
import re
import shutil
import sys
import threading
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch

from datamodules import GraphTableDataModule, ImageDataModule, TextDataModule
from tests.checkpoint.test_index import record
from tests.cli.test_lightning import QUIET
from tests.tasks.test_language import SILENT
from zoo.checkpoint.identity import check_plain, read_claim
from zoo.cli import lightning_main, zoo_main
from zoo.errors import ZooError
from zoo.families import families
from zoo.tasks import ImageClassificationTask

SHELF = Path(__file__).parents[2] / "checkpoints"
CONFIGS = SHELF.parent / "configs"
FILES = {"language": None, "vision": SHELF / "digits_damcha/model.ckpt", "graph": SHELF / "breast_cancer/model.ckpt"}

CALL = {"class_path": "planted.Planted", "init_args": {"word": "x"}}
PLANTS = {
    "a class": CALL,
    "a class in a dict": {"x": CALL},
    "a class in a list": [CALL],
    "a class deep down": {"a": [{"b": [{"c": CALL}]}]},
    "a class by name alone": {"class_path": "planted.Planted"},
    "a class in the arguments of another": {"x": {"class_path": "zoo.tasks.ZooTask", "init_args": {"y": CALL}}},
    "a text of JSON": json.dumps(CALL),
    "a text of YAML": "class_path: planted.Planted",
    "a text with escapes": '{"class\\u005fpath": "planted.Planted"}',
    "a text in a list": [json.dumps({"x": CALL})],
    "a dotted key": {"x.class_path": "planted.Planted"},
    "an object": io.BytesIO(),
}


def names_of(kind: type) -> list[str]:
    names = {name for base in kind.__mro__ for name in inspect.signature(base.__init__).parameters}
    return sorted(names - {"self", "args", "kwargs", "start"})


FAMILIES = {family.name: family for family in families()}
SETTINGS = [
    pytest.param(family, part, name, id=f"{family}-{part}-{name}")
    for family, record_ in FAMILIES.items()
    for part, kind in (("model", record_.task), ("data", record_.data))
    for name in names_of(kind)
]


@pytest.fixture(scope="module")
def originals(trained):
    files = FILES | {"language": trained}
    return {family: torch.load(file, weights_only=True) for family, file in files.items()}


def settings_of(claim, part):
    return claim["settings"] if part == "model" else claim["data"]["init_args"]


@pytest.mark.parametrize(("family", "part", "name"), SETTINGS)
def test_no_setting_may_be_more_than_data(family, part, name, originals):
    for plant in PLANTS.values():
        checkpoint = dict(originals[family])
        checkpoint["zoo"] = copy.deepcopy(checkpoint["zoo"])
        settings_of(checkpoint["zoo"], part)[name] = plant
        with pytest.raises(ZooError, match=f"isn't safe to use: {part}.{name}|holds a BytesIO"):
            read_claim(checkpoint, "FILE")


@pytest.mark.parametrize(
    "value",
    [None, True, 3, 0.5, "a: b", "https://x.org/y?z=1", "def f(x):", ["x", [1]], {"a": {"b": [None]}}, "{a: 1}"],
)
def test_plain_settings_are_taken(value):
    check_plain(value, "model.x")


def test_a_text_whose_aliases_would_fill_the_memory_is_read_in_no_time():
    bomb = "a: &a [x]\n" + "".join(f"{chr(98 + i)}: &{chr(98 + i)} [{f'*{chr(97 + i)},' * 9}]\n" for i in range(20))
    check_plain(bomb, "model.x")


# ---------------------------------------------------------------------- every road


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """A module whose import, and whose class, leave a file behind."""
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "planted.py").write_text(
        f"open({str(tmp_path / 'imported')!r}, 'w').close()\n"
        f"class Planted:\n    def __init__(self, *_, **__): open({str(tmp_path / 'called')!r}, 'w').close()\n"
    )
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "planted", raising=False)
    yield
    sys.modules.pop("planted", None)
    assert not (tmp_path / "imported").exists(), "a module that the checkpoint names was imported"
    assert not (tmp_path / "called").exists(), "a class that the checkpoint names was made"


def put_in(place):
    """Ways to plant a class into a claim, by name."""

    def plant(claim, checkpoint):
        if place == "settings":
            loose = {
                "zoo.tasks.vision.ImageClassificationTask": "options",
                "zoo.tasks.graph.GraphPredictionTask": "renamed",
            }
            claim["settings"][loose.get(claim["task"], "stop")] = {"x": CALL}
        elif place == "text":
            claim["settings"]["pretrained"] = json.dumps(CALL)
        elif place == "data":
            claim["data"]["init_args"]["batch_size"] = CALL
        elif place == "task":
            claim["task"] = "planted.Planted"
        elif place == "data class":
            claim["data"]["class_path"] = "planted.Planted"
        else:  # what Lightning's own loading would follow
            for name in ("hyper_parameters", "datamodule_hyper_parameters"):
                checkpoint.setdefault(name, {})
                checkpoint[name] |= {
                    "_instantiator": "lightning.pytorch.cli.instantiate_module",
                    "options": {"x": CALL},
                }

    return plant


PLACES = ("settings", "text", "data", "task", "data class", "hyper_parameters")


@pytest.fixture
def strange(originals, tmp_path):
    """Write a checkpoint with something planted; returns its file."""

    def write(family, place):
        checkpoint = copy.copy(originals[family])
        checkpoint["zoo"] = copy.deepcopy(checkpoint["zoo"])
        put_in(place)(checkpoint["zoo"], checkpoint)
        file = tmp_path / "strange.ckpt"
        torch.save(checkpoint, file)
        return file

    return write


@pytest.fixture
def served(tmp_path):
    """The test's folder at an address of this machine."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=tmp_path)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=functools.partial(server.serve_forever, 0.02), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def run(command, monkeypatch):
    """A command line, which may end as it likes, but not in a traceback."""
    if command[0] == "zoo":
        start = functools.partial(zoo_main, command[1:])
    else:
        monkeypatch.setattr(sys, "argv", command)
        start = lightning_main
    try:
        start()
    except SystemExit as ended:
        if ended.code not in (0, 2):
            raise


DATA = {"language": TextDataModule, "vision": ImageDataModule, "graph": GraphTableDataModule}


@pytest.mark.parametrize("place", [place for place in PLACES if place not in ("text", "data class")])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_no_command_runs_what_a_checkpoint_says(family, place, strange, planted, monkeypatch, tmp_path):
    file = str(strange(family, place))
    config = {"language": "lm/own_text", "vision": "vit/digits_damcha", "graph": "graph/breast_cancer"}[family]
    like = ("--config", str(CONFIGS / f"{config}.yaml"))
    for command in ("fit", "validate", "test", "predict"):
        run(["lightning", command, "--ckpt_path", file, "--trainer.fast_dev_run", "1", *QUIET], monkeypatch)
    run(["lightning", "fit", *like, "--model.pretrained", file, "--trainer.fast_dev_run", "1", *QUIET], monkeypatch)
    reads = "--data.tokenizer" if family == "language" else "--data.from_checkpoint"
    run(["lightning", "fit", *like, reads, file, "--trainer.fast_dev_run", "1", *QUIET], monkeypatch)
    last = tmp_path / "runs" / config / "version_0/checkpoints/last.ckpt"
    last.parent.mkdir(parents=True)
    shutil.copy(file, last)
    run(["lightning", "fit", *like, "--ckpt_path", "last", "--trainer.fast_dev_run", "1", *QUIET], monkeypatch)
    run(["zoo", "verify", file], monkeypatch)
    run(["zoo", "export", file, "--to", "safetensors", "--out", "out.safetensors"], monkeypatch)
    run(["zoo", "import", file, "--out", "again.ckpt"], monkeypatch)
    run(["zoo", "import", file, "--like", file, "--out", "again2.ckpt"], monkeypatch)
    if family == "language":
        run(["zoo", "generate", "--ckpt", file, "--max-new-tokens", "1"], monkeypatch)
    if family == "graph":
        run(["zoo", "explain", "--ckpt", file, "--out", "nodes.csv"], monkeypatch)


@pytest.mark.parametrize("place", ["settings", "data", "task", "data class"])
def test_verify_says_what_every_other_command_would_refuse(place, strange, capsys, monkeypatch):
    run(["zoo", "verify", str(strange("vision", place))], monkeypatch)
    assert re.search("isn't safe to use|no class of this zoo", capsys.readouterr().err)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("family", list(FAMILIES))
def test_no_call_runs_what_a_checkpoint_says(family, place, strange, planted, served, corpus):
    file = strange(family, place)
    data = TextDataModule(str(corpus), batch_size=4) if family == "language" else DATA[family]()
    for given in (file, file.as_uri(), f"{served}/{file.name}"):
        for load in (
            FAMILIES[family].task.load_from_checkpoint,
            FAMILIES[family].data.load_from_checkpoint,
        ):
            with contextlib.suppress(ZooError):
                load(given)
        trainer = pl.Trainer(**SILENT, limit_test_batches=1)
        with contextlib.suppress(ZooError):
            trainer.test(FAMILIES[family].task(), data, ckpt_path=given, verbose=False)


@pytest.mark.parametrize("place", PLACES)
def test_no_shelf_runs_what_its_checkpoints_say(place, strange, planted, originals, trained, tmp_path, monkeypatch):
    file = strange("language", place)
    (tmp_path / "tiny").mkdir()
    shutil.copy(trained, tmp_path / "whole.ckpt")
    entry = record(tmp_path / "whole.ckpt") | {"sha256": "0" * 64}
    shutil.move(file, tmp_path / "tiny" / "model.ckpt")
    content = (tmp_path / "tiny" / "model.ckpt").read_bytes()
    entry |= {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
    (tmp_path / "index.json").write_text(json.dumps({"models": [entry]}))
    monkeypatch.setenv("ZOO_SHELF", str(tmp_path))
    run(["zoo", "verify", "tiny", "--metrics"], monkeypatch)
    run(["lightning", "test", "--ckpt_path", "tiny", "--trainer.fast_dev_run", "1", *QUIET], monkeypatch)


# ---------------------------------------------------------------------- pickles, wherever they come from


class Runs:
    """Unpickling it makes a folder."""

    def __init__(self, file):
        self.file = str(file)

    def __reduce__(self):
        return os.mkdir, (self.file,)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_pickle_from_an_address_is_never_run(family, originals, served, tmp_path, monkeypatch, corpus):
    side_effect = tmp_path / "ran"
    checkpoint = copy.copy(originals[family])
    checkpoint["extra"] = Runs(side_effect)
    torch.save(checkpoint, tmp_path / "pickle.ckpt")
    address = f"{served}/pickle.ckpt"
    task, data = FAMILIES[family].task, FAMILIES[family].data
    own = TextDataModule(str(corpus), batch_size=4) if family == "language" else data()
    trainer = pl.Trainer(**SILENT, limit_test_batches=1)
    with open(tmp_path / "pickle.ckpt", "rb") as file:
        roads = (
            lambda: task.load_from_checkpoint(address),
            lambda: task.load_from_checkpoint(file),
            lambda: task.load_from_checkpoint(address, weights_only=False),
            lambda: data.load_from_checkpoint(address),
            lambda: trainer.test(task(), own, ckpt_path=address),
            lambda: trainer.predict(task(), own, ckpt_path=address, weights_only=False),
            lambda: trainer.fit(task(), own, ckpt_path=address),
        )
        for road in roads:
            with pytest.raises(ZooError):
                road()
    for command in (["lightning", "test", "--ckpt_path", address, *QUIET], ["zoo", "verify", address]):
        run(command, monkeypatch)
    assert not side_effect.exists()


def test_a_run_whose_checkpoints_could_not_be_read_again_does_not_begin():
    task = ImageClassificationTask(options={"img_size": 8, "patch_size": 4, "x": CALL})
    with pytest.raises(ZooError, match=r"model\.options\.x: has the key 'class_path'"):
        pl.Trainer(**SILENT, max_steps=1).fit(task, ImageDataModule())


# ---------------------------------------------------------------------- what else a file may say


def doubled(times):
    value = ["x"]
    for _ in range(times):
        value = [value, value]
    return value


def endless():
    value = {}
    value["x"] = value
    return value


STRANGE_CLAIMS = {
    "a few bytes that become many": ("settings", "stop", doubled(40)),
    "itself": ("settings", "stop", endless()),
    "too deep": ("settings", "stop", functools.reduce(lambda inner, _: [inner], range(3000), [])),
    "an identity of many": ("identity", "x", doubled(40)),
    "an identity of itself": ("identity", "x", endless()),
    "a tensor": ("identity", "x", torch.ones(1)),
    "a name that is no text": ("identity", 5, "x"),
    "a number too large": ("settings", "lr", 10**5000),
}


@pytest.mark.parametrize("what", list(STRANGE_CLAIMS))
def test_what_a_checkpoint_says_is_bounded_data(what, originals):
    part, name, value = STRANGE_CLAIMS[what]
    checkpoint = {**originals["language"], "zoo": copy.deepcopy(originals["language"]["zoo"])}
    checkpoint["zoo"][part][name] = value
    with pytest.raises(ZooError, match="the file was altered"):
        read_claim(checkpoint, "FILE")


ALTERED = {
    "callbacks": 5,
    "loops": {},
    "optimizer_states": [{"x": 1}],
    "lr_schedulers": [{"get_lr": "x"}],
    "gathered_gradients": {"network.none": 5},
    "pytorch-lightning_version": "0.1",
    "global_step": "many",
}


@pytest.fixture(scope="module")
def begun(tmp_path_factory, shared_cache):
    """A run of two steps; returns its arguments and its newest state."""
    arguments = ["--config", str(CONFIGS / "graph/breast_cancer.yaml"), "--trainer.limit_train_batches", "2", *QUIET]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("begun"))
        patch.setenv("ZOO_CACHE", str(shared_cache))
        run(["lightning", "fit", *arguments, "--trainer.max_epochs", "1", "--trainer.logger", "false"], patch)
        return arguments, next(Path().resolve().glob("lightning_logs/version_0/checkpoints/last.ckpt"))


@pytest.mark.parametrize("name", list(ALTERED))
def test_an_altered_state_of_a_run_ends_in_one_line(name, begun, monkeypatch, capsys):
    arguments, file = begun
    checkpoint = torch.load(file, weights_only=True)
    torch.save({**checkpoint, name: ALTERED[name]}, "altered.ckpt")
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["lightning", "fit", *arguments, "--ckpt_path", "altered.ckpt"])
    with pytest.raises(SystemExit) as ended:
        lightning_main()
    assert ended.value.code == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert "take another" in line


@pytest.mark.parametrize(
    "callback", ["zoo.callbacks.BestAndLastCheckpoint", "lightning.pytorch.callbacks.ModelCheckpoint"]
)
@pytest.mark.parametrize("place", ["local://{}", "{}", "runs/x/version_0/checkpoints/../../../../{}"])
def test_a_state_of_a_run_deletes_nothing(place, callback, begun, tmp_path, monkeypatch):
    arguments, file = begun
    for victim in ("folder", "file.ckpt"):
        target = tmp_path / "precious" / victim
        target.parent.mkdir(exist_ok=True)
        target.mkdir() if victim == "folder" else target.write_text("mine")
        named = place.format(target if place != PLACES[-1] else target.relative_to(tmp_path))
        checkpoint = torch.load(file, weights_only=True)
        for state in checkpoint["callbacks"].values():
            if "best_model_path" in state:
                state.pop("dirpath")
                paths = ("best_model_path", "kth_best_model_path", "last_model_path")
                state |= {**dict.fromkeys(paths, named), "best_k_models": {named: torch.tensor(1e9)}}
        torch.save(checkpoint, "strange.ckpt")
        settings = {"monitor": "val/loss", "save_last": callback.startswith("zoo")}
        keeping = ["--trainer.callbacks", json.dumps([{"class_path": callback, "init_args": settings}])]
        going_on = ["--ckpt_path", "strange.ckpt", "--trainer.max_epochs", "3"]
        run(["lightning", "fit", *arguments, *keeping, *going_on, "--trainer.logger", "false"], monkeypatch)
        assert target.exists()
