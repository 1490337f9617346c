"""Training windows: every block once an epoch, in an order that a resumed run repeats."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset

from datamodules.loaders import ResumableLoader, ShuffledSampler, WindowSampler


class Starts(Dataset):
    def __getitem__(self, start):
        return torch.tensor(start)

    def __len__(self):
        return 10_000


def batches(loader):
    return [batch.tolist() for batch in loader]


def make(n_tokens=1000, window=10, batch_size=4, seed=0, **options):
    return ResumableLoader(Starts(), WindowSampler(n_tokens, window, seed=seed), batch_size=batch_size, **options)


@given(n_tokens=st.integers(12, 3000), window=st.integers(1, 200), seed=st.integers(0, 9), epoch=st.integers(0, 5))
@settings(deadline=None, max_examples=200)
def test_windows_of_an_epoch_fit_do_not_overlap_and_leave_little_out(n_tokens, window, seed, epoch):
    if n_tokens < window + 1:
        return
    sampler = WindowSampler(n_tokens, window, seed=seed)
    sampler.set_epoch(epoch)
    starts = sorted(sampler)
    assert all(start >= 0 and start + window + 1 <= n_tokens for start in starts)
    assert all(b - a >= window for a, b in pairwise(starts))
    assert n_tokens - len(starts) * window <= 3 * window


def test_epochs_differ_in_order_and_offset_and_repeat_exactly():
    loader = make()
    first = batches(loader)
    loader.order.set_epoch(1)
    second = batches(loader)
    assert first != second
    assert {start % 10 for batch in first for start in batch} != {start % 10 for batch in second for start in batch}
    loader.order.set_epoch(0)
    assert batches(loader) == first
    assert batches(make(seed=1)) != first


@given(n=st.integers(1, 200), replicas=st.integers(1, 7), seed=st.integers(0, 9), epoch=st.integers(0, 5))
@settings(deadline=None, max_examples=100)
def test_shuffled_rows_all_come_every_epoch_in_equal_shares(n, replicas, seed, epoch):
    parts = [ShuffledSampler(n, replicas, rank, seed) for rank in range(replicas)]
    for part in parts:
        part.set_epoch(epoch)
    shares = [list(part) for part in parts]
    assert {len(share) for share in shares} == {len(parts[0])} == {-(-n // replicas)}
    seen = [index for share in shares for index in share]
    assert set(seen) == set(range(n))
    if n % replicas == 0:
        assert len(seen) == n


def test_rows_are_shuffled_anew_each_epoch_and_the_last_batch_may_be_partial():
    loader = ResumableLoader(Starts(), ShuffledSampler(10, seed=3), batch_size=4)
    first = batches(loader)
    assert [len(batch) for batch in first] == [4, 4, 2]
    assert batches(loader) == first
    loader.order.set_epoch(1)
    assert batches(loader) != first
    loader.load_state_dict({"epoch": 1, "batches": 2})
    rest = batches(loader)
    assert rest == batches(loader)[2:]


def test_processes_share_an_epoch_without_overlap():
    alone = set(WindowSampler(1000, 10))
    parts = [set(WindowSampler(1000, 10, num_replicas=3, rank=rank)) for rank in range(3)]
    assert len(set.union(*parts)) == sum(len(part) for part in parts) == len(alone) // 3 * 3
    assert set.union(*parts) <= alone


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_goes_on_after_the_batches_it_has_given(workers):
    whole = make()
    whole.order.set_epoch(2)
    expected = batches(whole)
    broken = make()
    broken.order.set_epoch(2)
    iterator = iter(broken)
    seen = [next(iterator).tolist() for _ in range(7)]
    state = broken.state_dict()
    resumed = make(num_workers=workers)
    resumed.load_state_dict(state)
    iterator = iter(resumed)  # Lightning makes the iterator first and tells the epoch then
    resumed.order.set_epoch(2)
    rest = [batch.tolist() for batch in iterator]
    assert seen + rest == expected
    resumed.order.set_epoch(3)
    whole.order.set_epoch(3)
    assert batches(resumed) == batches(whole)


def test_state_of_a_finished_epoch_starts_the_next_from_its_beginning():
    loader = make()
    everything = batches(loader)
    state = loader.state_dict()
    assert state["batches"] == len(everything)
    resumed = make()
    resumed.load_state_dict(state)
    resumed.order.set_epoch(1)
    loader.order.set_epoch(1)
    assert batches(resumed) == batches(loader)


def test_making_an_iterator_leaves_global_randomness_alone():
    loader = make()
    torch.manual_seed(1)
    before = torch.get_rng_state()
    next(iter(loader))
    assert torch.equal(before, torch.get_rng_state())
