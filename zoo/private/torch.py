"""What this zoo needs of PyTorch that has no public name."""

import torch


def backward_pass() -> int:
    """A number that is the same for all nodes of one backward pass."""
    return torch._C._current_graph_task_id()


def has_autocast(device: str) -> bool:
    """Whether autocast knows a kind of device; meta it doesn't."""
    return torch.amp.autocast_mode.is_autocast_available(device)
