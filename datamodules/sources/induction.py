"""What followed a rare symbol."""

from dataclasses import dataclass

import numpy as np

from datamodules.sources.base import SequenceSource, register_sequences
from zoo.errors import ZooError
from zoo.options import option


@dataclass(frozen=True)
class InductionOptions:
    """How long a sequence is, and of what."""

    length: int = option(48, "symbols before the one that is asked for", shapes_weights=False)
    n_symbols: int = option(16, "different ordinary symbols")
    n_rare: int = option(4, "rare symbols, each of which comes once")

    def __post_init__(self) -> None:
        if not 2 <= self.n_symbols <= 10_000:
            raise ZooError(f"n_symbols: got {self.n_symbols}; must lie between 2 and 10000")
        if not 1 <= self.n_rare <= self.length // 2:
            raise ZooError(f"n_rare: got {self.n_rare}; must lie between 1 and half the length, {self.length}")


@register_sequences("induction")
class Induction(SequenceSource):
    """Ordinary symbols and some rare ones, then a rare one again: it is answered by what followed it.

    ``a3 a1 r2 a7 a1 r0 a4 ... r2 a7``: each rare symbol stands once among the ordinary ones, no two side by side and
    none at the end, but for that evenly; the ordinary ones and the rare one that is asked for are drawn evenly. Chance
    is 1 / n_symbols.

    Source: drawn; after Olsson et al., In-context Learning and Induction Heads (2022), and Fu et al., Hungry Hungry
    Hippos (2022).
    """

    Options = InductionOptions

    def symbols(self) -> list[str]:
        o = self.options
        return [*(f"a{i}" for i in range(o.n_symbols)), *(f"r{i}" for i in range(o.n_rare))]

    def draw(self, n: int, random: np.random.RandomState) -> tuple[np.ndarray, np.ndarray]:
        o = self.options
        shown = random.randint(0, o.n_symbols, (n, o.length))
        # n_rare of length - n_rare places, then one between any two of them and one behind the last
        places = np.sort(random.rand(n, o.length - o.n_rare).argsort(axis=1, kind="stable")[:, : o.n_rare], axis=1)
        places = places + np.arange(o.n_rare)
        rare = random.rand(n, o.n_rare).argsort(axis=1, kind="stable")
        np.put_along_axis(shown, places, o.n_symbols + rare, axis=1)
        asked = random.randint(0, o.n_rare, (n, 1))
        place = np.take_along_axis(places, asked, axis=1)
        query, answer = (np.take_along_axis(shown, place + step, axis=1) for step in (0, 1))
        tokens = np.concatenate([shown, query, answer], axis=1)
        is_answer = np.zeros(tokens.shape, dtype=bool)
        is_answer[:, -1] = True
        return tokens, is_answer

    def reference(self, tokens: np.ndarray, is_answer: np.ndarray) -> dict[str, float]:
        return {"chance": 1 / self.options.n_symbols, "bayes": 1.0}
