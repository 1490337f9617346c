"""A model zoo of adaptive and knowledge-primed attention; importing it registers the vision models with timm."""

import os
from typing import Any

# A thread that spins for long while it waits makes a step several times slower as soon as anything else wants its
# core; one that sleeps at once takes 70 microseconds to wake, longer than most operations. So it spins for a few of
# them, then sleeps. It is read when PyTorch is imported, so this comes before, and only if nobody chose.
if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & set(os.environ):
    os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "4000"}

import zoo.models.vision_transformer  # noqa: F401  (registers)

__all__ = ["create_model", "list_models", "load_pretrained"]


def __getattr__(name: str) -> Any:
    """The catalogue's functions; they bring Lightning with them, which takes seconds, so only when they are used."""
    if name in __all__:
        import zoo.catalogue

        return getattr(zoo.catalogue, name)
    raise AttributeError(f"module 'zoo' has no attribute {name!r}")
