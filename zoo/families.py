"""The families of models: the one place that knows which task and which data module belong together, and by which
names a checkpoint may ask for them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from datamodules import GraphTableDataModule, ImageDataModule, TextDataModule
from datamodules.base import ZooDataModule
from zoo.errors import ZooError, listed
from zoo.tasks import GraphPredictionTask, ImageClassificationTask, LanguageModelTask, ZooTask
from zoo.tasks.settings import defaults_of

Kind = TypeVar("Kind", bound=type)


@dataclass(frozen=True)
class Family:
    """What trains together: a task's class and its data module's."""

    name: str
    task: type[ZooTask]
    data: type[ZooDataModule]


FAMILIES = {
    family.name: family
    for family in (
        Family("language", LanguageModelTask, TextDataModule),
        Family("vision", ImageClassificationTask, ImageDataModule),
        Family("graph", GraphPredictionTask, GraphTableDataModule),
    )
}


def class_path(kind: type) -> str:
    """The name under which a checkpoint keeps a class."""
    return f"{kind.__module__}.{kind.__qualname__}"


def task_class(claim: Mapping[str, Any], where: object) -> type[ZooTask]:
    """The class of the task that a checkpoint was made by; nothing that it names is imported.

    Args:
        claim: what the checkpoint says of itself.
        where: its file, for errors.

    Raises:
        ZooError: if that is no task of this zoo, or a setting is none of that task's.
    """
    kinds = {class_path(family.task): family.task for family in FAMILIES.values()}
    return _registered(kinds, claim["task"], claim["settings"], where)


def data_class(claim: Mapping[str, Any], where: object) -> type[ZooDataModule] | None:
    """As ``task_class``, the class of the data module; None if the checkpoint was made without one.

    Raises:
        ZooError: if that is no data module of this zoo, or a setting is none of that data module's.
    """
    if claim["data"] is None:
        return None
    kinds = {class_path(family.data): family.data for family in FAMILIES.values()}
    return _registered(kinds, claim["data"]["class_path"], claim["data"]["init_args"], where)


def _registered(kinds: Mapping[str, Kind], given: object, settings: Mapping[str, Any], where: object) -> Kind:
    if not isinstance(given, str) or given not in kinds:
        raise ZooError(
            f"{where} was made by {given}, which is no class of this zoo; give its model and data in a "
            "--config beside a checkpoint of this zoo, or use the program it was made with",
            argument="checkpoint",
        )
    kind = kinds[given]
    if unknown := sorted(set(settings) - set(defaults_of(kind))):
        raise ZooError(
            f"{where} has settings that {kind.__name__} doesn't know: {listed(unknown)}; it was altered, "
            "or made by a newer version of the zoo, so take another copy or install that version",
            argument="checkpoint",
        )
    return kind
