"""Which runs a study consists of, from its file, what was measured and what has been run."""

import math

import pytest
import yaml

from zoo.errors import ZooError
from zoo.study import Measure, Outcome, Plan, read_study

FILE = {
    "base": "base.yaml",
    "figure": "loss",
    "steps": 300,
    "lrs": [1.0, 2.0, 4.0],
    "seeds": [0, 1],
    "reference": "ours",
    "matched": ["steps"],
    "arms": {"ours": None, "theirs": {"model.n_layers": 1}},
}
MEASURES = {"ours": Measure(1000, ratio=1.0, step_seconds=0.1), "theirs": Measure(1000, ratio=2.0, step_seconds=0.2)}


@pytest.fixture
def study(tmp_path):
    (tmp_path / "base.yaml").write_text("model: {}\n")

    def make(**changes):
        path = tmp_path / "s.yaml"
        path.write_text(yaml.safe_dump({**FILE, **changes}, sort_keys=False))
        return read_study(path)

    return make


def run_all(study, figure, measures=MEASURES, limit=1000):
    """Every run of a study, in order, with figures that a function of the run gives."""
    outcomes, order = {}, []
    while pending := Plan(study, measures, outcomes).pending():
        run = pending[0]
        order.append(run)
        value = figure(run)
        outcomes[run.key] = Outcome("done" if math.isfinite(value) else "diverged", value)
        assert len(order) < limit
    return Plan(study, measures, outcomes), order


def best_at(lr):
    return lambda run: abs(math.log(run.lr / lr)) + run.seed


def test_arms_are_tuned_alike_then_confirmed_with_what_was_chosen(study):
    plan, order = run_all(study(), best_at(2.0))
    tuning, full = [r for r in order if r.stage == "tune"], [r for r in order if r.stage == "confirm"]
    assert [(r.arm, r.lr) for r in tuning] == [(arm, lr) for arm in ("ours", "theirs") for lr in (1.0, 2.0, 4.0)]
    assert {(r.steps, r.seed) for r in tuning} == {(100, 1000)}
    assert {(r.lr, r.steps) for r in full} == {(2.0, 300)}
    # seeds 0 and 1 of both arms, and of the A/A arm seeds that no other run has
    assert [(r.arm, r.seed) for r in full] == [
        ("ours", 0),
        ("theirs", 0),
        ("ours", 1001),
        ("ours", 1),
        ("theirs", 1),
        ("ours", 1002),
    ]
    assert plan.pending() == []


@pytest.mark.parametrize(
    ("best", "added", "chosen", "at_edge"), [(0.5, [0.5, 0.25], 0.5, False), (64, [8, 16], 16, True)]
)
def test_the_list_is_extended_where_the_best_lies_at_its_end(best, added, chosen, at_edge, study):
    plan, _ = run_all(study(extensions=2), best_at(best))
    tuning = plan.tuning(plan.study.reference)
    assert (tuning.added, tuning.best, tuning.at_edge) == (added, chosen, at_edge)


def test_the_list_stays_where_nothing_may_be_added(study):
    plan, _ = run_all(study(extensions=0), best_at(100))
    assert plan.tuning(plan.study.reference).added == []


def test_higher_may_be_better(study):
    plan, _ = run_all(study(better="higher"), lambda run: -best_at(2.0)(run))
    assert plan.tuning(plan.study.reference).best == 2.0


def test_an_arm_that_diverges_everywhere_is_left_and_others_go_on(study):
    plan, order = run_all(study(), lambda run: math.inf if run.arm == "theirs" else best_at(2.0)(run))
    assert plan.tuning(plan.study.arms["theirs"]).hopeless
    assert {r.arm for r in order if r.stage == "confirm"} == {"ours"}
    assert min(r.lr for r in order if r.arm == "theirs") < 1, "lower rates were tried"


def test_adding_or_removing_an_arm_reruns_nothing(study):
    plan, _ = run_all(study(), best_at(2.0))
    more = study(arms={**FILE["arms"], "third": {"model.n_layers": 7}})
    left = Plan(more, {**MEASURES, "third": Measure(1000, ratio=1.0)}, plan.outcomes).pending()
    assert {run.arm for run in left} == {"third"}
    fewer = study(arms={"ours": None})
    assert Plan(fewer, MEASURES, plan.outcomes).pending() == []


def test_seeds_may_be_added_and_steps_change_everything(study):
    plan, _ = run_all(study(again=False), best_at(2.0))
    left = Plan(study(again=False, seeds=[0, 1, 2]), MEASURES, plan.outcomes).pending()
    assert {(run.arm, run.seed) for run in left} == {("ours", 2), ("theirs", 2)}
    assert len(Plan(study(again=False, steps=600), MEASURES, plan.outcomes).pending()) == 6


def test_another_config_is_another_study(study, tmp_path):
    plan, _ = run_all(study(), best_at(2.0))
    given = study()
    (tmp_path / "base.yaml").write_text("model: {a: 1}\n")
    assert {run.key for run in Plan(study(), MEASURES, {}).pending()}.isdisjoint(plan.outcomes)
    assert given.configs != study().configs


def test_at_equal_time_a_slow_arm_gets_fewer_steps_and_an_equal_one_its_runs_at_equal_steps(study):
    given = study(matched=["steps", "time"])
    slow, same = given.arms["theirs"], given.arms["ours"]
    plan = Plan(given, MEASURES, {})
    assert plan.variant(slow, "time").steps == 150
    assert plan.variant(same, "time").steps == 300
    near = Plan(given, {**MEASURES, "theirs": Measure(1000, ratio=1.015)}, {})
    assert near.variant(slow, "time").steps == 300
    _, order = run_all(given, best_at(2.0))
    assert len([r for r in order if r.stage == "confirm"]) == 4 + 2 + 2, "runs that are the same are made once"


def test_at_equal_parameters_the_size_is_what_was_found(study):
    given = study(matched=["parameters"])
    arm = given.arms["theirs"]
    sized = Measure(1500, {"1000": 37}, {"1000": 1003}, ratio=1.0)
    variant = Plan(given, {**MEASURES, "theirs": sized}, {}).variant(arm, "parameters")
    assert variant.settings == {"model.n_layers": 1, "model.d_ff": 37}
    near = Plan(given, {**MEASURES, "theirs": Measure(1009, ratio=1.0)}, {}).variant(arm, "parameters")
    assert near.settings == arm.settings
    none = Plan(given, {**MEASURES, "theirs": Measure(1500, {"1000": None}, {"1000": 1500}, ratio=1.0)}, {})
    assert none.variant(arm, "parameters").out
    assert "no model.d_ff gives 1,000" in none.variant(arm, "parameters").note


def test_arguments_are_those_of_an_ordinary_fit(study):
    run = Plan(study(settings={"data.batch_size": 4}), MEASURES, {}).pending()[-1]
    words = run.arguments("model.lr", "loss", "lower", "out")
    assert words[:3] == ["fit", "--config", run.config]
    pairs = dict(zip(words[1::2], words[2::2], strict=True))
    assert pairs["--data.batch_size"] == "4"
    assert pairs["--trainer.max_steps"] == "100"
    assert pairs["--trainer.val_check_interval"] == "25"
    assert pairs["--trainer.check_val_every_n_epoch"] == "null"
    assert yaml.safe_load(pairs["--trainer.callbacks"])[0]["init_args"]["monitor"] == "val/loss"


def test_a_command_gets_its_rate_seed_and_steps(study):
    arms = {"ours": None, "base": {"command": ["python", "b.py", "--lr={lr}", "{seed}", "{steps}"]}}
    run = next(r for r in Plan(study(arms=arms), MEASURES, {}).pending() if r.arm == "base")
    assert run.words() == ["python", "b.py", "--lr=1.0", "1000", "100"]


WRONG = {
    "no arms": ({"arms": None}, "arms: got None"),
    "unknown": ({"colour": 1}, "study: got 'colour'"),
    "reference": ({"reference": "nobody"}, "reference: got 'nobody'; must be one of the arms, ours, theirs"),
    "base": ({"base": "nowhere.yaml"}, "base: there is no file nowhere.yaml"),
    "steps": ({"steps": 0}, "steps: got 0; must be at least 1"),
    "type": ({"steps": "many"}, "study.steps: got 'many'; must be a whole number"),
    "rates": ({"lrs": [1.0, -1.0]}, "lrs: got .*; must be positive"),
    "twice": ({"seeds": [1, 1]}, "seeds: got .*; give two or more, each once"),
    "both": ({"tuning_seeds": [0]}, "tuning_seeds: got 0, which is one of seeds too"),
    "match": ({"matched": ["colour"]}, "study.matched.0: got 'colour'; must be steps or parameters or time"),
    "own": ({"arms": {"ours": {"model.lr": 1}}}, "arms.ours.model.lr: the study sets it itself"),
    "name": ({"arms": {"ours": {"lr": 1}}}, "arms.ours: got 'lr'; settings have dotted names"),
    "figure": ({"figure": "val/loss"}, "figure: got 'val/loss'; name it without val/"),
    "command": ({"arms": {"ours": None, "b": {"command": "x"}}}, "arms.b.command: got 'x'; give a list of words"),
    "both kinds": (
        {"arms": {"ours": None, "b": {"command": ["x"], "model.a": 1}}},
        "arms.b: has settings beside a command",
    ),
    "again": ({"arms": {"ours": None, "ours again": None}}, "arms: ours again is the A/A arm's name"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_study_without_sense_is_refused_in_one_line(name, study):
    changes, message = WRONG[name]
    with pytest.raises(ZooError, match=message) as refused:
        study(**changes)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("text", ["[1, 2]", "a: [", "just words"])
def test_a_file_that_is_no_study_is_refused(text, tmp_path):
    (tmp_path / "s.yaml").write_text(text)
    with pytest.raises(ZooError, match="STUDY: "):
        read_study(tmp_path / "s.yaml")
