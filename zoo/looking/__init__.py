"""Looking at what attention layers do with one sample: kept, measured and drawn."""

from zoo.looking.layers import MOST_WEIGHTS, Look, attention_layers, look

__all__ = ["MOST_WEIGHTS", "Look", "attention_layers", "look"]
