"""The data modules."""

from datamodules.tables import GraphTableDataModule
from datamodules.text import TextDataModule

__all__ = ["GraphTableDataModule", "TextDataModule"]
