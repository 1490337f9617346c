"""A checkpoint, opened: what it gives, how often its file is read, and what its callers can't do to each other."""

import ast
import gc
import hashlib
import inspect
import io
import os
import shutil
import time
import weakref
import zipfile
from collections import Counter
from pathlib import Path

import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

import zoo.checkpoint
from tests.cli.test_lightning import QUIET
from zoo.catalogue import load_pretrained
from zoo.checkpoint import Checkpoint, digest
from zoo.checkpoint.identity import read_checkpoint
from zoo.checkpoint.writing import CheckedCheckpointIO
from zoo.cli import zoo_main
from zoo.errors import ZooError

PACKAGE = Path(zoo.checkpoint.__file__).parent
SHELF = Path(__file__).parents[2] / "checkpoints"
GRAPH = "breast_cancer"


@pytest.fixture
def file(trained, tmp_path):
    """A copy of a checkpoint, old enough that its file system's clock has moved on."""
    shutil.copy(trained, tmp_path / "model.ckpt")
    time.sleep(0.15)
    return tmp_path / "model.ckpt"


@pytest.fixture
def reads(monkeypatch):
    """How often each file was loaded, had its checksums compared, and was hashed, by its real path."""
    found = Counter()

    def counted(kind, name_of, function):
        def run(*args, **kwargs):
            found[kind, os.path.realpath(name_of(args[0]))] += 1
            return function(*args, **kwargs)

        return run

    def name(file):
        return getattr(file, "name", file)

    monkeypatch.setattr(torch, "load", counted("load", name, torch.load))
    testzip = counted("checksums", lambda archive: archive.filename or archive.fp.name, zipfile.ZipFile.testzip)
    monkeypatch.setattr(zipfile.ZipFile, "testzip", testzip)
    monkeypatch.setattr(hashlib, "file_digest", counted("hash", name, hashlib.file_digest))
    zoo.checkpoint.remote._hash_once.cache_clear()
    return lambda path: {kind: n for (kind, file), n in found.items() if file == os.path.realpath(path)}


ONCE = {"load": 1, "checksums": 1}

# ---------------------------------------------------------------------- what it gives


def test_a_name_a_path_an_address_and_an_open_file_are_the_same_checkpoint():
    path = SHELF / GRAPH / "model.ckpt"
    with open(path, "rb") as handle:
        opened = [Checkpoint.open(given) for given in (GRAPH, path, str(path), f"file://{path}", handle)]
    assert len({checkpoint.digest for checkpoint in opened}) == 1
    assert {Path(checkpoint.path).resolve() for checkpoint in opened} == {path.resolve()}
    assert Checkpoint.open(opened[0]) is opened[0]


def test_it_says_what_the_file_says(trained):
    raw, checkpoint = read_checkpoint(trained), Checkpoint.open(trained)
    claim = raw["zoo"]
    assert checkpoint.path == str(trained)
    assert checkpoint.task == "zoo.tasks.language.LanguageModelTask"
    assert checkpoint.settings == claim["settings"]
    assert checkpoint.data == "datamodules.text.TextDataModule"
    assert checkpoint.data_settings == claim["data"]["init_args"]
    assert checkpoint.identity == claim["identity"]
    assert checkpoint.digest == digest(claim["identity"])
    assert checkpoint.adapter is None
    tensors = checkpoint.tensors()
    assert tensors.keys() == raw["state_dict"].keys()
    assert all(torch.equal(tensor, raw["state_dict"][name]) for name, tensor in tensors.items())


def test_what_was_made_without_a_data_module_has_no_data_settings(trained, tmp_path):
    raw = read_checkpoint(trained)
    raw["zoo"]["data"] = None
    torch.save(raw, tmp_path / "alone.ckpt")
    checkpoint = Checkpoint.open(tmp_path / "alone.ckpt")
    assert (checkpoint.data, checkpoint.data_settings) == (None, {})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("nowhere.ckpt", "there is no file nowhere.ckpt"),
        ("digit_damcha", "got 'digit_damcha'; the shelf has"),
        ("file:///nowhere.ckpt", "got file:///nowhere.ckpt; there is no such file"),
        (io.BytesIO(b"nothing"), r"\(open file\) is no complete checkpoint"),
    ],
)
def test_errors_are_about_the_argument_it_was_given_as(given, message):
    with pytest.raises(ZooError, match=f"^--like: {message}") as refused:
        Checkpoint.open(given, argument="--like")
    assert refused.value.argument == "--like"


def test_a_file_of_another_program_is_refused(tmp_path):
    torch.save({"state_dict": {}}, tmp_path / "other.ckpt")
    with pytest.raises(ZooError, match=r"other\.ckpt wasn't written by this zoo"):
        Checkpoint.open(tmp_path / "other.ckpt")


# ---------------------------------------------------------------------- one reading


def test_a_checkpoint_that_is_held_is_not_read_again(file, reads):
    held = Checkpoint.open(file)
    os.chdir(file.parent)
    assert Checkpoint.open("model.ckpt") is Checkpoint.open(str(file)) is held
    assert CheckedCheckpointIO().load_checkpoint(file)["state_dict"]
    assert Checkpoint.open(file).settings == held.settings
    assert reads(file) == ONCE


def test_nothing_is_kept_that_nobody_holds(file, reads):
    checkpoint = Checkpoint.open(file)
    gone = weakref.ref(checkpoint._contents["state_dict"]["network.embedding.weight"])
    del checkpoint
    gc.collect()
    assert gone() is None
    Checkpoint.open(file)
    assert reads(file) == {"load": 2, "checksums": 2}


def test_tensors_that_were_handed_out_are_kept_by_nobody_else(file):
    checkpoint = Checkpoint.open(file)
    gone = weakref.ref(checkpoint.tensors()["network.embedding.weight"])
    gc.collect()
    assert gone() is None
    assert checkpoint.settings


def test_what_a_caller_writes_reaches_no_other(file):
    held = Checkpoint.open(file)
    contents = held.take()
    before = contents["state_dict"]["network.embedding.weight"].clone()
    contents["state_dict"]["network.embedding.weight"].zero_()
    contents["zoo"]["settings"]["d_model"] = contents["zoo"]["data"]["init_args"]["window"] = -1
    held.settings["d_model"] = held.data_settings["window"] = -2
    again = Checkpoint.open(file)
    assert again is held
    assert again.settings["d_model"] > 0
    assert again.data_settings["window"] > 0
    assert torch.equal(again.tensors()["network.embedding.weight"], before)


@pytest.mark.parametrize("how", ["in place", "by another of its name"])
def test_a_file_that_was_written_to_is_read_again(file, how):
    """Of the same size, since only a digit of a setting changes."""
    held, raw = Checkpoint.open(file), read_checkpoint(file)
    raw["zoo"]["settings"]["lr"] = held.settings["lr"] / 2
    place = file if how == "in place" else file.with_name("other.ckpt")
    torch.save(raw, place)
    os.replace(place, file)
    assert Checkpoint.open(file).settings["lr"] == held.settings["lr"] / 2
    assert held.take()["zoo"]["settings"]["lr"] == held.settings["lr"], "it was read before"
    with pytest.raises(ZooError, match=r"model\.ckpt was replaced while it was in use; begin again"):
        held.take()


def test_two_writes_within_a_step_of_the_clock_are_both_seen(trained, tmp_path):
    raw, found = read_checkpoint(trained), []
    for lr in (0.25, 0.5):
        raw["zoo"]["settings"]["lr"] = lr
        torch.save(raw, tmp_path / "fresh.ckpt")
        found.append(Checkpoint.open(tmp_path / "fresh.ckpt"))
    assert [checkpoint.settings["lr"] for checkpoint in found] == [0.25, 0.5]


def test_what_is_loaded_is_what_was_checked(file, trained, monkeypatch):
    """Even if another file takes its place between the two."""
    raw = read_checkpoint(trained)
    raw["zoo"]["settings"]["lr"] = 0.5
    torch.save(raw, file.with_name("other.ckpt"))
    testzip = zipfile.ZipFile.testzip

    def replaced(archive):
        os.replace(file.with_name("other.ckpt"), file)
        return testzip(archive)

    monkeypatch.setattr(zipfile.ZipFile, "testzip", replaced)
    assert Checkpoint.open(file).settings["lr"] != 0.5


def test_loading_a_task_reads_its_file_once(file, reads):
    load_pretrained(file)
    assert reads(file) == ONCE


def test_testing_a_checkpoint_reads_it_once(file, reads, lightning):
    lightning("test", "--ckpt_path", file, *QUIET)
    assert reads(file) == ONCE


def test_going_on_with_a_run_reads_its_checkpoint_once(file, reads, lightning):
    lightning("fit", "--ckpt_path", file, "--trainer.max_steps", 7, "--trainer.default_root_dir", file.parent, *QUIET)
    assert reads(file) == ONCE


def test_generating_reads_the_checkpoint_once(file, reads):
    zoo_main(["generate", "--ckpt", str(file), "--prompt", "def ", "--max-new-tokens", "2"])
    assert reads(file) == ONCE


# A name's file is also hashed: the index says what its bytes must be, whatever they are, and only then is it opened.
# Its checksums are compared all the same, since what opens a file doesn't know where its name came from.


@pytest.mark.parametrize(
    "arguments",
    [
        ["explain", "--ckpt", GRAPH, "--out", "nodes.csv"],
        ["export", GRAPH, "--to", "safetensors", "--out", "graph.safetensors"],
        ["export", GRAPH, "--to", "hub-folder", "--out", "graph"],
        ["verify", GRAPH],
    ],
    ids=lambda arguments: " ".join(arguments[:1] + arguments[3:4]),
)
def test_a_command_reads_the_checkpoint_of_a_name_once(arguments, reads):
    zoo_main(arguments)
    assert reads(SHELF / GRAPH / "model.ckpt") == ONCE | {"hash": 1}


def test_testing_a_name_reads_its_checkpoint_once(reads, lightning):
    """Its data module is given it too, for graph, classes and scaling."""
    lightning("test", "--ckpt_path", GRAPH, *QUIET)
    assert reads(SHELF / GRAPH / "model.ckpt") == ONCE | {"hash": 1}


def test_nothing_is_held_for_a_strategy_that_reads_files_itself(file, lightning, monkeypatch):
    held = []

    def load_checkpoint(strategy, path, weights_only=None):
        gc.collect()
        held.extend(zoo.checkpoint.checkpoint._open)
        return read_checkpoint(path)

    monkeypatch.setattr(SingleDeviceStrategy, "load_checkpoint", load_checkpoint)
    lightning("test", "--ckpt_path", file, *QUIET)
    assert held == []


# ---------------------------------------------------------------------- the package


def test_it_knows_no_family():
    below = ("zoo.errors", "zoo.checkpoint")
    for module in PACKAGE.glob("*.py"):
        for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                assert name.split(".")[0] not in ("timm", "tokenizers", "datamodules"), (module.name, name)
                assert name.split(".")[0] != "zoo" or name.startswith(below), (module.name, name)


def test_every_public_name_is_there_and_told_of():
    for name in zoo.checkpoint.__all__:
        item = getattr(zoo.checkpoint, name)
        assert f"``{name}``" in zoo.checkpoint.__doc__
        assert isinstance(item, str) or inspect.getdoc(item)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        zoo.checkpoint.nothing  # noqa: B018
