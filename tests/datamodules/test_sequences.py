"""Sequences with known answers: that they are right, told by other code; and that nothing but the settings decides."""

import itertools
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from datamodules import SequenceDataModule
from datamodules.answers import AnswerRow, answer_batch
from datamodules.sources import (
    SEQUENCES,
    SequenceData,
    SequenceSource,
    list_sequences,
    make_source,
    register_sequences,
)
from zoo.errors import ZooError
from zoo.tokenizer import NO_TARGET, SymbolTokenizer, tokenizer_from_identity

DOCS = Path(__file__).parents[2] / "docs" / "data.md"
SMALL = {"n_train": 300, "n_val": 40, "n_test": 60, "batch_size": 16}


def ready(source, options=None, **settings):
    data = SequenceDataModule(source, options, **{**SMALL, **settings})
    data.setup("fit")
    return data


def rows_of(source, options, n=200):
    """Sequences as lists of symbols, with the places of their answers."""
    made = make_source(SEQUENCES, source, None, options, also=None)
    tokens, is_answer = made.draw(n, np.random.RandomState(1))
    names = np.array(made.symbols())
    return [(names[row].tolist(), np.flatnonzero(at).tolist()) for row, at in zip(tokens, is_answer, strict=True)]


def split_rows(data, split):
    data = data._of_split(split)
    return [data[i].tokens.tolist() for i in range(len(data))]


# ---------------------------------------------------------------------- answers are right


@pytest.mark.parametrize(("n_pairs", "n_queries", "n_keys", "n_values"), [(1, 1, 1, 2), (5, 2, 7, 3), (6, 6, 6, 9)])
def test_recall_answers_a_key_by_the_value_beside_it(n_pairs, n_queries, n_keys, n_values):
    options = {"n_pairs": n_pairs, "n_queries": n_queries, "n_keys": n_keys, "n_values": n_values}
    asked = Counter()
    for row, answers in rows_of("associative_recall", options):
        assert len(row) == 2 * (n_pairs + n_queries)
        known = dict(zip(row[: 2 * n_pairs : 2], row[1 : 2 * n_pairs : 2], strict=True))
        assert len(known) == n_pairs
        assert answers == list(range(2 * n_pairs + 1, len(row), 2))
        queries = [row[i - 1] for i in answers]
        assert len(set(queries)) == n_queries
        assert [row[i] for i in answers] == [known[query] for query in queries]
        asked.update(list(known).index(query) for query in queries)
    assert set(asked) == set(range(n_pairs)), "every place is asked for"


@pytest.mark.parametrize(("length", "n_marked", "n_symbols", "n_noise"), [(1, 1, 2, 1), (9, 4, 3, 2), (5, 5, 2, 1)])
def test_copying_answers_with_what_is_no_noise_in_order(length, n_marked, n_symbols, n_noise):
    options = {"length": length, "n_marked": n_marked, "n_symbols": n_symbols, "n_noise": n_noise}
    for row, answers in rows_of("selective_copying", options):
        assert row[length] == ">"
        assert [symbol for symbol in row[:length] if symbol.startswith("a")] == row[length + 1 :]
        assert answers == list(range(length + 1, length + 1 + n_marked))


@pytest.mark.parametrize(("length", "n_symbols", "n_rare"), [(2, 2, 1), (9, 3, 4), (30, 5, 3)])
def test_induction_answers_with_what_followed_the_rare_symbol(length, n_symbols, n_rare):
    places = Counter()
    for row, answers in rows_of("induction", {"length": length, "n_symbols": n_symbols, "n_rare": n_rare}, 600):
        shown = row[:length]
        rare = [symbol for symbol in shown if symbol.startswith("r")]
        assert sorted(rare) == sorted({f"r{i}" for i in range(n_rare)}), "each once"
        assert answers == [length + 1]
        place = shown.index(row[length])
        assert row[length + 1] == shown[place + 1]
        assert row[length + 1].startswith("a")
        places[place] += 1
    assert set(places) <= set(range(length - 1))
    assert len(places) > (length - 1) * 0.8, "it may stand anywhere but at the end"


def labels_by_metric(points, first, relevant):
    """The slow definition: the nearest of the prototypes, which come first, of equally near ones the first."""
    found = []
    for x in points:
        best, label = None, None
        for p, name in first:
            distance = sum((int(x[f]) - int(p[f])) ** 2 for f in relevant)
            if best is None or distance < best:
                best, label = distance, name
        found.append(label)
    return found


@pytest.mark.parametrize(
    ("F", "L", "r", "C", "E", "Q"), [(3, 2, 1, 2, 4, 2), (4, 3, 2, 3, 9, 3), (2, 4, 2, 5, 5, 1), (5, 2, 3, 2, 8, 1)]
)
def test_a_point_has_the_label_of_the_prototype_nearest_by_the_metric_of_its_sequence(F, L, r, C, E, Q):
    options = {"n_features": F, "n_levels": L, "n_relevant": r, "n_classes": C, "n_examples": E, "n_queries": Q}
    source = make_source(SEQUENCES, "in_context_metric", None, options)
    tokens, is_answer = source.draw(120, np.random.RandomState(3))
    names = source.symbols()
    metrics = list(itertools.combinations(range(F), r))
    used, bayes, fixed = Counter(), [], []
    for row, at in zip(tokens, is_answer, strict=True):
        symbols = [names[i] for i in row]
        points, labels = symbols[::2], symbols[1::2]
        first = list(zip(points[:C], labels[:C], strict=True))
        assert len(set(points)) == len(points) == E + Q
        assert len(set(labels[:C])) == C
        assert np.flatnonzero(at).tolist() == list(range(2 * E + 1, 2 * (E + Q), 2))
        told = {relevant: labels_by_metric(points, first, relevant) for relevant in metrics}
        assert any(found == labels for found in told.values())
        used.update(relevant for relevant, found in told.items() if found == labels)
        everything = labels_by_metric(points, first, range(F))
        for i in range(E, E + Q):
            left = [found[i] for found in told.values() if found[:i] == labels[:i]]
            bayes.append(max(Counter(left).values()) / len(left))
            fixed.append(everything[i] == labels[i])
    assert set(used) == set(metrics)
    reference = source.reference(tokens, is_answer)
    assert reference["chance"] == 1 / C
    assert reference["bayes"] == pytest.approx(np.mean(bayes))
    assert reference["fixed_metric"] == pytest.approx(np.mean(fixed))


# ---------------------------------------------------------------------- splits, and what decides


@pytest.mark.parametrize("name", list_sequences())
def test_no_sequence_is_asked_in_two_splits_and_more_of_them_change_no_held_out_one(name):
    few, many = ready(name), ready(name, n_train=2500)
    held = [tuple(row) for split in ("val", "test") for row in split_rows(few, split)]
    assert held == [tuple(row) for split in ("val", "test") for row in split_rows(many, split)]
    train = [tuple(row) for row in split_rows(many, "train")]
    assert len({*train, *held}) == 2600
    assert split_rows(few, "train") == split_rows(many, "train")[:300]
    assert split_rows(few, "test") != split_rows(ready(name, seed=1), "test")
    assert few.identity()["source"]["sha256"] == ready(name).identity()["source"]["sha256"]


def test_batches_are_the_same_whatever_the_workers_and_new_every_epoch():
    epochs = []
    for workers in (0, 2):
        torch.manual_seed(workers)  # the model's numbers are no concern of the data's
        loader = ready("induction", num_workers=workers).train_dataloader()
        for epoch in (0, 1):
            loader.sampler.set_epoch(epoch)
            epochs.append([torch.cat([batch["inputs"], batch["targets"]], dim=1) for batch in loader])
    assert all(torch.equal(a, b) for a, b in zip(epochs[0], epochs[2], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(epochs[1], epochs[3], strict=True))
    assert not torch.equal(epochs[0][0], epochs[1][0])


def test_targets_are_the_answers_alone():
    data = ready("associative_recall", {"n_pairs": 3, "n_queries": 2})
    (row, *_), batch = split_rows(data, "val"), next(iter(data.val_dataloader()))
    assert batch["inputs"][0].tolist() == row[:-1]
    nothing = [NO_TARGET]
    assert batch["targets"][0].tolist() == [*nothing * 6, row[7], *nothing, row[9]]
    assert set(batch) == {"inputs", "targets"}


def test_rows_of_other_lengths_are_padded_on_the_right():
    rows = [AnswerRow(np.arange(1, 6), np.arange(5) > 2), AnswerRow(np.arange(1, 4), np.arange(3) > 1, None)]
    batch = answer_batch(rows)
    assert batch["inputs"].tolist() == [[1, 2, 3, 4], [1, 2, 0, 0]]
    assert batch["targets"].tolist() == [[-100, -100, 4, 5], [-100, 3, -100, -100]]
    assert batch["padding_mask"].tolist() == [[True] * 4, [True, True, False, False]]


def test_identity_is_the_vocabulary_and_the_rule_but_not_the_length():
    same = [{"n_pairs": 4, "n_queries": 1}, {"n_pairs": 8, "n_queries": 2}]
    identities = [ready("associative_recall", options).identity() for options in same]
    bare = [{name: value for name, value in identity.items() if name != "source"} for identity in identities]
    assert bare[0] == bare[1]
    assert ready("associative_recall", {"n_values": 17}).digest != ready("associative_recall").digest
    relevant = [{"n_relevant": n} for n in (2, 3)]  # the same symbols, another rule
    a, b = (ready("in_context_metric", options).identity() for options in relevant)
    assert a["tokens"] == b["tokens"]
    assert a["options"] != b["options"]


def test_symbols_are_tokens_with_blanks_between_them():
    tokenizer = tokenizer_from_identity(ready("induction").identity())
    assert isinstance(tokenizer, SymbolTokenizer)
    assert tokenizer.decode(tokenizer.encode("a3  r0\na1")) == "a3 r0 a1 "
    assert tokenizer.end is None
    with pytest.raises(ZooError, match=r"text: got 'a99', which is no symbol .*do you mean a9\? there are 'a0'"):
        tokenizer.encode("a1 a99")
    assert tokenizer.encode_bytes(b"a3 ") == tokenizer.encode("a3")
    assert tokenizer.encode_bytes(b"a99 ") == []


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("source", "options", "settings", "message"),
    [
        ("recall", None, {}, r"data\.source: got 'recall', .* do you mean associative_recall"),
        ("induction", {"lenght": 3}, {}, r"data\.source_options: got 'lenght', .* of induction; do you mean length"),
        ("induction", {"length": "long"}, {}, r"data\.source_options\.length: got 'long'; must be a whole number"),
        ("induction", {"n_rare": 40}, {}, r"data\.source_options\.n_rare: got 40; must lie between 1 and half"),
        ("associative_recall", {"n_pairs": 99}, {}, r"n_pairs: got 99; must lie between 1 and n_keys, 16"),
        ("associative_recall", {"n_queries": 0}, {}, r"n_queries: got 0"),
        ("selective_copying", {"n_marked": 99}, {}, r"n_marked: got 99; must lie between 1 and length, 32"),
        ("in_context_metric", {"n_features": 11}, {}, r"n_features: got 11 of 2 values; .* no more than 1024"),
        ("in_context_metric", {"n_relevant": 5}, {}, r"n_relevant: got 5"),
        ("in_context_metric", {"n_classes": 5}, {}, r"n_classes: got 5; must lie between 2 and 4"),
        ("in_context_metric", {"n_examples": 11}, {}, r"n_queries: got 6 beside 11 examples; .* of 16"),
        ("induction", None, {"n_val": 0}, r"data\.n_val: got 0; must be at least 1"),
        ("induction", None, {"seed": -1}, r"data\.seed: got -1"),
        ("induction", None, {"num_workers": -1}, r"data\.num_workers: got -1"),
        ("induction", {"length": 2, "n_rare": 1, "n_symbols": 2}, {}, r"data\.n_train: 400 sequences of induction in"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(source, options, settings, message):
    with pytest.raises(ZooError, match=message) as raised:
        ready(source, options, **settings)
    assert "\n" not in str(raised.value)


def test_a_source_of_ones_own_is_what_the_docs_show(monkeypatch):
    code = re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.S)[-1]
    SEQUENCES.names()
    monkeypatch.setattr(SEQUENCES, "_items", dict(SEQUENCES._items))
    exec(code, {"np": np, "SequenceSource": SequenceSource, "register_sequences": register_sequences})
    row, *_ = split_rows(ready("reversal"), "train")
    assert row[13:] == row[11::-1]


@pytest.mark.parametrize(
    ("symbols", "tokens", "is_answer", "message"),
    [
        (["a b"], [[0, 0]], [[False, True]], "without blanks"),
        (["a", "a"], [[0, 0]], [[False, True]], "different texts"),
        (["a"], [[0, 1]], [[False, True]], "tokens of no symbol"),
        (["a"], [[0, 0]], [[False, False]], "must have an answer"),
        (["a"], [[0, 0]], [[True, True]], "isn't its first"),
        (["a"], [[0, 0]], [[0, 1]], "must be"),
    ],
)
def test_a_source_whose_sequences_do_not_agree_is_refused(symbols, tokens, is_answer, message):
    with pytest.raises(ValueError, match=message):
        SequenceData(symbols, np.array(tokens), np.array(is_answer))
