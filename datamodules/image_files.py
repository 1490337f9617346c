"""Pictures of a source or from files: opened, checked and compared."""

import hashlib
import json
import os
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import numpy as np
import PIL
from lightning.pytorch.utilities import rank_zero_warn
from PIL import Image, ImageOps, UnidentifiedImageError
from PIL.TiffImagePlugin import BITSPERSAMPLE, PHOTOMETRIC_INTERPRETATION
from tqdm import tqdm

from datamodules.folders import is_utf8
from datamodules.sources.base import PictureData
from datamodules.splits import SPLITS
from zoo.checkpoint.identity import canonical_json
from zoo.checkpoint.remote import default_cache
from zoo.errors import ZooError, listed

_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")  # for some others Pillow runs programs of the machine
_THINNEST = 100  # a picture so many times as long as wide would be huge once its short side is resized
_MANY = 500  # from so many pictures on, checking them shows its progress
_CHECK = 1  # part of the cache key: raise it when other pictures become readable
_TWINS = 1  # likewise, when other files count as the same
_END = 4096  # bytes of a file that are compared before the whole


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


def pictures_of_source(data: PictureData, name: str) -> Pictures:
    """What a named source gives, with a name for each picture.

    Raises:
        ZooError: if a file's name is no UTF-8.
    """
    targets, splits = np.asarray(data.labels, dtype=np.int64), None
    if data.splits is not None:
        splits = np.array([SPLITS.index(split) for split in data.splits], dtype=np.uint8)
    if not isinstance(data.pictures, np.ndarray):
        files = [os.path.abspath(path) for path in data.pictures]
        folder = os.path.commonpath([os.path.dirname(file) for file in files])
        ids = [os.path.relpath(file, folder).replace(os.sep, "/") for file in files]
        labels, numbers = [data.classes[target] for target in targets], None if splits is None else splits.tolist()
        return replace(pictures_of_files(folder, ids, labels, numbers, data.classes), name=name)
    fingerprint = hashlib.sha256(data.pictures.tobytes())
    fingerprint.update(targets.astype("<i8").tobytes())
    seen: Counter[str] = Counter()
    ids = []
    for part in data.splits or [name] * len(targets):
        ids.append(f"{part}/{seen[part]}")
        seen[part] += 1
    digest = fingerprint.hexdigest()
    return Pictures(name, ids, list(data.classes), targets, splits, digest, pixels=data.pictures)


def pictures_of_files(
    folder: str,
    ids: Sequence[str],
    labels: Sequence[str] | None = None,
    splits: Sequence[int | None] | None = None,
    classes: Sequence[str] | None = None,
) -> Pictures:
    """Pictures in the order of their ids, so that it is the same on every machine.

    Args:
        folder: where they are.
        ids: their paths below it.
        labels: the class of each, by name.
        splits: the split of each, by number.
        classes: names of the classes in their order; left out, those there are, sorted.

    Raises:
        ZooError: for names that are no UTF-8.
    """
    order = sorted(range(len(ids)), key=ids.__getitem__)
    ids = [ids[i] for i in order]
    strange = [name for name in ids if not is_utf8(name)]
    if strange:
        raise ZooError(f"data.path: {len(strange)} names in {folder} are no UTF-8: {listed(strange)}; rename them")
    files = [os.path.join(folder, name) for name in ids]
    names = None if labels is None else [labels[i] for i in order]
    numbers = None if splits is None else [splits[i] for i in order]
    classes = sorted(set(names or ())) if classes is None else list(classes)
    place = {name: i for i, name in enumerate(classes)}
    fingerprint = hashlib.sha256()
    for i, (name, file) in enumerate(zip(ids, files, strict=True)):
        about = [name, stamp(file)[0], None if names is None else names[i], None if numbers is None else numbers[i]]
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


# ---------------------------------------------------------------------- checking


def stamp(file: str) -> tuple[int, int]:
    """Size and time of a file's last change; -1 where there is none."""
    try:
        status = os.stat(file)
    except OSError:
        return -1, -1
    return status.st_size, status.st_mtime_ns


def check_pictures(files: Sequence[str]) -> dict[int, str]:
    """Decode every picture; of those that can't be read, the number in ``files`` and the reason.

    The outcome is kept in the cache. Next time, only pictures that were bad are looked at, while no file changed.
    """
    kept = _kept_for("checked", f"{_CHECK} {PIL.__version__}", files)
    suspects: Iterable[int] = range(len(files))
    with suppress(OSError, ValueError, TypeError):  # not there, or damaged
        suspects = [number for number in json.loads(kept.read_text()) if number < len(files)]
    found = _faults({number: files[number] for number in suspects})
    _keep(kept, list(found))
    return found


def _kept_for(what: str, version: str, files: Sequence[str]) -> Path:
    """Where the cache keeps what was found out about files, while no one of them changes."""
    key = hashlib.sha256(version.encode())
    for file in files:
        key.update(os.fsencode(f"{os.path.abspath(file)}\0{stamp(file)}\0"))
    return default_cache() / "images" / what / f"{key.hexdigest()[:32]}.json"


def _keep(place: Path, found: object) -> None:
    with suppress(OSError):  # without a cache the next run takes longer, that is all
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=place.parent, delete=False) as scratch:
            json.dump(found, scratch)
        os.replace(scratch.name, place)


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


# ---------------------------------------------------------------------- the same picture twice


def find_twins(files: Sequence[str]) -> list[list[int]]:
    """Groups of files that hold the same bytes, by their numbers in ``files``; empty and missing ones are in none.

    Of the same picture saved in another way nothing is known. Files of a size of their own aren't opened, and of the
    others only those whose ends agree are read whole. The outcome is kept in the cache while no file changes.
    """
    kept = _kept_for("twins", f"{_TWINS}", files)
    with suppress(OSError, ValueError, TypeError):  # not there, or damaged
        groups = [list(map(int, group)) for group in json.loads(kept.read_text())]
        if all(0 <= number < len(files) for group in groups for number in group):
            return groups
    groups = [list(range(len(files)))]
    with ThreadPool(min(8, os.cpu_count() or 1)) as pool:
        for look in (_size, _end_of, _digest_of):
            groups = [alike for group in groups for alike in _alike(group, pool.map(look, [files[i] for i in group]))]
    groups.sort()
    _keep(kept, groups)
    return groups


def _alike(numbers: Sequence[int], looks: Sequence[object]) -> list[list[int]]:
    """Those of a group that look the same; what looks like None is left out."""
    found: dict[object, list[int]] = {}
    for number, look in zip(numbers, looks, strict=True):
        if look is not None:
            found.setdefault(look, []).append(number)
    return [alike for alike in found.values() if len(alike) > 1]


def _size(file: str) -> int | None:
    """None for what has none, such as a pipe, of which reading would never end."""
    return max(0, stamp(file)[0]) or None


def _end_of(file: str) -> bytes | None:
    """Where two pictures of one camera and program differ soonest: their beginnings are all alike."""
    with suppress(OSError), open(file, "rb") as stream:
        stream.seek(max(0, os.fstat(stream.fileno()).st_size - _END))
        return hashlib.sha256(stream.read(_END)).digest()
    return None


def _digest_of(file: str) -> bytes | None:
    with suppress(OSError), open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").digest()
    return None


def warn_of_twins(
    where: str, ids: Sequence[str], twins: Sequence[Sequence[int]], marks: np.ndarray, what: str, effect: str
) -> None:
    """Say which pictures are the same file under more than one mark.

    Args:
        where: what the line starts with.
        ids: names of all pictures.
        twins: groups of the same ones.
        marks: of all pictures (n,): their classes or splits.
        what: what marks are.
        effect: what comes of it.
    """
    apart = [group for group in twins if len(set(marks[list(group)].tolist())) > 1]
    if apart:
        first = apart[0][0]
        other = next(i for i in apart[0] if marks[i] != marks[first])
        rank_zero_warn(
            f"{where} has {len(apart):,} pictures more than once with different {what}, {effect}: {ids[first]!r} and "
            f"{ids[other]!r} are the same file; keep one of each"
        )
