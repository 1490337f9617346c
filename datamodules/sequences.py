"""Sequences with known answers, drawn from a seed."""

import hashlib
from typing import Any, ClassVar

import numpy as np
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch.utils.data import DataLoader

from datamodules.answers import AnswerRows, answer_batch
from datamodules.base import ZooDataModule
from datamodules.loaders import ResumableLoader, ShuffledSampler
from datamodules.sources.base import SEQUENCES, SequenceData, SequenceSource, make_source
from datamodules.splits import SPLITS, split_drawn
from zoo.errors import ZooError
from zoo.options import plain_options, weight_options
from zoo.tokenizer import SymbolTokenizer

_BLOCK = 1024  # sequences drawn at a time, whatever their number, so that more of them begin with the same
_FEWEST_NEW = _BLOCK // 100


def draw_different(source: SequenceSource, n: int, seed: int) -> SequenceData:
    """The first n different sequences that a source draws from a seed: no two of them ask the same.

    Raises:
        ZooError: if there aren't as many.
    """
    random = np.random.RandomState(seed)  # its numbers are the same in every version of NumPy
    seen: set[bytes] = set()
    kept: list[tuple[np.ndarray, np.ndarray]] = []
    while len(seen) < n:
        tokens, is_answer = source.draw(_BLOCK, random)
        asked = np.where(is_answer, -1, tokens).astype(np.int32)
        before, new = len(seen), np.zeros(len(asked), dtype=bool)
        for i, row in enumerate(asked):
            key = row.tobytes()
            new[i] = key not in seen
            seen.add(key)
        kept.append((tokens[new], is_answer[new]))
        if len(seen) - before < min(_FEWEST_NEW, n - before):
            raise ZooError(
                f"data.n_train: {n:,} sequences of {source.name} in all, but with these options there are hardly more "
                f"than {len(seen):,} different ones; ask for fewer, or for longer ones in data.source_options"
            )
    tokens, is_answer = (np.concatenate(parts)[:n] for parts in zip(*kept, strict=True))
    return SequenceData(source.symbols(), tokens.astype(np.int32), is_answer)


class SequenceDataModule(ZooDataModule):
    """Sequences of symbols with answers that are known, drawn from a seed by a rule that has a name.

    Batches are dicts with ``inputs`` (B, T) and ``targets`` (B, T), -100 where the next symbol is no answer. All
    sequences are drawn once, before the run: training goes through a fixed set in a new order every epoch. What is in
    it, and in which order, follows from the settings alone, whatever the model and the number of workers. No sequence
    is in two splits, and more training sequences leave the others as they are.

    Args:
        source: the kind of sequences.
        source_options: what it has to be told, by name. Those that say how long sequences are may be others in a test
            than in training.
        n_train: number of training sequences.
        n_val: number of sequences for validation.
        n_test: number of sequences for the test.
        batch_size: sequences a batch.
        seed: decides which sequences are drawn, and their order in training.
        num_workers: loader processes; 0 loads in the main one, which is enough.

    Raises:
        ZooError: for an argument out of range, here; in ``setup`` if there aren't as many different sequences.
    """

    sources = SEQUENCES
    kept_settings: ClassVar[tuple[str, ...]] = (
        *("source", "source_options", "n_train", "n_val", "n_test", "batch_size", "seed"),
    )

    def __init__(
        self,
        source: str = "associative_recall",
        source_options: dict[str, Any] | None = None,
        n_train: int = 50_000,
        n_val: int = 1_000,
        n_test: int = 2_000,
        batch_size: int = 64,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        sizes = (("n_train", n_train), ("n_val", n_val), ("n_test", n_test), ("batch_size", batch_size))
        for name, value in sizes:
            if value < 1:
                raise ZooError(f"data.{name}: got {value}; must be at least 1")
        if not 0 <= seed < 1 << 32:
            raise ZooError(f"data.seed: got {seed}; must be at least 0, and less than 2^32")
        if num_workers < 0:
            raise ZooError(f"data.num_workers: got {num_workers}; must be 0 or more")
        self._sequence_source: SequenceSource = make_source(SEQUENCES, source, None, source_options, also=None)
        self.save_hyperparameters()
        self.batch_size = batch_size
        self._data: SequenceData | None = None
        self._splits = np.zeros(0, dtype=np.uint8)

    def setup(self, stage: str) -> None:
        """Draw the sequences."""
        if self._data is not None:
            return
        h, source = self.hparams, self._sequence_source
        source.read()  # what is wrong with a source of somebody's own is said in one line
        sizes = [h[name] for name in ("n_train", "n_val", "n_test")]
        self._data = draw_different(source, sum(sizes), h["seed"])
        self._splits = split_drawn(*sizes)
        held = self._splits == SPLITS.index("test")
        reference = source.reference(self._data.tokens[held], self._data.is_answer[held])
        fingerprint = hashlib.sha256(self._data.tokens.astype("<i4").tobytes() + self._data.is_answer.tobytes())
        self._identity = {
            "kind": "sequences",
            **SymbolTokenizer(self._data.symbols).identity(),
            "rule": source.name,
            "options": weight_options(source.options),
            "source": {
                "name": source.shown,
                "sequences": len(self._splits),
                "sha256": fingerprint.hexdigest(),
                "options": plain_options(source.options),
                "reference": reference,
            },
        }
        counts = ", ".join(f"{size:,} {split}" for size, split in zip(sizes, SPLITS, strict=True))
        known = ", ".join(f"{name} {value:.3f}" for name, value in reference.items())
        rank_zero_info(
            f"Sequences: {counts}, of {self._data.tokens.shape[1]} out of {len(self._data.symbols)} symbols"
            f"{f'; accuracy to compare with, on those of test: {known}' if known else ''}"
        )

    # ------------------------------------------------------------------ loaders

    def _of_split(self, split: str) -> AnswerRows:
        if self._data is None:
            raise ZooError("SequenceDataModule: no data yet; call prepare_data() and setup('fit') first")
        chosen = self._splits == SPLITS.index(split)
        return AnswerRows(self._data.tokens[chosen], self._data.is_answer[chosen])

    def _options(self) -> dict[str, Any]:
        return super()._options() | {"collate_fn": answer_batch}

    def train_dataloader(self) -> ResumableLoader:
        rows = self._of_split("train")
        replicas, rank = (self.trainer.world_size, self.trainer.global_rank) if self.trainer else (1, 0)
        sampler = ShuffledSampler(len(rows), replicas, rank, self.hparams["seed"], drop_last=len(rows) >= replicas)
        if len(sampler) < self.batch_size:
            rank_zero_warn(f"There are {len(sampler)} training sequences, fewer than a batch of {self.batch_size}")
        return self._training_loader(rows, sampler, drop_last=len(sampler) >= self.batch_size, **self._options())

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self._of_split("val"), **self._options())

    def test_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self._of_split("test"), **self._options())

    def predict_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self._of_split("test"), **self._options())
