"""Folders of pictures: which are classes, which are splits, and which may be either."""

import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from datamodules.folders import files_below, folders_in
from datamodules.image_files import Pictures, pictures_of_files
from datamodules.image_labels import read_labels, refuse_missing
from datamodules.splits import SPLITS
from zoo.errors import ZooError, listed
from zoo.lookalikes import appearance, refuse_look_alikes

_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")
_SPLIT_WORDS = {
    "train": 0,
    "training": 0,
    "val": 1,
    "valid": 1,
    "validate": 1,
    "validation": 1,
    "dev": 1,
    "development": 1,
    "test": 2,
    "testing": 2,
    "holdout": 2,
    "heldout": 2,
    "eval": None,  # whichever of val and test has no folder
    "evaluation": None,
}
_AROUND = "seg|sets?|splits?|data|images?|imgs?|pictures?|pics?|photos?|samples?|folder"
_SPLIT_NAME = re.compile(f"(?:{_AROUND})*({'|'.join(_SPLIT_WORDS)})(?:{_AROUND})*")
_WAYS_OUT = "or name the pictures and their classes in a CSV file with data.labels"


def split_words(names: Iterable[str]) -> dict[str, str]:
    """The words for splits that names of folders come down to, of those that are names of splits.

    "train" is one of "train", "seg_train" and "Train-Images 2"; of "birds_train" only beside "birds_test" or the like.
    """
    parts = {name: found for name in names if (found := _word_and_rest(name)) is not None}
    beside: dict[str, set[str]] = {}
    for word, rest in parts.values():
        beside.setdefault(rest, set()).add(word)
    return {name: word for name, (word, rest) in parts.items() if not rest or len(beside[rest]) > 1}


def _word_and_rest(name: str) -> tuple[str, str] | None:
    """The one word for a split in a name, and what else is in it."""
    words = re.findall(r"[^\W\d_]+", appearance(name).lower())
    if whole := _SPLIT_NAME.fullmatch("".join(words)):
        return whole[1], ""
    found = [(match[1], i) for i, word in enumerate(words) if (match := _SPLIT_NAME.fullmatch(word))]
    if len(found) != 1:
        return None
    ((word, place),) = found
    return word, " ".join([*words[:place], "*", *words[place + 1 :]])


# ---------------------------------------------------------------------- the pictures of a folder


def find_classes(path: str, known: Collection[str] = ()) -> Pictures:
    """The pictures of a folder with a folder a class, or with such folders in the folders of splits.

    Args:
        path: the folder.
        known: names that are classes, of a checkpoint: folders of these names only are taken for classes where
            they might be something else.

    Raises:
        ZooError: if there is no such folder, it has no class folders, some of them have no pictures, two look the same,
            or it isn't clear which folders are classes.
    """
    try:
        folder = _existing_folder(path)
        layout = _layout(path, folder, known)
        others: Counter[str] = Counter()
        files = [files_below(os.path.join(folder, place), _SUFFIXES, others) for _, _, place in layout.places]
        outside = [
            os.path.normpath(os.path.join(above, name))
            for above in layout.above
            for name in files_below(os.path.join(folder, above), _SUFFIXES, deep=False)
        ]
    except OSError as error:
        raise _unreadable(path, error) from None
    if not layout.places:
        raise ZooError(
            f"data.path: {path} has no class folders ({len(outside)} pictures lie in it directly); put the pictures of "
            "each class into a folder of its own, or name a CSV file with data.labels"
        )
    _check_classes(path, layout, files, known)
    ids, labels, splits = [], [], []
    for (split, label, place), names in zip(layout.places, files, strict=True):
        ids += [f"{place}/{name}" for name in names]
        labels += [label] * len(names)
        splits += [split] * len(names)
    pictures = pictures_of_files(folder, ids, labels, None if splits[0] is None else splits)
    _tell_of_layout(path, layout, files, outside)
    _tell_of_others(path, others)
    return pictures


def find_labelled(path: str, labels: str) -> Pictures:
    """The pictures that a CSV file names, in the columns path, label and, if there is one, split.

    Raises:
        ZooError: if the file can't be used, as ``read_labels`` says, names a picture twice in different ways, or names
            files that aren't there.
    """
    folder = os.path.abspath(_existing_folder(path))
    table = read_labels(labels)
    table["file"] = table["path"].map(lambda name: os.path.normpath(os.path.join(folder, os.path.expanduser(name))))
    known = [name for name in ("label", "split") if name in table]
    once = table.drop_duplicates(["file", *known])
    twice = once[once["file"].duplicated()]["path"].tolist()
    if twice:
        raise ZooError(
            f"data.labels: {labels} gives {len(twice)} pictures more than one label or split: {listed(twice)}; leave "
            "one row of each"
        )
    refuse_missing(labels, path, once["path"][~once["file"].map(os.path.isfile)].tolist(), _SUFFIXES)
    files = once["file"].tolist()
    ids = [file.removeprefix(folder + os.sep) for file in files]
    splits = [SPLITS.index(name) for name in once["split"]] if "split" in once else None
    pictures = pictures_of_files(folder, ids, once["label"].tolist(), splits)
    named = split_words({name.partition("/")[0] for name in ids if "/" in name})
    if splits is None and len(set(named.values())) > 1:
        rank_zero_warn(
            f"data.labels: {labels} has no column 'split', so that splits are drawn although pictures lie in "
            f"{listed(sorted(named))}; add the column if these are splits"
        )
    _tell_of_unnamed(labels, files)
    return pictures


def find_all(path: str) -> Pictures:
    """Every picture below a folder, or a single file, whatever class it may be.

    Raises:
        ZooError: if there is no such file or folder, or no picture in it.
    """
    place = os.path.expanduser(path)
    if os.path.isfile(place):
        return pictures_of_files(os.path.dirname(place), [os.path.basename(place)])
    others: Counter[str] = Counter()
    try:
        folder = _existing_folder(path)
        ids = files_below(folder, _SUFFIXES, others)
    except OSError as error:
        raise _unreadable(path, error) from None
    if not ids:
        raise ZooError(f"data.path: there is no picture in {path} ({', '.join(_SUFFIXES)}); name another folder")
    _tell_of_others(path, others)
    return pictures_of_files(folder, ids)


def _unreadable(path: str, error: OSError) -> ZooError:
    return ZooError(f"data.path: {error.filename or path} can't be read ({error.strerror}); check its permissions")


def _existing_folder(path: str) -> str:
    folder = os.path.expanduser(path)
    if os.path.isfile(folder):
        raise ZooError(f"data.path: got {path}, which is a file; name the folder that holds the class folders")
    if not os.path.isdir(folder):
        raise ZooError(f"data.path: there is no folder {path}; check the path")
    return folder


# ---------------------------------------------------------------------- classes and splits


@dataclass(frozen=True)
class _Layout:
    """Where pictures lie: ``places`` are (split, class, folder), and the split is None where there are none.

    ``above`` are the folders around class folders, whose own pictures are in no class, and ``left_out`` those that
    belong to no split.
    """

    places: list[tuple[int | None, str, str]]
    above: list[str]
    left_out: list[str]


def _layout(path: str, folder: str, known: Collection[str]) -> _Layout:
    """Splits are told from classes by their names, and by the folders they hold: classes hold pictures."""
    inner = folders_in(folder)
    words = split_words(inner)
    classes = {name: folders_in(os.path.join(folder, name)) for name in words}
    full = [name for name in words if classes[name]]
    rest = [name for name in inner if name not in words]
    if len(full) == 1 and rest and not set(inner) <= set(known):
        others = [name for name in inner if name not in full]
        raise ZooError(
            f"data.path: {path} has {full[0]!r}, which holds folders as a split does, beside {listed(others)}; if the "
            f"classes are in it, name {os.path.join(path, full[0])} or take the others away, and if it is a class, put "
            f"its pictures into it directly, {_WAYS_OUT}"
        )
    if not full or (len(full) == 1 and rest):
        if len(words) > 1 and not set(inner) <= set(known):
            rank_zero_warn(
                f"data.path: {listed(list(words))} in {path} are taken for classes, as they hold pictures and no class "
                f"folders; if they are splits, put a folder for each class into them, {_WAYS_OUT}"
            )
        return _Layout([(None, name, name) for name in inner], ["."], [])
    flat = [name for name in words if not classes[name]]
    if flat:
        raise ZooError(
            f"data.path: {path} has class folders in {listed(full)}, but none in {listed(flat)}; give each the same "
            "class folders, or take it away"
        )
    places: list[tuple[int | None, str, str]] = []
    above = ["."]
    for number, (name, labels) in zip(_numbers(path, words), classes.items(), strict=True):
        within = folders_in(os.path.join(folder, name, name)) if labels == [name] else []
        place = f"{name}/{name}" if within else name  # as some archives have it
        places += [(number, label, f"{place}/{label}") for label in within or labels]
        above += [name, place] if within else [name]
    return _Layout(places, above, rest)


def _numbers(path: str, words: Mapping[str, str]) -> list[int]:
    """The split that each folder is for."""
    numbers = [_SPLIT_WORDS[word] for word in words.values()]
    open_ones = [name for name, number in zip(words, numbers, strict=True) if number is None]
    lacking = [number for number in (1, 2) if number not in numbers]
    if open_ones and len(lacking) == 2:
        raise ZooError(
            f"data.path: {path} has {listed(list(words))}, and {listed(open_ones)} may be for validation or for the "
            "test; rename it val or test"
        )
    found = [number if number is not None else (lacking or [2])[0] for number in numbers]
    if len(set(found)) < len(found):
        raise ZooError(f"data.path: {path} has {listed(list(words))}, two of them for the same split; leave one")
    return found


def _check_classes(path: str, layout: _Layout, files: Sequence[Sequence[str]], known: Collection[str]) -> None:
    """Refuse class folders that are empty, look like each other, or may be no classes."""
    empty = [place for (_, _, place), names in zip(layout.places, files, strict=True) if not names]
    if empty:
        raise ZooError(
            f"data.path: {len(empty)} class folders in {path} hold no picture: {listed(empty)}; put some in "
            f"({', '.join(_SUFFIXES)}), or delete them"
        )
    refuse_look_alikes(
        (label for _, label, _ in layout.places),
        f"data.path: class folders in {path}",
        advice="rename one of them, or put their pictures into one folder",
    )
    below: dict[str, list[str]] = {}
    for (_, label, _), names in zip(layout.places, files, strict=True):
        below.setdefault(label, []).extend(names)
    if not set(below) <= set(known):
        _refuse_wrapped(path, layout, below)
        _refuse_alike(path, below)


def _refuse_wrapped(path: str, layout: _Layout, below: Mapping[str, Sequence[str]]) -> None:
    """One folder that holds nothing but folders is no class, but lies around the classes."""
    if len(below) > 1:
        return
    (names,) = below.values()
    inner = os.path.commonpath([os.path.dirname(name) or "." for name in names])
    held = _folders([os.path.relpath(name, inner) if inner else name for name in names])
    if len(held) < 2 or any(os.path.dirname(name) == inner for name in names):
        return
    where = os.path.normpath(os.path.join(layout.places[0][2], inner))
    if layout.places[0][0] is None:
        advice = f"name {os.path.join(path, where)} with data.path"
    else:
        advice = f"put what is in it into {os.path.dirname(layout.places[0][2])}, and likewise for the other splits"
    raise ZooError(f"data.path: {path} has one class folder, {where!r}, and that holds {listed(held)}; {advice}")


def _refuse_alike(path: str, below: Mapping[str, Sequence[str]]) -> None:
    """Folders that hold the same folders, and no pictures of their own, may be splits, folds or years."""
    if any("/" not in name for names in below.values() for name in names):
        return
    held = {label: set(_folders(names)) for label, names in below.items()}
    for label, folders in held.items():
        splits = sorted(split_words(folders))
        if len(splits) > 1:
            raise ZooError(
                f"data.path: {label!r} in {path} holds {listed(splits)}, as the folders of splits are called; put the "
                f"folders of classes into those of splits, {_WAYS_OUT}"
            )
    same, every = set.intersection(*held.values()), set.union(*held.values())
    if len(below) > 1 and len(same) > 1 and 2 * len(same) > len(every):
        raise ZooError(
            f"data.path: {listed(list(below))} in {path} all hold the folders {listed(sorted(same))}; if these are the "
            "classes, call the folders around them train, val and test, and if not, put the pictures of each class "
            f"into its folder directly, {_WAYS_OUT}"
        )


def _folders(names: Sequence[str]) -> list[str]:
    """The first folders of paths, sorted."""
    return sorted({name.partition("/")[0] for name in names if "/" in name})


# ---------------------------------------------------------------------- what is said


def _tell_of_layout(path: str, layout: _Layout, files: Sequence[Sequence[str]], outside: Sequence[str]) -> None:
    if layout.left_out:
        rank_zero_info(
            f"data.path: {listed(layout.left_out)} in {path} are beside the folders of splits, and left out with all "
            "in them"
        )
    if outside:
        rank_zero_info(
            f"data.path: {len(outside):,} pictures in {path} lie in no class folder and are left out: {listed(outside)}"
        )
    deep = [
        (f"{place}/{name}", label)
        for (_, label, place), names in zip(layout.places, files, strict=True)
        for name in names
        if "/" in name
    ]
    if deep:
        name, label = min(deep)
        rank_zero_info(
            f"data.path: {len(deep):,} pictures in {path} lie in folders within class folders, and are of the outer "
            f"one's class: {name!r} of {label!r}"
        )


def _tell_of_others(path: str, others: "Counter[str]") -> None:
    if others:
        kinds = listed([kind for kind, _ in others.most_common()])
        rank_zero_info(f"data.path: {others.total():,} files in {path} are no pictures by name ({kinds}) and left out")


def _tell_of_unnamed(labels: str, files: Sequence[str]) -> None:
    """Pictures that lie beside those that a CSV names; others may be anywhere, and are no concern of it."""
    named = set(files)
    beside: list[str] = []
    for folder in sorted({os.path.dirname(file) for file in files}):
        with suppress(OSError):  # files may be read where they can't be listed
            found = (os.path.join(folder, name) for name in sorted(files_below(folder, _SUFFIXES, deep=False)))
            beside += [file for file in found if file not in named]
    if beside:
        rank_zero_info(
            f"data.labels: {labels} doesn't name {len(beside):,} pictures beside those it names; they are left out, "
            f"such as {beside[0]!r}"
        )
