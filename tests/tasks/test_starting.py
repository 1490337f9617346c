"""Runs that start from trained weights: what is refused, what is trained, adapters and what they load onto."""

from pathlib import Path

import lightning.pytorch as pl
import pandas as pd
import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder, ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from sklearn.datasets import load_breast_cancer
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from datamodules import GraphTableDataModule, ImageDataModule, TextDataModule
from datamodules.sources.breast_cancer import breast_cancer_edges
from tests.conftest import write_corpus
from zoo.adapters import projections
from zoo.catalogue import load_pretrained
from zoo.checkpoint.identity import digest, read_checkpoint
from zoo.checkpoint.transfer import summary
from zoo.errors import CheckpointMismatchError, ZooError
from zoo.exchange import export_model
from zoo.tasks import GraphPredictionTask, ImageClassificationTask, LanguageModelTask

SILENT = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
NETWORK = {"d_model": 16, "n_heads": 2, "d_ff": 32, "n_layers": 2, "mlp_hidden": [8]}


def text(corpus, **options):
    return TextDataModule(**{"path": str(corpus), "vocab_size": 300, "window": 16, "batch_size": 4, **options})


def table(**options):
    return GraphTableDataModule(**options)


def fit(task, data, steps=2, ckpt_path=None, **options):
    pl.seed_everything(3)
    trainer = pl.Trainer(**{**SILENT, "max_steps": steps, "limit_val_batches": 1, "deterministic": True, **options})
    trainer.fit(task, data, ckpt_path=ckpt_path)
    return trainer


class Before(pl.Callback):
    """The network's weights when training began."""

    def on_train_start(self, trainer, pl_module):
        self.weights = {name: tensor.clone() for name, tensor in pl_module.network.state_dict().items()}


@pytest.fixture(scope="module")
def other_corpus(tmp_path_factory) -> Path:
    folder = write_corpus(tmp_path_factory.mktemp("other"), 20, 20)
    for file in folder.glob("*.py"):
        file.write_text(file.read_text().replace("def ", "let ").replace("return", "give back"))
    return folder


@pytest.fixture(scope="module")
def trained_graph(tmp_path_factory, shared_cache) -> Path:
    path = tmp_path_factory.mktemp("graph") / "graph.ckpt"
    task = GraphPredictionTask(embed_dim=8, num_heads=2, readout="all")
    fit(task, table()).save_checkpoint(path)
    return path


@pytest.fixture(scope="module")
def trained_pictures(tmp_path_factory, shared_cache) -> Path:
    path = tmp_path_factory.mktemp("vision") / "vision.ckpt"
    options = {"img_size": 8, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 3}
    fit(ImageClassificationTask(options=options), ImageDataModule(batch_size=8)).save_checkpoint(path)
    return path


# ---------------------------------------------------------------------- what is taken, what is refused


def test_the_networks_settings_are_those_of_the_weights(trained, corpus):
    start, task = Before(), LanguageModelTask(pretrained=str(trained))
    fit(task, text(corpus, tokenizer=str(trained)), callbacks=[start])
    assert {name: task.settings[name] for name in NETWORK} == NETWORK
    saved = read_checkpoint(trained)["state_dict"]
    assert all(torch.equal(value, saved[f"network.{name}"]) for name, value in start.weights.items())
    assert {transfer.outcome for transfer in task.transfers} == {"kept"}


def test_another_vocabulary_is_refused_and_carried_over_by_adapt(trained, other_corpus, tmp_path, caplog):
    with pytest.raises(
        CheckpointMismatchError, match=r"model\.pretrained: .*merges: .* set data\.tokenizer to it"
    ) as error:
        fit(LanguageModelTask(pretrained=str(trained)), text(other_corpus))
    assert "\n" not in str(error.value)
    task = LanguageModelTask(pretrained=str(trained), on_mismatch="adapt")
    logger = TensorBoardLogger(tmp_path, "runs")
    trainer = fit(task, text(other_corpus), logger=logger)
    assert f"Weights of {trained}:\n{summary(task.transfers)}" in caplog.text
    assert "tokens by their text" in summary(task.transfers)
    events = EventAccumulator(logger.log_dir).Reload()
    assert events.Tensors("pretrained/text_summary")[0].tensor_proto.string_val[0].decode() == summary(task.transfers)
    trainer.save_checkpoint(tmp_path / "adapted.ckpt")
    assert read_checkpoint(tmp_path / "adapted.ckpt")["zoo"]["transfer"] == [
        transfer.plain() for transfer in task.transfers
    ]
    again = load_pretrained(tmp_path / "adapted.ckpt")
    assert again.transfers == task.transfers


def test_another_network_is_refused_and_carried_over_by_adapt(trained, corpus):
    data = text(corpus, tokenizer=str(trained))
    with pytest.raises(CheckpointMismatchError, match=r"another network: model\.n_layers is 3 here, 2 there\. Leave"):
        fit(LanguageModelTask(pretrained=str(trained), n_layers=3), data)
    task = LanguageModelTask(pretrained=str(trained), n_layers=3, on_mismatch="adapt")
    fit(task, data)
    transfers = {transfer.tensor: transfer.outcome for transfer in task.transfers}
    assert transfers["decoder.layers.2.norm1.weight"] == "new"
    assert transfers["decoder.layers.1.norm1.weight"] == "kept"
    assert task.settings["d_model"] == 16
    with pytest.raises(CheckpointMismatchError, match="has nothing that fits the network"):
        fit(LanguageModelTask(pretrained=str(trained), d_model=24, d_ff=48, mlp_hidden=[6], on_mismatch="adapt"), data)


def test_a_graph_with_a_node_added_and_one_renamed(trained_graph):
    edges = breast_cancer_edges().replace({"mean radius": "radius (mm)"})
    edges = pd.concat([edges, pd.DataFrame({"source": ["marker"], "target": [edges.target[0]]})])
    found = load_breast_cancer(as_frame=True)
    rows = found.data.rename(columns={"mean radius": "radius (mm)"}).assign(marker=0.5)
    rows.loc[::2, "marker"] = 1.0
    rows["diagnosis"] = found.target.map({0: "malignant", 1: "benign"})
    data = {"features": rows, "edges": edges, "label": "diagnosis"}
    with pytest.raises(CheckpointMismatchError, match=r"graph\.edges: .*marker.*model\.on_mismatch to adapt"):
        fit(GraphPredictionTask(pretrained=str(trained_graph)), table(**data))
    task = GraphPredictionTask(
        pretrained=str(trained_graph), on_mismatch="adapt", renamed={"radius (mm)": "mean radius"}
    )
    fit(task, table(**data))
    notes = {transfer.tensor: transfer.note for transfer in task.transfers}
    assert notes["value_scale"] == "30 of 31 inputs by name, new: 'marker'"
    assert (task.settings["embed_dim"], task.settings["readout"]) == (8, "all")
    with pytest.raises(ZooError, match=r"model\.renamed: got 1 names without weights"):
        GraphPredictionTask(renamed={"a": "b"})


def test_other_scaling_is_refused_and_carried_over_by_adapt(trained_graph):
    with pytest.raises(CheckpointMismatchError, match=r"mean: .*set data\.from_checkpoint to it as well"):
        fit(GraphPredictionTask(pretrained=str(trained_graph)), table(split_seed=5))
    task = GraphPredictionTask(pretrained=str(trained_graph), on_mismatch="adapt")
    fit(task, table(split_seed=5))
    assert {transfer.outcome for transfer in task.transfers} == {"kept"}


@pytest.mark.parametrize("kind", [LanguageModelTask, GraphPredictionTask, ImageClassificationTask])
def test_weights_of_another_family_are_refused(kind, trained, trained_graph, corpus):
    given = trained if kind is not LanguageModelTask else trained_graph
    data = {LanguageModelTask: lambda: text(corpus), GraphPredictionTask: table}.get(kind, ImageDataModule)()
    with pytest.raises(
        CheckpointMismatchError, match=r"^model\.pretrained: .*ckpt is of zoo\.tasks\.\w+\.\w+; this task"
    ):
        fit(kind(pretrained=str(given)), data)


def test_weights_to_start_from_and_a_run_to_go_on_with_exclude_each_other(trained, corpus):
    task = LanguageModelTask(**NETWORK, dropout=0.0, pretrained=str(trained))
    with pytest.raises(ZooError, match=r"model\.pretrained: got .* beside --ckpt_path\. The one starts a new run"):
        fit(task, text(corpus), ckpt_path=str(trained), steps=6)


def test_a_run_that_started_from_weights_goes_on_without_them(trained, corpus, lightning, tmp_path, monkeypatch):
    """With a config that leaves the network's settings to the weights, which are gone by then."""
    weights = tmp_path / "weights.ckpt"
    weights.write_bytes(trained.read_bytes())
    arguments = (
        *("fit", "--model", "zoo.tasks.LanguageModelTask", "--model.pretrained", weights, "--data.class_path"),
        *("datamodules.TextDataModule", "--data.path", corpus, "--data.tokenizer", weights, "--data.window", 16),
        *("--trainer.enable_progress_bar", "false", "--trainer.limit_val_batches", 1, "--trainer.max_epochs", 1),
        *("--trainer.callbacks", "ModelCheckpoint", "--trainer.callbacks.save_last", "true"),
        *("--trainer.callbacks.every_n_train_steps", 1),
    )
    lightning(*arguments, "--trainer.max_steps", 2)
    last = tmp_path / "lightning_logs" / "version_0" / "checkpoints" / "last.ckpt"
    assert read_checkpoint(last)["zoo"]["settings"]["d_model"] == 16
    tokenizer = arguments.index("--data.tokenizer") + 1
    arguments = (*arguments[:tokenizer], last, *arguments[tokenizer + 1 :])
    weights.unlink()
    lightning(*arguments, "--trainer.max_steps", 4, "--ckpt_path", last)
    newest = max(tmp_path.rglob("last*.ckpt"), key=lambda path: path.stat().st_mtime)
    assert read_checkpoint(newest)["global_step"] == 4


# ---------------------------------------------------------------------- what is trained


@pytest.mark.parametrize(
    ("train", "trained_part"),
    [
        ("head", ("head.",)),
        ("last_1", ("head.", "decoder.layers.1.")),
        ("last_2", ("head.", "decoder.layers.")),
    ],
)
def test_language_trains_what_it_is_told_to(train, trained_part, trained, corpus):
    task, start = LanguageModelTask(pretrained=str(trained), train=train, dropout=0.5), Before()
    fit(task, text(corpus, tokenizer=str(trained)), callbacks=[start])
    changed = {name for name, tensor in task.network.state_dict().items() if not tensor.equal(start.weights[name])}
    assert changed
    assert changed == {name for name, _ in task.network.named_parameters() if name.startswith(trained_part)}
    assert not task.network.decoder.shared_mlp.training
    assert not task.network.dropout.training


@pytest.mark.parametrize(
    ("train", "trained_part"), [("head", ("readout_",)), ("last_1", ("readout_", "norm.", "layers.2."))]
)
def test_graph_trains_what_it_is_told_to(train, trained_part, trained_graph):
    task, start = GraphPredictionTask(pretrained=str(trained_graph), train=train), Before()
    fit(task, table(), callbacks=[start])
    changed = {name for name, tensor in task.network.state_dict().items() if not tensor.equal(start.weights[name])}
    assert changed == {name for name, _ in task.network.named_parameters() if name.startswith(trained_part)}


def test_more_blocks_than_there_are_is_refused(trained, corpus):
    with pytest.raises(ZooError, match=r"model\.train: got last_3; the network has 2 blocks, so give at most that"):
        fit(LanguageModelTask(pretrained=str(trained), train="last_3"), text(corpus, tokenizer=str(trained)))


def test_learning_rates_fall_from_layer_to_layer(trained, corpus):
    task = LanguageModelTask(pretrained=str(trained), layer_decay=0.5, lr=0.01)
    trainer = fit(task, text(corpus, tokenizer=str(trained)))
    rates = {id(p): group["initial_lr"] for group in trainer.optimizers[0].param_groups for p in group["params"]}
    found = {name: rates[id(p)] for name, p in task.network.named_parameters()}
    assert len(found) == len(rates)
    for name, lr in found.items():
        depth = 3 if name.startswith("head") else 0
        if name.startswith("decoder.layers."):
            depth = int(name.split(".")[2]) + 1
        assert lr == pytest.approx(0.01 * 0.5 ** (3 - depth)), name


# ---------------------------------------------------------------------- adapters


FAMILIES = ["language", "graph", "vision"]


def adapting(family, request, **settings):
    """A task that adapts the trained model of a family, its data, and the model's file."""
    source = request.getfixturevalue({"language": "trained", "graph": "trained_graph"}.get(family, "trained_pictures"))
    corpus = request.getfixturevalue("corpus")
    kind, data = {
        "language": (LanguageModelTask, lambda: text(corpus, tokenizer=str(source))),
        "graph": (GraphPredictionTask, table),
        "vision": (ImageClassificationTask, lambda: ImageDataModule(batch_size=8)),
    }[family]
    return kind(**{"pretrained": str(source), "lora_rank": 2, "lr": 0.05, **settings}), data(), source


def answers(task):
    random = torch.Generator().manual_seed(0)
    if isinstance(task, LanguageModelTask):
        return task(torch.randint(300, (2, 9), generator=random))
    if isinstance(task, GraphPredictionTask):
        return task(torch.randn(4, 30, generator=random))
    return task(torch.randn(2, 1, 8, 8, generator=random))


@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_is_trained_beside_its_base_and_loads_onto_it(family, request, tmp_path):
    task, data, source = adapting(family, request)
    start = Before()
    trainer = fit(task, data, steps=3, callbacks=[start])
    base = {name.removeprefix("network."): t for name, t in read_checkpoint(source)["state_dict"].items()}
    adapted = projections(load_pretrained(source).network, load_pretrained(source).depths())
    assert adapted
    for name, tensor in task.network.state_dict().items():
        plain = name.replace(".base_layer.", ".")
        if ".lora_" not in name:
            assert tensor.equal(base[plain]) == (not plain.startswith(task.heads())), name
    assert {name.partition(".lora_")[0] for name in start.weights if ".lora_" in name} == set(adapted)
    assert not any(tensor.any() for name, tensor in start.weights.items() if ".lora_B." in name), "starts as its base"

    trainer.save_checkpoint(tmp_path / "adapter.ckpt")
    saved = read_checkpoint(tmp_path / "adapter.ckpt")["state_dict"]
    assert {
        n for n in saved if ".lora_" not in n and n.removeprefix("network.") in dict(task.network.named_parameters())
    } == {f"network.{name}" for name, _ in task.network.named_parameters() if name.startswith(task.heads())}, (
        "beside the adapters the head alone"
    )
    task.eval()
    again = load_pretrained(tmp_path / "adapter.ckpt")
    assert torch.equal(answers(again), answers(task))
    assert not torch.allclose(answers(load_pretrained(source)), answers(task))

    export_model(tmp_path / "adapter.ckpt", "checkpoint", tmp_path / "whole.ckpt")
    whole = load_pretrained(tmp_path / "whole.ckpt")
    assert set(whole.network.state_dict()) == set(base) - {"data_identity"}
    torch.testing.assert_close(answers(whole), answers(task))
    with pytest.raises(ZooError, match=r"holds an adapter, not a whole model; make it one with zoo export"):
        fit(type(task)(pretrained=str(tmp_path / "adapter.ckpt")), data)


@pytest.mark.parametrize("family", ["language", "graph"])
def test_an_adapter_is_refused_by_any_other_base(family, request, tmp_path):
    task, data, source = adapting(family, request)
    fit(task, data, steps=1).save_checkpoint(tmp_path / "adapter.ckpt")
    other = read_checkpoint(source)
    name = next(name for name in other["state_dict"] if name.endswith("feed_forward.0.bias"))
    other["state_dict"][name][0] += 1e-3
    torch.save(other, tmp_path / "other.ckpt")
    claim = read_checkpoint(tmp_path / "adapter.ckpt")
    onto = type(task)(**{**claim["zoo"]["settings"], "pretrained": str(tmp_path / "other.ckpt")})
    with pytest.raises(
        CheckpointMismatchError, match=r"an adapter for .* with weights \w{12}\.\.\., but .*other\.ckpt has"
    ):
        onto.on_load_checkpoint(claim)
    copy = tmp_path / "moved.ckpt"
    copy.write_bytes(source.read_bytes())
    onto = type(task)(**{**claim["zoo"]["settings"], "pretrained": str(copy)})
    claim = read_checkpoint(tmp_path / "adapter.ckpt")
    onto.on_load_checkpoint(claim)  # the same weights from elsewhere
    onto.load_state_dict(claim["state_dict"])


def test_a_run_of_adapters_goes_on_to_the_same_losses(request, tmp_path):
    losses = {}

    class Losses(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            losses.setdefault(trainer.global_step, []).append(float(outputs["loss"]))

    task, data, _ = adapting("language", request, lora_dropout=0.3)
    keep = ModelCheckpoint(tmp_path, filename="at", every_n_train_steps=3)
    fit(task, data, steps=6, callbacks=[Losses(), keep], enable_checkpointing=True, limit_val_batches=0)
    first = next(tmp_path.glob("at*.ckpt"))
    task, data, _ = adapting("language", request, lora_dropout=0.3)
    fit(task, data, steps=6, callbacks=[Losses()], ckpt_path=str(first), limit_val_batches=0)
    for step in (4, 5, 6):
        assert len(losses[step]) == (2 if step > read_checkpoint(first)["global_step"] else 1)
        assert len(set(losses[step])) == 1, step


@pytest.mark.parametrize("settings", [{"lora_rank": 2}, {"lora_rank": 2, "pretrained": "x.ckpt", "train": "head"}])
def test_adapters_without_a_base_or_beside_train_are_refused(settings):
    with pytest.raises(ZooError, match=r"model\.lora_rank: got 2; it adapts weights that there are"):
        LanguageModelTask(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lora_rank": -1}, r"model\.lora_rank: got -1; must be 0 or more"),
        ({"lora_alpha": 0.0}, r"model\.lora_alpha: got 0\.0; must be a positive number"),
        ({"lora_dropout": 1.0}, r"model\.lora_dropout: got 1\.0; must lie in \[0, 1\)"),
        ({"train": "last_0"}, r"model\.train: got 'last_0'; must be all, head, or last_N"),
        ({"layer_decay": 0.0}, r"model\.layer_decay: got 0\.0; must lie in \(0, 1\]"),
    ],
)
@pytest.mark.parametrize("kind", [LanguageModelTask, GraphPredictionTask, ImageClassificationTask])
def test_settings_out_of_range_are_refused_by_every_task(kind, settings, message):
    with pytest.raises(ZooError, match=message):
        kind(**settings)


def test_an_adapter_whose_record_was_altered_is_refused(request, tmp_path):
    task, data, _ = adapting("language", request)
    fit(task, data, steps=1).save_checkpoint(tmp_path / "adapter.ckpt")
    for change in ({"adapter": True}, {"adapter": {"base": "x"}}):
        checkpoint = read_checkpoint(tmp_path / "adapter.ckpt")
        checkpoint["zoo"] |= change
        torch.save(checkpoint, tmp_path / "altered.ckpt")
        with pytest.raises(ZooError, match="what it says of its adapter was altered"):
            load_pretrained(tmp_path / "altered.ckpt")


# ---------------------------------------------------------------------- Lightning's finders


def test_a_learning_rate_finder_moves_the_whole_schedule(corpus):
    task = LanguageModelTask(**NETWORK, lr=1e-4, layer_decay=0.5)
    rates = []

    class Rates(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            rates.append(max(group["lr"] for group in trainer.optimizers[0].param_groups))

    finder = LearningRateFinder(num_training_steps=30)
    trainer = fit(task, text(corpus), steps=10, callbacks=[finder, Rates()], logger=True, enable_checkpointing=True)
    found = finder.optimal_lr.suggestion()
    assert task.lr == task.settings["lr"] == found
    assert found != pytest.approx(1e-4)
    rates = rates[-10:]
    assert max(rates) == pytest.approx(found, rel=0.02)
    assert rates[-1] < 0.2 * found, "along the cosine"
    lowest = min(group["initial_lr"] for group in trainer.optimizers[0].param_groups)
    assert lowest == pytest.approx(found * 0.5**3), "layer by layer"


def test_a_batch_size_finder_changes_batches_and_the_schedules_length():
    task, data = GraphPredictionTask(embed_dim=8, num_heads=2), table(batch_size=64)
    rates = []

    class Rates(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            rates.append((trainer.optimizers[0].param_groups[0]["lr"], len(batch["values"])))

    finder = BatchSizeFinder(init_val=4, max_trials=2)
    trainer = fit(
        task, data, steps=-1, max_epochs=1, callbacks=[finder, Rates()], logger=True, enable_checkpointing=True
    )
    assert data.batch_size == 8
    last = rates[-trainer.num_training_batches :]
    assert {n for _, n in last[:-1]} == {8}
    assert sum(lr > 0.5 * task.lr for lr, _ in last) > len(last) // 3, "half the cosine's way is above the middle"


@pytest.mark.parametrize("finder", [LearningRateFinder, BatchSizeFinder])
def test_a_finder_does_not_swallow_a_refusal(finder, corpus, trained, caplog):
    callbacks = [finder()]
    with pytest.raises(ZooError, match=r"model\.pretrained: there is no file gone\.ckpt"):
        fit(LanguageModelTask(pretrained="gone.ckpt"), text(corpus), callbacks=callbacks, enable_checkpointing=True)
    task = LanguageModelTask(pretrained=str(trained))
    data = text(corpus, tokenizer=str(trained))
    options = {"num_training_steps": 3} if finder is LearningRateFinder else {"max_trials": 1}
    fit(task, data, callbacks=[finder(**options)], enable_checkpointing=True)
    assert caplog.text.count("Weights of") == 1
    assert task.transfers


def test_a_finder_is_refused_on_a_run_that_goes_on(corpus, tmp_path):
    fit(LanguageModelTask(**NETWORK), text(corpus)).save_checkpoint(tmp_path / "run.ckpt")
    with pytest.raises(ZooError, match=r"trainer\.callbacks: got LearningRateFinder beside --ckpt_path; it belongs to"):
        fit(
            LanguageModelTask(**NETWORK),
            text(corpus),
            steps=6,
            ckpt_path=str(tmp_path / "run.ckpt"),
            callbacks=[LearningRateFinder()],
            enable_checkpointing=True,
        )


# ---------------------------------------------------------------------- what was silent once


def test_a_task_with_weights_is_held_against_the_data_it_is_given(trained, other_corpus):
    with pytest.raises(CheckpointMismatchError, match="made for other data than this"):
        pl.Trainer(**SILENT).test(load_pretrained(trained), text(other_corpus), verbose=False)
    with pytest.raises(CheckpointMismatchError, match="made for other data than this"):
        fit(load_pretrained(trained), text(other_corpus))


def test_pictures_of_another_network_or_looks_are_refused(trained_pictures):
    with pytest.raises(CheckpointMismatchError, match=r"model\.options\.num_heads is 6 here, 3 there"):
        fit(ImageClassificationTask(pretrained=str(trained_pictures), options={"num_heads": 6}), ImageDataModule())
    with pytest.raises(CheckpointMismatchError, match=r"doesn't fit as it is: mean: "):
        fit(ImageClassificationTask(pretrained=str(trained_pictures)), ImageDataModule(mean=[0.9]))
    task = ImageClassificationTask(pretrained=str(trained_pictures), options={"num_heads": 6}, on_mismatch="adapt")
    fit(task, ImageDataModule(batch_size=8))
    assert {f.tensor: f.note for f in task.transfers}["model.options.num_heads"] == "6 here, 3 there"


def test_settings_that_differ_are_told_by_adapt(trained, corpus):
    task = LanguageModelTask(pretrained=str(trained), n_heads=8, on_mismatch="adapt")
    fit(task, text(corpus, tokenizer=str(trained)))
    assert {f.tensor: f.note for f in task.transfers}["model.n_heads"] == "8 here, 2 there"


@pytest.mark.parametrize("norm_first", [True, False])
def test_a_tied_embedding_is_the_head_and_blocks_are_counted_right(norm_first, corpus):
    task = LanguageModelTask(**NETWORK, tie_embeddings=True, norm_first=norm_first, train="last_1")
    start = Before()
    fit(task, text(corpus), callbacks=[start])
    changed = {name for name, tensor in task.network.state_dict().items() if not tensor.equal(start.weights[name])}
    assert {name for name in changed if ".layers.0." in name} == set()
    assert {"embedding.weight", "head.weight", "decoder.layers.1.norm1.weight"} <= changed
    assert len(projections(task.network, task.depths())) == 8


def test_an_untied_model_gives_a_tied_one_its_embedding(trained, corpus):
    task, start = LanguageModelTask(pretrained=str(trained), tie_embeddings=True, on_mismatch="adapt"), Before()
    fit(task, text(corpus, tokenizer=str(trained)), callbacks=[start])
    assert torch.equal(start.weights["head.weight"], read_checkpoint(trained)["state_dict"]["network.embedding.weight"])
    assert {transfer.tensor: transfer.outcome for transfer in task.transfers}["head.weight"] == "dropped"


@pytest.mark.parametrize("changed", [{"lora_alpha": 9.0}, {"lora_dropout": 0.5}, {"lora_rank": 3}])
def test_a_run_goes_on_with_the_adapters_it_had(changed, request, tmp_path):
    task, data, _ = adapting("language", request)
    fit(task, data, steps=1).save_checkpoint(tmp_path / "adapter.ckpt")
    task, data, _ = adapting("language", request, **changed)
    with pytest.raises(CheckpointMismatchError, match=rf"model\.{next(iter(changed))}: .* in the checkpoint"):
        fit(task, data, steps=3, ckpt_path=str(tmp_path / "adapter.ckpt"))


def test_a_run_without_adapters_cannot_go_on_with_some(trained, corpus, tmp_path):
    data = text(corpus, tokenizer=str(trained))
    fit(LanguageModelTask(pretrained=str(trained)), data).save_checkpoint(tmp_path / "run.ckpt")
    task = LanguageModelTask(pretrained=str(trained), lora_rank=2)
    with pytest.raises(CheckpointMismatchError, match=r"model\.lora_rank: 0 in the checkpoint, 2 here"):
        fit(task, data, steps=4, ckpt_path=str(tmp_path / "run.ckpt"))


def test_a_base_that_is_gone_is_named_and_may_have_moved(request, tmp_path):
    task, data, source = adapting("language", request)
    base = tmp_path / "base.ckpt"
    base.write_bytes(source.read_bytes())
    task.settings["pretrained"] = str(base)
    fit(task, data, steps=1).save_checkpoint(tmp_path / "adapter.ckpt")
    base.rename(tmp_path / "moved.ckpt")
    with pytest.raises(ZooError, match=r"an adapter for .*base\.ckpt, which can't be read .*--model\.pretrained"):
        load_pretrained(tmp_path / "adapter.ckpt")
    task, data, _ = adapting("language", request, pretrained=str(tmp_path / "moved.ckpt"))
    trainer = fit(task, data, steps=3, ckpt_path=str(tmp_path / "adapter.ckpt"))
    assert trainer.global_step == 3


def test_adapters_on_weights_that_were_adapted_go_on(lightning, tmp_path, trained, other_corpus):
    """The vocabulary is another, so its rows are trained in full beside the adapters."""
    arguments = (
        *("fit", "--model", "zoo.tasks.LanguageModelTask", "--model.pretrained", trained, "--model.lora_rank", 2),
        *("--model.on_mismatch", "adapt", "--data", "datamodules.TextDataModule", "--data.path", other_corpus),
        *("--data.vocab_size", 300, "--data.window", 16, "--data.batch_size", 4),
        *("--trainer.enable_progress_bar", "false", "--trainer.limit_val_batches", 1, "--trainer.max_epochs", 1),
        *("--trainer.callbacks", "ModelCheckpoint", "--trainer.callbacks.save_last", "true"),
        *("--trainer.callbacks.every_n_train_steps", 1),
    )
    lightning(*arguments, "--trainer.max_steps", 2)
    first = next(tmp_path.rglob("last*.ckpt"))
    assert "network.embedding.weight" in read_checkpoint(first)["state_dict"]
    lightning("fit", "--ckpt_path", first, "--trainer.max_steps", 3, "--trainer.enable_progress_bar", "false")
    lightning(*arguments, "--trainer.max_steps", 4, "--ckpt_path", "last")
    newest = max(tmp_path.rglob("last*.ckpt"), key=lambda path: path.stat().st_mtime)
    assert read_checkpoint(newest)["global_step"] == 4


def test_adapters_and_a_moving_average_go_on_together(lightning, tmp_path, trained_pictures):
    arguments = (
        *("fit", "--model", "zoo.tasks.ImageClassificationTask", "--model.pretrained", trained_pictures),
        *("--model.lora_rank", 2, "--data", "datamodules.ImageDataModule", "--data.batch_size", 8),
        *("--trainer.enable_progress_bar", "false", "--trainer.limit_val_batches", 1, "--trainer.max_epochs", 1),
        *("--trainer.callbacks", "ModelCheckpoint", "--trainer.callbacks.save_last", "true"),
        *("--trainer.callbacks.every_n_train_steps", 1, "--trainer.callbacks+", "EMAWeightAveraging"),
    )
    lightning(*arguments, "--trainer.max_steps", 2)
    lightning(*arguments, "--trainer.max_steps", 4, "--ckpt_path", "last")
    newest = max(tmp_path.rglob("last*.ckpt"), key=lambda path: path.stat().st_mtime)
    saved = read_checkpoint(newest)
    assert saved["global_step"] == 4
    for part in ("state_dict", "current_model_state"):
        assert not any(".base_layer." in name for name in saved[part])


def test_a_task_can_be_fitted_again_after_a_test(corpus):
    task, data = LanguageModelTask(**NETWORK), text(corpus)
    fit(task, data)
    pl.Trainer(**SILENT).validate(task, data, verbose=False)
    fit(task, data)


@pytest.mark.parametrize(
    "change",
    [
        lambda claim: claim["settings"].update(colour="red"),
        lambda claim: claim["settings"].update(d_model="x"),
        lambda claim: claim["identity"].pop("tokens"),
        lambda claim: claim["identity"].update(tokens=[1, 2]),
        lambda claim: claim.update(data="x"),
        lambda claim: claim.update(adapter={"base": 1, "digest": 2}),
    ],
)
def test_claims_without_sense_end_in_one_line(change, trained, corpus, tmp_path):
    checkpoint = read_checkpoint(trained)
    change(checkpoint["zoo"])
    checkpoint["zoo"]["digest"] = digest(checkpoint["zoo"]["identity"])
    torch.save(checkpoint, tmp_path / "altered.ckpt")
    with pytest.raises(ZooError) as error:
        load_pretrained(tmp_path / "altered.ckpt")
    assert "\n" not in str(error.value)


def test_numbers_that_are_not_finite_are_refused(trained, corpus, tmp_path):
    checkpoint = read_checkpoint(trained)
    checkpoint["state_dict"]["network.head.weight"][0, 0] = float("nan")
    torch.save(checkpoint, tmp_path / "nan.ckpt")
    with pytest.raises(ZooError, match=r"has numbers in 'network\.head\.weight' that aren't finite"):
        load_pretrained(tmp_path / "nan.ckpt")
    with pytest.raises(ZooError, match=r"model\.pretrained: .* has numbers in 'head\.weight' that aren't finite"):
        fit(LanguageModelTask(pretrained=str(tmp_path / "nan.ckpt")), text(corpus, tokenizer=str(trained)))


@pytest.mark.parametrize(
    ("settings", "argument"), [({"pretrained": ""}, "pretrained"), ({"lora_alpha": 4.0}, "lora_alpha")]
)
def test_settings_that_would_do_nothing_are_refused(settings, argument):
    with pytest.raises(ZooError, match=rf"model\.{argument}: got "):
        LanguageModelTask(**settings)
