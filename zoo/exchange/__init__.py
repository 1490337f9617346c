"""Trained models in other formats, and checkpoints from weights in other files."""

from zoo.exchange.exporting import export_model
from zoo.exchange.files import FORMATS
from zoo.exchange.importing import import_weights

__all__ = ["FORMATS", "export_model", "import_weights"]
