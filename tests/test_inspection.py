"""What ``zoo inspect`` writes: the numbers are those that a direct computation gives, for all three families."""

import json
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
import yaml
from PIL import Image

from datamodules import ImageDataModule, TextDataModule
from tests.attention.contract import network, text
from tests.tasks.test_graph import EDGES, fitted, table
from tests.tasks.test_vision import TINY as TINY_VISION
from tests.tasks.test_vision import a_task
from tests.tasks.test_vision import fitted as fitted_pictures
from zoo.catalogue import load_pretrained
from zoo.cli import zoo_main
from zoo.errors import ZooError
from zoo.inspection import ablate_blocks, inspect_checkpoint
from zoo.looking import look
from zoo.looking.measures import map_entropy
from zoo.tasks import ImageClassificationTask, LanguageModelTask

NEAR = {"rel": 1e-5, "abs": 1e-7}  # float32 sums in another order, and eight digits in a file


def inspect(*arguments):
    zoo_main(["inspect", *map(str, arguments)])


def refused(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        inspect(*arguments)
    assert ended.value.code == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ")
    return error


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """A checkpoint of a tiny picture model with a generator a block, whose settings have scales of their own."""
    task = a_task({"share_mlp": False, "mlp_hidden": [8], "diag_scale": 0.5}, lr=3e-3)
    trainer = fitted_pictures(task, ImageDataModule(source="digits", batch_size=64), max_steps=3)
    path = tmp_path_factory.mktemp("pictures") / "digits.ckpt"
    trainer.save_checkpoint(path)
    return path


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    """A checkpoint of a tiny graph model, and a table like its own."""
    _, _, trainer = fitted("multiclass", steps=3)
    folder = tmp_path_factory.mktemp("graph")
    trainer.save_checkpoint(folder / "graph.ckpt")
    table(seed=1)[["a", "b", "c", "d", "multi"]].to_csv(folder / "table.csv", index=False)
    return folder


@pytest.fixture(scope="module")
def written(trained, tmp_path_factory, corpus):
    """The folder of an inspection of the tiny language model, and its task, tokens and data."""
    folder = tmp_path_factory.mktemp("inspection") / "inside"
    inspect(trained, "--out", folder, "--batches", 2, "--sample", 1, "--tokens", 12)
    task = load_pretrained(trained)
    data = TextDataModule(**task_data(trained))
    data.prepare_data()
    data.setup("test")
    return folder, task, data.test_dataloader().dataset[1][:12].unsqueeze(0), data


def task_data(checkpoint):
    return torch.load(checkpoint, weights_only=True)["zoo"]["data"]["init_args"]


# ---------------------------------------------------------------------- the numbers


def test_attention_and_similarity_are_those_of_the_layers(written):
    folder, task, tokens, _ = written
    inputs = []
    for layer in task.network.decoder.attentions:
        layer.register_forward_pre_hook(lambda _, args: inputs.append(args))
    with torch.no_grad():
        task.network(tokens)
        maps = [
            layer(*args[:3], need_weights=True)[1][0]
            for layer, args in zip(task.network.decoder.attentions, list(inputs), strict=True)
        ]
    weights = pd.read_csv(folder / "attention.csv").set_index(["layer", "head", "query", "key"])
    cosines = pd.read_csv(folder / "similarity.csv").set_index(["layer", "head", "other_head"])["cosine"]
    summary = pd.read_csv(folder / "summary.csv")
    similarity = summary[summary["figure"] == "map_similarity"].set_index("layer")["value"]
    assert len(weights) == 2 * 2 * 12 * 13 / 2  # layers, heads, pairs that a causal query sees
    for i, found in enumerate(maps):
        for place in ((0, 5, 2), (1, 11, 11), (1, 3, 0)):
            assert weights.loc[(i, *place), "weight"] == pytest.approx(float(found[place]), **NEAR)
        expected = float(F.cosine_similarity(found[0, 1:].flatten(), found[1, 1:].flatten(), dim=0))
        assert cosines[i, 0, 1] == pytest.approx(expected, **NEAR)
        assert similarity[i] == pytest.approx(expected, **NEAR)
        assert cosines[i, 1, 1] == pytest.approx(1, **NEAR)
    names = weights["query_name"].groupby("query").first()
    text = task.tokenizer.decode(tokens[0].tolist())
    assert "".join(map(str, names)).replace("·", " ").replace("↵", "\n") == text


def test_metric_blocks_and_spectrum_are_those_of_the_generator(written):
    folder, task, tokens, _ = written
    with torch.no_grad():
        task.network(tokens)
    M = task.network.decoder.get_M_matrices()[0][1].double().numpy()  # (16, 16), two heads of 8
    blocks = pd.read_csv(folder / "M_blocks.csv").set_index(["layer", "block_row", "block_column"])
    spectrum = pd.read_csv(folder / "head_metrics_spectrum.csv").set_index(["layer", "head", "kind"])
    metrics = pd.read_csv(folder / "head_metrics.csv").set_index(["layer", "head", "row", "column"])["value"]
    summary = pd.read_csv(folder / "summary.csv")
    for i in range(2):
        m = M[8 * i : 8 * i + 8, :8] + M[8 * i : 8 * i + 8, 8:]
        for j in range(2):
            block = M[8 * i : 8 * i + 8, 8 * j : 8 * j + 8]
            assert blocks.loc[(1, i, j), "norm"] == pytest.approx(np.linalg.norm(block), **NEAR)
            assert blocks.loc[(1, i, j), "max"] == pytest.approx(block.max(), **NEAR)
        assert metrics[0, i, 3, 5] == pytest.approx(m[3, 5], **NEAR)
        expected = np.linalg.svd(m, compute_uv=False)
        assert spectrum.loc[[(0, i, "singular_value")], "value"].to_numpy() == pytest.approx(expected, **NEAR)
        eigenvalues = np.linalg.eigvalsh((m + m.T) / 2)[::-1]
        assert spectrum.loc[[(1, i, "eigenvalue")], "value"].to_numpy() == pytest.approx(eigenvalues, **NEAR)
        of_head = summary[(summary["layer"] == 0) & (summary["head"] == i)].set_index("figure")["value"]
        assert of_head["head_metrics_norm"] == pytest.approx(np.linalg.norm(m), **NEAR)
        asymmetry = np.linalg.norm((m - m.T) / 2) / np.linalg.norm(m)
        assert of_head["head_metrics_asymmetry"] == pytest.approx(asymmetry, **NEAR)
    of_layer = summary[(summary["layer"] == 0) & summary["head"].isna()].set_index("figure")["value"]
    off = np.linalg.norm(np.concatenate([M[:8, 8:], M[8:, :8]]))
    assert of_layer["M_off_diagonal_norm"] == pytest.approx(off, **NEAR)
    assert of_layer["M_min"] == pytest.approx(M.min(), **NEAR)


def test_ablation_losses_are_those_of_models_with_these_scales(written, trained):
    folder, _, _, data = written
    ablation = pd.read_csv(folder / "ablation.csv").set_index("blocks")
    batches = [batch for batch, _ in zip(data.test_dataloader(), range(2), strict=False)]
    assert ablation.index.tolist() == ["full", "diagonal only", "off-diagonal only", "none"]
    for blocks, scales in zip(ablation.index, ((1, 1), (1, 0), (0, 1), (0, 0)), strict=True):
        diag, off = map(float, scales)
        other = LanguageModelTask.load_from_checkpoint(trained, diag_scale=diag, off_diag_scale=off).eval()
        with torch.no_grad():
            logits = torch.cat([other(batch[:, :-1]) for batch in batches])
        expected = F.cross_entropy(logits.flatten(0, 1), torch.cat(batches)[:, 1:].flatten())
        row = ablation.loc[blocks]
        assert (row["diag_scale"], row["off_diag_scale"], row["batches"]) == (diag, off, 2)
        assert row["loss"] == pytest.approx(float(expected), rel=1e-5)
    assert ablation["loss"].nunique() == 4
    summary = pd.read_csv(folder / "summary.csv").set_index("figure")["value"]
    assert summary["loss_off_diagonal_only"] == pytest.approx(ablation["loss"]["off-diagonal only"], **NEAR)


def test_picture_models_keep_their_own_scales_in_the_ablation(pictures, capsys):
    inspect(pictures, "--out", "inside", "--batches", 1)
    ablation = pd.read_csv("inside/ablation.csv").set_index("blocks")
    assert ablation["diag_scale"].tolist() == [0.5, 0.5, 0, 0]
    settings = torch.load(pictures, weights_only=True)["zoo"]["settings"]["options"]
    data = ImageDataModule(source="digits", from_checkpoint=str(pictures))
    data.setup("test")
    batch = next(iter(data.test_dataloader()))
    for blocks, changed in (("full", {}), ("diagonal only", {"off_diag_scale": 0.0})):
        task = ImageClassificationTask.load_from_checkpoint(pictures, options={**settings, **changed}).eval()
        with torch.no_grad():
            expected = F.cross_entropy(task(batch["image"]), batch["target"])
        assert ablation.loc[blocks, "loss"] == pytest.approx(float(expected), rel=1e-5)
    weights = pd.read_csv("inside/attention.csv")
    assert set(weights["key_name"]) == {"class", "0,0", "0,1", "1,0", "1,1"}
    assert weights.groupby(["layer", "head", "query"])["weight"].sum().to_numpy() == pytest.approx(1, abs=1e-5)
    assert "Held-out figures with some blocks of the metric" in capsys.readouterr().out


def test_graph_maps_lie_along_edges_between_nodes_by_name(graph, capsys):
    inspect(graph / "graph.ckpt", "--out", "inside", "--data", graph / "table.csv", "--sample", 3)
    weights = pd.read_csv("inside/attention.csv")
    pairs = set(zip(weights["key_name"], weights["query_name"], strict=True))
    assert {(s, t) for s, t in pairs if s != t} == set(map(tuple, EDGES.to_numpy()))
    task = load_pretrained(graph / "graph.ckpt")
    row = pd.read_csv(graph / "table.csv").loc[3, list("abcd")].to_numpy(dtype=float)
    identity = task.data_identity
    row = (row - np.array(identity["mean"])) / np.array(identity["std"])
    with torch.no_grad():
        edge_weights = task.network(torch.tensor(row, dtype=torch.float32).unsqueeze(0), need_weights=True)[1]
    layer = task.network.layers[1].attention
    found = weights.set_index(["layer", "head", "query", "key"])["weight"]
    for e in range(layer.nnz):
        query, key = int(layer.target_index[e]), int(layer.source_index[e])
        assert found[1, 1, query, key] == pytest.approx(float(edge_weights[1][0, e, 1]), rel=1e-4)
    assert "No block ablation" in capsys.readouterr().out
    assert not (graph / "inside" / "ablation.csv").exists()


def test_entropy_is_that_of_the_weights():
    even, sharp = torch.full((1, 3, 4), 0.25), torch.eye(4).unsqueeze(0)
    assert float(map_entropy(even)) == pytest.approx(np.log(4))
    two = torch.cat([even, sharp[:, :3]])  # of two heads the second has its weight on one key each
    assert map_entropy(two).tolist() == pytest.approx([np.log(4), 0], abs=1e-9)
    assert map_entropy(-even).isnan().all()
    assert map_entropy(torch.ones(1, 3, 1)).isnan().all()  # nothing to choose from
    blind = torch.cat([even, torch.zeros(1, 2, 4)], dim=1)
    assert float(map_entropy(blind)) == pytest.approx(np.log(4))


# ---------------------------------------------------------------------- what others show


@pytest.mark.parametrize(
    ("name", "options", "shown"),
    [
        ("gated", {}, {"gate"}),
        ("forgetting", {}, {"forget_gate"}),
        ("mixture", {}, {"router", "load", "together"}),
        ("dcmha", {"variant": "damcha_repo"}, {"pre", "gate"}),
        ("differential", {}, {"lambda"}),
        ("talking_heads", {}, {"P", "R"}),
        ("static", {}, {"M", "head_metrics"}),
        ("damcha", {"off_diag_mode": "bayesian"}, {"M", "head_metrics", "alpha", "alpha_std"}),
    ],
)
def test_each_attention_shows_its_own(name, options, shown):
    model = network(name, **options)
    looks = look(model, text(B=1))
    assert [item.layer for item in looks] == [0, 1, 2]
    assert set(looks[1].shown) == shown
    assert looks[2].maps.shape[1:] == (9, 9)


def test_gates_and_loads_are_those_that_the_output_is_made_with():
    model = network("gated")
    layer = model.decoder.attentions[0]
    with torch.no_grad():
        layer.gate.weight.zero_()
        layer.gate.bias.copy_(torch.tensor([-3.0, 0.0, 1.0, 4.0]))
    gate = look(model, text(B=1))[0].shown["gate"].values  # (tokens, heads)
    torch.testing.assert_close(gate, torch.sigmoid(layer.gate.bias.detach()).expand(9, 4))
    router = look(network("mixture"), text(B=1))[0].shown
    chosen = router["router"].values.topk(4, dim=-1).indices
    load = torch.zeros(8, dtype=torch.float64).scatter_add(0, chosen.flatten(), torch.ones(36, dtype=torch.float64)) / 9
    torch.testing.assert_close(router["load"].values.double(), load)


def test_looking_leaves_the_network_as_it_was():
    model = network("damcha").train()
    before = model(text())
    looks = look(model, text(B=1), layers={1})
    assert [item.layer for item in looks] == [1]
    assert all(module.training for module in model.modules())
    assert not any(module._forward_hooks for module in model.modules())
    torch.testing.assert_close(model(text()), before)


def test_timms_own_attention_shows_the_weights_that_it_mixes_with():
    task = a_task({"use_M": False})
    task.build_and_freeze(
        {"kind": "images", "classes": ["a", "b"], "channels": 1, "image_size": [8, 8], "mean": [0.5], "std": [0.5]}
    )
    model, picture = task.network.eval(), torch.rand(1, 1, 8, 8)
    with torch.no_grad():
        expected = model(picture)
        looks = look(model, picture)
        block = model.blocks[0]
        x = block.norm1(model._pos_embed(model.patch_embed(picture)))
        q, k, _ = block.attn.qkv(x).view(1, 5, 3, 3, 8).permute(2, 0, 3, 1, 4)
        torch.testing.assert_close(looks[0].maps, (q @ k.mT / 8**0.5).softmax(-1)[0])
        assert torch.equal(model(picture), expected)
    assert len(looks) == TINY_VISION["depth"]


# ---------------------------------------------------------------------- the folder and the command


def test_every_table_has_its_columns_and_every_picture_can_be_read(written):
    folder, *_ = written
    about = json.loads((folder / "about.json").read_text())
    assert {file.name for file in folder.iterdir()} == set(about["files"])
    assert about["sample"] == "held-out sample 1"
    columns = {
        "summary": ["layer", "head", "figure", "value"],
        "attention": ["layer", "head", "query", "key", "query_name", "key_name", "weight"],
        "similarity": ["layer", "head", "other_head", "cosine"],
        "M": ["layer", "row", "column", "value"],
        "M_blocks": ["layer", "block_row", "block_column", "norm", "mean", "min", "max"],
        "head_metrics_spectrum": ["layer", "head", "kind", "rank", "value"],
    }
    for name, wanted in columns.items():
        assert list(pd.read_csv(folder / f"{name}.csv")) == wanted
    drawn = {"attention", "attention_layer_0", "attention_layer_1", "similarity", "M", "head_metrics", "ablation"}
    assert drawn <= {file.stem for file in folder.glob("*.png")}
    for file in folder.glob("*.png"):
        assert min(Image.open(file).size) > 150


def test_a_text_needs_no_data_and_layers_are_chosen(trained, monkeypatch, capsys):
    monkeypatch.setattr(TextDataModule, "prepare_data", lambda self: pytest.fail("read the data"))
    inspect(trained, "--out", "inside", "--text", "def alpha(x):\n", "--batches", 0, "--layer", 1)
    weights = pd.read_csv("inside/attention.csv")
    assert set(weights["layer"]) == {1}
    assert "".join(map(str, weights.groupby("query")["query_name"].first())) == "def·alpha(x):↵"
    assert "Looked at text of" in capsys.readouterr().out
    with pytest.raises(ZooError, match="--out: inside is there already; name another, or replace it with --overwrite"):
        inspect_checkpoint(trained, "inside", text="x", batches=0)
    inside = Path("inside")
    (inside / "mine.txt").write_text("kept")
    inspect(trained, "--out", "inside", "--text", "x", "--batches", 0, "--layer", 0, "--overwrite")
    assert (inside / "mine.txt").read_text() == "kept"
    assert (inside / "attention_layer_0.png").exists()
    assert not (inside / "attention_layer_1.png").exists()  # of the inspection before


def test_data_of_a_config_and_of_a_path_are_read_with_the_models_vocabulary(trained, tmp_path, capsys):
    (tmp_path / "words.txt").write_text("gamma delta\n" * 400)
    inspect(trained, "--out", "one", "--data", tmp_path / "words.txt", "--batches", 1)
    settings = {"path": str(tmp_path / "words.txt"), "window": 8}
    config = {"data": {"class_path": "datamodules.TextDataModule", "init_args": settings}}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(config))
    inspect(trained, "--out", "two", "--config", tmp_path / "own.yaml", "--batches", 1)
    one, two = (pd.read_csv(f"{folder}/attention.csv") for folder in ("one", "two"))
    assert (one["query"].max(), two["query"].max()) == (15, 7)
    assert "gamma" in "".join(map(str, one.groupby("query")["query_name"].first())).replace("·", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--layer", 2), "--layer: got 2; the model has layers 0 to 1"),
        (("--sample", 100_000), "--sample: got 100000; there are "),
        (
            ("--tokens", 3, "--text", "def alpha(x)"),
            "tokens, and 3 are looked at; give a shorter text, or more --tokens",
        ),
        (("--tokens", 0), "--tokens: got 0; must be at least 1"),
        (("--batches", -1), "--batches: got -1; must be at least 0"),
        (("--data", "nowhere.txt"), "data.path"),
        (("--config", "nowhere.yaml"), "--config: got nowhere.yaml; there is no such file"),
        (("--out", "nowhere/inside"), "there is no folder nowhere"),
        (("--device", "abacus"), "--device: got 'abacus'"),
    ],
)
def test_mistakes_end_in_one_line_and_write_nothing(arguments, message, trained, capsys, tmp_path):
    assert message in refused(capsys, trained, "--out", "inside", *arguments)
    assert not list(tmp_path.iterdir())


def test_data_that_are_gone_are_named(trained, tmp_path, capsys):
    checkpoint = torch.load(trained, weights_only=True)
    checkpoint["zoo"]["data"]["init_args"]["path"] = str(tmp_path / "gone")
    torch.save(checkpoint, tmp_path / "moved.ckpt")
    error = refused(capsys, tmp_path / "moved.ckpt", "--out", "inside")
    assert "--data: got none, and the checkpoint's own data can't be read (data.path" in error


def test_a_text_for_pictures_and_too_many_weights_are_refused(pictures, trained, capsys, monkeypatch):
    assert "--text: got a text for ImageClassificationTask" in refused(capsys, pictures, "--out", "x", "--text", "a")
    monkeypatch.setattr("zoo.inspection.inspecting.MOST_ROWS", 10)
    error = refused(capsys, trained, "--out", "x", "--text", "alpha beta", "--batches", 0)
    assert "sample: got one whose attention maps hold more than 10 weights" in error


def test_network_without_attention_is_refused(tmp_path, capsys):
    task = ImageClassificationTask(name="test_resnet")
    data = ImageDataModule(source="digits", image_size=32, channels=3)
    trainer = pl.Trainer(
        max_steps=0, logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False
    )
    trainer.fit(task, data)
    trainer.save_checkpoint(tmp_path / "resnet.ckpt")
    error = refused(capsys, tmp_path / "resnet.ckpt", "--out", "inside")
    assert "checkpoint: test_resnet has no attention that can be looked into" in error
    with pytest.raises(
        ZooError, match="test_resnet has an attention without the options diag_scale and off_diag_scale"
    ):
        ablate_blocks(task, data, 1)
