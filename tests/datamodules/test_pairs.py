"""Pairs of texts: read, split by source, tokenised, refused with one clear line where they can't be used."""

import ast
import json

import pytest

from datamodules import TextDataModule, TextPairDataModule
from datamodules.sources import PAIRS, make_source
from zoo.errors import ZooError
from zoo.tokenizer import NO_TARGET, tokenizer_from_identity

ROWS = [(f"say {i} twice", f"{i} {i}") for i in range(40)]


def write(path, rows=ROWS):
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps({"source": a, "target": b}) + "\n" for a, b in rows))
    else:
        path.write_text("source,target\n" + "".join(f'"{a}","{b}"\n' for a, b in rows))
    return path


def ready(path, **options):
    data = TextPairDataModule(str(path), **{"tokenizer": "byte", "window": 64, "batch_size": 4, **options})
    data.prepare_data()
    data.setup("fit")
    return data


def texts_of(data, split):
    """(what is before the answer, the answer) of each row, by the tokens."""
    tokenizer, rows = tokenizer_from_identity(data.identity()), data._of_split(split)
    found = []
    for i in range(len(rows)):
        tokens, is_answer, _ = rows[i]
        assert tokens[-1] == tokenizer.end
        assert is_answer.tolist() == sorted(is_answer.tolist()), "the answer is the end of the row"
        found.append((tokenizer.decode(tokens[~is_answer]), tokenizer.decode(tokens[is_answer])))
    return found


# ---------------------------------------------------------------------- what is read


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
@pytest.mark.parametrize("tokenizer", ["byte", "bpe"])
def test_every_pair_is_in_one_split_source_separator_and_target(tmp_path, suffix, tokenizer):
    data = ready(write(tmp_path / f"p{suffix}"), tokenizer=tokenizer, vocab_size=300, separator=" -> ")
    found = {split: texts_of(data, split) for split in ("train", "val", "test")}
    assert {split: len(pairs) for split, pairs in found.items()} == {"train": 36, "val": 2, "test": 2}
    assert sorted(pair for pairs in found.values() for pair in pairs) == sorted((f"{a} -> ", b) for a, b in ROWS)


def test_equal_sources_are_in_one_split_whatever_the_order(tmp_path):
    rows = [(f"source {i % 10}", f"target {i}") for i in range(60)]
    first = None
    for order in (rows, rows[::-1]):
        data = ready(write(tmp_path / "p.csv", order), val_fraction=0.2, test_fraction=0.2)
        found = {split: {a for a, _ in texts_of(data, split)} for split in ("train", "val", "test")}
        assert [len(sources) for sources in found.values()] == [6, 2, 2]
        assert len(set().union(*found.values())) == 10
        first = first or found
        assert found == first
    other = ready(write(tmp_path / "p.csv", rows), val_fraction=0.2, test_fraction=0.2, split_seed=1)
    assert {a for a, _ in texts_of(other, "test")} != first["test"]


def test_columns_may_have_other_names(tmp_path):
    (tmp_path / "p.tsv").write_text("id\tq\ta\n" + "".join(f"{i}\t{a}\t{b}\n" for i, (a, b) in enumerate(ROWS)))
    data = ready(tmp_path / "p.tsv", source_field="q", target_field="a")
    assert len(data._of_split("train")) == 36


def test_targets_are_the_target_and_its_end_alone(tmp_path):
    data = ready(write(tmp_path / "p.csv", [("ab", "c"), ("abcd", "efg"), ("x", "y")]), batch_size=3)
    for split, loader in (("val", data.val_dataloader()), ("test", data.test_dataloader())):
        ((batch),) = list(loader)
        ((prompt, target),) = texts_of(data, split)
        n, m = len(prompt), len(target) + 1
        assert batch["targets"].tolist() == [[NO_TARGET] * (n - 1) + [*target.encode(), 256]]
        assert batch["inputs"].shape == (1, n + m - 1)
    assert "padding_mask" not in batch
    assert batch["generate"].tolist() == [True]
    padded = next(iter(ready(write(tmp_path / "p.csv"), val_fraction=0.3).val_dataloader()))
    assert bool((padded["targets"][~padded["padding_mask"]] == NO_TARGET).all())


def test_identity_is_that_of_text_with_the_same_tokens(tmp_path, corpus, trained):
    data = ready(write(tmp_path / "p.csv"), tokenizer=str(trained))
    text = TextDataModule(str(corpus), tokenizer=str(trained), window=16)
    text.prepare_data()
    text.setup("fit")
    a, b = ({k: v for k, v in made.identity().items() if k != "source"} for made in (data, text))
    assert a == b
    assert data.identity()["source"]["pairs"] == 40
    assert json.loads(json.dumps(data.identity())) == data.identity()


def test_a_tokenizer_is_learned_from_training_pairs_alone_and_kept(tmp_path, monkeypatch):
    import datamodules.pairs as module

    seen = []
    original = module.train_bpe
    monkeypatch.setattr(module, "train_bpe", lambda texts, n: original(seen.append(list(texts)) or seen[-1], n))
    options = {"tokenizer": "bpe", "vocab_size": 280, "cache_dir": str(tmp_path / "cache")}
    data = ready(write(tmp_path / "p.csv"), **options)
    again = ready(tmp_path / "p.csv", **options)
    assert len(seen) == 1
    assert data.digest == again.digest
    held = {text for split in ("val", "test") for text, _ in texts_of(data, split)}
    assert len(seen[0]) == 72
    assert not held & set(seen[0])


# ---------------------------------------------------------------------- the embedded pairs


def test_signatures_of_the_standard_library_are_functions_that_are_there():
    source = make_source(PAIRS, "stdlib_signatures")
    pairs = source.read().pairs
    assert len(pairs) > 3000
    assert len({line for line, _ in pairs}) == len(pairs)
    for line, signature in pairs[::50]:
        assert line == line.strip()
        (function,) = ast.parse(f"{signature} pass").body
        assert isinstance(function, ast.FunctionDef)
    import textwrap

    known = dict(pairs)
    assert known[textwrap.dedent.__doc__.splitlines()[0]] == "def dedent(text):"
    assert max(len(text) for pair in pairs for text in pair) <= 100


# ---------------------------------------------------------------------- what is refused


def bad(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    return tmp_path / name


@pytest.mark.parametrize(
    ("name", "content", "options", "message"),
    [
        ("a.csv", b"", {}, r"data\.path: .*a\.csv is empty"),
        ("a.csv", b"source,target\n", {}, r"a\.csv is empty; give rows"),
        (
            "a.csv",
            b"source,goal\na,b\n",
            {},
            r"data\.target_field: got 'target', but .* the columns 'source', 'goal'",
        ),
        ("a.csv", b"source,target\na,b\nc,\n", {}, r"has no text in 'target' of row 2; write it there, or drop"),
        ("a.csv", b"source,target\na,b\n\xff,d\n", {}, r"no UTF-8, the first at offset 18"),
        ("a.csv", b"source,target\na,b\nc\n", {}, r"line 3 has 1 cells, but the header has 2"),
        ("a.csv", b"source,target\na,b\na,c\nd,e\n", {}, r"pairs of 2 different sources; three splits need 3"),
        (
            "a.csv",
            b"source,target\na,b\n",
            {"target_field": "source"},
            r"target_field: got 'source', .* name another",
        ),
        ("a.jsonl", b'{"source": "a"}\n', {}, r"data\.target_field: got 'target', but .* line 1 has source; name"),
        (
            "a.jsonl",
            b'{"source": "a", "target": NaN}\n',
            {},
            r"target_field: .* line 1: 'target' is a float; must",
        ),
        ("a.jsonl", b'{"source": null, "target": "b"}\n', {}, r"has no text in 'source' of row 1"),
        ("a.jsonl", b'{"source": "a"\n', {}, r"line 1 is no JSON"),
        ("a.txt", b"a\tb\n", {}, r"data\.path: got .*a\.txt; pairs are read from \.jsonl"),
    ],
)
def test_bad_pairs_are_refused_in_one_line_that_says_where(tmp_path, name, content, options, message):
    path = bad(tmp_path, name, content)
    with pytest.raises(ZooError, match=message) as raised:
        ready(path, **options)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 3}, r"data\.window: got 3; must be at least 4"),
        ({"batch_size": 0}, r"data\.batch_size: got 0"),
        ({"val_fraction": 0.5}, r"data\.val_fraction: got 0.5"),
        ({"n_generated": -1}, r"data\.n_generated: got -1; must be at least 0"),
        ({"separator": ""}, r"data\.separator: got an empty text"),
        ({"too_long": "drop"}, r"data\.too_long: got 'drop'; must be refuse or cut"),
        ({"tokenizer": "words"}, r"data\.tokenizer: got 'words'; give byte, bpe or"),
        ({"vocab_size": 5}, r"data\.vocab_size: got 5"),
        ({"path": ""}, r"data\.path: got an empty text"),
        ({"path": "x.csv", "source_options": {"a": 1}}, r"data\.source_options: .* with a file of yours"),
        ({"path": "x.csv", "source": "stdlib_signatures"}, r"data\.path: got 'x\.csv' with source stdlib_signatures"),
        ({"source": "stdlib_signature"}, r"do you mean stdlib_signatures\?"),
        ({"source_options": {"longest": 3}}, r"data\.source_options\.longest: got 3"),
    ],
)
def test_arguments_out_of_range_are_refused_by_name(options, message):
    with pytest.raises(ZooError, match=message):
        TextPairDataModule(**options)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ZooError, match=r"data\.path: .*nowhere\.csv is no file"):
        ready(tmp_path / "nowhere.csv")


def test_pairs_too_long_are_refused_or_cut_with_a_word(tmp_path, capsys, caplog):
    rows = [*ROWS, ("s" * 30, "t" * 5), ("u" * 3, "w" * 30)]
    path = write(tmp_path / "p.csv", rows)
    with pytest.raises(ZooError, match=r"data\.window: got 20, but 2 of 42 pairs have more tokens, the longest 37"):
        ready(path, window=20)
    with caplog.at_level("INFO"):
        data = ready(path, window=20, too_long="cut", separator="\n")
    assert "data.too_long: 2 of 42 pairs have more tokens" in caplog.text + capsys.readouterr().err
    tokenizer = tokenizer_from_identity(data.identity())
    decoded = {tokenizer.decode(tokens): is_answer for tokens, is_answer in zip(*data._rows, strict=True)}
    assert decoded["s" * 13 + "\n" + "t" * 5].sum() == 6, "the source is cut, the target and its end are whole"
    assert decoded["u" + "\n" + "w" * 18].sum() == 18, "one token of the source is left, and the target has no end"
    assert max(len(tokens) for tokens in data._rows[0]) == 20
