"""--optimizer and --lr_scheduler of Lightning's command line, and AdamW with its schedule where neither is given."""

import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tests.cli.conftest import CONFIGS
from zoo.checkpoint.identity import read_checkpoint
from zoo.tasks import ZooTask

SGD = ("--optimizer", "SGD", "--optimizer.lr", "0.1")
COSINE = ("--lr_scheduler", "CosineAnnealingLR", "--lr_scheduler.T_max", "4")
SLOW = ("--model.generator_lr_factor", "0.1")


@pytest.fixture
def fit(lightning, tiny_arguments, monkeypatch):
    """Fit some steps from the command line; returns the task, its optimizer, its schedules, and last.ckpt's path."""
    made: dict = {}
    before = ZooTask.on_train_start

    def remember(task):
        made["task"], made["trainer"] = task, task.trainer
        before(task)

    monkeypatch.setattr(ZooTask, "on_train_start", remember)

    def run(*arguments, steps=2):
        lightning(
            *("fit", "--config", CONFIGS / "lm" / "stdlib_damcha.yaml", *tiny_arguments),
            *("--trainer.max_steps", steps, "--trainer.limit_val_batches", 1, "--trainer.val_check_interval", 1),
            *("--trainer.check_val_every_n_epoch", "null", *arguments),
        )
        trainer = made["trainer"]
        last = next(c.last_model_path for c in trainer.callbacks if isinstance(c, ModelCheckpoint))
        return made["task"], trainer.optimizers[0], trainer.lr_scheduler_configs, last

    return run


def test_adamw_and_its_schedule_are_the_default(fit):
    _, optimizer, (schedule,), last = fit()
    assert type(optimizer) is torch.optim.AdamW
    assert {group["initial_lr"] for group in optimizer.param_groups} == {6e-3}
    assert schedule.interval == "step"
    assert "optimizer" not in read_checkpoint(last)["zoo"]


def test_another_optimizer_trains_and_goes_on(fit, caplog):
    task, optimizer, schedules, last = fit(*SGD, "--optimizer.momentum", "0.9")
    assert type(optimizer) is torch.optim.SGD
    assert [group["lr"] for group in optimizer.param_groups] == [0.1]
    assert len(optimizer.param_groups[0]["params"]) == len(list(task.parameters()))
    assert schedules == []
    assert "--optimizer: takes the place of model.lr" in caplog.text
    _, optimizer, _, newest = fit(*SGD, "--optimizer.momentum", "0.9", "--ckpt_path", last, steps=4)
    assert read_checkpoint(newest)["global_step"] == 4
    assert all("momentum_buffer" in state for state in optimizer.state.values())


def test_a_scheduler_goes_with_an_optimizer_or_takes_the_place_of_adamws(fit):
    for arguments, kind in (((*SGD, *COSINE), torch.optim.SGD), (COSINE, torch.optim.AdamW)):
        _, optimizer, (schedule,), _ = fit(*arguments)
        assert type(optimizer) is kind
        assert type(schedule.scheduler) is torch.optim.lr_scheduler.CosineAnnealingLR
        assert schedule.interval == "epoch"


def test_a_plateau_is_watched_for_by_its_monitor(fit):
    _, _, (schedule,), _ = fit(*SGD, "--lr_scheduler", "ReduceLROnPlateau", "--lr_scheduler.monitor", "train/loss")
    assert (schedule.monitor, schedule.reduce_on_plateau) == ("train/loss", True)


def test_only_what_is_trained_is_given_to_another_optimizer(fit, trained):
    shape = ("--model.pretrained", trained, "--data.tokenizer", trained, "--model.max_len", 1024)
    task, optimizer, _, _ = fit(*SGD, *shape, "--model.train", "head")
    (group,) = optimizer.param_groups
    assert {id(p) for p in group["params"]} == {id(p) for p in task.network.head.parameters()}
    task, optimizer, _, _ = fit(*SGD, *shape, "--model.lora_rank", 2)
    given = {id(p) for p in optimizer.param_groups[0]["params"]}
    assert given == {id(p) for p in task.network.parameters() if p.requires_grad}
    assert len(given) < len(list(task.network.parameters()))


def test_layer_decay_lowers_another_optimizers_rate_from_block_to_block(fit):
    task, optimizer, _, _ = fit(*SGD, *COSINE, "--model.layer_decay", "0.5")
    rates = {id(p): group["initial_lr"] for group in optimizer.param_groups for p in group["params"]}
    found = {name: rates[id(p)] for name, p in task.network.named_parameters()}
    assert found["head.weight"] == pytest.approx(0.1)
    assert found["decoder.layers.1.norm1.weight"] == pytest.approx(0.05)
    assert found["embedding.weight"] == pytest.approx(0.1 * 0.5**3)


def test_a_run_keeps_the_optimizer_it_began_with(fit, capfd):
    _, _, _, last = fit(*SGD)
    for other in ((), ("--optimizer", "SGD", "--optimizer.lr", "0.2"), (*SGD, *COSINE)):
        with pytest.raises(SystemExit):
            fit(*other, "--ckpt_path", last, steps=4)
        said = capfd.readouterr().err.splitlines()[-1]
        assert said.startswith("error: checkpoint: --")
        assert "A run goes on with the settings it had" in said


def test_an_optimizer_that_lacks_something_is_refused_in_a_line(fit, capfd):
    with pytest.raises(SystemExit):
        fit("--optimizer", "SGD", "--optimizer.nesterov", "true")
    assert "--optimizer: got torch.optim.SGD, which can't be made" in capfd.readouterr().err


def test_a_rate_finder_finds_another_optimizers_rate(fit):
    finder = ("--trainer.callbacks+=LearningRateFinder", "--trainer.callbacks.num_training_steps=20")
    task, optimizer, _, _ = fit(*SGD, *finder, "--trainer.logger=true", steps=3)
    assert task.lr != 0.1
    assert [group["lr"] for group in optimizer.param_groups] == [pytest.approx(task.lr)]
    assert task.settings["lr"] == 6e-3, "AdamW's stays"


def test_help_lists_optimizers_and_schedulers(lightning, capfd):
    with pytest.raises(SystemExit):
        lightning("fit", "--optimizer.help", "SGD")
    assert "--optimizer.momentum" in capfd.readouterr().out


# ---------------------------------------------------------------------- factors that an attention says


@pytest.fixture
def steps_rates():
    """The learning rates of all groups at every step of every optimizer, the smallest first."""
    found = []
    hook = register_optimizer_step_pre_hook(
        lambda optimizer, args, kwargs: found.append(sorted({group["lr"] for group in optimizer.param_groups}))
    )
    yield found
    hook.remove()


def assert_generator_is_slow(task, optimizer, height):
    """Every parameter is in a group, the generator's at a tenth of the learning rate."""
    rates = {id(p): group.get("initial_lr", group["lr"]) for group in optimizer.param_groups for p in group["params"]}
    found = {name: rates.pop(id(p)) for name, p in task.network.named_parameters()}
    assert rates == {}
    for name, lr in found.items():
        assert lr == pytest.approx(height * (0.1 if ".shared_mlp." in name else 1)), name


def test_a_generators_factor_holds_at_every_step_of_a_run_and_when_it_goes_on(fit, steps_rates, capfd):
    task, optimizer, _, last = fit(*SLOW, "--trainer.log_every_n_steps", 1)
    assert_generator_is_slow(task, optimizer, 6e-3)
    monitor = next(c for c in task.trainer.callbacks if isinstance(c, LearningRateMonitor))
    assert len(monitor.lrs) == len(optimizer.param_groups) == 4, "with decay and without, each at two rates"
    assert sorted({group[-1] for group in monitor.lrs.values()}) == pytest.approx(steps_rates[-1])
    task, optimizer, _, _ = fit("--ckpt_path", last, steps=4)
    assert task.settings["generator_lr_factor"] == 0.1, "a run keeps it"
    assert_generator_is_slow(task, optimizer, 6e-3)
    assert len(steps_rates) == 4
    assert all(low == pytest.approx(0.1 * high) for low, high in steps_rates)
    with pytest.raises(SystemExit):
        fit("--model.generator_lr_factor", "0.5", "--ckpt_path", last, steps=4)
    assert "model.generator_lr_factor: 0.1 in the checkpoint, 0.5 here" in capfd.readouterr().err


def test_a_chosen_optimizer_honours_a_generators_factor_and_goes_on_with_it(fit, steps_rates):
    task, optimizer, _, last = fit(*SGD, *COSINE, *SLOW)
    assert_generator_is_slow(task, optimizer, 0.1)
    task, optimizer, _, _ = fit(*SGD, *COSINE, "--ckpt_path", last, steps=4)
    assert_generator_is_slow(task, optimizer, 0.1)
    assert len(steps_rates) == 4
    assert all(low == pytest.approx(0.1 * high) for low, high in steps_rates)


def test_a_rate_finder_searches_and_goes_on_with_a_generators_factor(fit, steps_rates):
    finder = ("--trainer.callbacks+=LearningRateFinder", "--trainer.callbacks.num_training_steps=20")
    task, optimizer, _, _ = fit(*SGD, *SLOW, *finder, "--trainer.logger=true", steps=3)
    assert task.lr != 0.1
    assert_generator_is_slow(task, optimizer, task.lr)
    assert len(steps_rates) > 3, "the search's steps too"
    assert all(low == pytest.approx(0.1 * high) for low, high in steps_rates)


def test_a_schedule_that_undoes_factors_is_told(fit):
    cycle = ("--lr_scheduler", "OneCycleLR", "--lr_scheduler.max_lr", "0.1", "--lr_scheduler.total_steps", "4")
    with pytest.warns(UserWarning, match="--lr_scheduler: OneCycleLR sets one rate for all parameters"):
        fit(*cycle, *SLOW)
