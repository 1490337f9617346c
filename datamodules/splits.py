"""What is for training, validation and the test, of documents, pairs, pictures and rows: all splits are drawn here."""

import hashlib
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from lightning.pytorch.utilities import rank_zero_info

from zoo.errors import ZooError, listed
from zoo.lookalikes import spelt

SPLITS = ("train", "val", "test")
FEW_DOCUMENTS = 20  # a corpus of fewer documents is split inside each, by position
_FOLDS = 20  # groups are dealt into so many folds, of which shares of the rows are made


# ---------------------------------------------------------------------- documents


def split_documents(names: Iterable[str], n: int, val_fraction: float, test_fraction: float, seed: int) -> np.ndarray:
    """0, 1 or 2 (train, val, test) for each of n documents, by the order of the SHA-256 of seed and name."""
    keys = np.fromiter(
        (int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8]) for name in names), np.uint64, count=n
    )
    order = np.argsort(keys, kind="stable")
    n_test, n_val = (max(1, round(n * fraction)) for fraction in (test_fraction, val_fraction))
    splits = np.zeros(n, dtype=np.uint8)
    splits[order[:n_test]] = 2
    splits[order[n_test : n_test + n_val]] = 1
    return splits


def cut_places(size: int, val_fraction: float, test_fraction: float) -> list[int]:
    """Where the validation and the test text of a document of some size begin, but for line ends."""
    return [int(size * share) for share in (1 - val_fraction - test_fraction, 1 - test_fraction)]


# ---------------------------------------------------------------------- pairs and sequences


def split_pairs(sources: Sequence[str], val_fraction: float, test_fraction: float, seed: int) -> np.ndarray:
    """0, 1 or 2 (train, val, test) for each pair of texts; those of equal sources go into one split.

    Args:
        sources: the source of each pair.
        val_fraction: share of the different sources in val.
        test_fraction: share in test.
        seed: decides which, together with a source's own text, so that the order of pairs makes no difference.

    Raises:
        ZooError: for fewer than three different sources.
    """
    different = sorted(set(sources))
    if len(different) < len(SPLITS):
        raise ZooError(
            f"data.path: got pairs of {len(different)} different sources; three splits need 3 at least, so give more"
        )
    splits = split_documents(different, len(different), val_fraction, test_fraction, seed)
    of_source = dict(zip(different, splits.tolist(), strict=True))
    return np.array([of_source[source] for source in sources], dtype=np.uint8)


def split_drawn(n_train: int, n_val: int, n_test: int) -> np.ndarray:
    """0, 1 or 2 (train, val, test) for rows that were drawn one after another, all different.

    The held-out ones come first, so that they stay as they are when there are more training rows.
    """
    return np.repeat(np.array([2, 1, 0], dtype=np.uint8), [n_test, n_val, n_train])


# ---------------------------------------------------------------------- pictures


def split_pictures(
    targets: np.ndarray,
    classes: Sequence[str],
    given: np.ndarray | None,
    val_fraction: float,
    test_fraction: float,
    seed: int,
    where: str = "data.path",
) -> np.ndarray:
    """0, 1 or 2 (train, val, test) for each picture; of each class about the same share goes into every split.

    Args:
        targets: class numbers (n,).
        classes: their names.
        given: splits (n,) that the data has; those of the three that it lacks are taken from its training pictures.
        val_fraction: share of the training pictures that is taken for val.
        test_fraction: share taken for test.
        seed: decides which.
        where: what an error starts with: the argument, and its value.

    Raises:
        ZooError: naming the classes that have too few pictures to be in every split.
    """
    splits = np.zeros(len(targets), dtype=np.uint8) if given is None else given.copy()
    shares = {2: test_fraction, 1: val_fraction}
    lacking = [number for number in shares if not (splits == number).any()]
    training = np.flatnonzero(splits == 0)
    counts = np.bincount(targets[training], minlength=len(classes))
    few = [name for name, count in zip(classes, counts, strict=True) if 0 < count <= len(lacking)]
    if few:
        raise ZooError(
            f"{where}: the classes {listed(few)} have fewer than {len(lacking) + 1} pictures, one for each of "
            f"{', '.join(SPLITS[number] for number in (0, *sorted(lacking)))}; add pictures, or merge or drop classes"
        )
    chance = np.random.RandomState(seed)  # its numbers are the same in every version of NumPy
    for number in np.flatnonzero(counts):
        rows = chance.permutation(training[targets[training] == number])
        left = len(rows)
        for place, split in enumerate(lacking):
            others = len(lacking) - place  # what still needs a picture: the training split, and val after test
            n = min(max(1, round(shares[split] * len(rows))), left - others)
            splits[rows[left - n : left]] = split
            left -= n
    return splits


def tell_of_absent_classes(where: str, targets: np.ndarray, splits: np.ndarray | None, classes: Sequence[str]) -> None:
    """Name the classes that the pictures of an evaluation, or of a held-out split, have none of.

    Args:
        where: what the line starts with.
        targets: class numbers (n,).
        splits: their splits (n,); None if all are for evaluation.
        classes: names of all classes.
    """
    parts = {"": targets} if splits is None else {f"{SPLITS[number]} ": targets[splits == number] for number in (1, 2)}
    for name, held in parts.items():
        there = set(held.tolist())
        absent = [label for i, label in enumerate(classes) if i not in there]
        if there and absent:
            rank_zero_info(f"{where} has no {name}pictures of {listed(absent)}, so that figures tell nothing of these")


# ---------------------------------------------------------------------- rows of tables


def split_rows(
    n: int,
    val_fraction: float,
    test_fraction: float,
    seed: int,
    classes: np.ndarray | None = None,
    groups: np.ndarray | None = None,
) -> np.ndarray:
    """0, 1 or 2 (train, val, test) for each of n rows.

    Args:
        n: number of rows.
        val_fraction: share of the rows, or of the groups, in val.
        test_fraction: share in test.
        seed: decides which.
        classes: class numbers (n,), kept at about the same share in every split.
        groups: group names (n,), each of which goes into one split whole.

    Raises:
        ZooError: if there are too few rows, groups, or rows of a class.
    """
    if groups is not None:
        return _split_groups(n, val_fraction, test_fraction, seed, classes, groups)
    splits = np.zeros(n, dtype=np.uint8)
    rest = np.arange(n)
    for number, name, share in ((2, "test_fraction", test_fraction), (1, "val_fraction", val_fraction)):
        held_out = _hold_out(rest, max(1, round(n * share)), seed, classes, f"data.{name}: got {share}")
        splits[held_out] = number
        rest = np.setdiff1d(rest, held_out)
    return splits


def _hold_out(rows: np.ndarray, n_held_out: int, seed: int, classes: np.ndarray | None, argument: str) -> np.ndarray:
    from sklearn.model_selection import train_test_split

    if classes is not None:
        _, inverse, counts = np.unique(classes[rows], return_inverse=True, return_counts=True)
        rows = rows[counts[inverse] > 1]  # the last row of a class stays in training
    least = 1 if classes is None else len(np.unique(classes[rows]))
    if not least <= n_held_out <= len(rows) - least:
        kinds = "" if classes is None else f" of {least} classes"
        raise ZooError(
            f"{argument}, which makes {n_held_out} of {len(rows)} rows{kinds}; at least {least} must be held out and "
            "as many left, so give more rows, another share, or data.split_column"
        )
    stratify = None if classes is None else classes[rows]
    _, held_out = train_test_split(rows, test_size=n_held_out, random_state=seed, stratify=stratify)
    return np.asarray(held_out)


def _split_groups(
    n: int, val_fraction: float, test_fraction: float, seed: int, classes: np.ndarray | None, groups: np.ndarray
) -> np.ndarray:
    from sklearn.model_selection import GroupShuffleSplit, StratifiedGroupKFold

    n_groups = len(np.unique(groups))
    n_folds = min(_FOLDS, n_groups) if classes is None else min(_FOLDS, n_groups, int(np.bincount(classes).max()))
    if n_folds < 3:
        raise ZooError(
            f"data.group_column: got {n_groups} groups in {n} rows; three splits need 3 groups, and 3 rows of a "
            "class, so give more or set data.split_column"
        )
    splits = np.zeros(n, dtype=np.uint8)
    if classes is None:
        n_test = min(max(1, round(n_groups * test_fraction)), n_groups - 2)
        n_val = min(max(1, round(n_groups * val_fraction)), n_groups - 1 - n_test)
        rest = np.arange(n)
        for number, size in ((2, n_test), (1, n_val)):
            shuffle = GroupShuffleSplit(n_splits=1, test_size=size, random_state=seed)
            kept, held_out = next(shuffle.split(rest, groups=groups[rest]))
            splits[rest[held_out]] = number
            rest = rest[kept]
        return splits
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a class rarer than there are folds
        folds = [
            held_out
            for _, held_out in StratifiedGroupKFold(n_folds, shuffle=True, random_state=seed).split(
                np.zeros(n), classes, groups
            )
        ]
    # A group too large for a held-out split goes to training with its fold; a fold may also have come out empty.
    folds = sorted((fold for fold in folds if len(fold)), key=lambda fold: len(fold) > 2 * n / n_folds)
    n_test = min(max(1, round(n_folds * test_fraction)), len(folds) - 2)
    n_val = min(max(1, round(n_folds * val_fraction)), len(folds) - 1 - n_test)
    if n_test < 1 or n_val < 1:
        raise ZooError(
            "data.group_column: the groups are too unequal to be split; merge small ones or set data.split_column"
        )
    for number, chosen in ((2, folds[:n_test]), (1, folds[n_test : n_test + n_val])):
        splits[np.concatenate(chosen)] = number
    return splits


def splits_of_column(values: "pd.Series[Any]", row_ids: Sequence[str]) -> np.ndarray:
    """Splits as a column gives them: train, val or test in every row.

    Raises:
        ZooError: naming row and value, if it is anything else.
    """
    unknown = np.flatnonzero(~values.isin(SPLITS))
    if unknown.size:
        value = values.iloc[unknown[0]]
        shown = spelt(value) if isinstance(value, str) else repr(value)
        raise ZooError(
            f"data.split_column: column {values.name!r} has {shown} in row {row_ids[unknown[0]]!r}; every row must "
            "have train, val or test"
        )
    return np.array([SPLITS.index(value) for value in values], dtype=np.uint8)
