"""Trained models in other formats, and checkpoints from weights in other files."""

from zoo.exchange.exporting import FORMATS, export_model, import_weights

__all__ = ["FORMATS", "export_model", "import_weights"]
