"""Rows of tokens of which only some are to be predicted: answers to a prompt."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from zoo.tokenizer import NO_TARGET


class AnswerRow(NamedTuple):
    """A row of tokens.

    Args:
        tokens: token numbers (T + 1,), at least two.
        is_answer: (T + 1,), which of them are to be predicted; never the first.
        generate: whether the test is to generate the answer too; None where that isn't asked for.
    """

    tokens: np.ndarray
    is_answer: np.ndarray
    generate: bool | None = None


def answer_batch(rows: Sequence[AnswerRow]) -> dict[str, Tensor]:
    """A batch of rows, padded on the right to the longest.

    Returns:
        ``inputs`` (B, T), ``targets`` (B, T), -100 where the next token is no answer; where rows differ in length
        ``padding_mask`` (B, T), true at real tokens; where it is asked for ``generate`` (B,).
    """
    T = max(len(row.tokens) for row in rows) - 1
    inputs = torch.zeros(len(rows), T, dtype=torch.long)
    targets = torch.full_like(inputs, NO_TARGET)
    real = torch.zeros_like(inputs, dtype=torch.bool)
    for i, row in enumerate(rows):
        n = len(row.tokens) - 1
        inputs[i, :n] = torch.from_numpy(row.tokens[:-1].astype(np.int64))
        targets[i, :n] = torch.from_numpy(np.where(row.is_answer[1:], row.tokens[1:], NO_TARGET).astype(np.int64))
        real[i, :n] = True
    batch = {"inputs": inputs, "targets": targets}
    if not bool(real.all()):
        batch["padding_mask"] = real
    if rows[0].generate is not None:
        batch["generate"] = torch.tensor([bool(row.generate) for row in rows])
    return batch


class AnswerRows(Dataset[AnswerRow]):
    """Rows of a split.

    Args:
        tokens: token numbers of each row.
        is_answer: which of them are to be predicted, of each row.
        n_generated: of how many of the first rows the test is to generate the answer; None leaves that out.
    """

    def __init__(
        self, tokens: Sequence[Any] | np.ndarray, is_answer: Sequence[Any] | np.ndarray, n_generated: int | None = None
    ) -> None:
        self.tokens, self.is_answer, self.n_generated = tokens, is_answer, n_generated

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> AnswerRow:
        generate = None if self.n_generated is None else index < self.n_generated
        return AnswerRow(self.tokens[index], self.is_answer[index], generate)
