"""A model zoo of adaptive and knowledge-primed attention; importing it registers the vision models with timm."""

import os
from typing import Any

# Threads that spin while they wait make a step several times slower as soon as anything else wants a core; sleeping
# costs a little on an idle machine. It is read when PyTorch is imported, so before that, and only if nobody chose.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "4000")

import zoo.models.vision_transformer  # noqa: F401  (registers)

__all__ = ["create_model", "list_models", "load_pretrained"]


def __getattr__(name: str) -> Any:
    """The catalogue's functions; they bring Lightning with them, which takes seconds, so only when they are used."""
    if name in __all__:
        import zoo.catalogue

        return getattr(zoo.catalogue, name)
    raise AttributeError(f"module 'zoo' has no attribute {name!r}")
