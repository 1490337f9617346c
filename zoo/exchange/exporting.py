"""Trained models in other formats, and checkpoints from weights in other files.

Out: safetensors, ONNX, ``torch.export``, and the folders that the Hugging Face hub and timm read. Back: whatever holds
tensors by name, once it is known what they were trained for.
"""

import importlib.util
import json
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import safetensors.torch
import timm
import torch
from lightning.pytorch.trainer.states import TrainerFn
from safetensors import SafetensorError, safe_open
from timm.models import save_for_hf
from torch import Tensor
from torch.export import ExportedProgram

from zoo.adapters import has_lora
from zoo.catalogue import load_pretrained, verify_file
from zoo.checkpoint.checkpoint import Checkpoint
from zoo.checkpoint.identity import (
    CHECKPOINT_KEY,
    canonical_json,
    check_identity,
    differences,
    read_checkpoint,
    read_claim,
)
from zoo.checkpoint.index import Entry, companion, entry_of
from zoo.checkpoint.remote import is_address
from zoo.checkpoint.transfer import weights_digest
from zoo.checkpoint.writing import CheckedCheckpointIO
from zoo.errors import CheckpointMismatchError, ZooError, listed
from zoo.families import class_path, families
from zoo.tasks import ZooTask
from zoo.tasks.claims import IDENTITY_TENSOR, claim_of
from zoo.tasks.pretrained import NETWORK, network_tensors
from zoo.tasks.settings import plain

FORMATS = {
    "safetensors": ".safetensors",
    "onnx": ".onnx",
    "torch-export": ".pt2",
    "hub-folder": "",
    "checkpoint": ".ckpt",
}
"""Formats by name, and how a file's name ends in each; hub-folder is a folder."""

AGREE = 1e-3  # of the largest output: float32 in another order differs by 1e-5, a wrong graph by far more
_PROTOBUF_BYTES = 2_000_000_000  # what one ONNX file can hold, less what isn't weights
_WEIGHTS, _CONFIG = "model.safetensors", "config.json"  # the hub's names
_DIGEST = "weights_sha256"  # of the tensors, in the metadata of a .safetensors file and in a folder's config.json
_WRAPPERS = ("module.", NETWORK)  # DistributedDataParallel's, and a task's
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
    target = _checked_place(out, FORMATS[to], overwrite)
    if to == "onnx":
        _need("onnx", "onnxscript")
    given = str(name_or_path)
    checkpoint = Checkpoint.open(name_or_path)
    claim: Mapping[str, Any] = checkpoint.claim
    task = load_pretrained(checkpoint)
    if has_lora(task.network):
        task.merge_adapter()
        claim = {name: value for name, value in claim.items() if name != "adapter"} | {"settings": plain(task.settings)}
    with _placed(target) as part:
        if to == "safetensors":
            return _write_safetensors(task, part, {CHECKPOINT_KEY: json.dumps(claim)})
        if to == "hub-folder":
            entry = None if checkpoint.path == given or is_address(given) else entry_of(given)
            return _write_hub_folder(task, claim, part, entry, target.name)
        if to == "checkpoint":
            return _write_checkpoint(task, claim, part)
        return (_write_onnx if to == "onnx" else _write_program)(task, claim, part)


def import_weights(
    weights: str | Path,
    out: str | Path,
    like: str | Path | None = None,
    made_for: tuple[ZooTask, pl.LightningDataModule] | None = None,
    overwrite: bool = False,
) -> list[str]:
    """Make a checkpoint from weights in another file: checked, written whole, and loaded again.

    Args:
        weights: a safetensors file, a hub folder, or a file of ``torch.save`` with a state dict, alone or under
            ``state_dict``. Names may begin with ``network.``, ``module.`` and ``_orig_mod.``.
        out: the checkpoint to write, ending in .ckpt.
        like: a checkpoint or a name on the shelf whose weights these replace.
        made_for: a task and its data; they are set up for their identity.
        overwrite: replace ``out`` if it is there.

    With neither ``like`` nor ``made_for`` the file must say itself what it is, as those of ``export_model`` do; if it
    does, it must agree with what is given.

    Returns:
        What was checked.

    Raises:
        ZooError: for files that can't be read, or tensors that are missing, unknown, of another shape or no numbers.
            Then nothing is written.
    """
    target = _checked_place(out, ".ckpt", overwrite)
    if like is not None and made_for is not None:
        raise ZooError("--like: given beside --config; each says what the weights are for, so leave one of them out")
    tensors, own = _read_weights(Path(weights))
    claim, task = _destination(weights, own, like, made_for)
    if own is not None:
        _compare(weights, own, claim, task)
    _fill(task, tensors, weights)
    claim = claim | {"settings": plain(task.settings)}
    with _placed(target) as part:
        return _write_checkpoint(task, claim, part)


# ---------------------------------------------------------------------- places


def _checked_place(out: str | Path, suffix: str, overwrite: bool) -> Path:
    target = Path(out)
    if suffix and target.suffix != suffix:
        raise ZooError(f"--out: got {str(out)!r}; the file must end in {suffix}")
    if not target.name:
        raise ZooError(f"--out: got {str(out)!r}; name a new folder")
    if not target.parent.is_dir():
        raise ZooError(f"--out: got {str(out)!r}; there is no folder {target.parent}, so make it first")
    if suffix and target.is_dir():
        raise ZooError(f"--out: {out} is a folder; name a file in it")
    if not suffix and target.is_file():
        raise ZooError(f"--out: {out} is a file; name a folder that isn't there yet")
    if target.exists() and not overwrite and (suffix or any(target.iterdir())):
        raise ZooError(f"--out: {out} is there already; name another, or replace it with --overwrite")
    return target


@contextmanager
def _placed(target: Path) -> Iterator[Path]:
    """A path to write to beside the target, which is replaced if all goes well."""
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as scratch:
        part = Path(scratch) / target.name
        yield part
        if target.is_dir():
            for file in part.iterdir():
                os.replace(file, target / file.name)
        else:
            os.replace(part, target)


def _size(file: Path) -> str:
    return f"{file.stat().st_size:,} bytes"


def _need(*packages: str) -> None:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise ZooError(
            f"--to: got onnx, which needs {' and '.join(missing)}; pip install {' '.join(missing)}, or "
            "'damcha-zoo[export]' for all of it"
        )


# ---------------------------------------------------------------------- out: tensors


def _write_checkpoint(task: ZooTask, claim: Mapping[str, Any], file: Path) -> list[str]:
    checkpoint = {
        "epoch": 0,
        "global_step": 0,
        "pytorch-lightning_version": version("lightning"),
        "state_dict": task.state_dict(),
        "hparams_name": "kwargs",
        "hyper_parameters": claim["settings"],
        CHECKPOINT_KEY: dict(claim),
    }
    CheckedCheckpointIO().save_checkpoint(checkpoint, file)
    again = load_pretrained(file).state_dict()
    if any(not torch.equal(tensor, again[name]) for name, tensor in checkpoint["state_dict"].items()):
        raise ZooError(f"--out: {file.name} holds other tensors than were written; check the disk")
    return verify_file(str(file))


def _write_safetensors(task: ZooTask, file: Path, metadata: Mapping[str, str]) -> list[str]:
    # clones: tied weights share memory, which the format doesn't have
    tensors = {name: t.detach().clone().contiguous() for name, t in network_tensors(task.state_dict()).items()}
    digest_of_all = {_DIGEST: weights_digest(tensors)}  # the format has no checksums
    file.write_bytes(safetensors.torch.save(tensors, {"format": "pt", **digest_of_all, **metadata}))
    again = safetensors.torch.load_file(file)
    if any(not torch.equal(tensor, again[name]) for name, tensor in tensors.items()):
        raise ZooError(f"--out: {file.name} holds other tensors than were written; check the disk")
    return [f"{len(tensors)} tensors", _size(file)]


def _write_hub_folder(
    task: ZooTask, claim: Mapping[str, Any], folder: Path, entry: Entry | None, name: str
) -> list[str]:
    folder.mkdir()
    if task.hub_library == "timm":
        checked = _write_timm_folder(task, claim, folder)
    else:
        sha256 = weights_digest(network_tensors(task.state_dict()))
        config = {"architecture": type(task.network).__name__, _DIGEST: sha256, CHECKPOINT_KEY: claim}
        (folder / _CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        checked = _write_safetensors(task, folder / _WEIGHTS, {})
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
                _DIGEST: weights_digest(network_tensors(task.state_dict())),
                CHECKPOINT_KEY: claim,
            },
            model_args=task.network_arguments,
            data_config=pictures,
            safe_serialization=True,
        )
        _drop_origin(folder / _CONFIG)
        again = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    except (RuntimeError, ValueError, TypeError) as error:
        raise ZooError(
            f"--to: timm can't keep {claim['settings']['name']} in a folder ({_brief(error)}); use safetensors"
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


# ---------------------------------------------------------------------- out: graphs


def _write_program(task: ZooTask, claim: Mapping[str, Any], file: Path) -> list[str]:
    inputs = task.example_inputs().inputs
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch about itself
        torch.export.save(_traced(task, claim, "torch-export"), file, extra_files={"zoo.json": json.dumps(claim)})
        again = torch.export.load(file).module()
    worst = _largest_difference(task, inputs, again)
    return [_size(file), f"loaded again, largest difference {worst:.1g}"]


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
    done = [_size(file), f"opset {graph.model.opset_imports['']}"]
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
    return f"--to: {name} can't be written as {to} ({_brief(error)}); safetensors and hub-folder keep any model"


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


def _brief(error: Exception) -> str:
    return " ".join(str(error).split())[:160] or type(error).__name__


# ---------------------------------------------------------------------- back


def _read_weights(path: Path) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    """Tensors under the network's own names, and what the file claims to be, if anything."""
    claim: Any = None
    if path.is_dir():
        if not (path / _WEIGHTS).is_file() or not (path / _CONFIG).is_file():
            raise ZooError(f"WEIGHTS: the folder {path} lacks {_WEIGHTS} or {_CONFIG}; name one with both, or a file")
        config = _json(path / _CONFIG, (path / _CONFIG).read_bytes())
        claim = config.get(CHECKPOINT_KEY)
        tensors, _ = _read_safetensors(path / _WEIGHTS)
        _check_digest(path / _WEIGHTS, tensors, config.get(_DIGEST))
    elif not path.is_file():
        raise ZooError(f"WEIGHTS: there is no file {path}; check the path")
    elif path.suffix == ".safetensors":
        tensors, metadata = _read_safetensors(path)
        _check_digest(path, tensors, metadata.get(_DIGEST))
        if CHECKPOINT_KEY in metadata:
            claim = _json(path, metadata[CHECKPOINT_KEY])
    else:
        tensors, claim = _read_torch(path)
    if claim is not None:
        try:
            claim = read_claim({CHECKPOINT_KEY: claim, "state_dict": tensors}, path)
        except ZooError as error:
            raise error.about("WEIGHTS") from None
        if claim.get("adapter"):
            raise ZooError(f"WEIGHTS: {path} holds an adapter, not a whole model; zoo export merges it")
    return _bare(tensors, path), claim


def _check_digest(path: Path, tensors: Mapping[str, Tensor], wanted: object) -> None:
    if wanted is not None and weights_digest(tensors) != wanted:
        raise ZooError(
            f"WEIGHTS: {path} holds other tensors than were written; it was damaged or altered, copy it again"
        )


def _json(path: Path, text: str | bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ZooError(f"WEIGHTS: {path} holds no JSON where there should be ({error}); take it anew") from None
    if not isinstance(found, dict):
        raise ZooError(f"WEIGHTS: {path} holds a JSON {type(found).__name__}, not an object; take it anew")
    return found


def _read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except SafetensorError as error:
        raise ZooError(
            f"WEIGHTS: {path} ({path.stat().st_size:,} bytes) is no whole safetensors file ({_brief(error)}); copy it "
            "again"
        ) from None


def _read_torch(path: Path) -> tuple[dict[str, Tensor], Any]:
    with open(path, "rb") as file:
        is_archive = file.read(2) == b"PK"  # as torch.save has written them since 1.6
    try:
        found = read_checkpoint(path) if is_archive else _read_old(path)
    except ZooError as error:
        raise error.about("WEIGHTS") from None
    state = found.get("state_dict", found)
    if not isinstance(state, dict):
        raise ZooError(f"WEIGHTS: {path} has a {type(state).__name__} as state_dict; it must hold tensors by name")
    strange = [name for name, value in state.items() if not isinstance(name, str) or not isinstance(value, Tensor)]
    if strange or not state:
        why = f"{listed(strange)} is no tensor" if strange else "it is empty"
        raise ZooError(
            f"WEIGHTS: {path} is no state dict ({why}); save model.state_dict() alone, or under the key state_dict"
        )
    return dict(state), found.get(CHECKPOINT_KEY)


def _read_old(path: Path) -> dict[str, Any]:
    """A file of ``torch.save`` from before it wrote zip archives."""
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception:  # bytes that are no pickle make it fail in any way
        raise ZooError(
            f"{path} ({path.stat().st_size:,} bytes) holds no tensors that can be read; it was cut short, damaged or "
            "is another kind of file, so copy it again, or save it as safetensors"
        ) from None
    if not isinstance(found, dict):
        raise ZooError(f"{path} holds a {type(found).__name__}; save model.state_dict() in it")
    return found


def _bare(tensors: Mapping[str, Tensor], path: Path) -> dict[str, Tensor]:
    """Names as the network itself has them, without those of what was around it."""
    found: dict[str, Tensor] = {}
    names = {name: name.replace("_orig_mod.", "") for name in tensors}  # torch.compile's
    for wrapper in _WRAPPERS:
        if all(name.startswith(wrapper) or name == IDENTITY_TENSOR for name in names.values()):
            names = {old: name.removeprefix(wrapper) for old, name in names.items()}
    for old, name in names.items():
        if name in found:
            raise ZooError(f"WEIGHTS: {path} has {name} twice, as {old} and under another name; keep one of them")
        found[name] = tensors[old]
    return found


def _destination(
    weights: str | Path,
    own: dict[str, Any] | None,
    like: str | Path | None,
    made_for: tuple[ZooTask, pl.LightningDataModule] | None,
) -> tuple[dict[str, Any], ZooTask]:
    """What the checkpoint will claim to be, and a task of that claim with weights that don't matter."""
    if like is not None:
        try:
            checkpoint = Checkpoint.open(like)
            claim, task = checkpoint.claim, load_pretrained(checkpoint)
        except ZooError as error:
            raise error.about("--like") from None
        if has_lora(task.network):
            task.merge_adapter()
        claim = {name: value for name, value in claim.items() if name != "adapter"}
        return claim | {"step_seed": None, "transfer": []}, task
    found = own if made_for is None else _claim_of(*made_for)
    if found is None:
        raise ZooError(
            f"WEIGHTS: {weights} doesn't say what it was trained for; give --like, a checkpoint of the same model and "
            "data, or --config, the YAML file of its model and data"
        )
    claim = found
    kinds = {class_path(family.task): family.task for family in families()}
    if claim["task"] not in kinds:
        raise ZooError(f"WEIGHTS: {weights} is of {claim['task']}, which is no task of this zoo; use one that is")
    try:
        task = kinds[claim["task"]](**claim["settings"])
        task.on_load_checkpoint({CHECKPOINT_KEY: claim, "state_dict": {}})
    except ZooError as error:
        if error.argument == "checkpoint":
            raise error.about("WEIGHTS", weights) from None
        raise
    except Exception as error:  # settings and identity may hold anything
        raise ZooError(
            f"WEIGHTS: no model can be made from the settings and data that {weights} names ({_brief(error)}); take it "
            "anew, or give --config"
        ) from None
    return claim, task


def _claim_of(task: ZooTask, data: pl.LightningDataModule) -> dict[str, Any]:
    """The claim of a checkpoint of this task on this data."""
    if not hasattr(data, "identity"):
        raise ZooError(f"data: got {type(data).__name__}, which has no identity; use a data module of this zoo")
    trainer = pl.Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.state.fn = TrainerFn.FITTING
    trainer.strategy.connect(task)
    task.trainer = data.trainer = trainer
    if hasattr(data, "suit"):  # as a run tells its data what its model was made for
        data.suit(task.data_wishes())
    data.prepare_data()
    data.setup("fit")
    return claim_of(task, data, data.identity())


def _compare(weights: str | Path, own: Mapping[str, Any], claim: Mapping[str, Any], task: ZooTask) -> None:
    """Raise CheckpointMismatchError if the weights say they are for another model or other data."""
    if own["task"] != claim["task"]:
        raise CheckpointMismatchError(f"WEIGHTS: {weights} is of {own['task']}, not of {claim['task']}; give another")
    alone = "Leave --like and --config out to take what the weights say"
    try:
        check_identity(own["identity"], claim["identity"], alone)
    except CheckpointMismatchError as error:
        raise error.about("WEIGHTS") from None
    saved, here = task.network_of(own["settings"]), task.network_of(plain(task.settings))
    if found := differences(plain(saved), plain(here)):
        raise CheckpointMismatchError(f"WEIGHTS: {weights} is of another network. {'; '.join(found)}. {alone}")


def _fill(task: ZooTask, tensors: Mapping[str, Tensor], weights: str | Path) -> None:
    """Load all tensors into the task, or raise ZooError."""
    state = {name if name == IDENTITY_TENSOR else f"{NETWORK}{name}": tensor for name, tensor in tensors.items()}
    own = task.state_dict()
    other = [
        f"{name} is {state[name].dtype}, not {tensor.dtype}"
        for name, tensor in own.items()
        if name in state and state[name].is_floating_point() != tensor.is_floating_point()
    ]
    try:
        if other:
            raise CheckpointMismatchError(f"its tensors don't fit this network. {'; '.join(other[:5])}")
        task.load_state_dict(state)
    except ZooError as error:
        raise error.about("WEIGHTS", weights) from None
    except (RuntimeError, NotImplementedError) as error:  # sparse, quantised, without data
        raise ZooError(f"WEIGHTS: {weights}: {_brief(error)}; save ordinary dense tensors") from None
    learned = {name for name, _ in task.named_parameters()}
    wrong = [
        name
        for name, tensor in task.state_dict().items()
        if tensor.is_floating_point() and bool(tensor.isnan().any() or (name in learned and tensor.isinf().any()))
    ]
    if wrong:
        raise ZooError(f"WEIGHTS: {weights}: {listed(wrong)} holds values that are no finite numbers; take others")
