"""The same data is split in the same way for good: digests taken when there were three homes for splits."""

import hashlib
import json

import numpy as np
import pytest

from datamodules.splits import FEW_DOCUMENTS, split_documents, split_pictures, split_rows
from datamodules.text_files import Corpus, find_files

CLASSES = np.arange(500) % 7
NAMES = [str(number) for number in range(7)]
GROUPS = np.array([f"g{row % 41}" for row in range(500)], dtype=object)
OWN_TEST = np.where(np.arange(500) < 400, 0, 2).astype(np.uint8)


def digest(splits):
    return hashlib.sha256(splits.astype(np.uint8).tobytes()).hexdigest()[:16]


@pytest.mark.parametrize(("n", "seed", "frozen"), [(1000, 3, "9ab71460cb127b6e"), (21, 0, "bba9513f03008404")])
def test_splits_of_documents_stay(n, seed, frozen):
    assert digest(split_documents((f"n{i}:0" for i in range(n)), n, 0.05, 0.1, seed)) == frozen


@pytest.mark.parametrize(("given", "frozen"), [(None, "bae441b3a61e0859"), (OWN_TEST, "71ef5aa179e5a3c3")])
def test_splits_of_pictures_stay(given, frozen):
    assert digest(split_pictures(CLASSES, NAMES, given, 0.15, 0.2, 4)) == frozen


@pytest.mark.parametrize(
    ("classes", "groups", "frozen"),
    [
        (None, None, "603bcc323aeb4705"),
        (CLASSES, None, "eb61f3cbecca490c"),
        (None, GROUPS, "349dcdffbdff8ab3"),
        (CLASSES, GROUPS, "78112058385688ad"),
    ],
)
def test_splits_of_rows_stay(classes, groups, frozen):
    assert digest(split_rows(500, 0.15, 0.2, 5, classes, groups)) == frozen


def test_few_documents_are_cut_where_they_were(tmp_path):
    for i in range(3):
        text = "".join(f"line {i} {j} ü\n" for j in range(200 * (i + 1)))
        (tmp_path / f"{i}.txt").write_text(text, encoding="utf-8")
    rows = [{"t": "".join(f"row {i} {j}\n" for j in range(50))} for i in range(4)]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for files, field, frozen in (
        (find_files(str(tmp_path), None), None, "b178a0f361f19254"),
        (find_files(str(tmp_path / "t.jsonl"), "t"), "t", "860e2bce99b148fe"),
    ):
        assert len(rows) < FEW_DOCUMENTS
        found = hashlib.sha256()
        for split, pieces in Corpus(files, field, "strict", 0.1, 0.2, 0).iterate():
            found.update(f"{split}:{''.join(pieces)}\0".encode())
        assert found.hexdigest()[:16] == frozen
