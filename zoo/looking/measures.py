"""Measures of attention maps and of the matrices that attention shows."""

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.attention.base import Shown
from zoo.looking.layers import Look

MATRIX_A_HEAD = ("head", "row", "column")


def head_similarity(maps: Tensor) -> Tensor:
    r"""How alike the heads' maps are: maps (H, queries, keys) -> cosines (H, H).

    .. math:: c_{gh} = \frac{\langle A_g, A_h \rangle}{|A_g| |A_h|}

    over the queries that see more than one key: of a single one every head has all its weight there. NaN where no query
    sees more.
    """
    weights = maps.double().nan_to_num(0)
    chooses = _keys_seen(weights) > 1
    if not chooses.any():
        return weights.new_full((len(maps), len(maps)), float("nan"))
    flat = F.normalize(weights[:, chooses].flatten(1), dim=1)
    return flat @ flat.T


def mean_of_pairs(similarity: Tensor) -> float:
    """The mean over pairs of different heads of (H, H); NaN for one head."""
    others = ~torch.eye(len(similarity), dtype=torch.bool)
    return float(similarity[others].mean())


def map_entropy(maps: Tensor) -> Tensor:
    """Mean entropy, in nats, of a query's weights: maps (H, queries, keys) -> (H,); NaN where some are negative.

    Weights are taken as shares of their sum; queries that see one key or none are left out.
    """
    weights = maps.double().nan_to_num(0)
    total = weights.sum(dim=-1, keepdim=True)
    shares = weights / total.clamp(min=1e-12)
    of_query = torch.special.entr(shares).sum(dim=-1)  # (H, queries); minus infinity below zero
    sees = (total.squeeze(-1) > 0) & (_keys_seen(weights) > 1)
    found = (of_query * sees).sum(dim=-1) / sees.sum(dim=-1)
    return found.masked_fill((weights < 0).flatten(1).any(dim=1), float("nan"))


def _keys_seen(weights: Tensor) -> Tensor:
    """How many keys each query gives a weight in some head: weights (H, queries, keys) -> (queries,)."""
    return (weights != 0).any(dim=0).sum(dim=-1)


def maps_of(look: Look) -> Tensor:
    """A look's attention maps.

    Raises:
        ValueError: if it was taken without.
    """
    if look.maps is None:
        raise ValueError("this look was taken without attention maps")
    return look.maps


def block_norms(matrix: Tensor, blocks: int) -> Tensor:
    """Frobenius norm of each block of a matrix (D, D): (blocks, blocks)."""
    width = matrix.shape[0] // blocks, matrix.shape[1] // blocks
    return matrix.double().view(blocks, width[0], blocks, width[1]).square().sum(dim=(1, 3)).sqrt()


def spectra(matrix: Tensor) -> dict[str, Tensor]:
    """Singular values of a matrix, the largest first, and the eigenvalues of its symmetric part, likewise."""
    wide = matrix.double()
    return {
        "singular_value": torch.linalg.svdvals(wide),
        "eigenvalue": torch.linalg.eigvalsh((wide + wide.T) / 2).flip(0),
    }


def is_matrix_a_head(item: Shown) -> bool:
    """Whether it is a square matrix a head, as a metric is."""
    return item.axes == MATRIX_A_HEAD and item.values.shape[1] == item.values.shape[2]
