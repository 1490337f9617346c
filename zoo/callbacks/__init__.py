"""What a run shows and writes."""

from zoo.callbacks.pictures import MetricPictures, TextSamples
from zoo.callbacks.predictions import PredictionWriter
from zoo.callbacks.throughput import TokensPerSecond

__all__ = ["MetricPictures", "PredictionWriter", "TextSamples", "TokensPerSecond"]
