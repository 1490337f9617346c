"""DAMCHA straight from its equations: float64, loops over everything, and nothing of the code that it judges.

Parameters come as a mapping from a module's names to its tensors, the settings as plain arguments; no module is called.
Everything is differentiable, so gradients can be compared as well.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Metrics = Callable[[int, int], list[Tensor]]  # (batch row, query) -> one (dh, dh) matrix a head


def under(params: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The parameters whose names start with ``prefix``, without it."""
    return {name[len(prefix) :]: value for name, value in params.items() if name.startswith(prefix)}


def affine(x: Tensor, params: Mapping[str, Tensor], name: str) -> Tensor:
    y = params[f"{name}.weight"] @ x
    return y + params[f"{name}.bias"] if f"{name}.bias" in params else y


def gelu(x: Tensor) -> Tensor:
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def layer_norm(x: Tensor, params: Mapping[str, Tensor], name: str, eps: float = 1e-5) -> Tensor:
    centred = x - x.sum() / len(x)
    variance = (centred * centred).sum() / len(x)
    return centred / torch.sqrt(variance + eps) * params[f"{name}.weight"] + params[f"{name}.bias"]


def block(M: Tensor, n_heads: int, i: int, j: int) -> Tensor:
    dh = len(M) // n_heads
    return M[i * dh : (i + 1) * dh, j * dh : (j + 1) * dh]


def row_sums(M: Tensor, n_heads: int) -> list[Tensor]:
    """m_i = sum_j M_ij."""
    sums = []
    for i in range(n_heads):
        m = block(M, n_heads, i, 0)
        for j in range(1, n_heads):
            m = m + block(M, n_heads, i, j)
        sums.append(m)
    return sums


def context(rows: Tensor, real: Sequence[bool]) -> Tensor:
    """Mean of the real rows of (T, D); zero where there is none."""
    total, count = torch.zeros(rows.shape[-1], dtype=rows.dtype), 0
    for row, is_real in zip(rows, real, strict=True):
        if is_real:
            total, count = total + row, count + 1
    return total / max(count, 1)


def block_start(real: Sequence[bool], t: int, stride: int) -> int:
    """The first token of t's block of ``stride`` real tokens; t itself where it is padding, which no query asks for."""
    if stride == 1 or not real[t]:
        return t
    tokens = [s for s in range(t + 1) if real[s]]
    return tokens[(len(tokens) - 1) // stride * stride]


@dataclass
class GeneratorOracle:
    """f_theta with every ablation. ``alpha`` is the sample that ``bayesian`` draws while training."""

    params: Mapping[str, Tensor]
    d_model: int
    n_heads: int
    off_diag_mode: str = "mlp"
    diag_scale: float = 1.0
    off_diag_scale: float = 1.0
    use_layer_bias: bool = False
    compact_rank: int = 0
    free_M: bool = False
    alpha: Tensor | None = None
    n_layers: int = 0
    layer_bias_rank: int = 0
    context_stride: int = 1
    chunk_size: int | None = None

    def matrix(self, c: Tensor, layer: int | None = 0) -> Tensor:
        """M (D, D) of one context (D,); ``layer`` None leaves the layer's bias out."""
        D, H, r, p = self.d_model, self.n_heads, self.compact_rank, self.params
        h = c
        for n in sorted({int(name.split(".")[1]) for name in p if name.startswith("hidden.")}):
            h = gelu(affine(h, p, f"hidden.{n}"))
        raw = affine(h, p, "out")
        if r:
            U, V = raw[: D * r].reshape(D, r), raw[D * r :].reshape(D, r)
            generated = U @ V.T / math.sqrt(r)
        else:
            generated = raw.reshape(D, D)

        blocks = [[block(generated, H, i, j) for j in range(H)] for i in range(H)]
        if not self.free_M and not r and self.off_diag_mode != "mlp":
            for i in range(H):
                for j in range(H):
                    if i != j:
                        blocks[i][j] = self._off_diagonal(generated, i, j)
        if self.use_layer_bias and layer is not None:
            bias = p["bias_U"] @ torch.diag(p["bias_scale"][layer]) @ p["bias_V"].T
            blocks = [[blocks[i][j] + block(bias, H, i, j) for j in range(H)] for i in range(H)]
        scaled = [
            [(self.diag_scale if i == j else self.off_diag_scale) * blocks[i][j] for j in range(H)] for i in range(H)
        ]
        return torch.cat([torch.cat(row, dim=1) for row in scaled], dim=0)

    def _off_diagonal(self, generated: Tensor, i: int, j: int) -> Tensor:
        H, dh = self.n_heads, self.d_model // self.n_heads
        if self.off_diag_mode == "separate_B":
            return self.params["B"][i][:, j * dh : (j + 1) * dh]
        if self.off_diag_mode == "linear_comb":
            alpha = self.params["alpha"]
        else:
            alpha = self.params["alpha_mu"] if self.alpha is None else self.alpha
        combined = torch.zeros(dh, dh, dtype=generated.dtype)
        for k in range(H):
            combined = combined + alpha[i, j, k] * block(generated, H, k, k)
        return combined

    def metrics(self, x: Tensor, real: Tensor, causal: bool, layer: int | None = 0) -> Metrics:
        """The head metrics of every query of x (B, T, D)."""
        made: dict[tuple[int, int], list[Tensor]] = {}

        def of(b: int, t: int) -> list[Tensor]:
            seen = block_start(real[b].tolist(), t, self.context_stride) + 1 if causal else x.shape[1]
            if (b, seen) not in made:
                c = context(x[b, :seen], real[b, :seen].tolist())
                made[b, seen] = row_sums(self.matrix(c, layer), self.n_heads)
            return made[b, seen]

        return of


def mask_entry(mask: Tensor, b: int, h: int, t: int, s: int) -> Tensor:
    """What the mask says of head h of row b, query t and key s; sizes of one are shared."""
    place = {2: (t, s), 3: (b, t, s), 4: (b, h, t, s)}[mask.dim()]
    return mask[tuple(0 if size == 1 else index for index, size in zip(place, mask.shape, strict=True))]


def attention(
    x: Tensor,
    params: Mapping[str, Tensor],
    n_heads: int,
    real: Tensor,
    metrics: Metrics | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    key_projection: bool = False,
) -> tuple[Tensor, Tensor]:
    """y (B, T, D) and the weights (B, H, T, T). ``metrics`` None: query and key projections, ordinary attention.

    ``key_projection``: keys beside a metric are slices of a projection, no longer of x.
    """
    B, T, D = x.shape
    dh = D // n_heads
    y = [[torch.zeros(D, dtype=x.dtype) for _ in range(T)] for _ in range(B)]
    weights = [[[[torch.zeros((), dtype=x.dtype)] * T for _ in range(T)] for _ in range(n_heads)] for _ in range(B)]
    for b in range(B):
        for t in range(T):
            if not real[b, t]:
                continue
            mix = []
            for i in range(n_heads):
                head = slice(i * dh, (i + 1) * dh)
                scores: dict[int, Tensor] = {}
                for s in range(T):
                    if not real[b, s] or (causal and s > t):
                        continue
                    entry = None if mask is None else mask_entry(mask, b, i, t, s)
                    if entry is not None and (
                        entry == float("-inf") if entry.is_floating_point() else not entry.item()
                    ):
                        continue
                    if metrics is None:
                        score = affine(x[b, t], params, "W_q")[head] @ affine(x[b, s], params, "W_k")[head]
                    else:
                        key = affine(x[b, s], params, "W_k") if key_projection else x[b, s]
                        score = x[b, t, head] @ metrics(b, t)[i] @ key[head]
                    score = score / math.sqrt(dh)
                    scores[s] = score + entry if entry is not None and entry.is_floating_point() else score
                mixed = torch.zeros(dh, dtype=x.dtype)
                if scores:
                    highest = max(score.item() for score in scores.values())
                    total = torch.stack([torch.exp(score - highest) for score in scores.values()]).sum()
                    for s, score in scores.items():
                        weights[b][i][t][s] = torch.exp(score - highest) / total
                        mixed = mixed + weights[b][i][t][s] * affine(x[b, s], params, "W_v")[head]
                mix.append(mixed)
            y[b][t] = affine(torch.cat(mix), params, "out_proj")
    stacked = [[torch.stack([torch.stack(row) for row in head]) for head in heads] for heads in weights]
    return torch.stack([torch.stack(row) for row in y]), torch.stack([torch.stack(heads) for heads in stacked])


def static_metrics(M0: Tensor, n_heads: int) -> Metrics:
    """The same block-row sums for every query."""
    sums = row_sums(M0, n_heads)
    return lambda b, t: sums


def each_token(fn: Callable[[int, int], Tensor], real: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """(B, T, width) with ``fn(b, t)`` at the real tokens and zero elsewhere."""
    B, T = real.shape
    zero = torch.zeros(width, dtype=dtype)
    return torch.stack([torch.stack([fn(b, t) if real[b, t] else zero for t in range(T)]) for b in range(B)])


@dataclass
class DecoderOracle:
    """The stack. ``alphas`` are the samples of bayesian: one for the shared generator, else one a layer."""

    params: Mapping[str, Tensor]
    d_model: int
    n_heads: int
    n_layers: int
    use_M: bool = True
    use_mlp: bool = True
    share_mlp: bool = True
    norm_first: bool = False
    options: Mapping[str, object] | None = None
    alphas: Sequence[Tensor] | None = None

    def generator(self, layer: int) -> GeneratorOracle:
        prefix = "shared_mlp." if self.share_mlp else f"layers.{layer}.attention.generator."
        alpha = None if self.alphas is None else self.alphas[0 if self.share_mlp else layer]
        others = ("off_diag_alpha_init", "key_projection")  # not the generator's arithmetic
        options = {name: value for name, value in (self.options or {}).items() if name not in others}
        return GeneratorOracle(under(self.params, prefix), self.d_model, self.n_heads, alpha=alpha, **options)

    def run(self, x: Tensor, real: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The output (B, T, D), and the input of the attention of every layer."""
        D, dtype = self.d_model, x.dtype
        stack_input = each_token(lambda b, t: x[b, t], real, D, dtype)
        h, inputs = stack_input, []
        for n in range(self.n_layers):
            p = under(self.params, f"layers.{n}.")

            def normed(z: Tensor, name: str, p: Mapping[str, Tensor] = p) -> Tensor:
                return each_token(lambda b, t: layer_norm(z[b, t], p, name), real, D, dtype)

            def fed(z: Tensor, p: Mapping[str, Tensor] = p) -> Tensor:
                def one(b: int, t: int) -> Tensor:
                    return affine(gelu(affine(z[b, t], p, "feed_forward.0")), p, "feed_forward.3")

                return each_token(one, real, D, dtype)

            a = normed(h, "norm1") if self.norm_first else h
            inputs.append(a)
            y = self._attend(a, stack_input, real, n, under(p, "attention."))
            if self.norm_first:
                h = h + y
                h = h + fed(normed(h, "norm2"))
            else:
                h = normed(h + y, "norm1")
                h = normed(h + fed(h), "norm2")
        if self.norm_first:
            h = each_token(lambda b, t: layer_norm(h[b, t], self.params, "norm"), real, D, dtype)
        return h, inputs

    def _attend(self, a: Tensor, stack_input: Tensor, real: Tensor, n: int, p: Mapping[str, Tensor]) -> Tensor:
        metrics = None
        if self.use_M and self.use_mlp:
            source = stack_input if self.share_mlp else a
            metrics = self.generator(n).metrics(source, real, True, n)
        elif self.use_M:
            metrics = static_metrics(p["M0"], self.n_heads)
        projected = bool((self.options or {}).get("key_projection"))
        return attention(a, p, self.n_heads, real, metrics, causal=True, key_projection=projected)[0]

    def final_matrices(self, x: Tensor, real: Tensor) -> list[Tensor]:
        """Each layer's M (D, D) of the final prefix, averaged over the batch."""
        inputs = self.run(x, real)[1]
        matrices = []
        for n in range(self.n_layers):
            if not self.use_mlp:
                matrices.append(self.params[f"layers.{n}.attention.M0"])
                continue
            source = each_token(lambda b, t: x[b, t], real, self.d_model, x.dtype) if self.share_mlp else inputs[n]
            total = torch.zeros(self.d_model, self.d_model, dtype=x.dtype)
            for b in range(len(x)):
                shown = real[b].tolist()
                last = max((t for t in range(len(shown)) if shown[t]), default=len(shown) - 1)
                end = block_start(shown, last, int((self.options or {}).get("context_stride", 1))) + 1
                total = total + self.generator(n).matrix(context(source[b, :end], shown[:end]), n)
            matrices.append(total / len(x))
        return matrices
