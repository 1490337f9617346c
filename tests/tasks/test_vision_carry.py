"""Weights carried over to other classes, sizes, channels and layers: what lands where, and what is said of it."""

from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.loggers import TensorBoardLogger
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from timm.layers import resample_abs_pos_embed, resample_patch_embed

from datamodules import ImageDataModule
from zoo.checkpoint.identity import read_checkpoint
from zoo.checkpoint.transfer import TensorTransfer, summary
from zoo.errors import CheckpointMismatchError, ZooError
from zoo.tasks import ImageClassificationTask
from zoo.tasks.vision import _Pretrained
from zoo.tasks.vision_carry import adapt_pictures

TINY = {"img_size": 8, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 3}
SILENT = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
DAMCHA, TIMM = "damcha_vit_tiny_patch4_32", "vit_tiny_patch16_224"
ABC = ["a", "b", "c"]


def network(name=DAMCHA, seed=0, **options):
    """A network with other weights for every seed, also where timm starts with zeros or ones."""
    generator = torch.Generator().manual_seed(seed)
    made = timm.create_model(name, **{"num_classes": 3, "in_chans": 1, **(TINY if "vit" in name else {}), **options})
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return made


def carried(source, target, saved_classes=ABC, classes=ABC, heads=("head",)):
    """The new state, loaded strictly, and the transfer of each tensor by name."""
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    state, transfers = adapt_pictures(target, source.state_dict(), saved_classes, classes, heads)
    assert all(torch.equal(before[name], tensor) for name, tensor in target.state_dict().items()), "not changed"
    target.load_state_dict(state, strict=True)
    by_name = {transfer.tensor: transfer for transfer in transfers}
    assert len(by_name) == len(transfers)
    assert set(before) <= set(by_name), "every tensor is told of"
    for transfer in transfers:
        if transfer.outcome == "new":
            assert torch.equal(state[transfer.tensor], before[transfer.tensor])
        elif transfer.outcome == "kept":
            assert torch.equal(state[transfer.tensor], source.state_dict()[transfer.tensor])
    return state, by_name


def with_outcome(transfers, transfer):
    return {name for name, found in transfers.items() if found.outcome == transfer}


# ---------------------------------------------------------------------- tensors


@pytest.mark.parametrize("name", [DAMCHA, TIMM, "test_resnet"])
def test_a_network_of_the_same_kind_keeps_everything(name):
    _, transfers = carried(network(name), network(name, seed=1), heads=("head", "fc"))
    assert {transfer.outcome for transfer in transfers.values()} == {"kept"}


@pytest.mark.parametrize("classes", [["c", "a", "b"], ["b", "new", "a", "other"], ["c", "b"]])
def test_rows_of_the_head_go_by_class_name(classes):
    source, target = network(), network(seed=1, num_classes=len(classes))
    state, transfers = carried(source, target, ABC, classes)
    for kind in ("weight", "bias"):
        for i, name in enumerate(classes):
            row = getattr(source.head, kind)[ABC.index(name)] if name in ABC else None
            expected = getattr(network(seed=1, num_classes=len(classes)).head, kind)[i] if row is None else row
            assert torch.equal(state[f"head.{kind}"][i], expected)
    known = sum(name in ABC for name in classes)
    note = f"rows of {known} of {len(classes)} classes, by name" + ("; the others new" if known < len(classes) else "")
    assert transfers["head.weight"] == TensorTransfer("head.weight", "moved", note)
    assert with_outcome(transfers, "moved") == {"head.weight", "head.bias"}


def test_rows_of_both_heads_of_a_distilled_model_go_by_class_name():
    options = {"patch_size": 4, "embed_dim": 24, "depth": 1, "num_heads": 3}
    source, target = (network("deit_tiny_distilled_patch16_224", seed, **options) for seed in (0, 1))
    state, _ = carried(source, target, ABC, ["c", "b", "a"], ("head", "head_dist"))
    assert torch.equal(state["head.weight"], source.head.weight.flip(0))
    assert torch.equal(state["head_dist.weight"], source.head_dist.weight.flip(0))


@pytest.mark.parametrize("saved_classes", [None, ["x", "y", "z"]])
def test_a_head_of_unknown_or_other_classes_is_made_new_though_it_would_fit(saved_classes):
    _, transfers = carried(network(), network(seed=1), saved_classes)
    assert with_outcome(transfers, "new") == {"head.weight", "head.bias"}
    assert transfers["head.weight"].note == "no class in common"


@pytest.mark.parametrize("name", [DAMCHA, TIMM])
def test_positions_are_resized_as_timm_does(name):
    source, target = network(name), network(name, seed=1, img_size=16)
    state, transfers = carried(source, target)
    assert with_outcome(transfers, "resized") == {"pos_embed"}
    assert transfers["pos_embed"].note == "1 x 5 x 24 to 1 x 17 x 24"
    assert torch.equal(state["pos_embed"], resample_abs_pos_embed(source.pos_embed, [4, 4]))


def test_patches_are_resized_as_timm_does():
    source = network()
    state, transfers = carried(source, network(seed=1, img_size=16, patch_size=8))
    assert with_outcome(transfers, "resized") == {"patch_embed.proj.weight"}
    expected = resample_patch_embed(source.patch_embed.proj.weight, [8, 8])
    torch.testing.assert_close(state["patch_embed.proj.weight"], expected)


@pytest.mark.parametrize(("name", "tensor"), [(DAMCHA, "patch_embed.proj"), ("test_resnet", "conv1.0")])
def test_the_first_convolution_is_fitted_to_other_channels(name, tensor):
    grey, colour = network(name), network(name, in_chans=3)
    heads = ("head", "fc")
    state, transfers = carried(grey, network(name, seed=1, in_chans=3), heads=heads)
    weight = grey.get_submodule(tensor).weight
    torch.testing.assert_close(state[f"{tensor}.weight"], weight.expand(-1, 3, -1, -1) / 3)  # the same on grey pictures
    assert with_outcome(transfers, "resized") == {f"{tensor}.weight"}
    state, transfers = carried(colour, network(name, seed=1), heads=heads)
    weight = colour.get_submodule(tensor).weight
    torch.testing.assert_close(state[f"{tensor}.weight"], weight.sum(1, keepdim=True))
    assert with_outcome(transfers, "resized") == {f"{tensor}.weight"}


@pytest.mark.parametrize(("there", "here"), [(True, True), (False, False), (True, False), (False, True)])
def test_values_and_outputs_of_ordinary_attention_go_into_metric_attention(there, here):
    source = network(TIMM, qkv_bias=there)
    state, transfers = carried(source, network(seed=1, qkv_bias=here))
    for i, block in enumerate(source.blocks):
        at = f"blocks.{i}.attn"
        assert torch.equal(state[f"{at}.W_v.weight"], block.attn.qkv.weight[48:])
        assert torch.equal(state[f"{at}.out_proj.weight"], block.attn.proj.weight)
        assert torch.equal(state[f"{at}.out_proj.bias"], block.attn.proj.bias)
        assert transfers[f"{at}.W_v.weight"] == TensorTransfer(
            f"{at}.W_v.weight", "moved", f"the values' third of {at}.qkv.weight"
        )
        assert transfers[f"{at}.out_proj.bias"] == TensorTransfer(f"{at}.out_proj.bias", "moved", f"{at}.proj.bias")
        if here and there:
            assert torch.equal(state[f"{at}.W_v.bias"], block.attn.qkv.bias[48:])
        elif here:
            assert transfers[f"{at}.W_v.bias"].outcome == "new"
        elif there:
            assert transfers[f"{at}.qkv.bias"].outcome == "dropped"
    generator = {name for name in state if name.startswith("shared_mlp.")}
    assert with_outcome(transfers, "new") == generator | (
        {f"blocks.{i}.attn.W_v.bias" for i in (0, 1)} if here and not there else set()
    )


def test_moved_values_compute_what_they_did():
    source, target = network(TIMM), network(seed=1)
    carried(source, target)
    x = torch.randn(2, 5, 24)
    for theirs, mine in zip(source.blocks, target.blocks, strict=True):
        v = F.linear(x, theirs.attn.qkv.weight, theirs.attn.qkv.bias)[..., 48:]
        assert torch.allclose(mine.attn.W_v(x), v)


@pytest.mark.parametrize(
    ("source", "target", "dropped", "new"),
    [
        ({"depth": 3, "mlp_hidden": [4]}, {"mlp_hidden": [4]}, "blocks.2.", ()),
        ({"mlp_hidden": [4]}, {"depth": 3, "mlp_hidden": [4]}, (), "blocks.2."),
        ({"use_mlp": False}, {}, ("blocks.0.attn.M0", "blocks.1.attn.M0"), "shared_mlp."),
        ({}, {"global_pool": "avg"}, "norm.", "fc_norm."),
    ],
)
def test_what_has_no_counterpart_is_dropped_or_new(source, target, dropped, new):
    state, transfers = carried(network(**source), network(seed=1, **target))
    assert with_outcome(transfers, "dropped") == {
        name for name in network(**source).state_dict() if name.startswith(dropped)
    }
    assert with_outcome(transfers, "new") == {name for name in state if name.startswith(new)}
    assert all(transfers[name].note.endswith(", no place here") for name in with_outcome(transfers, "dropped"))


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ({}, {"class_token": False, "global_pool": "avg"}),
        ({"class_token": False, "global_pool": "avg", "img_size": 20}, {}),  # 5 x 5: 24 and a class token can't be
        ({"class_token": False, "global_pool": "avg", "img_size": [8, 20]}, {}),  # 10, or 9 and a class token
        ({}, {"reg_tokens": 2}),
        ({"img_size": [8, 16]}, {"img_size": 16}),
    ],
)
def test_positions_of_other_tokens_than_a_square_of_patches_are_not_taken_for_one(source, target):
    _, transfers = carried(network(**source), network(seed=1, **target))
    there, here = (tuple(network(**options).pos_embed.shape) for options in (source, target))
    shown = [" x ".join(map(str, shape)) for shape in (there, here)]
    assert transfers["pos_embed"] == TensorTransfer("pos_embed", "new", f"{shown[0]} there, {shown[1]} here")


@pytest.mark.parametrize("size", [[8, 16], [16, 64]])  # as many patches as the 32 x 32 of its record
def test_positions_of_the_same_oblong_are_kept(size):
    _, transfers = carried(network(img_size=size), network(seed=1, img_size=size))
    assert transfers["pos_embed"].outcome == "kept"


@pytest.mark.parametrize(
    ("source", "target", "heads"), [(DAMCHA, "test_resnet", ("fc",)), ("test_resnet", DAMCHA, ("head",))]
)
def test_a_model_of_another_family_leaves_nothing(source, target, heads):
    state, transfers = carried(network(source), network(target, seed=1), heads=heads)
    assert with_outcome(transfers, "new") == set(state)


def test_a_head_of_another_width_is_new_for_its_width():
    _, transfers = carried(network(), network(seed=1, embed_dim=48), ABC, ["c", "b", "a"])
    assert transfers["head.weight"] == TensorTransfer("head.weight", "new", "3 x 24 there, 3 x 48 here")


# ---------------------------------------------------------------------- fine-tuning


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Pictures of two of the digits and of something else."""
    folder, random = tmp_path_factory.mktemp("folder"), np.random.default_rng(0)
    for name in ("3", "1", "other"):
        (folder / name).mkdir()
        for i in range(10):
            Image.fromarray(random.integers(0, 256, (8, 8), dtype=np.uint8)).save(folder / name / f"{i}.png")
    return folder


def digits(**options):
    return ImageDataModule(**{"source": "digits", "batch_size": 64, **options})


def of_folder(folder, **options):
    return ImageDataModule(path=str(folder), batch_size=8, **{"channels": 1, **options})


class Start(pl.Callback):
    """The weights before the first step."""

    def on_train_start(self, trainer, pl_module):
        self.weights = {name: value.clone() for name, value in pl_module.network.state_dict().items()}


def fit(task, data, ckpt_path=None, max_steps=1, callbacks=(), **options):
    pl.seed_everything(5)
    trainer = pl.Trainer(
        **{**SILENT, "max_steps": max_steps, "limit_val_batches": 0, **options}, callbacks=list(callbacks)
    )
    trainer.fit(task, data, ckpt_path=ckpt_path)
    return trainer


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A checkpoint of digits, normalised in its own way."""
    task = ImageClassificationTask(options=TINY, lr=1e-2)
    trainer = fit(task, digits(mean=[0.3], std=[0.4]), max_steps=5)
    path = tmp_path_factory.mktemp("source") / "source.ckpt"
    trainer.save_checkpoint(path)
    return path, {name: value.clone() for name, value in task.network.state_dict().items()}


def test_weights_that_fit_as_they_are_start_the_run(source):
    path, weights = source
    task, start = ImageClassificationTask(pretrained=str(path)), Start()
    fit(task, digits(), callbacks=[start])
    assert all(torch.equal(value, start.weights[name]) for name, value in weights.items())
    assert {transfer.outcome for transfer in task.transfers} == {"kept"}
    assert not all(torch.equal(value, task.network.state_dict()[name]) for name, value in weights.items())


def test_architecture_and_looks_are_those_of_the_file(source):
    path, _ = source
    task, data = ImageClassificationTask(pretrained=str(path)), digits()
    assert task.settings["name"] == DAMCHA
    assert task.settings["options"] == TINY
    fit(task, data)
    assert (data.identity()["mean"], data.identity()["std"], data.identity()["image_size"]) == ([0.3], [0.4], [8, 8])


def test_options_given_go_before_those_of_the_file(source):
    task = ImageClassificationTask(pretrained=str(source[0]), options={"drop_rate": 0.2, "depth": 1})
    assert task.settings["options"] == {**TINY, "drop_rate": 0.2, "depth": 1}
    with pytest.raises(CheckpointMismatchError, match=r"another network: .*model\.options\.depth is 1 here, 2 there"):
        fit(task, digits())


@pytest.mark.parametrize("in_reach", [True, False])
def test_a_model_named_beside_the_weights_is_made_and_its_pictures_normalised_as_theirs_were(source, in_reach):
    task = ImageClassificationTask(name=DAMCHA, options={**TINY, "img_size": 16}, pretrained=str(source[0]))
    task.settings["on_mismatch"] = "adapt"
    data, start = digits(), Start()
    if not in_reach:  # as when the run goes on without the file
        task.settings["pretrained"] = "gone.ckpt"
        with pytest.raises(ZooError, match="no file gone"):
            fit(task, data)
        assert data.identity()["mean"] == [0.5]
        return
    fit(task, data, callbacks=[start])
    assert (data.identity()["mean"], data.identity()["std"], data.identity()["image_size"]) == ([0.3], [0.4], [16, 16])
    assert torch.equal(start.weights["head.weight"], source[1]["head.weight"])
    assert start.weights["pos_embed"].shape == (1, 17, 24)


def test_other_classes_are_refused_in_one_line_and_nothing_is_copied(source, folder):
    task = ImageClassificationTask(pretrained=str(source[0]))
    with pytest.raises(CheckpointMismatchError) as error:
        fit(task, of_folder(folder))
    message = str(error.value)
    assert "\n" not in message
    assert message.startswith(
        f"model.pretrained: {source[0]} doesn't fit as it is: classes: 10 in the checkpoint, 3 here;"
    )
    assert message.endswith("To carry over what fits, set model.on_mismatch to adapt")
    own = task.network.state_dict()
    assert not any(
        torch.equal(own[name], value) for name, value in source[1].items() if "weight" in name and value.ndim > 1
    )


def test_adapt_starts_from_what_fits(source, folder, caplog):
    path, weights = source
    task, start = ImageClassificationTask(pretrained=str(path), on_mismatch="adapt"), Start()
    fit(task, of_folder(folder), callbacks=[start])
    assert task.classes == ["1", "3", "other"]
    assert torch.equal(start.weights["head.weight"][:2], weights["head.weight"][[1, 3]])
    rest = [name for name in weights if not name.startswith("head.")]
    assert all(torch.equal(start.weights[name], weights[name]) for name in rest)
    assert f"Weights of {path}:\n{summary(task.transfers)}" in caplog.text


def test_an_average_of_the_weights_starts_from_them_too(source):
    path, weights = source
    task = ImageClassificationTask(pretrained=str(path))
    fit(task, digits(), callbacks=[EMAWeightAveraging(update_starting_at_step=99)])
    assert all(torch.equal(value, task.network.state_dict()[name]) for name, value in weights.items())


@pytest.fixture(scope="module")
def tuned(source, folder, tmp_path_factory):
    """A fine-tuned checkpoint whose pretrained file is gone, and the run's folder."""
    place = tmp_path_factory.mktemp("tuned")
    (place / "pretrained.ckpt").write_bytes(source[0].read_bytes())
    task = ImageClassificationTask(pretrained=str(place / "pretrained.ckpt"), on_mismatch="adapt", mixup=0.5)
    logger = TensorBoardLogger(place)
    trainer = fit(task, of_folder(folder), max_steps=4, logger=logger)
    trainer.save_checkpoint(place / "tuned.ckpt")
    (place / "pretrained.ckpt").unlink()
    return place / "tuned.ckpt", logger.log_dir, task


def test_what_became_of_each_tensor_is_in_the_checkpoint_and_in_tensorboard(tuned):
    path, run, task = tuned
    table = read_checkpoint(path)["zoo"]["transfer"]
    assert table == [transfer.plain() for transfer in task.transfers]
    note = "rows of 2 of 3 classes, by name; the others new"
    assert {"tensor": "head.bias", "fate": "moved", "note": note} in table
    assert {row["tensor"] for row in table} == set(task.network.state_dict())
    events = EventAccumulator(run)
    events.Reload()
    text = events.Tensors("pretrained/text_summary")[0].tensor_proto.string_val[0].decode()
    assert text == summary(task.transfers)
    assert f"| moved | head.weight | {note} |" in text


def test_a_tuned_checkpoint_tests_when_the_pretrained_file_is_gone(tuned, lightning, capsys, folder):
    again = ImageClassificationTask.load_from_checkpoint(tuned[0])
    assert [transfer.plain() for transfer in again.transfers] == [transfer.plain() for transfer in tuned[2].transfers]
    lightning("test", "--ckpt_path", tuned[0], "--trainer.logger", "false", "--trainer.enable_progress_bar", "false")
    assert "test/accuracy" in capsys.readouterr().out


@pytest.mark.parametrize("in_reach", [True, False])
def test_a_resumed_run_goes_on_from_its_own_weights(in_reach, tuned, source, folder, caplog):
    path, _, task = tuned
    start, given = Start(), Path(task.settings["pretrained"])
    assert not given.exists()
    # the file also said how pictures are normalised
    data = of_folder(folder, mean=[0.3], std=[0.4])
    if in_reach:
        given.write_bytes(source[0].read_bytes())
        data = of_folder(folder)
    same = {"pretrained": str(given), "on_mismatch": "adapt", "mixup": 0.5}
    again = ImageClassificationTask(name=DAMCHA, options=TINY, **same)
    fit(again, data, ckpt_path=path, max_steps=6, callbacks=[start])
    given.unlink(missing_ok=True)
    saved = read_checkpoint(path)["state_dict"]
    assert all(torch.equal(value, saved[f"network.{name}"]) for name, value in start.weights.items())
    assert [transfer.plain() for transfer in again.transfers] == [transfer.plain() for transfer in task.transfers], (
        "still told of"
    )
    assert "Weights of" not in caplog.text, "but not as if it had happened now"


def test_testing_does_not_load_pretrained_weights(source, monkeypatch):
    monkeypatch.setattr(_Pretrained, "weights", lambda self: pytest.fail("loaded"))
    task = ImageClassificationTask(pretrained=str(source[0]))
    pl.Trainer(**SILENT, limit_test_batches=1).test(task, digits(), verbose=False)


# ---------------------------------------------------------------------- what can't be had


def truncated(source, tmp_path, trained):
    (tmp_path / "cut.ckpt").write_bytes(source[0].read_bytes()[:-1000])
    return tmp_path / "cut.ckpt"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (truncated, r"^model\.pretrained: .*cut\.ckpt \([\d,]+ bytes\) is no complete checkpoint"),
        (lambda *_: "gone.ckpt", r"^model\.pretrained: there is no file gone\.ckpt"),
        (lambda source, tmp_path, _: tmp_path, r"^model\.pretrained: .* is a folder; name the \.ckpt file in it"),
        (
            lambda source, tmp_path, trained: trained,
            r"^model\.pretrained: .*tiny\.ckpt is of zoo\.tasks\.language\.LanguageModelTask; this task needs one of "
            r"zoo\.tasks\.vision\.ImageClassificationTask",
        ),
        (
            lambda *_: "no_such_model",
            r"^model\.pretrained: got 'no_such_model', which is neither a checkpoint file nor",
        ),
        (
            lambda *_: "damcha_vit_small_patch16_224",
            r"^model\.pretrained: damcha_vit_small_patch16_224 has no weights to download",
        ),
        (lambda *_: "resnet18.of_nobody", r"^model\.pretrained: got 'resnet18\.of_nobody'; resnet18 has the weights"),
    ],
)
@pytest.mark.parametrize("name", [None, DAMCHA])
def test_weights_that_cannot_be_had_are_refused_in_one_line(make, message, name, source, tmp_path, trained):
    with pytest.raises(ZooError, match=message) as error:  # at once where they decide the architecture
        fit(ImageClassificationTask(name=name, options=TINY, pretrained=str(make(source, tmp_path, trained))), digits())
    assert "\n" not in str(error.value)


def test_weights_without_a_network_to_fetch_them_are_refused_in_one_line(monkeypatch):
    def create_model(name, pretrained=False, **options):
        if pretrained:
            raise OSError("Temporary failure in\nname resolution")
        return original(name, **options)

    original = timm.create_model
    monkeypatch.setattr(timm, "create_model", create_model)
    with pytest.raises(ZooError) as error:
        fit(ImageClassificationTask(pretrained="test_vit.r160_in1k"), digits(image_size=16))
    assert str(error.value) == (
        "model.pretrained: the weights of test_vit.r160_in1k couldn't be had (Temporary failure in name resolution); "
        "connect to a network, or name a checkpoint file"
    )


def test_weights_of_timm_start_a_damcha_model(monkeypatch):
    """With random weights in the place of those to be fetched."""

    def create_model(name, pretrained=False, **options):
        return network(TIMM, in_chans=3, num_classes=1000, img_size=16) if pretrained else original(name, **options)

    original = timm.create_model
    monkeypatch.setattr(timm, "create_model", create_model)
    task = ImageClassificationTask(
        name=DAMCHA, options={**TINY, "img_size": 8}, pretrained="vit_base_patch16_clip_224.openai", on_mismatch="adapt"
    )
    data, start = digits(), Start()
    fit(task, data, callbacks=[start])
    transfers = {transfer.tensor: transfer.outcome for transfer in task.transfers}
    assert transfers["head.weight"] == "new", "nobody knows the names of its classes"
    assert transfers["blocks.0.attn.W_v.weight"] == "moved"
    assert transfers["patch_embed.proj.weight"] == transfers["pos_embed"] == "resized"
    weights = network(TIMM, in_chans=3, num_classes=1000, img_size=16)
    assert torch.equal(start.weights["blocks.0.attn.W_v.weight"], weights.blocks[0].attn.qkv.weight[48:])
    # the mean of CLIP's three channels
    assert data.identity()["mean"] == pytest.approx([(0.48145466 + 0.4578275 + 0.40821073) / 3])
