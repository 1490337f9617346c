"""What the data modules of all families share."""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Self

import lightning.pytorch as pl
import torch
from torch.utils.data import Dataset

from datamodules.loaders import ResumableLoader, ShuffledSampler, StillSampler
from datamodules.sources.base import describe
from zoo.checkpoint.checkpoint import Checkpoint
from zoo.checkpoint.identity import digest
from zoo.errors import CheckpointMismatchError, ZooError
from zoo.registry import Registry


class ZooDataModule(pl.LightningDataModule):
    """A data module that knows what a model of its data must agree with, once it is set up.

    Subclasses set ``_identity`` in ``setup``, have ``batch_size``, and ``num_workers`` among their hyperparameters.
    """

    kept_settings: ClassVar[tuple[str, ...]] = ("batch_size", "split_seed", "val_fraction", "test_fraction")
    """Names of the settings that a run keeps from its beginning: with others it would go on with other samples."""

    own_argument: ClassVar[str] = "path"
    """Name of the argument that a user's own data are given by."""

    sources: ClassVar[Registry[Any]]
    """The register that ``source`` names something of."""

    batch_size: int
    _identity: dict[str, Any] | None = None
    _wishes: Mapping[str, Any] = MappingProxyType({})

    def suit(self, wishes: Mapping[str, Any]) -> None:
        """Make the data as a model wants it, where neither an argument nor a checkpoint says otherwise.

        The tasks of this zoo call it themselves as a run begins. For a model of another kind, and to set up data
        without a trainer, call it before ``setup``; what is set up already stays.

        Args:
            wishes: of a model of pictures: input_size (C, H, W), mean, std, interpolation and crop_pct, any of them, as
                in timm's records. Text and tables take nothing from a model.
        """
        self._wishes = wishes

    def identity(self) -> dict[str, Any]:
        """The data identity: names in order and whatever rebuilds the model side, in JSON's types.

        Raises:
            ZooError: before ``setup``.
        """
        if self._identity is None:
            raise ZooError("identity: not known before setup; call prepare_data() and setup('fit') first")
        return self._identity

    @classmethod
    def name_sources(cls) -> None:
        """Add to the docstring which names ``source`` takes, as the help is made of docstrings."""
        text = re.sub(r"^            There are: .*\n", "", cls.__doc__ or "", flags=re.M)
        told = f"            There are: {describe(cls.sources)}.\n"
        pattern = re.compile(r"(^        source: .*?\n)(?=        \S|\n)", re.M | re.S)
        cls.__doc__ = pattern.sub(lambda found: found[1] + told, text)

    @staticmethod
    def as_in_checkpoint(path: str) -> dict[str, Any]:
        """Arguments with which other data is read as a checkpoint's was, where it takes more than its settings."""
        return {}

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, *args: Any, **settings: Any) -> Self:
        """As Lightning's, with the settings that a checkpoint of this zoo keeps, after the same checks as every other.

        Args:
            checkpoint_path: the file, a name of zoo list, an address, an open file, or a ``Checkpoint``.
            args: not looked at; there is nothing to put on a device.
            settings: what replaces the checkpoint's.

        Raises:
            ZooError: if the file is missing, damaged, holds code, or was made with another data module.
        """
        checkpoint = Checkpoint.open(checkpoint_path)
        here = f"{cls.__module__}.{cls.__qualname__}"
        if checkpoint.data != here:
            made = "without a data module" if checkpoint.data is None else f"with {checkpoint.data}"
            raise CheckpointMismatchError(
                f"{checkpoint.path} was made {made}, not with {here}; name another", argument="checkpoint"
            )
        return cls(**{**checkpoint.data_settings, **settings})

    @property
    def digest(self) -> str:
        """SHA-256 of the identity's canonical JSON."""
        return digest(self.identity())

    def _training_loader(self, dataset: Dataset[Any], sampler: ShuffledSampler, **options: Any) -> ResumableLoader:
        """A loader that can go on in the midst of an epoch; of the same batches every epoch with overfit_batches."""
        overfitting = getattr(self.trainer, "overfit_batches", 0) > 0
        return ResumableLoader(dataset, StillSampler(sampler) if overfitting else sampler, **options)

    def _options(self) -> dict[str, Any]:
        """What all loaders have in common."""
        workers = self.hparams["num_workers"]
        return {
            "batch_size": self.batch_size,
            "num_workers": workers,
            "persistent_workers": workers > 0,
            "pin_memory": torch.cuda.is_available(),
        }
