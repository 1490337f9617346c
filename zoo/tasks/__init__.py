"""The tasks: what `lightning fit` trains."""

from zoo.tasks.base import ZooTask
from zoo.tasks.graph import GraphPredictionTask
from zoo.tasks.language import LanguageModelTask
from zoo.tasks.vision import ImageClassificationTask

__all__ = ["GraphPredictionTask", "ImageClassificationTask", "LanguageModelTask", "ZooTask"]
