"""Errors that say what they are about, to people and to whoever passes them on."""

import copy
import pickle

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from zoo.errors import CheckpointMismatchError, ZooError

KINDS = [ZooError, CheckpointMismatchError]


@pytest.mark.parametrize("kind", KINDS)
def test_the_argument_comes_first_in_the_message(kind):
    error = kind("got 3; must be 4", argument="--rank")
    assert (str(error), error.argument, error.text) == ("--rank: got 3; must be 4", "--rank", "got 3; must be 4")
    bare = kind("data.rank: got 3; must be 4")
    assert (str(bare), bare.argument) == (bare.text, None) == ("data.rank: got 3; must be 4", None)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stand_in", ["checkpoint", "address", "name"])
def test_what_stands_in_for_an_argument_gives_way_to_it(kind, stand_in):
    error = kind("a.ckpt is no file", argument=stand_in).about("--like")
    assert type(error) is kind
    assert (str(error), error.argument) == ("--like: a.ckpt is no file", "--like")
    assert str(error.about("WEIGHTS", "b.pt")) == "WEIGHTS: b.pt: --like: a.ckpt is no file"


def test_what_an_error_is_about_otherwise_stays():
    assert str(ZooError("is full", argument="ZOO_CACHE").about("--like")) == "--like: ZOO_CACHE: is full"
    assert str(ZooError("data.rank: got 3").about("--like")) == "--like: data.rank: got 3"
    assert str(ZooError("is no file", argument="checkpoint").about("WEIGHTS", "b.pt")) == "WEIGHTS: b.pt: is no file"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("again", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy, copy.deepcopy])
def test_a_copy_is_about_the_same(kind, again):
    error = again(kind("got 3; must be 4", argument="--rank"))
    assert type(error) is kind
    assert (str(error), error.argument, error.text) == ("--rank: got 3; must be 4", "--rank", "got 3; must be 4")


class Refusing(Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, i):
        raise CheckpointMismatchError("a.png can't be read", argument="data.path")


def test_an_error_comes_back_from_a_worker_process():
    torch.set_num_threads(1)
    with pytest.raises(CheckpointMismatchError, match=r"data\.path: a\.png can't be read"):
        next(iter(DataLoader(Refusing(), num_workers=1)))
