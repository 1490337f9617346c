"""Trained models by name: the index, the checks of a file, loading."""

import hashlib
import json
import math
import shutil
from pathlib import Path

import pytest
import torch

import zoo
from tests.cli.test_lightning import QUIET, refused
from zoo.catalogue import check_metrics, list_models, load_pretrained, verify
from zoo.checkpoint.identity import read_checkpoint, read_claim
from zoo.checkpoint.index import check_file, entry_of, read_index, resolve
from zoo.cli import zoo_main
from zoo.configs import find_config
from zoo.errors import CheckpointMismatchError, ZooError
from zoo.tasks import ImageClassificationTask, LanguageModelTask

REAL = Path(__file__).parents[2] / "checkpoints"
CONFIGS = REAL.parent / "configs"


def record(path: Path, **changes):
    claim = read_claim(read_checkpoint(path), path)
    n = sum(p.numel() for p in LanguageModelTask.load_from_checkpoint(path).parameters())
    return {
        "name": "tiny",
        "family": "language",
        "summary": "a few steps on a test corpus",
        "file": "tiny/model.ckpt",
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "bytes": path.stat().st_size,
        "parameters": n,
        "identity": claim["digest"],
        "metrics": [{"name": "bits_per_byte", "value": 4.0, "split": "test", "data": "the test corpus"}],
        "command": "none",
        "config": "tiny/config.yaml",
        "training_time": "seconds",
        "versions": {"torch": torch.__version__},
        "licence": "MIT",
        **changes,
    }


@pytest.fixture
def shelve(trained, tmp_path, monkeypatch):
    """Make a shelf of the tiny model with some of its record changed; returns the model's file."""

    def make(**changes) -> Path:
        folder = tmp_path / "shelf"
        (folder / "tiny").mkdir(parents=True, exist_ok=True)
        file = folder / "tiny" / "model.ckpt"
        shutil.copy(trained, file)
        (folder / "tiny" / "card.md").write_text("# tiny\n\nWhat it is.\n")
        (folder / "index.json").write_text(json.dumps({"models": [record(file, **changes)]}))
        monkeypatch.setenv("ZOO_SHELF", str(folder))
        return file

    return make


# ---------------------------------------------------------------------- what ships


def test_index_lists_all_that_ships_and_nothing_else():
    index = read_index(REAL)
    assert sorted(index) == sorted(path.parent.name for path in REAL.glob("*/model.ckpt"))
    for entry in index.values():
        check_file(entry)
        assert entry.path.with_name("config.yaml").is_file()
        assert entry.path.with_name("log.csv").is_file()
        assert entry.bytes < 20_000_000
    assert sum(entry.bytes for entry in index.values()) < 80_000_000


@pytest.mark.parametrize("name", sorted(read_index(REAL)))
def test_what_ships_is_what_the_index_says_and_has_a_card_with_its_figures(name):
    entry = read_index(REAL)[name]
    assert len(verify(entry)) == 3
    card = entry.card.read_text()
    assert f"{entry.metrics[0]['value']:.3f}" in card
    assert entry.command in card


def test_an_index_that_changes_is_read_anew(shelve, monkeypatch, tmp_path):
    file = shelve()
    assert read_index()["tiny"].licence == "MIT"
    read_index().clear()
    shelve(licence="ISC")
    assert read_index()["tiny"].licence == "ISC"
    other = tmp_path / "elsewhere"
    shutil.copytree(file.parents[1], other / "shelf")
    (other / "shelf" / "index.json").write_text('{"models": []}')
    monkeypatch.setenv("ZOO_SHELF", "shelf")
    assert list_models() == ["tiny"]
    monkeypatch.chdir(other)
    assert list_models() == []


# ---------------------------------------------------------------------- by name


def test_a_name_is_as_good_as_its_file(shelve, lightning, capsys):
    file = shelve()
    assert resolve("tiny") == str(file)
    assert list_models() == list_models("language") == ["tiny"]
    assert list_models("graph") == []
    task = load_pretrained("tiny")
    assert isinstance(task, LanguageModelTask)
    assert not task.training
    tokens = torch.tensor([[1, 2, 3]])
    assert torch.equal(task(tokens), LanguageModelTask.load_from_checkpoint(file).eval()(tokens))
    zoo_main(["generate", "--ckpt", "tiny", "--prompt", "def ", "--max-new-tokens", "3"])
    assert capsys.readouterr().out.startswith("def ")
    lightning("test", "--ckpt_path", "tiny", *QUIET)
    assert "test/bits_per_byte" in capsys.readouterr().out


def test_a_folder_called_like_a_model_does_not_hide_it(shelve, monkeypatch):
    file = shelve()
    monkeypatch.chdir(file.parents[1])
    assert resolve("tiny") == str(file)


def test_create_model_gives_the_bare_network_with_or_without_its_weights(shelve):
    shelve()
    tokens = torch.tensor([[1, 2, 3]])
    trained, fresh = zoo.create_model("tiny"), zoo.create_model("tiny", pretrained=False)
    assert type(trained) is type(fresh) is type(load_pretrained("tiny").network)
    assert torch.equal(trained(tokens), load_pretrained("tiny").network(tokens))
    assert not torch.allclose(trained(tokens), fresh(tokens))
    assert zoo.create_model("tiny", dropout=0.5).embedding.weight.shape == trained.embedding.weight.shape
    with pytest.raises(CheckpointMismatchError, match="d_ff"):
        zoo.create_model("tiny", d_ff=64)
    assert zoo.create_model("tiny", pretrained=False, d_ff=64)
    with pytest.raises(ZooError, match=r"heads: no setting of tiny; it has .*n_heads"):
        zoo.create_model("tiny", heads=3)


def test_unknown_names_and_families_are_answered_with_what_there_is(shelve):
    shelve()
    for load in (load_pretrained, zoo.create_model, entry_of):
        with pytest.raises(ZooError, match="name: got 'tinny'; the shelf has 'tiny'"):
            load("tinny")
    with pytest.raises(ZooError, match="family: got 'audio', which is none; there are graph, language, vision"):
        list_models("audio")


def test_another_family_is_refused_by_name(shelve, lightning, capsys, tmp_path):
    shelve()
    with pytest.raises(CheckpointMismatchError, match=r"model\.pretrained: .* is of zoo\.tasks\.language"):
        ImageClassificationTask(pretrained="tiny")


# ---------------------------------------------------------------------- files that aren't what they should be


def test_a_flipped_byte_is_found_wherever_the_name_is_used(shelve, lightning, capsys):
    file = shelve()
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    for use in (lambda: load_pretrained("tiny"), lambda: zoo.create_model("tiny"), lambda: verify(entry_of("tiny"))):
        with pytest.raises(ZooError, match=r"tiny: .*isn't the file of the index"):
            use()
    assert "isn't the file of the index" in refused(lightning, capsys, "test", "--ckpt_path", "tiny", *QUIET)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parameters": 7}, "parameters, not 7 as the index says"),
        ({"identity": "0" * 64}, "not 000000000000... as the index says"),
        ({"family": "vision"}, "a LanguageModelTask, not of the family vision"),
    ],
)
def test_verify_names_what_is_not_as_the_index_says(changes, message, shelve):
    shelve(**changes)
    with pytest.raises(ZooError, match=message):
        verify(entry_of("tiny"))


def test_figures_are_measured_again_and_compared(shelve):
    shelve()
    with pytest.raises(ZooError, match=r"tiny: test/bits_per_byte is \d\.\d{4}, not 4\.0000"):
        check_metrics(entry_of("tiny"))
    shelve(metrics=[{"name": "nonsense", "value": 1.0, "split": "test", "data": "corpus"}])
    with pytest.raises(ZooError, match="test/nonsense is not there"):
        check_metrics(entry_of("tiny"))


def test_a_figure_that_is_no_number_is_not_the_one_of_the_index(shelve, monkeypatch):
    shelve()
    monkeypatch.setattr("zoo.catalogue.measure", lambda entry: {"test/bits_per_byte": math.nan})
    with pytest.raises(ZooError, match=r"tiny: test/bits_per_byte is nan, not 4\.0000"):
        check_metrics(entry_of("tiny"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sha256": "abc"}, "sha256"),
        ({"bytes": "many"}, "bytes"),
        ({"family": "Au dio"}, "family"),
        ({"metrics": []}, "metrics"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_an_index_that_is_not_as_it_should_be_is_refused(changes, message, shelve):
    shelve(**changes)
    with pytest.raises(ZooError, match=rf"index: .*{message}"):
        read_index()


def test_a_shelf_that_is_not_there_is_named(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("ZOO_SHELF", str(tmp_path / "nowhere"))
    with pytest.raises(SystemExit) as ended:
        zoo_main(["list"])
    assert ended.value.code == 2
    assert "ZOO_SHELF: there is no" in capsys.readouterr().err


# ---------------------------------------------------------------------- the commands


def test_list_show_and_verify_say_what_there_is(shelve, capsys):
    file = shelve()
    zoo_main(["list"])
    assert "tiny  language" in capsys.readouterr().out
    zoo_main(["list", "--family", "vision"])
    assert capsys.readouterr().out == ""
    zoo_main(["list", "--json"])
    assert json.loads(capsys.readouterr().out) == [record(file)]
    zoo_main(["show", "tiny"])
    shown = capsys.readouterr().out
    assert "What it is." in shown
    assert str(file) in shown
    for given in (["tiny"], ["--all"], [str(file)]):
        zoo_main(["verify", *given])
        assert "loads, " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "give names, or --all"),
        (["tiny", "--all"], "give names, or --all"),
        (["x.ckpt"], "there is no file x.ckpt"),
        (["shelf/tiny"], "shelf/tiny is a folder; name the .ckpt file in it"),
    ],
)
def test_verify_refuses_what_it_cannot_check(given, message, shelve, capsys):
    shelve()
    with pytest.raises(SystemExit) as ended:
        zoo_main(["verify", *given])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


# ---------------------------------------------------------------------- configs by name


def test_config_lists_what_ships_with_what_it_is(capsys):
    zoo_main(["config"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(list(CONFIGS.glob("*/*.yaml")))
    assert any(line.startswith("vit/digits_damcha ") and "handwritten digits" in line for line in lines)


@pytest.mark.parametrize("name", ["lm/stdlib_damcha", "stdlib_damcha", "configs/lm/stdlib_damcha.yaml"])
def test_config_prints_the_file(name, capsys):
    zoo_main(["config", name])
    assert capsys.readouterr().out == (CONFIGS / "lm" / "stdlib_damcha.yaml").read_text()


def test_config_of_a_trained_model_is_what_it_was_made_with(shelve, capsys):
    file = shelve()
    file.with_name("config.yaml").write_text("# made with\nseed_everything: 3\n")
    zoo_main(["config", "tiny"])
    assert capsys.readouterr().out == "# made with\nseed_everything: 3\n"


@pytest.mark.parametrize("name", sorted(entry.config for entry in read_index(REAL).values()))
def test_config_of_a_model_that_ships_can_be_trained_again(name, lightning, capsys):
    with pytest.raises(SystemExit) as ended:
        lightning("fit", "--config", REAL / name, "--print_config")
    assert ended.value.code == 0
    assert "class_path: zoo.tasks." in capsys.readouterr().out


def test_config_names_files_beside_it_so_that_they_are_found(capsys, tmp_path, monkeypatch):
    zoo_main(["config", "pbmc"])
    printed = capsys.readouterr()
    assert f"edges: {CONFIGS / 'graph' / 'pbmc_edges.csv'}\n" in printed.out
    assert "copy it to change it" in printed.err
    monkeypatch.chdir(CONFIGS.parent)
    zoo_main(["config", "pbmc"])
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ((CONFIGS / "graph" / "pbmc.yaml").read_text(), "")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("digit_damcha", "name: got 'digit_damcha', which is no config .* do you mean vit/digits_damcha"),
        ("vit/digits_damhca", "do you mean vit/digits_damcha"),
        ("qqqqqqqq", "no config and no trained model; zoo config lists the configs"),
    ],
)
def test_unknown_configs_are_answered_with_near_ones(name, message):
    with pytest.raises(ZooError, match=message):
        find_config(name)
