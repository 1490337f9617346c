"""What a study has come to: tables, figures and one page, from its runs alone."""

import base64
import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import pandas as pd

from zoo.study.description import Arm, Match
from zoo.study.plan import BATCHES, Outcome, Plan, Run, again_name
from zoo.study.running import command_line
from zoo.study.statistics import Difference, compare

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

TITLES = {"steps": "At equal steps", "parameters": "At equal parameters", "time": "At equal wall-clock time"}
COLOURS = {"better": "tab:green", "worse": "tab:red"}


@dataclass(frozen=True)
class Row:
    """An arm in a comparison.

    Args:
        arm: its name.
        lr: its learning rate; None while it isn't chosen, or if there is none.
        steps: of its runs.
        mean: of its figure, over finished seeds; infinite where one diverged.
        difference: from the reference, over the seeds that both have finished; None for the reference itself.
        done, planned: how many of its runs are finished.
        diverged: how many of them came to nothing.
        note: what matching did, or why it is not in this comparison.
    """

    arm: str
    lr: float | None
    steps: int
    mean: float
    difference: Difference | None
    done: int
    planned: int
    diverged: int
    note: str


def compared(plan: Plan, match: Match) -> list[Row]:
    """All arms at something that they are given alike, the reference first and the A/A arm next to it."""
    study, p = plan.study, plan.study.protocol
    reference = _finished(plan, plan.confirming(study.reference, match))
    rows: list[Row] = []
    for arm in study.arms.values():
        rows.append(_row(plan, arm, match, reference, again=False))
        if arm is study.reference and p.again:
            rows.append(_row(plan, arm, match, reference, again=True))
    return rows


def _row(plan: Plan, arm: Arm, match: Match, reference: Sequence[Outcome | None], again: bool) -> Row:
    study, p = plan.study, plan.study.protocol
    tuning, variant = plan.tuning(arm), plan.variant(arm, match)
    runs = plan.confirming(arm, match, again)
    found = _finished(plan, runs)
    done = [outcome for outcome in found if outcome is not None]
    values = [outcome.value for outcome in done]
    difference = None
    if arm is not study.reference or again:
        both = [(a.value, b.value) for a, b in zip(found, reference, strict=False) if a is not None and b is not None]
        if both:
            own, theirs = [a for a, _ in both], [b for _, b in both]
            difference = compare(own, theirs, p.better == "lower", p.level)
    note = "" if match == "steps" else variant.note
    if tuning.hopeless:
        note = "diverged at every learning rate"
    return Row(
        again_name(study) if again else arm.name,
        tuning.best,
        variant.steps,
        sum(values) / len(values) if values else math.nan,
        difference,
        len(done),
        0 if variant.out or tuning.hopeless else len(p.seeds),
        sum(outcome.status == "diverged" for outcome in done),
        note,
    )


def _finished(plan: Plan, runs: Sequence[Run]) -> list[Outcome | None]:
    return [plan.outcomes.get(run.key) for run in runs]


# ---------------------------------------------------------------------- tables


def comparison_table(plan: Plan, match: Match) -> pd.DataFrame:
    """A comparison in words and rounded numbers."""
    level = f"{plan.study.protocol.level:.0%}"
    lines = []
    for row in compared(plan, match):
        d = row.difference
        verdict = "" if d is None else str(d.verdict)
        if row.arm == plan.study.protocol.reference:
            verdict = "reference"
        lines.append(
            {
                "arm": row.arm,
                "learning rate": "" if row.lr is None else f"{row.lr:g}",
                "steps": f"{row.steps:,}",
                plan.study.protocol.figure: _number(row.mean),
                f"difference ({level} interval)": "" if d is None else _interval(d),
                "verdict": verdict if row.planned else "not compared",
                "seeds": f"{row.done} of {row.planned}" + (f", {row.diverged} diverged" if row.diverged else ""),
                "matched": row.note,
            }
        )
    table = pd.DataFrame(lines)
    return table.drop(columns="matched") if not table["matched"].any() else table


def cost_table(plan: Plan) -> pd.DataFrame:
    """What arms cost beside the reference."""
    reference = plan.measures.get(plan.study.protocol.reference)
    lines = []
    for arm in plan.study.arms.values():
        m = plan.measures.get(arm.name)
        if m is None or reference is None:
            lines.append({"arm": arm.name, "parameters": "not measured: a command"})
            continue
        lines.append(
            {
                "arm": arm.name,
                "parameters": f"{m.parameters:,}",
                "GFLOP a step": "" if m.operations is None else f"{m.operations / 1e9:.3g}",
                "operations": _times(m.operations, reference.operations),
                "step time": f"{m.ratio:.2f} x ({m.low:.2f} to {m.high:.2f})",
                f"{m.unit} a second": f"{m.items / max(reference.items, 1) / m.ratio:.2f} x",
                "training memory": _times(m.memory, reference.memory),
                "generation time": "" if m.generation_ratio is None else f"{m.generation_ratio:.2f} x",
                "generation memory": _times(m.generation_memory, reference.generation_memory),
            }
        )
    table = pd.DataFrame(lines).fillna("")
    return table.loc[:, (table != "").any()]


def tuning_table(plan: Plan) -> pd.DataFrame:
    """The mean figure of every learning rate on the tuning budget, and what was chosen."""
    lines = []
    for arm in plan.study.arms.values():
        tuning = plan.tuning(arm)
        line = {"arm": arm.name}
        for lr, mean in sorted(tuning.means.items()):
            line[f"{lr:g}"] = _number(mean) + (" *" if lr == tuning.best else "")
        line["added"] = ", ".join(f"{lr:g}" for lr in tuning.added)
        line["remark"] = (
            "diverged everywhere"
            if tuning.hopeless
            else "best at the list's end"
            if tuning.best is not None and tuning.at_edge
            else f"{len(tuning.missing)} rates to run"
            if tuning.missing
            else ""
        )
        lines.append(line)
    table = pd.DataFrame(lines).fillna("")
    rates = sorted((name for name in table if _is_number(name)), key=float)
    return table[["arm", *rates, *(name for name in ("added", "remark") if table[name].any())]]


def run_table(plan: Plan, failed: dict[str, Outcome]) -> pd.DataFrame:
    """Every run that was finished or failed, with its command."""
    p = plan.study.protocol
    lines = []
    for run in all_runs(plan):
        outcome = plan.outcomes.get(run.key) or failed.get(run.key)
        if outcome is None:
            continue
        command = run.words() if run.command else None
        arguments = run.arguments(p.lr_setting, p.figure, p.better, "runs/study")
        lines.append(
            {
                "key": run.key,
                "arm": run.arm,
                "stage": run.stage,
                "lr": run.lr,
                "seed": run.seed,
                "steps": run.steps,
                "status": outcome.status,
                "value": outcome.value,
                "seconds": round(outcome.seconds, 1),
                "batches": outcome.batches[:16],
                "error": outcome.error,
                "command": " ".join(command) if command else command_line(arguments),
            }
        )
    return pd.DataFrame(lines)


def all_runs(plan: Plan) -> list[Run]:
    """Every run of a study that is known so far, each once."""
    p, runs = plan.study.protocol, []
    for arm in plan.study.arms.values():
        tuning = plan.tuning(arm)
        runs += [plan.tuning_run(arm, lr, s) for lr in sorted((*tuning.means, *tuning.missing)) for s in p.tuning_seeds]
    for match in p.matched:
        for arm in plan.study.arms.values():
            runs += plan.confirming(arm, match)
        if p.again:
            runs += plan.confirming(plan.study.reference, match, again=True)
    return list({run.key: run for run in runs}.values())


# ---------------------------------------------------------------------- remarks


def remarks(plan: Plan, failed: dict[str, Outcome]) -> list[str]:
    """How the study was made, and what a reader has to know before believing it."""
    study, p = plan.study, plan.study.protocol
    found = [
        f"Every arm was tuned over the learning rates {', '.join(f'{lr:g}' for lr in sorted(p.lrs))} with "
        f"{p.tuning_steps:,} steps on validation data (seeds {_listed(p.tuning_seeds)}), then run for {p.steps:,} "
        f"steps with seeds {_listed(p.seeds)}; the weights of the best of {p.validations} validations were tested.",
        f"Intervals: bootstrap over seeds of the paired difference from {p.reference}, {p.level:.0%}, widened for "
        "few seeds, and no narrower than Student's. A verdict is given where the interval leaves zero out.",
    ]
    tested = sum(
        row.difference is not None and row.difference.verdict != "too few seeds"
        for match in p.matched
        for row in compared(plan, match)
    )
    if tested > 1:
        found.append(
            f"{tested} differences were looked at: where nothing differs, {tested * (1 - p.level):.1f} verdicts of "
            "better or worse are to be expected by chance."
        )
    if p.again:
        found.append(f"{again_name(study)} is the reference with other seeds (A/A): what noise looks like.")
    found += [f"{said[0].upper()}{said[1:]}." for said in p.deviations()]
    for arm in study.arms.values():
        tuning = plan.tuning(arm)
        if tuning.hopeless:
            found.append(f"{arm.name} diverged at every learning rate, so there is nothing to compare.")
        elif tuning.best is not None and tuning.at_edge:
            found.append(f"{arm.name}'s best learning rate, {tuning.best:g}, lies at the end of its list.")
        elif tuning.added:
            found.append(f"{arm.name}'s list was extended by {', '.join(f'{lr:g}' for lr in tuning.added)}.")
    busy = [f"{name}: load {m.load:.1f}" for name, m in plan.measures.items() if m.load > 0.5]
    if busy:
        found.append(
            f"When times were measured the machine was not idle ({', '.join(busy)}); "
            "arms and reference took turns, so ratios hold better than seconds."
        )
    if "time" in p.matched:
        found.append("At equal time, steps are adjusted by the measured time of a step; the learning rate stays.")
    if "parameters" in p.matched and study.protocol.reference in plan.measures:
        found.append(f"At equal parameters, {p.size_setting} is changed to come within 1% of {plan.target():,}.")
    found += _other_batches(plan)
    for run in all_runs(plan):
        outcome = plan.outcomes.get(run.key)
        if run.stage == "confirm" and outcome is not None and outcome.status == "diverged":
            found.append(f"{run.arm}, seed {run.seed}, diverged ({outcome.error}); it counts as the worst.")
    found += [f"Run {key} failed: {outcome.error}; it is due again." for key, outcome in failed.items()]
    left = len(plan.pending())
    if left:
        found.append(f"The study is not finished: {left} runs are due.")
    versions = sorted({str(dict(o.versions)) for o in plan.outcomes.values() if o.versions})
    machines = sorted({m.machine for m in plan.measures.values() if m.machine})
    if machines or versions:
        found.append(f"Measured on {'; '.join(machines)}. Run with {'; '.join(versions)}.")
    return found


def _other_batches(plan: Plan) -> list[str]:
    """Where arms did not train on the same batches."""
    seen: dict[tuple[str, int, int], dict[str, list[str]]] = {}
    for run in all_runs(plan):
        outcome = plan.outcomes.get(run.key)
        if outcome is not None and outcome.batches and outcome.status == "done":
            seen.setdefault((run.stage, run.seed, min(run.steps, BATCHES)), {}).setdefault(outcome.batches, []).append(
                run.arm
            )
    found = []
    for (stage, seed, _), by_digest in seen.items():
        if len(by_digest) > 1:
            groups = " / ".join(", ".join(sorted(set(arms))) for arms in by_digest.values())
            what = "tuning" if stage == "tune" else "full runs"
            found.append(f"Arms did not see the same batches with seed {seed} ({what}): {groups}.")
    if not found and seen:
        found.append("All arms saw the same batches in the same order: the digests of their first batches agree.")
    return found


# ---------------------------------------------------------------------- files


def write_report(plan: Plan, folder: Path, failed: dict[str, Outcome]) -> list[Path]:
    """Write report.md, report.html, results.csv, runs.csv and figures; returns what was written."""
    folder.mkdir(parents=True, exist_ok=True)
    study = plan.study
    sections: list[tuple[str, pd.DataFrame]] = [
        *((TITLES[match], comparison_table(plan, match)) for match in study.protocol.matched),
        ("What they cost", cost_table(plan)),
        ("Tuning", tuning_table(plan)),
    ]
    figures = draw(plan, folder)
    lines = [f"# {study.name}", "", *(f"- {remark}" for remark in remarks(plan, failed)), ""]
    for title, table in sections:
        lines += [f"## {title}", "", markdown(table), ""]
    lines += [f"![{path.stem}]({path.name})" for path in figures]
    texts = {"report.md": "\n".join(lines) + "\n", "report.html": page(plan, sections, figures, failed)}
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    numbers = [
        {
            "match": match,
            "arm": row.arm,
            "lr": row.lr,
            "steps": row.steps,
            "mean": row.mean,
            **(vars(row.difference) if row.difference else {}),
            "seeds": row.done,
            "diverged": row.diverged,
            "note": row.note,
        }
        for match in study.protocol.matched
        for row in compared(plan, match)
    ]
    frame = pd.DataFrame(numbers)
    frame.to_csv(folder / "results.csv", index=False)
    run_table(plan, failed).to_csv(folder / "runs.csv", index=False)
    return [*(folder / name for name in (*texts, "results.csv", "runs.csv")), *figures]


def draw(plan: Plan, folder: Path) -> list[Path]:
    """Intervals of every comparison, tuning curves, and quality beside cost."""
    p, paths = plan.study.protocol, []
    for match in p.matched:
        rows = [(row.arm, row.difference) for row in reversed(compared(plan, match)) if row.difference is not None]
        rows = [(arm, d) for arm, d in rows if math.isfinite(d.mean)]
        if rows:
            figure, axes = plt.subplots(figsize=(7, 1 + 0.4 * len(rows)), constrained_layout=True)
            for y, (_, d) in enumerate(rows):
                colour = COLOURS.get(d.verdict, "tab:gray")
                low, high = (v if math.isfinite(v) else math.copysign(10 * abs(d.mean), v) for v in (d.low, d.high))
                axes.plot([low, high], [y, y], color=colour)
                axes.plot(d.mean, y, "o", color=colour)
            axes.axvline(0, color="black", linewidth=0.8)
            axes.set_yticks(range(len(rows)), [arm for arm, _ in rows])
            axes.set(
                xlabel=f"{p.figure}, difference from {p.reference} ({p.level:.0%}); {p.better} is better",
                title=TITLES[match],
            )
            paths.append(_save(figure, folder / f"intervals_{match}.png"))
    figure, axes = plt.subplots(figsize=(7, 4.5), constrained_layout=True)
    for arm in plan.study.arms.values():
        tuning = plan.tuning(arm)
        points = sorted((lr, mean) for lr, mean in tuning.means.items() if math.isfinite(mean))
        if points:
            (line,) = axes.semilogx(*zip(*points, strict=True), marker=".", label=arm.name)
            if tuning.best is not None:
                axes.plot(tuning.best, tuning.means[tuning.best], "o", color=line.get_color())
    if axes.lines:
        axes.set(xlabel="learning rate", ylabel=f"{p.figure} (validation, {p.tuning_steps:,} steps)", title="Tuning")
        axes.legend(fontsize="small", ncols=2)
        axes.grid(alpha=0.3)
        paths.append(_save(figure, folder / "tuning.png"))
    else:
        plt.close(figure)
    found = [
        (plan.measures[row.arm].ratio, row.mean, row.arm)
        for row in compared(plan, p.matched[0])
        if row.arm in plan.measures and math.isfinite(row.mean)
    ]
    if len(found) > 1:
        figure, axes = plt.subplots(figsize=(7, 4.5), constrained_layout=True)
        axes.scatter([x for x, _, _ in found], [y for _, y, _ in found])
        for ratio, mean, name in found:
            axes.annotate(name, (ratio, mean), textcoords="offset points", xytext=(4, 4), fontsize="small")
        axes.set(
            xlabel=f"time of a step, times that of {p.reference}",
            ylabel=f"{p.figure}; {p.better} is better",
            title=f"Quality and cost, {TITLES[p.matched[0]].lower()}",
        )
        axes.grid(alpha=0.3)
        paths.append(_save(figure, folder / "cost.png"))
    return paths


def _save(figure: Figure, path: Path) -> Path:
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def page(
    plan: Plan, sections: Sequence[tuple[str, pd.DataFrame]], figures: Sequence[Path], failed: dict[str, Outcome]
) -> str:
    """One page that needs nothing else."""
    parts = [f"<h1>{html.escape(plan.study.name)}</h1><ul>"]
    parts += [f"<li>{html.escape(remark)}</li>" for remark in remarks(plan, failed)] + ["</ul>"]
    for title, table in sections:
        parts += [f"<h2>{html.escape(title)}</h2>", table.to_html(index=False, border=0)]
    for path in figures:
        data = base64.b64encode(path.read_bytes()).decode()
        parts.append(f'<img alt="{html.escape(path.stem)}" src="data:image/png;base64,{data}">')
    if len(runs := run_table(plan, failed)):
        shown = runs.drop(columns=["batches"]).to_html(index=False, border=0)
        parts.append(f"<details><summary>All {len(runs)} runs</summary>{shown}</details>")
    style = (
        "body{font:16px/1.5 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem}"
        "table{border-collapse:collapse;font-size:14px}"
        "td,th{padding:.25rem .6rem;border-bottom:1px solid #ddd;text-align:left}"
        "img{max-width:100%;display:block;margin:1rem 0}details{overflow-x:auto}"
    )
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(plan.study.name)}</title>'
    return f"{head}<style>{style}</style><body>{''.join(parts)}</body></html>\n"


def markdown(table: pd.DataFrame) -> str:
    """A table in Markdown."""
    rows = [list(map(str, table.columns)), ["---"] * len(table.columns), *table.astype(str).values.tolist()]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)


def text(plan: Plan, failed: dict[str, Outcome]) -> str:
    """The tables and remarks for a terminal."""
    parts = []
    for match in plan.study.protocol.matched:
        parts += [TITLES[match], comparison_table(plan, match).to_string(index=False), ""]
    parts += ["What they cost", cost_table(plan).to_string(index=False), "", *remarks(plan, failed)]
    return "\n".join(parts)


def _number(value: float) -> str:
    return "" if math.isnan(value) else "diverged" if math.isinf(value) else f"{value:.4f}"


def _interval(d: Difference) -> str:
    if not math.isfinite(d.mean):
        return "diverged"
    return f"{d.mean:+.4f} ({d.low:+.4f} to {d.high:+.4f})"


def _times(own: int | None, reference: int | None) -> str:
    return "" if own is None or not reference else f"{own / reference:.2f} x"


def _is_number(name: str) -> bool:
    try:
        float(name)
    except ValueError:
        return False
    return True


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
