"""The vision family's network: timm's Vision Transformer with DAMCHA attention, registered with timm."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

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
from torch import Tensor, nn

from zoo.attention.base import Attention, Masks, check_dropout
from zoo.attention.damcha.method import chosen_attention, switches_in
from zoo.attention.stacks import layer_matrices, summed_losses
from zoo.errors import CheckpointMismatchError, ZooError, listed
from zoo.private.timm import feature_take_indices

register_notrace_module(Attention)  # attentions look at shapes, so torch.fx takes them whole


@torch.fx.wrap
def _share(module: Any, x: Tensor, masks: Masks, readers: int) -> Any:
    """What a stack's attention shares in this pass."""
    return module.share(x, masks, None, readers)


@torch.fx.wrap
def _attend(attention: Attention, x: Tensor, masks: Masks, shared: Any) -> Tensor:
    return attention(x, masks, shared)[0]


@torch.fx.wrap
def _masks(is_causal: bool, attn_mask: Tensor | None, places: Tensor | None) -> Masks:
    return Masks(is_causal, None, attn_mask, places)


@torch.fx.wrap
def _places(patch_embed: Any, pictures: Tensor, n_prefix: int) -> Tensor:
    """Row and column of every patch, (T, 2), -1 for the n_prefix tokens in front."""
    rows, columns = patch_embed.dynamic_feat_size(pictures.shape[-2:])
    grid = torch.cartesian_prod(
        torch.arange(rows, device=pictures.device), torch.arange(columns, device=pictures.device)
    )
    return torch.cat([grid.new_full((n_prefix, 2), -1), grid.view(-1, 2)])


def attention_of(
    options: dict[str, Any], attention: str | None, attention_options: Mapping[str, Any] | None, depth: int
) -> tuple[type[Attention], Any]:
    """The attention that a vision transformer is made of, and its options.

    Args:
        options: arguments of ``VisionTransformer``; the method's switches are taken out of them.
        attention: as of ``VisionTransformer``.
        attention_options: as of ``VisionTransformer``.
        depth: number of blocks.

    Raises:
        ZooError: as ``chosen_attention``.
    """
    switches = {name: value for name, value in switches_in(options).items() if value is not None}
    if attention is None:  # a switch that is off takes those that need it with it
        use_mlp = switches.get("use_mlp", switches.get("use_M", True))
        switches = {"use_mlp": use_mlp, "share_mlp": use_mlp} | switches
    return chosen_attention(attention, attention_options, switches, "pictures", depth)


class AttentionBlock(timm_vit.Block):
    """timm's block around any registered attention, with what a stack may share handed in.

    Args:
        dim: width D.
        num_heads: number of heads.
        attention: the class of the attention.
        attention_options: an instance of its options.
        shared_module: what the stack owns.
        hidden_dropout: dropout probability inside the attention, should it have hidden layers.
        n_layers: how many blocks the stack has.
        depth: which block this is.
        options: timm's further arguments of a block.
    """

    attn: Attention

    def __init__(
        self,
        dim: int,
        num_heads: int,
        attention: type[Attention],
        attention_options: Any,
        shared_module: Any = None,
        hidden_dropout: float = 0.0,
        n_layers: int = 1,
        depth: int = 0,
        **options: Any,
    ) -> None:
        # timm gives an attention layer no further arguments, so it builds none here
        super().__init__(dim, num_heads, depth=depth, **{**options, "attn_layer": nn.Identity})
        for name in ("qk_norm", "scale_attn_norm"):
            if options.get(name):
                raise ZooError(
                    f"{name}: got True; it is of timm's own attention, and {attention.name} takes its place, so leave "
                    "it False"
                )
        drop = options.get("proj_drop", 0.0)
        check_dropout(drop)
        bias = options.get("qkv_bias", False)
        self.attn = attention(
            dim,
            num_heads,
            depth,
            n_layers,
            options.get("attn_drop", 0.0),
            bias,
            attention_options,
            shared_module,
            hidden_dropout,
            options.get("proj_bias", True),
        ).to(device=options.get("device"), dtype=options.get("dtype"))
        self.proj_drop = nn.Dropout(drop)

    def forward(
        self,
        x: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        shared: Any = None,
        places: Tensor | None = None,
    ) -> Tensor:
        """Attention and feed-forward with residuals: (B, T, D) -> (B, T, D)."""
        y = self.proj_drop(_attend(self.attn, self.norm1(x), _masks(is_causal, attn_mask, places), shared))
        x = x + self.drop_path1(self.ls1(y))
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))


class VisionTransformer(timm_vit.VisionTransformer):
    r"""timm's Vision Transformer with any registered attention; DAMCHA if nothing is said.

    .. math:: S_i = X_i m_i X_i^T / \sqrt{dh}, \qquad m = RowSum(f_\theta(mean_t X_t))

    The mean is over the whole sequence, class and register tokens included. With ``share_mlp`` one generator reads the
    input of the stack of blocks, once a forward pass, and every block uses its metrics; without, each block's generator
    reads the block's own normalised input. Everything else is timm's: patches, positions, pooling, head, and the
    whole interface. With ordinary attention (``use_M=False``) it is timm's model, parameter for parameter.

    Args:
        embed_dim: width D.
        depth: number of blocks.
        num_heads: number of heads H; divides D.
        mlp_drop_rate: dropout probability in the attention's hidden layers, such as DAMCHA's generator.
        attention: name of the attention, see ``zoo.list_attentions()``; None for what the method's switches mean.
        attention_options: its options by name. DAMCHA's ``mlp_hidden`` is one layer of 2 x depth, if nothing is said:
            the generator's last layer, 2 x depth x D x D, then has as many weights as the query and key projections
            that it replaces.
        options: timm's further arguments (``img_size``, ``patch_size``, ``in_chans``, ``num_classes``,
            ``drop_path_rate``, ...), and the method's switches: ``use_M`` (False is timm's own attention), ``use_mlp``
            (False is the static ablation), ``share_mlp``, ``mlp_hidden`` and the other options of ``damcha``, see
            ``DamchaOptions``; ``use_multihead_M`` is accepted and changes nothing.

    Raises:
        ZooError: for a value out of range or a combination of switches without meaning.

    Source: DAMCHA, section 3.4; timm's ``VisionTransformer``.
    """

    def __init__(
        self,
        embed_dim: int = 768,
        depth: int = 12,
        num_heads: int = 12,
        mlp_drop_rate: float = 0.0,
        attention: str | None = None,
        attention_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        if depth < 1:
            raise ZooError(f"depth: got {depth}; must be at least 1")
        kind, chosen = attention_of(options, attention, attention_options, depth)
        if embed_dim < 1 or num_heads < 1 or embed_dim % num_heads:
            raise ZooError(
                f"num_heads: got {num_heads} for embed_dim {embed_dim}; embed_dim must be a positive multiple of "
                "num_heads, so choose a divisor of embed_dim"
            )
        self._kind, shared = kind, None
        if not kind.is_ordinary:
            if own := sorted({"attn_layer", "block_fn"} & set(options)):
                raise ZooError(
                    f"{own[0]}: given beside attention {kind.name}, which brings its own; set use_M to False or drop it"
                )
            rates = {"mlp_drop_rate": mlp_drop_rate, **options}
            for name in ("mlp_drop_rate", "attn_drop_rate", "proj_drop_rate"):
                if not 0 <= rates.get(name, 0.0) < 1:
                    raise ZooError(f"{name}: got {rates[name]}; must lie in [0, 1)")
            if kind.stack.norm == "rms":
                options.setdefault("norm_layer", "rmsnorm")
            if not kind.stack.positions:
                options.setdefault("pos_embed", "none")
                if options.get("patch_drop_rate"):
                    raise ZooError(
                        f"patch_drop_rate: got {options['patch_drop_rate']}; attention {kind.name} needs the place of "
                        "every patch, so leave it at 0"
                    )
            shared = kind.make_shared(embed_dim, num_heads, depth, mlp_drop_rate, chosen)
            if shared is not None:
                shared = shared.to(device=options.get("device"), dtype=options.get("dtype"))
            options["block_fn"] = partial(
                AttentionBlock,
                attention=kind,
                attention_options=chosen,
                shared_module=shared,
                hidden_dropout=mlp_drop_rate,
                n_layers=depth,
            )
        super().__init__(embed_dim=embed_dim, depth=depth, num_heads=num_heads, **options)
        self._kind = kind  # again: a module forgets what was set before it was made
        self.add_module(kind.shared_name, shared)

    @property
    def attention(self) -> type[Attention]:
        """The class of the blocks' attention; ``StandardAttention`` stands for timm's own."""
        return self._kind

    @property
    def stack_shared(self) -> Any:
        """What the blocks' attention keeps for the whole stack; None for nothing."""
        return getattr(self, self._kind.shared_name)

    @property
    def attentions(self) -> list[Attention]:
        """The blocks' attention layers; none where they are timm's own."""
        return [block.attn for block in self.blocks if isinstance(block, AttentionBlock)]

    def fix_init_weight(self) -> None:
        """timm's scaling of output projections with depth, where an attention has one."""
        if self._kind.is_ordinary:
            super().fix_init_weight()
            return
        with torch.no_grad():
            for i, block in enumerate(self.blocks):
                scale = (2.0 * (i + 1)) ** 0.5
                if isinstance(projection := getattr(block.attn, "out_proj", None), nn.Linear):
                    projection.weight.div_(scale)
                block.mlp.fc2.weight.div_(scale)

    # ------------------------------------------------------------------ forward, through blocks of ours

    def forward_features(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Tokens after the last norm: pictures (B, C, height, width) -> (B, T, D).

        Args:
            x: the pictures.
            attn_mask: who may see whom, as in ``zoo.attention.Masks``.
            is_causal: token t sees tokens up to t, and its metric comes from their mean.
        """
        if self._kind.is_ordinary:
            return super().forward_features(x, attn_mask=attn_mask, is_causal=is_causal)
        places = self._places(x)
        x = self._tokens(x)
        for y in self._through(self.blocks, x, attn_mask, is_causal, places):
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
        if self._kind.is_ordinary:
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
        places = self._places(x)
        x, n_prefix = self._tokens(x), self.num_prefix_tokens
        prefixes, features = [], []
        for i, y in enumerate(self._through(blocks, x, attn_mask, is_causal, places)):
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

    def _places(self, pictures: Tensor) -> Tensor | None:
        """Row and column of every token, for an attention with positions of its own."""
        return None if self._kind.stack.positions else _places(self.patch_embed, pictures, self.num_prefix_tokens)

    def _through(
        self, blocks: nn.Sequential, x: Tensor, attn_mask: Tensor | None, is_causal: bool, places: Tensor | None
    ) -> Iterator[Tensor]:
        """The output of each block in turn, all with what is shared made from the stack's input."""
        shared = None
        if self.stack_shared is not None:
            # Reentrant checkpointing follows gradients through tensors alone.
            readers = 0 if self.grad_checkpointing else len(blocks)
            shared = _share(self.stack_shared, x, _masks(is_causal, attn_mask, places), readers)
        for block in blocks:
            if self.grad_checkpointing:
                x = checkpoint(block, x, attn_mask, is_causal, shared, places)
            else:
                x = block(x, attn_mask, is_causal, shared, places)
            yield x

    # ------------------------------------------------------------------ looking in; parameter groups

    def matrices(self) -> list[tuple[str, Tensor]]:
        """What there is to look at in each block after a forward pass, as ``layer_0`` for the method's metric M and
        ``layer_0/name`` for others."""
        return layer_matrices(self.attentions)

    def get_M_matrices(self) -> list[tuple[str, Tensor]]:
        """Each block's full metric (D, D), averaged over the last batch; empty for attention without one."""
        return [(name, matrix) for name, matrix in self.matrices() if "/" not in name]

    def auxiliary_losses(self) -> dict[str, tuple[Tensor, float]]:
        """Terms that the attention adds to the loss, by name: the sum over blocks, and its weight."""
        return summed_losses(self.attentions)

    def get_kl_divergence(self) -> Tensor:
        """The generators' KL term, summed; zero for every ``off_diag_mode`` but bayesian."""
        found = self.auxiliary_losses().get("kl")
        return next(self.parameters()).new_zeros(()) if found is None else found[0]

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
        from zoo.checkpoint.checkpoint import Checkpoint  # here, as importing the models doesn't need it

        checkpoint = Checkpoint.open(checkpoint_path)
        identity = checkpoint.identity
        if identity.get("kind") != "images":
            kind = identity.get("kind")
            raise ZooError(f"pretrained: {checkpoint_path} was made for {kind}; name a vision checkpoint")

        def fitting(state: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
            tensors = _filter(state, model)
            self._check_fit(checkpoint_path, tensors)
            return tensors

        cfg = {
            "state_dict": checkpoint.tensors(),
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
        """timm's groups of parameters by depth; what a stack shares belongs to the stem, whose output it reads."""
        groups: dict[str, Any] = super().group_matcher(coarse)
        return groups | {"stem": rf"{groups['stem']}|^{self._kind.shared_name}"}


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


_PRESETS: dict[str, dict[str, Any]] = {
    "damcha_vit_tiny_patch16_224": {"patch_size": 16, "embed_dim": 192, "depth": 12, "num_heads": 3},
    "damcha_vit_small_patch16_224": {"patch_size": 16, "embed_dim": 384, "depth": 12, "num_heads": 6},
    "damcha_vit_base_patch16_224": {"patch_size": 16, "embed_dim": 768, "depth": 12, "num_heads": 12},
    "damcha_vit_large_patch16_224": {"patch_size": 16, "embed_dim": 1024, "depth": 24, "num_heads": 16},
    "damcha_vit_tiny_patch4_32": {"patch_size": 4, "img_size": 32, "embed_dim": 192, "depth": 12, "num_heads": 3},
}


def is_ours(name: str) -> bool:
    """Whether timm knows a model of this zoo by a name, which may say weights after a dot."""
    return name.partition(".")[0] in _PRESETS


def depth_of(name: str, options: Mapping[str, Any]) -> int:
    """How many blocks a model of this zoo has.

    Raises:
        ZooError: if that is no number of blocks.
    """
    depth = options.get("depth", _PRESETS[name.partition(".")[0]]["depth"])
    if not isinstance(depth, int) or isinstance(depth, bool) or depth < 1:
        raise ZooError(f"model.options: got depth {depth!r}; must be a number of blocks, at least 1")
    return depth


def _create(variant: str, pretrained: bool, given: dict[str, Any]) -> VisionTransformer:
    settings = _PRESETS[variant] | given
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
    return _create("damcha_vit_tiny_patch16_224", pretrained, settings)


@register_model
def damcha_vit_small_patch16_224(pretrained: bool = False, **settings: Any) -> VisionTransformer:
    """ViT-Small with DAMCHA: D 384, 6 heads, 12 blocks."""
    return _create("damcha_vit_small_patch16_224", pretrained, settings)


@register_model
def damcha_vit_base_patch16_224(pretrained: bool = False, **settings: Any) -> VisionTransformer:
    """ViT-Base with DAMCHA: D 768, 12 heads, 12 blocks."""
    return _create("damcha_vit_base_patch16_224", pretrained, settings)


@register_model
def damcha_vit_large_patch16_224(pretrained: bool = False, **settings: Any) -> VisionTransformer:
    """ViT-Large with DAMCHA: D 1024, 16 heads, 24 blocks."""
    return _create("damcha_vit_large_patch16_224", pretrained, settings)


@register_model
def damcha_vit_tiny_patch4_32(pretrained: bool = False, **settings: Any) -> VisionTransformer:
    """ViT-Tiny with DAMCHA for pictures of 32 x 32: D 192, 3 heads, 12 blocks."""
    return _create("damcha_vit_tiny_patch4_32", pretrained, settings)
