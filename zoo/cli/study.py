"""``zoo study``: running, reporting and printing."""

import argparse
import signal
import sys
from pathlib import Path
from typing import NoReturn

from zoo.errors import ZooError
from zoo.study.description import Study, read_study
from zoo.study.plan import Measure, Plan
from zoo.study.report import text, write_report
from zoo.study.running import Runner, command_line, duration
from zoo.study.storage import Storage, storage_url


def study(chosen: argparse.Namespace) -> None:
    """Do what the arguments of ``zoo study`` say.

    Raises:
        ZooError: for a study that makes no sense, or settings that an arm can't have.
        SystemExit: 1 if runs failed.
    """
    for name in ("jobs", "threads"):
        value = getattr(chosen, name)
        if value is not None and value < 1:
            raise ZooError(f"--{name}: got {value}; must be at least 1")
    given = read_study(chosen.study)
    folder = Path(chosen.out or Path("runs") / "studies" / given.name)
    if folder.exists() and not folder.is_dir():
        raise ZooError(f"--out: {folder} is a file; name a folder")
    if chosen.report and not folder.is_dir() and chosen.storage is None:
        raise ZooError(f"--report: there is no {folder}; run the study first, or name its folder with --out")
    folder.mkdir(parents=True, exist_ok=True)
    storage = Storage(storage_url(folder, chosen.storage), given.name)
    runner = Runner(given, folder, storage, chosen.jobs, chosen.threads, tell=_tell)
    if chosen.dry_run:
        _dry_run(given, runner)
        return
    if chosen.report:
        measures = runner.measures_known()
        if given.reference.command is None and given.reference.name not in measures:
            raise ZooError("--report: nothing was measured or run yet; run the study first")
        _report(Plan(given, measures, storage.outcomes()), folder, runner)
        return
    signal.signal(signal.SIGTERM, _stop)
    try:
        plan = runner.run()
    except KeyboardInterrupt:
        print("error: zoo study was told to stop; the same command goes on with it", file=sys.stderr)
        raise SystemExit(130) from None
    _report(plan, folder, runner)
    if runner.failed:
        raise SystemExit(1)


def _stop(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def _tell(line: str) -> None:
    print(line, flush=True)


def _report(plan: Plan, folder: Path, runner: Runner) -> None:
    written = write_report(plan, folder, runner.failed)
    print(f"\n{text(plan, runner.failed)}\n\nWritten: {', '.join(str(path) for path in written)}")


def _dry_run(given: Study, runner: Runner) -> None:
    measures = runner.measures()
    plan = Plan(given, measures, runner.storage.outcomes())
    runs = plan.expected()
    for run in runs:
        measure = measures.get(run.arm, Measure(0))
        size = f"{measure.parameters:,} parameters, " if measure.parameters else ""
        line = command_line(runner.arguments(run)) if run.command is None else " ".join(run.words())
        print(f"# {run.arm}, {run.stage}, seed {run.seed}: {size}about {duration(plan.seconds(run))}\n{line}")
    total = sum(map(plan.seconds, runs)) / runner.jobs
    done = len(runner.storage.outcomes())
    print(f"# {len(runs)} runs, about {duration(total)} with {runner.jobs} at once; {done} are done")
    print("# full runs stand with a learning rate of the list; the one that tuning chooses takes its place")
