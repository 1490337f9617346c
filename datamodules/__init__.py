"""The data modules."""

from datamodules.images import ImageDataModule
from datamodules.pairs import TextPairDataModule
from datamodules.sequences import SequenceDataModule
from datamodules.tables import GraphTableDataModule
from datamodules.text import TextDataModule

__all__ = ["GraphTableDataModule", "ImageDataModule", "SequenceDataModule", "TextDataModule", "TextPairDataModule"]
