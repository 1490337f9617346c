"""A model zoo of adaptive and knowledge-primed attention; importing it registers the vision models with timm."""

import os

# Threads that spin while they wait make a step several times slower as soon as anything else wants a core; sleeping
# costs a little on an idle machine. It is read when PyTorch is imported, so before that, and only if nobody chose.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import zoo.models.vision_transformer  # noqa: F401
