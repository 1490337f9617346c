"""The vision network straight from its equations: one picture, one patch and one token at a time, in float64."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.oracles.damcha import (
    GeneratorOracle,
    affine,
    attention,
    context,
    each_token,
    gelu,
    layer_norm,
    static_metrics,
    under,
)

EPS = 1e-6  # of timm's layer norms


@dataclass
class VisionTransformerOracle:
    """DAMCHA's ViT. ``alphas`` are the samples of bayesian: one for the shared generator, else one a block."""

    params: Mapping[str, Tensor]
    patch: tuple[int, int]
    n_heads: int
    use_mlp: bool = True
    share_mlp: bool = True
    global_pool: str = "token"
    n_prefix: int = 1
    no_embed_class: bool = False
    options: Mapping[str, object] | None = None
    alphas: Sequence[Tensor] | None = None

    @property
    def depth(self) -> int:
        return 1 + max(int(name.split(".")[1]) for name in self.params if name.startswith("blocks."))

    def run(self, pictures: Tensor, mask: Tensor | None = None, causal: bool = False) -> tuple[Tensor, list[Tensor]]:
        """The tokens (B, T, D) after the last norm, and what each block's metrics are generated from."""
        x = torch.stack([torch.stack(self._embed(picture)) for picture in pictures])
        stack_input, sources = x, []
        for n in range(self.depth):
            p = under(self.params, f"blocks.{n}.")
            normed = self._each(lambda token, p=p: layer_norm(token, p, "norm1", EPS), x)
            sources.append(stack_input if self.share_mlp else normed)
            everyone = self._everyone(x)
            if self.use_mlp:
                metrics = self.generator(n).metrics(sources[n], everyone, causal, n)
            else:
                metrics = static_metrics(p["attn.M0"], self.n_heads)
            y = attention(normed, under(p, "attn."), self.n_heads, everyone, metrics, mask, causal)[0]
            x = x + self._each(lambda token, p=p: self._scaled(token, p, "ls1"), y)
            x = x + self._each(lambda token, p=p: self._fed(token, p), x)
        if "norm.weight" in self.params:
            x = self._each(lambda token: layer_norm(token, self.params, "norm", EPS), x)
        return x, sources

    def logits(self, tokens: Tensor) -> Tensor:
        rows = []
        for sequence in tokens:
            if self.global_pool == "token":
                pooled = sequence[0]
            elif self.global_pool == "avg":
                pooled = context(sequence[self.n_prefix :], [True] * (len(sequence) - self.n_prefix))
            else:
                pooled = torch.stack([column.max() for column in sequence[self.n_prefix :].T])
            if "fc_norm.weight" in self.params:
                pooled = layer_norm(pooled, self.params, "fc_norm", EPS)
            rows.append(affine(pooled, self.params, "head"))
        return torch.stack(rows)

    def generator(self, n: int) -> GeneratorOracle:
        prefix = "shared_mlp." if self.share_mlp else f"blocks.{n}.attn.generator."
        alpha = None if self.alphas is None else self.alphas[0 if self.share_mlp else n]
        params = under(self.params, prefix)
        return GeneratorOracle(params, self._width, self.n_heads, alpha=alpha, **(self.options or {}))

    def matrices(self, pictures: Tensor) -> list[Tensor]:
        """Each block's M (D, D), averaged over the batch."""
        sources, found = self.run(pictures)[1], []
        for n, source in enumerate(sources):
            if self.use_mlp:
                each = [self.generator(n).matrix(context(tokens, [True] * len(tokens)), n) for tokens in source]
                found.append(torch.stack(each).sum(dim=0) / len(each))
            else:
                found.append(self.params[f"blocks.{n}.attn.M0"])
        return found

    @property
    def _width(self) -> int:
        return len(self.params["patch_embed.proj.weight"])

    def _embed(self, picture: Tensor) -> list[Tensor]:
        """The tokens of one picture (C, height, width): class, registers, then the patches row by row."""
        ph, pw = self.patch
        kernels = self.params["patch_embed.proj.weight"]  # (D, C, ph, pw)
        patches = []
        for top in range(0, picture.shape[1], ph):
            for left in range(0, picture.shape[2], pw):
                piece = picture[:, top : top + ph, left : left + pw]
                token = torch.stack([(kernel * piece).sum() for kernel in kernels])
                patches.append(token + self.params.get("patch_embed.proj.bias", 0))
        prefix = [self.params["cls_token"][0, 0]] if "cls_token" in self.params else []
        prefix += list(self.params["reg_token"][0]) if "reg_token" in self.params else []
        positions = list(self.params["pos_embed"][0])
        if self.no_embed_class:
            tokens = prefix + [a + b for a, b in zip(patches, positions, strict=True)]
        else:
            tokens = [a + b for a, b in zip(prefix + patches, positions, strict=True)]
        if "norm_pre.weight" in self.params:
            tokens = [layer_norm(token, self.params, "norm_pre", EPS) for token in tokens]
        return tokens

    def _fed(self, token: Tensor, p: Mapping[str, Tensor]) -> Tensor:
        inner = gelu(affine(layer_norm(token, p, "norm2", EPS), p, "mlp.fc1"))
        return self._scaled(affine(inner, p, "mlp.fc2"), p, "ls2")

    def _scaled(self, token: Tensor, p: Mapping[str, Tensor], name: str) -> Tensor:
        return token * p.get(f"{name}.gamma", 1)

    def _everyone(self, x: Tensor) -> Tensor:
        return torch.ones(x.shape[:2], dtype=torch.bool)

    def _each(self, fn, x: Tensor) -> Tensor:
        return each_token(lambda b, t: fn(x[b, t]), self._everyone(x), x.shape[-1], x.dtype)
