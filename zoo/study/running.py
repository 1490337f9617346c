"""Running a study: what is due is taken run by run, each a process of its own, until nothing is left."""

import json
import math
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from zoo.errors import ZooError
from zoo.study.description import Arm, Study
from zoo.study.plan import Measure, Outcome, Plan, Run, arm_key, as_arguments
from zoo.study.storage import RunFailed, Storage, worst

WAIT_SECONDS = 2.0
"""How long to wait before looking again, where all that is left is being run by others."""

WORKER = (sys.executable, "-m", "zoo.cli.worker")


@dataclass
class Runner:
    """Runs a study.

    Args:
        study: what to run.
        folder: where logs go, a folder a run.
        storage: where figures go.
        jobs: how many runs at once.
        threads: threads of each; None leaves that to PyTorch.
        tell: is given a line for everything that happens.
    """

    study: Study
    folder: Path
    storage: Storage
    jobs: int = 1
    threads: int | None = None
    tell: Callable[[str], None] = print
    failed: dict[str, Outcome] = field(default_factory=dict)
    known: dict[str, Measure] = field(default_factory=dict)
    _children: set[subprocess.Popen[bytes]] = field(default_factory=set)
    _stopping: bool = False

    # ------------------------------------------------------------------ measuring

    def measures(self) -> dict[str, Measure]:
        """What arms are beside the reference, by name; what isn't known yet is measured, one arm at a time.

        Raises:
            ZooError: naming the arm, if its settings are refused.
        """
        known, found = self.storage.measures(), {}
        for arm in self.study.arms.values():
            if arm.command is not None:
                continue
            key = f"{arm_key(self.study, arm)}@{self.threads}"
            if key not in known:
                self.tell(f"measuring {arm.name}")
                asked = {"do": "measure", "arm": arm.name, "fit": fit_arguments(self.study, arm)}
                asked["reference"] = fit_arguments(self.study, self.study.reference)
                self.storage.keep_measure(key, Measure(**self.ask(asked, self.environment())))
                known = self.storage.measures()
            found[arm.name] = known[key]
        if "parameters" in self.study.protocol.matched:
            target = Plan(self.study, found, {}).target()
            for arm in self.study.arms.values():
                if arm.name in found:
                    found[arm.name] = self._sized(arm, found[arm.name], target)
        return found

    def measures_known(self) -> dict[str, Measure]:
        """What is in the storage of them, whatever the number of threads."""
        known, found = self.storage.measures(), {}
        for arm in self.study.arms.values():
            prefix = f"{arm_key(self.study, arm)}@"
            for key in (f"{prefix}{self.threads}", *(key for key in known if key.startswith(prefix))):
                if key in known:
                    found[arm.name] = known[key]
                    break
        if self.study.protocol.reference in found and "parameters" in self.study.protocol.matched:
            target = Plan(self.study, found, {}).target()
            for arm in self.study.arms.values():
                sized = known.get(f"{arm_key(self.study, arm)}:{target}")
                if sized is not None and arm.name in found:
                    found[arm.name] = replace(found[arm.name], sizes=sized.sizes, sized=sized.sized)
        return found

    def _sized(self, arm: Arm, measure: Measure, target: int) -> Measure:
        """A measure that knows the size that makes an arm as large as the target."""
        if abs(measure.parameters - target) <= 0.01 * target:
            return measure
        key = f"{arm_key(self.study, arm)}:{target}"
        known = self.storage.measures()
        if key not in known:
            self.tell(f"sizing {arm.name} to {target:,} parameters")
            found = self.ask(
                {
                    "do": "size",
                    "arm": arm.name,
                    "fit": fit_arguments(self.study, arm),
                    "setting": self.study.protocol.size_setting,
                    "target": target,
                },
                self.environment(),
            )
            number = found["parameters"]
            self.storage.keep_measure(key, Measure(number, {str(target): found["size"]}, {str(target): number}))
            known = self.storage.measures()
        return replace(measure, sizes=known[key].sizes, sized=known[key].sized)

    # ------------------------------------------------------------------ running

    def run(self) -> Plan:
        """Run all that is due.

        Returns:
            The plan, with nothing left to do but what failed.
        """
        measures = self.known = self.measures()
        plan = Plan(self.study, measures, self.storage.outcomes())
        total = len(plan.expected())
        if total:
            left = sum(plan.seconds(run) for run in plan.expected()) / self.jobs
            self.tell(f"{total} runs to do, about {duration(left)}")
        errors: list[BaseException] = []

        def work() -> None:
            try:
                self._work(self.storage.another(), measures)
            except BaseException as error:  # of a thread: raised again below
                errors.append(error)
                self._stopping = True

        threads = [threading.Thread(target=work, daemon=True) for _ in range(self.jobs)]
        try:
            for thread in threads:
                thread.start()
            while any(thread.is_alive() for thread in threads):
                for thread in threads:
                    thread.join(timeout=0.2)
        except BaseException:
            self._stopping = True
            self._end_children()
            for thread in threads:
                thread.join(timeout=30)
            raise
        if errors:
            raise errors[0]
        return Plan(self.study, measures, self.storage.outcomes())

    def _work(self, storage: Storage, measures: Mapping[str, Measure]) -> None:
        waited = False
        while not self._stopping:
            plan = Plan(self.study, measures, storage.outcomes())
            due = {run.key: run for run in plan.pending() if run.key not in self.failed}
            if not due:
                return
            elsewhere = storage.running()
            free = [run for key, run in due.items() if key not in elsewhere]
            if not free:
                if not waited:
                    self.tell(f"waiting for {len(due)} runs of other processes")
                waited = True
                time.sleep(WAIT_SECONDS)
                continue
            waited = False
            try:
                storage.take(free[0], partial(self._execute, storage), due)
            except RunFailed as error:
                self.failed[self._key_of(error.outcome)] = error.outcome

    def _key_of(self, outcome: Outcome) -> str:
        return Path(outcome.folder).name.partition("-")[0]

    def _execute(self, storage: Storage, run: Run, number: int) -> Outcome:
        p = self.study.protocol
        folder = self.folder / "runs" / run.key
        if folder.exists():  # of an attempt that was cut off, whose process may not have noticed yet
            folder = folder.with_name(f"{run.key}-{number}")
        what = f"{run.arm}, {'tuning' if run.stage == 'tune' else 'seed ' + str(run.seed)}, lr {run.lr:g}"
        folder.mkdir(parents=True, exist_ok=True)
        start = time.monotonic()
        with open(folder / "log.txt", "wb") as log:
            if run.command is None:
                arguments = self.arguments(run, folder.name)
                (folder / "command.txt").write_text(command_line(arguments) + "\n", encoding="utf-8")
                task = {
                    "do": "run",
                    "fit": arguments,
                    "test": run.stage == "confirm",
                    "keep": p.keep_checkpoints,
                    "folder": str(folder),
                }
                code = self._process([*WORKER], task, log)
                found = read_json(folder / "result.json")
            else:
                (folder / "command.txt").write_text(shlex.join(run.words()) + "\n", encoding="utf-8")
                code = self._process(run.words(), None, log)
                found = _last_json(folder / "log.txt") if code == 0 else None
        seconds = time.monotonic() - start
        outcome = self._outcome(run, code, found, seconds, folder)
        self._tell_end(run, what, outcome, storage)
        return outcome

    def arguments(self, run: Run, folder_name: str | None = None) -> list[str]:
        """Those of ``lightning`` for a run of this study."""
        p = self.study.protocol
        made = run.arguments(p.lr_setting, p.figure, p.better, str(self.folder))
        if folder_name is not None and folder_name != run.key:
            made = [word.replace(f'"version": "{run.key}"', f'"version": "{folder_name}"') for word in made]
        return made

    def _outcome(self, run: Run, code: int, found: Any, seconds: float, folder: Path) -> Outcome:
        p, bad = self.study.protocol, worst(self.study.protocol.better == "lower")
        start = Outcome("failed", math.nan, seconds=seconds, folder=str(folder))
        if isinstance(found, dict):
            start = replace(start, batches=found.get("batches", ""), versions=found.get("versions", {}))
            if found.get("diverged"):
                return replace(start, status="diverged", value=bad, error=str(found["diverged"]))
        if code or not isinstance(found, dict):
            return replace(start, error=last_line(folder / "log.txt") or f"ended with {code} and said nothing")
        figures = {name: float(value) for name, value in found["figures"].items()}
        start = replace(start, figures=figures)
        name = f"{'test' if run.stage == 'confirm' else 'val'}/{p.figure}"
        if name not in figures:
            there = ", ".join(sorted(figures)) or "none"
            return replace(start, error=f"figure: {name} is not among those of the run, {there}")
        if not math.isfinite(figures[name]):
            return replace(start, status="diverged", value=bad, error=f"{name} is no finite number")
        return replace(start, status="done", value=figures[name])

    def _tell_end(self, run: Run, what: str, outcome: Outcome, storage: Storage) -> None:
        plan = Plan(self.study, self.known, storage.outcomes())
        left = [r for r in plan.expected() if r.key != run.key and r.key not in self.failed]
        came_to = f"{self.study.protocol.figure} {outcome.value:.4f}" if outcome.status == "done" else outcome.status
        if outcome.status == "failed":
            came_to = f"failed: {outcome.error}; see {Path(outcome.folder) / 'log.txt'}"
        ahead = f"{len(left)} left, about {duration(sum(map(plan.seconds, left)) / self.jobs)}" if left else "none left"
        self.tell(f"{what}: {came_to} ({duration(outcome.seconds)}); {ahead}")

    # ------------------------------------------------------------------ processes

    def environment(self) -> dict[str, str]:
        """That of a run's process."""
        found = dict(os.environ)
        if self.threads is not None:
            found |= {"OMP_NUM_THREADS": str(self.threads), "MKL_NUM_THREADS": str(self.threads)}
        return found

    def ask(self, task: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
        """Let a process of its own measure something, and say what it found.

        Raises:
            ZooError: with what it ended with.
        """
        out = self.folder / f".{task['do']}-{os.getpid()}-{threading.get_ident()}.json"
        log = out.with_suffix(".txt")
        out.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(log, "wb") as file:
                code = self._process([*WORKER], {**task, "out": str(out)}, file, environment)
            found = read_json(out)
            if code or found is None:
                line = last_line(log) or f"ended with {code} and said nothing"
                raise ZooError(f"arms.{task['arm']}: {line.removeprefix('error: ')}")
            return found
        finally:
            for path in (out, log):
                path.unlink(missing_ok=True)

    def _process(
        self, words: list[str], task: Mapping[str, Any] | None, log: Any, environment: Mapping[str, str] | None = None
    ) -> int:
        """Run a program to its end; a worker ends with this process, whose end it sees in its standard input."""
        if self._stopping:
            raise KeyboardInterrupt
        try:
            child = subprocess.Popen(
                words,
                stdin=subprocess.PIPE if task is not None else subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=dict(environment or self.environment()),
                start_new_session=True,  # Ctrl-C is this process's to handle
            )
        except OSError as error:
            log.write(f"can't run {words[0]}: {error.strerror}\n".encode())
            return 127
        self._children.add(child)
        try:
            if task is not None and child.stdin is not None:
                child.stdin.write((json.dumps(task) + "\n").encode())
                child.stdin.flush()
            return child.wait()
        except BrokenPipeError:
            return child.wait()
        finally:
            self._children.discard(child)
            if child.stdin is not None:
                child.stdin.close()
            if child.poll() is None:
                child.kill()
            if self._stopping:
                raise KeyboardInterrupt

    def _end_children(self) -> None:
        for child in list(self._children):
            try:
                os.killpg(child.pid, signal.SIGTERM)
            except (ProcessLookupError, PermissionError):
                continue


# ---------------------------------------------------------------------- in words


def fit_arguments(study: Study, arm: Arm) -> list[str]:
    """The arguments of ``lightning`` that make an arm's model and data."""
    return ["fit", "--config", study.config_of(arm), *as_arguments({**study.settings, **arm.settings})]


def command_line(arguments: list[str]) -> str:
    """A command that a person can repeat."""
    return shlex.join(["lightning", *arguments])


def duration(seconds: float) -> str:
    """Seconds in words."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


def read_json(path: Path) -> Any:
    """What a JSON file holds; None if there is none, or no whole one."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def last_line(path: Path) -> str:
    """The last line of a log that says something; an error's, if there is one."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    return (errors or lines or [""])[-1][:300]


def _last_json(path: Path) -> Any:
    """The figures that a command printed as its last line."""
    try:
        found = json.loads(last_line(path))
    except ValueError:
        return None
    numbers = isinstance(found, dict) and all(isinstance(v, (int, float)) for v in found.values())
    return {"figures": found} if numbers else None
