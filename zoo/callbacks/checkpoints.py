"""Which states of a run are kept, and where."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor


def free_run_folder(root: Path) -> Path:
    """The next version_N below a folder, for a run without a logger that would name one."""
    taken = [path.name.removeprefix("version_") for path in root.glob("version_*")]
    return root / f"version_{max((int(number) for number in taken if number.isdigit()), default=-1) + 1}"


class BestAndLastCheckpoint(ModelCheckpoint):
    """Lightning's ModelCheckpoint, whose last.ckpt (save_last) is the newest state there is to go on from.

    Lightning's own is written only beside a new best one, so that going on from it repeats all that came since. This
    one is written at every validation, at the end of the run, and when the run is told to stop. A run without a logger
    has a folder of its own too, lightning_logs/version_N below the trainer's default_root_dir.
    """

    _validated = False
    _wrote_last = False  # in the present hook

    @property
    def state_key(self) -> str:
        """As Lightning's, so that runs it began can be gone on with."""
        return super().state_key.replace(type(self).__qualname__, ModelCheckpoint.__qualname__, 1)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        tried_out = getattr(trainer, "fast_dev_run", 0)
        if self.dirpath is None and not trainer.loggers and stage == "fit" and not tried_out:
            self.dirpath = str(free_run_folder(Path(trainer.default_root_dir, "lightning_logs")) / "checkpoints")
        super().setup(trainer, pl_module, stage)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._wrote_last = False
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        # here, and not when the epoch has been closed: a longer run goes on in the middle of it
        if trainer.should_stop or trainer.global_step == trainer.max_steps:
            self._write_last(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn != "fit":
            return
        self._wrote_last = False
        super().on_validation_end(trainer, pl_module)
        self._validated = not trainer.sanity_checking
        if not self._should_save_on_train_epoch_end(trainer):
            self._write_last(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._wrote_last = False
        super().on_train_epoch_end(trainer, pl_module)
        ends = trainer.max_epochs not in (None, -1) and trainer.current_epoch + 1 >= trainer.max_epochs
        if trainer.is_last_batch and (ends or (self._validated and self._should_save_on_train_epoch_end(trainer))):
            self._write_last(trainer)
        self._validated = False

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._wrote_last = False
        super().on_exception(trainer, pl_module, exception)
        if isinstance(exception, SIGTERMException):  # which a task lets happen between two steps only
            self._write_last(trainer)

    def _write_last(self, trainer: pl.Trainer) -> None:
        if not self._wrote_last and not trainer.sanity_checking:
            before = self._last_global_step_saved
            self._save_last_checkpoint(trainer, self._monitor_candidates(trainer))
            self._last_global_step_saved = before  # the best one may be of this very step

    def _save_last_checkpoint(self, trainer: pl.Trainer, monitor_candidates: dict[str, Tensor]) -> None:
        if not getattr(trainer, "fast_dev_run", 0):
            super()._save_last_checkpoint(trainer, monitor_candidates)
            self._wrote_last = True
