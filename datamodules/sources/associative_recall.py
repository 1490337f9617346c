"""Which value stood beside a key."""

from dataclasses import dataclass

import numpy as np

from datamodules.sources.base import SequenceSource, register_sequences
from zoo.errors import ZooError
from zoo.options import option


@dataclass(frozen=True)
class RecallOptions:
    """How much there is to remember."""

    n_pairs: int = option(8, "pairs of key and value in a sequence", shapes_weights=False)
    n_queries: int = option(4, "how many of the keys are asked for at the end", shapes_weights=False)
    n_keys: int = option(16, "different keys")
    n_values: int = option(16, "different values")

    def __post_init__(self) -> None:
        if not 1 <= self.n_pairs <= self.n_keys:
            raise ZooError(f"n_pairs: got {self.n_pairs}; must lie between 1 and n_keys, {self.n_keys}")
        if not 1 <= self.n_queries <= self.n_pairs:
            raise ZooError(f"n_queries: got {self.n_queries}; must lie between 1 and n_pairs, {self.n_pairs}")
        if not 2 <= self.n_values <= 10_000 or self.n_keys > 10_000:
            raise ZooError(f"n_values: got {self.n_values} beside {self.n_keys} keys; must lie between 2 and 10000")


@register_sequences("associative_recall")
class AssociativeRecall(SequenceSource):
    """Pairs of key and value, then some of the keys again: each is answered by its value.

    ``k3 v1 k0 v7 ... k0 v7 k3 v1``: the keys of a sequence are different and drawn evenly, as are those asked for; each
    value is drawn evenly, whatever the others are. Nothing but the pairs says what is right: chance is 1 / n_values.

    Source: drawn; after Ba et al., Using Fast Weights to Attend to the Recent Past (2016), and, for several queries,
    Arora et al., Zoology (2023).
    """

    Options = RecallOptions

    def symbols(self) -> list[str]:
        o = self.options
        return [*(f"k{i}" for i in range(o.n_keys)), *(f"v{i}" for i in range(o.n_values))]

    def draw(self, n: int, random: np.random.RandomState) -> tuple[np.ndarray, np.ndarray]:
        o = self.options
        keys = random.rand(n, o.n_keys).argsort(axis=1, kind="stable")[:, : o.n_pairs]
        values = o.n_keys + random.randint(0, o.n_values, (n, o.n_pairs))
        asked = random.rand(n, o.n_pairs).argsort(axis=1, kind="stable")[:, : o.n_queries]
        keys, values = (np.concatenate([x, np.take_along_axis(x, asked, axis=1)], axis=1) for x in (keys, values))
        tokens = np.stack([keys, values], axis=2).reshape(n, -1)
        is_answer = np.zeros(tokens.shape, dtype=bool)
        is_answer[:, 2 * o.n_pairs + 1 :: 2] = True
        return tokens, is_answer

    def reference(self, tokens: np.ndarray, is_answer: np.ndarray) -> dict[str, float]:
        return {"chance": 1 / self.options.n_values, "bayes": 1.0}
