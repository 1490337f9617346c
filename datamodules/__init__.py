"""The data modules."""

from datamodules.text import TextDataModule

__all__ = ["TextDataModule"]
