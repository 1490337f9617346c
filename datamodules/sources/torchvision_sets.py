"""The picture sets that torchvision fetches and reads; another is one more class, here or in a file of yours."""

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from torchvision.datasets import CIFAR10, CIFAR100, MNIST, FashionMNIST

from datamodules.sources.base import PictureData, PictureDefaults, PictureSource, register_pictures


class TorchvisionSet(PictureSource):
    """One of torchvision's sets, with its own test split."""

    kind: ClassVar[Any]
    """Torchvision's class."""

    def download(self, into: Path) -> None:
        self.kind(str(into), download=True)

    def wanted(self) -> str:
        if hasattr(self.kind, "resources"):
            return f"{', '.join(name.removesuffix('.gz') for name, _ in self.kind.resources)}, in a folder raw,"
        named = [name for name, _ in self.kind.train_list + self.kind.test_list]
        return f"{', '.join(named)}, {self.kind.meta['filename']}"

    def load(self) -> PictureData:
        train, test = (self.kind(str(self.folder), train=training) for training in (True, False))
        if any(len(part.data) != len(part.targets) for part in (train, test)):
            raise ValueError("not a label for each picture")
        return PictureData(
            np.concatenate([np.asarray(part.data) for part in (train, test)]),
            np.concatenate([np.asarray(part.targets) for part in (train, test)]),
            list(train.classes),
            ["train"] * len(train.data) + ["test"] * len(test.data),
        )


@register_pictures("cifar10")
class Cifar10(TorchvisionSet):
    """CIFAR-10: 60,000 colour pictures of 32 x 32 pixels, 10 classes of things and animals.

    Source: A. Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009; its page names no licence.
    """

    kind = CIFAR10
    own_folder = CIFAR10.base_folder
    usual = PictureDefaults(32, 3, hflip=0.5, crop_scale=0.6)


@register_pictures("cifar100")
class Cifar100(TorchvisionSet):
    """CIFAR-100: as cifar10, 100 classes.

    Source: as of cifar10.
    """

    kind = CIFAR100
    own_folder = CIFAR100.base_folder
    usual = PictureDefaults(32, 3, hflip=0.5, crop_scale=0.6)


@register_pictures("mnist")
class Mnist(TorchvisionSet):
    """MNIST: 70,000 handwritten digits of 28 x 28 pixels.

    Source: Y. LeCun, C. Cortes and C. Burges, The MNIST Database, 1998; its page names no licence.
    """

    kind = MNIST
    own_folder = "MNIST"
    usual = PictureDefaults(28, 1)


@register_pictures("fashion_mnist")
class FashionMnist(TorchvisionSet):
    """Fashion-MNIST: 70,000 pictures of clothes of 28 x 28 pixels, 10 classes.

    Source: H. Xiao, K. Rasul and R. Vollgraf, Fashion-MNIST, 2017; MIT licence.
    """

    kind = FashionMNIST
    own_folder = "FashionMNIST"
    usual = PictureDefaults(28, 1, hflip=0.5)
