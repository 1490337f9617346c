"""Pictures from files: what is embedded, what torchvision fetches, and what a user brings."""

import hashlib
import http.client
import json
import os
import socket
import tarfile
import tempfile
import warnings
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import PIL
from lightning.pytorch.utilities import rank_zero_info
from PIL import Image, ImageOps, UnidentifiedImageError
from PIL.TiffImagePlugin import BITSPERSAMPLE, PHOTOMETRIC_INTERPRETATION
from torchvision.datasets import CIFAR10, CIFAR100, MNIST, FashionMNIST
from tqdm import tqdm

from datamodules.base import SPLITS
from datamodules.folders import files_below, folders_in
from zoo.errors import ZooError, listed
from zoo.identity import canonical_json
from zoo.remote import default_cache

SETS: dict[str, Any] = {"cifar10": CIFAR10, "cifar100": CIFAR100, "mnist": MNIST, "fashion_mnist": FashionMNIST}
_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")  # for some others Pillow runs programs of the machine
_SPLIT_FOLDERS = {"train": 0, "val": 1, "valid": 1, "validation": 1, "test": 2}
_THINNEST = 100  # a picture so many times as long as wide would be huge once its short side is resized
_MANY = 500  # from so many pictures on, checking them shows its progress
_PATIENCE = 30.0  # seconds a server may be silent
_CHECK = 1  # part of the cache key: raise it when other pictures become readable


# ---------------------------------------------------------------------- one picture


def open_picture(path: str, channels: int) -> Image.Image:
    """A picture of 8 bits, upright as its EXIF orientation says, what is transparent in it on white.

    Args:
        path: a JPEG, PNG, WebP, GIF (of which the first frame is taken), BMP or TIFF file.
        channels: 1 for greyscale, 3 for RGB.

    Raises:
        Exception: whatever Pillow raises for a file it can't read whole; ValueError for pixels whose white isn't known,
            and for a picture too long and thin to be resized.
    """
    # Given a path, Pillow 13 maps some TIFF files into memory, and mixes up the rows of those to be turned.
    with open(path, "rb") as stream, Image.open(stream, formats=_FORMATS) as file:
        file.load()
        picture = ImageOps.exif_transpose(file)
        if file.mode in ("I", "F") or file.mode.startswith("I;16"):
            picture = _to_8_bits(picture, getattr(file, "tag_v2", None))
    if max(picture.size) > _THINNEST * min(picture.size):
        raise ValueError(f"{picture.width} x {picture.height} pixels are too long and thin to be resized")
    if picture.has_transparency_data:
        layer = picture.convert("RGBA")
        picture = Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer)
    return picture.convert("L" if channels == 1 else "RGB")


def _to_8_bits(picture: Image.Image, tags: Any) -> Image.Image:
    """Greyscale of more than 8 bits, scaled so that its white becomes 255; ``tags`` are those of a TIFF."""
    values = np.asarray(picture)
    if picture.mode == "F":
        if not (values.min() >= 0 and values.max() <= 255):  # NaN is neither
            raise ValueError("fractions outside of 0 to 1 and 0 to 255, so that white isn't known; save it with 8 bits")
        white = 1 if values.max() <= 1 else 255
    elif picture.mode == "I" and tags is not None:
        raise ValueError("32-bit or signed numbers, of which white isn't known; save it with 8 or 16 bits")
    else:
        white = (1 << (16 if tags is None else tags[BITSPERSAMPLE][0])) - 1
    grey = np.rint(values * (255 / white)).astype(np.uint8)
    if tags is not None and tags.get(PHOTOMETRIC_INTERPRETATION) == 0:  # white is zero
        grey = 255 - grey
    return Image.fromarray(grey)


# ---------------------------------------------------------------------- many pictures


@dataclass(frozen=True)
class Pictures:
    """Pictures that were found, to be opened one at a time.

    ``files`` has their paths, or ``pixels`` (n, height, width) or (n, height, width, 3) in uint8 all of them.
    ``targets`` (n,) are places in ``classes``, or None where labels aren't looked at; ``splits`` (n,) are places in
    SPLITS, or None where the data has no splits of its own.
    """

    name: str
    ids: list[str]
    classes: list[str]
    targets: np.ndarray | None
    splits: np.ndarray | None
    fingerprint: str
    files: Sequence[str] = ()
    pixels: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def open(self, row: int, channels: int) -> Image.Image:
        """Picture number ``row``, greyscale or RGB.

        Raises:
            ZooError: if its file has become unreadable since it was checked.
        """
        if self.pixels is not None:
            return Image.fromarray(self.pixels[row]).convert("L" if channels == 1 else "RGB")
        try:
            return open_picture(self.files[row], channels)
        except Exception as error:  # Pillow raises what a damaged file makes it meet
            raise ZooError(
                f"data.path: {self.ids[row]} can't be read any more ({_reason(error)}); leave the folder as it is "
                "during a run"
            ) from None


def load_digits() -> Pictures:
    """Scikit-learn's 1,797 handwritten digits of 8 x 8 pixels."""
    from sklearn.datasets import load_digits as load

    data = load()
    pixels = np.rint(data.images * (255 / 16)).astype(np.uint8)
    return _in_memory("digits", pixels, data.target, [str(digit) for digit in data.target_names])


def _in_memory(name: str, pixels: np.ndarray, targets: np.ndarray, classes: list[str], n_train: int = 0) -> Pictures:
    """The first ``n_train`` pictures are for training and the rest for the test; 0: there are no splits."""
    fingerprint = hashlib.sha256(pixels.tobytes())
    fingerprint.update(targets.astype("<i8").tobytes())
    n = len(pixels)
    splits = np.where(np.arange(n) < n_train, 0, 2).astype(np.uint8) if n_train else None
    ids = [f"train/{i}" for i in range(n_train)] + [f"{'test' if n_train else name}/{i}" for i in range(n - n_train)]
    return Pictures(name, ids, list(classes), targets.astype(np.int64), splits, fingerprint.hexdigest(), pixels=pixels)


# ---------------------------------------------------------------------- torchvision's sets


def set_root(path: str | None) -> Path:
    """Where torchvision's sets are looked for, and put."""
    return default_cache() / "images" if path is None else Path(path).expanduser()


def _set_folder(source: str, root: Path) -> Path:
    return root / getattr(SETS[source], "base_folder", SETS[source].__name__)


def fetch_set(source: str, root: Path) -> None:
    """Download a set by torchvision unless its folder is there; the folder gets its name once all is in it.

    Raises:
        ZooError: if it can't be downloaded, or not written.
    """
    folder = _set_folder(source, root)
    if folder.is_dir():
        return
    patience = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_PATIENCE)
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".downloading-", dir=root) as scratch:
            SETS[source](scratch, download=True)
            os.rename(Path(scratch, folder.name), folder)
    except (OSError, RuntimeError, EOFError, http.client.HTTPException, tarfile.TarError, zlib.error) as error:
        if folder.is_dir():  # another process was faster
            return
        raise ZooError(
            f"data.download: {source} couldn't be downloaded to {root} ({_reason(error)}); try again where there is a "
            f"network and room, or put the set's files there by hand: {_set_files(source, folder)}"
        ) from None
    finally:
        socket.setdefaulttimeout(patience)


def _set_files(source: str, folder: Path) -> str:
    kind = SETS[source]
    if hasattr(kind, "resources"):
        return f"{', '.join(name.removesuffix('.gz') for name, _ in kind.resources)} in {folder / 'raw'}"
    return f"{', '.join(name for name, _ in kind.train_list + kind.test_list)}, {kind.meta['filename']} in {folder}"


def load_set(source: str, root: Path) -> Pictures:
    """One of torchvision's sets, with its own test split.

    Raises:
        ZooError: if it isn't there, or damaged.
    """
    folder = _set_folder(source, root)
    if not folder.is_dir():
        raise ZooError(
            f"data.path: there is no {source} in {root} (no folder {folder.name}); --data.download true fetches it, or "
            "name the folder that holds it"
        )
    try:
        train, test = (SETS[source](str(root), train=training) for training in (True, False))
        pixels = np.concatenate([np.asarray(part.data) for part in (train, test)])
        targets = np.concatenate([np.asarray(part.targets) for part in (train, test)])
        if any(len(part.data) != len(part.targets) for part in (train, test)):
            raise ValueError("not a label for each picture")
        if targets.min() < 0 or targets.max() >= len(train.classes):
            raise ValueError("labels of no class")
    except Exception as error:  # whatever torchvision meets in a damaged file
        raise ZooError(
            f"data.path: {source} in {folder} is incomplete or damaged ({_reason(error)}); delete that folder, and "
            "--data.download true fetches it anew"
        ) from None
    return _in_memory(source, pixels, targets, train.classes, n_train=len(train.data))


# ---------------------------------------------------------------------- a folder of pictures


def find_classes(path: str) -> Pictures:
    """The pictures of a folder with a folder a class, or with such folders in train/, val/ and test/.

    Raises:
        ZooError: if there is no such folder, it has no class folders, or some of them have no pictures.
    """
    try:
        folder = _existing_folder(path)
        others: Counter[str] = Counter()
        ids, labels, splits, empty = [], [], [], []
        layout = _layout(folder)
        for split, label, place in layout:
            found = files_below(os.path.join(folder, place), _SUFFIXES, others)
            ids += [f"{place}/{name}" for name in found]
            labels += [label] * len(found)
            splits += [split] * len(found)
            if not found:
                empty.append(place)
        outside = len(files_below(folder, _SUFFIXES, deep=False))
    except OSError as error:
        raise _unreadable(path, error) from None
    if not layout:
        raise ZooError(
            f"data.path: {path} has no class folders ({outside} pictures lie in it directly); put the pictures of each "
            "class into a folder of its own, or name a CSV file with data.labels"
        )
    if empty:
        raise ZooError(
            f"data.path: {len(empty)} class folders in {path} hold no picture: {listed(empty)}; put some in "
            f"({', '.join(_SUFFIXES)}), or delete them"
        )
    if outside:
        rank_zero_info(f"data.path: {outside:,} pictures in {path} lie in no class folder and are left out")
    _tell_of_others(path, others)
    return _of_files(folder, ids, labels, None if splits[0] is None else splits)


def find_labelled(path: str, labels: str) -> Pictures:
    """The pictures that a CSV file names, in the columns path, label and, if there is one, split.

    Raises:
        ZooError: if there is no such file, it can't be read, lacks a column, has empty cells, other splits than train,
            val and test, names a picture twice in different ways, or names files that aren't there.
    """
    folder = os.path.abspath(_existing_folder(path))
    table = _read_labels(labels)
    table["file"] = table["path"].map(lambda name: os.path.normpath(os.path.join(folder, os.path.expanduser(name))))
    known = [name for name in ("label", "split") if name in table]
    once = table.drop_duplicates(["file", *known])
    twice = once[once["file"].duplicated()]["path"].tolist()
    if twice:
        raise ZooError(
            f"data.labels: {labels} gives {len(twice)} pictures more than one label or split: {listed(twice)}; leave "
            "one row of each"
        )
    missing = once["path"][~once["file"].map(os.path.isfile)].tolist()
    if missing:
        raise ZooError(
            f"data.labels: {labels} names {len(missing)} files that aren't below {path}: {listed(missing)}; paths are "
            "relative to data.path, or absolute"
        )
    ids = [file.removeprefix(folder + os.sep) for file in once["file"]]
    splits = [SPLITS.index(name) for name in once["split"]] if "split" in once else None
    return _of_files(folder, ids, once["label"].tolist(), splits)


def _read_labels(labels: str) -> pd.DataFrame:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)  # of rows that are longer than the header
            # a class may well be called NA
            table = pd.read_csv(
                os.path.expanduser(labels), dtype=str, keep_default_na=False, encoding="utf-8-sig", index_col=False
            )
    except OSError as error:
        reason = "there is no such file" if isinstance(error, FileNotFoundError) else error.strerror
        raise ZooError(f"data.labels: {labels} can't be read ({reason}); check the path") from None
    except (ValueError, pd.errors.ParserWarning) as error:  # pandas' own errors and those of UTF-8 are ValueErrors
        raise ZooError(f"data.labels: {labels} is no readable CSV ({_reason(error)}); write it again") from None
    lacking = [name for name in ("path", "label") if name not in table]
    if lacking or table.empty:
        what = f"no column {listed(lacking)}" if lacking else "no rows"
        raise ZooError(
            f"data.labels: {labels} has {what}; give it a row a picture with the columns path, label and, if you like, "
            "split"
        )
    for name in ("path", "label", "split"):
        if name in table:
            table[name] = table[name].str.strip()
            _refuse_cells(labels, table[name], (table[name] == "") if name != "split" else ~table[name].isin(SPLITS))
    return table


def _refuse_cells(labels: str, cells: "pd.Series[Any]", bad: "pd.Series[Any]") -> None:
    if bad.any():
        rule = "must be train, val or test in every row" if cells.name == "split" else "may not be empty"
        rows = [int(row) + 1 for row in cells.index[bad]]
        raise ZooError(
            f"data.labels: {labels}: column {cells.name!r} has {cells[bad].iloc[0]!r} in row {listed(rows)} below the "
            f"header; it {rule}"
        )


def find_all(path: str) -> Pictures:
    """Every picture below a folder, or a single file, whatever class it may be.

    Raises:
        ZooError: if there is no such file or folder, or no picture in it.
    """
    place = os.path.expanduser(path)
    if os.path.isfile(place):
        return _of_files(os.path.dirname(place), [os.path.basename(place)])
    others: Counter[str] = Counter()
    try:
        folder = _existing_folder(path)
        ids = files_below(folder, _SUFFIXES, others)
    except OSError as error:
        raise _unreadable(path, error) from None
    if not ids:
        raise ZooError(f"data.path: there is no picture in {path} ({', '.join(_SUFFIXES)}); name another folder")
    _tell_of_others(path, others)
    return _of_files(folder, ids)


def _unreadable(path: str, error: OSError) -> ZooError:
    return ZooError(f"data.path: {error.filename or path} can't be read ({error.strerror}); check its permissions")


def _existing_folder(path: str) -> str:
    folder = os.path.expanduser(path)
    if os.path.isfile(folder):
        raise ZooError(f"data.path: got {path}, which is a file; name the folder that holds the class folders")
    if not os.path.isdir(folder):
        raise ZooError(f"data.path: there is no folder {path}; check the path")
    return folder


def _layout(folder: str) -> list[tuple[int | None, str, str]]:
    """(split, class, folder) of each class folder; the split is None where there are none."""
    inner = folders_in(folder)
    named = [name for name in inner if name.lower() in _SPLIT_FOLDERS]
    classes = {name: folders_in(os.path.join(folder, name)) for name in named}
    # Classes may be called train and test; then they hold pictures, not classes.
    both = any(name.lower() == "train" and classes[name] for name in named) and len(named) > 1
    if not any(classes.values()) or not (both or len(named) == len(inner)):
        return [(None, name, name) for name in inner]
    flat, deep = ([name for name in named if bool(classes[name]) is full] for full in (False, True))
    if flat:
        raise ZooError(
            f"data.path: {folder} has class folders in {listed(deep)}, but none in {listed(flat)}; give each the same "
            "class folders, or take it away"
        )
    numbers = [_SPLIT_FOLDERS[name.lower()] for name in named]
    if len(set(numbers)) < len(numbers):
        raise ZooError(f"data.path: {folder} has {listed(named)}, two of them for the same split; leave one")
    pairs = zip(numbers, named, strict=True)
    return [(number, label, f"{name}/{label}") for number, name in pairs for label in classes[name]]


def _tell_of_others(path: str, others: "Counter[str]") -> None:
    if others:
        kinds = listed([kind for kind, _ in others.most_common()])
        rank_zero_info(f"data.path: {others.total():,} files in {path} are no pictures by name ({kinds}) and left out")


def _of_files(
    folder: str, ids: Sequence[str], labels: Sequence[str] | None = None, splits: Sequence[int | None] | None = None
) -> Pictures:
    """Pictures in the order of their ids, so that it is the same on every machine."""
    order = sorted(range(len(ids)), key=ids.__getitem__)
    ids = [ids[i] for i in order]
    strange = [name for name in ids if not _is_utf8(name)]
    if strange:
        raise ZooError(f"data.path: {len(strange)} names in {folder} are no UTF-8: {listed(strange)}; rename them")
    files = [os.path.join(folder, name) for name in ids]
    names = None if labels is None else [labels[i] for i in order]
    numbers = None if splits is None else [splits[i] for i in order]
    classes = sorted(set(names or ()))
    place = {name: i for i, name in enumerate(classes)}
    fingerprint = hashlib.sha256()
    for i, (name, file) in enumerate(zip(ids, files, strict=True)):
        about = [name, _stamp(file)[0], None if names is None else names[i], None if numbers is None else numbers[i]]
        fingerprint.update(canonical_json(about).encode())
    return Pictures(
        os.path.basename(os.path.abspath(folder)),
        ids,
        classes,
        None if names is None else np.array([place[name] for name in names], dtype=np.int64),
        None if numbers is None else np.array(numbers, dtype=np.uint8),
        fingerprint.hexdigest(),
        files,
    )


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _stamp(file: str) -> tuple[int, int]:
    """Size and time of a file's last change; -1 where there is none."""
    try:
        status = os.stat(file)
    except OSError:
        return -1, -1
    return status.st_size, status.st_mtime_ns


# ---------------------------------------------------------------------- checking


def check_pictures(files: Sequence[str]) -> dict[int, str]:
    """Decode every picture; of those that can't be read, the number in ``files`` and the reason.

    The outcome is kept in the cache. Next time, only pictures that were bad are looked at, while no file changed.
    """
    key = hashlib.sha256(f"{_CHECK} {PIL.__version__}".encode())
    for file in files:
        key.update(os.fsencode(f"{os.path.abspath(file)}\0{_stamp(file)}\0"))
    kept = default_cache() / "images" / "checked" / f"{key.hexdigest()[:32]}.json"
    suspects: Iterable[int] = range(len(files))
    with suppress(OSError, ValueError, TypeError):  # not there, or damaged
        suspects = [number for number in json.loads(kept.read_text()) if number < len(files)]
    found = _faults({number: files[number] for number in suspects})
    with suppress(OSError):  # without a cache the next run takes longer, that is all
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=kept.parent, delete=False) as scratch:
            json.dump(list(found), scratch)
        os.replace(scratch.name, kept)
    return found


def _faults(files: dict[int, str]) -> dict[int, str]:
    with warnings.catch_warnings(), ThreadPool(min(8, os.cpu_count() or 1)) as pool:
        warnings.simplefilter("ignore")  # about what can be read nevertheless
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        reasons = pool.imap(_fault, files.values(), chunksize=8)
        progress = tqdm(reasons, total=len(files), desc="Checking pictures", disable=len(files) < _MANY)
        return {number: reason for number, reason in zip(files, progress, strict=True) if reason is not None}


def _fault(file: str) -> str | None:
    """Why a picture can't be read; None if it can."""
    if not os.path.isfile(file):  # reading a pipe would never end
        return "no file, or a link to none"
    try:
        open_picture(file, channels=3)
    except UnidentifiedImageError:
        return "no picture in a known format" if os.path.getsize(file) else "empty"
    except Exception as error:  # Pillow raises what a damaged file makes it meet
        return _reason(error)
    return None


def _reason(error: Exception) -> str:
    """What an exception says, in one line and without paths where it can be."""
    reason = getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__
    return str(reason)[:200]
