"""Weights carried over by the names of their rows, what is told of each, and what weights are known by."""

import json

import pytest
import torch

from zoo.checkpoint.transfer import Axis, TensorTransfer, carry, read_transfers, rearrange, summary, weights_digest
from zoo.errors import ZooError


def test_what_has_a_name_on_both_sides_is_moved_and_the_rest_stays():
    mine, theirs = torch.zeros(3, 2, 2), torch.arange(16.0).view(4, 2, 2)
    axes = [Axis(0, "rows", ["c", "new", "a"], ["a", "b", "c", "d"]), Axis(2, "columns", ["x", "y"], ["y", "x"])]
    filled, outcome, note = rearrange(mine, theirs, axes)
    assert torch.equal(filled, torch.stack([theirs[2].flip(1), torch.zeros(2, 2), theirs[0].flip(1)]))
    assert outcome == "moved"
    assert note == "2 of 3 rows by name, new: 'new', gone: 'b', 'd'; 2 of 2 columns by name"
    assert not mine.any()


def test_names_in_the_same_order_are_kept_and_others_are_new():
    mine, theirs = torch.zeros(2, 3), torch.ones(2, 3)
    assert rearrange(mine, theirs, [Axis(0, "rows", "ab", "ab")])[1:] == ("kept", "")
    assert rearrange(mine, theirs, [Axis(0, "rows", "ab", "cd")])[1:] == ("new", "no rows in common")
    assert rearrange(mine, torch.ones(2, 4), [Axis(0, "rows", "ab", "ab")])[1:] == ("new", "2 x 4 there, 2 x 3 here")


def test_every_tensor_of_both_is_told_of():
    own, source = {"a": torch.zeros(2), "b": torch.zeros(1)}, {"a": torch.ones(2), "c": torch.tensor(1.0)}
    filled, transfers = carry(own, source, {})
    assert torch.equal(filled["a"], source["a"])
    assert torch.equal(filled["b"], own["b"])
    assert transfers == [
        TensorTransfer("a", "kept"),
        TensorTransfer("b", "new", "not there"),
        TensorTransfer("c", "dropped", "a number, no place here"),
    ]


def test_checkpoints_keep_it_under_the_names_they_always_had():
    transfers = [TensorTransfer("a", "kept"), TensorTransfer("b", "moved", "why")]
    saved = json.loads(json.dumps([transfer.plain() for transfer in transfers]))
    assert saved == [{"tensor": "a", "fate": "kept", "note": ""}, {"tensor": "b", "fate": "moved", "note": "why"}]
    assert read_transfers(saved) == transfers


@pytest.mark.parametrize(
    "saved",
    [
        *(None, "kept", {"tensor": "a"}, [None], [["tensor", "fate"]], [{"tensor": "a"}]),
        *([{"tensor": "a", "fate": "sold"}], [{"tensor": 1, "fate": "new"}], [{"tensor": "a", "fate": "new", "x": 1}]),
    ],
)
def test_what_was_never_written_is_refused(saved):
    with pytest.raises(ZooError, match="checkpoint: what it says of the weights it started from was altered"):
        read_transfers(saved)


def test_the_table_names_every_tensor_but_those_kept():
    transfers = [
        TensorTransfer("a", "kept"),
        TensorTransfer("b", "kept"),
        TensorTransfer("c", "new", "why"),
        TensorTransfer("d", "dropped", "so"),
    ]
    rows = summary(transfers).splitlines()
    assert rows[2:] == ["| kept | 2 tensors | as they were |", "| new | c | why |", "| dropped | d | so |"]


def test_the_digest_of_weights_is_theirs_alone():
    state = {"b": torch.arange(3.0), "a": torch.tensor(1), "c": torch.zeros(0, 2, dtype=torch.bfloat16)}
    first = weights_digest(state)
    assert first == weights_digest(dict(reversed(state.items())))
    for name, other in (("b", state["b"] + 1e-7), ("b", state["b"][None]), ("b", state["b"].double())):
        assert first != weights_digest(state | {name: other})
    assert first != weights_digest({("d" if name == "b" else name): tensor for name, tensor in state.items()})
