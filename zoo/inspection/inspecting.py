"""A trained model, looked into and written down: tables, pictures and a summary in one folder."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pandas as pd
from matplotlib.figure import Figure

from datamodules.base import ZooDataModule
from zoo.catalogue import load_pretrained
from zoo.checkpoint.checkpoint import Checkpoint
from zoo.drawing import bars
from zoo.errors import ZooError, listed
from zoo.inspection.ablation import ablate_blocks, can_ablate
from zoo.inspection.figures import (
    attention_table,
    block_table,
    shown_table,
    similarity_table,
    spectrum_table,
    summary_table,
)
from zoo.inspection.sample import Sample, held_out_data, held_out_sample, text_sample
from zoo.looking import Look, attention_layers, look
from zoo.looking.measures import is_matrix_a_head
from zoo.looking.pictures import (
    attention_picture,
    attention_pictures,
    is_drawn_alike,
    shown_picture,
    similarity_picture,
    spectrum_picture,
)
from zoo.placing import checked_place, placed
from zoo.tasks import ZooTask

MOST_ROWS = 2_000_000
"""How many attention weights a table may hold."""

ABOUT = "about.json"
"""The file that says what was looked into, and which files were written."""


@dataclass(frozen=True)
class Inspection:
    """What was found, and where it was written.

    Args:
        summary: layer, head, figure, value.
        ablation: the test figures without some blocks; None where none were measured.
        sample: what the sample was.
        files: names in the folder.
        note: what couldn't be looked at, and why; empty if all could.
    """

    summary: pd.DataFrame
    ablation: pd.DataFrame | None
    sample: str
    files: list[str]
    note: str

    def by_layer(self) -> pd.DataFrame:
        """The summary's figures of layers, a column each, means over heads; without smallest and largest numbers."""
        rows = self.summary.dropna(subset="layer")
        rows = rows[~rows["figure"].str.fullmatch(r".*_(min|max|asymmetry|smallest_\w+|largest_\w+)")]
        return rows.pivot_table("value", "layer", "figure", sort=False)


def inspect_checkpoint(
    given: str | Path | Checkpoint,
    out: str | Path,
    *,
    data: str | None = None,
    config: str | None = None,
    sample: int = 0,
    text: str | None = None,
    tokens: int = 48,
    layers: Sequence[int] = (),
    batches: int = 16,
    device: str = "cpu",
    overwrite: bool = False,
) -> Inspection:
    """Look into a trained model, and write what is found to a folder, all or nothing.

    Args:
        given: a name on the shelf, a file, an address, or an opened checkpoint; read once.
        out: the folder: ``summary.csv``, a table and pictures of each thing, and ``about.json``.
        data: other held-out data than the checkpoint's: text, a folder of pictures, or a table.
        config: a YAML file whose data section goes before the checkpoint's settings.
        sample: which held-out sample the network is looked at with, from 0.
        text: a text to look at instead, of a language model.
        tokens: of a text, how many are looked at.
        layers: the numbers of the layers to look at; none for all.
        batches: held-out batches for each test of the block ablation, at the most; 0 leaves it out.
        device: where to run.
        overwrite: whether the folder may be there.

    Raises:
        ZooError: if there is nothing to look at, a layer or a sample that there isn't, too long a sample, or data that
            can't be read.
    """
    target = checked_place(out, "", overwrite)
    for name, value, least in (("--tokens", tokens, 1), ("--batches", batches, 0)):
        if value < least:
            raise ZooError(f"got {value}; must be at least {least}", argument=name)
    checkpoint = Checkpoint.open(given)
    task = load_pretrained(checkpoint)
    if task.start.adapter is not None:
        task.merge_adapter()
    task.to(device)
    _check_layers(task, layers)
    wanted = batches > 0 and can_ablate(task)
    held_out = held_out_data(checkpoint, task, data, config) if text is None or wanted else None
    if text is not None:
        taken = text_sample(task, text, tokens)
    else:
        taken = held_out_sample(task, cast(ZooDataModule, held_out), sample, tokens)
    looks = look(task.network, taken.inputs.to(device), set(layers) or None, most=MOST_ROWS)
    if not looks:  # timm's windows, say
        raise ZooError(_nothing(task), argument="checkpoint")
    ablation = ablate_blocks(task, held_out, batches, device) if held_out is not None and wanted else None
    note = ""
    if batches and not wanted:
        note = f"No block ablation: the attention ({looks[0].attention}) has no diag_scale and off_diag_scale."
    summary = summary_table(looks, ablation)
    about = {"checkpoint": checkpoint.path, "identity": checkpoint.digest, "sample": taken.title}
    before = _written(target)
    with placed(target) as part:
        part.mkdir()
        files = _write(part, looks, taken, summary, ablation, about)
    for name in before - set(files):
        (target / name).unlink(missing_ok=True)
    return Inspection(summary, ablation, taken.title, files, note)


def _check_layers(task: ZooTask, layers: Sequence[int]) -> None:
    n = len(attention_layers(task.network))
    if not n:
        raise ZooError(_nothing(task), argument="checkpoint")
    if unknown := [layer for layer in layers if not 0 <= layer < n]:
        raise ZooError(f"got {listed(unknown)}; the model has layers 0 to {n - 1}", argument="--layer")


def _nothing(task: ZooTask) -> str:
    return (
        f"{task.network_name} has no attention that can be looked into; language models, damcha_vit_*, graph models "
        "and timm's plain vision transformers have"
    )


# ---------------------------------------------------------------------- what is written


def _write(
    folder: Path,
    looks: Sequence[Look],
    sample: Sample,
    summary: pd.DataFrame,
    ablation: pd.DataFrame | None,
    about: Mapping[str, Any],
) -> list[str]:
    """Write everything; returns the names of the files."""
    files: list[str] = []

    def keep(name: str, write: Callable[[Path], object]) -> None:
        write(folder / name)
        files.append(name)

    def table(name: str, frame: pd.DataFrame) -> None:
        keep(f"{name}.csv", lambda path: frame.to_csv(path, index=False, float_format="%.8g"))

    def picture(name: str, figure: Figure) -> None:
        keep(f"{name}.png", figure.savefig)

    table("summary", summary)
    table("attention", attention_table(looks, sample.names))
    for i, figure in enumerate(attention_pictures(looks, sample.title)):
        picture("attention" if i == 0 else f"attention_{i + 1}", figure)
    for item in looks:
        picture(f"attention_layer_{item.layer}", attention_picture(item, sample.names, sample.title))
    if summary["figure"].eq("map_similarity").any():
        table("similarity", similarity_table(looks))
        picture("similarity", similarity_picture(looks))
    for name in dict.fromkeys(name for item in looks for name in item.shown):
        having = [item for item in looks if name in item.shown]
        file = _file_name(name, files)
        table(file, shown_table(looks, name, sample.names))
        if having[0].shown[name].blocks > 1:
            table(f"{file}_blocks", block_table(looks, name))
        if is_matrix_a_head(having[0].shown[name]):
            table(f"{file}_spectrum", spectrum_table(looks, name))
            picture(f"{file}_spectrum", spectrum_picture(having, name))
        if is_drawn_alike(having, name):
            picture(file, shown_picture(having, name, sample.names))
    if ablation is not None:
        table("ablation", ablation)
        title = f"Held-out loss with some blocks of the metric, {ablation['batches'].iloc[0]} batches"
        picture("ablation", bars(ablation["blocks"].tolist(), ablation["loss"].tolist(), title, "loss"))
    files.append(ABOUT)
    (folder / ABOUT).write_text(json.dumps({**about, "files": files}, indent=2, ensure_ascii=False), encoding="utf-8")
    return files


def _file_name(name: str, taken: Sequence[str]) -> str:
    """What a file with something shown is called; names that are taken get an end."""
    file = re.sub(r"\W", "_", name)
    there = {Path(other).stem.lower() for other in taken}
    return f"{file}_shown" if file.lower() in there else file


def _written(folder: Path) -> set[str]:
    """The files that an earlier inspection wrote into a folder, as it says itself."""
    try:
        names = json.loads((folder / ABOUT).read_text(encoding="utf-8"))["files"]
        return {name for name in names if Path(name).name == name}
    except (OSError, ValueError, LookupError, TypeError):
        return set()
