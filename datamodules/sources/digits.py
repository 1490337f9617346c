"""Pictures that every machine with the zoo has."""

import numpy as np

from datamodules.sources.base import PictureData, PictureDefaults, PictureSource, register_pictures


@register_pictures("digits")
class Digits(PictureSource):
    """Scikit-learn's 1,797 handwritten digits of 8 x 8 pixels.

    Source: Optical Recognition of Handwritten Digits (E. Alpaydin, C. Kaynak), UCI Machine Learning Repository, CC BY
    4.0; the test part, as scikit-learn carries it.
    """

    usual = PictureDefaults(8, 1)

    def load(self) -> PictureData:
        from sklearn.datasets import load_digits

        data = load_digits()
        pixels = np.rint(data.images * (255 / 16)).astype(np.uint8)
        return PictureData(pixels, data.target, [str(digit) for digit in data.target_names])
