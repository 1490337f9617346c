"""What a model is looked into with: its held-out data, and one sample of them or of the user's."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from datamodules.base import ZooDataModule
from zoo.checkpoint.checkpoint import Checkpoint
from zoo.checkpoint.identity import check_identity
from zoo.errors import ZooError
from zoo.families import data_class, family_of
from zoo.tasks import LanguageModelTask, ZooTask


@dataclass(frozen=True)
class Sample:
    """One sample.

    Args:
        inputs: what the network reads, (1, ...).
        names: of its tokens; none where they are unknown.
        title: what it is.
    """

    inputs: Tensor
    names: list[str]
    title: str


def held_out_data(
    checkpoint: Checkpoint, task: ZooTask, path: str | None = None, config: str | None = None
) -> ZooDataModule:
    """The data of a checkpoint, or other data read as its own were, set up for the test.

    Args:
        checkpoint: whose data.
        task: its task.
        path: other data: text, a folder of pictures, or a table; None for the checkpoint's own.
        config: a YAML file whose ``data`` section goes before the checkpoint's settings.

    Raises:
        ZooError: if there is nothing to read, or it is other data than the model's.
    """
    kind = data_class(checkpoint.claim, checkpoint.path) or family_of(task).data
    settings = checkpoint.data_settings | kind.as_in_checkpoint(checkpoint.path)
    if config is not None:
        settings |= _data_section(config, kind)
    if path is not None:
        settings |= _of_path(kind, path)
    try:
        data = kind(**settings)
        data.suit(task.data_wishes())
        data.prepare_data()
        data.setup("test")
    except ZooError as error:
        if path is not None or config is not None:
            raise
        raise ZooError(
            f"got none, and the checkpoint's own data can't be read ({error}); name yours, or a --config with a data "
            "section",
            argument="--data",
        ) from None
    check_identity(task.data_identity, data.identity(), task.mismatch_advice)
    return data


def _data_section(config: str, kind: type[ZooDataModule]) -> dict[str, Any]:
    file = Path(config)
    if not file.is_file():
        raise ZooError(f"got {config}; there is no such file, so check the path", argument="--config")
    try:
        section = yaml.safe_load(file.read_text(encoding="utf-8"))["data"]
        given, name = section.get("init_args") or {}, section.get("class_path", kind.__name__)
    except (yaml.YAMLError, UnicodeDecodeError, KeyError, TypeError, AttributeError):
        raise ZooError(
            f"{config} has no data section of settings; give a YAML file as lightning fit takes it", argument="--config"
        ) from None
    if str(name).rpartition(".")[2] != kind.__name__:
        raise ZooError(f"{config} has data of {name}; this model reads {kind.__name__}", argument="--config")
    if not isinstance(given, Mapping) or (unknown := sorted(set(given) - set(_arguments(kind)))):
        what = given if not isinstance(given, Mapping) else ", ".join(map(str, unknown))
        raise ZooError(f"{config} gives data {what}, which {kind.__name__} doesn't know; mend it", argument="--config")
    return dict(given)


def _of_path(kind: type[ZooDataModule], path: str) -> dict[str, Any]:
    known = _arguments(kind)
    if kind.own_argument not in known:
        raise ZooError(f"got {path!r}, but {kind.__name__} reads no files; leave it out", argument="--data")
    given: dict[str, Any] = {kind.own_argument: path, "source": "auto", "source_options": None}
    return {name: value for name, value in given.items() if name in known}


def _arguments(kind: type) -> list[str]:
    return list(inspect.signature(kind).parameters)


def held_out_sample(task: ZooTask, data: ZooDataModule, number: int, tokens: int) -> Sample:
    """A sample of the test split.

    Args:
        task: whose network reads it.
        data: set up for the test.
        number: which one, from 0.
        tokens: of a text, how many from the beginning of the window.

    Raises:
        ZooError: if there is none of that number.
    """
    loader = data.test_dataloader()
    n = len(loader.dataset)
    if not 0 <= number < n:
        raise ZooError(f"got {number}; there are {n:,} held-out samples, so give 0 to {n - 1}", argument="--sample")
    batch = loader.collate_fn([loader.dataset[number]])
    inputs = task.inputs_of(batch)
    if isinstance(task, LanguageModelTask):
        inputs = inputs[:, :tokens]
    title = f"held-out sample {number}"
    if isinstance(batch, Mapping) and "id" in batch:
        title += f" ({batch['id'][0]})"
    return Sample(inputs, task.token_names(inputs), title)


def text_sample(task: ZooTask, text: str, tokens: int) -> Sample:
    """A text of the user's, for a language model.

    Raises:
        ZooError: for another model, or a text of more than so many tokens.
    """
    if not isinstance(task, LanguageModelTask):
        raise ZooError(f"got a text for {type(task).__name__}, which reads none; choose a --sample", argument="--text")
    numbers = task.encode_prompt(text)
    if len(numbers) > tokens:
        raise ZooError(
            f"got {len(numbers)} tokens, and {tokens} are looked at; give a shorter text, or more --tokens",
            argument="--text",
        )
    inputs = torch.tensor([numbers])
    return Sample(inputs, task.token_names(inputs), f"text of {len(numbers)} tokens")
