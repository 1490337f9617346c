"""Loaders whose order is a function of seed and epoch alone, so that a run can go on in the middle of one."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, SequentialSampler


class ShuffledSampler(DistributedSampler[int]):
    """All of ``n`` indices once an epoch, in an order that seed and epoch alone decide.

    Lightning tells it the epoch through ``set_epoch`` and leaves it alone in distributed runs, where each process
    gets its share.

    Args:
        n: number of indices.
        num_replicas: number of processes.
        rank: which process this is.
        seed: together with the epoch, decides the order.
        drop_last: where the indices don't divide among the processes, leave some out; False repeats some.
    """

    def __init__(self, n: int, num_replicas: int = 1, rank: int = 0, seed: int = 0, drop_last: bool = False) -> None:
        super().__init__(range(n), num_replicas, rank, shuffle=True, seed=seed, drop_last=drop_last)  # type: ignore[arg-type]
        self.skip = 0  # how many of the first epoch's indices to leave out, set by a loader that goes on

    def draw(self, random: torch.Generator) -> Tensor:
        """An epoch's indices for all processes."""
        # Kept as a tensor: a list of Python numbers would weigh as much as a text's tokens themselves.
        return torch.randperm(len(self.dataset), generator=random)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[int]:
        order = self.draw(torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch))
        if 0 < len(order) < self.total_size:  # repeat some, so that every process takes as many steps
            order = order.repeat(math.ceil(self.total_size / len(order)))
        mine = order[: self.total_size][self.rank :: self.num_replicas]
        skip, self.skip = self.skip, 0
        for index in mine[skip:]:
            yield int(index)


class WindowSampler(ShuffledSampler):
    """Starts of training windows: every epoch all blocks of ``window`` tokens in a new order, shifted by a new offset.

    Args:
        n_tokens: length of the token sequence.
        window: tokens a window, not counting the target past its end.
        num_replicas: number of processes.
        rank: which process this is.
        seed: together with the epoch, decides order and offset.
    """

    def __init__(self, n_tokens: int, window: int, num_replicas: int = 1, rank: int = 0, seed: int = 0) -> None:
        self.window = window
        self.n_shifts = max(1, min(window, n_tokens - window))
        blocks = (n_tokens - self.n_shifts) // window
        super().__init__(blocks, num_replicas, rank, seed, drop_last=True)

    def draw(self, random: torch.Generator) -> Tensor:
        shift = torch.randint(self.n_shifts, (), generator=random)
        return super().draw(random) * self.window + shift


class StillSampler(DistributedSampler[int], SequentialSampler):
    """The first epoch of another sampler, every epoch: the same samples in the same order, to be learned by heart.

    It counts as a sequential one, which is what Lightning looks for when ``overfit_batches`` is set.

    Args:
        sampler: whose first epoch it is.
    """

    def __init__(self, sampler: ShuffledSampler) -> None:
        super().__init__(sampler.dataset, sampler.num_replicas, sampler.rank, shuffle=False)
        self.first = sampler
        self.skip = 0

    def __iter__(self) -> Iterator[int]:
        self.first.skip, self.skip = self.skip, 0
        return iter(self.first)

    def __len__(self) -> int:
        return len(self.first)


class ResumableLoader(DataLoader[Any]):
    """A DataLoader over a ``ShuffledSampler`` that can go on where a checkpoint left it.

    Lightning saves ``state_dict`` with every checkpoint. The sampler is asked for its order when the first batch is
    drawn, not before: only then has Lightning told it the epoch.
    """

    def __init__(self, dataset: Dataset[Any], sampler: ShuffledSampler | StillSampler, **options: Any) -> None:
        # A generator of its own leaves the global random state alone when an iterator is made.
        super().__init__(dataset, sampler=sampler, generator=torch.Generator().manual_seed(0), **options)
        self.order = sampler
        self._resumed: dict[str, int] | None = None
        self._drawn = 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.order.epoch, "batches": self._drawn}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._resumed = dict(state)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        resumed, self._resumed = self._resumed, None
        self._drawn = 0
        if resumed is not None and resumed["epoch"] == self.order.epoch and resumed["batches"] < len(self):
            self._drawn = resumed["batches"]
            self.order.skip = self._drawn * (self.batch_size or 1)
        for batch in super().__iter__():
            self._drawn += 1
            yield batch
