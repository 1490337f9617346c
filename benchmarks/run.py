"""How fast the zoo is beside what a user could take instead, all in one process, interleaved.

python benchmarks/run.py                 # everything: a table, benchmarks/results/cpu.json and pictures
python benchmarks/run.py packed-2000     # one case, or several
python benchmarks/run.py --list          # their names
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import zoo  # noqa: F401, I001  (before PyTorch: it settles how threads wait)

import matplotlib
import torch
from cases import CASES, growth
from measure import interleaved, machine, peak_memory, run_case, save, table

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import NullFormatter, NullLocator

CURVES = ("tokens", "edges")


def curve(name: str, rounds: int, device: str) -> dict[str, dict[str, list[list[float]]]]:
    """Time and peak memory of every contender at growing sizes: contender -> [size, seconds, bytes]."""
    found: dict[str, dict[str, list[list[float]]]] = {}
    for size, case in growth(name).items():
        steps = {contender: build(device) for contender, build in case.builds.items()}
        seconds = interleaved(steps, 3 if size > 100_000 else min(rounds, 5), device)
        del steps
        for contender, times in seconds.items():
            memory = peak_memory(case, contender, device)
            points = found.setdefault(contender, {"points": []})["points"]
            points.append([size, sorted(times)[len(times) // 2], memory])
            print(f"{name} {size:,}: {contender}: {points[-1][1]:.4f} s, {memory / 2**20:.0f} MiB", flush=True)
    return found


def draw(curves: dict[str, Any], name: str, path: Path) -> None:
    """Time and memory against size, both axes logarithmic."""
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), constrained_layout=True)
    for contender, found in curves.items():
        sizes, seconds, memory = zip(*found["points"], strict=True)
        axes[0].loglog(sizes, seconds, marker="o", label=contender)
        axes[1].loglog(sizes, [number / 2**20 for number in memory], marker="o", label=contender)
    sizes = [int(point[0]) for point in next(iter(curves.values()))["points"]]
    for axis, label in zip(axes, ("seconds", "peak memory, MiB"), strict=True):
        axis.set(xlabel=name, ylabel=label)
        axis.set_xticks(sizes, [f"{size:,}" for size in sizes])
        axis.xaxis.set_minor_locator(NullLocator())
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter(NullFormatter())
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="which cases; left out, all")
    parser.add_argument("--rounds", type=int, default=7, help="rounds a case, after one to warm up (default 7)")
    parser.add_argument("--threads", type=int, help="default: PyTorch's")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results", help="where JSON and pictures go"
    )
    parser.add_argument("--list", action="store_true", help="print the names of the cases and stop")
    chosen = parser.parse_args()
    known = [*CASES, *CURVES]
    if chosen.list:
        print("\n".join(known))
        return
    if unknown := [name for name in chosen.names if name not in known]:
        parser.error(f"{unknown[0]}: no such case; choose from {', '.join(known)}")
    if chosen.rounds < 2:
        parser.error(f"--rounds: got {chosen.rounds}; give at least 2")
    if chosen.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: got cuda, but PyTorch finds no GPU here; leave it out")
    if chosen.threads is not None:
        if chosen.threads < 1:
            parser.error(f"--threads: got {chosen.threads}; give at least 1")
        torch.set_num_threads(chosen.threads)
    about = machine(chosen.device)
    print(json.dumps(about))
    names, start, results, curves = chosen.names or known, time.time(), [], {}
    for name in names:
        if name in CURVES:
            curves[name] = curve(name, chosen.rounds, chosen.device)
        else:
            results += run_case(CASES[name], chosen.rounds, chosen.device)
            print(f"{time.time() - start:.0f} s: {name} done", flush=True)
    path = chosen.out / f"{chosen.device}.json"
    save(path, about, results, curves)
    for name, found in curves.items():
        draw(found, name, chosen.out / f"{chosen.device}_{name}.png")
    print(table(results))
    print(f"{time.time() - start:.0f} s; figures in {path}")


if __name__ == "__main__":
    main()
