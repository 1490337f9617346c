"""How the benchmarks measure: interleaved runs, ratios within each round, and peak memory in a process of its own."""

import gc
import json
import multiprocessing
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from zoo.study.measuring import Step, interleaved, peak_of, processor

Build = Callable[[str], Step]  # from a device to what is measured


@dataclass(frozen=True)
class Aim:
    """``at_least`` times as fast as the baseline, or ``at_most`` times its time; of memory likewise."""

    baseline: str
    at_least: float | None = None
    at_most: float | None = None
    memory_at_most: float | None = None


@dataclass(frozen=True)
class Case:
    """One line of work, done by the zoo and by what a user could take instead.

    ``builds`` makes each contender; the first is the zoo's. A baseline named with a bar, such as ``kpnn2|4096``, is one
    of several settings of ``kpnn2``, of which the fastest counts.
    """

    name: str
    work: str
    builds: Mapping[str, Build]
    aims: Sequence[Aim] = ()
    rounds: int | None = None  # more or fewer than asked for
    memory: Sequence[str] = ()  # whose peak memory to measure beside the zoo's


@dataclass
class Result:
    name: str
    work: str
    baseline: str
    ratio: float
    low: float
    high: float
    seconds: float
    baseline_seconds: float
    aim: str
    met: bool | None
    memory: float | None = None
    memory_met: bool | None = None
    extra: dict[str, Any] = field(default_factory=dict)


def machine(device: str) -> dict[str, Any]:
    """What the figures were measured on."""
    names = ("torch", "lightning", "timm", "kpnn2", "torch_geometric", "numpy")
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else processor(),
        "threads": torch.get_num_threads(),
        "dtype": "float32",
        "python": platform.python_version(),
        "versions": found,
    }


def run_case(case: Case, rounds: int, device: str) -> list[Result]:
    """Measure a case against every baseline it names."""
    steps = {name: build(device) for name, build in case.builds.items()}
    seconds = interleaved(steps, case.rounds or rounds, device)
    del steps
    gc.collect()
    own_name = next(iter(case.builds))
    own = seconds.pop(own_name)
    best: dict[str, tuple[str, list[float]]] = {}
    for name, times in seconds.items():
        family = name.partition("|")[0]
        if family not in best or statistics.median(times) < statistics.median(best[family][1]):
            best[family] = (name, times)
    aims = {aim.baseline: aim for aim in case.aims}
    memory = {name: peak_memory(case, name, device) for name in (own_name, *case.memory)} if case.memory else {}
    results = []
    for family, (name, times) in best.items():
        # Within each round, so that a busy moment of the machine counts on both sides.
        ratios = [base / mine for base, mine in zip(times, own, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        aim = aims.get(family)
        text, met = "", None
        if aim is not None and aim.at_least is not None:
            text, met = f"{aim.at_least:g} x as fast", middle >= aim.at_least
        elif aim is not None and aim.at_most is not None:
            text, met = f"{aim.at_most:g} x its time", 1 / middle <= aim.at_most
        result = Result(
            case.name, case.work, name.replace("|", ", chunks of "), middle, low, high,
            statistics.median(own), statistics.median(times), text, met,
        )  # fmt: skip
        there = next((m for m in case.memory if m.partition("|")[0] == family), None)
        if there is not None:
            result.memory = memory[own_name] / max(memory[there], 1)
            result.extra = {"bytes": memory[own_name], "baseline_bytes": memory[there]}
            if aim is not None and aim.memory_at_most is not None:
                result.memory_met = result.memory <= aim.memory_at_most
                result.aim += f"; {aim.memory_at_most:g} x its memory"
        results.append(result)
    return results


# ---------------------------------------------------------------------- memory


@cache
def _fresh_processes() -> Any:
    """Processes that have imported everything and run nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["cases"])
    return context


def peak_memory(case: Case, name: str, device: str) -> int:
    """Bytes that one step needs beyond what its contender holds before, in a process of its own."""
    context = _fresh_processes()
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_measure_peak, args=(case.name, name, device, torch.get_num_threads(), send))
    process.start()
    send.close()
    try:
        found: int = receive.recv()
    except EOFError:
        raise RuntimeError(f"{case.name}: {name} ended before it could tell its memory") from None
    finally:
        process.join()
    return found


def _measure_peak(case: str, name: str, device: str, threads: int, send: Any) -> None:
    from cases import CASES, CASES_OF_CURVES

    torch.set_num_threads(threads)
    step = {**CASES, **CASES_OF_CURVES}[case].builds[name](device)
    if device == "cuda":
        step()
    send.send(peak_of(step, device))


# ---------------------------------------------------------------------- output


def table(results: Sequence[Result]) -> str:
    """As Markdown."""
    lines = ["| work | baseline | aim | today | quartiles | memory | met |", "|---|---|---|---|---|---|---|"]
    for r in results:
        by_time = r.aim.partition(";")[0].endswith("time")
        value = f"{1 / r.ratio:.2f} x its time" if by_time else f"{r.ratio:.2f} x as fast"
        quartiles = f"{1 / r.high:.2f} to {1 / r.low:.2f}" if by_time else f"{r.low:.2f} to {r.high:.2f}"
        memory = "" if r.memory is None else f"{r.memory:.2f} x"
        verdicts = [m for m in (r.met, r.memory_met) if m is not None]
        met = "" if not verdicts else "yes" if all(verdicts) else "no"
        lines.append(f"| {r.work} | {r.baseline} | {r.aim} | {value} | {quartiles} | {memory} | {met} |")
    return "\n".join(lines)


def save(path: Path, about: Mapping[str, Any], results: Sequence[Result], curves: Mapping[str, Any]) -> None:
    """Write JSON, and the table beside it; figures of cases that were not run this time stay."""
    old = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    kept = {row["work"] + row["baseline"]: row for row in old.get("results", [])}
    ran = {r.name for r in results}
    kept = {key: row for key, row in kept.items() if row["name"] not in ran}
    kept |= {r.work + r.baseline: asdict(r) for r in results}
    text = {"machine": about, "results": list(kept.values()), "curves": {**old.get("curves", {}), **curves}}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(text, indent=1) + "\n", encoding="utf-8")
    versions = ", ".join(f"{name} {number}" for name, number in about.get("versions", {}).items())
    head = f"{about.get('device')}, {about.get('threads')} threads, {about.get('dtype')}; {versions}."
    rows = table([Result(**row) for row in text["results"]])
    path.with_suffix(".md").write_text(f"{head}\n\n{rows}\n", encoding="utf-8")
