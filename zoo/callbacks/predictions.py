"""Where `lightning predict` writes."""

import csv
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BasePredictionWriter

from zoo.errors import ZooError
from zoo.tasks import ZooTask


class PredictionWriter(BasePredictionWriter):
    """Write predictions to a file as they are made: .csv, or .jsonl with one object a line.

    The file gets its name when the last line is written; until then it ends in ``.part``. With several processes each
    writes its own, its rank before the suffix.

    Args:
        path: the file to write, .csv or .jsonl; default: predictions.jsonl for text, predictions.csv for tables.
    """

    def __init__(self, path: str | None = None) -> None:
        super().__init__(write_interval="batch")
        if path is not None and Path(path).suffix not in (".csv", ".jsonl"):
            raise ZooError(f"predictions.path: got {path!r}; the file must end in .csv or .jsonl")
        self.path = path
        self._target = Path()
        self._file: TextIO | None = None
        self._table: csv.DictWriter[str] | None = None

    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        suffix = pl_module.predictions_suffix if isinstance(pl_module, ZooTask) else ".jsonl"
        target = Path(self.path or f"predictions{suffix}")
        if trainer.world_size > 1:
            target = target.with_name(f"{target.stem}.{trainer.global_rank}{target.suffix}")
        if target.is_dir():
            raise ZooError(f"predictions.path: {target} is a folder; name a file")
        datamodule: pl.LightningDataModule | None = getattr(trainer, "datamodule", None)
        for name, value in ({} if datamodule is None else datamodule.hparams).items():
            if isinstance(value, str) and target.exists() and Path(value).exists() and target.samefile(value):
                raise ZooError(f"predictions.path: got {target}, which is data.{name} itself; name another file")
        self._target, self._table = target, None
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(f"{target}.part", "w", encoding="utf-8", newline="")
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
        if self._file is None or not prediction:
            return
        if self._target.suffix == ".jsonl":
            self._file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in prediction)
        else:
            if self._table is None:
                self._table = csv.DictWriter(self._file, fieldnames=list(prediction[0]))
                self._table.writeheader()
            self._table.writerows(prediction)
        self._file.flush()

    def on_predict_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._file is not None:
            self._file.close()
            os.replace(f"{self._target}.part", self._target)
            print(f"Predictions: {self._target}")
