"""A user's text: found, split, tokenised once, refused with one clear line where it can't be used."""

import json
import re
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import datamodules.text as text_module
import datamodules.text_reading as text_reading
from datamodules import TextDataModule
from datamodules.sources.base import CORPORA
from datamodules.splits import split_documents
from datamodules.text import read_prompts, token_dtype
from datamodules.text_files import find_files, named_files
from datamodules.text_reading import file_pieces
from zoo.errors import ZooError
from zoo.tokenizer import END_OF_TEXT, tokenizer_from_identity


def ready(path, stage="fit", **options):
    data = TextDataModule(path=str(path), **{"window": 8, "batch_size": 2, "tokenizer": "byte", **options})
    data.prepare_data()
    data.setup(stage)
    return data


def split_tokens(data, split):
    return np.fromfile(data._folder / f"{split}.bin", token_dtype(len(data.identity()["tokens"]))).tolist()


def split_texts(data, split):
    tokenizer = tokenizer_from_identity(data.identity())
    numbers, texts = split_tokens(data, split), [[]]
    for number in numbers:
        texts[-1].append(number)
        if number == tokenizer.end:
            texts.append([])
    assert texts.pop() == [], "every text has its end"
    return [tokenizer.decode(tokens) for tokens in texts]


# ---------------------------------------------------------------------- what is read


def test_default_is_the_standard_library_without_tests_and_packages():
    files = named_files(CORPORA.get("stdlib")().read(), "strict")
    names = [file.name for file in files]
    assert "dataclasses.py" in names
    assert "json/decoder.py" in names
    assert names == sorted(names)
    assert not any(re.search(r"(^|/)(tests?|site-packages|idle_test)/", name) for name in names)
    assert sum(file.path.stat().st_size for file in files) > 5_000_000


def test_every_document_is_in_exactly_one_split_with_every_byte(corpus):
    data = ready(corpus)
    texts = [text for split in ("train", "val", "test") for text in split_texts(data, split)]
    assert sorted(texts) == sorted(path.read_text(encoding="utf-8") for path in corpus.glob("*.py"))
    assert len(split_texts(data, "val")) == 1
    assert len(split_texts(data, "test")) == 1


def test_the_split_is_the_same_on_every_run_and_another_with_another_seed(corpus):
    names = [f"{i}" for i in range(200)]
    first = split_documents(names, 200, 0.1, 0.2, 0)
    assert (first == split_documents(names, 200, 0.1, 0.2, 0)).all()
    assert (first != split_documents(names, 200, 0.1, 0.2, 1)).any()
    assert np.bincount(first).tolist() == [140, 20, 40]


def test_one_file_is_cut_at_line_ends_in_order(tmp_path):
    whole = "".join(f"line {i} äöü\n" for i in range(1000))
    (tmp_path / "book.txt").write_text(whole, encoding="utf-8")
    data = ready(tmp_path / "book.txt", val_fraction=0.1, test_fraction=0.2)
    train, val, test = ("".join(split_texts(data, split)) for split in ("train", "val", "test"))
    assert train + val + test == whole
    assert train.endswith("\n")
    assert val.endswith("\n")
    assert len(val) == pytest.approx(0.1 * len(whole), rel=0.05)
    assert len(test) == pytest.approx(0.2 * len(whole), rel=0.05)


def test_a_file_without_line_ends_is_cut_between_characters(tmp_path):
    (tmp_path / "line.txt").write_text("ä" * 5001, encoding="utf-8")
    data = ready(tmp_path / "line.txt")
    assert "".join("".join(split_texts(data, split)) for split in ("train", "val", "test")) == "ä" * 5001


def test_folder_takes_text_files_only_and_globs_what_they_match(tmp_path):
    for name in ("a.txt", "sub/b.md", "c.py", "d.png", "e.csv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    assert [file.name for file in find_files(str(tmp_path), None)] == ["a.txt", "c.py", "sub/b.md"]
    assert [file.name for file in find_files(str(tmp_path / "**" / "*.md"), None)] == ["b.md"]
    assert [file.name for file in find_files(str(tmp_path), "text")] == ["a.txt", "c.py", "e.csv", "sub/b.md"]


@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
def test_rows_of_a_table_are_documents(tmp_path, suffix):
    rows = [f'row {i}, with "quotes" and\ntwo lines' for i in range(40)]
    table = tmp_path / f"table{suffix}"
    if suffix == ".jsonl":
        table.write_text("".join(json.dumps({"id": i, "body": row}) + "\n\n" for i, row in enumerate(rows)))
    else:
        cells = "".join(f'{i},"{quoted}"\n' for i, quoted in enumerate(row.replace('"', '""') for row in rows))
        table.write_text("id,body\n" + cells)
    data = ready(table, field="body", window=4)
    texts = [text for split in ("train", "val", "test") for text in split_texts(data, split)]
    assert sorted(texts) == sorted(rows)
    assert len(split_texts(data, "val")) == 2


# ---------------------------------------------------------------------- the tokenizer


def test_bpe_learns_from_the_training_split_alone(tmp_path):
    for i in range(40):
        (tmp_path / f"{i:02}.txt").write_text("common words\n" * 30)
    held_out = np.flatnonzero(split_documents((f"{i:02}.txt:0" for i in range(40)), 40, 0.05, 0.05, 0))
    for i in held_out:
        (tmp_path / f"{i:02}.txt").write_text("zzyzx\n" * 3000)
    data = ready(tmp_path, tokenizer="bpe", vocab_size=400, window=4)
    tokens = data.identity()["tokens"]
    assert "common" in tokens
    assert not any("zz" in token for token in tokens)


def test_a_checkpoint_as_tokenizer_gives_its_vocabulary_to_other_text(trained, tmp_path):
    (tmp_path / "other.txt").write_text("wholly different text\n" * 200)
    data = ready(tmp_path / "other.txt", tokenizer=str(trained))
    from zoo.checkpoint.identity import read_checkpoint

    identity = read_checkpoint(trained)["zoo"]["identity"]
    assert data.identity()["tokens"] == identity["tokens"]
    assert data.identity()["merges"] == identity["merges"]
    assert data.identity()["source"] != identity["source"]


# ---------------------------------------------------------------------- the cache


def test_tokens_are_made_once_and_again_for_changed_text_or_settings(tmp_path, monkeypatch):
    made = []
    original = text_module.write_tokens
    monkeypatch.setattr(text_module, "write_tokens", lambda *a: made.append(1) or original(*a))
    (tmp_path / "a.txt").write_text("some text here\n" * 100)
    cache = tmp_path / "cache"
    options = {"cache_dir": str(cache), "tokenizer": "bpe", "vocab_size": 260}
    first = ready(tmp_path / "a.txt", **options)
    ready(tmp_path / "a.txt", **options)
    assert len(made) == 1
    ready(tmp_path / "a.txt", **{**options, "val_fraction": 0.2})
    assert len(made) == 2
    (tmp_path / "a.txt").write_text("other text here\n" * 100)
    second = ready(tmp_path / "a.txt", **options)
    assert len(made) == 3
    assert first.digest != second.digest
    assert not list(cache.rglob(".writing-*"))


def test_a_failed_tokenisation_leaves_nothing_behind(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("fine\n" * 400)
    (tmp_path / "b.txt").write_bytes(b"fine so far\n" * 50 + b"\xff\xfe\n")
    cache = tmp_path / "cache"
    with pytest.raises(ZooError):
        ready(tmp_path, cache_dir=str(cache))
    assert [path for path in cache.rglob("*") if path.is_file()] == []


def test_a_corpus_is_never_held_in_memory(tmp_path):
    peaks = []
    for blocks in (8, 32):  # 5 and 22 MB
        with open(tmp_path / "big.txt", "w") as file:
            for i in range(blocks):
                file.write(f"{i} all work and no play makes jack a dull boy\n" * 15_000)
        tracemalloc.start()
        data = ready(tmp_path / "big.txt", window=64)
        next(iter(data.train_dataloader()))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    # four times the text: a corpus in memory would add 17 MB, and its tokens as Python numbers 130 MB
    assert peaks[1] < peaks[0] + 4_000_000


@given(data=st.binary(max_size=400), cuts=st.integers(1, 64))
@settings(deadline=None, max_examples=100)
def test_pieces_of_a_file_add_up_to_its_text(data, cuts):
    import tempfile

    text = data.decode(errors="ignore").replace("\0", "") + "ä€😀" * 5
    with tempfile.NamedTemporaryFile(suffix=".txt") as file, pytest.MonkeyPatch.context() as patch:
        file.write(text.encode())
        file.flush()
        patch.setattr(text_reading, "PIECE", cuts)
        pieces = list(file_pieces(Path(file.name), 0, len(text.encode()), "strict"))
    assert "".join(pieces) == text


# ---------------------------------------------------------------------- windows


def test_windows_hold_inputs_and_the_targets_one_further(corpus):
    data = ready(corpus)
    tokens = split_tokens(data, "val")
    rows = [row.tolist() for batch in data.val_dataloader() for row in batch]
    assert all(len(row) == 9 for row in rows)
    flat = [token for row in rows for token in row[:-1]]
    assert flat == tokens[: len(flat)]
    assert [row[-1] for row in rows[:-1]] == [row[0] for row in rows[1:]]
    assert len(tokens) - len(flat) <= 8


def test_large_vocabularies_get_wider_tokens():
    assert token_dtype(65_536).itemsize == 2
    assert token_dtype(65_537).itemsize == 4


# ---------------------------------------------------------------------- identity


def test_identity_is_plain_and_names_its_source():
    data = TextDataModule(window=8, tokenizer="byte")
    corpus, source = data._corpus()
    assert source["python"] == ".".join(map(str, sys.version_info[:3]))
    assert source["bytes"] == corpus.n_bytes
    assert len(source["sha256"]) == 64


def test_identity_survives_json(corpus):
    identity = ready(corpus, tokenizer="bpe", vocab_size=300).identity()
    assert json.loads(json.dumps(identity)) == identity
    assert identity["kind"] == "text"
    assert len(identity["tokens"]) == 300
    assert END_OF_TEXT in identity["tokens"]


# ---------------------------------------------------------------------- bad input


def bad(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    return tmp_path / name


@pytest.mark.parametrize(
    ("name", "content", "options", "message"),
    [
        ("a.txt", b"", {}, r"a\.txt is empty"),
        ("a.txt", b"abc\n\xff\n", {}, r"a\.txt has bytes that are no UTF-8, the first at offset 4; convert it"),
        ("a.txt", b"short\n" * 3, {}, r"data\.window: got 8, but the val split has .* fewer than a window"),
        ("a.jsonl", b'{"body": "x"}\n', {}, r"data\.field: got none, but .*a\.jsonl is a table"),
        ("a.jsonl", b'{"body": "x"}\n{"text": "y"}\n', {"field": "body"}, r"line 2 has text; name a field"),
        ("a.jsonl", b'{"body": "x"}\n{"bo', {"field": "body"}, r"line 2 is no JSON"),
        ("a.jsonl", b'{"body": 3}\n', {"field": "body"}, r"line 1: 'body' is a int; must be text"),
        ("a.jsonl", b'["x"]\n', {"field": "body"}, r"line 1 has list"),
        ("a.csv", b"id,text\n1,x\n", {"field": "body"}, r"has the columns 'id', 'text'"),
        ("a.csv", b"", {"field": "body"}, r"a\.csv is empty"),
        ("a.csv", b"body\n\xff\n", {"field": "body"}, r"no UTF-8"),
        ("a.csv", b'body\n"x\n', {"field": "body"}, r"no readable CSV"),
        ("a.png", b"", {"folder": True}, r"has no \.txt, \.md, \.py file \(found: \.png\)"),
    ],
)
def test_bad_text_is_refused_in_one_line_that_says_where(tmp_path, name, content, options, message):
    path = bad(tmp_path, name, content)
    options = dict(options)
    with pytest.raises(ZooError, match=message) as raised:
        ready(tmp_path if options.pop("folder", False) else path, **options)
    assert "\n" not in str(raised.value)


def test_missing_path_is_refused(tmp_path):
    with pytest.raises(ZooError, match=r"data\.path: .*nowhere is no file, no folder and matches nothing"):
        ready(tmp_path / "nowhere")


def test_undecodable_bytes_can_be_replaced_or_ignored(tmp_path):
    path = bad(tmp_path, "a.txt", b"abc\xff def ghi\n" * 100)
    replaced = "".join(split_texts(ready(path, encoding_errors="replace"), "train"))
    ignored = "".join(split_texts(ready(path, encoding_errors="ignore"), "train"))
    assert "abc\ufffd def" in replaced
    assert "abc def" in ignored


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, r"data\.window: got 0"),
        ({"batch_size": 0}, r"data\.batch_size: got 0"),
        ({"val_fraction": 0.0}, r"data\.val_fraction: got 0.0"),
        ({"test_fraction": 0.7}, r"data\.test_fraction: got 0.7"),
        ({"num_workers": -1}, r"data\.num_workers: got -1"),
        ({"tokenizer": "wordpiece"}, r"data\.tokenizer: got 'wordpiece'; give byte, bpe or an existing checkpoint"),
        ({"tokenizer": "bpe", "vocab_size": 256}, r"data\.vocab_size: got 256"),
    ],
)
def test_arguments_out_of_range_are_refused_by_name(options, message):
    with pytest.raises(ZooError, match=message):
        TextDataModule(**options)


def test_an_unwritable_cache_is_refused(tmp_path, corpus):
    (tmp_path / "file").write_text("")
    with pytest.raises(ZooError, match=r"data\.cache_dir: .* can't be used"):
        ready(corpus, cache_dir=str(tmp_path / "file"))


def test_prompts_come_a_line_or_a_json_field_each(tmp_path):
    (tmp_path / "p.txt").write_text("def a\n\nimport b\n")
    assert read_prompts(tmp_path / "p.txt") == ["def a", "import b"]
    (tmp_path / "p.jsonl").write_text('{"prompt": "two\\nlines"}\n')
    assert read_prompts(tmp_path / "p.jsonl") == ["two\nlines"]
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(ZooError, match="has no prompt"):
        read_prompts(tmp_path / "empty.txt")
    with pytest.raises(ZooError, match="there is no file"):
        read_prompts(tmp_path / "nowhere.txt")
