"""Trained models in other formats: safetensors, ONNX, ``torch.export``, and the folders that the hub and timm read."""

import importlib.util
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import timm
import torch
from timm.models import save_for_hf
from torch import Tensor
from torch.export import ExportedProgram

from zoo.adapters import has_lora
from zoo.catalogue import load_pretrained
from zoo.checkpoint.checkpoint import Checkpoint
from zoo.checkpoint.identity import (
    CHECKPOINT_KEY,
    canonical_json,
)
from zoo.checkpoint.index import Entry, companion, entry_of
from zoo.checkpoint.remote import is_address
from zoo.checkpoint.transfer import weights_digest
from zoo.errors import ZooError
from zoo.exchange.files import CONFIG, DIGEST, FORMATS, WEIGHTS, brief, size, write_checkpoint
from zoo.placing import checked_place, placed
from zoo.tasks import ZooTask
from zoo.tasks.pretrained import network_tensors
from zoo.tasks.settings import plain

AGREE = 1e-3  # of the largest output: float32 in another order differs by 1e-5, a wrong graph by far more
_PROTOBUF_BYTES = 2_000_000_000  # what one ONNX file can hold, less what isn't weights
_OF_OTHER_WEIGHTS = (
    *("tag", "description", "license", "origin_url", "paper_name", "paper_ids", "notes"),
    *("label_names", "label_descriptions"),
)


def export_model(name_or_path: str | Path, to: str, out: str | Path, overwrite: bool = False) -> list[str]:
    """Write a trained model in another format, and compare what was written with the model.

    Args:
        name_or_path: a name on the shelf, a checkpoint file, or the address of one. Adapters are merged.
        to: safetensors (tensors under the network's own names, and what the checkpoint claims in the metadata), onnx or
            torch-export (the network as a graph, for any batch size and, of a language model, any length up to
            max_len), hub-folder (model.safetensors, config.json and README.md), or checkpoint (of this zoo, weights
            only).
        out: the file or folder to write.
        overwrite: replace it if it is there.

    Returns:
        What was written and checked.

    Raises:
        ZooError: for a model or a place that can't be used, a package that isn't installed, or outputs that differ.
            Then nothing is written.
    """
    if to not in FORMATS:
        raise ZooError(f"--to: got {to!r}; must be {' or '.join(FORMATS)}")
    target = checked_place(out, FORMATS[to], overwrite)
    if to == "onnx":
        _need("onnx", "onnxscript")
    given = str(name_or_path)
    checkpoint = Checkpoint.open(name_or_path)
    claim: Mapping[str, Any] = checkpoint.claim
    task = load_pretrained(checkpoint)
    if has_lora(task.network):
        task.merge_adapter()
        claim = {name: value for name, value in claim.items() if name != "adapter"} | {"settings": plain(task.settings)}
    with placed(target) as part:
        if to == "safetensors":
            return _write_safetensors(task, part, {CHECKPOINT_KEY: json.dumps(claim)})
        if to == "hub-folder":
            entry = None if checkpoint.path == given or is_address(given) else entry_of(given)
            return _write_hub_folder(task, claim, part, entry, target.name)
        if to == "checkpoint":
            return write_checkpoint(task, claim, part)
        return (_write_onnx if to == "onnx" else _write_program)(task, claim, part)


def _need(*packages: str) -> None:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise ZooError(
            f"--to: got onnx, which needs {' and '.join(missing)}; pip install {' '.join(missing)}, or "
            "'damcha-zoo[export]' for all of it"
        )


# ---------------------------------------------------------------------- tensors


def _write_safetensors(task: ZooTask, file: Path, metadata: Mapping[str, str]) -> list[str]:
    # clones: tied weights share memory, which the format doesn't have
    tensors = {name: t.detach().clone().contiguous() for name, t in network_tensors(task.state_dict()).items()}
    digest_of_all = {DIGEST: weights_digest(tensors)}  # the format has no checksums
    file.write_bytes(safetensors.torch.save(tensors, {"format": "pt", **digest_of_all, **metadata}))
    again = safetensors.torch.load_file(file)
    if any(not torch.equal(tensor, again[name]) for name, tensor in tensors.items()):
        raise ZooError(f"--out: {file.name} holds other tensors than were written; check the disk")
    return [f"{len(tensors)} tensors", size(file)]


def _write_hub_folder(
    task: ZooTask, claim: Mapping[str, Any], folder: Path, entry: Entry | None, name: str
) -> list[str]:
    folder.mkdir()
    if task.hub_library == "timm":
        checked = _write_timm_folder(task, claim, folder)
    else:
        sha256 = weights_digest(network_tensors(task.state_dict()))
        config = {"architecture": type(task.network).__name__, DIGEST: sha256, CHECKPOINT_KEY: claim}
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        checked = _write_safetensors(task, folder / WEIGHTS, {})
    (folder / "README.md").write_text(_card(task, claim, entry, name), encoding="utf-8")
    return [", ".join(sorted(file.name for file in folder.iterdir())), *checked]


def _write_timm_folder(task: ZooTask, claim: Mapping[str, Any], folder: Path) -> list[str]:
    """A folder for ``timm.create_model``, which is then asked for the model."""
    identity = claim["identity"]
    pictures = {
        "input_size": (identity["channels"], *identity["image_size"]),
        "mean": tuple(identity["mean"]),
        "std": tuple(identity["std"]),
        "interpolation": identity["interpolation"],
        "crop_pct": identity["crop"],
    }
    try:
        save_for_hf(
            task.network,
            str(folder),
            model_config={
                "label_names": identity["classes"],
                DIGEST: weights_digest(network_tensors(task.state_dict())),
                CHECKPOINT_KEY: claim,
            },
            model_args=task.network_arguments,
            data_config=pictures,
            safe_serialization=True,
        )
        _drop_origin(folder / CONFIG)
        again = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    except (RuntimeError, ValueError, TypeError) as error:
        raise ZooError(
            f"--to: timm can't keep {claim['settings']['name']} in a folder ({brief(error)}); use safetensors"
        ) from None
    inputs = task.example_inputs().inputs
    worst = _largest_difference(task, inputs, again)
    return [f"timm loads it, largest difference {worst:.1g}"]


def _drop_origin(config: Path) -> None:
    """Leave out what timm's record says of the weights that the model may have started from."""
    found = json.loads(config.read_bytes())
    for name in _OF_OTHER_WEIGHTS:
        found["pretrained_cfg"].pop(name, None)
    config.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def _card(task: ZooTask, claim: Mapping[str, Any], entry: Entry | None, name: str) -> str:
    """The card, with what the hub reads on top."""
    pipeline, library = task.hub_pipeline, task.hub_library
    licence = "unknown" if entry is None else entry.licence.lower()
    if not licence.replace("-", "").replace(".", "").isalnum():
        licence = "other"  # more than one, in words: the card says which
    top = f"license: {licence}\nlibrary_name: {library}\npipeline_tag: {pipeline}\ntags:\n- damcha-zoo\n- {pipeline}\n"
    if entry is not None:
        text = companion(entry, entry.card).read_text(encoding="utf-8").rstrip()
    else:
        n = sum(p.numel() for p in task.parameters())
        text = (
            f"# {name}\n\nA {type(task.network).__name__} of {n:,} parameters, made by {claim['task']}.\n\n"
            f"Identity of its data: {claim['digest']}"
        )
    use = f"    zoo import {name} --out {name}.ckpt\n    zoo verify {name}.ckpt\n"
    if library == "timm":
        needs = "import timm, zoo  # which registers damcha_vit_*"
        use += f"\nor in Python\n\n    {needs}\n    model = timm.create_model('local-dir:{name}', pretrained=True)\n"
    return f"---\n{top}---\n\n{text}\n\n## From this folder\n\n{use}"


# ---------------------------------------------------------------------- graphs


def _write_program(task: ZooTask, claim: Mapping[str, Any], file: Path) -> list[str]:
    inputs = task.example_inputs().inputs
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch about itself
        torch.export.save(_traced(task, claim, "torch-export"), file, extra_files={"zoo.json": json.dumps(claim)})
        again = torch.export.load(file).module()
    worst = _largest_difference(task, inputs, again)
    return [size(file), f"loaded again, largest difference {worst:.1g}"]


def _write_onnx(task: ZooTask, claim: Mapping[str, Any], file: Path) -> list[str]:
    if sum(tensor.nbytes for tensor in task.network.state_dict().values()) > _PROTOBUF_BYTES:
        raise ZooError("--to: an onnx file holds 2 GB at the most, and these weights are more; use torch-export")
    examples = task.example_inputs()
    name, inputs, dynamic = examples.name, examples.inputs, examples.dynamic
    program = _traced(task, claim, "onnx")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            axes = {axis: dim.__name__ for axis, dim in dynamic.items()}
            graph = torch.onnx.export(
                program, dynamo=True, dynamic_shapes=(axes,), input_names=[name], output_names=["output"], verbose=False
            )
    except Exception as error:  # the translator's own kinds
        raise ZooError(_inexpressible(claim, "onnx", error)) from None
    if graph is None:
        raise ZooError(_inexpressible(claim, "onnx", RuntimeError("no graph came out")))
    graph.model.metadata_props.update(_properties(task, claim))
    graph.save(file)
    done = [size(file), f"opset {graph.model.opset_imports['']}"]
    if importlib.util.find_spec("onnxruntime") is None:
        return [*done, "not compared: pip install onnxruntime"]
    import onnxruntime

    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    worst = _largest_difference(task, inputs, lambda x: torch.from_numpy(session.run(None, {name: x.numpy()})[0]))
    return [*done, f"run by onnxruntime, largest difference {worst:.1g}"]


def _properties(task: ZooTask, claim: Mapping[str, Any]) -> dict[str, str]:
    """What an ONNX file says of itself, in JSON where it isn't one word."""
    found = {"task": claim["task"], "digest": claim["digest"], "identity": canonical_json(claim["identity"])}
    return {f"zoo.{name}": value for name, value in {**found, **task.graph_properties()}.items()}


def _traced(task: ZooTask, claim: Mapping[str, Any], to: str) -> ExportedProgram:
    examples = task.example_inputs()
    try:
        with torch.no_grad():
            return torch.export.export(task.network, (examples.inputs[0],), dynamic_shapes=(dict(examples.dynamic),))
    except Exception as error:  # whatever a model of timm's does that can't be traced
        raise ZooError(_inexpressible(claim, to, error)) from None


def _inexpressible(claim: Mapping[str, Any], to: str, error: Exception) -> str:
    name = claim["settings"].get("name") or claim["task"].rpartition(".")[2]
    return f"--to: {name} can't be written as {to} ({brief(error)}); safetensors and hub-folder keep any model"


def _largest_difference(task: ZooTask, inputs: Sequence[Tensor], other: Callable[[Tensor], Tensor]) -> float:
    """How far the outputs of what was written are from the network's.

    Raises:
        ZooError: if too far.
    """
    worst = 0.0
    for x in inputs:
        with torch.no_grad():
            mine, theirs = task.network(x), other(x)
        allowed = AGREE * max(1.0, float(mine.abs().max()))
        if mine.shape != theirs.shape or not torch.allclose(theirs, mine, rtol=0, atol=allowed):
            raise ZooError(
                "--to: what was written gives other outputs than the model, so it isn't kept; use safetensors, and "
                "tell the authors of the zoo"
            )
        worst = max(worst, float((mine - theirs).abs().max()))
    return worst
