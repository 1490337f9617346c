"""Where `lightning predict` writes."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.utilities import rank_zero_info

from zoo.errors import ZooError


class PredictionWriter(BasePredictionWriter):
    """Write predictions to a JSON Lines file, one object a line, as they are made.

    The file gets its name when the last line is written; until then it ends in ``.part``. With several processes each
    writes its own, its rank before the suffix.

    Args:
        path: the file to write.
    """

    def __init__(self, path: str = "predictions.jsonl") -> None:
        super().__init__(write_interval="batch")
        self.path = path
        self._target = Path(path)
        self._file: TextIO | None = None

    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        target = Path(self.path)
        if trainer.world_size > 1:
            target = target.with_name(f"{target.stem}.{trainer.global_rank}{target.suffix}")
        self._target = target
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(f"{target}.part", "w", encoding="utf-8")
        except OSError as error:
            raise ZooError(
                f"predictions.path: {target} can't be written ({error.strerror}); name another file"
            ) from None

    def write_on_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        prediction: Sequence[Mapping[str, Any]],
        batch_indices: Sequence[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        if self._file is not None:
            self._file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in prediction)
            self._file.flush()

    def on_predict_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._file is not None:
            self._file.close()
            os.replace(f"{self._target}.part", self._target)
            rank_zero_info(f"Predictions are in {self._target}")
