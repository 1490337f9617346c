"""The data modules."""

from datamodules.images import ImageDataModule
from datamodules.tables import GraphTableDataModule
from datamodules.text import TextDataModule

__all__ = ["GraphTableDataModule", "ImageDataModule", "TextDataModule"]
