"""Pictures and their classes: found, checked, split, and cut and normalised as a model wants them."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch.utils.data import DataLoader
from torchvision.transforms import Compose

from datamodules.base import ZooDataModule
from datamodules.image_files import Pictures, check_pictures, find_twins, pictures_of_source, warn_of_twins
from datamodules.image_folders import find_all, find_classes, find_labelled
from datamodules.image_transforms import (
    EpochSampler,
    PictureFormat,
    PictureRows,
    evaluation_transform,
    policy,
    training_transform,
)
from datamodules.loaders import ResumableLoader
from datamodules.sources.base import PICTURES, PictureDefaults, PictureSource, make_source
from datamodules.splits import SPLITS, split_pictures, tell_of_absent_classes
from zoo.checkpoint.checkpoint import Checkpoint
from zoo.errors import CheckpointMismatchError, ZooError, listed
from zoo.lookalikes import refuse_look_alikes

_INTERPOLATIONS = ("bilinear", "bicubic", "nearest")
_FOLDER = PictureDefaults(224, 3, crop=0.9, hflip=0.5, crop_scale=0.35)  # what pictures of a user's folder are like


class ImageDataModule(ZooDataModule):
    """Pictures of classes: a set by name, embedded or fetched, or your own folder.

    Batches are dicts: "image" (B, channels, height, width) in float32, normalised; "target" (B,) in int64, places in
    the identity's classes; "id", a list of B texts: a picture's path below the folder, or split and number in a set.
    For predict there is no target.

    A folder has JPEG, PNG, WebP, GIF (first frame), BMP and TIFF files, in a folder a class, or in such folders in
    train/, val/ and test/ of which val/ and test/ may be missing; or a CSV file names them. Pictures are turned as
    their EXIF data says; what is transparent becomes white; 16-bit greyscale is scaled to 8 bits.

    Folders of splits are known by name, in any case and with set, images, data, seg, numbers and the like around it:
    train or training; val, valid, validation or dev; test, testing or holdout; eval or evaluation is the one of val and
    test that has no other folder. They hold class folders: folders of these names that hold pictures are classes. What
    may be either is refused. Links are followed; files and folders whose names start with a dot are left out.

    Where size, normalisation, interpolation and crop are left out, they are the checkpoint's (from_checkpoint), or what
    the model's weights were trained with, or what is usual for the source: sides of 224 and crop 0.9 for a folder, the
    pictures' own size and crop 1 for a named set; mean and std 0.5, bicubic.

    Args:
        source: a named picture set, such as digits (of scikit-learn, embedded) or cifar10 (of torchvision), or folder.
            auto: the folder if there is a path, or digits; with from_checkpoint and no other path than the
            checkpoint's, the checkpoint's source.
        path: the folder of pictures, or the folder that a fetched set is in; default for those: ZOO_CACHE or the user's
            cache folder. For predict with from_checkpoint: any folder of pictures, or one file.
        labels: CSV file in UTF-8 with the columns path (below the folder, or absolute) and label, and if you like split
            (train, val or test), in place of class folders. Labels are text: 001, 1 and NA are three classes.
        download: fetch the set where it isn't there.
        image_size: height and width that pictures are brought to, in pixels.
        channels: 1 for greyscale, 3 for RGB; left out, the checkpoint's, or 3 for a folder, or what a named set has.
        mean: what is subtracted from pixels between 0 and 1: a number a channel, or one for all.
        std: what they are divided by then.
        interpolation: how pictures are resized: bilinear, bicubic or nearest.
        crop: share of the resized picture's short side that is kept, in the centre, in evaluation.
        hflip: training: probability to mirror left and right; left out, 0.5 for folder, or what is usual for the set:
            0 for digits, say, which would become others.
        crop_scale: training: smallest share of a picture's area that a random crop keeps; 1 cuts out the centre as in
            evaluation. Left out, 0.35 for folder, or what is usual for the set.
        shift: training: how far pictures are moved at most, as a share of their side; what comes into sight is black.
        rotate: training: how many degrees they are turned at most, to either side.
        zoom: training: by what share they are enlarged or shrunk at most.
        auto_augment: training: a policy of timm's, such as rand-m9-mstd0.5-inc1, augmix-m5-w4-d2 or 3a.
        random_erasing: training: probability to blank out a random rectangle.
        val_fraction: share of the pictures of each class held out for validation, at least one; where the data has a
            test split and no val split, share of the training pictures.
        test_fraction: share held out for the test.
        split_seed: decides which are held out, and the order and variations of training pictures.
        on_bad_image: pictures of a folder that can't be read, all of which are found before the run: error, or skip.
        batch_size: pictures a batch.
        num_workers: loader processes; 0 loads in the main one.
        from_checkpoint: a checkpoint (file, address or name of zoo list) whose classes, channels, size and
            normalisation are used. Validation, test and predict then use every picture of a folder the checkpoint
            wasn't trained on, or those in its test/.
        source_options: what the named set has to be told, by name.

    Raises:
        ZooError: for an argument out of range, here; for pictures that can't be fetched, found, read or split, in
            ``prepare_data`` and ``setup``.
    """

    sources = PICTURES
    kept_settings: ClassVar[tuple[str, ...]] = (
        *ZooDataModule.kept_settings,
        *("hflip", "crop_scale", "shift", "rotate", "zoom", "auto_augment", "random_erasing"),
    )

    def __init__(
        self,
        source: str = "auto",
        path: str | None = None,
        labels: str | None = None,
        download: bool = False,
        image_size: int | None = None,
        channels: Literal[1, 3] | None = None,
        mean: list[float] | None = None,
        std: list[float] | None = None,
        interpolation: Literal["bilinear", "bicubic", "nearest"] | None = None,
        crop: float | None = None,
        hflip: float | None = None,
        crop_scale: float | None = None,
        shift: float = 0.0,
        rotate: float = 0.0,
        zoom: float = 0.0,
        auto_augment: str | None = None,
        random_erasing: float = 0.0,
        val_fraction: float = 0.15,
        test_fraction: float = 0.15,
        split_seed: int = 0,
        on_bad_image: Literal["error", "skip"] = "error",
        batch_size: int = 64,
        num_workers: int = 0,
        from_checkpoint: str | None = None,
        source_options: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self._saved = _Saved.read(from_checkpoint) if from_checkpoint else None
        self.source, self._same = self._find_source(source, path)
        if self._saved is not None and self._same:  # before they are saved, as the next checkpoint needs them too
            path = path or self._saved.settings.get("path")
            labels = labels or self._saved.settings.get("labels")
            source_options = source_options or self._saved.settings.get("source_options")
        self.save_hyperparameters()
        self._check_arguments()
        self._set = self._named_set(path, labels, source_options)
        self.batch_size = batch_size
        self._found: tuple[bool, Pictures, np.ndarray] | None = None
        self._twins: list[list[int]] = []
        self._loaded: Literal["split", "evaluate", "predict"] | None = None
        self._format: PictureFormat | None = None
        self._targets: np.ndarray | None = None
        self._splits: np.ndarray | None = None  # None: every picture is for evaluation

    @staticmethod
    def as_in_checkpoint(path: str) -> dict[str, Any]:
        """Arguments with which other pictures are read as a checkpoint's were: its classes, size and normalisation."""
        # What the checkpoint's own pictures need, source and labels, is found in it again.
        return {"from_checkpoint": path, "source": "auto", "labels": None, "source_options": None}

    # ------------------------------------------------------------------ arguments

    def _check_arguments(self) -> None:
        h = self.hparams
        for name, choices in (
            ("channels", (None, 1, 3)),
            ("interpolation", (None, *_INTERPOLATIONS)),
            ("on_bad_image", ("error", "skip")),
        ):
            if h[name] not in choices:
                allowed = " or ".join(str(choice) for choice in choices if choice is not None)
                raise ZooError(f"data.{name}: got {h[name]!r}; must be {allowed}")
        for name, least in (("batch_size", 1), ("num_workers", 0), ("split_seed", 0), ("image_size", 1)):
            if h[name] is not None and not least <= h[name] < 1 << 32:
                raise ZooError(f"data.{name}: got {h[name]}; must be at least {least}, and less than 2^32")
        for name, rule, good in (
            ("crop", "must be above 0, and at most 1", lambda x: 0 < x <= 1),
            ("hflip", "must lie in [0, 1]", lambda x: 0 <= x <= 1),
            ("crop_scale", "must be above 0, and at most 1", lambda x: 0 < x <= 1),
            ("shift", "must lie in [0, 1]", lambda x: 0 <= x <= 1),
            ("rotate", "must lie in [0, 180]", lambda x: 0 <= x <= 180),
            ("zoom", "must lie in [0, 1)", lambda x: 0 <= x < 1),
            ("random_erasing", "must lie in [0, 1]", lambda x: 0 <= x <= 1),
            ("val_fraction", "must lie between 0 and 0.5", lambda x: 0 < x < 0.5),
            ("test_fraction", "must lie between 0 and 0.5", lambda x: 0 < x < 0.5),
            ("mean", "must be finite, one number a channel or one", lambda xs: _are_numbers(xs, -math.inf)),
            ("std", "must be finite and above 0, one number a channel or one", lambda xs: _are_numbers(xs, 0)),
        ):
            if h[name] is not None and not good(h[name]):
                raise ZooError(f"data.{name}: got {h[name]}; {rule}")
        if h["auto_augment"] is not None:
            policy(h["auto_augment"], PictureFormat(3, (8, 8), (0.5,) * 3, (0.5,) * 3, "bicubic", 1.0))

    def _find_source(self, source: str, path: str | None) -> tuple[str, bool]:
        """The source, and whether it is where the checkpoint's pictures were."""
        if self._saved is None:
            return ("digits" if path is None else "folder") if source == "auto" else source, False
        own, then = self._saved.identity["source"]["name"], self._saved.settings.get("path")
        same_path = path is None or (then is not None and _real(path) == _real(then))
        if source == "auto":
            source = own if same_path else "folder"
        return source, same_path and source == own

    def _named_set(self, path: str | None, labels: str | None, options: dict[str, Any] | None) -> PictureSource | None:
        """The named set that the pictures are of; None for a folder."""
        if self.source == "folder":
            if not path:
                raise ZooError(f"data.path: got {path!r} with source folder; name the folder of pictures")
            if options:
                raise ZooError(f"data.source_options: got {options} with source folder, which has none; leave them out")
            return None
        found = make_source(PICTURES, self.source, path, options, also="auto and folder")
        if labels is not None:
            raise ZooError(
                f"data.labels: got {labels!r} with source {self.source}, which has its own; leave data.labels "
                "out, or name the folder of these pictures with data.path"
            )
        return found

    @property
    def _usual(self) -> PictureDefaults:
        return _FOLDER if self._set is None else self._set.usual

    def _make_format(self) -> PictureFormat:
        """The first that is known: argument, checkpoint, the model's wishes, what is usual."""
        h, usual = self.hparams, self._usual
        saved = {} if self._saved is None else self._saved.identity
        model = self._wishes
        channels = h["channels"] or saved.get("channels") or usual.channels
        side = h["image_size"]
        size = [side, side] if side else saved.get("image_size") or list(model.get("input_size", ()))[1:]
        interpolation = h["interpolation"] or saved.get("interpolation") or model.get("interpolation")
        mean, std = (
            _a_number_a_channel(h[name] or saved.get(name) or model.get(name) or [0.5], channels)
            for name in ("mean", "std")
        )
        height, width = size or (usual.size, usual.size)
        return PictureFormat(
            channels,
            (height, width),
            mean,
            std,
            interpolation if interpolation in _INTERPOLATIONS else "bicubic",
            h["crop"] or saved.get("crop") or model.get("crop_pct") or usual.crop,
        )

    # ------------------------------------------------------------------ preparation

    def prepare_data(self) -> None:
        """Fetch the set, if that was asked for; check the pictures of a folder, once for all processes."""
        if self._set is not None:
            if self.hparams["download"]:
                self._set.fetch()
        elif self.trainer is not None and self.trainer.state.fn is not None:
            self._find(self._wanted(self.trainer.state.fn.value))

    def _wanted(self, stage: str) -> Literal["split", "evaluate", "predict"]:
        if self._saved is None or stage == "fit" or self._loaded == "split":  # what was trained on isn't evaluated
            return "split"
        return "predict" if stage == "predict" and self.source == "folder" and not self._same else "evaluate"

    def setup(self, stage: str) -> None:
        """Find, check and split the pictures, as far as the stage needs it."""
        wanted = self._wanted(stage)
        if self._loaded != wanted:
            self._load(wanted)

    def _find(self, wanted: str) -> tuple[Pictures, np.ndarray]:
        """The pictures, and which of them can be read."""
        without_labels = wanted == "predict"
        if self._found is None or self._found[0] is not without_labels:
            pictures = self._pictures(without_labels)
            self._found = without_labels, pictures, self._readable(pictures)
            self._twins = find_twins(pictures.files) if len(pictures.files) and not without_labels else []
        return self._found[1:]

    def _pictures(self, without_labels: bool) -> Pictures:
        if self._set is not None:
            pictures = pictures_of_source(self._set.read(), self._set.shown)
            return replace(pictures, targets=None, splits=None) if without_labels else pictures
        path, labels = self.hparams["path"], self.hparams["labels"]
        if without_labels and labels is None:
            return find_all(path)
        if without_labels:  # the CSV file names the pictures, whatever their labels
            return replace(find_labelled(path, labels), targets=None, splits=None)
        if labels is not None:
            return find_labelled(path, labels)
        return find_classes(path, () if self._saved is None else self._saved.identity["classes"])

    def _where(self, pictures: Pictures) -> str:
        """What messages about these pictures start with: the argument, and its value."""
        labels = self.hparams["labels"]
        return f"data.path: {pictures.name}" if labels is None else f"data.labels: {labels}"

    def _readable(self, pictures: Pictures) -> np.ndarray:
        good = np.ones(len(pictures), dtype=bool)
        faults = check_pictures(pictures.files) if pictures.pixels is None else {}
        good[list(faults)] = False
        if faults:
            first = ", ".join(f"{pictures.ids[row]!r} ({reason})" for row, reason in list(faults.items())[:5])
            more = f" and {len(faults) - 5} more" if len(faults) > 5 else ""
            where = pictures.name if self._set is not None else self.hparams["path"]
            found = f"{len(faults)} of {len(pictures)} pictures in {where} can't be read: {first}{more}"
            if self.hparams["on_bad_image"] == "error":
                raise ZooError(f"data.path: {found}; mend or delete them, or set data.on_bad_image to skip")
            rank_zero_warn(f"{found}; they are skipped")
            if not good.any():
                raise ZooError(f"data.path: no picture in {where} can be read; name another folder")
        return good

    def _load(self, wanted: Literal["split", "evaluate", "predict"]) -> None:
        pictures, good = self._find(wanted)
        classes = pictures.classes if self._saved is None else self._saved.identity["classes"]
        targets = None if pictures.targets is None else _in_order(pictures, classes, self._where(pictures))
        splits = None if targets is None else self._split(pictures, targets, classes, wanted)
        source = {"name": self.source, "pictures": len(pictures), "fingerprint": pictures.fingerprint}
        if self.source == "folder":
            source["folder"] = pictures.name
        if wanted == "split" and targets is not None and splits is not None:
            counts = np.bincount(targets[(splits == 0) & good], minlength=len(classes)).tolist()
            _refuse_untrained(self._where(pictures), classes, counts)
            source |= {"train_pictures": sum(counts), "class_counts": dict(zip(classes, counts, strict=True))}
        elif self._saved is not None:
            counted = ("train_pictures", "class_counts")
            source |= {name: value for name, value in self._saved.identity["source"].items() if name in counted}
        self._format = self._make_format()
        self._identity = {"kind": "images", "classes": list(classes), **self._format.to_dict(), "source": source}
        self._targets, self._splits, self._loaded = targets, splits, wanted
        self._report(pictures, good)
        if targets is not None:
            self._warn(pictures, good, targets)

    def _warn(self, pictures: Pictures, good: np.ndarray, targets: np.ndarray) -> None:
        """Say what makes figures too good, or tell nothing of a class."""
        where, classes = self._where(pictures), self.identity()["classes"]
        tell_of_absent_classes(where, targets[good], None if self._splits is None else self._splits[good], classes)
        twins = [numbers for group in self._twins if len(numbers := [i for i in group if good[i]]) > 1]
        warn_of_twins(where, pictures.ids, twins, targets, "labels", "so that one of them is wrong")
        if self._splits is not None and (self._loaded == "split" or self._made_of(pictures)):
            warn_of_twins(where, pictures.ids, twins, self._splits, "splits", "so that figures are too good")

    def _made_of(self, pictures: Pictures) -> bool:
        """Whether these are the pictures that the checkpoint was trained on."""
        return self._saved is not None and self._saved.identity["source"].get("fingerprint") == pictures.fingerprint

    def _split(self, pictures: Pictures, targets: np.ndarray, classes: Sequence[str], wanted: str) -> np.ndarray | None:
        """The split of each picture; None if all are for evaluation."""
        h, saved = self.hparams, self._saved
        if saved is not None and self._made_of(pictures):
            self._warn_of_another_split(pictures, saved)
        elif saved is not None:
            if self._same or wanted == "split":
                self._warn_of_other_pictures(pictures, saved, wanted)
            if wanted != "split":
                return pictures.splits
        if pictures.splits is not None and not (pictures.splits == 0).any():
            advice = "add them in train/" if h["labels"] is None else "give some rows the split train"
            raise ZooError(f"{self._where(pictures)} has no training pictures, only others; {advice}")
        return split_pictures(
            targets,
            classes,
            pictures.splits,
            h["val_fraction"],
            h["test_fraction"],
            h["split_seed"],
            self._where(pictures),
        )

    def _warn_of_another_split(self, pictures: Pictures, saved: "_Saved") -> None:
        given = () if pictures.splits is None else np.unique(pictures.splits)
        fractions = [name for name, split in (("val_fraction", 1), ("test_fraction", 2)) if split not in given]
        other = [
            f"data.{name} was {saved.settings[name]}"
            for name in (*fractions, *(["split_seed"] if fractions else []))
            if saved.settings.get(name, self.hparams[name]) != self.hparams[name]
        ]
        if other:
            rank_zero_warn(
                f"The checkpoint was trained on these pictures split in another way ({', '.join(other)}): pictures it "
                "was trained on may be among the test pictures"
            )

    def _warn_of_other_pictures(self, pictures: Pictures, saved: "_Saved", wanted: str) -> None:
        source = saved.identity["source"]
        counts = f"({source.get('pictures')} then, {len(pictures)} now)"
        if not self._same:
            rank_zero_warn(
                f"{self._where(pictures)}: training goes on with other pictures than the checkpoint was trained on, "
                f"which were {source.get('folder', source['name'])} {counts}"
            )
            return
        if pictures.splits is not None:
            effect = "those that were moved to another split since may be among the test pictures"
        elif wanted == "split":
            effect = "they are split anew, so that pictures it was trained on may be among the test pictures"
        else:
            effect = "all are used, also those it was trained on, so figures are too good"
        rank_zero_warn(
            f"The pictures of {pictures.name} have changed since the checkpoint was trained on them, or their labels "
            f"have {counts}: {effect}; name a folder of new pictures with data.path"
        )

    def _report(self, pictures: Pictures, good: np.ndarray) -> None:
        identity = self.identity()
        if self._splits is None:
            found = f"{good.sum():,} pictures, all of them used, as this isn't the set the checkpoint was trained on"
        else:
            counts = np.bincount(self._splits[good], minlength=3)
            found = ", ".join(f"{count:,} {name}" for count, name in zip(counts, SPLITS, strict=True)) + " pictures"
            if self.trainer is not None and self.trainer.state.fn == "predict":
                found += " (predict takes those of test; name another folder for all of it)"
        size = " x ".join(map(str, [identity["channels"], *identity["image_size"]]))
        by = "" if self.hparams["labels"] is None else f" as {self.hparams['labels']} has them"
        rank_zero_info(f"Pictures of {pictures.name}{by}: {found}; {len(identity['classes']):,} classes; {size}")

    # ------------------------------------------------------------------ loaders

    def _of_split(self, split: int, training: bool = False, predicting: bool = False) -> PictureRows:
        if self._found is None or self._format is None or self._loaded is None:
            raise ZooError("ImageDataModule: no data yet; call prepare_data() and setup('fit') first")
        _, pictures, good = self._found
        if self._splits is None:
            if split == 0:
                raise ZooError("train_dataloader: these pictures were taken for evaluation; call setup('fit') first")
            rows = np.flatnonzero(good)
        else:
            rows = np.flatnonzero((self._splits == split) & good)
        if not len(rows):
            raise ZooError(f"data.path: {pictures.name} has no {SPLITS[split]} pictures; this command needs some")
        targets = None if predicting else self._targets
        if training:
            return PictureRows(
                pictures,
                rows,
                targets,
                self._format.channels,
                self._training_transform(self._format),
                self.hparams["split_seed"],
            )
        return PictureRows(pictures, rows, targets, self._format.channels, evaluation_transform(self._format))

    def _training_transform(self, look: PictureFormat) -> Compose:
        h, usual = self.hparams, self._usual
        return training_transform(
            look,
            usual.hflip if h["hflip"] is None else h["hflip"],
            h["crop_scale"] or usual.crop_scale,
            h["shift"],
            h["rotate"],
            h["zoom"],
            h["auto_augment"],
            h["random_erasing"],
        )

    def train_dataloader(self) -> ResumableLoader:
        rows = self._of_split(0, training=True)
        replicas, rank = (self.trainer.world_size, self.trainer.global_rank) if self.trainer else (1, 0)
        sampler = EpochSampler(len(rows), replicas, rank, self.hparams["split_seed"])
        options = self._options()
        if len(sampler) < self.batch_size:
            # still an even number where it can be: pictures are mixed in pairs
            options["batch_size"] = max(1, len(sampler) // 2 * 2)
            rank_zero_warn(
                f"There are {len(sampler)} training pictures, fewer than a batch of {self.batch_size}; each batch has "
                f"{options['batch_size']}"
            )
        return self._training_loader(rows, sampler, drop_last=True, **options)

    def val_dataloader(self) -> DataLoader[dict[str, Any]]:
        return DataLoader(self._of_split(1), **self._options())

    def test_dataloader(self) -> DataLoader[dict[str, Any]]:
        return DataLoader(self._of_split(2), **self._options())

    def predict_dataloader(self) -> DataLoader[dict[str, Any]]:
        return DataLoader(self._of_split(2, predicting=True), **self._options())


def _real(path: str) -> str:
    return os.path.realpath(os.path.expanduser(path))


def _are_numbers(numbers: Sequence[float], above: float) -> bool:
    return len(numbers) in (1, 3) and all(above < number < math.inf for number in numbers)


def _a_number_a_channel(numbers: Sequence[float], channels: int) -> tuple[float, ...]:
    """Three numbers become one by their average, one becomes three."""
    if len(numbers) == channels:
        return tuple(map(float, numbers))
    return (float(sum(numbers) / len(numbers)),) * channels


def _in_order(pictures: Pictures, classes: Sequence[str], where: str) -> np.ndarray:
    """Targets as places in ``classes``, which may be a checkpoint's.

    Raises:
        CheckpointMismatchError: naming the classes that aren't among them.
    """
    unknown = sorted(set(pictures.classes) - set(classes))
    if unknown:
        refuse_look_alikes(
            [*unknown, *classes],
            f"{where}: classes here and in the checkpoint",
            CheckpointMismatchError,
            "rename those here as they are in the checkpoint",
        )
        raise CheckpointMismatchError(
            f"{where} has the classes {listed(unknown)}, which the checkpoint doesn't know (it knows "
            f"{listed(classes)}); rename or take them out, or to train on them leave data.from_checkpoint out"
        )
    place = {name: i for i, name in enumerate(classes)}
    return np.array([place[name] for name in pictures.classes], dtype=np.int64)[pictures.targets]


def _refuse_untrained(where: str, classes: Sequence[str], counts: Sequence[int]) -> None:
    if len(classes) < 2:
        raise ZooError(f"{where} has one class, {listed(classes)}; give pictures of at least 2")
    missing = [name for name, count in zip(classes, counts, strict=True) if not count]
    if missing:
        raise ZooError(
            f"{where} has no training pictures of the classes {listed(missing)}; add some, or leave these classes out "
            "of the other splits"
        )


@dataclass(frozen=True)
class _Saved:
    """What a checkpoint says of the pictures it was trained on."""

    identity: dict[str, Any]
    settings: Mapping[str, Any]

    @classmethod
    def read(cls, path: str) -> "_Saved":
        checkpoint = Checkpoint.open(path)
        path, identity = checkpoint.path, checkpoint.identity
        if identity.get("kind") != "images":
            raise ZooError(
                f"data.from_checkpoint: {path} was trained on {identity.get('kind', 'nothing')}, not on images; name a "
                "checkpoint of a vision model"
            )
        wanted = {"classes", "channels", "image_size", "mean", "std", "interpolation", "crop", "source"}
        if not wanted <= set(identity):
            lacks = listed(sorted(wanted - set(identity)))
            raise ZooError(f"data.from_checkpoint: the identity in {path} lacks {lacks}; train with this version")
        return cls(identity, checkpoint.data_settings)
