"""A run that goes on from any of its checkpoints ends as an unbroken one does, to the last bit."""

import itertools
import shutil
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.cli.conftest import NAMES
from zoo.callbacks import BestAndLastCheckpoint
from zoo.tasks import ZooTask

# 6 batches an epoch, a validation after the fourth, so that a run is broken in the midst of an epoch
EPOCH = ("--trainer.limit_train_batches", "6", "--trainer.limit_val_batches", "1", "--trainer.val_check_interval", "4")
EPOCH += ("--trainer.check_val_every_n_epoch", "1", "--trainer.log_every_n_steps", "1")
LONG = ("--trainer.max_steps", "-1", "--trainer.max_epochs", "2")
STOPPING = (
    *("--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=val/loss"),
    *("--trainer.callbacks.patience=1", "--trainer.callbacks.min_delta=1000"),
)
ENDS = {  # how a run ends, and after how many steps
    "max_epochs": (LONG, 12),
    "max_steps": (("--trainer.max_steps", "11", "--trainer.max_epochs", "30"), 11),
    "max_steps, whole epochs": (("--trainer.max_steps", "12", "--trainer.max_epochs", "-1"), 12),
    "max_time": ((*LONG, "--trainer.max_time", "00:01:00:00"), 12),
    "early stopping": (("--trainer.max_steps", "-1", "--trainer.max_epochs", "9", *STOPPING), 10),
}
AVERAGED = ("--trainer.callbacks+=EMAWeightAveraging", "--trainer.callbacks.decay=0.9")
WAYS = {
    **ENDS,
    "accumulation": ((*LONG, "--trainer.accumulate_grad_batches", "3"), 4),
    "weight averaging": ((*LONG, *AVERAGED), 12),
    "averaging and accumulation": ((*LONG, *AVERAGED, "--trainer.accumulate_grad_batches", "3"), 4),
    "workers": ((*LONG, "--data.num_workers", "2"), 12),
    "validation at epochs' ends": ((*LONG, "--trainer.val_check_interval", "1.0"), 12),
    "max_steps, validation at epochs' ends": (
        ("--trainer.max_steps", "15", "--trainer.max_epochs", "30", "--trainer.val_check_interval", "1.0"),
        15,
    ),
    "validation in few epochs": (
        ("--trainer.max_epochs", "3", *LONG[:2], "--trainer.check_val_every_n_epoch", "2"),
        18,
    ),
    "overfitting": ((*LONG, "--trainer.overfit_batches", "6"), 12),
}
CHEAP = "graph/breast_cancer.yaml"  # whose steps take least


@pytest.fixture
def runs(lightning, monkeypatch, tmp_path):
    """Run, and keep a copy of every last.ckpt; only the first validation's state counts as best."""
    copies: list[Path] = []
    number = itertools.count()
    original = BestAndLastCheckpoint._save_last_checkpoint

    def save_and_copy(self, trainer, candidates):
        original(self, trainer, candidates)
        copies.append(tmp_path / "copies" / f"{next(number)}.ckpt")
        copies[-1].parent.mkdir(exist_ok=True)
        shutil.copy(self.last_model_path, copies[-1])

    monkeypatch.setattr(BestAndLastCheckpoint, "_save_last_checkpoint", save_and_copy)
    monkeypatch.setattr(
        ModelCheckpoint, "check_monitor_top_k", lambda self, _, current: current is not None and not self.best_k_models
    )

    def run(*arguments):
        copies.clear()
        shutil.rmtree("runs", ignore_errors=True)
        lightning("fit", *arguments)
        (folder,) = Path("runs").glob("*/*/version_0/checkpoints")
        return {path.stem: torch.load(path, weights_only=True) for path in folder.iterdir()} | {"copies": list(copies)}

    return run


def same(a, b, where="checkpoint"):
    """Whether two states agree bit by bit, but for clocks and paths."""
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b), where
    elif isinstance(a, dict):
        assert set(a) == set(b), where
        for name in a:
            same(a[name], b[name], f"{where}.{name}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), where
        for i, pair in enumerate(zip(a, b, strict=True)):
            same(*pair, f"{where}.{i}")
    else:
        assert a == b, where


def check(runs, arguments, steps, which):
    whole = runs(*arguments)
    assert whole["last"]["global_step"] == steps
    assert whole["best"]["global_step"] < steps
    parts = ("state_dict", "current_model_state", "averaging_state", "optimizer_states", "lr_schedulers", "epoch")
    points = whole["copies"][:-1]  # the last is the end
    assert points
    for point in [points[i] for i in which if -len(points) <= i < len(points)]:
        again = runs(*arguments, "--ckpt_path", point)["last"]
        for part in (*parts, "global_step"):
            assert (part in again) == (part in whole["last"])
            same(again.get(part), whole["last"].get(part), part)


# all ways on the cheapest family; the configs of the others are dealt out to the ways a run ends
CASES = [*((CHEAP, way) for way in WAYS), ("vit/own_folder.yaml", "workers")]
CASES += [("lm/own_text.yaml", "averaging and accumulation")]


@pytest.mark.parametrize(("config", "way"), CASES)
def test_a_run_goes_on_to_the_same_weights(config, way, runs, small):
    arguments, steps = WAYS[way]
    # from the first validation, in the midst of an epoch; where the ways differ in it, from the last one as well
    check(runs, (*small(config), *EPOCH, *arguments), steps, which=(0,) if way in ENDS else (0, -1))


def test_each_family_is_broken_in_each_way_to_end():
    for family in ("lm", "vit"):
        assert {number % len(ENDS) for number, name in enumerate(NAMES) if name.startswith(family)} == set(range(5))


@pytest.mark.parametrize(("number", "config"), list(enumerate(NAMES)))
def test_every_config_runs_and_goes_on_to_the_same_weights(number, config, runs, small):
    arguments, steps = list(ENDS.values())[number % len(ENDS)]
    check(runs, (*small(config), *EPOCH, *arguments), steps, which=(0,))
    run = Path("runs") / Path(config).with_suffix("") / "version_0"
    assert (run / "config.yaml").is_file()
    assert list(run.glob("events.out.tfevents*"))


def test_a_run_broken_twice_in_one_epoch_goes_on_to_the_same_weights(runs, small):
    arguments = (*small(CHEAP), *EPOCH, *LONG)
    whole = runs(*arguments, "--trainer.val_check_interval", "2")
    first = runs(*arguments, "--trainer.val_check_interval", "2", "--ckpt_path", whole["copies"][0])
    second = runs(*arguments, "--trainer.val_check_interval", "2", "--ckpt_path", first["copies"][0])
    steps = [torch.load(part["copies"][0], weights_only=True)["global_step"] for part in (whole, first)]
    assert steps == [2, 4]
    same(second["last"]["state_dict"], whole["last"]["state_dict"])


STOPPED = {  # how the run goes, and after how many batches it is told to stop: in training, or in a validation
    "at the end of an epoch": (LONG, "train", 6),
    "at the end of an epoch without a validation": (
        ("--trainer.max_steps", "15", "--trainer.max_epochs", "-1", "--trainer.check_val_every_n_epoch", "null"),
        *("train", 6),
    ),
    "in the midst of a step": ((*LONG, "--trainer.accumulate_grad_batches", "3"), "train", 4),
    "in a validation of averages": ((*LONG, *AVERAGED), "val", 4),
    "before a validation of averages": ((*LONG, *AVERAGED), "train", 4),
}


@pytest.mark.parametrize("when", list(STOPPED))
def test_a_run_that_was_told_to_stop_goes_on_to_the_same_weights(when, lightning, small, monkeypatch):
    arguments, where, batches = STOPPED[when]
    monkeypatch.setattr(
        ModelCheckpoint, "check_monitor_top_k", lambda self, _, current: current is not None and not self.best_k_models
    )
    arguments = (*small(CHEAP), *EPOCH, "--trainer.limit_val_batches", "2", *arguments)
    lightning("fit", *arguments)
    run = Path("runs/graph/breast_cancer")
    with monkeypatch.context() as patched:
        hook = f"on_{'train' if where == 'train' else 'validation'}_batch_start"
        before = getattr(ZooTask, hook)

        def tell(task, *given):
            if task.trainer.fit_loop.total_batch_idx + 1 == batches:
                task.trainer._signal_connector.received_sigterm = True
            return before(task, *given)

        patched.setattr(ZooTask, hook, tell)
        with pytest.raises(SystemExit) as ended:
            lightning("fit", *arguments)
        assert ended.value.code == 143
    lightning("fit", *arguments, "--ckpt_path", "last")
    whole, again = (torch.load(run / f"version_{i}/checkpoints/last.ckpt", weights_only=True) for i in range(2))
    for part in ("state_dict", "current_model_state", "optimizer_states", "lr_schedulers", "epoch", "global_step"):
        same(again.get(part), whole.get(part), part)
    best = (torch.load(run / f"version_{i}/checkpoints/best.ckpt", weights_only=True) for i in range(2))
    same(*(each["state_dict"] for each in best), "best")
