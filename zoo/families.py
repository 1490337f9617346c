"""The families of models: the one place that knows which task and which data module belong together, and by which
names a checkpoint may ask for them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from datamodules import (
    GraphTableDataModule,
    ImageDataModule,
    SequenceDataModule,
    TextDataModule,
    TextPairDataModule,
)
from datamodules.base import ZooDataModule
from zoo.errors import ZooError, listed
from zoo.registry import Registry
from zoo.tasks import GraphPredictionTask, ImageClassificationTask, LanguageModelTask, ZooTask
from zoo.tasks.settings import defaults_of

Kind = TypeVar("Kind", bound=type)


@dataclass(frozen=True)
class Family:
    """What belongs together. All else that differs between families, a task of it says: its example inputs, its
    carry-over, and what the hub and an exported graph are told.

    Args:
        name: its name, on the shelf and for ``zoo list --family``.
        task: its task's class.
        data: its data module's class.
        configs: the folder of its configs, where that has another name.
        more_data: classes of further data modules whose batches its task takes.
    """

    name: str
    task: type[ZooTask]
    data: type[ZooDataModule]
    configs: str | None = None
    more_data: tuple[type[ZooDataModule], ...] = ()

    @property
    def datas(self) -> tuple[type[ZooDataModule], ...]:
        """The classes of all its data modules."""
        return (self.data, *self.more_data)


FAMILIES: Registry[Family] = Registry("family", None, "damcha_zoo.families")


def register_family(family: Family) -> Family:
    """Make a family known; from then on checkpoints of its classes may be read.

    Raises:
        ZooError: if its name is taken.
    """
    return FAMILIES.register(family.name)(family)


register_family(
    Family("language", LanguageModelTask, TextDataModule, "lm", more_data=(TextPairDataModule, SequenceDataModule))
)
register_family(Family("vision", ImageClassificationTask, ImageDataModule, configs="vit"))
register_family(Family("graph", GraphPredictionTask, GraphTableDataModule))


def families() -> list[Family]:
    """All families."""
    return [FAMILIES.get(name) for name in FAMILIES.names()]


def family_of(task: ZooTask) -> Family:
    """The family of a task.

    Raises:
        ZooError: if it is of none.
    """
    for family in families():
        if isinstance(task, family.task):
            return family
    raise ZooError(f"task: got {type(task).__name__}, which is of no family; register one with register_family")


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
    kinds = {class_path(family.task): family.task for family in families()}
    return _registered(kinds, claim["task"], claim["settings"], where)


def data_class(claim: Mapping[str, Any], where: object) -> type[ZooDataModule] | None:
    """As ``task_class``, the class of the data module; None if the checkpoint was made without one.

    Raises:
        ZooError: if that is no data module of this zoo, or a setting is none of that data module's.
    """
    if claim["data"] is None:
        return None
    kinds = {class_path(kind): kind for family in families() for kind in family.datas}
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
