"""timm.create_model with pretrained=True takes the shelf's weights, checked, and adapts them as timm does its own."""

import hashlib
import json

import pytest
import timm
import torch

import zoo
from zoo.checkpoint.identity import digest
from zoo.checkpoint.index import read_index, shipped
from zoo.errors import CheckpointMismatchError, ZooError

NAME, ENTRY = "damcha_vit_tiny_patch4_32", "digits_damcha_tiny"
IDENTITY = {
    "kind": "images",
    "classes": list("0123456789"),
    "channels": 3,
    "image_size": [32, 32],
    "mean": [0.5] * 3,
    "std": [0.5] * 3,
    "interpolation": "bicubic",
    "crop": 1.0,
    "source": {"name": "digits"},
}


@pytest.fixture(scope="module")
def source():
    torch.manual_seed(0)
    return timm.create_model(NAME).half().float().eval()


@pytest.fixture(scope="module")
def made(source, tmp_path_factory):
    """A checkpoint as the zoo writes one, its tensors in float16."""
    path = tmp_path_factory.mktemp("made") / "model.ckpt"
    state = {f"network.{name}": tensor.half() for name, tensor in source.state_dict().items()}
    claim = {
        "task": "zoo.tasks.vision.ImageClassificationTask",
        "settings": {"name": NAME, "options": {}},
        "data": None,
        "identity": IDENTITY,
        "digest": digest(IDENTITY),
    }
    state["data_identity"] = torch.zeros(3, dtype=torch.uint8)
    torch.save({"zoo": claim, "state_dict": state}, path)
    return path


@pytest.fixture
def shelf(made, source, tmp_path, monkeypatch):
    folder = tmp_path / "shelf"
    (folder / ENTRY).mkdir(parents=True)
    file = folder / ENTRY / "model.ckpt"
    file.write_bytes(made.read_bytes())
    record = {
        "name": ENTRY,
        "family": "vision",
        "summary": "untrained",
        "file": f"{ENTRY}/model.ckpt",
        "sha256": hashlib.sha256(made.read_bytes()).hexdigest(),
        "bytes": made.stat().st_size,
        "parameters": sum(p.numel() for p in source.parameters()),
        "identity": digest(IDENTITY),
        "metrics": [{"name": "accuracy", "value": 0.1, "split": "test", "data": "digits"}],
        "command": "none",
        "config": f"{ENTRY}/config.yaml",
        "training_time": "none",
        "versions": {"torch": torch.__version__},
        "licence": "MIT",
    }
    (folder / "index.json").write_text(json.dumps({"models": [record]}))
    monkeypatch.setenv("ZOO_SHELF", str(folder))
    return file


@pytest.fixture
def x():
    return torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def test_pretrained_has_the_weights_of_the_shelf(shelf, source, x):
    assert timm.list_pretrained("damcha_vit*") == [NAME]
    model = timm.create_model(NAME, pretrained=True).eval()
    assert torch.equal(model(x), source(x))
    assert not torch.equal(timm.create_model(NAME).eval()(x), source(x))
    assert model.pretrained_cfg["label_names"] == tuple("0123456789")
    assert "state_dict" not in model.pretrained_cfg
    data = timm.data.resolve_model_data_config(model)
    assert (data["input_size"], data["mean"], data["std"], data["crop_pct"]) == ((3, 32, 32), (0.5,) * 3, (0.5,) * 3, 1)


def test_other_classes_channels_and_sizes_adapt(shelf, source, x):
    model = timm.create_model(NAME, pretrained=True, num_classes=5, in_chans=1, img_size=16)
    assert model(x[:, :1, :16, :16]).shape == (2, 5)
    torch.testing.assert_close(model.patch_embed.proj.weight, source.patch_embed.proj.weight.sum(1, keepdim=True))
    assert torch.equal(model.blocks[3].mlp.fc1.weight, source.blocks[3].mlp.fc1.weight)
    assert not torch.equal(model.pos_embed, source.pos_embed)
    headless = timm.create_model(NAME, pretrained=True, num_classes=0).eval()
    assert torch.equal(headless(x), source.forward_head(source.forward_features(x), pre_logits=True))
    features = timm.create_model(NAME, pretrained=True, features_only=True).eval()(x)
    assert torch.equal(features[-1], source.forward_intermediates(x, 3, intermediates_only=True)[-1])


def test_weights_can_be_loaded_later_and_from_a_file(shelf, source, x, made, tmp_path):
    later = timm.create_model(NAME).eval()
    timm.models.load_pretrained(later, num_classes=10)
    assert torch.equal(later(x), source(x))
    overlay = {"file": str(made)}  # timm's own loading
    assert torch.equal(timm.create_model(NAME, pretrained=True, pretrained_cfg_overlay=overlay).eval()(x), source(x))
    bare = zoo.models.vision_transformer.VisionTransformer(
        img_size=32, patch_size=4, embed_dim=192, depth=12, num_heads=3, num_classes=10
    ).eval()
    bare.load_pretrained(str(made))
    assert torch.equal(bare(x), source(x))


@pytest.mark.parametrize(
    "options", [{"use_M": False}, {"embed_dim": 96}, {"depth": 6}, {"use_M": False, "num_classes": 5}]
)
def test_options_that_change_the_network_are_refused_rather_than_loaded_in_part(options, shelf):
    with pytest.raises(CheckpointMismatchError, match=f"the weights of {ENTRY} are for other options than these"):
        timm.create_model(NAME, pretrained=True, **options)


@pytest.mark.parametrize("damage", ["flip", "cut"])
def test_a_damaged_file_is_refused_before_the_model_is_touched(damage, shelf, x):
    content = bytearray(shelf.read_bytes())
    content[len(content) // 2] ^= 1
    shelf.write_bytes(content if damage == "flip" else content[:-100])
    with pytest.raises(ZooError, match=f"{ENTRY}: .* isn't the file of the index"):
        timm.create_model(NAME, pretrained=True)
    model = timm.create_model(NAME).eval()
    before = model(x)
    with pytest.raises(ZooError, match="isn't the file of the index"):
        timm.models.load_pretrained(model, num_classes=10)
    assert torch.equal(model(x), before)


def test_without_weights_it_is_one_clear_error(shelf, monkeypatch, tmp_path):
    shelf.unlink()
    with pytest.raises(ZooError, match=f"{ENTRY}: its weights aren't here .* set ZOO_SHELF .* or ZOO_ORIGIN"):
        timm.create_model(NAME, pretrained=True)
    (shelf.parents[1] / "index.json").write_text('{"models": []}')
    with pytest.raises(ZooError, match=f"name: got '{ENTRY}'"):
        timm.create_model(NAME, pretrained=True)
    with pytest.raises(RuntimeError, match="No pretrained weights exist for damcha_vit_small_patch16_224"):
        timm.create_model("damcha_vit_small_patch16_224", pretrained=True)


def test_a_checkpoint_of_another_family_is_refused(trained):
    with pytest.raises(ZooError, match=r"pretrained: .* was made for text; name a vision checkpoint"):
        timm.create_model(NAME).load_pretrained(str(trained))


@pytest.mark.skipif(ENTRY not in read_index(shipped("checkpoints")), reason=f"{ENTRY} isn't on the shelf yet")
def test_what_timm_says_of_the_model_is_what_the_checkpoint_says(monkeypatch):
    monkeypatch.delenv("ZOO_SHELF", raising=False)
    entry = read_index(shipped("checkpoints"))[ENTRY]
    identity = torch.load(entry.path, weights_only=True)["zoo"]["identity"]
    config = timm.get_pretrained_cfg(NAME)
    assert config.input_size == (identity["channels"], *identity["image_size"])
    assert config.label_names == tuple(identity["classes"])
    assert (config.mean, config.std) == (tuple(identity["mean"]), tuple(identity["std"]))
    assert (config.interpolation, config.crop_pct) == (identity["interpolation"], identity["crop"])
    task = zoo.load_pretrained(ENTRY)
    model = timm.create_model(NAME, pretrained=True).eval()
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(model(x), task(x))
