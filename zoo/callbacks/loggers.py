"""Where callbacks draw."""

import lightning.pytorch as pl
from lightning.pytorch.loggers import TensorBoardLogger


def tensorboards(trainer: pl.Trainer) -> list[TensorBoardLogger]:
    """The loggers of a run that take texts and pictures."""
    return [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]
