"""Pictures: found, read right or refused, split without leaks, varied in training by seed, epoch and index alone."""

import hashlib
import http.client
import io
import json
import os
import pickle
import random
import re
import shutil
import struct
import urllib.request
import warnings
import zlib
from pathlib import Path
from types import SimpleNamespace
from urllib.error import URLError

import lightning.pytorch as pl
import numpy as np
import pytest
import timm.data
import torch
import torchvision.datasets
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonargparse import ArgumentParser
from PIL import Image
from sklearn.datasets import load_digits

import datamodules.image_files
from datamodules.image_files import check_pictures, open_picture
from datamodules.image_transforms import PictureFormat, policy
from datamodules.images import ImageDataModule
from datamodules.splits import split_pictures
from zoo.checkpoint import Checkpoint
from zoo.checkpoint.identity import digest, read_checkpoint, read_claim
from zoo.cli.lightning import checkpoint_config
from zoo.errors import CheckpointMismatchError, ZooError

ORIENTATION = 0x112  # of EXIF


@pytest.fixture(autouse=True)
def _no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise URLError("no network in tests")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)


def pixels_of(seed, height=12, width=12, channels=3):
    shape = (height, width, 3) if channels == 3 else (height, width)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def write_folder(folder, counts=(("ant", 10), ("bee", 10), ("cow", 10)), seed=0, **shape):
    """Class folders of PNG pictures, every one different."""
    for name, count in dict(counts).items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            key = int(hashlib.sha256(f"{seed} {name} {i}".encode()).hexdigest()[:8], 16)
            Image.fromarray(pixels_of(key, **shape)).save(folder / name / f"{i:03}.png")
    return folder


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "zoo")


def ready(path=None, stage="fit", image_size=8, **options):
    if path is not None:
        options["image_size"] = image_size
    data = ImageDataModule(path=None if path is None else str(path), **options)
    data.prepare_data()
    data.setup(stage)
    return data


def gather(loader):
    """All batches as one: images, target, ids."""
    batches = list(loader)
    images = torch.cat([batch["image"] for batch in batches])
    target = torch.cat([batch["target"] for batch in batches]) if "target" in batches[0] else None
    return images, target, [name for batch in batches for name in batch["id"]]


def rows_of(data):
    """The ids of each split; of train all, also those that a last partial batch would have had."""
    train = data.train_dataloader().dataset
    splits = {"train": [train[i]["id"] for i in range(len(train))]}
    return splits | {split: gather(getattr(data, f"{split}_dataloader")())[2] for split in ("val", "test")}


def all_of(rows):
    return [name for ids in rows.values() for name in ids]


def training_images(data, epoch=0, n=None):
    rows = data.train_dataloader().dataset
    return torch.stack([rows[i + epoch * len(rows)]["image"] for i in range(n or len(rows))])


def save_checkpoint(path, data):
    identity = data.identity() if isinstance(data, ImageDataModule) else data
    init_args = dict(data.hparams) if isinstance(data, ImageDataModule) else {}
    claim = {
        "identity": identity,
        "digest": digest(identity),
        "task": "zoo.tasks.graph.GraphPredictionTask",  # which task it is doesn't matter here
        "settings": {},
        "data": {"class_path": "datamodules.images.ImageDataModule", "init_args": init_args},
        "step_seed": 0,
    }
    torch.save({"zoo": claim, "state_dict": {}}, path)
    return str(path)


def as_the_command_line_would(checkpoint, **given):
    """The module that ``lightning test --ckpt_path CHECKPOINT --data.NAME VALUE`` makes."""
    init_args = checkpoint_config(Checkpoint.open(checkpoint))["data"]["init_args"]
    return ImageDataModule(**init_args | {name: str(value) for name, value in given.items()})


def refusal(*args, **options):
    with pytest.raises(ZooError) as raised:
        ready(*args, **options)
    message = str(raised.value)
    assert "\n" not in message
    return message


# ---------------------------------------------------------------------- what is embedded


def test_default_is_scikit_learns_digits_in_three_splits():
    data = ready()
    identity = data.identity()
    assert identity["classes"] == [str(i) for i in range(10)]
    assert (identity["channels"], identity["image_size"]) == (1, [8, 8])
    assert identity["source"]["name"] == "digits"
    assert identity["source"]["pictures"] == 1797
    digits = load_digits()
    images, target, ids = gather(data.test_dataloader())
    assert images.dtype == torch.float32
    assert target.dtype == torch.int64
    assert images.shape == (len(ids), 1, 8, 8)
    numbers = [int(name.removeprefix("digits/")) for name in ids]
    assert target.tolist() == digits.target[numbers].tolist()
    expected = (digits.images[numbers] / 16 - 0.5) / 0.5
    # 17 shades are rounded to 256: half a step of 1/255, doubled by the standard deviation of 0.5
    np.testing.assert_allclose(images[:, 0].numpy(), expected, atol=1 / 255 + 1e-6)


def test_what_was_found_is_said(caplog):
    with caplog.at_level("INFO"):
        ready()
    assert "Pictures of digits: 1,259 train, 269 val, 269 test pictures; 10 classes; 1 x 8 x 8" in caplog.text


# ---------------------------------------------------------------------- torchvision's sets


def write_idx(path, array):
    header = struct.pack(">HBB", 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
    path.write_bytes(header + array.astype(np.uint8).tobytes())


def write_mnist(root, kind="MNIST", n_train=60, n_test=20):
    raw = root / kind / "raw"
    raw.mkdir(parents=True)
    found = {}
    for split, prefix, n in (("train", "train", n_train), ("test", "t10k", n_test)):
        found[split] = pixels_of(n, n, 28 * 28, 1).reshape(n, 28, 28), np.arange(n) % 10
        write_idx(raw / f"{prefix}-images-idx3-ubyte", found[split][0])
        write_idx(raw / f"{prefix}-labels-idx1-ubyte", found[split][1])
    return found


def write_cifar(root, monkeypatch, kind="CIFAR10", n_classes=10):
    """Small batches in the set's own format; only the checksums that torchvision expects are set to theirs."""
    cls = getattr(torchvision.datasets, kind)
    place = root / cls.base_folder
    place.mkdir(parents=True)
    labels = "labels" if kind == "CIFAR10" else "fine_labels"
    sums, found = {}, {"train": [], "test": []}
    for split, files in (("train", cls.train_list), ("test", cls.test_list)):
        for number, (name, _) in enumerate(files):
            n = 4 * n_classes
            batch = pixels_of(number + len(name), n, 3072, 1)
            content = pickle.dumps({"data": batch, labels: [i % n_classes for i in range(n)]})
            (place / name).write_bytes(content)
            sums[name] = hashlib.md5(content).hexdigest()
            found[split].append(batch.reshape(-1, 3, 32, 32))
    meta = cls.meta["filename"]
    content = pickle.dumps({cls.meta["key"]: [f"class {i}" for i in range(n_classes)]})
    (place / meta).write_bytes(content)
    monkeypatch.setattr(cls, "train_list", [[name, sums[name]] for name, _ in cls.train_list])
    monkeypatch.setattr(cls, "test_list", [[name, sums[name]] for name, _ in cls.test_list])
    monkeypatch.setattr(cls, "meta", cls.meta | {"md5": hashlib.md5(content).hexdigest()})
    return {split: np.concatenate(batches) for split, batches in found.items()}


@pytest.mark.parametrize(("source", "kind"), [("mnist", "MNIST"), ("fashion_mnist", "FashionMNIST")])
def test_mnist_files_are_read_and_its_own_test_set_is_the_test_split(tmp_path, source, kind):
    found = write_mnist(tmp_path, kind)
    data = ready(tmp_path, source=source, image_size=None)
    identity = data.identity()
    assert identity["classes"] == getattr(torchvision.datasets, kind).classes
    assert (identity["channels"], identity["image_size"]) == (1, [28, 28])
    images, target, ids = gather(data.test_dataloader())
    assert ids == [f"test/{i}" for i in range(20)]
    assert target.tolist() == found["test"][1].tolist()
    expected = (torch.from_numpy(found["test"][0]) / 255 - 0.5) / 0.5
    torch.testing.assert_close(images[:, 0], expected)
    rows = rows_of(data)
    assert len(rows["val"]) == 10, "one of each class"
    assert sorted(rows["train"] + rows["val"]) == sorted(f"train/{i}" for i in range(60))


@pytest.mark.parametrize(("source", "kind", "n"), [("cifar10", "CIFAR10", 10), ("cifar100", "CIFAR100", 100)])
def test_cifar_batches_are_read_and_its_own_test_set_is_the_test_split(tmp_path, monkeypatch, source, kind, n):
    found = write_cifar(tmp_path, monkeypatch, kind, n)
    data = ready(tmp_path, source=source, image_size=None)
    assert data.identity()["classes"] == [f"class {i}" for i in range(n)]
    assert (data.identity()["channels"], data.identity()["image_size"]) == (3, [32, 32])
    images, target, ids = gather(data.test_dataloader())
    assert ids == [f"test/{i}" for i in range(4 * n)]
    assert target.tolist() == [i % n for i in range(4 * n)]
    torch.testing.assert_close(images, (torch.from_numpy(found["test"]) / 255 - 0.5) / 0.5)
    assert len(rows_of(data)["train"]) == len(found["train"]) - len(rows_of(data)["val"])


def test_sets_are_looked_for_in_the_cache_and_their_absence_says_how_to_fetch_them(monkeypatch, tmp_path):
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "cache"))
    message = refusal(source="cifar10")
    assert f"there is no cifar10 in {tmp_path / 'cache' / 'images'}" in message
    assert "--data.download true fetches it" in message
    assert not (tmp_path / "cache").exists(), "looking leaves nothing"
    write_mnist(tmp_path / "cache" / "images")
    assert ready(source="mnist").identity()["source"]["pictures"] == 80


@pytest.mark.parametrize("source", ["cifar10", "cifar100", "mnist", "fashion_mnist"])
def test_without_a_network_the_download_says_where_to_put_the_files(tmp_path, source):
    message = refusal(tmp_path / "sets", source=source, download=True)
    assert message.startswith(f"data.download: {source} couldn't be downloaded to {tmp_path / 'sets'} (")
    assert "no network in tests" in message
    assert "put the set's files there by hand: " in message
    assert ("t10k-images-idx3-ubyte" in message) == ("mnist" in source)
    assert list((tmp_path / "sets").iterdir()) == [], "nothing half-written is left"


@pytest.mark.parametrize(
    "error",
    [
        URLError("refused"),
        TimeoutError("timed out"),
        ConnectionResetError("reset"),
        http.client.IncompleteRead(b""),
        RuntimeError("File not found or corrupted."),
        EOFError("Compressed file ended before the end-of-stream marker was reached"),
        OSError(28, "No space left on device"),
    ],
)
def test_a_download_that_breaks_off_leaves_nothing_that_looks_whole(tmp_path, monkeypatch, error):
    def break_off(url, download_root, filename, md5):
        if filename.startswith("t10k"):
            raise error
        (Path(download_root) / filename.removesuffix(".gz")).write_bytes(b"whole")

    monkeypatch.setattr(torchvision.datasets.mnist, "download_and_extract_archive", break_off)
    assert "couldn't be downloaded" in refusal(tmp_path / "sets", source="mnist", download=True)
    assert list((tmp_path / "sets").iterdir()) == []
    assert "there is no mnist in" in refusal(tmp_path / "sets", source="mnist")


def test_a_download_is_kept_and_not_repeated(tmp_path, monkeypatch):
    write_mnist(tmp_path / "server")
    fetched = []

    def download(url, download_root, filename, md5):
        fetched.append(filename)
        name = filename.removesuffix(".gz")
        shutil.copy(tmp_path / "server" / "MNIST" / "raw" / name, Path(download_root) / name)

    monkeypatch.setattr(torchvision.datasets.mnist, "download_and_extract_archive", download)
    for _ in range(2):
        assert ready(tmp_path / "sets", source="mnist", download=True).identity()["source"]["pictures"] == 80
    assert len(fetched) == 4
    assert [path.name for path in (tmp_path / "sets").iterdir()] == ["MNIST"]


def test_damaged_sets_are_refused_in_one_line(tmp_path, monkeypatch):
    write_cifar(tmp_path, monkeypatch)
    batch = tmp_path / "cifar-10-batches-py" / "data_batch_3"
    batch.write_bytes(batch.read_bytes()[:-1])
    assert "is incomplete or damaged" in refusal(tmp_path, source="cifar10", download=True)
    write_mnist(tmp_path)
    raw = tmp_path / "MNIST" / "raw"
    for name in ("train-images-idx3-ubyte", "t10k-labels-idx1-ubyte"):
        whole = (raw / name).read_bytes()
        for content in (whole[:-5], b"", b"<html>not found</html>"):
            (raw / name).write_bytes(content)
            message = refusal(tmp_path, source="mnist")
            assert message.startswith(f"data.path: mnist in {tmp_path / 'MNIST'} is incomplete or damaged (")
            assert "delete that folder, and --data.download true fetches it anew" in message
        (raw / name).write_bytes(whole)
    for labels, reason in ((np.arange(19) % 10, "not a label for each"), (np.full(20, 11), "labels of no class")):
        write_idx(raw / "t10k-labels-idx1-ubyte", labels)
        assert reason in refusal(tmp_path, source="mnist")
    (raw / "t10k-labels-idx1-ubyte").unlink()
    assert "is incomplete or damaged" in refusal(tmp_path, source="mnist")


# ---------------------------------------------------------------------- one picture, read right


def reopened(picture, name, channels=3, **options):
    picture.save(name, **options)
    return np.asarray(open_picture(name, channels))


def write_tiff(path, bits, content, width, height=1, photometric=1, sample_format=1, order="<"):
    """A TIFF of one strip, for what Pillow can't write."""
    tags = {256: width, 257: height, 258: bits, 259: 1, 262: photometric, 273: 0, 277: 1, 278: height}
    tags |= {279: len(content), 339: sample_format}
    tags[273] = 8 + 2 + 12 * len(tags) + 4
    entries = b"".join(struct.pack(f"{order}HHII", tag, 4, 1, value) for tag, value in tags.items())
    start = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(f"{order}IH", 8, len(tags))
    Path(path).write_bytes(start + entries + struct.pack(f"{order}I", 0) + content)


@pytest.mark.parametrize("suffix", ["png", "bmp", "tiff", "tif", "webp"])
@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_lossless_formats_give_their_pixels(suffix, mode):
    pixels = pixels_of(0, channels=len(mode))
    options = {"lossless": True} if suffix == "webp" else {}
    expected = pixels if mode == "RGB" else np.repeat(pixels[..., None], 3, axis=2)
    assert np.array_equal(reopened(Image.fromarray(pixels), f"x.{suffix}", **options), expected)
    grey = np.asarray(Image.fromarray(pixels).convert("L"))
    # WebP has no greyscale: a grey pixel has three equal channels, and their weighted sum is rounded
    np.testing.assert_allclose(np.asarray(open_picture(f"x.{suffix}", 1)), grey, atol=1 if suffix == "webp" else 0)


def test_jpeg_gives_its_pixels_but_for_its_loss():
    smooth = np.add.outer(np.arange(32) * 4, np.arange(32) * 3).astype(np.uint8)[..., None].repeat(3, axis=2)
    # at quality 95 a smooth picture is off by a few of 255 steps
    np.testing.assert_allclose(reopened(Image.fromarray(smooth), "x.jpg", quality=95).astype(int), smooth, atol=6)


def test_a_suffix_that_is_wrong_does_not_matter():
    pixels = pixels_of(1)
    assert np.array_equal(reopened(Image.fromarray(pixels), "x.jpg", format="PNG"), pixels)


DEEP = np.array([[0, 257, 32896, 65535]], dtype=np.uint16)
SHALLOW = [[0, 1, 128, 255]]


def test_16_bit_greyscale_is_scaled_not_clipped():
    for name in ("x.png", "x.tiff"):
        assert reopened(Image.fromarray(DEEP), name, channels=1).tolist() == SHALLOW
        assert reopened(Image.fromarray(DEEP), name).tolist() == [[[v] * 3 for v in SHALLOW[0]]]
    write_tiff("big.tiff", 16, DEEP.astype(">u2").tobytes(), 4, order=">")
    assert np.asarray(open_picture("big.tiff", 1)).tolist() == SHALLOW


def test_depth_and_polarity_of_a_tiff_are_taken_from_its_tags():
    write_tiff("12.tiff", 12, bytes([0xFF, 0xF8, 0x00]), 2)
    assert np.asarray(open_picture("12.tiff", 1)).tolist() == [[255, 128]]
    for bits, content in ((16, DEEP.astype("<u2").tobytes()), (8, bytes(SHALLOW[0]))):
        write_tiff("negative.tiff", bits, content, 4, photometric=0)
        assert np.asarray(open_picture("negative.tiff", 1)).tolist() == [[255, 254, 127, 0]]


def test_16_bit_colour_keeps_its_range():
    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    # Pillow writes no 16-bit colour
    header, samples = struct.pack(">IIBBBBB", 1, 1, 16, 2, 0, 0, 0), struct.pack(">3H", 0, 32896, 65535)
    parts = (chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(b"\0" + samples)), chunk(b"IEND", b""))
    Path("x.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(parts))
    assert np.asarray(open_picture("x.png", 3)).tolist() == [[[0, 128, 255]]]


def test_fractions_are_taken_for_0_to_1_or_0_to_255():
    unit = Image.fromarray(np.array([[0.0, 0.5, 1.0]], dtype=np.float32))
    assert reopened(unit, "unit.tiff", channels=1).tolist() == [[0, 128, 255]]
    bytes_ = Image.fromarray(np.array([[0.0, 99.6, 255.0]], dtype=np.float32))
    assert reopened(bytes_, "bytes.tiff", channels=1).tolist() == [[0, 100, 255]]


def test_one_bit_and_palette_pictures_get_their_colours():
    bit = Image.new("1", (2, 1))
    bit.putpixel((1, 0), 1)
    for name in ("x.png", "x.tiff", "x.bmp", "x.gif"):
        assert reopened(bit, name, channels=1).tolist() == [[0, 255]]
    palette = Image.new("P", (2, 1))
    palette.putpalette([10, 20, 30, 200, 100, 50])
    palette.putpixel((1, 0), 1)
    for name in ("x.png", "x.gif", "x.bmp", "x.tiff"):
        assert reopened(palette, name).tolist() == [[[10, 20, 30], [200, 100, 50]]]
    assert reopened(palette, "t.png", transparency=1).tolist() == [[[10, 20, 30], [255, 255, 255]]]
    assert reopened(palette, "t.gif", transparency=1).tolist() == [[[10, 20, 30], [255, 255, 255]]]
    half = reopened(palette, "half.png", transparency=bytes([255, 127]))
    np.testing.assert_allclose(half[0, 1].astype(int), [228, 178, 153], atol=1)  # halfway to white, rounded


def test_what_is_transparent_becomes_white():
    colours = Image.fromarray(np.array([[[10, 20, 30, 255], [10, 20, 30, 0], [0, 0, 0, 127]]], dtype=np.uint8))
    for name in ("x.png", "x.tiff", "x.webp"):
        options = {"lossless": True, "exact": True} if name == "x.webp" else {}
        found = reopened(colours, name, **options)[0].tolist()
        assert found == [[10, 20, 30], [255, 255, 255], [128, 128, 128]]
    grey = Image.fromarray(np.array([[[10, 255], [10, 0]]], dtype=np.uint8), "LA")
    assert reopened(grey, "la.png", channels=1).tolist() == [[10, 255]]
    keyed = Image.fromarray(np.array([[10, 20]], dtype=np.uint8))
    assert reopened(keyed, "key.png", channels=1, transparency=20).tolist() == [[10, 255]]


def test_cmyk_jpeg_gets_its_colours():
    picture = Image.new("CMYK", (16, 16), (0, 255, 255, 0))
    found = reopened(picture, "x.jpg", quality=100)
    np.testing.assert_allclose(found.astype(int), np.full((16, 16, 3), [255, 0, 0]), atol=3)  # JPEG's loss


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("suffix", ["png", "jpg", "webp", "tiff"])
def test_exif_orientation_is_applied(orientation, suffix):
    upright = np.zeros((32, 48), dtype=np.uint8)
    upright[:16, :24] = 255  # the bright corner is top left in the upright picture
    undo = {2: "FLIP_LEFT_RIGHT", 3: "ROTATE_180", 4: "FLIP_TOP_BOTTOM", 5: "TRANSPOSE", 6: "ROTATE_90"}
    undo |= {7: "TRANSVERSE", 8: "ROTATE_270"}
    stored = Image.fromarray(upright)
    if orientation > 1:
        stored = stored.transpose(Image.Transpose[undo[orientation]])
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    options = {"lossless": True} if suffix == "webp" else {}
    found = reopened(stored, f"x.{suffix}", channels=1, exif=exif, **options)
    np.testing.assert_allclose(found.astype(int), upright, atol=3)  # JPEG's loss


def test_of_several_frames_the_first_is_taken():
    frames = [Image.fromarray(np.full((8, 8), shade, dtype=np.uint8)) for shade in (50, 200)]
    for name, options in (("x.gif", {}), ("x.tiff", {}), ("x.webp", {"lossless": True}), ("x.jpg", {"format": "MPO"})):
        frames[0].save(name, save_all=True, append_images=frames[1:], **options)
        # JPEG and the way over WebP's colours lose a step
        np.testing.assert_allclose(np.asarray(open_picture(name, 1)).astype(int), np.full((8, 8), 50), atol=1)


# ---------------------------------------------------------------------- pictures that can't be read


def spoil(folder):
    """A picture of each kind that can't be read; its name and what is said of it."""
    whole = (folder / "ant" / "000.png").read_bytes()
    noise = pixels_of(5, 64, 64)
    Image.fromarray(noise).save(folder / "bee" / "cut.jpg")
    cut = (folder / "bee" / "cut.jpg").read_bytes()
    (folder / "bee" / "cut.jpg").write_bytes(cut[: len(cut) // 2])
    (folder / "ant" / "cut.png").write_bytes(whole[: len(whole) // 2])
    (folder / "ant" / "empty.jpg").touch()
    (folder / "ant" / "text.png").write_text("no picture")
    (folder / "ant" / "drawing.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\nshowpage\n")
    (folder / "bee" / "link.jpg").symlink_to(folder / "nowhere.jpg")
    os.mkfifo(folder / "bee" / "pipe.jpg")
    Image.fromarray(np.array([[np.nan, 0.5]], dtype=np.float32)).save(folder / "bee" / "nan.tiff")
    Image.fromarray(np.array([[-1, 70_000]], dtype=np.int32)).save(folder / "bee" / "deep.tiff")
    Image.new("L", (1, 101)).save(folder / "bee" / "thin.png")
    return {
        "ant/cut.png": "truncated",
        "ant/drawing.png": "no picture in a known format",
        "ant/empty.jpg": "empty",
        "ant/text.png": "no picture in a known format",
        "bee/cut.jpg": "truncated",
        "bee/deep.tiff": "32-bit or signed numbers",
        "bee/link.jpg": "no file, or a link to none",
        "bee/nan.tiff": "fractions outside of 0 to 1 and 0 to 255",
        "bee/pipe.jpg": "no file, or a link to none",
        "bee/thin.png": "1 x 101 pixels are too long and thin",
    }


def test_truncated_and_other_bad_pictures_are_listed_in_one_error(folder):
    bad = spoil(folder)
    message = refusal(folder)
    assert message.startswith(f"data.path: 10 of 40 pictures in {folder} can't be read: ")
    for name, reason in list(bad.items())[:5]:
        assert f"{name!r} (" in message
        assert reason in message.partition(f"{name!r} (")[2].partition(")")[0]
    assert message.endswith("and 5 more; mend or delete them, or set data.on_bad_image to skip")


def test_bad_pictures_are_skipped_if_asked_with_one_warning(folder):
    before = rows_of(ready(folder))
    bad = spoil(folder)
    with pytest.warns(UserWarning, match="10 of 40 pictures .* and 5 more; they are skipped") as raised:
        data = ready(folder, on_bad_image="skip", val_fraction=0.3)
    assert sum("can't be read" in str(warning.message) for warning in raised) == 1
    rows = rows_of(data)
    assert sorted(all_of(rows)) == sorted(all_of(before))
    assert not set(bad) & set(all_of(rows))
    assert data.identity()["source"]["train_pictures"] == len(rows["train"])


def test_reasons_for_every_bad_picture_are_kept_apart(folder):
    bad = spoil(folder)
    found = check_pictures([str(folder / name) for name in bad])
    assert list(found) == list(range(10))
    for reason, expected in zip(found.values(), bad.values(), strict=True):
        assert expected in reason
        assert str(folder) not in reason


@pytest.mark.parametrize("limit", [100, 50])
def test_decompression_bombs_are_bad_pictures(folder, monkeypatch, limit):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)  # 144 pixels are above it, or above twice as many
    message = refusal(folder)
    assert "30 of 30 pictures" in message
    assert "decompression bomb" in message


def test_nothing_is_left_to_skip_to_if_all_are_bad(tmp_path):
    for name in ("ant", "bee"):
        (tmp_path / "bad" / name).mkdir(parents=True)
        for i in range(3):
            (tmp_path / "bad" / name / f"{i}.jpg").touch()
    with pytest.warns(UserWarning, match="6 of 6"):
        message = refusal(tmp_path / "bad", on_bad_image="skip")
    assert "no picture in" in message


@pytest.fixture
def opened(monkeypatch):
    """The names of the pictures that are opened."""
    names = []

    def spy(path, channels):
        names.append(Path(path).name)
        return open_picture(path, channels)

    monkeypatch.setattr(datamodules.image_files, "open_picture", spy)
    return names


def test_pictures_are_checked_once_while_they_stay_as_they_are(folder, opened):
    data = ready(folder)
    data.setup("test")
    assert len(opened) == 30
    ready(folder)
    assert len(opened) == 30, "the cache knows them from the last run"
    Image.fromarray(pixels_of(99)).save(folder / "ant" / "000.png", compress_level=0)
    ready(folder)
    assert len(opened) == 60


def test_a_picture_with_the_size_and_time_of_another_is_checked(folder, opened):
    ready(folder)
    file = folder / "ant" / "000.png"
    before = file.stat()
    file.write_bytes(file.read_bytes()[::-1])
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert "ant/000.png" in str(refusal(folder))


def test_pictures_are_checked_again_by_another_limit_of_pillow(folder, opened, monkeypatch):
    ready(folder)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10**6)
    ready(folder)
    assert len(opened) == 60


def test_bad_pictures_are_looked_at_again_in_the_next_run(folder, opened):
    (folder / "ant" / "bad.png").touch()
    for _ in range(2):
        refusal(folder)
    assert len(opened) == 32
    assert opened[-1] == "bad.png"
    kept = max((Path(os.environ["ZOO_CACHE"]) / "images" / "checked").iterdir(), key=os.path.getmtime)
    kept.write_text("[7")
    refusal(folder)
    assert len(opened) == 63, "a damaged cache is no cache"


def test_checking_works_without_a_cache(folder, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "file"))
    assert ready(folder).identity()["source"]["pictures"] == 30


def test_a_picture_that_goes_bad_during_a_run_is_named(folder):
    data = ready(folder)
    for path in folder.rglob("*.png"):
        path.write_bytes(b"")
    with pytest.raises(ZooError, match=r"data\.path: ant/\d+\.png can't be read any more \(.*\); leave the folder"):
        gather(data.test_dataloader())


# ---------------------------------------------------------------------- folders


def test_class_folders_are_the_classes_in_order_of_their_names(tmp_path):
    write_folder(tmp_path / "zoo", {"b": 4, "A": 4, "a": 4, "ämse": 4, "10": 4, "9": 4, "日本": 4})
    data = ready(tmp_path / "zoo")
    assert data.identity()["classes"] == ["10", "9", "A", "a", "b", "ämse", "日本"]
    _, target, ids = gather(data.test_dataloader())
    assert [data.identity()["classes"][i] for i in target] == [name.partition("/")[0] for name in ids]
    assert ids == sorted(ids)


@pytest.mark.parametrize("val", ["val", "valid", "validation"])
def test_train_val_and_test_folders_are_the_splits(tmp_path, val):
    for i, (split, n) in enumerate((("train", 6), (val, 3), ("test", 2))):
        write_folder(tmp_path / "zoo" / split, {"ant": n, "bee": n}, seed=i)
    rows = rows_of(ready(tmp_path / "zoo"))
    assert {name: len(ids) for name, ids in rows.items()} == {"train": 12, "val": 6, "test": 4}
    for split, place in (("train", "train"), ("val", val), ("test", "test")):
        assert {name.split("/")[0] for name in rows[split]} == {place}
        assert {name.split("/")[1] for name in rows[split]} == {"ant", "bee"}


@pytest.mark.parametrize("there", [["test"], ["val"], []])
def test_a_split_that_has_no_folder_is_split_off_training(tmp_path, there):
    for split in ("train", *there):
        write_folder(tmp_path / "zoo" / split, {"ant": 10, "bee": 10}, seed=len(split))
    rows = rows_of(ready(tmp_path / "zoo"))
    for split in ("val", "test"):
        assert {name.split("/")[0] for name in rows[split]} == {split if split in there else "train"}
        assert len(rows[split]) == (20 if split in there else 4)
    assert len(all_of(rows)) == len(set(all_of(rows))) == 20 * (1 + len(there))


def test_classes_may_be_called_train_and_test(tmp_path):
    write_folder(tmp_path / "zoo", {"train": 5, "test": 5, "boat": 5})
    assert ready(tmp_path / "zoo").identity()["classes"] == ["boat", "test", "train"]


def test_what_is_no_picture_is_left_out_and_counted(folder, caplog):
    for name in ("ant/.hidden.png", "ant/Thumbs.db", "ant/.DS_Store", "__MACOSX/ant/000.png", ".git/x.png"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x")
    (folder / "ant" / "notes.txt").touch()
    (folder / "bee" / "raw.cr2").touch()
    (folder / "bee" / "README").touch()
    Image.new("L", (8, 8)).save(folder / "stray.png")
    (folder / "bee" / "deeper" / "still").mkdir(parents=True)
    Image.fromarray(pixels_of(7)).save(folder / "bee" / "deeper" / "still" / "x.PNG")
    with caplog.at_level("INFO"):
        data = ready(folder)
    assert data.identity()["classes"] == ["ant", "bee", "cow"]
    assert data.identity()["source"]["pictures"] == 31
    assert "bee/deeper/still/x.PNG" in all_of(rows_of(data))
    assert f"3 files in {folder} are no pictures by name ('.txt', '.cr2', 'README') and left out" in caplog.text
    assert f"1 pictures in {folder} lie in no class folder and are left out" in caplog.text


def test_links_may_lead_round_in_circles(folder):
    (folder / "again").symlink_to(folder)
    (folder / "ant" / "up").symlink_to(folder)
    (folder / "ant" / "here").symlink_to(folder / "ant")
    (folder / "bee" / "self").symlink_to(folder / "bee" / "self")
    (folder / "self").symlink_to(folder / "self")
    data = ready(folder)
    assert data.identity()["classes"] == ["ant", "bee", "cow"]
    assert data.identity()["source"]["pictures"] == 30


def test_links_to_folders_and_files_elsewhere_are_followed(folder, tmp_path):
    write_folder(tmp_path / "more", {"elk": 5}, seed=3)
    (folder / "elk").symlink_to(tmp_path / "more" / "elk")
    (folder / "ant" / "one.png").symlink_to(tmp_path / "more" / "elk" / "000.png")
    data = ready(folder)
    assert data.identity()["source"]["pictures"] == 36
    assert data.identity()["classes"][-1] == "elk"


def test_a_folder_with_many_pictures_shows_its_progress(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(datamodules.image_files, "_MANY", 20)
    ready(write_folder(tmp_path / "many", {"a": 12, "b": 12}))
    assert "Checking pictures: 100%" in capsys.readouterr().err


def test_folders_that_cannot_be_used_are_refused_in_one_line(tmp_path, folder):
    def case(name, counts):
        return write_folder(tmp_path / name, counts)

    flat = tmp_path / "flat"
    flat.mkdir()
    (tmp_path / "nothing").mkdir()
    shutil.copy(folder / "ant" / "000.png", flat)
    hollow = case("hollow", {"ant": 3, "bee": 0, "cow": 0})
    half = case("half", {"train/ant": 3, "train/bee": 3})
    (half / "test").mkdir()
    shutil.copy(folder / "ant" / "000.png", half / "test")
    twins = case("twins", {"train/ant": 3, "val/ant": 1, "valid/ant": 1})
    odd = case("odd", {"train/ant": 3, "train/bee": 3, "test/cow": 3, "test/ant": 1})
    only_test = case("only_test", {"test/ant": 3, "test/bee": 3})
    few = case("few", {"ant": 2, "bee": 9, "cow": 1})
    little = case("little", {"train/ant": 1, "train/bee": 4, "test/ant": 3, "test/bee": 3})
    single = case("single", {"ant": 9})
    for path, message in {
        tmp_path / "missing": f"data.path: there is no folder {tmp_path / 'missing'}; check the path",
        folder / "ant" / "000.png": "000.png, which is a file; name the folder that holds the class folders",
        flat: "flat has no class folders (1 pictures lie in it directly); put the pictures of each class into",
        tmp_path / "nothing": "nothing has no class folders (0 pictures lie in it directly)",
        hollow: f"2 class folders in {hollow} hold no picture: 'bee', 'cow'; put some in (.jpg,",
        half: "half has class folders in 'train', but none in 'test'; give each the same",
        twins: "twins has 'train', 'val', 'valid', two of them for the same split; leave one",
        odd: "odd has no training pictures of the classes 'cow'; add some, or leave these classes out",
        only_test: "only_test has no training pictures, only others; add them in train/",
        few: "the classes 'ant', 'cow' have fewer than 3 pictures, one for each of train, val, test; add pictures",
        little: "the classes 'ant' have fewer than 2 pictures, one for each of train, val; add",
        single: "single has one class, 'ant'; give pictures of at least 2",
    }.items():
        found = refusal(path)
        assert found.startswith("data.path: ")
        assert message in found


def test_names_that_are_no_utf8_are_refused(folder):
    if os.uname().sysname != "Linux":
        pytest.skip("only Linux has such names")
    shutil.copy(folder / "ant" / "000.png", os.fsencode(folder / "ant") + b"/\xff.png")
    assert r"1 names in" in refusal(folder)


# ---------------------------------------------------------------------- pictures named by a CSV file


def write_labels(folder, text, name="labels.csv"):
    (folder / name).write_text(text, encoding="utf-8")
    return str(folder / name)


def listing(folder, n=6, extra=""):
    names = [f"{name}/{i:03}.png,{name.upper()}{extra}\n" for name in ("ant", "bee") for i in range(n)]
    return "path,label\n" + "".join(names)


def test_a_csv_file_may_name_pictures_and_labels(folder, tmp_path):
    outside = tmp_path / "far.png"
    Image.fromarray(pixels_of(5)).save(outside)
    rows = listing(folder) + f"{outside},BEE\n{folder / 'cow' / '000.png'},NA\ncow/001.png,NA\ncow/002.png,NA\n"
    rows += "./ant/000.png,ANT\n"  # once more, and the same
    data = ready(folder, labels=write_labels(tmp_path, rows))
    assert data.identity()["classes"] == ["ANT", "BEE", "NA"]
    assert data.identity()["source"]["pictures"] == 16
    everything = all_of(rows_of(data))
    assert {str(outside), "cow/000.png", "ant/000.png"} <= set(everything)
    assert len(everything) == len(set(everything)) == 16


def test_a_csv_file_may_name_splits(folder):
    text = "path,label,split\n"
    for name in ("ant", "bee"):
        text += "".join(f"{name}/{i:03}.png,{name},{'train' if i < 6 else 'test'}\n" for i in range(9))
    rows = rows_of(ready(folder, labels=write_labels(folder, text)))
    assert {name: len(ids) for name, ids in rows.items()} == {"train": 10, "val": 2, "test": 6}
    assert all(int(name[4:7]) >= 6 for name in rows["test"])
    assert all(int(name[4:7]) < 6 for name in rows["val"])


def test_the_order_of_a_csv_file_does_not_matter(folder):
    head, *rows = listing(folder).splitlines()
    one = ready(folder, labels=write_labels(folder, "\n".join([head, *rows])))
    two = ready(folder, labels=write_labels(folder, "\n".join([head, *rows[::-1]]), "other.csv"))
    assert rows_of(one) == rows_of(two)
    assert one.identity() == two.identity()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"can't be read (there is no such file); check the path"),
        ("", "is empty; give a table with a header and rows"),
        ("file,label\nx,y\n", "has no column 'path' (it has 'file', 'label'); give it a row a picture with the"),
        ("a,b\n", "has no column 'path', 'label'"),
        ("path,label\n", "has no rows; give it"),
        ("path,label\nant/000.png,\nant/001.png, \n", "column 'label' has '' in row 1, 2 below the header; it may not"),
        ("path,label\nant/000.png\n", "line 2 has 1 cells, but the header has 2; mend that line"),
        ("path,label\n,ant\n", "column 'path' has '' in row 1 below the header; it may not be empty"),
        ("path,label,split\nant/000.png,a,dev\n", "column 'split' has 'dev' in row 1 below the header; it must"),
        ("path,label\nx.png,a\nant/000.png,a\n", "names 1 files that aren't below"),
        ("path,label\nant/000.png,a\nant/000.png,b\n", "gives 1 pictures more than one label or split: 'ant/000.png'"),
        ("path,label\nant/000.png,a\n./ant/000.png,b\n", "more than one label or split: './ant/000.png'; leave"),
        ("path,label,split\nant/000.png,a,train\nant/000.png,a,test\n", "more than one label or split"),
        ("path,label\nant/000.png,a,b,c\n\n", "line 2 has 4 cells, but the header has 2; mend that line"),
    ],
)  # fmt: skip
def test_bad_csv_files_are_refused_in_one_line(folder, text, message):
    labels = str(folder / "labels.csv")
    if text is not None:
        write_labels(folder, text)
    found = refusal(folder, labels=labels)
    assert found.startswith(f"data.labels: {labels}")
    assert message in found


def test_a_csv_file_that_is_no_utf8_is_refused(folder):
    (folder / "labels.csv").write_bytes(b"path,label\nant/000.png,\xff\n")
    assert "no UTF-8, the first at offset 23" in refusal(folder, labels=str(folder / "labels.csv"))


# ---------------------------------------------------------------------- splits


@given(
    counts=st.lists(st.integers(3, 40), min_size=1, max_size=5),
    val=st.floats(0.01, 0.49),
    test=st.floats(0.01, 0.49),
    seed=st.integers(0, 100),
)
@settings(deadline=None, max_examples=60)
def test_every_class_is_in_every_split_with_about_its_share(counts, val, test, seed):
    targets = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(counts)), counts))
    names = [str(i) for i in range(len(counts))]
    splits = split_pictures(targets, names, None, val, test, seed)
    assert np.array_equal(splits, split_pictures(targets, names, None, val, test, seed))
    for number, count in enumerate(counts):
        shares = np.bincount(splits[targets == number], minlength=3)
        assert shares.min() >= 1
        assert shares.sum() == count
        # to whole pictures, with one kept for each of the others
        assert abs(shares[2] - min(max(1, test * count), count - 2)) <= 0.5
        assert shares[1] <= max(1, val * count + 0.5)


def test_ten_pictures_a_class_are_enough(folder):
    rows = rows_of(ready(folder))
    assert {name: len(ids) for name, ids in rows.items()} == {"train": 18, "val": 6, "test": 6}
    for ids in rows.values():
        assert {name.split("/")[0] for name in ids} == {"ant", "bee", "cow"}
    everything = all_of(rows)
    assert len(everything) == len(set(everything)) == 30


def test_the_seed_decides_the_split(folder):
    assert rows_of(ready(folder)) == rows_of(ready(folder))
    assert rows_of(ready(folder)) != rows_of(ready(folder, split_seed=1))
    fractions = rows_of(ready(folder, val_fraction=0.3, test_fraction=0.4))
    assert {name: len(ids) for name, ids in fractions.items()} == {"train": 9, "val": 9, "test": 12}


def test_a_bad_picture_moves_no_other_to_another_split(folder):
    before = rows_of(ready(folder))
    (folder / "ant" / "003.png").write_bytes(b"")
    with pytest.warns(UserWarning, match="1 of 30 pictures"):
        after = rows_of(ready(folder, on_bad_image="skip"))
    assert after == {name: [row for row in ids if row != "ant/003.png"] for name, ids in before.items()}


# ---------------------------------------------------------------------- identity


def test_identity_survives_json_and_has_every_part(folder):
    identity = ready(folder).identity()
    assert json.loads(json.dumps(identity)) == identity
    assert identity == {
        "kind": "images",
        "classes": ["ant", "bee", "cow"],
        "channels": 3,
        "image_size": [8, 8],
        "mean": [0.5] * 3,
        "std": [0.5] * 3,
        "interpolation": "bicubic",
        "crop": 0.9,
        "source": {
            "name": "folder",
            "folder": "zoo",
            "pictures": 30,
            "fingerprint": identity["source"]["fingerprint"],
            "train_pictures": 18,
            "class_counts": {"ant": 6, "bee": 6, "cow": 6},
        },
    }
    assert str(folder.parent) not in json.dumps(identity)


def test_a_folder_is_known_by_its_content_wherever_it_is(folder, tmp_path):
    one = ready(folder)
    (tmp_path / "moved").mkdir()
    shutil.move(folder, tmp_path / "moved" / "zoo")
    two = ready(tmp_path / "moved" / "zoo")
    assert one.identity() == two.identity()
    assert one.digest == two.digest
    (tmp_path / "moved" / "zoo" / "ant" / "000.png").rename(tmp_path / "moved" / "zoo" / "bee" / "new.png")
    three = ready(tmp_path / "moved" / "zoo")
    assert three.identity()["source"]["fingerprint"] != one.identity()["source"]["fingerprint"]


@pytest.mark.parametrize(
    "change",
    [{"image_size": 16}, {"channels": 1}, {"mean": [0.4]}, {"std": [0.4]}, {"interpolation": "nearest"}, {"crop": 1.0}],
)
def test_identity_differs_for_what_a_model_depends_on(folder, change):
    assert ready(folder, **change).digest != ready(folder).digest


# ---------------------------------------------------------------------- size and normalisation


def beside_a_model(config, path=None, **options):
    return module_beside_a_model(config, path, **options).identity()


def module_beside_a_model(config, path, **options):
    data = ImageDataModule(path=None if path is None else str(path), **options)
    data.suit(config)
    data.prepare_data()
    data.setup("fit")
    return data


IMAGENET = {
    "input_size": (3, 64, 48),
    "mean": (0.485, 0.456, 0.406),
    "std": (0.229, 0.224, 0.225),
    "interpolation": "bilinear",
    "crop_pct": 0.875,
    "crop_mode": "center",
}


def test_what_is_left_out_is_taken_from_the_models_own_configuration(folder):
    identity = beside_a_model(IMAGENET, folder)
    assert identity["image_size"] == [64, 48]
    assert identity["mean"] == [0.485, 0.456, 0.406]
    assert identity["std"] == [0.229, 0.224, 0.225]
    assert (identity["interpolation"], identity["crop"]) == ("bilinear", 0.875)
    given = {"image_size": 32, "mean": [0.1, 0.2, 0.3], "std": [1.0], "interpolation": "nearest", "crop": 1.0}
    identity = beside_a_model(IMAGENET, folder, **given)
    expected = {**given, "image_size": [32, 32], "std": [1.0] * 3}
    assert {name: identity[name] for name in given} == expected


def test_a_model_may_want_pictures_that_are_no_squares(folder):
    for options in ({}, {"crop_scale": 1.0}):
        data = module_beside_a_model(IMAGENET, folder, batch_size=6, **options)
        for loader in (data.train_dataloader(), data.test_dataloader()):
            assert next(iter(loader))["image"].shape == (6, 3, 64, 48)


def vision_task():
    from zoo.tasks import ImageClassificationTask

    size = {"img_size": 24, "patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2}
    return ImageClassificationTask(name="damcha_vit_tiny_patch4_32", options=size)


@pytest.mark.parametrize("fn", ["fit", "validate", "test", "predict"])
def test_a_trainer_of_python_brings_the_pictures_to_the_size_of_the_task(folder, fn):
    task, data = vision_task(), ImageDataModule(path=str(folder), batch_size=6)
    run(fn, data, task, max_steps=1, limit_val_batches=1)
    assert data.identity()["image_size"] == [24, 24]
    assert data.identity()["mean"] == list(task.input_config["mean"])


def test_the_command_line_does_so_too(folder, lightning, tmp_path):
    options = ["--model", "ImageClassificationTask", "--data", "ImageDataModule", "--data.path", folder]
    options += ["--model.options", '{"img_size": 24, "patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2}']
    quiet = [f"--trainer.{name}=false" for name in ("logger", "enable_progress_bar", "enable_model_summary")]
    lightning("fit", *options, *quiet, "--trainer.accelerator=cpu", "--trainer.max_steps=1", "--data.batch_size=6")
    (file,) = tmp_path.rglob("*.ckpt")
    assert read_claim(read_checkpoint(str(file)), str(file))["identity"]["image_size"] == [24, 24]


def test_what_is_set_up_stays_whatever_another_model_wants(folder):
    data = module_beside_a_model({"input_size": (3, 16, 16)}, folder)
    data.suit({"input_size": (3, 32, 32)})
    data.setup("test")
    assert data.identity()["image_size"] == [16, 16]


@pytest.mark.parametrize("file", sorted(Path(datamodules.__file__).parent.rglob("*.py")), ids=lambda file: file.stem)
def test_no_data_module_reaches_through_the_trainer_to_the_model(file):
    assert not re.search(r"lightning_module|trainer\.model", file.read_text(encoding="utf-8"))


def test_channels_are_the_sources_not_the_models_and_their_statistics_are_averaged():
    identity = beside_a_model(IMAGENET)
    assert identity["channels"] == 1
    assert identity["mean"] == pytest.approx([(0.485 + 0.456 + 0.406) / 3])
    assert identity["std"] == pytest.approx([(0.229 + 0.224 + 0.225) / 3])
    assert beside_a_model(IMAGENET, channels=3)["mean"] == [0.485, 0.456, 0.406]


def test_a_model_without_a_configuration_leaves_it_to_the_source(folder):
    assert beside_a_model({}, folder)["image_size"] == [224, 224]
    assert beside_a_model({"interpolation": "random"}, folder)["interpolation"] == "bicubic"


# ---------------------------------------------------------------------- from picture to tensor


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "nearest"])
@pytest.mark.parametrize(("crop", "size"), [(1.0, 8), (0.875, 16), (0.5, 9)])
def test_evaluation_is_timms_own_transform(tmp_path, interpolation, crop, size):
    write_folder(tmp_path / "zoo", {"a": 4, "b": 4}, height=20, width=31)
    data = ready(tmp_path / "zoo", image_size=size, interpolation=interpolation, crop=crop, mean=[0.4], std=[0.2])
    transform = timm.data.create_transform(
        (3, size, size), interpolation=interpolation, mean=(0.4,) * 3, std=(0.2,) * 3, crop_pct=crop
    )
    images, _, ids = gather(data.test_dataloader())
    for image, name in zip(images, ids, strict=True):
        assert torch.equal(image, transform(Image.open(tmp_path / "zoo" / name)))


PLAIN = {"hflip": 0.0, "crop_scale": 1.0}


def test_without_variations_training_sees_what_evaluation_sees(folder):
    data = ready(folder, **PLAIN)
    rows = data.train_dataloader().dataset
    for i in range(len(rows)):
        picture = Image.open(folder / rows[i]["id"])
        transform = timm.data.create_transform(
            (3, 8, 8), interpolation="bicubic", mean=(0.5,) * 3, std=(0.5,) * 3, crop_pct=0.9
        )
        assert torch.equal(rows[i]["image"], transform(picture))


@pytest.mark.parametrize(
    "options",
    [
        {"hflip": 1.0},
        {"crop_scale": 0.3},
        {"shift": 0.3},
        {"rotate": 40.0},
        {"zoom": 0.4},
        {"auto_augment": "rand-m9-mstd0.5-inc1"},
        {"auto_augment": "augmix-m5-w4-d2"},
        {"auto_augment": "original-mstd0.5"},
        {"auto_augment": "3a"},
        {"random_erasing": 1.0},
    ],
)
@pytest.mark.parametrize("channels", [1, 3])
def test_every_variation_changes_training_and_never_evaluation(folder, options, channels):
    plain = ready(folder, channels=channels, image_size=12, crop=1.0, **PLAIN)
    varied = ready(folder, channels=channels, image_size=12, crop=1.0, **PLAIN | options)
    before, after = training_images(plain), training_images(varied)
    assert before.shape == after.shape
    changed = (before != after).flatten(1).any(dim=1).float().mean()
    assert changed > (0.5 if "auto_augment" in options else 0.9)
    if options != {"hflip": 1.0}:
        assert not torch.equal(training_images(varied, epoch=1), after)
    for split in ("val", "test"):
        loaders = (getattr(data, f"{split}_dataloader")() for data in (plain, varied))
        one, two = (gather(loader)[0] for loader in loaders)
        assert torch.equal(one, two)


def test_a_mirrored_picture_is_the_mirror_image(folder):
    one = training_images(ready(folder, image_size=12, crop=1.0, **PLAIN))
    two = training_images(ready(folder, image_size=12, crop=1.0, hflip=1.0, crop_scale=1.0))
    assert torch.equal(one.flip(-1), two)


@pytest.mark.parametrize(
    ("source", "mirrored", "cropped"),
    [("digits", False, False), ("fashion_mnist", True, False), ("cifar10", True, True)],
)
def test_what_is_left_out_is_usual_for_the_source(tmp_path, monkeypatch, source, mirrored, cropped):
    if source == "cifar10":
        write_cifar(tmp_path, monkeypatch)
    elif source == "fashion_mnist":
        write_mnist(tmp_path, "FashionMNIST")
    path = None if source == "digits" else str(tmp_path)

    def images(**options):
        data = ImageDataModule(source, path, **options)
        data.setup("fit")
        return training_images(data, n=20)

    plain = images(**PLAIN)
    assert torch.equal(images(crop_scale=1.0), plain) is not mirrored
    assert torch.equal(images(hflip=0.0), plain) is not cropped


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    "text", ["rand-m10-n4-p1", "rand-m10-n4-p1-inc1", "rand-m15-mmax20-inc1-p1", "v0", "originalr"]
)
def test_policies_run_to_their_extremes(channels, text):
    """Pillow 13 refuses to keep no bit of a picture, which timm asks of it at the ends of its range."""
    chosen = policy(text, PictureFormat(channels, (8, 8), (0.5,) * channels, (0.5,) * channels, "bicubic", 1.0))
    picture = Image.fromarray(pixels_of(3, channels=channels))
    for _ in range(150):
        assert chosen(picture).mode == picture.mode


# ---------------------------------------------------------------------- loaders


VARIED = {"auto_augment": "augmix-m5-w2-d2", "shift": 0.2, "rotate": 10.0, "random_erasing": 0.5, "crop_scale": 0.5}


def test_training_drops_the_last_partial_batch_and_evaluation_does_not(folder):
    data = ready(folder, batch_size=4)
    assert [len(batch["id"]) for batch in data.train_dataloader()] == [4] * 4
    assert [len(batch["id"]) for batch in data.test_dataloader()] == [4, 2]
    loader = data.train_dataloader()
    first = gather(loader)[2]
    loader.order.set_epoch(1)
    assert gather(loader)[2] != first


@pytest.mark.parametrize(("counts", "size"), [({"a": 10, "b": 10}, 12), ({"a": 5, "b": 4}, 4), ({"a": 3, "b": 3}, 2)])
def test_fewer_pictures_than_a_batch_make_one_even_batch(tmp_path, counts, size):
    data = ready(write_folder(tmp_path / "zoo", counts))
    with pytest.warns(UserWarning, match="training pictures, fewer than a batch of 64"):
        loader = data.train_dataloader()
    assert [len(batch["id"]) for batch in loader] == [size]


def test_a_pictures_variation_depends_on_seed_epoch_and_index_alone(folder):
    data = ready(folder, **VARIED)
    one = training_images(data)
    rows = data.train_dataloader().dataset
    torch.manual_seed(77)
    np.random.seed(77)
    random.seed(77)
    for i in reversed(range(len(rows))):
        assert torch.equal(rows[i]["image"], one[i])
    assert torch.equal(training_images(ready(folder, **VARIED)), one)
    assert not torch.equal(training_images(data, epoch=1), one)
    other = ready(folder, split_seed=1, **VARIED).train_dataloader().dataset
    same = {rows[i]["id"]: i for i in range(len(rows))}
    shared = [(same[other[i]["id"]], i) for i in range(len(other)) if other[i]["id"] in same]
    assert shared
    assert any(not torch.equal(one[i], other[j]["image"]) for i, j in shared)


def test_global_random_states_stay_as_they_are(folder):
    rows = ready(folder, **VARIED).train_dataloader()
    torch.manual_seed(1)
    np.random.seed(2)
    random.seed(3)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    for _ in rows:
        pass
    after = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


def epochs(loader, numbers):
    found = []
    for epoch in numbers:
        loader.order.set_epoch(epoch)
        found.append(gather(loader))
    return found


def same(one, two):
    return torch.equal(one[0], two[0]) and torch.equal(one[1], two[1]) and one[2] == two[2]


def test_workers_give_the_same_pictures_in_every_epoch(folder):
    alone = epochs(ready(folder, batch_size=4, **VARIED).train_dataloader(), range(3))
    helped = epochs(ready(folder, batch_size=4, num_workers=2, **VARIED).train_dataloader(), range(3))
    assert all(same(one, two) for one, two in zip(alone, helped, strict=True))
    assert not torch.equal(alone[0][0], alone[1][0])


@pytest.mark.parametrize("workers", [0, 2])
def test_training_goes_on_to_the_digit_in_the_middle_of_an_epoch(folder, workers):
    loader = ready(folder, batch_size=4, **VARIED).train_dataloader()
    loader.order.set_epoch(2)
    whole = list(loader)
    iterator = iter(loader)
    for _ in range(2):
        next(iterator)
    resumed = ready(folder, batch_size=4, num_workers=workers, **VARIED).train_dataloader()
    resumed.load_state_dict(loader.state_dict())
    iterator = iter(resumed)
    resumed.order.set_epoch(2)
    rest = list(iterator)
    assert len(rest) == len(whole) - 2
    for one, two in zip(whole[2:], rest, strict=True):
        assert one["id"] == two["id"]
        assert torch.equal(one["image"], two["image"])


def test_workers_may_be_started_in_any_way(folder):
    rows = ready(folder, **VARIED).train_dataloader().dataset
    assert torch.equal(pickle.loads(pickle.dumps(rows))[5]["image"], rows[5]["image"])


def test_processes_share_an_epoch_and_agree_on_its_pictures(folder):
    data = ready(folder, batch_size=3, **VARIED)
    data.trainer = SimpleNamespace(world_size=2, global_rank=0)
    zero = gather(data.train_dataloader())[2]
    data.trainer.global_rank = 1
    one = gather(data.train_dataloader())[2]
    assert len(zero) == len(one) == 9
    assert sorted(zero + one) == sorted(rows_of(ready(folder))["train"])


class Count(pl.LightningModule):
    """A task that counts what it sees."""

    def __init__(self):
        super().__init__()
        self.seen = {"train": [], "val": [], "test": []}

    def configure_callbacks(self):
        self.trainer.datamodule.suit({"input_size": (3, 16, 16)})
        return []

    def training_step(self, batch, index):
        self.seen["train"].append(batch["image"])

    def validation_step(self, batch, index):
        self.seen["val"] += batch["id"]

    def test_step(self, batch, index):
        self.seen["test"] += batch["id"]

    def predict_step(self, batch, index):
        assert "target" not in batch
        return batch["id"]

    def configure_optimizers(self):
        return None


def run(fn, data, module, **options):
    trainer = pl.Trainer(
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
        **options,
    )
    return getattr(trainer, fn)(module, data)


@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*optimizer", "ignore:.*logging interval")
def test_lightning_calls_it_as_it_likes(folder, opened):
    data = ImageDataModule(path=str(folder), batch_size=9)
    module = Count()
    run("fit", data, module, max_epochs=2, num_sanity_val_steps=0)
    assert len(module.seen["train"]) == 4
    assert module.seen["train"][0].shape == (9, 3, 16, 16), "the size is the model's"
    assert not torch.equal(torch.cat(module.seen["train"][:2]).sum(0), torch.cat(module.seen["train"][2:]).sum(0))
    assert len(module.seen["val"]) == 12
    run("test", data, module)
    assert len(module.seen["test"]) == 6
    assert [name for names in run("predict", data, module) for name in names] == module.seen["test"]
    assert len(opened) == 30 + 2 * 18 + 2 * 6 + 6 + 6, "checked once, then opened as they are used"


# ---------------------------------------------------------------------- a checkpoint's classes, size and normalisation


@pytest.fixture
def checkpoint(folder, tmp_path):
    data = ready(folder, mean=[0.1, 0.2, 0.3], std=[0.4], interpolation="nearest", crop=0.8)
    return save_checkpoint(tmp_path / "model.ckpt", data)


def test_a_checkpoint_alone_tests_on_the_split_it_was_trained_with(checkpoint, folder, tmp_path):
    expected = rows_of(ready(folder))
    data = as_the_command_line_would(checkpoint)
    data.setup("test")
    assert gather(data.test_dataloader())[2] == expected["test"]
    data.setup("validate")
    assert gather(data.val_dataloader())[2] == expected["val"]
    data.setup("predict")
    assert gather(data.predict_dataloader())[1:] == (None, expected["test"])
    assert data.identity()["mean"] == [0.1, 0.2, 0.3]
    link = tmp_path / "link"
    link.symlink_to(folder)
    shutil.copytree(folder, tmp_path / "copy")
    for path in (link, tmp_path / "copy"):
        data = as_the_command_line_would(checkpoint, path=path)
        data.setup("test")
        assert gather(data.test_dataloader())[2] == expected["test"], "training pictures are never test pictures"


@pytest.mark.parametrize("stage", ["validate", "test"])
def test_another_folder_is_evaluated_whole_with_the_checkpoints_classes(checkpoint, folder, tmp_path, stage):
    other = write_folder(tmp_path / "other", {"cow": 2, "bee": 1}, seed=8)
    data = as_the_command_line_would(checkpoint, path=other)
    data.setup(stage)
    saved, here = torch.load(checkpoint)["zoo"]["identity"], data.identity()
    assert {**here, "source": None} == {**saved, "source": None}
    assert here["source"]["class_counts"] == saved["source"]["class_counts"], "the loss's weights stay"
    assert here["source"]["folder"] == "other"
    for loader in (data.val_dataloader(), data.test_dataloader()):
        images, target, ids = gather(loader)
        assert ids == ["bee/000.png", "cow/000.png", "cow/001.png"]
        assert target.tolist() == [1, 2, 2]
        assert images.shape == (3, 3, 8, 8)
    with pytest.raises(ZooError, match="taken for evaluation; call setup"):
        data.train_dataloader()


def test_the_test_folder_of_another_folder_is_tested(checkpoint, tmp_path):
    other = tmp_path / "other"
    write_folder(other / "train", {"ant": 4, "bee": 4}, seed=8)
    write_folder(other / "test", {"ant": 2, "cow": 1}, seed=9)
    data = as_the_command_line_would(checkpoint, path=other)
    data.setup("test")
    assert gather(data.test_dataloader())[2] == ["test/ant/000.png", "test/ant/001.png", "test/cow/000.png"]
    with pytest.raises(ZooError, match=r"data\.path: other has no val pictures; this command needs some"):
        data.val_dataloader()
    shutil.rmtree(other / "train")
    data = as_the_command_line_would(checkpoint, path=other)
    data.setup("test")
    assert len(gather(data.test_dataloader())[2]) == 3


def test_classes_that_the_checkpoint_does_not_know_are_named(checkpoint, tmp_path):
    write_folder(tmp_path / "other", {"ant": 3, "yak": 3, "Bee": 3})
    for stage in ("test", "fit"):
        with pytest.raises(
            CheckpointMismatchError, match=r"the classes 'Bee', 'yak', which the checkpoint doesn't know"
        ):
            as_the_command_line_would(checkpoint, path=tmp_path / "other").setup(stage)


def test_every_picture_below_a_folder_or_a_single_one_is_predicted(checkpoint, folder, tmp_path):
    anything = tmp_path / "anything"
    write_folder(anything, {"x/y": 2, "z": 1}, seed=5)
    Image.fromarray(pixels_of(1)).save(anything / "top.png")
    data = as_the_command_line_would(checkpoint, path=anything)
    data.setup("predict")
    images, target, ids = gather(data.predict_dataloader())
    assert target is None
    assert ids == ["top.png", "x/y/000.png", "x/y/001.png", "z/000.png"]
    assert images.shape == (4, 3, 8, 8)
    assert data.identity()["classes"] == ["ant", "bee", "cow"]
    alone = as_the_command_line_would(checkpoint, path=anything / "top.png")
    alone.setup("predict")
    found, _, ids = gather(alone.predict_dataloader())
    assert ids == ["top.png"]
    assert torch.equal(found[0], images[0])
    (tmp_path / "none").mkdir()
    with pytest.raises(ZooError, match=r"data\.path: there is no picture in .*none \(\.jpg"):
        as_the_command_line_would(checkpoint, path=tmp_path / "none").setup("predict")
    (anything / "bad.jpg").touch()
    with pytest.raises(ZooError, match=r"1 of 5 pictures in .* can't be read: 'bad\.jpg' \(empty\)"):
        as_the_command_line_would(checkpoint, path=anything).setup("predict")


@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*optimizer", "ignore:.*logging interval")
def test_after_training_on_other_pictures_their_own_splits_are_used(checkpoint, tmp_path):
    other = write_folder(tmp_path / "other", {"cow": 10, "ant": 10, "bee": 10}, seed=4)
    data = as_the_command_line_would(checkpoint, path=other)
    data.setup("test")
    module = Count()
    run("fit", data, module, max_epochs=1)
    assert data.identity()["source"]["class_counts"] == {"ant": 6, "bee": 6, "cow": 6}
    run("test", data, module)
    assert len(module.seen["test"]) == 6, "what was trained on isn't evaluated"
    assert [name for names in run("predict", data, module) for name in names] == module.seen["test"]
    shutil.rmtree(other / "bee")
    with pytest.raises(ZooError, match=r"other has no training pictures of the classes 'bee'"):
        as_the_command_line_would(checkpoint, path=other).setup("fit")


def test_a_changed_folder_is_used_whole_and_warned_of(checkpoint, folder):
    Image.fromarray(pixels_of(50)).save(folder / "ant" / "new.png")
    data = as_the_command_line_would(checkpoint)
    with pytest.warns(UserWarning, match=r"pictures of zoo have changed .* \(30 then, 31 now\): all are used, also"):
        data.setup("test")
    assert len(gather(data.test_dataloader())[2]) == 31


def test_a_checkpoints_own_pictures_in_another_split_are_warned_of(checkpoint):
    with pytest.warns(UserWarning, match=r"split in another way \(data\.split_seed was 0\)"):
        ImageDataModule(
            **checkpoint_config(Checkpoint.open(checkpoint))["data"]["init_args"] | {"split_seed": 3}
        ).setup("test")


def test_labels_of_a_csv_file_come_with_the_checkpoint_but_not_to_other_pictures(folder, tmp_path):
    labels = write_labels(folder, listing(folder))
    first = ready(folder, labels=labels)
    saved = save_checkpoint(tmp_path / "a.ckpt", first)
    again = as_the_command_line_would(saved)
    again.setup("test")
    assert gather(again.test_dataloader())[2] == rows_of(first)["test"]
    again.setup("fit")
    third = as_the_command_line_would(save_checkpoint(tmp_path / "b.ckpt", again))
    third.setup("test")
    assert gather(third.test_dataloader())[2] == rows_of(first)["test"], "nor are they lost on the way"
    other = write_folder(tmp_path / "other", {"ANT": 2, "BEE": 2})
    data = as_the_command_line_would(saved, path=other)
    data.setup("test")
    assert len(gather(data.test_dataloader())[2]) == 4
    listed = write_labels(other, "path,label\nANT/000.png,BEE\n")
    data = as_the_command_line_would(saved, path=other, labels=listed)
    data.setup("test")
    assert gather(data.test_dataloader())[1].tolist() == [1]


def test_sets_stay_what_they_were_and_another_path_is_a_folder(tmp_path):
    write_mnist(tmp_path / "sets")
    digits = save_checkpoint(tmp_path / "digits.ckpt", ready(image_size=12, mean=[0.2]))
    mnist = save_checkpoint(tmp_path / "mnist.ckpt", ready(tmp_path / "sets", source="mnist"))
    one = as_the_command_line_would(digits)
    one.setup("test")
    assert gather(one.test_dataloader())[2] == rows_of(ready())["test"]
    assert one.identity()["source"]["name"] == "digits"
    two = as_the_command_line_would(mnist)
    two.setup("test")
    assert gather(two.test_dataloader())[2] == [f"test/{i}" for i in range(20)]
    other = write_folder(tmp_path / "other", {"3": 2, "7": 1}, channels=3)
    three = as_the_command_line_would(digits, path=other)
    three.setup("test")
    images, target, _ = gather(three.test_dataloader())
    assert images.shape == (3, 1, 8, 8)
    assert target.tolist() == [3, 3, 7]
    assert three.identity()["mean"] == [0.2]


def test_arguments_that_are_given_overrule_the_checkpoint(checkpoint, folder):
    data = ImageDataModule(path=str(folder), from_checkpoint=checkpoint, image_size=10, mean=[0.9])
    data.setup("test")
    identity = data.identity()
    assert (identity["image_size"], identity["mean"], identity["std"]) == ([10, 10], [0.9] * 3, [0.4] * 3)


def test_a_checkpoint_of_something_else_is_refused(folder, tmp_path, trained):
    lacking = save_checkpoint(tmp_path / "lacking.ckpt", {"kind": "images", "classes": ["a"]})
    for path, message in (
        (trained, "was trained on text, not on images; name a checkpoint of a vision model"),
        (lacking, "lacks 'channels', 'crop', 'image_size', 'interpolation', 'mean' and 2 more"),
        (tmp_path / "no.ckpt", "there is no file"),
    ):
        assert message in refusal(folder, from_checkpoint=str(path))


# ---------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"source": "imagenet"}, "data.source: got 'imagenet', which is none; there are cifar10, cifar100, digits, "),
        ({"channels": 2}, "data.channels: got 2; must be 1 or 3"),
        ({"interpolation": "lanczos"}, "data.interpolation: got 'lanczos'; must be bilinear or bicubic or nearest"),
        ({"on_bad_image": "ignore"}, "data.on_bad_image: got 'ignore'; must be error or skip"),
        ({"batch_size": 0}, "data.batch_size: got 0; must be at least 1"),
        ({"num_workers": -1}, "data.num_workers: got -1; must be at least 0"),
        ({"split_seed": -1}, "data.split_seed: got -1"),
        ({"image_size": 0}, "data.image_size: got 0; must be at least 1"),
        ({"crop": 0.0}, "data.crop: got 0.0; must be above 0, and at most 1"),
        ({"crop": float("nan")}, "data.crop: got nan"),
        ({"hflip": 1.5}, "data.hflip: got 1.5; must lie in [0, 1]"),
        ({"crop_scale": 0.0}, "data.crop_scale: got 0.0; must be above 0"),
        ({"shift": -0.1}, "data.shift: got -0.1; must lie in [0, 1]"),
        ({"rotate": 181.0}, "data.rotate: got 181.0; must lie in [0, 180]"),
        ({"zoom": 1.0}, "data.zoom: got 1.0; must lie in [0, 1)"),
        ({"random_erasing": 2.0}, "data.random_erasing: got 2.0"),
        ({"val_fraction": 0.0}, "data.val_fraction: got 0.0; must lie between 0 and 0.5"),
        ({"test_fraction": 0.5}, "data.test_fraction: got 0.5"),
        ({"mean": [0.5, 0.5]}, "data.mean: got [0.5, 0.5]; must be finite, one number a channel or one"),
        ({"mean": []}, "data.mean: got []"),
        ({"mean": [float("inf")]}, "data.mean: got [inf]"),
        ({"std": [0.0]}, "data.std: got [0.0]; must be finite and above 0"),
        ({"auto_augment": "rand-m9-foo"}, "data.auto_augment: got 'rand-m9-foo', which is no policy of timm; give one"),
        ({"auto_augment": "nonsense"}, "data.auto_augment: got 'nonsense'"),
        ({"auto_augment": ""}, "data.auto_augment: got ''"),
        ({"auto_augment": "rand-mstdx1"}, "data.auto_augment: got 'rand-mstdx1'"),
        ({"auto_augment": "rand-n99-tweights"}, "data.auto_augment: got 'rand-n99-tweights'"),
        ({"source": "folder"}, "data.path: got None with source folder; name the folder of pictures"),
        ({"path": ""}, "data.path: got '' with source folder"),
        (
            {"source": "digits", "path": "x"},
            "data.path: got 'x' with source digits, which is at hand without one",
        ),
        ({"labels": "x.csv"}, "data.labels: got 'x.csv' with source digits, which has its own; leave data.labels out"),
        ({"source": "mnist", "labels": "x.csv"}, "data.labels: got 'x.csv' with source mnist"),
    ],
)
def test_arguments_out_of_range_are_refused_by_name(options, message):
    with pytest.raises(ZooError) as raised:
        ImageDataModule(**options)
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)


def test_nothing_is_known_before_setup():
    data = ImageDataModule()
    with pytest.raises(ZooError, match="identity: not known before setup"):
        data.identity()
    with pytest.raises(ZooError, match="no data yet"):
        data.train_dataloader()


def test_the_command_line_knows_every_argument(tmp_path):
    parser = ArgumentParser()
    parser.add_class_arguments(ImageDataModule, "data")
    given = ["--data.source", "folder", "--data.path", str(tmp_path), "--data.mean", "[0.1, 0.2, 0.3]"]
    given += ["--data.channels", "1", "--data.crop_scale", "0.5", "--data.download", "true"]
    chosen = parser.parse_args(given).data
    assert (chosen.source, chosen.mean, chosen.channels) == ("folder", [0.1, 0.2, 0.3], 1)
    text = io.StringIO()
    parser.print_help(text)
    help_text = " ".join(text.getvalue().split())
    assert help_text.count("(type: ") == len(vars(chosen))
    assert "smallest share of a picture's area that a random crop keeps" in help_text


def test_settings_stay_plain(folder):
    assert json.loads(json.dumps(dict(ready(folder).hparams)))["path"] == str(folder)


def test_reading_says_nothing_that_no_user_can_act_on(folder):
    palette = Image.new("P", (4, 4))
    palette.putpalette([10, 20, 30, 200, 100, 50])
    palette.save(folder / "ant" / "x.png", transparency=bytes([255, 127]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rows_of(ready(folder, batch_size=2))
