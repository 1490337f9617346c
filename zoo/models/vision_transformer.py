"""The vision family's network: timm's Vision Transformer with DAMCHA attention, registered with timm."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, cast

import timm.models.vision_transformer as timm_vit
import torch
import torch.fx
from timm.data import IMAGENET_INCEPTION_MEAN, IMAGENET_INCEPTION_STD
from timm.models import (
    build_model_with_cfg,
    checkpoint,
    generate_default_cfgs,
    load_pretrained,
    register_model,
    register_notrace_module,
)
from timm.models._features import feature_take_indices  # timm has no public name for it
from torch import Tensor, nn

from zoo.attention import BlockMetrics, GeneratorOptions, MBasedAttention, StructuredMLPForM, check_mode
from zoo.attention.damcha.metric import check_dropout
from zoo.errors import CheckpointMismatchError, ZooError, listed


@torch.fx.wrap  # these two look at shapes, so torch.fx takes them whole
def _head_metrics(generator: StructuredMLPForM, x: Tensor, is_causal: bool, readers: int) -> Tensor | BlockMetrics:
    """Metrics for so many blocks to read; for none, as a tensor."""
    if is_causal and readers:
        return generator.causal_metrics(x, readers=readers)
    return generator.head_metrics(x, is_causal, layer_idx=None)


@torch.fx.wrap
def _add_layer_bias(generator: StructuredMLPForM, m: Tensor | BlockMetrics, layer_idx: int) -> Tensor | BlockMetrics:
    return m if isinstance(m, BlockMetrics) else generator.add_layer_bias(m, layer_idx)  # the layer adds it to these


@register_notrace_module  # it looks at shapes as well
class MetricAttention(MBasedAttention):
    """``MBasedAttention`` behind the interface of timm's attention layers, for timm's ``attn_layer``.

    Args:
        dim: width D.
        num_heads: number of heads H; divides D.
        qkv_bias: whether the value projection has a bias.
        qk_norm: refused; there are no projected queries and keys to normalise.
        scale_norm: refused.
        proj_bias: whether the output projection has a bias.
        attn_drop: dropout probability of the attention weights.
        proj_drop: dropout probability of the output.
        norm_layer: not used; timm passes it.
        device: where to put the parameters.
        dtype: their type.
        options: further arguments of ``MBasedAttention``, such as ``use_mlp``, ``mlp_hidden`` and ``shared_mlp``.

    Raises:
        ZooError: for a value out of range or a combination without meaning.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        qkv_bias: bool = False,
        qk_norm: bool = False,
        scale_norm: bool = False,
        proj_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        norm_layer: type[nn.Module] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        for name, value in (("qk_norm", qk_norm), ("scale_attn_norm", scale_norm)):
            if value:
                raise ZooError(f"{name}: got True; a generated metric takes the place it would have, so leave it False")
        check_dropout(proj_drop)
        super().__init__(dim, num_heads, attn_drop, qkv_bias, **options)
        if proj_bias != qkv_bias:
            self.out_proj = nn.Linear(dim, dim, bias=proj_bias)
        self.proj_drop = nn.Dropout(proj_drop)
        self.to(device=device, dtype=dtype)

    @property
    def proj(self) -> nn.Linear:
        """The output projection, by timm's name."""
        return self.out_proj

    def forward(  # type: ignore[override]  # timm's layers return one tensor
        self,
        x: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        head_metrics: Tensor | BlockMetrics | None = None,
    ) -> Tensor:
        """Attend: (B, T, D) -> (B, T, D); the arguments are ``MBasedAttention``'s."""
        y, _ = super().forward(x, attn_mask, is_causal, head_metrics=head_metrics)
        return self.proj_drop(y)

    @torch.no_grad()
    def init_weights(self) -> None:
        """Bring a static metric back to the identity; timm calls it by this name after its own rules."""
        if self.use_M and not self.use_mlp:
            self.M0.copy_(torch.eye(self.d_model))

    reset_parameters = init_weights  # timm's name for it after weight_init="skip"


class MetricBlock(timm_vit.Block):
    """timm's pre-norm block around a ``MetricAttention``, with metrics that a stack may hand in.

    Args:
        dim: width D.
        num_heads: number of heads.
        metric: arguments of ``MetricAttention`` beyond timm's.
        depth: which block this is.
        shared_mlp: the stack's generator.
        options: timm's further arguments of a block.
    """

    attn: MetricAttention

    def __init__(
        self,
        dim: int,
        num_heads: int,
        metric: dict[str, Any],
        depth: int = 0,
        shared_mlp: StructuredMLPForM | None = None,
        **options: Any,
    ) -> None:
        # timm gives an attention layer no further arguments, so it builds none here
        super().__init__(dim, num_heads, depth=depth, **{**options, "attn_layer": nn.Identity})
        names = ("qkv_bias", "qk_norm", "proj_bias", "attn_drop", "proj_drop", "device", "dtype")
        given = {name: options[name] for name in names if name in options}
        scale_norm = options.get("scale_attn_norm", False)
        self.attn = MetricAttention(
            dim, num_heads, scale_norm=scale_norm, shared_mlp=shared_mlp, layer_idx=depth, **given, **metric
        )

    def forward(
        self,
        x: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        head_metrics: Tensor | BlockMetrics | None = None,
    ) -> Tensor:
        """Attention and feed-forward with residuals: (B, T, D) -> (B, T, D)."""
        x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x), attn_mask, is_causal, head_metrics)))
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))


class VisionTransformer(timm_vit.VisionTransformer):
    r"""timm's Vision Transformer with attention scores from a generated metric.

    .. math:: S_i = X_i m_i X_i^T / \sqrt{dh}, \qquad m = RowSum(f_\theta(mean_t X_t))

    The mean is over the whole sequence, class and register tokens included. With ``share_mlp`` one generator reads the
    input of the stack of blocks, once a forward pass, and every block uses its metrics; without, each block's generator
    reads the block's own normalised input. Everything else is timm's: patches, positions, pooling, head, and the
    whole interface. With ``use_M=False`` it is timm's model, parameter for parameter.

    Args:
        embed_dim: width D.
        depth: number of blocks.
        num_heads: number of heads H; divides D.
        use_M: False gives timm's own attention.
        use_mlp: generate the metric from the input; False with ``use_M`` learns one matrix a block.
        share_mlp: one generator for the stack; left out, True wherever there is a generator.
        mlp_hidden: hidden widths of the generator; left out, one of 2 x depth: its last layer, 2 x depth x D x D, then
            has as many weights as the query and key projections that it replaces.
        mlp_drop_rate: dropout probability in the generator.
        use_multihead_M: accepted for compatibility; changes nothing.
        options: timm's further arguments (``img_size``, ``patch_size``, ``in_chans``, ``num_classes``,
            ``drop_path_rate``, ...), and the generator's, see ``StructuredMLPForM``.

    Raises:
        ZooError: for a value out of range or a combination of switches without meaning.

    Source: DAMCHA, section 3.4; timm's ``VisionTransformer``.
    """

    def __init__(
        self,
        embed_dim: int = 768,
        depth: int = 12,
        num_heads: int = 12,
        use_M: bool = True,
        use_mlp: bool | None = None,
        share_mlp: bool | None = None,
        mlp_hidden: Sequence[int] | None = None,
        mlp_drop_rate: float = 0.0,
        use_multihead_M: bool = True,
        **options: Any,
    ) -> None:
        use_mlp = use_M if use_mlp is None else use_mlp
        share_mlp = use_mlp if share_mlp is None else share_mlp
        generator_options = cast(
            GeneratorOptions, {name: options.pop(name) for name in GeneratorOptions.__annotations__ if name in options}
        )
        check_mode(use_M, use_mlp, share_mlp, generator_options)
        if embed_dim < 1 or num_heads < 1 or embed_dim % num_heads:
            raise ZooError(
                f"num_heads: got {num_heads} for embed_dim {embed_dim}; embed_dim must be a positive multiple of "
                "num_heads, so choose a divisor of embed_dim"
            )
        if depth < 1:
            raise ZooError(f"depth: got {depth}; must be at least 1")
        shared_mlp = None
        if use_M:
            own = {"attn_layer", "block_fn"} & set(options)
            if own:
                raise ZooError(
                    f"{min(own)}: given with use_M True, which brings its own; set use_M to False or drop it"
                )
            rates = {"mlp_drop_rate": mlp_drop_rate, **options}
            for name in ("mlp_drop_rate", "attn_drop_rate", "proj_drop_rate"):
                if not 0 <= rates.get(name, 0.0) < 1:
                    raise ZooError(f"{name}: got {rates[name]}; must lie in [0, 1)")
            widths = (2 * depth,) if mlp_hidden is None else tuple(mlp_hidden)
            if share_mlp:
                shared_mlp = StructuredMLPForM(
                    embed_dim, num_heads, widths, mlp_drop_rate, n_layers=depth, **generator_options
                ).to(device=options.get("device"), dtype=options.get("dtype"))
            metric: dict[str, Any] = {"use_mlp": use_mlp, "use_multihead_M": use_multihead_M}
            if use_mlp and not share_mlp:
                metric |= {"mlp_hidden": widths, "mlp_dropout": mlp_drop_rate, "n_layers": depth, **generator_options}
            options["block_fn"] = partial(MetricBlock, metric=metric, shared_mlp=shared_mlp)
        super().__init__(embed_dim=embed_dim, depth=depth, num_heads=num_heads, **options)
        self.shared_mlp = shared_mlp

    # ------------------------------------------------------------------ forward, where blocks share metrics

    def forward_features(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Tokens after the last norm: pictures (B, C, height, width) -> (B, T, D).

        Args:
            x: the pictures.
            attn_mask: as in ``MBasedAttention``.
            is_causal: token t sees tokens up to t, and its metric comes from their mean.
        """
        if self.shared_mlp is None:
            return super().forward_features(x, attn_mask=attn_mask, is_causal=is_causal)
        x = self._tokens(x)
        for y in self._through(self.blocks, x, attn_mask, is_causal):
            x = y
        return self.norm(x)

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
        output_dict: bool = False,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Any:
        """Features of chosen blocks, and of the last; timm's arguments and results.

        Args:
            x: pictures (B, C, height, width).
            indices: which blocks: the last n, a list, or all.
            return_prefix_tokens: also return class and register tokens.
            norm: pass intermediate tokens through the last norm.
            stop_early: don't run the blocks after the last one asked for.
            output_fmt: NCHW, maps (B, D, rows, columns), or NLC, tokens (B, T, D).
            intermediates_only: leave the final tokens out.
            output_dict: return a dict.
            attn_mask: as in ``forward_features``.
            is_causal: as in ``forward_features``.
        """
        if self.shared_mlp is None:
            return super().forward_intermediates(
                x,
                indices,
                return_prefix_tokens,
                norm,
                stop_early,
                output_fmt,
                intermediates_only,
                output_dict,
                attn_mask,
                is_causal,
            )
        if output_fmt not in ("NCHW", "NLC"):
            raise ZooError(f"output_fmt: got {output_fmt!r}; choose NCHW or NLC")
        wanted, last = feature_take_indices(len(self.blocks), indices)
        blocks = self.blocks[: last + 1] if stop_early else self.blocks
        rows, columns = self.patch_embed.dynamic_feat_size(x.shape[-2:])
        x, n_prefix = self._tokens(x), self.num_prefix_tokens
        prefixes, features = [], []
        for i, y in enumerate(self._through(blocks, x, attn_mask, is_causal)):
            x = y
            if i in wanted:
                shown = self.norm(x) if norm else x
                prefixes.append(shown[:, :n_prefix])
                patches = shown[:, n_prefix:]  # (B, rows * columns, D)
                if output_fmt == "NCHW":
                    patches = patches.transpose(1, 2).unflatten(2, (rows, columns)).contiguous()
                features.append(patches)
        with_prefix = return_prefix_tokens and n_prefix > 0
        if output_dict:
            found: dict[str, Any] = {"image_intermediates": features}
            if with_prefix:
                found["image_intermediates_prefix"] = prefixes
            return found if intermediates_only else found | {"image_features": self.norm(x)}
        shown_features = list(zip(features, prefixes, strict=True)) if with_prefix else features
        return shown_features if intermediates_only else (self.norm(x), shown_features)

    def _tokens(self, x: Tensor) -> Tensor:
        """The stack's input (B, T, D)."""
        return self.norm_pre(self.patch_drop(self._pos_embed(self.patch_embed(x))))

    def _through(self, blocks: nn.Sequential, x: Tensor, attn_mask: Tensor | None, is_causal: bool) -> Iterator[Tensor]:
        """The output of each block in turn, all with metrics made from the stack's input."""
        generator = cast(StructuredMLPForM, self.shared_mlp)
        # Reentrant checkpointing follows gradients through tensors alone.
        shared = _head_metrics(generator, x, is_causal, 0 if self.grad_checkpointing else len(blocks))
        for i, block in enumerate(blocks):
            metrics = _add_layer_bias(generator, shared, i)
            if self.grad_checkpointing:
                x = checkpoint(block, x, attn_mask, is_causal, metrics)
            else:
                x = block(x, attn_mask, is_causal, metrics)
            yield x

    # ------------------------------------------------------------------ looking in; parameter groups

    def get_M_matrices(self) -> list[tuple[str, Tensor]]:
        """Each block's full metric (D, D), averaged over the last batch; empty for ordinary attention."""
        layers = [block.attn for block in self.blocks]
        found = [
            (f"layer_{i}", layer.get_M_matrix()) for i, layer in enumerate(layers) if isinstance(layer, MetricAttention)
        ]
        return [(name, M) for name, M in found if M is not None]

    def get_kl_divergence(self) -> Tensor:
        """The generators' KL term, summed; zero for every ``off_diag_mode`` but bayesian."""
        generators = [m for m in self.modules() if isinstance(m, StructuredMLPForM)]
        return sum((g.get_kl_divergence() for g in generators), start=next(self.parameters()).new_zeros(()))

    def load_pretrained(self, checkpoint_path: str, prefix: str = "") -> None:
        """Load what ``pretrained_cfg`` names as ``file``; timm calls it where that is ``custom_load``.

        Classifier, first convolution and position embedding are adapted as timm does for weights of its own.

        Args:
            checkpoint_path: a vision checkpoint of this zoo, a name on its shelf, a file or an address; or Google's
                .npz, for use_M False.
            prefix: of the names in a .npz file.

        Raises:
            ZooError: if there is none, its file isn't what it should be, or it is for other options than these.
        """
        if checkpoint_path.endswith(".npz"):
            super().load_pretrained(checkpoint_path, prefix)
            return
        from zoo.checkpoint.identity import read_checkpoint, read_claim  # here, as importing the models needs neither
        from zoo.checkpoint.index import find_checkpoint

        path = find_checkpoint(checkpoint_path)
        checkpoint = read_checkpoint(path)
        identity = read_claim(checkpoint, path)["identity"]
        if identity.get("kind") != "images":
            kind = identity.get("kind")
            raise ZooError(f"pretrained: {checkpoint_path} was made for {kind}; name a vision checkpoint")

        def fitting(state: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
            tensors = _filter(state, model)
            self._check_fit(checkpoint_path, tensors)
            return tensors

        cfg = {
            "state_dict": checkpoint["state_dict"],
            "num_classes": len(identity["classes"]),
            "input_size": (identity["channels"], *identity["image_size"]),
            "first_conv": "patch_embed.proj",
            "classifier": "head",
        }
        load_pretrained(self, cfg, self.num_classes, self.patch_embed.proj.in_channels, filter_fn=fitting)

    def _check_fit(self, given: str, tensors: dict[str, Tensor]) -> None:
        """Names and shapes of all but what timm adapts, so that nothing is loaded in part."""
        adapted = ("head.", "patch_embed.proj.weight")
        here = {name: tensor.shape for name, tensor in self.state_dict().items() if not name.startswith(adapted)}
        there = {name: tensor.shape for name, tensor in tensors.items() if not name.startswith(adapted)}
        if wrong := sorted(name for name in {*here, *there} if here.get(name) != there.get(name)):
            raise CheckpointMismatchError(
                f"pretrained: the weights of {given} are for other options than these ({listed(wrong)} differ); leave "
                "out what changes the network, or set pretrained to False"
            )

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """timm's groups of parameters by depth; a shared generator belongs to the stem, whose output it reads."""
        groups: dict[str, Any] = super().group_matcher(coarse)
        return groups | {"stem": rf"{groups['stem']}|^shared_mlp"}


# ---------------------------------------------------------------------- timm's registry


def _cfg(size: int, **settings: Any) -> dict[str, Any]:
    return {
        "url": "",
        "num_classes": 1000,
        "input_size": (3, size, size),
        "pool_size": None,
        "crop_pct": 0.9,
        "interpolation": "bicubic",
        "fixed_input_size": True,
        "mean": IMAGENET_INCEPTION_MEAN,
        "std": IMAGENET_INCEPTION_STD,
        "first_conv": "patch_embed.proj",
        "classifier": "head",
        "license": "mit",
        **settings,
    }


default_cfgs = generate_default_cfgs(
    {
        "damcha_vit_tiny_patch16_224": _cfg(224),
        "damcha_vit_small_patch16_224": _cfg(224),
        "damcha_vit_base_patch16_224": _cfg(224),
        "damcha_vit_large_patch16_224": _cfg(224),
        "damcha_vit_tiny_patch4_32": _cfg(
            32,
            crop_pct=1.0,
            file="digits_damcha_tiny",  # on the shelf, looked up when it is loaded
            custom_load=True,
            num_classes=10,
            label_names=tuple("0123456789"),
            description="scikit-learn's handwritten digits, enlarged to 32 x 32",
        ),
    }
)


def _filter(state: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Weights of this zoo's checkpoints, or of timm's formats, by timm's names."""
    start = "network."
    own = {name.removeprefix(start): tensor for name, tensor in state.items() if name.startswith(start)}
    own = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in own.items()}
    filtered: dict[str, Tensor] = timm_vit.checkpoint_filter_fn(own or state, model)
    return filtered


def _create(variant: str, pretrained: bool, preset: dict[str, Any], given: dict[str, Any]) -> VisionTransformer:
    settings = preset | given
    return build_model_with_cfg(
        VisionTransformer,
        variant,
        pretrained,
        pretrained_filter_fn=_filter,
        feature_cfg={"out_indices": settings.pop("out_indices", 3), "feature_cls": "getter"},
        **settings,
    )


@register_model
def damcha_vit_tiny_patch16_224(pretrained: bool = False, **settings: Any) -> VisionTransformer:
    """ViT-Tiny with DAMCHA: D 192, 3 heads, 12 blocks."""
    preset = {"patch_size": 16, "embed_dim": 192, "depth": 12, "num_heads": 3}
    return _create("damcha_vit_tiny_patch16_224", pretrained, preset, settings)


@register_model
def damcha_vit_small_patch16_224(pretrained: bool = False, **settings: Any) -> VisionTransformer:
    """ViT-Small with DAMCHA: D 384, 6 heads, 12 blocks."""
    preset = {"patch_size": 16, "embed_dim": 384, "depth": 12, "num_heads": 6}
    return _create("damcha_vit_small_patch16_224", pretrained, preset, settings)


@register_model
def damcha_vit_base_patch16_224(pretrained: bool = False, **settings: Any) -> VisionTransformer:
    """ViT-Base with DAMCHA: D 768, 12 heads, 12 blocks."""
    preset = {"patch_size": 16, "embed_dim": 768, "depth": 12, "num_heads": 12}
    return _create("damcha_vit_base_patch16_224", pretrained, preset, settings)


@register_model
def damcha_vit_large_patch16_224(pretrained: bool = False, **settings: Any) -> VisionTransformer:
    """ViT-Large with DAMCHA: D 1024, 16 heads, 24 blocks."""
    preset = {"patch_size": 16, "embed_dim": 1024, "depth": 24, "num_heads": 16}
    return _create("damcha_vit_large_patch16_224", pretrained, preset, settings)


@register_model
def damcha_vit_tiny_patch4_32(pretrained: bool = False, **settings: Any) -> VisionTransformer:
    """ViT-Tiny with DAMCHA for pictures of 32 x 32: D 192, 3 heads, 12 blocks."""
    preset = {"patch_size": 4, "img_size": 32, "embed_dim": 192, "depth": 12, "num_heads": 3}
    return _create("damcha_vit_tiny_patch4_32", pretrained, preset, settings)
