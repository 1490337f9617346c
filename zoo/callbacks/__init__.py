"""What a run shows and writes."""

from zoo.callbacks.checkpoints import BestAndLastCheckpoint
from zoo.callbacks.mistakes import Mistakes
from zoo.callbacks.pictures import MetricPictures
from zoo.callbacks.predictions import PredictionWriter
from zoo.callbacks.samples import TextSamples
from zoo.callbacks.throughput import PicturesPerSecond, TokensPerSecond

__all__ = [
    "BestAndLastCheckpoint",
    "MetricPictures",
    "Mistakes",
    "PicturesPerSecond",
    "PredictionWriter",
    "TextSamples",
    "TokensPerSecond",
]
