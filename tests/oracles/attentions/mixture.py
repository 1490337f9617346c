"""The equations of ``mixture``."""

from typing import Any

import torch
from torch import Tensor

from tests.oracles.attentions.common import Params, assembled, dot_scores, keys_of, mixed, projected, softmax
from tests.oracles.damcha import affine


def oracle(
    params: Params, x: Tensor, real: Tensor, n_heads: int, options: Any, causal: bool, layer_idx: int
) -> tuple[Tensor, Tensor | None]:
    dh, is_paper = x.shape[-1] // n_heads, options.variant == "paper"
    n_experts = len(params["router.weight"])
    n_chosen = min(n_heads, n_experts) if options.chosen is None else options.chosen
    shared = 1 if is_paper else n_experts
    q = projected(x, params, "W_q", n_experts)
    k, v = (projected(x, params, name, shared) for name in ("W_k", "W_v"))

    def one(b: int, t: int) -> tuple[Tensor, list[dict[int, Tensor]]]:
        logits = affine(x[b, t], params, "router")
        best = sorted(range(n_experts), key=lambda e: -logits[e].item())[:n_chosen]
        gates = softmax({e: logits[e] for e in (range(n_experts) if is_paper else best)})
        total = sum(gates[e].item() for e in best)
        out, parts, tables = torch.zeros(x.shape[-1], dtype=x.dtype), [], []
        for e in best:
            own = 0 if is_paper else e
            weights = softmax(dot_scores(q[b][t][e], {j: k[b][j][own] for j in keys_of(real, b, t, causal)}))
            tables.append(weights)
            mix = gates[e] * mixed(weights, lambda j, own=own: v[b][j][own], dh)
            parts.append(mix)
            if is_paper:
                out = out + params["out_proj.weight"][:, e * dh : (e + 1) * dh] @ (mix / total)
        if not is_paper:
            return affine(torch.cat(parts), params, "out_proj"), tables
        return (out + params["out_proj.bias"] if "out_proj.bias" in params else out), tables

    return assembled(x, real, one, n_chosen)
