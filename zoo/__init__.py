"""A model zoo of adaptive and knowledge-primed attention; importing it registers the vision models with timm."""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

# A thread that spins for long while it waits makes a step several times slower as soon as anything else wants its
# core; one that sleeps at once takes 70 microseconds to wake, longer than most operations. So it spins for a few of
# them, then sleeps. It is read when PyTorch is imported, so this comes before, and only if nobody chose.
if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & set(os.environ):
    os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "4000"}

import zoo.models.vision_transformer  # noqa: F401  (registers)

if TYPE_CHECKING:
    from zoo.attention import Attention as Attention
    from zoo.attention import PackedMultiheadAttention as PackedMultiheadAttention
    from zoo.attention import create_attention as create_attention
    from zoo.attention import list_attentions as list_attentions
    from zoo.attention import register_attention as register_attention
    from zoo.catalogue import create_model as create_model
    from zoo.catalogue import list_models as list_models
    from zoo.catalogue import load_pretrained as load_pretrained
    from zoo.errors import CheckpointMismatchError as CheckpointMismatchError
    from zoo.errors import Kpnn2Error as Kpnn2Error
    from zoo.errors import ZooError as ZooError
    from zoo.graph import AdjacencySpec as AdjacencySpec
    from zoo.graph import parse_adjacency as parse_adjacency

    __version__: str

# Where the public names are. Some bring Lightning or pandas with them, which take seconds, so each is imported when it
# is first used.
_PLACES = {
    "AdjacencySpec": "zoo.graph",
    "Attention": "zoo.attention",
    "CheckpointMismatchError": "zoo.errors",
    "Kpnn2Error": "zoo.errors",
    "PackedMultiheadAttention": "zoo.attention",
    "ZooError": "zoo.errors",
    "create_attention": "zoo.attention",
    "create_model": "zoo.catalogue",
    "list_attentions": "zoo.attention",
    "list_models": "zoo.catalogue",
    "load_pretrained": "zoo.catalogue",
    "parse_adjacency": "zoo.graph",
    "register_attention": "zoo.attention",
}

__all__ = [
    "AdjacencySpec",
    "Attention",
    "CheckpointMismatchError",
    "Kpnn2Error",
    "PackedMultiheadAttention",
    "ZooError",
    "__version__",
    "create_attention",
    "create_model",
    "list_attentions",
    "list_models",
    "load_pretrained",
    "parse_adjacency",
    "register_attention",
]


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        return getattr(import_module(_PLACES[name]), name)
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("damcha-zoo")
        except PackageNotFoundError:  # a clone on PYTHONPATH
            return "0+unknown"
    raise AttributeError(f"module 'zoo' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
