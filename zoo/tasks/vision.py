"""The vision family's task."""

import difflib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Unpack, cast

import timm
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import rank_zero_info
from timm.data import Mixup, resolve_data_config
from timm.models import group_parameters
from torch import Tensor, nn
from torch.export import Dim
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from zoo.attention.damcha.method import reset_options, switches_in
from zoo.checkpoint.index import resolve
from zoo.checkpoint.transfer import TensorTransfer
from zoo.errors import ZooError, listed
from zoo.models.vision_transformer import VisionTransformer, attention_of, depth_of, is_ours
from zoo.options import plain_options, weight_options
from zoo.tasks.base import ExampleInputs
from zoo.tasks.pretrained import Pretrained
from zoo.tasks.scores import (
    AccuracyOfBest,
    CalibrationError,
    MeanF1,
    MeanLoss,
    ScoredTask,
    as_written,
    best,
    full_precision,
)
from zoo.tasks.settings import defaults_of, plain
from zoo.tasks.start import StartOptions
from zoo.tasks.vision_carry import adapt_pictures

_KL_WEIGHT = 1e-4
# options of attention that a run may change
_SAME_NUMBERS = ("chunk_size", "off_diag_alpha_init", "identity_start")
DEFAULT_NAME = "damcha_vit_tiny_patch4_32"
_NOT_OPTIONS = {
    "num_classes": "the data decides that",
    "in_chans": "the data decides that",
    "pretrained": "model.pretrained does that",
    "checkpoint_path": "model.pretrained does that",
    "features_only": "a classifier needs its head",
}
_BAD_OPTIONS = (TypeError, AssertionError, ValueError, ArithmeticError, LookupError, AttributeError, RuntimeError)


def metrics_for(classes: Sequence[str], prefix: str) -> MetricCollection:
    """Loss, accuracy, accuracy of the best five where there are more, macro F1 and calibration error."""
    metrics: dict[str, Any] = {
        "loss": MeanLoss(),
        "accuracy": MulticlassAccuracy(len(classes), average="micro"),
        "f1": MeanF1("multiclass", classes),
        "calibration_error": CalibrationError(),
    }
    if len(classes) > 5:
        metrics["accuracy_top5"] = AccuracyOfBest(5)
    # those whose states agree after one batch would be taken for one, such as on a batch without a mistake
    return MetricCollection(metrics, prefix=prefix, compute_groups=False)


class ImageClassificationTask(ScoredTask):
    """Train or fine-tune a picture classifier: a DAMCHA Vision Transformer, or any other model of timm.

    Classes, channels, size and normalisation come from the data's identity. Logs ``train/loss``, and for the held-out
    splits the loss, accuracy (of the best five too, where there are more than five classes), macro F1 and calibration
    error.

    Args:
        name: the model's name in timm; damcha_vit_* are this zoo's. Left out: the pretrained model's, or
            damcha_vit_tiny_patch4_32.
        options: timm's arguments of that model, such as img_size, patch_size, embed_dim, depth, num_heads and
            drop_path_rate; for damcha_vit_* also use_M, use_mlp, share_mlp, mlp_hidden and the generator's. Where the
            name is left out, the pretrained model's are beneath them.
        attention: name of the attention, for damcha_vit_*; --model.attention.help lists them. It takes the place of
            use_M and the method's other switches in options.
        attention_options: its options by name; --model.attention.help NAME describes them.
        label_smoothing: share of the target spread over all classes.
        mixup: alpha of Mixup; 0 for none.
        cutmix: alpha of CutMix; 0 for none. With both, each batch takes one of the two.
        mix_prob: share of batches that are mixed.
        kl_weight: weight of the KL term of off_diag_mode bayesian in the loss.
        lr: AdamW's learning rate at its height.
        weight_decay: decoupled decay, on matrices only.
        beta2: AdamW's second decay rate.
        warmup: share of the run's steps in which the learning rate rises to lr; then it falls along a cosine.
        min_lr: share of lr that is left at the end.
        start: what the run starts from, and which part of the network is trained, as of every task.
    """

    network: Any  # of timm, which is untyped
    hub_library: ClassVar[str] = "timm"
    network_settings: ClassVar[tuple[str, ...]] = ("name", "options", "attention", "attention_options")
    mismatch_advice = (
        "To read pictures as the checkpoint does, set data.from_checkpoint to the checkpoint file; to fine-tune it on "
        "these classes, set model.pretrained to the file and model.on_mismatch to adapt, and leave --ckpt_path out"
    )

    def __init__(
        self,
        name: str | None = None,
        options: dict[str, Any] | None = None,
        attention: str | None = None,
        attention_options: dict[str, Any] | None = None,
        label_smoothing: float = 0.1,
        mixup: float = 0.0,
        cutmix: float = 0.0,
        mix_prob: float = 1.0,
        kl_weight: float = _KL_WEIGHT,
        lr: float = 1e-3,
        weight_decay: float = 0.05,
        beta2: float = 0.99,
        warmup: float = 0.1,
        min_lr: float = 0.0,
        **start: Unpack[StartOptions],
    ) -> None:
        super().__init__(lr, weight_decay, beta2, warmup, min_lr, **start)
        for argument, value, good, rule in (
            ("label_smoothing", label_smoothing, 0 <= label_smoothing < 1, "must lie in [0, 1)"),
            ("mixup", mixup, 0 <= mixup < math.inf, "must be 0 or more"),
            ("cutmix", cutmix, 0 <= cutmix < math.inf, "must be 0 or more"),
            ("mix_prob", mix_prob, 0 <= mix_prob <= 1, "must lie in [0, 1]"),
            ("kl_weight", kl_weight, 0 <= kl_weight < math.inf, "must be 0 or more"),
        ):
            if not good:
                raise ZooError(f"model.{argument}: got {value!r}; {rule}")
        options = dict(options or {})
        pretrained = self.settings["pretrained"]
        source = None if pretrained is None or name is not None else _Pretrained.find(pretrained)
        if source is not None:
            name, options = source.name, source.options | options
            if attention is None and not set(switches_in(dict(options))) - {"options"}:
                attention = source.settings.get("attention")
            if attention is not None and attention == source.settings.get("attention"):
                attention_options = (source.settings.get("attention_options") or {}) | (attention_options or {})
        name = name or DEFAULT_NAME
        _check_name(name, "model.name")
        for option, why in _NOT_OPTIONS.items():
            if option in options:
                raise ZooError(f"model.options: got {option}; {why}, so leave it out")
        for option, value in options.items():
            if option.endswith("_rate") and not (isinstance(value, (int, float)) and 0 <= value < 1):
                raise ZooError(f"model.options: got {option} {value!r}; must lie in [0, 1)")
        size = options.get("img_size", 1)
        sides = size if isinstance(size, (list, tuple)) and len(size) == 2 else [size]
        if not all(isinstance(side, int) and side > 0 for side in sides):
            raise ZooError(f"model.options: got img_size {size!r}; must be a number of pixels above 0, or two of them")
        if attention is not None and not is_ours(name):
            raise ZooError(
                f"model.attention: got {attention!r} for {name}, whose attention is timm's own; name a damcha_vit_* "
                "model, or leave it out"
            )
        chosen = {"name": name, "options": options, "attention": attention, "attention_options": attention_options}
        self.settings |= chosen
        if is_ours(name):
            self.network_of(plain(self.settings))  # an attention or option that there isn't is refused here
        self._source = source

    # ------------------------------------------------------------------ the network

    @property
    def input_config(self) -> dict[str, Any]:
        """What pictures the model was made for: input_size (C, H, W), mean, std, interpolation and crop_pct."""
        given, fitting = self.settings["pretrained"], self._trainer is not None and self._trainer.state.fn == "fit"
        if self._source is not None:
            config = dict(self._source.input_config)
        else:
            config = _made_for(self.settings["name"])
            if fitting and given is not None and (Path(given).is_file() or timm.is_model(given)):
                weights = _Pretrained.find(given).input_config  # a resumed run may do without the file
                config |= {name: weights[name] for name in ("mean", "std")}
        size = self.settings["options"].get("img_size")
        if size is not None:
            height, width = (size, size) if isinstance(size, int) else size
            config["input_size"] = (config["input_size"][0], height, width)
        return config

    def data_wishes(self) -> dict[str, Any]:
        return self.input_config

    @property
    def network_arguments(self) -> dict[str, Any]:
        """What timm makes the network with, beyond what the data decide."""
        h = self.settings
        found = dict(h["options"])
        if h["attention"] is not None:
            found["attention"] = h["attention"]
        if h["attention_options"]:
            found["attention_options"] = dict(h["attention_options"])
        if is_ours(h["name"]) and h["attention"] in (None, "damcha") and h["kl_weight"] != _KL_WEIGHT:
            found["kl_weight"] = h["kl_weight"]
        return found

    @classmethod
    def network_of(cls, settings: Mapping[str, Any]) -> dict[str, Any]:
        full = defaults_of(cls) | dict(settings)
        name, options = full["name"], dict(full["options"] or {})
        if not is_ours(name):
            return {"name": name, "options": options}
        attention, chosen = attention_of(options, full["attention"], full["attention_options"], depth_of(name, options))
        return {
            "name": name,
            "options": options,
            "attention": attention.name,
            "attention_options": weight_options(chosen),
        }

    @classmethod
    def kept_of(cls, settings: Mapping[str, Any]) -> dict[str, Any]:
        full, kept = defaults_of(cls) | dict(settings), super().kept_of(settings)
        name, options = full["name"], dict(full["options"] or {})
        if is_ours(name):
            args = (full["attention"], full["attention_options"], depth_of(name, options))
            kept |= plain_options(attention_of(options, *args)[1])
        return {name: value for name, value in kept.items() if name not in _SAME_NUMBERS}

    def build(self, identity: Mapping[str, Any]) -> None:
        if identity.get("kind") != "images":
            raise ZooError(f"identity: got kind {identity.get('kind')!r}; a picture task needs pictures")
        h = self.settings
        self.classes: list[str] = identity["classes"]
        options = self.network_arguments
        cfg = timm.get_pretrained_cfg(h["name"])
        if cfg is not None and cfg.fixed_input_size:
            options["img_size"] = tuple(identity["image_size"])
        try:
            self.network = timm.create_model(
                h["name"], num_classes=len(self.classes), in_chans=identity["channels"], **options
            )
            self._try_out(identity)
        except (ZooError, *_BAD_OPTIONS) as error:
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise ZooError(
                f"model.options: {h['name']} can't be made with {plain(options)} for pictures of "
                f"{identity['channels']} x {' x '.join(map(str, identity['image_size']))}: {reason}"
            ) from None
        if "img_size" in h["options"]:  # the data's size is what the network is made for
            height, width = identity["image_size"]
            h["options"]["img_size"] = height if height == width else [height, width]
        self.mix: Mixup | None = None
        if h["mixup"] or h["cutmix"]:
            self.mix = Mixup(
                h["mixup"],
                h["cutmix"],
                prob=h["mix_prob"],
                label_smoothing=h["label_smoothing"],
                num_classes=len(self.classes),
            )
        self.scores = nn.ModuleDict({split: metrics_for(self.classes, f"{split}/") for split in ("val", "test")})

    def _try_out(self, identity: Mapping[str, Any]) -> None:
        """Raise ValueError unless the network takes the data's pictures and answers with a number a class."""
        if getattr(getattr(self.network, "patch_embed", None), "num_patches", None) == 0:
            raise ValueError("a patch is larger than the pictures")
        training = self.network.training
        pictures = torch.zeros(1, identity["channels"], *identity["image_size"], device=self.device)
        with torch.no_grad():
            found = self.network.eval()(pictures.to(next(self.network.parameters())))
        self.network.train(training)
        shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        if shape != (1, len(self.classes)):
            raise ValueError(f"it answers with {shape}, not with a number for each of {len(self.classes)} classes")

    def example_inputs(self) -> ExampleInputs:
        random, identity = torch.Generator().manual_seed(0), self.data_identity
        shape = (identity["channels"], *identity["image_size"])
        return ExampleInputs("image", [torch.randn(n, *shape, generator=random) for n in (2, 1, 3)], {0: Dim("batch")})

    def inputs_of(self, batch: Mapping[str, Any]) -> Tensor:
        return batch["image"]

    def token_names(self, inputs: Tensor) -> list[str]:
        """Row and column of each patch, behind class and register tokens; none for a network without patches."""
        patches: Any = getattr(self.network, "patch_embed", None)
        if not hasattr(patches, "dynamic_feat_size"):
            return []
        rows, columns = patches.dynamic_feat_size(inputs.shape[-2:])
        first = ["class"] if getattr(self.network, "cls_token", None) is not None else []
        others = range(getattr(self.network, "num_prefix_tokens", len(first)) - len(first))
        return [*first, *(f"register {i}" for i in others), *(f"{i},{j}" for i in range(rows) for j in range(columns))]

    def with_attention_options(self, options: Mapping[str, Any]) -> dict[str, Any] | None:
        settings = plain(self.settings)
        name, given = settings["name"], dict(settings["options"])
        if not is_ours(name):
            return None
        args = (settings["attention"], settings["attention_options"], depth_of(name, given))
        return reset_options(settings, settings["options"], attention_of(given, *args)[0], options)

    def graph_properties(self) -> dict[str, str]:
        return {"names": json.dumps(self.classes)}

    @property
    def hub_pipeline(self) -> str:
        return "image-classification"

    def depths(self) -> dict[str, int]:
        # timm numbers the blocks from the stem up; head and last norm come last
        return group_parameters(self.network, self.network.group_matcher(coarse=False), reverse=True)

    def heads(self) -> tuple[str, ...]:
        """Of the classifier's layers; a distilled model has two."""
        names = self.network.pretrained_cfg.get("classifier") or ()
        return tuple(f"{name}." for name in ((names,) if isinstance(names, str) else names))

    def undecayed(self) -> set[str]:
        return set(self.network.no_weight_decay()) if hasattr(self.network, "no_weight_decay") else set()

    @property
    def network_name(self) -> str:
        return self.settings["name"]

    def find_pretrained(self) -> Pretrained:
        return self._source or _Pretrained.find(self.settings["pretrained"])

    def take_settings(self, theirs: Mapping[str, Any]) -> dict[str, str]:
        """Those left out were taken when the task was made; returns the others that differ."""
        if not theirs:  # weights of timm's
            return {}
        here, there = self.network_of(plain(self.settings)), self.network_of(theirs)
        if here["name"] != there["name"]:
            return {"model.name": f"{here['name']} here, {there['name']} there"}
        other: dict[str, str] = {}
        for group in sorted({*here, *there} - {"name"}):
            mine, other_values = ({"": x} if not isinstance(x, Mapping) else x for x in (here[group], there[group]))
            names = {name for name in {*mine, *other_values} if name != "img_size" and not name.endswith("_rate")}
            other |= {
                f"model.{group}{'.' if name else ''}{name}": f"{mine.get(name)} here, {other_values.get(name)} there"
                for name in sorted(names)
                if plain(mine.get(name)) != plain(other_values.get(name))
            }
        return other

    def other_data(self, source: Pretrained) -> list[str]:
        return super().other_data(source) if source.identity else []

    def carry_over(self, source: Pretrained) -> tuple[dict[str, Tensor], list[TensorTransfer]]:
        classes = source.identity.get("classes")
        heads = [name.removesuffix(".") for name in self.heads()]
        return adapt_pictures(self.network, source.weights(), classes, self.classes, heads)

    # ------------------------------------------------------------------ training

    def forward(self, image: Tensor) -> Tensor:
        """Logits: pictures (B, C, H, W) -> (B, classes)."""
        return self.network(image)

    def training_step(self, batch: Mapping[str, Any], batch_idx: int) -> Tensor:
        image, target = batch["image"], batch["target"]
        if self.mix is not None and len(image) % 2 == 0:  # timm's pairs the pictures of a batch
            mixed, shares = self.mix(image.clone(), target)
            loss = F.cross_entropy(full_precision(self(mixed)), shares)
        else:
            logits = full_precision(self(image))
            loss = F.cross_entropy(logits, target, label_smoothing=self.settings["label_smoothing"])
        self.log("train/loss", loss, prog_bar=True, batch_size=len(image))
        if isinstance(self.network, VisionTransformer):
            loss = self.with_auxiliary(loss, self.network.auxiliary_losses())
        return loss

    def validation_step(self, batch: Mapping[str, Any], batch_idx: int) -> dict[str, Tensor]:
        return self._evaluate(batch, "val")

    def test_step(self, batch: Mapping[str, Any], batch_idx: int) -> dict[str, Tensor]:
        return self._evaluate(batch, "test")

    def _evaluate(self, batch: Mapping[str, Any], split: str) -> dict[str, Tensor]:
        logits, target = full_precision(self(batch["image"])), batch["target"]
        losses, probabilities = F.cross_entropy(logits, target, reduction="none"), logits.softmax(dim=-1)
        self.score(
            split,
            losses=losses,
            weights=torch.ones_like(losses),
            preds=probabilities.argmax(dim=-1),
            probabilities=probabilities,
            target=target,
        )
        return {"loss": losses.mean(), "probabilities": probabilities}

    def predict_step(self, batch: Mapping[str, Any], batch_idx: int) -> list[dict[str, Any]]:
        """A row a picture: path, class and its probability, and the next four of the best five."""
        values, places = best(full_precision(self(batch["image"])).softmax(dim=-1), 5)
        rows: list[dict[str, Any]] = []
        for path, shown, indices in zip(batch["id"], as_written(values), places.tolist(), strict=True):
            row: dict[str, Any] = {"path": path}
            for rank, (value, i) in enumerate(zip(shown, indices, strict=True), start=1):
                suffix = "" if rank == 1 else f"_{rank}"
                row |= {f"class{suffix}": self.classes[i], f"probability{suffix}": value}
            rows.append(row)
        return rows


def _check_name(name: str, argument: str) -> None:
    if not timm.is_model(name):
        close = difflib.get_close_matches(name, timm.list_models(), n=3, cutoff=0.5)
        hint = f"; do you mean {' or '.join(close)}?" if close else "."
        raise ZooError(
            f"{argument}: got {name!r}, which is no model of timm{hint} timm.list_models('damcha_vit*') has this zoo's"
        )
    try:
        timm.get_pretrained_cfg(name)
    except RuntimeError:  # timm's for weights it doesn't know
        model, _, tag = name.partition(".")
        known = listed([weights.partition(".")[2] for weights in timm.list_pretrained(f"{model}.*")])
        raise ZooError(
            f"{argument}: got {name!r}; {model} has the weights {known}, so name one of them, or leave .{tag} out"
        ) from None


def _made_for(name: str) -> dict[str, Any]:
    """What pictures timm's record says a model was made for."""
    cfg = timm.get_pretrained_cfg(name)
    return resolve_data_config({}, pretrained_cfg={} if cfg is None else cfg.to_dict())


class _Pretrained(Pretrained):
    """Weights to start from: of a checkpoint of this zoo, or of timm."""

    @property
    def name(self) -> str:
        return self.settings.get("name", self.given)

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.settings.get("options", {}))

    @property
    def input_config(self) -> dict[str, Any]:
        """What pictures the weights were made for."""
        identity = self.identity
        if not identity:
            return _made_for(self.given)
        return {
            "input_size": (identity["channels"], *identity["image_size"]),
            "mean": tuple(identity["mean"]),
            "std": tuple(identity["std"]),
            "interpolation": identity["interpolation"],
            "crop_pct": identity["crop"],
        }

    @classmethod
    def find(cls, given: str) -> "_Pretrained":
        path = resolve(given)
        if Path(path).exists() or path.endswith(".ckpt"):
            return cls.read(given, f"{ImageClassificationTask.__module__}.{ImageClassificationTask.__qualname__}")
        if not timm.is_model(given):
            raise ZooError(
                f"got {given!r}, which is neither a checkpoint file nor a timm model; name a .ckpt "
                "file, or one of timm.list_pretrained()",
                argument="model.pretrained",
            )
        if given.split(".")[0] not in {name.split(".")[0] for name in timm.list_pretrained()}:
            raise ZooError(
                f"{given} has no weights to download; to train it anew, give it as model.name",
                argument="model.pretrained",
            )
        _check_name(given, "model.pretrained")
        return cls(given, {}, {}, {})

    def weights(self) -> dict[str, Tensor]:
        """The state dict, downloaded if need be.

        Raises:
            ZooError: if it can't be.
        """
        if self.state:
            return self.state
        rank_zero_info(f"Fetching the weights of {self.given}")
        try:
            network = timm.create_model(self.given, pretrained=True)
        except (OSError, RuntimeError, ValueError) as error:
            reason = " ".join(str(error).split())[:200]
            raise ZooError(
                f"the weights of {self.given} couldn't be had ({reason}); connect to a network, or "
                "name a checkpoint file",
                argument="model.pretrained",
            ) from None
        self.state = cast(dict[str, Tensor], network.state_dict())
        return self.state
