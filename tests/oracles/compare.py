"""What the attention tests share: random modules and options, and the comparison of a fast path with its oracle."""

from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Float64 with fewer than a thousand terms a sum and values of order one to ten: rounding stays under 1e-12, so 1e-10
# leaves room for a badly conditioned draw and none for a wrong term.
TIGHT = {"rtol": 1e-10, "atol": 1e-10}

# What makes each mode; the strategies below draw everything else.
MODES: dict[str, dict[str, Any]] = {
    "mlp": {},
    "linear_comb": {"off_diag_mode": "linear_comb"},
    "bayesian": {"off_diag_mode": "bayesian"},
    "separate_B": {"off_diag_mode": "separate_B"},
    "compact_rank": {"compact_rank": 2},
    "free_M": {"free_M": True, "off_diag_mode": "linear_comb"},
    "layer_bias": {"use_layer_bias": True, "layer_bias_rank": 2},
    "stride": {"context_stride": 2},
    "chunks": {"chunk_size": 2},
}
SEEDS = st.integers(0, 2**31 - 1)


def examples(n: int) -> Any:
    """Hypothesis settings: n examples, no deadline and no files."""
    return settings(max_examples=n, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def generator_options(draw: Any, mode: str) -> dict[str, Any]:
    """Options of the generator with ``mode`` on and the rest random, so that modes meet each other."""
    options: dict[str, Any] = {
        "diag_scale": draw(st.sampled_from([1.0, 0.5, -1.5, 0.0])),
        "off_diag_scale": draw(st.sampled_from([1.0, 2.0, -0.5, 0.0])),
    }
    if draw(st.booleans()):
        options |= {"use_layer_bias": True, "layer_bias_rank": draw(st.integers(1, 3))}
    options["context_stride"] = draw(st.sampled_from([1, 1, 2, 3]))
    if mode != "compact_rank":  # which forms no metrics that could be cut
        options["chunk_size"] = draw(st.sampled_from([None, None, 1, 3]))
    options |= MODES[mode]
    if "compact_rank" in options:
        options["compact_rank"] = draw(st.integers(1, 4))
    return options


@st.composite
def sizes(draw: Any, max_tokens: int = 4, max_heads: int = 3) -> tuple[int, int, int, int]:
    """Batch, tokens, heads and head width."""
    return (
        draw(st.integers(1, 2)),
        draw(st.integers(1, max_tokens)),
        draw(st.integers(1, max_heads)),
        draw(st.integers(1, 3)),
    )


def randomized(module: nn.Module, seed: int, dtype: torch.dtype = torch.float64) -> Any:
    """The module with noise on every parameter, so that nothing hides behind a zero or a one it started with."""
    torch.manual_seed(seed)
    module.to(dtype)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return module


def gradients(out: Tensor, tensors: Sequence[Tensor], seed: int) -> list[Tensor]:
    """Gradients of a random projection of ``out``; zero for what it does not depend on."""
    if not out.requires_grad:
        return [torch.zeros_like(t) for t in tensors]
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(out.dtype)
    grads = torch.autograd.grad((out * weight).sum(), list(tensors), allow_unused=True, retain_graph=True)
    return [torch.zeros_like(t) if g is None else g for g, t in zip(grads, tensors, strict=True)]


def assert_same_with_gradients(
    actual: Tensor, expected: Tensor, wanted: dict[str, Tensor], seed: int, **tolerance: float
) -> None:
    """Values and the gradients with regard to every tensor of ``wanted`` agree."""
    tolerance = tolerance or TIGHT
    torch.testing.assert_close(actual, expected, **tolerance)
    pairs = zip(gradients(actual, [*wanted.values()], seed), gradients(expected, [*wanted.values()], seed), strict=True)
    for name, (got, want) in zip(wanted, pairs, strict=True):
        torch.testing.assert_close(got, want, **tolerance, msg=lambda text, name=name: f"gradient of {name}: {text}")


def padding(B: int, T: int, seed: int, kind: str) -> Tensor:
    """A bool padding mask (B, T): none hidden, a left or right run a row, or scattered (rows may be all padding)."""
    g = torch.Generator().manual_seed(seed)
    if kind == "scattered":
        return torch.rand(B, T, generator=g) < 0.6
    n_hidden = torch.randint(0, T, (B, 1), generator=g) if kind != "none" else torch.zeros(B, 1)
    places = torch.arange(T).view(1, T)
    return places < T - n_hidden if kind == "right" else places >= n_hidden


class LargestTensor(TorchDispatchMode):
    """Remembers the largest element count among the outputs of all operations, and how many operations ran.

    A sparse tensor counts as what it holds.
    """

    def __init__(self) -> None:
        super().__init__()
        self.numel, self.operations = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.operations += 1
        held = (
            t._nnz() if t.layout == torch.sparse_csr else t.numel() for t in tree_leaves(out) if isinstance(t, Tensor)
        )
        self.numel = max([self.numel, *held])
        return out
