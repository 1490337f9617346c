"""From a picture to a tensor: how pictures look to a model, and how they are varied in training."""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from PIL import Image, ImageOps
from timm.data import auto_augment as timm_policies
from timm.data.transforms_factory import create_transform
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms import Compose, v2

from datamodules.image_files import Pictures
from datamodules.loaders import ShuffledSampler
from zoo.errors import ZooError


@dataclass(frozen=True)
class PictureFormat:
    """What a model's pictures look like: ``size`` is (height, width), mean and std have a number a channel."""

    channels: int
    size: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str
    crop: float

    def to_dict(self) -> dict[str, Any]:
        return {
            "channels": self.channels,
            "image_size": list(self.size),
            "mean": list(self.mean),
            "std": list(self.std),
            "interpolation": self.interpolation,
            "crop": self.crop,
        }


def evaluation_transform(look: PictureFormat) -> Compose:
    """Resize (shape kept), cut out the centre, and normalise: a picture to a tensor (channels, height, width)."""
    return create_transform(
        (look.channels, *look.size),
        mean=look.mean,
        std=look.std,
        interpolation=look.interpolation,
        crop_pct=look.crop,
    )


def training_transform(
    look: PictureFormat,
    hflip: float,
    crop_scale: float,
    shift: float,
    rotate: float,
    zoom: float,
    auto_augment: str | None,
    random_erasing: float,
) -> Compose:
    """As for evaluation, with the variations that ``ImageDataModule`` describes."""
    *cut, to_tensor, normalise = evaluation_transform(look).transforms
    if crop_scale < 1:
        mode = v2.InterpolationMode(look.interpolation)
        cut = [v2.RandomResizedCrop(look.size, scale=(crop_scale, 1.0), interpolation=mode)]
    steps = [*cut]
    if hflip:
        steps.append(v2.RandomHorizontalFlip(hflip))
    if shift or rotate or zoom:
        scale = (1 - zoom, 1 + zoom)
        steps.append(v2.RandomAffine(rotate, (shift, shift), scale, interpolation=v2.InterpolationMode.BILINEAR))
    if auto_augment is not None:
        steps.append(policy(auto_augment, look))
    steps += [to_tensor, normalise]
    if random_erasing:
        steps.append(v2.RandomErasing(random_erasing))
    return Compose(steps)


def policy(text: str, look: PictureFormat) -> Callable[[Image.Image], Image.Image]:
    """A policy of timm's, such as rand-m9-mstd0.5-inc1, augmix-m5-w4-d2, original-mstd0.5 or 3a.

    Raises:
        ZooError: if it is none.
    """
    settings = {
        "translate_const": int(0.45 * min(look.size)),
        "img_mean": tuple(min(255, round(255 * mean)) for mean in look.mean),  # fills what is moved out of sight
        "interpolation": Image.Resampling[look.interpolation.upper()],
    }
    kind, *sections = text.split("-")
    makers = {"rand": timm_policies.rand_augment_transform, "augmix": timm_policies.augment_and_mix_transform}
    try:
        ignored = [section for section in sections if not re.search(r"\d", section) and section != "tweights"]
        if ignored:  # timm would pass over them
            raise ValueError(ignored)
        chosen: Any = makers.get(kind, timm_policies.auto_augment_transform)(text, settings)
        for op in getattr(chosen, "ops", None) or [op for pair in chosen.policy for op in pair]:
            if op.aug_fn is timm_policies.posterize:
                op.aug_fn = _posterize
        with isolate_rng(include_cuda=False):
            chosen(Image.new("L" if look.channels == 1 else "RGB", (8, 8)))
    except Exception:  # timm has assertions and more for what it doesn't know
        raise ZooError(
            f"data.auto_augment: got {text!r}, which is no policy of timm; give one such as rand-m9-mstd0.5-inc1, "
            "augmix-m5-w4-d2, original-mstd0.5 or 3a"
        ) from None
    return chosen


def _posterize(picture: Image.Image, bits: int, **settings: Any) -> Image.Image:
    """As timm's, but a bit is always kept: with none, pictures are black, and from Pillow 13 on an error."""
    return ImageOps.posterize(picture, min(8, max(1, bits)))


class EpochSampler(ShuffledSampler):
    """A ``ShuffledSampler`` whose indices go on from epoch to epoch: index + epoch * n."""

    def draw(self, random: torch.Generator) -> Tensor:
        return super().draw(random) + self.epoch * len(self.dataset)  # type: ignore[arg-type]


class PictureRows(Dataset[dict[str, Any]]):
    """Some of the pictures, as tensors: {"image": (channels, height, width), "id": name}, and "target" if wanted.

    With a seed, item ``index + epoch * len(self)`` is varied in a way that seed, epoch and index alone decide, and
    global random states stay as they are.
    """

    def __init__(
        self,
        pictures: Pictures,
        rows: np.ndarray,
        targets: np.ndarray | None,
        channels: int,
        transform: Callable[[Image.Image], Tensor],
        seed: int | None = None,
    ) -> None:
        self.pictures, self.rows, self.targets = pictures, rows, targets
        self.channels, self.transform, self.seed = channels, transform, seed

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        epoch, index = divmod(number, len(self))
        row = int(self.rows[index])
        picture = self.pictures.open(row, self.channels)
        if self.seed is None:
            image = self.transform(picture)
        else:
            with isolate_rng(include_cuda=False):
                seed = int(np.random.SeedSequence([self.seed, epoch, index]).generate_state(1)[0])
                random.seed(seed)
                np.random.seed(seed)
                torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed the GPU too
                image = self.transform(picture)
        item: dict[str, Any] = {"image": image, "id": self.pictures.ids[row]}
        return item if self.targets is None else item | {"target": int(self.targets[row])}
