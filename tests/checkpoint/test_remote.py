"""Files by address: fetched once, checked, and as good as a path; a shelf at an address."""

import functools
import hashlib
import http.server
import json
import shutil
import threading
from pathlib import Path

import pytest
import torch

from datamodules import GraphTableDataModule, ImageDataModule, TextDataModule
from tests.checkpoint.test_index import record
from tests.cli.test_lightning import QUIET, refused
from zoo.catalogue import load_pretrained
from zoo.checkpoint.index import _fetch_index, entry_of, read_index, resolve
from zoo.checkpoint.remote import default_cache, fetch, is_address, place_of, sha256_of
from zoo.cli import zoo_main
from zoo.errors import ZooError
from zoo.tasks import LanguageModelTask

REAL = Path(__file__).parents[2] / "checkpoints"


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves a folder, counts what is asked for, and can stop half way."""

    def do_GET(self):
        self.server.asked.append(self.path)
        if not self.server.cut:
            super().do_GET()
            return
        content = Path(self.translate_path(self.path)).read_bytes()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2])

    def log_message(self, *args):
        pass


@pytest.fixture
def site(tmp_path):
    folder = tmp_path / "site"
    folder.mkdir()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=folder))
    server.asked, server.cut, server.folder = [], False, folder
    server.address = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=functools.partial(server.serve_forever, 0.02), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("ZOO_SHELF", raising=False)
    monkeypatch.delenv("ZOO_ORIGIN", raising=False)


@pytest.fixture
def put(site):
    """Put a file on the site; returns its address and its SHA-256."""

    def place(name: str, content: bytes) -> tuple[str, str]:
        path = site.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return f"{site.address}/{name}", hashlib.sha256(content).hexdigest()

    return place


def ended(capsys, *args: str) -> str:
    """The one line with which a command of ``zoo`` ends."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        zoo_main(args)
    assert stop.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    return lines[0]


def kept() -> list[Path]:
    return [path for path in (default_cache() / "files").rglob("*") if path.is_file()]


# ---------------------------------------------------------------------- fetching


def test_a_file_is_fetched_once_and_says_how_to_pin_it(put, site, capsys):
    address, sha256 = put("a/b.bin", b"content")
    path = fetch(address)
    assert path.read_bytes() == b"content"
    assert path == default_cache() / "files" / "http" / f"127.0.0.1%3A{site.server_port}" / "a" / "b.bin"
    assert capsys.readouterr().err.strip().endswith(f"append #sha256={sha256}")
    site.shutdown()
    assert fetch(address) == fetch(f"{address}#sha256={sha256}") == fetch(address, sha256) == path
    assert site.asked == ["/a/b.bin"]
    assert capsys.readouterr().err == ""


def test_a_pinned_file_must_be_the_one(put):
    address, sha256 = put("b.bin", b"content")
    with pytest.raises(ZooError, match=rf"address: {address} has SHA-256 {sha256[:12]}\.\.\., not 000000000000"):
        fetch(f"{address}#sha256={'0' * 64}")
    assert kept() == []
    assert fetch(f"{address}#sha256={sha256.upper()}").read_bytes() == b"content"
    with pytest.raises(ZooError, match="is pinned to"):
        fetch(f"{address}#sha256={'0' * 64}", sha256)


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("damage", [b"contend", b"cont"])
def test_a_kept_file_is_checked_before_it_is_used(damage, pinned, put):
    address, sha256 = put("b.bin", b"content")
    given = f"{address}#sha256={sha256}" if pinned else address
    fetch(given).write_bytes(damage)
    with pytest.raises(ZooError, match=r"kept as .*b\.bin, which has SHA-256 .* delete it to fetch it anew"):
        fetch(given)
    place_of(address).unlink()
    assert fetch(given).read_bytes() == b"content"


def test_another_version_is_fetched_when_its_pin_is_given(put):
    address, _ = put("b.bin", b"old")
    fetch(address)
    _, new = put("b.bin", b"new")
    assert fetch(address).read_bytes() == b"old"
    assert fetch(address, new).read_bytes() == b"new"
    assert fetch(address).read_bytes() == b"new"


def test_a_file_put_into_the_cache_by_hand_is_used(site, capsys):
    place = place_of(f"{site.address}/b.bin")
    place.parent.mkdir(parents=True)
    place.write_bytes(b"content")
    assert fetch(f"{site.address}/b.bin") == place
    assert "#sha256=" in capsys.readouterr().err
    assert site.asked == []


def test_what_may_change_is_fetched_anew_and_kept_for_when_it_cannot_be(put, site, capsys):
    address, _ = put("index.json", b"1")
    assert fetch(address, fresh=True).read_bytes() == b"1"
    put("index.json", b"2")
    assert fetch(address, fresh=True).read_bytes() == b"2"
    assert capsys.readouterr().err == ""
    (site.folder / "index.json").unlink()
    assert fetch(address, fresh=True).read_bytes() == b"2"
    assert "there is no such file" in capsys.readouterr().err
    place_of(address).write_bytes(b"3")
    with pytest.raises(ZooError, match="altered or cut short"):
        fetch(address, fresh=True)


def test_a_broken_transfer_leaves_nothing_behind(put, site):
    address, _ = put("b.bin", b"x" * 100_000)
    site.cut = True
    with pytest.raises(ZooError, match=f"address: got {address}; it couldn't be read"):
        fetch(address)
    assert kept() == []


def test_files_of_this_machine_stay_where_they_are(tmp_path):
    file = tmp_path / "a b.bin"
    file.write_bytes(b"content")
    assert fetch(file.as_uri()) == file
    with pytest.raises(ZooError, match="has SHA-256"):
        fetch(f"{file.as_uri()}#sha256={'0' * 64}")
    file.unlink()
    with pytest.raises(ZooError, match="there is no such file"):
        fetch(file.as_uri())
    assert kept() == []


def test_any_file_system_of_fsspec_will_do():
    import fsspec

    fsspec.filesystem("memory").pipe("/folder/b.bin", b"content")
    assert fetch("memory://folder/b.bin").read_bytes() == b"content"


def test_the_hub_is_asked_for_repository_revision_and_file(monkeypatch):
    from huggingface_hub import HfFileSystem

    asked = []

    def get_file(self, rpath, lpath, callback=None, **options):
        asked.append(rpath)
        Path(lpath).write_bytes(b"content")

    monkeypatch.setattr(HfFileSystem, "get_file", get_file)
    assert fetch("hf://user/repo/a/b.bin").read_bytes() == b"content"
    assert fetch("hf://user/repo@v2/a/b.bin") != fetch("hf://user/repo/a/b.bin")
    assert asked == ["user/repo/a/b.bin", "user/repo@v2/a/b.bin"]


def test_the_hub_out_of_reach_is_one_line(monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ZooError, match=r"address: got hf://user/repo/b\.bin; ") as refusal:
        fetch("hf://user/repo/b.bin")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("http://127.0.0.1:9/x.ckpt", "couldn't be read .* check the network, or bring the file here"),
        ("nonsense://a/x.ckpt", "this scheme isn't known; use https://, hf:// or file://"),
        ("s3://bucket/x.ckpt", "needs a package more: .*s3fs"),
        ("https://host", "names no file"),
        ("https://host/", "names no file"),
        ("https://host/a/../b", "names no file"),
        ("https://host/a#md5=1", "what follows # must be sha256="),
        ("https://host/a#sha256=12", "what follows # must be sha256="),
        ("file://host/a", "three slashes"),
        ("a/b", "must start with a scheme"),
    ],
)
def test_addresses_that_cannot_be_read_are_named_with_what_to_do(address, message):
    with pytest.raises(ZooError, match=rf"address: got .*{message}") as refusal:
        fetch(address)
    assert "\n" not in str(refusal.value)


def test_secrets_of_an_address_are_not_shown(put, site, capsys):
    address, _ = put("b.bin", b"content")
    with_secrets = address.replace("//", "//me:pa55w0rd@") + "?token=t0ken"
    fetch(with_secrets)
    with pytest.raises(ZooError) as refusal:
        fetch(with_secrets.replace("b.bin", "c.bin"))
    seen = capsys.readouterr().err + str(refusal.value) + str(kept())
    assert "pa55w0rd" not in seen
    assert "t0ken" not in seen


def test_a_cache_without_room_is_named(put, tmp_path, monkeypatch):
    address, _ = put("b.bin", b"content")
    (tmp_path / "taken").write_text("")
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "taken"))
    with pytest.raises(ZooError, match=r"ZOO_CACHE: .* set ZOO_CACHE to a folder with room"):
        fetch(address)


# ---------------------------------------------------------------------- an address is as good as a path


def test_a_checkpoint_is_used_by_its_address_everywhere(put, trained, lightning, capsys):
    address, sha256 = put("tiny.ckpt", trained.read_bytes())
    pinned = f"{address}#sha256={sha256}"
    assert is_address(pinned)
    assert Path(resolve(pinned)).read_bytes() == trained.read_bytes()
    tokens = torch.tensor([[1, 2, 3]])
    expected = LanguageModelTask.load_from_checkpoint(trained).eval()(tokens)
    assert torch.equal(load_pretrained(pinned)(tokens), expected)
    zoo_main(["generate", "--ckpt", pinned, "--prompt", "def ", "--max-new-tokens", "3"])
    assert capsys.readouterr().out.startswith("def ")
    zoo_main(["verify", pinned])
    assert "loads, " in capsys.readouterr().out
    data = TextDataModule(tokenizer=pinned)
    assert data.hparams["tokenizer"] == pinned
    lightning("test", "--ckpt_path", pinned, *QUIET)
    assert "test/bits_per_byte" in capsys.readouterr().out


def test_data_modules_take_names_of_the_shelf():
    graph = GraphTableDataModule(from_checkpoint="breast_cancer")
    assert graph.hparams["from_checkpoint"] == "breast_cancer"
    assert ImageDataModule(from_checkpoint="digits_damcha").source == "digits"
    assert TextDataModule(tokenizer="stdlib_damcha").hparams["tokenizer"] == "stdlib_damcha"
    for make, argument in ((GraphTableDataModule, "from_checkpoint"), (ImageDataModule, "from_checkpoint")):
        with pytest.raises(ZooError, match="name: got 'breast_cancr'"):
            make(**{argument: "breast_cancr"})
    with pytest.raises(ZooError, match=r"data\.tokenizer: got 'stdlib'; give byte, bpe or"):
        TextDataModule(tokenizer="stdlib")


@pytest.mark.parametrize("damage", ["flip", "cut", "code"])
def test_damaged_files_are_refused_by_name_wherever_they_come_from(damage, put, trained, lightning, capsys):
    import pickle

    content = bytearray(trained.read_bytes())
    content[len(content) // 2] ^= 1
    good = hashlib.sha256(trained.read_bytes()).hexdigest()
    bad = {"flip": bytes(content), "cut": bytes(content[:-50]), "code": pickle.dumps(print)}[damage]
    address, _ = put("tiny.ckpt", bad)
    for end in ("", f"#sha256={good}"):
        assert "tiny.ckpt" in ended_twice(capsys, address + end)
        assert "tiny.ckpt" in refused(lightning, capsys, "test", "--ckpt_path", address + end, *QUIET)


def ended_twice(capsys, address: str) -> str:
    """The refusal of a file that the first, unpinned use says it has kept."""
    for _ in range(2):
        with pytest.raises(SystemExit) as stop:
            zoo_main(["verify", address])
        assert stop.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


# ---------------------------------------------------------------------- a shelf at an address


@pytest.fixture
def shelf(site, trained):
    """A shelf on the site with the tiny model; returns its address."""
    folder = site.folder / "shelf" / "tiny"
    folder.mkdir(parents=True)
    shutil.copy(trained, folder / "model.ckpt")
    (folder / "card.md").write_text("# tiny\n\nWhat it is.\n")
    (folder / "config.yaml").write_text("# how it was made\nseed_everything: 0\n")
    write_index(folder.parent, record(trained))
    forget()
    return f"{site.address}/shelf"


def write_index(folder: Path, *models: dict, **fields: object) -> None:
    (folder / "index.json").write_text(json.dumps({"models": models, **fields}))


def forget() -> None:
    _fetch_index.cache_clear()


def test_a_shelf_at_an_address_serves_every_command(shelf, site, capsys, monkeypatch):
    monkeypatch.setenv("ZOO_SHELF", shelf)
    zoo_main(["list"])
    assert "tiny  language" in capsys.readouterr().out
    zoo_main(["show", "tiny"])
    assert "What it is." in (out := capsys.readouterr().out)
    assert f"{shelf}/tiny/model.ckpt, fetched when it is used" in out
    zoo_main(["config", "tiny"])
    assert capsys.readouterr().out == "# how it was made\nseed_everything: 0\n"
    assert "/shelf/tiny/model.ckpt" not in site.asked
    zoo_main(["verify", "tiny"])
    zoo_main(["generate", "--ckpt", "tiny", "--prompt", "def ", "--max-new-tokens", "3"])
    assert site.asked.count("/shelf/tiny/model.ckpt") == 1
    assert capsys.readouterr().err == ""
    site.shutdown()
    site.server_close()
    forget()
    zoo_main(["verify", "tiny"])
    assert "using the copy of before" in capsys.readouterr().err


def test_a_new_version_on_the_shelf_is_fetched(shelf, site, trained, monkeypatch):
    monkeypatch.setenv("ZOO_SHELF", shelf)
    old = Path(resolve("tiny")).read_bytes()
    checkpoint = torch.load(trained, weights_only=True)
    checkpoint["state_dict"]["network.embedding.weight"] += 1
    torch.save(checkpoint, site.folder / "shelf" / "tiny" / "model.ckpt")
    write_index(site.folder / "shelf", record(site.folder / "shelf" / "tiny" / "model.ckpt"))
    forget()
    assert Path(resolve("tiny")).read_bytes() != old


@pytest.mark.parametrize("how", ["origin", "ZOO_ORIGIN", "file"])
def test_an_index_here_can_say_where_its_files_come_from(how, shelf, site, trained, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "index only"
    folder.mkdir()
    origin = (site.folder / "shelf").as_uri() if how == "file" else shelf
    write_index(folder, record(trained), **({} if how == "ZOO_ORIGIN" else {"origin": origin}))
    if how == "ZOO_ORIGIN":
        monkeypatch.setenv("ZOO_ORIGIN", f"{origin}/")
    monkeypatch.setenv("ZOO_SHELF", str(folder))
    zoo_main(["show", "tiny"])
    assert "What it is." in capsys.readouterr().out
    zoo_main(["verify", "tiny"])
    assert sha256_of(entry_of("tiny").path) == sha256_of(trained)
    if how != "file":
        assert entry_of("tiny").path == place_of(f"{shelf}/tiny/model.ckpt")


@pytest.mark.parametrize("damage", ["server", "cache", "gone"])
def test_refusals_of_a_shelf_at_an_address_name_the_model(damage, shelf, site, capsys, monkeypatch):
    monkeypatch.setenv("ZOO_SHELF", shelf)
    file = site.folder / "shelf" / "tiny" / "model.ckpt"
    if damage == "gone":
        file.unlink()
    else:
        file = file if damage == "server" else Path(resolve("tiny"))
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    for command in (["verify", "tiny"], ["generate", "--ckpt", "tiny"]):
        line = ended(capsys, *command)
        assert line.startswith(f"error: tiny: {'got ' if damage == 'gone' else ''}{shelf}/tiny/model.ckpt")


@pytest.mark.parametrize(
    ("fields", "changes", "message"),
    [
        ({"origin": "somewhere"}, {}, "origin"),
        ({}, {"file": "../../model.ckpt"}, r"models\.0\.file"),
        ({}, {"config": "/etc/passwd"}, r"models\.0\.config"),
    ],
)
def test_an_index_that_points_elsewhere_is_refused(fields, changes, message, shelf, site, trained, monkeypatch):
    write_index(site.folder / "shelf", record(trained, **changes), **fields)
    monkeypatch.setenv("ZOO_SHELF", shelf)
    with pytest.raises(ZooError, match=f"index: .*{message}"):
        read_index()


def test_a_shelf_that_cannot_be_reached_is_named(site, capsys, monkeypatch, trained):
    monkeypatch.setenv("ZOO_SHELF", f"{site.address}/nowhere")
    forget()
    for command in (["list"], ["verify", "tiny"], ["generate", "--ckpt", "tiny"]):
        assert f"{site.address}/nowhere/index.json; there is no such file" in ended(capsys, *command)
    monkeypatch.setenv("ZOO_SHELF", "")
    monkeypatch.setenv("ZOO_ORIGIN", "somewhere")
    assert "ZOO_ORIGIN: got 'somewhere'; must be the address of a folder" in ended(capsys, "list")


def test_what_ships_needs_no_network(monkeypatch, capsys):
    import fsspec

    def no_network(*args, **options):
        raise AssertionError("asked for the network")

    monkeypatch.setattr(fsspec.core, "url_to_fs", no_network)
    zoo_main(["list"])
    zoo_main(["show", "digits_damcha"])
    zoo_main(["verify", "digits_damcha"])
    assert "loads, " in capsys.readouterr().out
