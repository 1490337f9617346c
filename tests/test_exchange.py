"""Trained models in other formats and back: the same tensors, the same outputs, one line for a mistake."""

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import lightning.pytorch as pl
import onnxruntime
import pytest
import safetensors.torch
import timm
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from timm.data import resolve_data_config

import zoo.exchange.exporting as exporting
import zoo.exchange.files as files
from datamodules import GraphTableDataModule, ImageDataModule, TextDataModule
from tests.cli.test_lightning import QUIET
from zoo.catalogue import load_pretrained
from zoo.checkpoint.identity import digest, read_checkpoint, read_claim
from zoo.cli import zoo_main
from zoo.errors import CheckpointMismatchError, ZooError
from zoo.exchange import export_model, import_weights
from zoo.graph import AdjacencySpec
from zoo.models.decoder import LanguageModel
from zoo.models.graph_tokens import GraphTokenModel
from zoo.tasks import GraphPredictionTask, ImageClassificationTask, LanguageModelTask

ROOT = Path(__file__).parents[1]
SHELF, BREAST = ROOT / "checkpoints", ROOT / "configs" / "graph" / "breast_cancer.yaml"
FAMILIES = ["language", "vision", "graph"]
# Float32 in another order, of outputs of 1 to 10: what is seen is 1e-6.
NEAR = {"rtol": 1e-4, "atol": 1e-4}


SIZES = {
    "d_model": 16,
    "n_heads": 2,
    "d_ff": 32,
    "n_layers": 1,
    "mlp_hidden": [8],
    "max_len": 64,
    "tie_embeddings": True,
}
OPTIONS = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2}


@pytest.fixture(scope="session")
def models(corpus, shared_cache, tmp_path_factory) -> dict[str, Path]:
    """A checkpoint of each family, of one block."""
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    name, table = "damcha_vit_tiny_patch4_32", GraphTableDataModule()
    text = TextDataModule(path=str(corpus), vocab_size=300, window=16, batch_size=4, cache_dir=str(shared_cache))
    for data in (table, text):
        data.prepare_data()
        data.setup("fit")
    spec = AdjacencySpec.from_dict(table.identity()["graph"])
    torch.save(GraphTokenModel(spec, 8, 2, 1, 1, readout="all").state_dict(), folder / "graph.pt")
    torch.save(timm.create_model(name, num_classes=10, in_chans=1, **OPTIONS).state_dict(), folder / "vision.pt")
    torch.save(LanguageModel(len(text.identity()["tokens"]), **SIZES).state_dict(), folder / "language.pt")
    made_for = {
        "language": (LanguageModelTask(**SIZES), text),
        "graph": (GraphPredictionTask(embed_dim=8, num_heads=2, n_layers=1, readout="all"), table),
        "vision": (ImageClassificationTask(name=name, options=OPTIONS), ImageDataModule(source="digits")),
    }
    for family, classes in made_for.items():
        import_weights(folder / f"{family}.pt", folder / f"{family}.ckpt", made_for=classes)
    return {family: folder / f"{family}.ckpt" for family in made_for}


def claim_of(path):
    return read_claim(read_checkpoint(path), path)


def tensors_of(path):
    return dict(load_pretrained(str(path)).network.state_dict())


def assert_same_model(path, other):
    mine, theirs = tensors_of(path), tensors_of(other)
    assert list(mine) == list(theirs)
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def inputs_of(task):
    """Inputs of sizes that no export was traced with; in a table also rows with nothing measured."""
    torch.manual_seed(3)
    if isinstance(task, LanguageModelTask):
        return [torch.randint(0, 300, shape) for shape in ((1, 1), (4, 33))]
    if isinstance(task, ImageClassificationTask):
        return [torch.randn(n, 1, 16, 16) for n in (1, 5)]
    values = torch.randn(6, 30)
    values[1, 4:9], values[2] = torch.nan, torch.nan
    return [values, values[:1]]


# ---------------------------------------------------------------------- there and back


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("to", ["safetensors", "hub-folder"])
def test_tensors_and_claim_come_back_the_same(to, family, models, tmp_path):
    out = "there.safetensors" if to == "safetensors" else "there"
    export_model(models[family], to, out)
    import_weights(out, "back.ckpt")
    assert_same_model(models[family], "back.ckpt")
    before, after = claim_of(models[family]), claim_of("back.ckpt")
    assert {name: after[name] for name in ("task", "data", "identity", "digest")} == {
        name: before[name] for name in ("task", "data", "identity", "digest")
    }
    assert before["settings"].items() <= after["settings"].items()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["back.ckpt", out])


def test_tensors_have_the_networks_own_names(models):
    export_model(models["graph"], "safetensors", "b.safetensors")
    with safe_open("b.safetensors", framework="pt") as file:
        names, said = set(file.keys()), json.loads(file.metadata()["zoo"])
    assert names == set(load_pretrained(str(models["graph"])).network.state_dict())
    assert said["digest"] == claim_of(models["graph"])["digest"]


def test_what_comes_back_is_tested_by_lightning_and_verified(lightning, capsys):
    zoo_main(["export", "breast_cancer", "--to", "hub-folder", "--out", "b"])
    zoo_main(["import", "b", "--out", "b.ckpt"])
    zoo_main(["verify", "b.ckpt"])
    assert "loads, 9,073 parameters" in capsys.readouterr().out
    lightning("test", "--ckpt_path", "b.ckpt", *QUIET)
    assert "0.9882" in capsys.readouterr().out  # accuracy, as on the shelf


def test_tied_weights_stay_tied(models):
    export_model(models["language"], "safetensors", "tied.safetensors")
    import_weights("tied.safetensors", "tied.ckpt")
    found = load_pretrained("tied.ckpt").network
    assert found.head.weight is found.embedding.weight


def test_adapters_are_merged(models):
    pytest.importorskip("peft")
    torch.manual_seed(0)
    task = ImageClassificationTask(pretrained=str(models["vision"]), lora_rank=2, lr=0.1, warmup=0.0)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = pl.Trainer(max_steps=1, logger=False, limit_val_batches=0, accelerator="cpu", **quiet)
    trainer.fit(task, ImageDataModule(source="digits"))
    trainer.save_checkpoint("adapter.ckpt", weights_only=True)
    export_model("adapter.ckpt", "safetensors", "merged.safetensors")
    import_weights("merged.safetensors", "merged.ckpt")
    x = inputs_of(task)[1]
    with torch.no_grad():
        adapted = load_pretrained("adapter.ckpt")(x)
        assert not torch.allclose(adapted, load_pretrained(models["vision"])(x))
        torch.testing.assert_close(load_pretrained("merged.ckpt")(x), adapted, **NEAR)
    assert list(tensors_of("merged.ckpt")) == list(tensors_of(models["vision"]))
    with pytest.raises(ZooError, match=r"WEIGHTS: adapter\.ckpt holds an adapter"):
        import_weights("adapter.ckpt", "whole.ckpt")


# ---------------------------------------------------------------------- hub folders


def test_timm_loads_the_folder_and_gives_the_same_logits(models):
    export_model("digits_damcha", "hub-folder", "digits")
    theirs = timm.create_model("local-dir:digits", pretrained=True).eval()
    task = load_pretrained("digits_damcha")
    for x in inputs_of(task):
        with torch.no_grad():
            assert torch.equal(theirs(x), task(x))
    identity = task.data_identity
    assert theirs.pretrained_cfg["label_names"] == identity["classes"]
    read = resolve_data_config({}, model=theirs)
    assert (read["input_size"], list(read["mean"]), list(read["std"])) == ((1, 16, 16), [0.5], [0.5])
    assert (read["interpolation"], read["crop_pct"]) == (identity["interpolation"], identity["crop"])
    card = Path("digits/README.md").read_text()
    assert card.startswith("---\nlicense: mit\nlibrary_name: timm\n")
    assert "# digits_damcha" in card


def test_a_timm_model_goes_to_a_folder_without_the_record_of_other_weights():
    torch.manual_seed(0)
    network = timm.create_model("test_resnet.r160_in1k", num_classes=10, in_chans=1)
    torch.save({"state_dict": {f"network.{name}": t for name, t in network.state_dict().items()}}, "lit.pt")
    task = ImageClassificationTask(name="test_resnet.r160_in1k")
    import_weights("lit.pt", "resnet.ckpt", made_for=(task, ImageDataModule(source="digits", image_size=32)))
    export_model("resnet.ckpt", "hub-folder", "resnet")
    config = json.loads(Path("resnet/config.json").read_text())
    assert config["architecture"] == "test_resnet"
    assert not {"tag", "license", "origin_url"} & set(config["pretrained_cfg"])
    x = torch.randn(2, 1, 32, 32)
    with torch.no_grad():
        assert torch.equal(timm.create_model("local-dir:resnet", pretrained=True).eval()(x), network.eval()(x))
    assert Path("resnet/README.md").read_text().startswith("---\nlicense: unknown\n")


def test_overwriting_a_folder_leaves_other_files_in_it_alone(models):
    Path("b").mkdir()  # an empty one may be there
    export_model(models["graph"], "hub-folder", "b")
    Path("b/mine.txt").write_text("mine")
    Path("b/config.json").write_text("{}")
    with pytest.raises(ZooError, match=r"--out: b is there already; name another, or replace it with --overwrite"):
        export_model(models["graph"], "hub-folder", "b")
    export_model(models["graph"], "hub-folder", "b", overwrite=True)
    assert Path("b/mine.txt").read_text() == "mine"
    import_weights("b", "b.ckpt")


# ---------------------------------------------------------------------- graphs


@pytest.mark.parametrize("family", FAMILIES)
def test_exported_program_gives_the_same_outputs_for_any_size(family, models):
    export_model(models[family], "torch-export", "model.pt2")
    more = {"zoo.json": ""}
    program = torch.export.load("model.pt2", extra_files=more).module()
    task = load_pretrained(models[family])
    for x in inputs_of(task):
        with torch.no_grad():
            torch.testing.assert_close(program(x), task(x), **NEAR)
    assert json.loads(more["zoo.json"])["digest"] == claim_of(models[family])["digest"]


@pytest.mark.parametrize("family", FAMILIES)
def test_onnx_graph_gives_the_same_outputs_for_any_size_and_says_what_it_is(family, models):
    export_model(models[family], "onnx", "model.onnx")
    session = onnxruntime.InferenceSession("model.onnx", providers=["CPUExecutionProvider"])
    task, (given,) = load_pretrained(models[family]), session.get_inputs()
    for x in inputs_of(task):
        with torch.no_grad():
            torch.testing.assert_close(torch.from_numpy(session.run(None, {given.name: x.numpy()})[0]), task(x), **NEAR)
    shapes = {"language": ["batch", "length"], "vision": ["batch", 1, 16, 16], "graph": ["batch", 30]}
    assert given.shape == shapes[family]
    said = session.get_modelmeta().custom_metadata_map
    assert said["zoo.digest"] == digest(json.loads(said["zoo.identity"])) == claim_of(models[family])["digest"]
    if family == "language":
        assert said["zoo.tokens_digest"] == digest({"tokens": task.data_identity["tokens"]})
    else:
        assert json.loads(said["zoo.names"]) == task.data_identity["classes"]


KINDS = {
    "independent, learned positions, bayesian": {
        "share_mlp": False,
        "positions": "learned",
        "off_diag_mode": "bayesian",
    },
    "static": {"use_mlp": False, "share_mlp": False},
    "pre-norm, low rank, layer bias": {
        "norm_first": True,
        "compact_rank": 2,
        "use_layer_bias": True,
        "layer_bias_rank": 2,
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_language_networks_of_all_kinds_can_be_traced(kind):
    torch.manual_seed(0)
    network = LanguageModel(50, 16, 2, 32, 1, max_len=40, mlp_hidden=(8,), **KINDS[kind]).eval()
    sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", max=40)}
    with torch.no_grad():
        program = torch.export.export(network, (torch.randint(0, 50, (2, 8)),), dynamic_shapes=(sizes,)).module()
        for shape in ((1, 1), (3, 40), (2, 2)):
            x = torch.randint(0, 50, shape)
            torch.testing.assert_close(program(x), network(x), **NEAR)


def test_packed_attention_compiles_as_one_graph_with_its_gradients(models):
    task = load_pretrained(str(models["graph"]))
    network, x = task.network, inputs_of(task)[0]
    torch.compiler.reset()
    compiled = torch.compile(network, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), network(x), **NEAR)
    mine, theirs = (torch.autograd.grad(f(x).sum(), network.node_embedding)[0] for f in (network, compiled))
    torch.testing.assert_close(mine, theirs, **NEAR)


def test_a_graph_that_gives_other_outputs_is_not_kept(models, monkeypatch, tmp_path):
    other = SimpleNamespace(module=lambda: lambda x: torch.zeros(len(x), 10))
    monkeypatch.setattr(exporting, "_traced", lambda *_: None)
    monkeypatch.setattr(exporting.torch.export, "save", lambda _, file, **__: file.write_bytes(b"half"))
    monkeypatch.setattr(exporting.torch.export, "load", lambda *_: other)
    with pytest.raises(ZooError, match="--to: what was written gives other outputs"):
        export_model(models["vision"], "torch-export", "model.pt2")
    assert not list(tmp_path.iterdir())


def test_a_network_that_cannot_be_traced_is_refused_in_one_line(models, monkeypatch):
    monkeypatch.setattr(exporting.torch.export, "export", lambda *_, **__: 1 / 0)
    with pytest.raises(ZooError, match=r"--to: damcha_vit_.* can't be written as onnx \(division by zero\); safe"):
        export_model(models["vision"], "onnx", "model.onnx")


# ---------------------------------------------------------------------- other weights


@pytest.mark.parametrize("wrapper", ["", "network.", "_orig_mod.", "module.", "network._orig_mod.", "module.network."])
@pytest.mark.parametrize("suffix", [".pt", ".old.pt", ".safetensors"])
def test_weights_may_be_wrapped(suffix, wrapper, models):
    torch.manual_seed(1)
    state = {name: t + 1 if t.is_floating_point() else t for name, t in tensors_of(models["graph"]).items()}
    named = {f"{wrapper}{name}": tensor for name, tensor in state.items()}
    if suffix == ".safetensors":
        safetensors.torch.save_file(named, f"w{suffix}")
    else:
        found = named if wrapper else {"state_dict": named, "epoch": 3}
        torch.save(found, f"w{suffix}", _use_new_zipfile_serialization=suffix == ".pt")
    import_weights(f"w{suffix}", "w.ckpt", like=models["graph"])
    found = tensors_of("w.ckpt")
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


def test_a_config_says_what_weights_are_for(capsys):
    shipped = SHELF / "breast_cancer" / "model.ckpt"
    safetensors.torch.save_file(tensors_of(shipped), "w.safetensors")
    zoo_main(["import", "w.safetensors", "--config", str(BREAST), "--out", "w.ckpt"])
    assert "w.ckpt: whole" in capsys.readouterr().out
    assert_same_model(shipped, "w.ckpt")
    made, data = claim_of("w.ckpt")["data"], claim_of(shipped)["data"]
    assert made["class_path"] == data["class_path"]
    assert made["init_args"].items() >= data["init_args"].items(), "settings that came since have their defaults"
    assert claim_of("w.ckpt")["digest"] == claim_of(shipped)["digest"]


def change(claim, **changes):
    identity = claim["identity"] | changes
    return claim | {"identity": identity, "digest": digest(identity)}


def test_weights_that_say_what_they_are_must_agree_with_what_is_given(models):
    claim, state = claim_of(models["graph"]), tensors_of(models["graph"])

    def said(claim):
        safetensors.torch.save_file(state, "w.safetensors", {"zoo": json.dumps(claim)})
        import_weights("w.safetensors", "w.ckpt", like=models["graph"], overwrite=True)

    said(change(claim, source={"name": "elsewhere"}))
    assert claim_of("w.ckpt")["identity"]["source"]["name"] == "breast-cancer"
    with pytest.raises(CheckpointMismatchError, match="first difference at 0: 'malignant' in the checkpoint, 'benign'"):
        said(change(claim, classes=["malignant", "benign"]))
    with pytest.raises(CheckpointMismatchError, match=r"w\.safetensors is of another network\. num_heads: 4 in the ch"):
        said(claim | {"settings": claim["settings"] | {"num_heads": 4}})
    with pytest.raises(CheckpointMismatchError, match=r"is of zoo\.tasks\.graph\..*, not of zoo\.tasks\.vis"):
        import_weights("w.safetensors", "v.ckpt", like="digits_damcha")
    with pytest.raises(ZooError, match="doesn't match its digest"):
        said(claim | {"digest": "0" * 64})


@pytest.mark.parametrize("alter", ["task", "settings", "identity", "data_identity"])
def test_a_claim_that_no_model_can_be_made_from_is_refused(alter, models):
    claim, state = claim_of(models["graph"]), tensors_of(models["graph"])
    if alter == "task":
        claim = claim | {"task": "os.system"}
    elif alter == "settings":
        claim = claim | {"settings": {"colour": "red"}}
    elif alter == "identity":
        claim = claim | {"identity": {"kind": "table"}, "digest": digest({"kind": "table"})}
    else:
        state["data_identity"] = torch.tensor(list(b'{"kind":"text"}'), dtype=torch.uint8)
    safetensors.torch.save_file(state, "w.safetensors", {"zoo": json.dumps(claim)})
    with pytest.raises(ZooError, match=r"WEIGHTS: .*w\.safetensors"):
        import_weights("w.safetensors", "w.ckpt")
    assert not Path("w.ckpt").exists()


MUTATIONS = {
    "missing": (lambda t: None, "is missing"),
    "shape": (lambda t: torch.cat([t, t]), "is .*, not"),
    "kind": (lambda t: t.bool() if t.is_floating_point() else t.float(), "torch.bool|torch.float32"),
    "nan": (lambda t: torch.full_like(t, torch.nan), "no finite numbers"),
    "infinite": (lambda t: torch.full_like(t, torch.inf), "no finite numbers"),
    "sparse": (lambda t: t.to_sparse(), "save ordinary dense tensors"),
}


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(which=st.integers(0, 10_000), mutation=st.sampled_from(sorted(MUTATIONS)))
def test_one_wrong_tensor_is_refused_and_nothing_is_written(which, mutation, models):
    mutate, message = MUTATIONS[mutation]
    state = tensors_of(models["graph"])
    names = [name for name, t in state.items() if t.is_floating_point()]
    name = names[which % len(names)]
    state[name] = mutate(state[name])
    torch.save({key: t for key, t in state.items() if t is not None}, "w.pt")
    with pytest.raises(ZooError, match=f"WEIGHTS: .*({message})") as refused:
        import_weights("w.pt", "w.ckpt", like=models["graph"])
    assert mutation == "sparse" or name in str(refused.value)
    assert [path.name for path in Path().iterdir()] == ["w.pt"]


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 0.9999))
@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ".old.pt"])
def test_a_file_cut_short_is_refused_wherever_it_was_cut(suffix, share, models):
    state = tensors_of(models["graph"])
    whole = Path(f"whole{suffix}")
    if suffix == ".safetensors":
        safetensors.torch.save_file(state, whole)
    else:
        torch.save(state, whole, _use_new_zipfile_serialization=suffix == ".pt")
    content = whole.read_bytes()
    cut = Path(f"cut{suffix}")
    cut.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(ZooError, match=rf"WEIGHTS: cut{suffix} \([\d,]+ bytes\)"):
        import_weights(cut, "w.ckpt", like=models["graph"])
    assert not Path("w.ckpt").exists()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("to", ["safetensors", "hub-folder"])
def test_a_flipped_bit_is_found(to, family, models):
    """The format has no checksums."""
    out = Path("there.safetensors" if to == "safetensors" else "there")
    export_model(models[family], to, out)
    file = out if out.is_file() else out / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    with pytest.raises(ZooError, match=r"WEIGHTS: .* holds other tensors than were written"):
        import_weights(out, "w.ckpt")
    assert not Path("w.ckpt").exists()


# ---------------------------------------------------------------------- mistakes


def refused(capsys, *args):
    with pytest.raises(SystemExit) as ended:
        zoo_main([str(part) for part in args])
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    return line


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["nosuch", "--to", "onnx", "--out", "x.onnx"], "name: got 'nosuch'; the shelf has 'breast_cancer'"),
        (["x.ckpt", "--to", "onnx", "--out", "x.onnx"], "there is no file x.ckpt"),
        (
            ["breast_cancer", "--to", "gguf", "--out", "x"],
            "--to: got 'gguf'; must be safetensors or onnx or",
        ),
        (["breast_cancer", "--to", "onnx", "--out", "x.pt"], "--out: got 'x.pt'; the file must end in .onnx"),
        (["breast_cancer", "--to", "onnx", "--out", "no/x.onnx"], "--out: got 'no/x.onnx'; there is no folder no"),
        (["breast_cancer", "--to", "hub-folder", "--out", "."], "--out: got '.'; name a new folder"),
        (["breast_cancer", "--to", "hub-folder", "--out", "file"], "--out: file is a file; name a folder"),
        (["breast_cancer", "--to", "hub-folder", "--out", "full"], "--out: full is there already; name another"),
        (["breast_cancer", "--to", "torch-export", "--out", "full/a.pt2"], "--out: full/a.pt2 is there already"),
        (["breast_cancer", "--to", "torch-export", "--out", "full/d.pt2"], "--out: full/d.pt2 is a folder; name a fil"),
    ],
)
def test_a_mistake_in_an_export_ends_in_one_line(given, message, capsys, tmp_path):
    Path("file").write_text("")
    Path("full/d.pt2").mkdir(parents=True)
    Path("full/a.pt2").write_text("")
    before = sorted(tmp_path.rglob("*"))
    line = refused(capsys, "export", *given)
    assert line.startswith("error: ")
    assert message in line
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["w.pt", "--out", "w.ckpt"], "WEIGHTS: w.pt doesn't say what it was trained for; give --like"),
        (["w.pt", "--out", "w.ckpt", "--like", "nosuch"], "--like: got 'nosuch'; the shelf has"),
        (["w.pt", "--out", "w.ckpt", "--like", "graph.ckpt", "--config", BREAST], "--like: given beside --config"),
        (["w.pt", "--out", "w.ckpt", "--config", "no.yaml"], "--config: there is no file no.yaml"),
        (["w.pt", "--out", "w.ckpt", "--config", "bad.yaml"], "Option 'colour' is not accepted"),
        (["w.pt", "--out", "w.pth", "--like", "graph.ckpt"], "--out: got 'w.pth'; the file must end in .ckpt"),
        (["w.pt", "--out", "there.ckpt", "--like", "graph.ckpt"], "--out: there.ckpt is there already"),
        (["w.pt", "--out", "w.ckpt", "--like", "digits_damcha"], "network.pos_embed is missing"),
        (["no.pt", "--out", "w.ckpt"], "WEIGHTS: there is no file no.pt"),
        (["empty", "--out", "w.ckpt"], "WEIGHTS: the folder empty lacks model.safetensors or config.json"),
        (["broken", "--out", "w.ckpt"], "WEIGHTS: broken/config.json holds no JSON where there should be"),
        (["code.pt", "--out", "w.ckpt"], "WEIGHTS: code.pt holds Python objects that loading would have to run"),
        (["list.pt", "--out", "w.ckpt"], "WEIGHTS: list.pt"),
        (["words.pt", "--out", "w.ckpt"], "WEIGHTS: words.pt is no state dict ('epoch' is no tensor)"),
        (["text.pt", "--out", "w.ckpt"], "WEIGHTS: text.pt (5 bytes) holds no tensors that can be read"),
    ],
)
def test_a_mistake_in_an_import_ends_in_one_line(given, message, models, capsys, tmp_path):
    torch.save(tensors_of(models["graph"]), "w.pt")
    torch.save({"x": Path}, "code.pt")
    torch.save([torch.ones(1)], "list.pt")
    torch.save({"x": torch.ones(1), "epoch": 3}, "words.pt")
    Path("text.pt").write_text("words")
    Path("there.ckpt").write_text("")
    Path("empty").mkdir()
    Path("broken").mkdir()
    Path("broken/config.json").write_text("{")
    Path("broken/model.safetensors").write_text("")
    Path("bad.yaml").write_text("model: {class_path: zoo.tasks.GraphPredictionTask, init_args: {colour: red}}")
    shutil.copy(models["graph"], "graph.ckpt")
    before = sorted(tmp_path.rglob("*"))
    line = refused(capsys, "import", *given)
    assert line.startswith("error: ")
    assert message in line
    assert sorted(tmp_path.rglob("*")) == before


def test_a_package_that_is_not_installed_is_named(capsys, monkeypatch, models):
    real = exporting.importlib.util.find_spec
    monkeypatch.setattr(exporting.importlib.util, "find_spec", lambda name: None if name == "onnx" else real(name))
    line = refused(capsys, "export", models["vision"], "--to", "onnx", "--out", "x.onnx")
    assert line == "error: --to: got onnx, which needs onnx; pip install onnx, or 'damcha-zoo[export]' for all of it"


def test_a_kill_while_writing_leaves_what_was_there(models, monkeypatch, tmp_path):
    shutil.copy(models["graph"], "b.ckpt")

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(files, "verify_file", interrupt)
    export_model(models["graph"], "safetensors", "b.safetensors")
    with pytest.raises(KeyboardInterrupt):
        import_weights("b.safetensors", "b.ckpt", overwrite=True)
    assert Path("b.ckpt").read_bytes() == models["graph"].read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.ckpt", "b.safetensors"]


def test_help_names_the_formats(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["zoo", "export", "--help"])
    with pytest.raises(SystemExit):
        zoo_main()
    assert "hub-folder" in capsys.readouterr().out
