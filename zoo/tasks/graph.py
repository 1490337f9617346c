"""The graph family's task."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import MeanAbsoluteError, MetricCollection, R2Score
from torchmetrics.classification import (
    BinaryAccuracy,
    BinaryAUROC,
    BinaryAveragePrecision,
    BinaryCalibrationError,
    BinaryF1Score,
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassAveragePrecision,
    MulticlassCalibrationError,
    MulticlassF1Score,
    MultilabelAccuracy,
    MultilabelAUROC,
    MultilabelAveragePrecision,
    MultilabelF1Score,
)

from zoo.errors import ZooError
from zoo.graph import AdjacencySpec
from zoo.models.graph_tokens import GraphTokenModel
from zoo.tasks.base import ZooTask, layer_depths
from zoo.tasks.pretrained import Pretrained
from zoo.transfer import Fate, adapt_table


def metrics_for(problem: str, n: int, prefix: str) -> MetricCollection:
    """The figures of a problem with ``n`` classes or targets; macro averages where there are several."""
    metrics: dict[str, Any]
    if problem == "binary":
        metrics = {
            "accuracy": BinaryAccuracy(),
            "f1": BinaryF1Score(),
            "auroc": BinaryAUROC(),
            "average_precision": BinaryAveragePrecision(),
            "calibration_error": BinaryCalibrationError(),
        }
    elif problem == "multiclass":
        metrics = {
            "accuracy": MulticlassAccuracy(n, average="micro"),
            "f1": MulticlassF1Score(n, average="macro"),
            "auroc": MulticlassAUROC(n),
            "average_precision": MulticlassAveragePrecision(n),
            "calibration_error": MulticlassCalibrationError(n),
        }
    elif problem == "multilabel":
        metrics = {
            "accuracy": MultilabelAccuracy(n),
            "f1": MultilabelF1Score(n),
            "auroc": MultilabelAUROC(n),
            "average_precision": MultilabelAveragePrecision(n),
        }
    else:
        metrics = {"mae": MeanAbsoluteError(), "r2": R2Score()}
    return MetricCollection(metrics, prefix=prefix)


class GraphPredictionTask(ZooTask):
    """Predict a label or a number from measurements at the nodes of a named graph.

    What is predicted (binary, multiclass, multilabel or regression), its classes, the graph and the scaling of the
    measurements come from the data's identity. Logs ``train/loss``, and for the held-out splits the loss and accuracy,
    F1, AUROC, average precision and calibration error (classes), or mean absolute error and R2 (numbers, in the
    target's own units).

    Args:
        embed_dim: width of a node's token.
        num_heads: number of attention heads; divides embed_dim.
        n_layers: number of blocks; information travels one edge a block.
        d_ff: width of the feed-forward layers; left out, twice embed_dim.
        dropout: dropout probability, everywhere.
        readout: predict from the graph's output nodes (outputs) or from all.
        on_unseen_inputs: inputs too far from an output to be seen: error, or allow them to have no effect.
        chunk_size: edges to gather at once; left out, all. Same numbers, less memory.
        class_weights: weigh the loss of each class: none, balanced (by the inverse of its share of the training rows),
            or a list in the order of the classes.
        renamed: for on_mismatch adapt: names of nodes, classes and targets here, with what the pretrained model called
            them.
        lr: AdamW's learning rate at its height.
        weight_decay: decoupled decay, on matrices only.
        beta2: AdamW's second decay rate.
        warmup: share of the run's steps in which the learning rate rises to lr; then it falls along a cosine.
        min_lr: share of lr that is left at the end.
        start: pretrained, on_mismatch, train, layer_decay and compile, as of every task.
    """

    network: GraphTokenModel
    network_settings: ClassVar[tuple[str, ...]] = ("embed_dim", "num_heads", "n_layers", "d_ff", "readout")
    free_settings: ClassVar[tuple[str, ...]] = (*ZooTask.free_settings, "on_unseen_inputs", "chunk_size")
    mismatch_advice = (
        "To use the checkpoint's graph, classes and scaling, set data.from_checkpoint to the checkpoint file; to train "
        "on these anew, leave --ckpt_path out"
    )
    pretrained_advice = (
        "To use its graph, classes and scaling, set data.from_checkpoint to it as well; to carry its weights over to "
        "these, name by name, set model.on_mismatch to adapt"
    )

    def __init__(
        self,
        embed_dim: int = 32,
        num_heads: int = 4,
        n_layers: int = 3,
        d_ff: int | None = None,
        dropout: float = 0.1,
        readout: Literal["outputs", "all"] = "outputs",
        on_unseen_inputs: Literal["error", "allow"] = "error",
        chunk_size: int | None = None,
        class_weights: Literal["none", "balanced"] | Sequence[float] = "none",
        renamed: dict[str, str] | None = None,
        lr: float = 3e-3,
        weight_decay: float = 0.05,
        beta2: float = 0.99,
        warmup: float = 0.1,
        min_lr: float = 0.0,
        **start: Any,
    ) -> None:
        super().__init__(lr, weight_decay, beta2, warmup, min_lr, **start)
        if renamed and not (start.get("pretrained") and start.get("on_mismatch") == "adapt"):
            raise ZooError(
                f"model.renamed: got {len(renamed)} names without weights to carry over; set model.pretrained, and "
                "model.on_mismatch to adapt"
            )

    def build(self, identity: Mapping[str, Any]) -> None:
        if identity.get("kind") != "table":
            raise ZooError(f"identity: got kind {identity.get('kind')!r}; a graph task needs a table on a graph")
        h = self.hparams
        self.problem: str = identity["problem"]
        self.names: list[str] = identity["classes"] if self.problem in ("binary", "multiclass") else identity["targets"]
        self.network = GraphTokenModel(
            AdjacencySpec.from_dict(identity["graph"]),
            h["embed_dim"],
            h["num_heads"],
            h["n_layers"],
            num_outputs=1 if self.problem in ("binary", "regression") else len(self.names),
            d_ff=h["d_ff"],
            dropout=h["dropout"],
            readout=h["readout"],
            on_unseen_inputs=h["on_unseen_inputs"],
            chunk_size=h["chunk_size"],
        )
        self.register_buffer("loss_weight", self._loss_weight(identity), persistent=False)
        n = len(self.names)
        self.scores = torch.nn.ModuleDict(
            {split: metrics_for(self.problem, n, f"{split}/") for split in ("val", "test")}
        )

    def depths(self) -> dict[str, int]:
        return layer_depths(self.network, "layers", stem=("node_embedding", "value_scale", "value_shift"))

    def heads(self) -> tuple[str, ...]:
        return ("readout_weight", "readout_bias")

    def carry_over(self, source: Pretrained) -> tuple[dict[str, Tensor], list[Fate]]:
        readout = source.settings.get("readout", "outputs"), self.hparams["readout"]
        return adapt_table(
            self.network,
            source.weights(),
            source.identity,
            self.data_identity,
            readout,
            self.hparams["renamed"] or {},
        )

    def _loss_weight(self, identity: Mapping[str, Any]) -> Tensor:
        """A weight a class, of mean one over the training rows if balanced."""
        chosen = self.hparams["class_weights"]
        n = len(self.names)
        if self.problem not in ("binary", "multiclass"):
            if chosen != "none":
                raise ZooError(f"model.class_weights: got {chosen!r} for a {self.problem} problem; they need classes")
            return torch.ones(1)
        if chosen == "none":
            return torch.ones(n)
        if chosen == "balanced":
            counts = torch.tensor([float(identity["source"]["class_counts"][name]) for name in self.names])
            return counts.sum() / (n * counts)
        if isinstance(chosen, str) or len(chosen) != n or min(chosen) < 0 or not sum(chosen):
            raise ZooError(
                f"model.class_weights: got {chosen!r} for the classes {', '.join(self.names)}; give none, balanced or "
                f"{n} numbers of at least 0, one of them above, in this order"
            )
        return torch.tensor([float(weight) for weight in chosen])

    def forward(self, values: Tensor) -> Tensor:
        """Logits, or standardised numbers: values (B, inputs) -> (B, outputs)."""
        y = self.network(values)
        if isinstance(y, tuple):
            raise TypeError("the network returned edge weights that nobody asked for")
        return y

    def loss(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Mean loss over a batch: outputs (B, n) and targets as the data module gives them."""
        if self.problem == "regression":
            return F.mse_loss(outputs.squeeze(-1), target)
        if self.problem == "multilabel":
            return F.binary_cross_entropy_with_logits(outputs, target)
        if self.problem == "multiclass":
            return F.cross_entropy(outputs, target, weight=self.loss_weight)
        weight = self.loss_weight[target.long()]
        return (
            F.binary_cross_entropy_with_logits(outputs.squeeze(-1), target, weight=weight, reduction="sum")
            / weight.sum()
        )

    loss_weight: Tensor

    def training_step(self, batch: Mapping[str, Any], batch_idx: int) -> Tensor:
        loss = self.loss(self(batch["values"]), batch["target"])
        self.log("train/loss", loss, prog_bar=True, batch_size=len(batch["values"]))
        return loss

    def validation_step(self, batch: Mapping[str, Any], batch_idx: int) -> None:
        self._evaluate(batch, "val")

    def test_step(self, batch: Mapping[str, Any], batch_idx: int) -> None:
        self._evaluate(batch, "test")

    def _evaluate(self, batch: Mapping[str, Any], split: str) -> None:
        outputs, target = self(batch["values"]), batch["target"]
        self.log(f"{split}/loss", self.loss(outputs, target), prog_bar=True, batch_size=len(target), sync_dist=True)
        scores = cast(MetricCollection, self.scores[split])
        predicted = self.probabilities(outputs)
        if self.problem == "regression":
            predicted, target = predicted.squeeze(-1), self.in_units(target)
        elif self.problem == "binary":
            predicted = predicted[:, 1]
        scores.update(predicted, target if self.problem == "regression" else target.long())
        self.log_dict(scores, batch_size=len(target))

    def probabilities(self, outputs: Tensor) -> Tensor:
        """Of outputs (B, n): a probability a class or target, (B, names); for regression the numbers in their units."""
        if self.problem == "regression":
            return self.in_units(outputs)
        if self.problem == "multiclass":
            return outputs.softmax(dim=-1)
        p = outputs.sigmoid()
        return torch.cat([1 - p, p], dim=-1) if self.problem == "binary" else p

    def in_units(self, standardised: Tensor) -> Tensor:
        """Regression targets in the table's own units."""
        return standardised * self.data_identity["target_std"] + self.data_identity["target_mean"]

    def predict_step(self, batch: Mapping[str, Any], batch_idx: int) -> list[dict[str, Any]]:
        """A row a sample: id, prediction, and the probability of each class or label by name."""
        predicted = self.probabilities(self(batch["values"])).float().cpu()
        rows: list[dict[str, Any]] = []
        for name, row in zip(batch["id"], predicted.tolist(), strict=True):
            if self.problem == "regression":
                rows.append({"id": name, "prediction": row[0]})
                continue
            if self.problem == "multilabel":
                label = ";".join(target for target, p in zip(self.names, row, strict=True) if p >= 0.5)
            else:
                label = self.names[max(range(len(row)), key=row.__getitem__)]
            rows.append(
                {"id": name, "prediction": label}
                | {f"p_{target}": round(p, 6) for target, p in zip(self.names, row, strict=True)}
            )
        return rows
