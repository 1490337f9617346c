"""The families and their names. A fourth in one file is an example of CONTRIBUTING.md: test_contributing.py."""

import pytest
import torch

from zoo.errors import ZooError
from zoo.families import FAMILIES, Family, families, family_of, register_family


def test_families_are_named_once():
    assert [family.name for family in families()] == ["graph", "language", "vision"]
    graph = FAMILIES.get("graph")
    assert register_family(graph) is graph


def test_a_task_of_no_family_is_refused():
    with pytest.raises(ZooError, match="task: got Linear, which is of no family"):
        family_of(torch.nn.Linear(1, 1))


def test_a_name_that_is_no_family_is_refused_with_the_nearest():
    with pytest.raises(ZooError, match=r"family: got 'grap', which is none; do you mean graph\?"):
        FAMILIES.get("grap")
    with pytest.raises(ZooError, match="family: can't be registered as 'A b'"):
        register_family(Family("A b", FAMILIES.get("graph").task, FAMILIES.get("graph").data))
