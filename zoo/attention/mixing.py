"""Softmax over the keys that a query sees, and the mix of their values; shared by all attentions."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.attention.base import Masks
from zoo.errors import ZooError


def mix(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    masks: Masks,
    keys_real: Tensor | None = None,
    dropout_p: float = 0.0,
    need_weights: bool = False,
    scale: float | None = None,
    visible: Tensor | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    r"""Ordinary attention, through PyTorch's fused kernels wherever no weights are asked for.

    .. math:: O = softmax(s \, q k^T + bias + mask) \, v

    Args:
        q: queries (B, H, T, w).
        k: keys (B, G, keys, w), of all tokens so far; G divides H, and each serves H / G query heads in a row.
        v: values (B, G, keys, u).
        masks: who sees whom; of its padding only the keys' counts here, and ``keys_real`` goes before it.
        keys_real: which keys are real (B, keys), from a cache; None takes ``masks.padding``.
        dropout_p: dropout probability of the weights.
        need_weights: also return the weights, by the explicit road.
        scale: factor s of the products; None is 1 / sqrt(w).
        visible: what else a query sees, bool, broadcastable to (B, H, T, keys).
        bias: what is added to the scores, broadcastable to (B, H, T, keys).

    Returns:
        The mix (B, H, T, u), zero for a query that sees nothing, and the weights (B, H, T, keys) or None.
    """
    T, n_keys = q.shape[2], k.shape[2]
    real = masks.padding if keys_real is None and n_keys == T else keys_real
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    is_grouped = k.shape[1] != q.shape[1]
    free = masks.extra is None and real is None and visible is None and bias is None
    if free and not need_weights and (n_keys == T or T == 1):
        causal = masks.causal and bool(n_keys == T)  # else the one query sees all keys
        out = F.scaled_dot_product_attention(
            q, k, v, dropout_p=dropout_p, is_causal=causal, scale=scale, enable_gqa=is_grouped
        )
        return out, None

    seen, added = visibility(q, n_keys, masks, real)
    seen = seen if visible is None else seen & visible
    added = added if bias is None else bias if added is None else added + bias
    some = seen.any(dim=-1, keepdim=True)  # a row of -inf has no softmax: open it, then drop what it mixes
    shown = seen | ~some
    if need_weights:
        if is_grouped:
            k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
        scores = q @ k.transpose(-1, -2) * scale  # (B, H, T, keys)
        if added is not None:
            scores = scores + added.masked_fill(~seen, 0)
        weights = scores.masked_fill(~shown, float("-inf")).softmax(dim=-1).masked_fill(~some, 0)
        return F.dropout(weights, dropout_p) @ v, weights
    mask = shown if added is None else added.masked_fill(~seen, 0).masked_fill(~shown, float("-inf"))
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout_p, scale=scale, enable_gqa=is_grouped
    )
    return out.masked_fill(~some, 0), None


def visible_softmax(scores: Tensor, seen: Tensor) -> Tensor:
    """Weights from scores (B, H, T, keys) over the keys that are seen; zero for a query that sees none.

    For attentions that change scores or weights in ways that no fused kernel knows. What isn't seen may hold anything
    but NaN.
    """
    some = seen.any(dim=-1, keepdim=True)
    shown = seen | ~some
    return scores.masked_fill(~shown, float("-inf")).softmax(dim=-1).masked_fill(~some, 0)


def visibility(q: Tensor, n_keys: int, masks: Masks, keys_real: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Which key each query sees, (B or 1, H or 1, T, keys), and what a floating mask adds to the scores.

    Args:
        q: queries (B, H, T, w), for their shape, type and device.
        n_keys: how many keys there are; the queries are the last T of them.
        masks: who sees whom, but for padding.
        keys_real: which keys are real (B, keys); None where all are.

    Raises:
        ZooError: for a mask of another shape.
    """
    B, H, T, _ = q.shape
    visible = torch.ones(1, 1, T, n_keys, dtype=torch.bool, device=q.device)
    bias = None
    if masks.extra is not None:
        mask = masks.extra.unsqueeze(1) if masks.extra.dim() == 3 else masks.extra
        try:
            mask = mask.expand(B, H, T, n_keys) if mask.dim() == 4 else mask.expand(1, 1, T, n_keys)
        except RuntimeError:
            raise ZooError(
                f"attn_mask: got shape {tuple(masks.extra.shape)}; expected (T, T), (B, T, T) or a shape that "
                f"broadcasts to (B, H, T, keys) = {(B, H, T, n_keys)}"
            ) from None
        if mask.is_floating_point():
            bias = mask.to(q.dtype)
            visible = visible & (mask != float("-inf"))
        else:
            visible = visible & mask.bool()
    if masks.causal:
        visible = visible & visible.new_ones(T, n_keys).tril(n_keys - T)
    if keys_real is not None:
        visible = visible & keys_real.bool().view(keys_real.shape[0], 1, 1, n_keys)
    return visible, bias
