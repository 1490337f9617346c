"""Carry trained weights over to a network for other data, by name, and say what became of each."""

import hashlib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from zoo.errors import ZooError, listed

Outcome = Literal["kept", "moved", "resized", "new", "dropped"]


@dataclass
class TensorTransfer:
    """What became of a tensor: ``kept``, ``moved`` (other place or order), ``resized``, ``new`` or ``dropped``."""

    tensor: str
    outcome: Outcome
    note: str = ""

    def plain(self) -> dict[str, str]:
        """As checkpoints keep it, under the names that every version of the zoo reads."""
        return {"tensor": self.tensor, "fate": self.outcome, "note": self.note}


def read_transfers(saved: object) -> list[TensorTransfer]:
    """Those that a checkpoint's claim keeps as ``transfer``, each as ``TensorTransfer.plain`` wrote it.

    Raises:
        ZooError: if it holds anything else.
    """
    if isinstance(saved, list) and all(_is_plain(item) for item in saved):
        return [TensorTransfer(item["tensor"], item["fate"], item.get("note", "")) for item in saved]
    raise ZooError("what it says of the weights it started from was altered; take another", argument="checkpoint")


def _is_plain(item: object) -> bool:
    if not isinstance(item, dict) or not {"tensor", "fate"} <= set(item) <= {"tensor", "fate", "note"}:
        return False
    return (
        item["fate"] in get_args(Outcome) and isinstance(item["tensor"], str) and isinstance(item.get("note", ""), str)
    )


def summary(transfers: Sequence[TensorTransfer]) -> str:
    """A Markdown table of what became of each tensor; those simply kept share a row."""
    same = [transfer for transfer in transfers if transfer.outcome == "kept"]
    rows = [
        f"| {transfer.outcome} | {transfer.tensor} | {transfer.note} |"
        for transfer in transfers
        if transfer.outcome != "kept"
    ]
    if same:
        rows.insert(0, f"| kept | {len(same)} tensors | as they were |")
    return "\n".join(["| | tensor | |", "|---|---|---|", *rows])


@dataclass
class Axis:
    """A dimension of a tensor whose places have names, here and there."""

    dim: int
    what: str
    here: Sequence[Hashable]
    there: Sequence[Hashable]

    @property
    def common(self) -> tuple[list[int], list[int]]:
        """The places, here and there, of the names that both have."""
        place = {name: i for i, name in enumerate(self.there)}
        pairs = [(i, place[name]) for i, name in enumerate(self.here) if name in place]
        return [i for i, _ in pairs], [i for _, i in pairs]

    def note(self) -> str:
        known, own = set(self.there), set(self.here)
        new = [name for name in self.here if name not in known]
        gone = [name for name in self.there if name not in own]
        parts = [f"{len(self.here) - len(new)} of {len(self.here)} {self.what} by name"]
        if new:
            parts.append(f"new: {_names(new)}")
        if gone:
            parts.append(f"gone: {_names(gone)}")
        return ", ".join(parts)


def _names(names: Sequence[Hashable]) -> str:
    return listed([name.decode(errors="replace") if isinstance(name, bytes) else name for name in names])


def rearrange(mine: Tensor, theirs: Tensor, axes: Sequence[Axis]) -> tuple[Tensor, Outcome, str]:
    """``mine`` with the values of ``theirs`` wherever both have the names, the outcome, and a note on it.

    Args:
        mine: the tensor to fill; it isn't changed.
        theirs: the other's, of as many dimensions.
        axes: the dimensions whose places have names; the others must agree in size.
    """
    named = {axis.dim: axis for axis in axes}
    if mine.ndim != theirs.ndim or any(mine.shape[d] != theirs.shape[d] for d in range(mine.ndim) if d not in named):
        return mine, "new", f"{shape_of(theirs)} there, {shape_of(mine)} here"
    changed = [axis for axis in axes if list(axis.here) != list(axis.there)]
    if not changed:
        return theirs, "kept", ""
    here: list[Tensor] = []
    there: list[Tensor] = []
    for d in range(mine.ndim):
        rows = named[d].common if d in named else (list(range(mine.shape[d])),) * 2
        if not rows[0]:
            return mine, "new", f"no {named[d].what} in common"
        for place, index in ((here, rows[0]), (there, rows[1])):
            place.append(torch.tensor(index).view(-1, *[1] * (mine.ndim - 1 - d)))
    filled = mine.clone()
    filled[tuple(here)] = theirs.to(mine.dtype)[tuple(there)]
    return filled, "moved", "; ".join(axis.note() for axis in changed)


def carry(
    own: Mapping[str, Tensor], source: Mapping[str, Tensor], axes: Mapping[str, Sequence[Axis]]
) -> tuple[dict[str, Tensor], list[TensorTransfer]]:
    """A state dict like ``own`` with the values of ``source``, and what became of each tensor of both.

    Args:
        own: the state dict to fill; it isn't changed.
        source: the other's.
        axes: by tensor, the dimensions whose places have names; the others must agree in size.
    """
    filled, transfers = dict(own), []
    for name, mine in own.items():
        if name not in source:
            transfers.append(TensorTransfer(name, "new", "not there"))
            continue
        filled[name], outcome, note = rearrange(mine, source[name], axes.get(name, ()))
        transfers.append(TensorTransfer(name, outcome, note))
    transfers += [
        TensorTransfer(name, "dropped", f"{shape_of(source[name])}, no place here")
        for name in source
        if name not in own
    ]
    return filled, transfers


def shape_of(tensor: Tensor) -> str:
    """A shape for a note."""
    return " x ".join(map(str, tensor.shape)) or "a number"


def weights_digest(state: Mapping[str, Tensor]) -> str:
    """SHA-256, as hex, over names, types, shapes and bytes of tensors, in the order of their names."""
    found = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
