"""What stood among noise, in order."""

from dataclasses import dataclass

import numpy as np

from datamodules.sources.base import SequenceSource, register_sequences
from zoo.errors import ZooError
from zoo.options import option


@dataclass(frozen=True)
class CopyingOptions:
    """How much there is to copy, and to skip."""

    length: int = option(32, "symbols before the sign to copy", shapes_weights=False)
    n_marked: int = option(8, "how many of them are to be copied", shapes_weights=False)
    n_symbols: int = option(8, "different symbols to copy")
    n_noise: int = option(4, "different symbols of noise")

    def __post_init__(self) -> None:
        if not 1 <= self.n_marked <= self.length:
            raise ZooError(f"n_marked: got {self.n_marked}; must lie between 1 and length, {self.length}")
        if not 2 <= self.n_symbols <= 10_000:
            raise ZooError(f"n_symbols: got {self.n_symbols}; must lie between 2 and 10000")
        if not 1 <= self.n_noise <= 10_000:
            raise ZooError(f"n_noise: got {self.n_noise}; must lie between 1 and 10000")


@register_sequences("selective_copying")
class SelectiveCopying(SequenceSource):
    """Symbols among noise, then a sign: the symbols come again without the noise, in order.

    ``n2 a5 n0 a1 n3 > a5 a1``: which places hold a symbol, which it is, and the noise elsewhere are drawn evenly.
    Symbols may come twice. Chance is 1 / n_symbols.

    Source: drawn; after Jing et al., Gated Orthogonal Recurrent Units (2019), and Gu and Dao, Mamba (2023).
    """

    Options = CopyingOptions

    def symbols(self) -> list[str]:
        o = self.options
        return [*(f"a{i}" for i in range(o.n_symbols)), *(f"n{i}" for i in range(o.n_noise)), ">"]

    def draw(self, n: int, random: np.random.RandomState) -> tuple[np.ndarray, np.ndarray]:
        o = self.options
        places = np.sort(random.rand(n, o.length).argsort(axis=1, kind="stable")[:, : o.n_marked], axis=1)
        marked = random.randint(0, o.n_symbols, (n, o.n_marked))
        shown = o.n_symbols + random.randint(0, o.n_noise, (n, o.length))
        np.put_along_axis(shown, places, marked, axis=1)
        sign = np.full((n, 1), o.n_symbols + o.n_noise)
        tokens = np.concatenate([shown, sign, marked], axis=1)
        is_answer = np.zeros(tokens.shape, dtype=bool)
        is_answer[:, o.length + 1 :] = True
        return tokens, is_answer

    def reference(self, tokens: np.ndarray, is_answer: np.ndarray) -> dict[str, float]:
        return {"chance": 1 / self.options.n_symbols, "bayes": 1.0}
