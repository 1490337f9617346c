"""Which prototype is nearest, by a metric that changes from sequence to sequence."""

import itertools
from dataclasses import dataclass

import numpy as np

from datamodules.sources.base import SequenceSource, register_sequences
from zoo.errors import ZooError
from zoo.options import option

_MOST_POINTS = 1024


@dataclass(frozen=True)
class MetricOptions:
    """The space, what is shown of it, and what is asked."""

    n_features: int = option(4, "features of a point")
    n_levels: int = option(2, "values of a feature")
    n_relevant: int = option(2, "features that count in a sequence's metric")
    n_classes: int = option(4, "classes, each with a prototype")
    n_examples: int = option(8, "labelled points before the first that is asked for", shapes_weights=False)
    n_queries: int = option(6, "points that are asked for, each labelled once it was", shapes_weights=False)

    def __post_init__(self) -> None:
        if self.n_features < 1 or self.n_levels < 2 or self.n_levels**self.n_features > _MOST_POINTS:
            raise ZooError(
                f"n_features: got {self.n_features} of {self.n_levels} values; there must be one at least, of two at "
                f"least, and no more than {_MOST_POINTS} points in all"
            )
        if not 1 <= self.n_relevant <= self.n_features:
            raise ZooError(f"n_relevant: got {self.n_relevant}; must lie between 1 and n_features, {self.n_features}")
        if not 2 <= self.n_classes <= min(26, self.n_levels**self.n_relevant):
            raise ZooError(
                f"n_classes: got {self.n_classes}; must lie between 2 and {min(26, self.n_levels**self.n_relevant)}, "
                "as many different prototypes as the relevant features have room for"
            )
        if self.n_examples < self.n_classes:
            raise ZooError(f"n_examples: got {self.n_examples}; must be n_classes, {self.n_classes}, at least")
        if not 1 <= self.n_queries <= self.n_levels**self.n_features - self.n_examples:
            raise ZooError(
                f"n_queries: got {self.n_queries} beside {self.n_examples} examples; there must be one at least, and "
                f"all points of a sequence are different, of {self.n_levels**self.n_features}"
            )


@register_sequences("in_context_metric")
class InContextMetric(SequenceSource):
    r"""Points labelled by the nearest prototype, under a metric of the sequence's own: the next point's label.

    ``0110 A 1101 B 1000 A ... 1011 B``: a point x is one symbol, and stands for F features of L values each. A sequence
    draws its metric, a set R of ``n_relevant`` features, all sets alike, which makes the distance

    .. math:: d(x, p) = (x - p)^T M (x - p), \quad M = diag(w), \quad w_f = 1 \text{ if } f \in R, \text{ else } 0

    It draws a prototype for each class, evenly among points that differ from each other in R, and shows them first, in
    an order that is drawn, with their labels. Then come points, all different, drawn evenly: each is labelled with the
    class of the nearest prototype, of several as near the one that was shown first. The labels of the last
    ``n_queries`` points are the answers; so each is asked for after those before it were told.

    Nothing says what R is but the labels. With a metric that is the same for all sequences, the best that can be done
    is about ``fixed_metric``, the accuracy of the nearest prototype when all features count. ``bayes`` is what the best
    of all predictors is expected to reach: labels have the probability of the metrics left, all of which are alike,

    .. math:: p(y \mid x, \text{before}) = \frac{|\{R : \text{R gives all labels so far, and y to x}\}|}
        {|\{R : \text{R gives all labels so far}\}|}

    Source: drawn; this zoo's own, for attention whose metric is made from what was seen.
    """

    Options = MetricOptions

    def symbols(self) -> list[str]:
        between = "" if self.options.n_levels <= 10 else "_"
        points = [between.join(map(str, point)) for point in self._points().tolist()]
        return [*points, *(chr(ord("A") + i) for i in range(self.options.n_classes))]

    def draw(self, n: int, random: np.random.RandomState) -> tuple[np.ndarray, np.ndarray]:
        o = self.options
        F, L, r, C = o.n_features, o.n_levels, o.n_relevant, o.n_classes
        relevant = self._metrics()[random.randint(0, len(self._metrics()), n)]  # (n, r)
        # the prototypes' relevant features together are a number to the base L, a different one for each
        numbers = random.rand(n, L**r).argsort(axis=1, kind="stable")[:, :C, None]
        digits = numbers // L ** np.arange(r) % L  # (n, C, r)
        prototypes = random.randint(0, L, (n, C, F))
        np.put_along_axis(prototypes, np.broadcast_to(relevant[:, None], (n, C, r)), digits, axis=2)
        first = prototypes @ L ** np.arange(F)[::-1]  # (n, C)
        keys = random.rand(n, L**F)
        np.put_along_axis(keys, first, 1.0, axis=1)  # behind all others
        others = keys.argsort(axis=1, kind="stable")[:, : o.n_examples - C + o.n_queries]
        shown = np.concatenate([first, others], axis=1)
        classes = random.rand(n, C).argsort(axis=1, kind="stable")  # of the prototypes in the order that they come
        nearest = self._nearest(self._points()[shown], self._weights(relevant))
        labels = np.take_along_axis(classes, nearest, axis=1)
        tokens = np.stack([shown, L**F + labels], axis=2).reshape(n, -1)
        is_answer = np.zeros(tokens.shape, dtype=bool)
        is_answer[:, 2 * o.n_examples + 1 :: 2] = True
        return tokens, is_answer

    def _points(self) -> np.ndarray:
        """All points (L^F, F), in the order of their symbols."""
        o = self.options
        return np.array(list(itertools.product(range(o.n_levels), repeat=o.n_features)))

    def _metrics(self) -> np.ndarray:
        """The sets R of relevant features, a row each (sets, n_relevant)."""
        o = self.options
        return np.array(list(itertools.combinations(range(o.n_features), o.n_relevant)))

    def _weights(self, relevant: np.ndarray) -> np.ndarray:
        """w (..., F) of sets R (..., n_relevant)."""
        w = np.zeros((*relevant.shape[:-1], self.options.n_features), dtype=np.int64)
        np.put_along_axis(w, relevant, 1, axis=-1)
        return w

    def _nearest(self, x: np.ndarray, w: np.ndarray) -> np.ndarray:
        """Which of the prototypes, the first of x (n, T, F), is nearest to each of x under w (n or 1, F): (n, T)."""
        prototypes = x[:, : self.options.n_classes]
        distances = ((x[:, :, None] - prototypes[:, None]) ** 2 * w[:, None, None]).sum(axis=3)
        return distances.argmin(axis=2)

    def reference(self, tokens: np.ndarray, is_answer: np.ndarray) -> dict[str, float]:
        o = self.options
        x, labels = self._points()[tokens[:, ::2]], tokens[:, 1::2] - o.n_levels**o.n_features
        classes, asked = labels[:, : o.n_classes], is_answer[:, 1::2]

        def given(w: np.ndarray) -> np.ndarray:
            """The labels that a metric gives (n, T)."""
            return np.take_along_axis(classes, self._nearest(x, w[None]), axis=1)

        votes = np.zeros((*labels.shape, o.n_classes))
        for w in self._weights(self._metrics()):
            found = given(w)
            fits = np.logical_and.accumulate(found == labels, axis=1)
            before = np.concatenate([np.ones_like(fits[:, :1]), fits[:, :-1]], axis=1)
            np.put_along_axis(
                votes, found[..., None], np.take_along_axis(votes, found[..., None], 2) + before[..., None], 2
            )
        bayes = votes.max(axis=2) / votes.sum(axis=2)
        fixed = given(np.ones(o.n_features, dtype=np.int64)) == labels
        return {
            "chance": 1 / o.n_classes,
            "fixed_metric": float(fixed[asked].mean()),
            "bayes": float(bayes[asked].mean()),
        }
