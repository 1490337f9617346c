"""Which runs a study consists of: what is tuned first, and what is confirmed once that is known."""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from zoo.study.description import AGAIN, Arm, Match, Study

NEAR = 0.02
"""Arms whose steps take as long as the reference's, but for this share, get as many: clocks are no better than that."""

BATCHES = 100
"""Of how many batches, at the most, the digest of a run's data is."""

Stage = Literal["tune", "confirm"]


@dataclass(frozen=True)
class Measure:
    """What an arm costs, and what that is beside the reference, as ``measuring`` found it.

    Args:
        parameters: of its network.
        sizes: the value of the size setting that makes it as large as a target, by the target; None where none does.
        sized: how many parameters it then has.
        step_seconds: of one training step.
        ratio: the median, over rounds, of that by the reference's, measured in turn with it; low, high: its quartiles.
        operations: of a training step (FLOPs), as PyTorch counts them; None where it can't.
        memory: bytes that a training step needs at its peak, beyond what the model holds before.
        generation_ratio: as ``ratio``, of writing a text; None for what writes none.
        generation_memory: bytes that it needs at its peak.
        items: how many tokens, pictures or rows a batch has.
        unit: which of them.
        load: how many processes wanted to run before, on average over a minute.
        machine: what it was measured on.
    """

    parameters: int
    sizes: Mapping[str, float | None] = field(default_factory=dict)
    sized: Mapping[str, int] = field(default_factory=dict)
    step_seconds: float = math.nan
    ratio: float = math.nan
    low: float = math.nan
    high: float = math.nan
    operations: int | None = None
    memory: int | None = None
    generation_ratio: float | None = None
    generation_memory: int | None = None
    items: int = 0
    unit: str = "rows"
    load: float = math.nan
    machine: str = ""


@dataclass(frozen=True)
class Outcome:
    """What a run came to.

    Args:
        status: done, diverged or failed.
        value: the figure; the worst there is where it diverged.
        figures: everything that was logged at the end.
        seconds: how long it took.
        batches: digest of the first batches it trained on; empty where none was taken.
        folder: where its log is.
        error: what it ended with, in one line.
        versions: what it was run with.
    """

    status: Literal["done", "diverged", "failed"]
    value: float
    figures: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    batches: str = ""
    folder: str = ""
    error: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """One run of one arm: its settings, learning rate, seed and steps decide its key, and nothing else does."""

    key: str
    arm: str
    stage: Stage
    settings: Mapping[str, Any]
    config: str
    command: tuple[str, ...] | None
    lr: float
    seed: int
    steps: int
    validations: int

    def arguments(self, lr_setting: str, figure: str, better: str, folder: str) -> list[str]:
        """Those of ``lightning`` for this run."""
        version = {"save_dir": folder, "name": "runs", "version": self.key}
        logger = {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": version}
        best = {"filename": "best", "monitor": f"val/{figure}", "mode": "min" if better == "lower" else "max"}
        keeper = {"class_path": "zoo.callbacks.BestAndLastCheckpoint", "init_args": best}
        return [
            *("fit", "--config", self.config, "--seed_everything", str(self.seed)),
            *as_arguments(self.settings),
            *as_arguments(
                {
                    lr_setting: self.lr,
                    "trainer.max_steps": self.steps,
                    "trainer.max_epochs": -1,
                    "trainer.val_check_interval": max(1, math.ceil(self.steps / self.validations)),
                    "trainer.check_val_every_n_epoch": None,
                    "trainer.enable_progress_bar": False,
                    "trainer.enable_model_summary": False,
                    "trainer.logger": logger,
                    "trainer.callbacks": [keeper],
                }
            ),
        ]

    def words(self) -> list[str]:
        """Those of a command arm."""
        found = {"{lr}": repr(self.lr), "{seed}": str(self.seed), "{steps}": str(self.steps)}
        words = list(self.command or ())
        for name, value in found.items():
            words = [word.replace(name, value) for word in words]
        return words


def as_arguments(settings: Mapping[str, Any]) -> list[str]:
    """Settings by dotted names as arguments of a command line."""
    return [part for name, value in settings.items() for part in (f"--{name}", as_word(value))]


def as_word(value: object) -> str:
    """A value as one word of a command line: YAML reads it back."""
    return value if isinstance(value, str) else json.dumps(value)


@dataclass(frozen=True)
class Variant:
    """An arm as it goes into one comparison.

    Args:
        settings: the arm's, with what matching changed.
        steps: of its runs.
        note: what matching did, or why the arm can't be in this comparison.
        out: whether it can't.
    """

    settings: Mapping[str, Any]
    steps: int
    note: str = ""
    out: bool = False


@dataclass
class Tuning:
    """What an arm's tuning has come to so far.

    Args:
        means: mean figure of every learning rate, over the tuning seeds; what is not finished yet is not there.
        added: the rates that were added to the list.
        best: the chosen one; None while it isn't known, or if there is none.
        at_edge: whether it lies at an end of the list, which was not extended any further.
        hopeless: whether every run diverged.
    """

    means: dict[float, float] = field(default_factory=dict)
    added: list[float] = field(default_factory=list)
    best: float | None = None
    at_edge: bool = False
    hopeless: bool = False
    missing: list[float] = field(default_factory=list)


class Plan:
    """A study, what was measured of its arms, and what its runs have come to: what is still to be run.

    It is a function of these three alone, so that a study that was killed goes on as if it had not been, and two
    processes that work on one study agree.
    """

    def __init__(self, study: Study, measures: Mapping[str, Measure], outcomes: Mapping[str, Outcome]) -> None:
        self.study, self.measures, self.outcomes = study, measures, outcomes

    # ------------------------------------------------------------------ tuning

    def tuning(self, arm: Arm) -> Tuning:
        """How far an arm's tuning is."""
        p, found = self.study.protocol, Tuning()
        rates = sorted(p.lrs)
        while True:
            for lr in rates:
                if lr not in found.means:
                    values = [self._value(self.tuning_run(arm, lr, seed)) for seed in p.tuning_seeds]
                    if any(value is None for value in values):
                        found.missing.append(lr)
                    else:
                        found.means[lr] = sum(v for v in values if v is not None) / len(values)
            if found.missing:
                return found
            found.hopeless = not any(math.isfinite(value) for value in found.means.values())
            best = min(rates) if found.hopeless else self._best(found.means)
            edge = best in (rates[0], rates[-1])
            if not edge or len(found.added) >= p.extensions or len(rates) < 2:
                found.best, found.at_edge = (None if found.hopeless else best), edge
                return found
            new = rates[0] ** 2 / rates[1] if best == rates[0] else rates[-1] ** 2 / rates[-2]
            new = float(f"{new:.6g}")
            found.added.append(new)
            rates = sorted([*rates, new])

    def _best(self, means: Mapping[float, float]) -> float:
        sign = 1 if self.study.protocol.better == "lower" else -1
        return min(means, key=lambda lr: (sign * means[lr], lr))

    def tuning_run(self, arm: Arm, lr: float, seed: int) -> Run:
        """A short run of an arm."""
        return self._run(arm, "tune", arm.settings, lr, seed, self.study.protocol.tuning_steps)

    # ------------------------------------------------------------------ matching

    def target(self) -> int:
        """How many parameters arms are matched at."""
        return self.study.protocol.parameters or self.measures[self.study.protocol.reference].parameters

    def variant(self, arm: Arm, match: Match) -> Variant:
        """An arm as it goes into a comparison."""
        p = self.study.protocol
        if match == "steps":
            return Variant(arm.settings, p.steps)
        if arm.command is not None:
            return Variant(arm.settings, p.steps, f"a command, which the study can't match at equal {match}", out=True)
        measure = self.measures[arm.name]
        if match == "time":
            if abs(measure.ratio - 1) <= NEAR:
                return Variant(arm.settings, p.steps, f"a step takes {measure.ratio:.2f} x the reference's: as many")
            steps = max(1, round(p.steps / measure.ratio))
            return Variant(arm.settings, steps, f"a step takes {measure.ratio:.2f} x the reference's: {steps:,} steps")
        target = self.target()
        if abs(measure.parameters - target) <= 0.01 * target:
            return Variant(arm.settings, p.steps, f"{measure.parameters:,} parameters as it is")
        size = measure.sizes.get(str(target))
        if size is None:
            return Variant(
                arm.settings,
                p.steps,
                f"no {p.size_setting} gives {target:,} parameters; it has {measure.parameters:,}",
                out=True,
            )
        note = f"{p.size_setting} {size:g}: {measure.sized[str(target)]:,} parameters"
        return Variant({**arm.settings, p.size_setting: size}, p.steps, note)

    # ------------------------------------------------------------------ confirming

    def confirming_run(self, arm: Arm, variant: Variant, lr: float, seed: int) -> Run:
        """A run of an arm at full budget."""
        return self._run(arm, "confirm", variant.settings, lr, seed, variant.steps)

    def again_seeds(self) -> list[int]:
        """The A/A arm's seeds: others than those of all other runs."""
        p = self.study.protocol
        first = max((*p.seeds, *p.tuning_seeds)) + 1
        return [first + i for i in range(len(p.seeds))]

    def confirming(self, arm: Arm, match: Match, again: bool = False) -> list[Run]:
        """The runs of an arm in a comparison, in the order of the seeds; none while its learning rate isn't known."""
        tuning, variant = self.tuning(arm), self.variant(arm, match)
        if tuning.best is None or variant.out:
            return []
        seeds = self.again_seeds() if again else self.study.protocol.seeds
        return [self.confirming_run(arm, variant, tuning.best, seed) for seed in seeds]

    # ------------------------------------------------------------------ all

    def pending(self) -> list[Run]:
        """The runs that can be started now, each once: tuning first, then the seeds one by one over all arms."""
        p, arms = self.study.protocol, list(self.study.arms.values())
        runs: list[Run] = []
        for arm in arms:
            tuning = self.tuning(arm)
            runs += [self.tuning_run(arm, lr, seed) for lr in tuning.missing for seed in p.tuning_seeds]
        for number in range(len(p.seeds)):
            for match in p.matched:
                for arm in arms:
                    runs += self.confirming(arm, match)[number : number + 1]
                if p.again:
                    runs += self.confirming(self.study.reference, match, again=True)[number : number + 1]
        unique = {run.key: run for run in runs}
        return [run for key, run in unique.items() if key not in self.outcomes]

    def expected(self) -> list[Run]:
        """Those that are pending, and those that will be once learning rates are chosen, with one that may be it."""
        p, runs = self.study.protocol, self.pending()
        for arm in self.study.arms.values():
            if self.tuning(arm).best is None and not self.tuning(arm).hopeless:
                lr = sorted(p.lrs)[len(p.lrs) // 2]
                for match in p.matched:
                    variant = self.variant(arm, match)
                    if not variant.out:
                        runs += [self.confirming_run(arm, variant, lr, seed) for seed in p.seeds]
                        if p.again and arm is self.study.reference:
                            runs += [self.confirming_run(arm, variant, lr, seed) for seed in self.again_seeds()]
        return list({run.key: run for run in runs}.values())

    def seconds(self, run: Run) -> float:
        """About how long a run takes: by what runs of its arm took a step, or by what was measured."""
        took = [
            (outcome.seconds, steps)
            for arm, steps, outcome in self._finished()
            if arm == run.arm and outcome.status == "done"
        ]
        if took:
            return run.steps * sum(seconds for seconds, _ in took) / sum(steps for _, steps in took)
        measure = self.measures.get(run.arm)
        step = math.nan if measure is None else measure.step_seconds
        return START_SECONDS + (run.steps * step if math.isfinite(step) else 0.0)

    def _finished(self) -> Iterable[tuple[str, int, Outcome]]:
        for arm in self.study.arms.values():
            tuning = self.tuning(arm)
            for lr in (*tuning.means, *tuning.missing):
                for seed in self.study.protocol.tuning_seeds:
                    run = self.tuning_run(arm, lr, seed)
                    if run.key in self.outcomes:
                        yield arm.name, run.steps, self.outcomes[run.key]

    def _value(self, run: Run) -> float | None:
        outcome = self.outcomes.get(run.key)
        return None if outcome is None else outcome.value

    def _run(self, arm: Arm, stage: Stage, settings: Mapping[str, Any], lr: float, seed: int, steps: int) -> Run:
        p = self.study.protocol
        merged = {**self.study.settings, **settings}
        config = self.study.config_of(arm)
        decides: dict[str, Any] = {"stage": stage, "lr": lr, "seed": seed, "steps": steps, "figure": p.figure}
        if arm.command is not None:
            decides["command"] = list(arm.command)
        else:
            decides |= {"config": self.study.configs[config], "settings": merged, "lr_setting": p.lr_setting}
            decides |= {"validations": p.validations, "better": p.better}
        text = json.dumps(decides, sort_keys=True, separators=(",", ":"))
        key = hashlib.sha256(text.encode()).hexdigest()[:16]
        return Run(key, arm.name, stage, merged, config, arm.command, lr, seed, steps, p.validations)


START_SECONDS = 15.0
"""What a run takes beside its steps, until some have shown it: imports, data, the test."""


def arm_key(study: Study, arm: Arm) -> str:
    """What an arm's size and measure depend on, beside the threads: its config and settings, and the reference's."""
    both = (arm, study.reference)
    of_both = [[study.configs[study.config_of(one)], {**study.settings, **one.settings}] for one in both]
    text = json.dumps([*of_both, study.protocol.size_setting], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def again_name(study: Study) -> str:
    """What the A/A arm is called."""
    return f"{study.protocol.reference} {AGAIN}"
