"""What is told of weights that were carried over, and what they are known by."""

import torch

from zoo.checkpoint.transfer import Fate, summary, weights_digest


def test_the_table_names_every_tensor_but_those_kept():
    fates = [Fate("a", "kept"), Fate("b", "kept"), Fate("c", "new", "why"), Fate("d", "dropped", "so")]
    rows = summary(fates).splitlines()
    assert rows[2:] == ["| kept | 2 tensors | as they were |", "| new | c | why |", "| dropped | d | so |"]


def test_the_digest_of_weights_is_theirs_alone():
    state = {"b": torch.arange(3.0), "a": torch.tensor(1), "c": torch.zeros(0, 2, dtype=torch.bfloat16)}
    first = weights_digest(state)
    assert first == weights_digest(dict(reversed(state.items())))
    for name, other in (("b", state["b"] + 1e-7), ("b", state["b"][None]), ("b", state["b"].double())):
        assert first != weights_digest(state | {name: other})
    assert first != weights_digest({("d" if name == "b" else name): tensor for name, tensor in state.items()})
