r"""A generator that starts at the identity: every head's metric is I, for every context. Ours, not the method's.

The last layer's weights start at zero, and its bias at blocks whose sum over a row is I: the scores start as
:math:`X_i X_i^T / \sqrt{dh}`, where the static ablation starts. The generator learns all the same, as the zero half of
a low-rank adapter does: the gradient of the last layer's weights is the metric's times the hidden state, which isn't
zero, so from the second step on the layers before it have gradients too.

Whatever else is summed into a row starts without a sum: coefficients of the off-diagonal blocks, or those blocks
themselves, keep their spread around a mean of zero, and scales of layer biases are zero. Samples of ``bayesian``
scatter around the identity while training.
"""

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from zoo.errors import ZooError

if TYPE_CHECKING:
    from zoo.attention.damcha.metric import StructuredMLPForM


def check_identity_start(generator: "StructuredMLPForM") -> None:
    """Raise ZooError where no metric of the generator's is the identity: its rank is too low, or all scales are 0."""
    H, rank = generator.n_heads, generator.compact_rank
    why = ""
    if rank and rank < generator.head_dim:
        why = (
            f"compact_rank {rank}; a head's metric is {generator.head_dim} wide and the identity has that rank, so set "
            f"compact_rank to {generator.head_dim} or more"
        )
    elif not generator.diag_scale and (H == 1 or not generator.off_diag_scale):
        off = f" and off_diag_scale {generator.off_diag_scale}" if H > 1 else " and one head"
        why = f"diag_scale {generator.diag_scale}{off}; that makes every metric zero, so set a scale"
    if why:
        raise ZooError(f"identity_start: got True with {why}, or leave identity_start out")


@torch.no_grad()
def start_at_identity(generator: "StructuredMLPForM") -> None:
    """Set the last layer, and centre what is summed into its rows; call it once everything is drawn."""
    H, diag, off = generator.n_heads, float(generator.diag_scale), float(generator.off_diag_scale)
    generator.out.weight.zero_()
    if generator.use_layer_bias:
        generator.bias_scale.zero_()
    bias, one = generator.out.bias, torch.eye(generator.head_dim).to(generator.out.bias)
    if generator.compact_rank:
        _set_factors(bias, one, H, generator.compact_rank, diag, off)
        return
    # M is the identity too, as far as its diagonal blocks count; else the other blocks share it.
    of_diagonal, of_row = (1 / diag, 0.0) if diag else (1.0, 1 / off)  # of_row: what the other blocks of a row sum to
    same = torch.eye(H).to(bias)
    blocks = of_diagonal * same + (of_row / max(H - 1, 1)) * (1 - same)  # in units of I
    bias.copy_(torch.einsum("ij,ab->iajb", blocks, one).reshape(-1))
    mode = generator.off_diag_mode
    if mode == "mlp" or H == 1:
        return
    others = (1 - same).view(H, H, 1)
    if mode == "separate_B":
        B = generator.B.view(H, generator.head_dim, H, generator.head_dim).transpose(1, 2)  # (H, H, dh, dh), a view
        mean = (B * others.unsqueeze(-1)).sum(dim=1, keepdim=True) / (H - 1)
        B.add_(one * of_row / (H - 1) - mean)
        return
    alpha = cast(Tensor, generator.alpha if mode == "linear_comb" else generator.alpha_mu)
    n = (H - 1) * H
    mean = (alpha * others).sum(dim=(1, 2), keepdim=True) / n
    alpha.add_(of_row / n - mean)


def _set_factors(bias: Tensor, one: Tensor, H: int, rank: int, diag: float, off: float) -> None:
    r"""Factors with :math:`U_i \sum_j s_{ij} V_j^T / \sqrt r = I`: multiples of I, in the first dh columns.

    The multiples of V are an eigenvector of the scales s, and those of U divide by it. Where the rank is above dh, the
    further columns of U stay as they were drawn and V's are zero: with both at zero neither would ever have a gradient.
    """
    dh, unit = len(one), rank**0.25
    total, rest = diag + (H - 1) * off, diag - off  # the eigenvalues of s
    parts, scale = [1.0] * H, total
    if H > 1 and abs(rest) > abs(total):  # a row's scales may sum to zero
        parts, scale = [*[1.0] * (H - 1), 1.0 - H], rest
    U, V = bias.view(2, H, dh, rank).unbind(0)
    V.zero_()
    for i, part in enumerate(parts):
        U[i, :, :dh] = one * (unit / part)
        V[i, :, :dh] = one * (unit * part / scale)
