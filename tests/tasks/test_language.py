"""The language task: its figures, its optimizer, and checkpoints that load whole or not at all."""

import math

import lightning.pytorch as pl
import pytest
import torch

from datamodules import TextDataModule
from zoo.checkpoint.identity import digest, read_checkpoint
from zoo.errors import CheckpointMismatchError, ZooError
from zoo.tasks import LanguageModelTask
from zoo.tasks.language import BitsPerByte

TINY = {"d_model": 16, "n_heads": 2, "d_ff": 32, "n_layers": 2, "mlp_hidden": [8], "dropout": 0.0}
SILENT = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}


@pytest.fixture
def data(corpus):
    return TextDataModule(path=str(corpus), vocab_size=300, window=16, batch_size=4)


@pytest.fixture
def task(trained):
    return LanguageModelTask.load_from_checkpoint(trained).eval()


# ---------------------------------------------------------------------- figures


def test_bits_per_byte_is_the_cross_entropy_of_all_tokens_over_their_bytes(task, data):
    data.prepare_data()
    data.setup("test")
    nats, n_bytes, tokens = 0.0, 0, 0
    for batch in data.test_dataloader():
        with torch.no_grad():
            logits = task(batch[:, :-1])
        for row, targets in zip(logits, batch[:, 1:], strict=True):
            for scores, target in zip(row, targets, strict=True):
                nats -= float(scores.double().log_softmax(-1)[target])
                n_bytes += len(task.tokenizer.token_bytes[target])
                tokens += 1
    scores = pl.Trainer(**SILENT).test(task, data, verbose=False)[0]
    # float32 cross-entropy of some thousand tokens against float64
    assert scores["test/bits_per_byte"] == pytest.approx(nats / n_bytes / math.log(2), rel=1e-5)
    assert scores["test/perplexity"] == pytest.approx(math.exp(nats / tokens), rel=1e-4)
    assert scores["test/loss"] == pytest.approx(nats / tokens, rel=1e-5)


def test_a_uniform_byte_model_has_eight_bits_per_byte():
    metric = BitsPerByte()
    for n in (10, 30):
        metric.update(n * torch.tensor(256.0).log(), torch.tensor(n))
    assert float(metric.compute()) == pytest.approx(8.0)


def test_bits_per_byte_of_a_long_text_does_not_drift():
    metric = BitsPerByte()
    nats, n_bytes = torch.tensor(123.457), torch.tensor(100)
    metric.update(nats * 1_000_000, n_bytes * 1_000_000)
    for _ in range(20_000):
        metric.update(nats, n_bytes)
    # one float32 sum is off by 5e-4 here: each addend loses its last bits against the total
    assert float(metric.compute()) == pytest.approx(1.23457 / math.log(2), rel=1e-6)


def test_kl_enters_the_loss_of_bayesian_with_its_weight(data):
    def loss(kl_weight):
        pl.seed_everything(0)
        task = LanguageModelTask(**TINY, off_diag_mode="bayesian", kl_weight=kl_weight)
        trainer = pl.Trainer(**SILENT, max_steps=1, limit_val_batches=0)
        trainer.fit(task, data)
        return float(trainer.callback_metrics["train/loss"]), float(trainer.callback_metrics["train/kl"]), task

    plain_loss, kl, weak = loss(0.0)
    same_loss, same_kl, strong = loss(10.0)
    assert plain_loss == same_loss, "train/loss is the cross-entropy alone"
    assert kl == same_kl > 0
    mu = "network.decoder.shared_mlp.alpha_mu"
    assert not torch.equal(weak.state_dict()[mu], strong.state_dict()[mu])


def test_training_lowers_the_loss(data):
    pl.seed_everything(0)
    task = LanguageModelTask(**TINY, lr=1e-2)
    trainer = pl.Trainer(**SILENT, max_steps=60, val_check_interval=60, limit_val_batches=2)
    trainer.fit(task, data)
    assert trainer.callback_metrics["val/loss"] < math.log(300) - 1.5


# ---------------------------------------------------------------------- the optimizer


def configured(data, max_steps=100, **options):
    task = LanguageModelTask(**TINY, **options)
    trainer = pl.Trainer(**SILENT, max_steps=max_steps)
    trainer.strategy.connect(task)
    trainer.fit_loop.epoch_loop.max_steps = max_steps
    data.prepare_data()
    data.setup("fit")
    task.identity = data.identity()
    task.trainer = trainer
    task.configure_model()
    return task, task.configure_optimizers()


def test_decay_is_on_matrices_only(data, monkeypatch):
    monkeypatch.setattr(pl.Trainer, "estimated_stepping_batches", property(lambda self: self.max_steps))
    task, configuration = configured(data, weight_decay=0.3)
    decayed, spared = configuration["optimizer"].param_groups
    assert decayed["weight_decay"] == 0.3
    assert spared["weight_decay"] == 0.0
    assert all(p.ndim >= 2 for p in decayed["params"])
    assert all(p.ndim < 2 for p in spared["params"])
    assert len(decayed["params"]) + len(spared["params"]) == len(list(task.parameters()))


def test_learning_rate_rises_linearly_and_falls_along_a_cosine_over_the_step_budget(data, monkeypatch):
    monkeypatch.setattr(pl.Trainer, "estimated_stepping_batches", property(lambda self: self.max_steps))
    task, configuration = configured(data, max_steps=100, lr=2.0, warmup=0.1, min_lr=0.1)
    task.on_train_start()  # which learns how long the run is
    factor = configuration["lr_scheduler"]["scheduler"].lr_lambdas[0]
    assert [factor(step) for step in range(10)] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert factor(10) == pytest.approx(1.0)
    assert factor(55) == pytest.approx(0.1 + 0.9 / 2)
    assert factor(100) == factor(1000) == pytest.approx(0.1)
    assert configuration["lr_scheduler"]["interval"] == "step"


def test_a_run_without_an_end_keeps_its_learning_rate(data, monkeypatch):
    monkeypatch.setattr(pl.Trainer, "estimated_stepping_batches", property(lambda self: math.inf))
    task, configuration = configured(data)
    task.on_train_start()
    factor = configuration["lr_scheduler"]["scheduler"].lr_lambdas[0]
    assert factor(10**6) == 1.0


# ---------------------------------------------------------------------- checkpoints


def test_checkpoint_alone_rebuilds_model_and_tokenizer(trained, task):
    assert task.tokenizer.vocab_size == 300
    saved = torch.load(trained, weights_only=True)["state_dict"]
    assert all(torch.equal(saved[name], value) for name, value in task.state_dict().items())
    assert task.generate(["def "], max_new_tokens=5, temperature=0)[0]


def test_saving_again_keeps_identity_and_settings(trained, task, data, tmp_path):
    trainer = pl.Trainer(**SILENT)
    trainer.test(task, data, verbose=False)
    trainer.save_checkpoint(tmp_path / "again.ckpt")
    first, again = read_checkpoint(trained)["zoo"], read_checkpoint(tmp_path / "again.ckpt")["zoo"]
    assert again["identity"] == first["identity"]
    assert again["settings"] == first["settings"]
    assert again["digest"] == digest(first["identity"])


def altered(trained, tmp_path, change):
    checkpoint = torch.load(trained, weights_only=True)
    change(checkpoint)
    checkpoint["zoo"]["digest"] = digest(checkpoint["zoo"]["identity"])
    torch.save(checkpoint, tmp_path / "altered.ckpt")
    return tmp_path / "altered.ckpt"


def swap_tokens(checkpoint):
    tokens = checkpoint["zoo"]["identity"]["tokens"]
    tokens[290], tokens[291] = tokens[291], tokens[290]


def other_kind(checkpoint):
    checkpoint["zoo"]["identity"] |= {"tokenizer": "byte", "tokens": [str(i) for i in range(300)]}


def other_task(checkpoint):
    checkpoint["zoo"]["task"] = "zoo.tasks.vision.ImageClassificationTask"


def fewer_heads(checkpoint):
    checkpoint["zoo"]["settings"]["n_heads"] = 1


def tensor_gone(checkpoint):
    del checkpoint["state_dict"]["network.decoder.layers.1.norm1.weight"]


def last_tensor_of_another_shape(checkpoint):
    checkpoint["state_dict"]["network.head.weight"] = torch.zeros(301, 16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (swap_tokens, "tokens: first difference at 290"),
        (other_kind, "tokenizer: 'byte' in the checkpoint, 'bpe' here"),
        (other_task, r"of zoo\.tasks\.vision\.ImageClassificationTask"),
        (fewer_heads, "n_heads: 1 in the checkpoint, 2 here"),
        (tensor_gone, r"layers\.1\.norm1\.weight is missing"),
        (last_tensor_of_another_shape, r"head\.weight is \(301, 16\), not \(300, 16\)"),
    ],
)
def test_wrong_checkpoint_is_refused_before_any_tensor_is_copied(change, message, trained, data, tmp_path):
    pl.seed_everything(1)
    task = LanguageModelTask(**TINY)
    trainer = pl.Trainer(**SILENT, max_steps=0)
    trainer.fit(task, data)
    before = {name: value.clone() for name, value in task.state_dict().items()}
    with pytest.raises(CheckpointMismatchError, match=message):
        pl.Trainer(**SILENT, max_steps=6).fit(task, data, ckpt_path=altered(trained, tmp_path, change))
    assert all(torch.equal(before[name], value) for name, value in task.state_dict().items())


def test_text_from_elsewhere_with_the_same_vocabulary_is_a_warning_not_a_refusal(trained, tmp_path):
    (tmp_path / "other.txt").write_text("other words\n" * 300)
    data = TextDataModule(path=str(tmp_path / "other.txt"), tokenizer=str(trained), window=16, batch_size=4)
    task = LanguageModelTask(**TINY)
    with pytest.warns(UserWarning, match=r"was trained on name corpus.*; this is name other.txt"):
        pl.Trainer(**SILENT).test(task, data, ckpt_path=trained, verbose=False)


# ---------------------------------------------------------------------- text


def test_generation_continues_each_prompt_as_if_it_were_alone(task):
    prompts = ["def alpha", "", "    return x"]
    together = task.generate(prompts, max_new_tokens=15, temperature=0)
    assert together == [task.generate([prompt], max_new_tokens=15, temperature=0)[0] for prompt in prompts]


def test_stop_text_ends_the_continuation_before_it(task):
    whole = task.generate(["def "], max_new_tokens=40, temperature=0)[0]
    stop = whole[5:8]
    assert task.generate(["def "], max_new_tokens=40, temperature=0, stop=[stop])[0] == whole[: whole.find(stop)]


def test_the_end_of_a_text_ends_the_continuation(task):
    with torch.no_grad():
        task.network.head.weight.zero_()
        task.network.head.weight[task.tokenizer.end] = 1.0
        task.network.decoder.layers[-1].norm2.bias.fill_(5.0)
    assert task.generate(["def "], max_new_tokens=40, temperature=0) == [""]


def test_streamed_pieces_add_up_to_the_text(task):
    pieces = list(task.stream(["a", "b"], max_new_tokens=10, seed=3))
    texts = ["".join(piece for row, piece in pieces if row == i) for i in range(2)]
    assert texts == task.generate(["a", "b"], max_new_tokens=10, seed=3)


def test_unknown_settings_and_a_task_without_network_are_refused(task):
    with pytest.raises(ZooError, match=r"generate: got beams; it knows max_new_tokens"):
        task.generate(["a"], beams=3)
    with pytest.raises(ZooError, match="no network yet"):
        LanguageModelTask(**TINY).generate(["a"])


def test_use_multihead_M_is_accepted_and_changes_nothing(data):
    def weights(flag):
        pl.seed_everything(0)
        task = LanguageModelTask(**TINY, use_multihead_M=flag)
        pl.Trainer(**SILENT, max_steps=2, limit_val_batches=0).fit(task, data)
        return task.state_dict()

    on, off = weights(True), weights(False)
    assert on.keys() == off.keys()
    assert all(torch.equal(on[name], off[name]) for name in on)


def test_this_zoos_additions_are_the_same_as_arguments_and_as_options():
    added = {"identity_start": True, "generator_lr_factor": 0.1, "key_projection": True}
    flat = LanguageModelTask(**TINY, **added)
    named = LanguageModelTask(**TINY, attention="damcha", attention_options=added)
    plain = LanguageModelTask(**TINY)
    assert flat.network_of(flat.settings) == named.network_of(named.settings)
    kept, theirs = flat.kept_of(flat.settings), named.kept_of(named.settings)
    assert kept["generator_lr_factor"] == theirs["generator_lr_factor"] == 0.1
    # of the three, one makes another network, one another run, and one is over once a run has begun
    other = {
        name for name, value in flat.kept_of(flat.settings).items() if value != plain.kept_of(plain.settings)[name]
    }
    assert other == {"generator_lr_factor", "key_projection"}
    old = {name: value for name, value in plain.settings.items() if name not in added}  # from before there were any
    assert plain.network_of(old) == plain.network_of(plain.settings) != flat.network_of(flat.settings)
    assert plain.kept_of(old) == plain.kept_of(plain.settings)
