"""Checkpoints from weights in other files: anything with tensors by name, once it is known what they are for."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from safetensors import SafetensorError, safe_open
from torch import Tensor

from zoo.adapters import has_lora
from zoo.catalogue import load_pretrained
from zoo.checkpoint.checkpoint import Checkpoint
from zoo.checkpoint.identity import (
    CHECKPOINT_KEY,
    check_identity,
    differences,
    read_checkpoint,
    read_claim,
)
from zoo.checkpoint.transfer import weights_digest
from zoo.errors import CheckpointMismatchError, ZooError, listed
from zoo.exchange.files import CONFIG, DIGEST, WEIGHTS, brief, write_checkpoint
from zoo.families import class_path, families
from zoo.placing import checked_place, placed
from zoo.tasks import ZooTask
from zoo.tasks.claims import IDENTITY_TENSOR, claim_of
from zoo.tasks.pretrained import NETWORK
from zoo.tasks.settings import plain

_WRAPPERS = ("module.", NETWORK)  # DistributedDataParallel's, and a task's


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
    target = checked_place(out, ".ckpt", overwrite)
    if like is not None and made_for is not None:
        raise ZooError("--like: given beside --config; each says what the weights are for, so leave one of them out")
    tensors, own = _read_weights(Path(weights))
    claim, task = _destination(weights, own, like, made_for)
    if own is not None:
        _compare(weights, own, claim, task)
    _fill(task, tensors, weights)
    claim = claim | {"settings": plain(task.settings)}
    with placed(target) as part:
        return write_checkpoint(task, claim, part)


# ---------------------------------------------------------------------- reading


def _read_weights(path: Path) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    """Tensors under the network's own names, and what the file claims to be, if anything."""
    claim: Any = None
    if path.is_dir():
        if not (path / WEIGHTS).is_file() or not (path / CONFIG).is_file():
            raise ZooError(f"WEIGHTS: the folder {path} lacks {WEIGHTS} or {CONFIG}; name one with both, or a file")
        config = _json(path / CONFIG, (path / CONFIG).read_bytes())
        claim = config.get(CHECKPOINT_KEY)
        tensors, _ = _read_safetensors(path / WEIGHTS)
        _check_digest(path / WEIGHTS, tensors, config.get(DIGEST))
    elif not path.is_file():
        raise ZooError(f"WEIGHTS: there is no file {path}; check the path")
    elif path.suffix == ".safetensors":
        tensors, metadata = _read_safetensors(path)
        _check_digest(path, tensors, metadata.get(DIGEST))
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
            f"WEIGHTS: {path} ({path.stat().st_size:,} bytes) is no whole safetensors file ({brief(error)}); copy it "
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
            f"WEIGHTS: no model can be made from the settings and data that {weights} names ({brief(error)}); take it "
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
        raise ZooError(f"WEIGHTS: {weights}: {brief(error)}; save ordinary dense tensors") from None
    learned = {name for name, _ in task.named_parameters()}
    wrong = [
        name
        for name, tensor in task.state_dict().items()
        if tensor.is_floating_point() and bool(tensor.isnan().any() or (name in learned and tensor.isinf().any()))
    ]
    if wrong:
        raise ZooError(f"WEIGHTS: {weights}: {listed(wrong)} holds values that are no finite numbers; take others")
