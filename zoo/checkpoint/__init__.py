"""What a checkpoint is: its claim and identity, its file, the shelf it lies on, and weights carried over by name.

Opening one:

- ``Checkpoint``: a file that was read and checked; ``Checkpoint.open`` makes one of a name, a path or an address.
- ``CheckedCheckpointIO``: how Lightning writes one whole and reads it checked.
- ``CHECKPOINT_KEY``: where in the file the claim is.

What it was made for:

- ``canonical_json``, ``digest``: a data identity as text, and its SHA-256.
- ``differences``, ``check_identity``: two identities compared by name.

The shelf of trained models:

- ``Entry``, ``read_index``, ``entry_of``: its index.
- ``find_checkpoint``: the file that a name, a path or an address stands for.
- ``fetch``, ``is_address``, ``default_cache``: files by address.

Weights carried over to a network for other data:

- ``Axis``, ``carry``, ``rearrange``: by the names of a tensor's rows.
- ``TensorTransfer``, ``summary``: what became of each tensor.
- ``weights_digest``: what weights are known by, whatever file they came in.

This package knows no family: what is carried over of a vocabulary, a classifier or a graph lies with the tasks.
"""

from typing import TYPE_CHECKING, Any

from zoo.checkpoint.checkpoint import Checkpoint
from zoo.checkpoint.identity import CHECKPOINT_KEY, canonical_json, check_identity, differences, digest
from zoo.checkpoint.index import Entry, entry_of, find_checkpoint, read_index
from zoo.checkpoint.remote import default_cache, fetch, is_address
from zoo.checkpoint.transfer import Axis, TensorTransfer, carry, rearrange, summary, weights_digest

if TYPE_CHECKING:
    from zoo.checkpoint.writing import CheckedCheckpointIO

__all__ = [
    "CHECKPOINT_KEY",
    "Axis",
    "CheckedCheckpointIO",
    "Checkpoint",
    "Entry",
    "TensorTransfer",
    "canonical_json",
    "carry",
    "check_identity",
    "default_cache",
    "differences",
    "digest",
    "entry_of",
    "fetch",
    "find_checkpoint",
    "is_address",
    "read_index",
    "rearrange",
    "summary",
    "weights_digest",
]


def __getattr__(name: str) -> Any:
    """What brings Lightning with it, which takes seconds, only when it is used."""
    if name == "CheckedCheckpointIO":
        from zoo.checkpoint.writing import CheckedCheckpointIO

        return CheckedCheckpointIO
    raise AttributeError(f"module 'zoo.checkpoint' has no attribute {name!r}")
