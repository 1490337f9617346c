"""What this zoo needs of timm that has no public name."""

from timm.models._features import feature_take_indices

__all__ = ["feature_take_indices"]
