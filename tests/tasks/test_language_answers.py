"""Loss and figures of batches in which only some targets count."""

import math

import lightning.pytorch as pl
import numpy as np
import pytest
import torch

from datamodules import SequenceDataModule, TextPairDataModule
from zoo.attention.base import ATTENTIONS
from zoo.errors import CheckpointMismatchError, ZooError
from zoo.tasks import LanguageModelTask
from zoo.tokenizer import NO_TARGET

TINY = {"d_model": 16, "n_heads": 2, "d_ff": 32, "n_layers": 2, "dropout": 0.0, "attention": "standard"}
SILENT = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
SIZES = {"n_train": 200, "n_val": 30, "n_test": 50, "batch_size": 8}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Pairs of several lengths, of whose targets four in five can be told from the source."""
    targets = ["z" if i % 5 == 0 else "xy"[i % 2] for i in range(200)]
    rows = [f'"{"ab"[i % 2] * (1 + i % 7)} {i % 11}","{targets[i]}"\n' for i in range(200)]
    path = tmp_path_factory.mktemp("pairs") / "p.csv"
    path.write_text("source,target\n" + "".join(rows))
    data = TextPairDataModule(str(path), tokenizer="byte", window=24, batch_size=8, val_fraction=0.2, test_fraction=0.2)
    data.prepare_data()
    data.setup("fit")
    return data


@pytest.fixture(scope="module")
def recall():
    data = SequenceDataModule("associative_recall", {"n_pairs": 3, "n_queries": 2}, **SIZES)
    data.setup("fit")
    return data


def built(data, **settings):
    pl.seed_everything(0)
    task = LanguageModelTask(**{**TINY, **settings})
    task.build_and_freeze(data.identity())
    return task.eval()


def loss_of(task, batch):
    task.log = lambda *args, **kwargs: None
    return task.training_step(batch, 0)


# ---------------------------------------------------------------------- the loss


def test_loss_is_the_mean_over_the_targets_that_count(pairs):
    task, batch = built(pairs), next(iter(pairs.train_dataloader()))
    log_p = task(batch["inputs"], batch["padding_mask"]).double().log_softmax(-1)
    found = [
        -float(log_p[i, t, target].detach())
        for i, row in enumerate(batch["targets"].tolist())
        for t, target in enumerate(row)
        if target != NO_TARGET
    ]
    assert len(found) == 16, "a letter and an end a pair"
    assert float(loss_of(task, batch)) == pytest.approx(np.mean(found), rel=1e-5)


def test_what_follows_the_answers_and_padding_change_nothing_and_targets_that_do_not_count_have_no_gradient(recall):
    task, batch = built(recall), next(iter(recall.train_dataloader()))
    whole = torch.cat([batch["inputs"], batch["targets"][:, -1:]], dim=1)
    ignored = [t for t in range(batch["targets"].shape[1]) if bool((batch["targets"][:, t] == NO_TARGET).all())]
    logits = task(batch["inputs"])
    logits.retain_grad()
    task.forward = lambda *_: logits
    loss = loss_of(task, batch)
    loss.backward()
    assert ignored
    assert not logits.grad[:, ignored].any()
    counting_all = float(loss_of(task, whole))
    changed = whole.clone()
    changed[:, ignored[0] + 1] = (changed[:, ignored[0] + 1] + 1) % 32  # a target that no answer is
    assert float(loss_of(task, changed)) != counting_all, "where all targets count it counts"
    assert float(loss_of(task, {**batch, "inputs": changed[:, :-1]})) == float(loss), "and else it doesn't"


@pytest.mark.parametrize("name", ATTENTIONS.names())
def test_padding_on_the_right_changes_no_answer_of_any_attention(name, pairs):
    task, batch = built(pairs, attention=name), next(iter(pairs.train_dataloader()))
    alone = torch.cat(
        [
            task(batch["inputs"][i : i + 1, : int(real.sum())])[0][batch["targets"][i, : int(real.sum())] != NO_TARGET]
            for i, real in enumerate(batch["padding_mask"])
        ]
    )
    together = task(batch["inputs"], batch["padding_mask"])[batch["targets"] != NO_TARGET]
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-4)  # float32 in another order


# ---------------------------------------------------------------------- figures


def rows_by_hand(task, data, split):
    """Of every row: nats of its answer's tokens, and whether each was the likeliest."""
    found, rows = [], data._of_split(split)
    for i in range(len(rows)):
        tokens, is_answer = torch.from_numpy(rows[i].tokens).long(), rows[i].is_answer
        with torch.no_grad():
            log_p = task(tokens[None, :-1])[0].double().log_softmax(-1)
        at = np.flatnonzero(is_answer[1:])
        found.append([(-float(log_p[t, tokens[t + 1]]), int(log_p[t].argmax()) == int(tokens[t + 1])) for t in at])
    return found


def test_figures_of_pairs_are_those_of_every_row_by_hand(pairs):
    pl.seed_everything(0)
    task = LanguageModelTask(**TINY, lr=1e-2)
    pl.Trainer(**SILENT, max_steps=40, limit_val_batches=0).fit(task, pairs)
    scores = pl.Trainer(**SILENT).test(task, pairs, verbose=False)[0]
    rows = rows_by_hand(task.eval(), pairs, "test")
    nats = np.array([sum(n for n, _ in row) for row in rows])
    hits = [[hit for _, hit in row] for row in rows]
    assert 0 < sum(map(all, hits)) < len(hits), "some right, some wrong"
    # float32 against float64
    assert scores["test/loss"] == pytest.approx(nats.sum() / sum(map(len, rows)), rel=1e-4)
    assert scores["test/bits_per_byte"] == pytest.approx(nats.sum() / len(rows) / math.log(2), rel=1e-4)
    assert scores["test/accuracy"] == pytest.approx(np.mean(np.concatenate(hits)), rel=1e-6)
    assert scores["test/exact_match"] == pytest.approx(np.mean([all(row) for row in hits]), rel=1e-6)
    assert scores["test/nll"] == pytest.approx(nats.mean(), rel=1e-4)
    for name, q in (("q1", 0.25), ("median", 0.5), ("q3", 0.75)):
        assert scores[f"test/nll_{name}"] == pytest.approx(np.quantile(nats, q), rel=1e-4)
    assert scores["test/generated_match"] == scores["test/exact_match"], "greedy generation of all pairs, with a cache"


def test_answers_are_generated_for_as_many_pairs_as_asked_for_and_with_learned_positions(pairs, monkeypatch):
    asked, original = [], LanguageModelTask._greedy

    def count(self, prompts, n):
        asked.append(len(prompts))
        return original(self, prompts, n)

    monkeypatch.setattr(LanguageModelTask, "_greedy", count)
    monkeypatch.setitem(pairs.hparams, "n_generated", 11)
    task = built(pairs, positions="learned", max_len=24)
    trainer = pl.Trainer(**SILENT)
    assert "test/generated_match" in trainer.test(task, pairs, verbose=False)[0]
    assert asked == [8, 3]
    monkeypatch.setitem(pairs.hparams, "n_generated", 0)
    assert "test/generated_match" not in trainer.test(task, pairs, verbose=False)[0]
    prompts = [[1] * 20, [1] * 2]
    assert [len(row) for row in original(task, prompts, 10)] == [4, 10]


def test_symbols_have_accuracy_and_no_bits_per_byte(recall):
    task = built(recall)
    scores = pl.Trainer(**SILENT).test(task, recall, verbose=False)[0]
    assert set(scores) == {"test/loss", "test/accuracy", "test/exact_match"}
    rows = rows_by_hand(task, recall, "test")
    assert scores["test/loss"] == pytest.approx(np.mean([n for row in rows for n, _ in row]), rel=1e-4)
    assert scores["test/accuracy"] == pytest.approx(np.mean([hit for row in rows for _, hit in row]), rel=1e-6)


def test_a_rule_is_learned_and_a_longer_sequence_is_tested_with_what_a_shorter_one_taught():
    pl.seed_everything(0)
    options = {"length": 6, "n_symbols": 3, "n_rare": 1}
    data = SequenceDataModule("induction", options, **{**SIZES, "n_train": 500, "batch_size": 32, "n_test": 20})
    task = LanguageModelTask(**{**TINY, "d_model": 32}, lr=1e-2)
    trainer = pl.Trainer(**SILENT, max_steps=150, limit_val_batches=0)
    trainer.fit(task, data)
    longer = SequenceDataModule("induction", {**options, "length": 7}, **SIZES)
    assert trainer.test(task, data, verbose=False)[0]["test/accuracy"] > 0.6  # chance is 1/3
    assert "test/accuracy" in trainer.test(task, longer, verbose=False)[0]
    other = SequenceDataModule("induction", {**options, "n_symbols": 4}, **SIZES)
    with pytest.raises(CheckpointMismatchError, match=r"options\.n_symbols: 3 in the checkpoint, 4 here"):
        trainer.test(task, other, verbose=False)


# ---------------------------------------------------------------------- prompts of symbols


def test_symbols_are_continued_and_what_is_none_is_refused(recall):
    task = built(recall)
    (text,) = task.generate(["k3 v1 k5 v2 k3"], max_new_tokens=2, temperature=0)
    assert len(text.split()) == 2
    assert set(text.split()) <= set(recall.identity()["tokens"])
    with pytest.raises(ZooError, match="text: got 'hello', which is no symbol"):
        task.generate(["hello"])
    with pytest.raises(ZooError, match="prompt: got an empty one, but this model reads symbols; give some, such as k0"):
        task.generate([""])


def test_weights_move_to_other_symbols_by_name(recall, tmp_path):
    from zoo.tasks.language_carry import adapt_text

    more = SequenceDataModule("associative_recall", {"n_keys": 20}, **SIZES)
    more.setup("fit")
    old, new = built(recall), built(more)
    filled, _ = adapt_text(new.network, old.network.state_dict(), old.tokenizer, new.tokenizer)
    there, here = (task.tokenizer.tokens.index("v7") for task in (old, new))
    assert torch.equal(filled["embedding.weight"][here], old.network.embedding.weight[there])
    fresh = new.tokenizer.tokens.index("k18")
    assert torch.equal(filled["embedding.weight"][fresh], new.network.embedding.weight[fresh])
