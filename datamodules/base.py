"""What the data modules of all families share."""

from typing import Any

import lightning.pytorch as pl
import torch

from zoo.errors import ZooError
from zoo.identity import digest

SPLITS = ("train", "val", "test")


class ZooDataModule(pl.LightningDataModule):
    """A data module that knows what a model of its data must agree with, once it is set up.

    Subclasses set ``_identity`` in ``setup``, have ``batch_size``, and ``num_workers`` among their hyperparameters.
    """

    batch_size: int
    _identity: dict[str, Any] | None = None

    def identity(self) -> dict[str, Any]:
        """The data identity: names in order and whatever rebuilds the model side, in JSON's types.

        Raises:
            ZooError: before ``setup``.
        """
        if self._identity is None:
            raise ZooError("identity: not known before setup; call prepare_data() and setup('fit') first")
        return self._identity

    @property
    def digest(self) -> str:
        """SHA-256 of the identity's canonical JSON."""
        return digest(self.identity())

    def _options(self) -> dict[str, Any]:
        """What all loaders have in common."""
        workers = self.hparams["num_workers"]
        return {
            "batch_size": self.batch_size,
            "num_workers": workers,
            "persistent_workers": workers > 0,
            "pin_memory": torch.cuda.is_available(),
        }
