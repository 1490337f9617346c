"""Looking inside a trained model: what its attention does with a sample, what it has learned, and what it needs."""

from zoo.inspection.ablation import ablate_blocks
from zoo.inspection.inspecting import Inspection, inspect_checkpoint

__all__ = ["Inspection", "ablate_blocks", "inspect_checkpoint"]
