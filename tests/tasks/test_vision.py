"""The picture task: its losses and figures, what it trains, and checkpoints that load whole or not at all."""

import math

import lightning.pytorch as pl
import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from PIL import Image
from sklearn.metrics import f1_score

from datamodules import ImageDataModule
from zoo.checkpoint.identity import read_checkpoint
from zoo.errors import CheckpointMismatchError, ZooError
from zoo.tasks import ImageClassificationTask
from zoo.tasks.vision import metrics_for

TINY = {"img_size": 8, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 3}
SILENT = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}


def digits(**options):
    return ImageDataModule(**{"source": "digits", "batch_size": 64, **options})


def a_task(options=None, **settings):
    return ImageClassificationTask(options={**TINY, **(options or {})}, **settings)


def fitted(task, data=None, seed=0, callbacks=(), **trainer_options):
    pl.seed_everything(seed)
    trainer = pl.Trainer(
        **{**SILENT, "max_steps": 3, "limit_val_batches": 0, **trainer_options}, callbacks=list(callbacks)
    )
    trainer.fit(task, data or digits())
    return trainer


def built(data=None, **settings):
    """A task with a network, without a trainer."""
    data = data or digits(image_size=8)
    data.prepare_data()
    data.setup("fit")
    torch.manual_seed(0)
    task = a_task(**settings)
    task.identity = data.identity()
    task.configure_model()
    return task


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three classes of grey pictures, ten of each."""
    folder, random = tmp_path_factory.mktemp("folder"), np.random.default_rng(0)
    for name in ("ant", "bee", "cow"):
        (folder / name).mkdir()
        for i in range(10):
            Image.fromarray(random.integers(0, 256, (8, 8), dtype=np.uint8)).save(folder / name / f"{i}.png")
    return folder


def of_folder(folder, **options):
    return ImageDataModule(
        path=str(folder), batch_size=8, **{"channels": 1, "hflip": 0.0, "crop_scale": 1.0, **options}
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A checkpoint after a few steps on digits, and the task and data it is of."""
    task, data = a_task(lr=3e-3), digits()
    trainer = fitted(task, data, max_steps=30)
    path = tmp_path_factory.mktemp("vision") / "digits.ckpt"
    trainer.save_checkpoint(path)
    return path, task, data


def outputs_and_targets(task, loader):
    batches = list(loader)
    with torch.no_grad():
        return torch.cat([task.eval()(b["image"]) for b in batches]), torch.cat([b["target"] for b in batches])


# ---------------------------------------------------------------------- figures


def test_training_lowers_the_loss():
    task = a_task(lr=5e-3)
    trainer = fitted(task, max_steps=80, limit_val_batches=2, val_check_interval=40, check_val_every_n_epoch=None)
    assert trainer.callback_metrics["val/loss"] < math.log(10) - 0.8
    assert trainer.callback_metrics["train/loss"] < math.log(10) - 0.5


def calibration_error(probabilities, target, bins=15):
    """The mean gap of confidence and accuracy over bins of equal width, weighted by their pictures."""
    confidence, read = probabilities.max(-1)
    place = np.minimum((confidence.numpy() * bins).astype(int), bins - 1)
    right = (read == target).numpy()
    gaps = [
        (place == b).mean() * abs(confidence.numpy()[place == b].mean() - right[place == b].mean()) for b in set(place)
    ]
    return sum(gaps)


def test_figures_are_those_of_all_test_pictures_counted_by_hand(trained):
    _, task, data = trained
    scores = pl.Trainer(**SILENT).test(task, data, verbose=False)[0]
    logits, target = outputs_and_targets(task, data.test_dataloader())
    p, read = logits.softmax(-1), logits.argmax(-1)
    assert set(scores) == {f"test/{name}" for name in ("loss", "accuracy", "accuracy_top5", "f1", "calibration_error")}
    # float32 sums in another order
    assert scores["test/loss"] == pytest.approx(float(F.cross_entropy(logits, target)), rel=1e-5)
    assert scores["test/accuracy"] == pytest.approx(float((read == target).float().mean()), abs=1e-6)
    top5 = (logits.topk(5).indices == target.unsqueeze(1)).any(1).float().mean()
    assert scores["test/accuracy_top5"] == pytest.approx(float(top5), abs=1e-6)
    assert scores["test/accuracy_top5"] > scores["test/accuracy"]
    assert scores["test/f1"] == pytest.approx(f1_score(target, read, average="macro"), abs=1e-6)
    assert scores["test/calibration_error"] == pytest.approx(calibration_error(p, target), abs=1e-5)


def test_accuracy_of_the_best_five_is_logged_only_with_more_than_five_classes(folder):
    task = a_task()
    trainer = fitted(task, of_folder(folder), max_steps=2, limit_val_batches=1, val_check_interval=1)
    names = {"loss", "accuracy", "f1", "calibration_error"}
    assert set(trainer.callback_metrics) == {"train/loss", *(f"val/{name}" for name in names)}


# ---------------------------------------------------------------------- the training loss


def a_batch(n=6, seed=0):
    random = torch.Generator().manual_seed(seed)
    return {"image": torch.rand(n, 1, 8, 8, generator=random), "target": torch.arange(n) % 10, "id": ["x"] * n}


def step(task, batch, monkeypatch, seed=0):
    """Loss of a training step, what it logged, and what pictures the network saw; without dropout."""
    logged, seen = {}, []
    monkeypatch.setattr(task, "log", lambda name, value, **_: logged.update({name: value.item()}))
    hook = task.network.register_forward_pre_hook(lambda module, args: seen.append(args[0].clone()))
    np.random.seed(seed)
    task.eval()
    loss = task.training_step(batch, 0)
    hook.remove()
    return loss.item(), logged["train/loss"], seen[0]


def smoothed(target, smoothing, n=10):
    return F.one_hot(target, n) * (1 - smoothing) + smoothing / n


def test_labels_are_smoothed_in_training_only(trained, monkeypatch):
    task, batch = built(label_smoothing=0.3), a_batch()
    expected = -(smoothed(batch["target"], 0.3) * task(batch["image"]).log_softmax(-1)).sum(-1).mean()
    loss, logged, _ = step(task, batch, monkeypatch)
    assert loss == logged == pytest.approx(float(expected), rel=1e-5)
    assert loss != pytest.approx(float(F.cross_entropy(task(batch["image"]), batch["target"])), rel=1e-3)
    assert trained[1].hparams["label_smoothing"] == 0.1, "and its test loss above is without any"


def test_mixup_trains_on_the_sum_of_two_pictures_and_their_targets(monkeypatch):
    task, batch = built(mixup=0.8), a_batch()
    before = batch["image"].clone()
    np.random.seed(3)
    np.random.rand()  # whether to mix: always, by default
    share = np.random.beta(0.8, 0.8)
    mixed = before * share + before.flip(0) * (1 - share)
    y = smoothed(batch["target"], 0.1)
    expected = -((y * share + y.flip(0) * (1 - share)) * task(mixed).log_softmax(-1)).sum(-1).mean()
    loss, logged, seen = step(task, batch, monkeypatch, seed=3)
    torch.testing.assert_close(seen, mixed)
    assert loss == logged == pytest.approx(float(expected), rel=1e-5)
    assert torch.equal(batch["image"], before), "callbacks see the pictures as they were"


def test_cutmix_trains_on_a_piece_of_another_picture_and_its_share_of_the_target(monkeypatch):
    task, batch = built(cutmix=1.0), a_batch()
    loss, _, seen = step(task, batch, monkeypatch, seed=4)
    own, other = seen == batch["image"], seen == batch["image"].flip(0)
    assert (own ^ other).all()
    share = float(own.float().mean())
    assert 0.1 < share < 0.9, "seed 4 cuts out some"
    y = smoothed(batch["target"], 0.1)
    expected = -((y * share + y.flip(0) * (1 - share)) * task(seen).log_softmax(-1)).sum(-1).mean()
    assert loss == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize(("n", "settings"), [(5, {}), (6, {"mix_prob": 0.0})])
def test_odd_batches_and_those_left_out_are_not_mixed(n, settings, monkeypatch):
    task, batch = built(mixup=0.8, cutmix=1.0, **settings), a_batch(n)
    loss, _, seen = step(task, batch, monkeypatch)
    assert torch.equal(seen, batch["image"])
    expected = F.cross_entropy(task(batch["image"]), batch["target"], label_smoothing=0.1)
    assert loss == pytest.approx(float(expected), rel=1e-6)


def test_kl_enters_the_loss_of_bayesian_with_its_weight(monkeypatch):
    task = built(options={"off_diag_mode": "bayesian"}, kl_weight=0.5)
    generator = task.network.shared_mlp
    kl = 0.0
    for i, j, k in np.ndindex(*generator.alpha_mu.shape):
        mu, logvar = float(generator.alpha_mu[i, j, k]), float(generator.alpha_logvar[i, j, k])
        kl += (i != j) * (math.exp(logvar) + mu**2 - 1 - logvar) / 2
    loss, logged, _ = step(task, a_batch(), monkeypatch)
    assert kl > 1
    assert loss - logged == pytest.approx(0.5 * kl, rel=1e-5)
    plain_loss, plain, _ = step(built(kl_weight=0.5), a_batch(), monkeypatch)
    assert plain_loss == plain, "other modes have none"


# ---------------------------------------------------------------------- what is trained


class Watch(pl.Callback):
    """The weights before the first step, and at each step which modules are in training mode."""

    def __init__(self):
        self.start, self.training, self.validations = {}, [], 0

    def on_train_start(self, trainer, pl_module):
        self.start = {name: value.clone() for name, value in pl_module.network.state_dict().items()}

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.training.append({name for name, module in pl_module.network.named_modules() if module.training})

    def on_validation_end(self, trainer, pl_module):
        self.validations += not trainer.sanity_checking


def moved(task, watch):
    after = task.network.state_dict()
    return {name for name, value in watch.start.items() if not torch.equal(value, after[name])}


HEAD = ("head.",)
LAST = ("blocks.1.", "norm.", "head.")
BOTH = ("blocks.", "norm.", "head.")
ALL = ("",)


@pytest.mark.parametrize("share_mlp", [True, False])
@pytest.mark.parametrize(("train", "expected"), [("head", HEAD), ("last_1", LAST), ("last_2", BOTH), ("all", ALL)])
def test_exactly_what_train_names_moves_and_the_rest_is_in_eval_mode(train, expected, share_mlp):
    dropout = {"drop_rate": 0.1, "proj_drop_rate": 0.1, "pos_drop_rate": 0.1, "mlp_drop_rate": 0.1}
    task = a_task(options={"share_mlp": share_mlp, **dropout}, train=train, lr=1e-2)
    watch = Watch()
    fitted(task, callbacks=[watch], max_steps=4, limit_val_batches=1, val_check_interval=1)
    assert watch.validations == 4
    assert moved(task, watch) == {name for name in watch.start if name.startswith(expected)}
    for name, module in task.network.named_modules():
        parameters = {f"{name}.{p}" for p, _ in module.named_parameters()}
        frozen = parameters and not any(p.startswith(expected) for p in parameters)
        if name and frozen:
            inside = [other for names in watch.training for other in names if f"{other}.".startswith(f"{name}.")]
            assert not inside
    for names in watch.training:
        assert ("pos_drop" in names) == (train == "all"), "it comes before what is trained"
        assert "head_drop" in names
        assert ("blocks.1.mlp.drop1" in names) == (train != "head")
        assert ("blocks.0.mlp.drop1" in names) == (train in ("last_2", "all"))
        if share_mlp:
            assert ("shared_mlp.hidden.2" in names) == (train == "all")


def test_frozen_batch_norms_keep_their_statistics():
    watch, task = Watch(), ImageClassificationTask(name="test_resnet", train="last_1", lr=1e-2)
    fitted(task, digits(image_size=16), callbacks=[watch], limit_val_batches=1, val_check_interval=1)
    changed = moved(task, watch)
    assert changed == {name for name in watch.start if name.startswith(("layer4.0.", "fc."))}
    assert "layer4.0.bn1.running_mean" in changed


def test_a_distilled_model_has_two_heads():
    watch = Watch()
    options = {"patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 3}
    task = ImageClassificationTask(name="deit_tiny_distilled_patch16_224", options=options, train="head", lr=1e-2)
    fitted(task, digits(image_size=8), callbacks=[watch])
    assert moved(task, watch) == {f"{head}.{kind}" for head in ("head", "head_dist") for kind in ("weight", "bias")}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"train": "last_3"}, "model.train: got last_3; damcha_vit_tiny_patch4_32 has 2 blocks, so give at most that"),
        (
            {"train": "last_9", "name": "test_resnet", "options": {}},
            "model.train: got last_9; test_resnet has 4 blocks",
        ),
    ],
)
def test_more_blocks_than_there_are_is_refused(settings, message):
    task = ImageClassificationTask(**{"options": TINY, **settings})
    with pytest.raises(ZooError, match=message):
        fitted(task, digits(image_size=8))


@pytest.mark.parametrize(("share_mlp", "of_generator"), [(True, 1.0), (True, 0.1), (False, 0.1)])
def test_learning_rates_fall_from_head_to_stem_by_the_factor_and_by_the_generators(share_mlp, of_generator):
    options = {"share_mlp": share_mlp, "off_diag_mode": "linear_comb", "generator_lr_factor": of_generator}
    task = a_task(options=options, lr=0.01, layer_decay=0.5, weight_decay=0.3)
    trainer = fitted(task, max_steps=1)
    names = {parameter: name for name, parameter in task.network.named_parameters()}
    found = {}
    for group in trainer.optimizers[0].param_groups:
        for parameter in group["params"]:
            assert names[parameter] not in found, "in one group only"
            found[names[parameter]] = group["initial_lr"], group["weight_decay"]
    assert set(found) == set(names.values())
    for name, (lr, decay) in found.items():
        power = {"head": 0, "norm": 1, "blocks.1": 1, "blocks.0": 2}
        steps = next((power[start] for start in power if name.startswith(f"{start}.")), 3)
        is_generators = "shared_mlp." in name or ".generator." in name
        assert lr == pytest.approx(0.01 * 0.5**steps * (of_generator if is_generators else 1)), name
        spared = name in ("pos_embed", "cls_token") or name.endswith("bias") or "norm" in name
        assert decay == (0.0 if spared else 0.3), name


def test_frozen_parameters_are_in_no_group():
    task = a_task(train="last_1", layer_decay=0.5)
    trainer = fitted(task, max_steps=1)
    inside = [p for group in trainer.optimizers[0].param_groups for p in group["params"]]
    trained = [p for name, p in task.network.named_parameters() if name.startswith(LAST)]
    assert len(inside) == len(trained)
    assert {id(p) for p in inside} == {id(p) for p in trained}


@pytest.mark.parametrize(
    ("name", "options", "size"),
    [("test_resnet", {}, 16), ("test_efficientnet", {}, 16), ("vit_tiny_patch16_224", TINY, None)],
)
def test_any_model_of_timm_fits_and_tests(name, options, size):
    task, data = ImageClassificationTask(name=name, options=options, lr=1e-2), digits(image_size=size)
    watch = Watch()
    fitted(task, data, callbacks=[watch], limit_val_batches=1, val_check_interval=1)
    assert {name for name, p in task.network.named_parameters()} <= moved(task, watch)
    scores = pl.Trainer(**SILENT, limit_test_batches=1).test(task, data, verbose=False)[0]
    assert 0 <= scores["test/accuracy"] <= 1


# ---------------------------------------------------------------------- arguments

NAME = r"^model\.name: got"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"name": "damcha_vit_tiny_patch4"},
            rf"{NAME} 'damcha_vit_tiny_patch4', .*do you mean damcha_vit_tiny_patch4_32",
        ),
        ({"name": "zzzz"}, rf"{NAME} 'zzzz', which is no model of timm\. timm"),
        ({"name": "resnet18.of_nobody"}, rf"{NAME} 'resnet18.of_nobody'; resnet18 has the weights 'a1_in1k'"),
        ({"options": {"num_classes": 10}}, r"^model\.options: got num_classes; the data decides that"),
        ({"options": {"in_chans": 3}}, r"^model\.options: got in_chans; the data decides that"),
        ({"options": {"pretrained": True}}, r"^model\.options: got pretrained; model\.pretrained does that"),
        ({"options": {"img_size": 0}}, r"^model\.options: got img_size 0; must be a number of pixels"),
        ({"options": {"img_size": [8]}}, r"^model\.options: got img_size \[8\]; must be"),
        ({"on_mismatch": "ignore"}, r"^model\.on_mismatch: got 'ignore'; must be error or adapt"),
        ({"train": "last_0"}, r"^model\.train: got 'last_0'; must be all, head, or last_N"),
        ({"train": "tail"}, r"^model\.train: got 'tail'"),
        ({"layer_decay": 0.0}, r"^model\.layer_decay: got 0\.0; must lie in \(0, 1\]"),
        ({"layer_decay": 1.1}, r"^model\.layer_decay: got 1\.1"),
        ({"label_smoothing": 1.0}, r"^model\.label_smoothing: got 1\.0; must lie in \[0, 1\)"),
        ({"label_smoothing": -0.1}, r"^model\.label_smoothing: got -0\.1"),
        ({"mixup": -1.0}, r"^model\.mixup: got -1\.0; must be 0 or more"),
        ({"mixup": math.inf}, r"^model\.mixup: got inf"),
        ({"cutmix": math.nan}, r"^model\.cutmix: got nan; must be 0 or more"),
        ({"mix_prob": 1.5}, r"^model\.mix_prob: got 1\.5; must lie in \[0, 1\]"),
        ({"kl_weight": -1.0}, r"^model\.kl_weight: got -1\.0; must be 0 or more"),
        ({"lr": 0.0}, r"^model\.lr: got 0\.0; must be a positive number"),
        ({"weight_decay": -1.0}, r"^model\.weight_decay: got -1\.0"),
        ({"beta2": 1.0}, r"^model\.beta2: got 1\.0"),
        ({"warmup": 1.0}, r"^model\.warmup: got 1\.0"),
        ({"min_lr": 2.0}, r"^model\.min_lr: got 2\.0"),
    ],
)
def test_bad_arguments_are_refused_by_name(settings, message):
    with pytest.raises(ZooError, match=message) as error:
        ImageClassificationTask(**settings)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["damcha_vit_tiny_patch4_32", "vit_tiny_patch16_224"])
@pytest.mark.parametrize(
    "options",
    [
        {"no_such": 1},
        {"patch_size": 0},
        {"patch_size": 16},
        {"num_heads": 5},
        {"num_heads": 0},
        {"depth": "x"},
        {"mlp_ratio": -1},
        {"act_layer": "none_such"},
        {"global_pool": "none_such"},
        {"init_values": "a"},
    ],
)
def test_a_model_that_cannot_be_made_is_refused_in_one_line(name, options):
    with pytest.raises(
        ZooError, match=r"^(model\.options: (\w+ can't be made with|got depth) .*|num_heads: got .*)"
    ) as error:
        built(name=name, options=options)
    assert "\n" not in str(error.value)
    assert str(next(iter(options.values()))) in str(error.value)


def test_the_command_line_says_a_wrong_name_in_one_line(lightning, capsys):
    with pytest.raises(SystemExit) as end:
        lightning(
            *("fit", "--model", "zoo.tasks.ImageClassificationTask", "--data", "datamodules.ImageDataModule"),
            *("--model.name", "damcha_vit_tiny_patch4"),
        )
    assert end.value.code == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line]
    assert lines[-1].startswith(
        "error: model.name: got 'damcha_vit_tiny_patch4', which is no model of timm; do you mean"
    )


# ---------------------------------------------------------------------- checkpoints


def test_a_checkpoint_alone_gives_the_same_logits(trained):
    path, task, data = trained
    claim = read_checkpoint(path)["zoo"]
    assert claim["settings"]["name"] == "damcha_vit_tiny_patch4_32"
    assert claim["settings"]["options"] == TINY
    assert claim["identity"]["classes"] == [str(i) for i in range(10)]
    again = ImageClassificationTask.load_from_checkpoint(path).eval()
    assert again.classes == task.classes
    image = next(iter(data.test_dataloader()))["image"]
    with torch.no_grad():
        assert torch.equal(again(image), task.eval()(image))


def with_identity(**changes):
    """Digits that say they are other data."""
    data = digits()
    own = data.identity
    data.identity = lambda: {**own(), **changes}
    return data


MISMATCHES = {
    "other classes": (lambda folder: of_folder(folder), {}, r"classes: 10 in the checkpoint, 3 here"),
    "a class renamed": (
        lambda folder: with_identity(classes=[*"012345678", "nine"]),
        {},
        r"only in the checkpoint: '9'; classes: only here: 'nine'",
    ),
    "classes in another order": (
        lambda folder: with_identity(classes=[*"1023456789"]),
        {},
        r"classes: first difference at 0: '0' in the checkpoint, '1' here",
    ),
    "another size": (lambda folder: digits(image_size=12), {}, r"image_size: first difference at 0: 8 in .*, 12 here"),
    "other channels": (lambda folder: digits(channels=3), {}, r"channels: 1 in the checkpoint, 3 here"),
    "another mean": (lambda folder: digits(mean=[0.3]), {}, r"mean: first difference at 0: 0\.5 in .*, 0\.3 here"),
    "another spread": (lambda folder: digits(std=[0.3]), {}, r"std: first difference at 0: 0\.5 in .*, 0\.3 here"),
    "other options": (
        lambda folder: digits(),
        {"options": {"depth": 3}},
        r"of another network\. .*options\.depth: 2 in the checkpoint, 3 here",
    ),
    "another model": (
        lambda folder: digits(crop=1.0),
        {"name": "vit_tiny_patch16_224"},
        r"name: 'damcha_vit_tiny_patch4_32' in the checkpoint, 'vit_tiny_patch16_224' here",
    ),
}


@pytest.mark.parametrize("mismatch", MISMATCHES)
def test_a_checkpoint_of_other_data_is_refused_by_name_and_nothing_is_copied(mismatch, trained, folder):
    make, settings, message = MISMATCHES[mismatch]
    task, data = a_task(lr=3e-3, **settings), make(folder)
    fitted(task, data, seed=1, max_steps=0)
    before = {name: value.clone() for name, value in task.state_dict().items()}
    with pytest.raises(CheckpointMismatchError, match=message):
        pl.Trainer(**SILENT, max_steps=99).fit(task, data, ckpt_path=trained[0])
    assert all(torch.equal(before[name], value) for name, value in task.state_dict().items())


# ---------------------------------------------------------------------- averaged weights


@pytest.fixture(scope="module")
def averaged(tmp_path_factory):
    """A checkpoint of a run with averaged weights that validated twice, its task, and its weights after each step."""
    history = []

    class Record(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            history.append({name: value.clone() for name, value in pl_module.network.state_dict().items()})

    folder = tmp_path_factory.mktemp("averaged")
    callbacks = [
        Record(),
        EMAWeightAveraging(decay=0.8),
        ModelCheckpoint(folder, "{step}", save_top_k=-1, monitor=None),
    ]
    task, data = a_task(lr=1e-2), digits()
    trainer = fitted(
        task,
        data,
        callbacks=callbacks,
        max_steps=12,
        limit_val_batches=1.0,
        val_check_interval=6,
        check_val_every_n_epoch=None,
        enable_checkpointing=True,
    )
    return folder / "step=12.ckpt", task, data, history, trainer.callback_metrics


def test_a_checkpoint_holds_the_averaged_weights(averaged):
    path, task, _, history, _ = averaged
    expected = history[0]
    for weights in history[1:]:
        expected = {name: 0.8 * expected[name] + 0.2 * weights[name] for name in expected}
    saved = read_checkpoint(path)
    for name, value in expected.items():
        torch.testing.assert_close(saved["state_dict"][f"network.{name}"], value, rtol=1e-5, atol=1e-6)
        assert torch.equal(saved["current_model_state"][f"network.{name}"], history[-1][name])
        torch.testing.assert_close(task.network.state_dict()[name], value, rtol=1e-5, atol=1e-6)


def test_validation_is_of_the_averaged_weights(averaged):
    path, _, data, history, metrics = averaged
    again = ImageClassificationTask.load_from_checkpoint(path)
    logits, target = outputs_and_targets(again, data.val_dataloader())
    assert float(metrics["val/loss"]) == pytest.approx(float(F.cross_entropy(logits, target)), rel=1e-5)
    again.network.load_state_dict(history[-1])
    raw, _ = outputs_and_targets(again, data.val_dataloader())
    assert float(metrics["val/loss"]) != pytest.approx(float(F.cross_entropy(raw, target)), rel=1e-3)


class Losses(pl.Callback):
    def __init__(self):
        self.train, self.val = {}, {}

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.train[trainer.global_step] = outputs["loss"].item()

    def on_validation_end(self, trainer, pl_module):
        if not trainer.sanity_checking:
            self.val[trainer.global_step] = trainer.callback_metrics["val/loss"].item()


def test_a_resumed_run_with_everything_random_goes_on_to_the_same_losses(tmp_path):
    def run(seed, ckpt_path=None, folder=tmp_path):
        pl.seed_everything(seed)
        rates = ("drop_path_rate", "drop_rate", "pos_drop_rate", "attn_drop_rate", "proj_drop_rate", "mlp_drop_rate")
        task = a_task(options=dict.fromkeys(rates, 0.1), mixup=0.8, cutmix=1.0, mix_prob=0.8, lr=5e-3)
        data = digits(batch_size=96, shift=0.1, rotate=10, random_erasing=0.3, hflip=0.5)  # 13 batches an epoch
        losses = Losses()
        trainer = pl.Trainer(
            **{**SILENT, "enable_checkpointing": True},
            max_steps=30,
            val_check_interval=5,
            check_val_every_n_epoch=None,
            limit_val_batches=1,
            callbacks=[
                losses,
                EMAWeightAveraging(decay=0.9),
                ModelCheckpoint(folder, "{step}", every_n_train_steps=9, save_top_k=-1),
            ],
        )
        trainer.fit(task, data, ckpt_path=ckpt_path)
        return losses, task

    unbroken, whole = run(0)
    resumed, rest = run(1, tmp_path / "step=18.ckpt", tmp_path / "again")
    assert list(resumed.train) == list(range(19, 31))
    assert resumed.train == {step: unbroken.train[step] for step in resumed.train}
    assert resumed.val == {step: unbroken.val[step] for step in (20, 25, 30)}
    assert len(set(unbroken.train.values())) == 30
    assert all(torch.equal(value, rest.state_dict()[name]) for name, value in whole.state_dict().items())


# ---------------------------------------------------------------------- predictions


def test_predictions_have_path_and_five_classes_from_the_likeliest_down(trained):
    _, task, data = trained
    rows = [row for batch in pl.Trainer(**SILENT).predict(task, data) for row in batch]
    suffixes = ["", "_2", "_3", "_4", "_5"]
    assert list(rows[0]) == ["path", *(f"{name}{s}" for s in suffixes for name in ("class", "probability"))]
    logits, _ = outputs_and_targets(task, data.test_dataloader())
    ids = [name for batch in data.test_dataloader() for name in batch["id"]]
    assert [row["path"] for row in rows] == ids
    for row, p in zip(rows, logits.softmax(-1), strict=True):
        shown = [row[f"probability{s}"] for s in suffixes]
        assert shown == sorted(shown, reverse=True)
        # other batches, other kernels
        assert shown == pytest.approx([float(p[task.classes.index(row[f"class{s}"])]) for s in suffixes], rel=1e-5)
        assert row["class"] == task.classes[p.argmax()]
        assert len({row[f"class{s}"] for s in suffixes}) == 5


def test_the_command_line_predicts_a_folder_without_labels_from_a_checkpoint_alone(folder, lightning, tmp_path):
    task, data = a_task(), of_folder(folder)
    trainer = fitted(task, data, max_steps=1)
    trainer.save_checkpoint(tmp_path / "three.ckpt")
    (tmp_path / "new").mkdir()
    for i in range(3):
        (tmp_path / "new" / f"{i}.png").write_bytes((folder / "ant" / f"{i}.png").read_bytes())
    lightning("predict", "--ckpt_path", tmp_path / "three.ckpt", "--data.path", tmp_path / "new")
    table = pd.read_csv(tmp_path / "predictions.csv")
    ranks = ["", "_2", "_3"]  # as many as there are classes
    assert list(table) == ["path", *(f"{name}{s}" for s in ranks for name in ("class", "probability"))]
    assert table["path"].tolist() == ["0.png", "1.png", "2.png"]
    for _, row in table.iterrows():
        assert {row["class"], row["class_2"], row["class_3"]} == {"ant", "bee", "cow"}
        assert row["probability"] + row["probability_2"] + row["probability_3"] == pytest.approx(1, abs=1e-5)


def test_a_first_batch_without_a_mistake_leaves_the_figures_apart():
    scores = metrics_for([str(i) for i in range(10)], "test/")
    target = torch.arange(10)
    right = torch.eye(10) * 0.9 + 0.01
    swapped = right.clone()
    swapped[[0, 1]] = right[[1, 0]]  # two of ten wrong, but among the best five
    swapped[0, 0] = swapped[1, 1] = 0.05
    for p in (right, swapped):
        losses = F.nll_loss(p.log(), target, reduction="none")
        scores.update(losses=losses, weights=torch.ones(10), preds=p.argmax(-1), probabilities=p, target=target)
    found = {name: float(value) for name, value in scores.compute().items()}
    assert found["test/accuracy"] == pytest.approx(18 / 20)
    assert found["test/accuracy_top5"] == pytest.approx(1.0)
    # classes 0 and 1: one right, one missed, one false, so F1 is 1/2; the others 1
    assert found["test/f1"] == pytest.approx((2 * 0.5 + 8) / 10)
