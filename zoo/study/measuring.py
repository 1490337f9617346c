"""What a model costs: time, operations and memory of a step, measured in turn with another's."""

import gc
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import move_data_to_device
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from zoo.errors import ZooError
from zoo.tasks import ZooTask

Step = Callable[[], Any]
STILL = 1e-9  # a learning rate that leaves weights as they are: attention's time depends on what it attends to
ROUNDS = 15
NEW_TOKENS = 64
"""How many tokens are written where writing is measured."""


def finish(device: str) -> None:
    """Wait until the device has done what it was given."""
    if device == "cuda":
        torch.cuda.synchronize()


def interleaved(steps: Mapping[str, Step], rounds: int, device: str) -> dict[str, list[float]]:
    """Seconds of every step in every round, after one to warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        for name, step in steps.items():
            finish(device)
            start = time.perf_counter()
            own = step()  # a step that has parts not to be counted says itself how long the rest took
            finish(device)
            if number:
                seconds[name].append(own if isinstance(own, float) else time.perf_counter() - start)
    return seconds


def peak_of(step: Step, device: str) -> int | None:
    """Bytes that a step needs at its peak beyond what there is before; None where the system doesn't tell."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return torch.cuda.max_memory_allocated() - before
    gc.collect()
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak starts anew
        before = _status("VmRSS")
        step()
        return _status("VmHWM") - before
    except OSError:
        return None


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name + ":")) * 1024


def processor() -> str:
    """What the processor calls itself."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


# ---------------------------------------------------------------------- of a task


def built(task: ZooTask, data: pl.LightningDataModule) -> dict[str, Any]:
    """Set data up and build the task's network for them; returns the data's identity."""
    if not hasattr(data, "identity"):
        raise ZooError(f"data: got {type(data).__name__}, which has no identity; use a data module of this zoo")
    if hasattr(data, "suit"):
        data.suit(task.data_wishes())
    data.prepare_data()
    data.setup("fit")
    identity: dict[str, Any] = data.identity()
    task.build_and_freeze(identity)
    return identity


def parameters_of(task: ZooTask) -> int:
    """How many numbers the network has to learn, or holds frozen."""
    return sum(parameter.numel() for parameter in task.network.parameters())


def training_step(task: ZooTask, data: pl.LightningDataModule, device: str) -> tuple[Step, Any]:
    """A whole step on the data's first batch: forward, loss, backward, AdamW; and that batch."""
    batch = move_data_to_device(next(iter(data.train_dataloader())), torch.device(device))
    task.to(device).train()
    for name in ("log", "log_dict"):  # there is no run to log for
        setattr(task, name, lambda *_, **__: None)
    learned = [parameter for parameter in task.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=STILL, weight_decay=0.0, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        loss: Any = task.training_step(batch, 0)
        (loss["loss"] if isinstance(loss, Mapping) else loss).backward()
        optimizer.step()

    return step, batch


def writing_step(task: ZooTask) -> Step | None:
    """Writing a text of ``NEW_TOKENS`` tokens; None for what writes none, or reads symbols that are no text."""
    generate = getattr(task, "generate", None)
    if generate is None or not getattr(task, "of_text", True):
        return None

    def step() -> None:
        task.eval()
        generate([""], max_new_tokens=NEW_TOKENS, seed=0)
        task.train()

    return step


def size_of(batch: Any) -> tuple[int, str]:
    """How many tokens, pictures or rows a batch has, and which of them."""
    if isinstance(batch, Mapping) and "image" in batch:
        return len(batch["image"]), "pictures"
    tensors = [batch] if isinstance(batch, Tensor) else list(batch.values() if isinstance(batch, Mapping) else batch)
    first = next((tensor for tensor in tensors if isinstance(tensor, Tensor)), None)
    if isinstance(batch, Mapping) and "targets" in batch:
        return batch["targets"].numel(), "tokens"
    if first is None:
        return 0, "rows"
    if first.ndim == 2 and not first.is_floating_point():
        return len(first) * (first.shape[1] - 1), "tokens"
    return len(first), "rows"


def measure(
    task: ZooTask, data: pl.LightningDataModule, reference: ZooTask, reference_data: pl.LightningDataModule
) -> dict[str, Any]:
    """What a task costs, and how its time compares to another's: the fields of ``plan.Measure``.

    Memory is measured first, as long as nothing else has run in this process.
    """
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    pl.seed_everything(0, verbose=False)
    built(task, data)
    step, batch = training_step(task, data, device)
    memory = peak_of(step, device)
    write = writing_step(task)
    writing_memory = None if write is None else peak_of(write, device)
    with FlopCounterMode(display=False) as counter:
        step()
    built(reference, reference_data)
    other, _ = training_step(reference, reference_data, device)
    seconds = interleaved({"own": step, "reference": other}, ROUNDS, device)
    ratios = [own / theirs for own, theirs in zip(seconds["own"], seconds["reference"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    items, unit = size_of(batch)
    found: dict[str, Any] = {
        "parameters": parameters_of(task),
        "step_seconds": statistics.median(seconds["own"]),
        "ratio": middle,
        "low": low,
        "high": high,
        "operations": counter.get_total_flops() or None,
        "memory": memory,
        "items": items,
        "unit": unit,
        "load": load,
        "machine": f"{torch.cuda.get_device_name() if device == 'cuda' else processor()}, "
        f"{torch.get_num_threads()} threads, torch {version('torch')}",
    }
    their_write = writing_step(reference)
    if write is not None and their_write is not None:
        seconds = interleaved({"own": write, "reference": their_write}, max(3, ROUNDS // 3), device)
        ratios = [own / theirs for own, theirs in zip(seconds["own"], seconds["reference"], strict=True)]
        found |= {"generation_ratio": statistics.median(ratios), "generation_memory": writing_memory}
    return found


def find_size(count: Callable[[float], int], start: float, target: int) -> tuple[float | None, int]:
    """The value of a size setting that gives a number of parameters within 1%.

    Args:
        count: how many parameters a value gives; grows with it, nearly linearly.
        start: a value that is allowed; a whole one if only these are.
        target: the number.

    Returns:
        The value, or None if none was found, and the number of parameters there, or at the start.
    """
    whole = isinstance(start, int)
    size, found = start, count(start)
    first = found
    slope_from = 2 * start
    slope = (count(slope_from) - found) / (slope_from - start)
    for _ in range(6):
        if abs(found - target) <= 0.01 * target:
            return size, found
        if slope <= 0:
            break
        moved = size + (target - found) / slope
        new = max(1, round(moved)) if whole else float(f"{max(moved, 1e-3):.4g}")
        if new == size:
            break
        number = count(new)
        slope = (number - found) / (new - size)
        size, found = new, number
    return None, first
