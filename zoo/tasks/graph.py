"""The graph family's task."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.export import Dim
from torchmetrics import MetricCollection
from torchmetrics.classification import BinaryAccuracy, MulticlassAccuracy, MultilabelAccuracy

from zoo.checkpoint.transfer import TensorTransfer
from zoo.errors import ZooError
from zoo.graph import AdjacencySpec
from zoo.models.graph_tokens import GraphTokenModel
from zoo.tasks.base import ExampleInputs
from zoo.tasks.graph_carry import adapt_table
from zoo.tasks.layers import layer_depths
from zoo.tasks.pretrained import Pretrained
from zoo.tasks.scores import (
    AUROC,
    R2,
    AveragePrecision,
    CalibrationError,
    MeanAbsoluteError,
    MeanF1,
    MeanLoss,
    MeanSquaredError,
    ScoredTask,
    as_written,
    full_precision,
)
from zoo.tasks.start import StartOptions


def metrics_for(problem: str, names: Sequence[str], prefix: str, unit: float = 1.0) -> MetricCollection:
    """The figures of a problem with these classes, labels or targets; means over classes where there are several.

    Args:
        problem: binary, multiclass, multilabel or regression.
        names: of its classes, labels or target.
        prefix: what the figures' names begin with.
        unit: what one of a regression's standardised numbers is in the target's units.
    """
    metrics: dict[str, Any]
    if problem == "regression":
        metrics = {"loss": MeanSquaredError(), "mae": MeanAbsoluteError(unit), "r2": R2()}
        return MetricCollection(metrics, prefix=prefix, compute_groups=[list(metrics)])  # the rows are kept once
    kind: Any = problem
    accuracy: dict[str, Any] = {
        "binary": BinaryAccuracy,
        "multiclass": lambda: MulticlassAccuracy(len(names), average="micro"),
        "multilabel": lambda: MultilabelAccuracy(len(names), validate_args=False),  # it refuses one label alone
    }
    metrics = {
        "loss": MeanLoss(),
        "accuracy": accuracy[problem](),
        "f1": MeanF1(kind, names),
        "auroc": AUROC(kind, names),
        "average_precision": AveragePrecision(kind, names),
    }
    if problem != "multilabel":
        metrics["calibration_error"] = CalibrationError()
    alone = [[name] for name in metrics if name not in ("auroc", "average_precision")]
    return MetricCollection(metrics, prefix=prefix, compute_groups=[["auroc", "average_precision"], *alone])


def _are_weights(chosen: str | Sequence[float], n: int) -> bool:
    if isinstance(chosen, str) or len(chosen) != n:
        return False
    return all(0 <= weight < math.inf for weight in chosen) and any(chosen)


class GraphPredictionTask(ScoredTask):
    """Predict a label or a number from measurements at the nodes of a named graph.

    What is predicted (binary, multiclass, multilabel or regression), its classes, the graph and the scaling of the
    measurements come from the data's identity. Logs ``train/loss``, and for the held-out splits the loss and accuracy,
    F1, AUROC, average precision and calibration error (classes), or mean absolute error and R2 (numbers, in the
    target's own units). Means over classes leave out those a figure isn't defined for, and a line says which.

    Args:
        embed_dim: width of a node's token.
        num_heads: number of attention heads; divides embed_dim.
        n_layers: number of blocks; information travels one edge a block.
        d_ff: width of the feed-forward layers; left out, twice embed_dim.
        dropout: dropout probability, everywhere.
        readout: predict from the graph's output nodes (outputs) or from all.
        on_unseen_inputs: inputs too far from an output to be seen: error, or allow them to have no effect.
        chunk_size: edges, or pairs of a mask, taken at once; left out, what is faster. Same numbers, less memory.
        class_weights: weigh the loss of each class: none, balanced (by the inverse of its share of the training rows),
            or a list in the order of the classes. Either is scaled to a mean of one over the training rows, and a
            step's loss is the mean of loss x weight over its rows: divided by the batch's own weights instead, a row's
            share would depend on the rows it came with, and a batch of one would have none. A held-out split's loss
            is one weighted mean over all its rows.
        renamed: for on_mismatch adapt: names of nodes, classes and targets here, with what the pretrained model called
            them.
        lr: AdamW's learning rate at its height.
        weight_decay: decoupled decay, on matrices only.
        beta2: AdamW's second decay rate.
        warmup: share of the run's steps in which the learning rate rises to lr; then it falls along a cosine.
        min_lr: share of lr that is left at the end.
        start: what the run starts from, and which part of the network is trained, as of every task.
    """

    network: GraphTokenModel
    network_settings: ClassVar[tuple[str, ...]] = ("embed_dim", "num_heads", "n_layers", "d_ff", "readout")
    free_settings: ClassVar[tuple[str, ...]] = (*ScoredTask.free_settings, "on_unseen_inputs", "chunk_size")
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
        **start: Unpack[StartOptions],
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
        h = self.settings
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
        self.loss_weight = self._loss_weight(identity)  # no buffer, which would follow the model into half precision
        unit = float(identity.get("target_std", 1.0))
        self.scores = torch.nn.ModuleDict(
            {split: metrics_for(self.problem, self.names, f"{split}/", unit) for split in ("val", "test")}
        )

    def example_inputs(self) -> ExampleInputs:
        random, n = torch.Generator().manual_seed(0), len(self.network.input_index)
        values = [torch.randn(rows, n, generator=random) for rows in (2, 1, 3)]
        values[-1][0, 0], values[-1][1] = torch.nan, torch.nan  # nothing measured there
        return ExampleInputs("values", values, {0: Dim("batch")})

    def inputs_of(self, batch: Mapping[str, Any]) -> Tensor:
        return batch["values"]

    def token_names(self, inputs: Tensor) -> list[str]:
        """The graph's nodes."""
        return list(self.network.spec.nodes)

    def graph_properties(self) -> dict[str, str]:
        return {"names": json.dumps(self.names)}

    @property
    def hub_pipeline(self) -> str:
        return "tabular-regression" if self.problem == "regression" else "tabular-classification"

    def depths(self) -> dict[str, int]:
        return layer_depths(self.network, "layers", stem=("node_embedding", "value_scale", "value_shift"))

    def heads(self) -> tuple[str, ...]:
        return ("readout_weight", "readout_bias")

    def carry_over(self, source: Pretrained) -> tuple[dict[str, Tensor], list[TensorTransfer]]:
        readout = source.settings.get("readout", "outputs"), self.settings["readout"]
        return adapt_table(
            self.network,
            source.weights(),
            source.identity,
            self.data_identity,
            readout,
            self.settings["renamed"] or {},
        )

    def _loss_weight(self, identity: Mapping[str, Any]) -> Tensor | None:
        """A weight a class, of mean one over the training rows; None if they are all one."""
        chosen = self.settings["class_weights"]
        n = len(self.names)
        if chosen == "none":
            return None
        if self.problem not in ("binary", "multiclass"):
            raise ZooError(f"model.class_weights: got {chosen!r} for a {self.problem} problem; they need classes")
        counts = torch.tensor([identity["source"]["class_counts"][name] for name in self.names], dtype=torch.float64)
        if chosen == "balanced":
            weights = 1 / counts
        elif not _are_weights(chosen, n):
            raise ZooError(
                f"model.class_weights: got {chosen!r} for the classes {', '.join(self.names)}; give none, balanced or "
                f"{n} numbers of at least 0, one of them above, in this order"
            )
        else:
            weights = torch.tensor([float(weight) for weight in chosen], dtype=torch.float64)
        weights = weights / weights.max()  # so that no product is infinite
        return (weights * counts.sum() / (weights * counts).sum()).float()

    def forward(self, values: Tensor) -> Tensor:
        """Logits, or standardised numbers: values (B, inputs) -> (B, outputs)."""
        y = self.network(values)
        if isinstance(y, tuple):
            raise TypeError("the network returned edge weights that nobody asked for")
        return y

    def losses(self, outputs: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of each row and its weight: outputs (B, n) and targets -> twice (B,), or (B, labels)."""
        if self.problem == "multiclass":
            losses = F.cross_entropy(outputs, target, reduction="none")
        else:
            of_pair = F.mse_loss if self.problem == "regression" else F.binary_cross_entropy_with_logits
            outputs = outputs if self.problem == "multilabel" else outputs.squeeze(-1)
            losses = of_pair(outputs, target.to(outputs.dtype), reduction="none")
        if self.loss_weight is None:
            return losses, torch.ones_like(losses)
        return losses, self.loss_weight.to(losses.device)[target.long()]

    def loss(self, outputs: Tensor, target: Tensor) -> Tensor:
        """The mean over a batch of loss x weight: outputs (B, n) and targets as the data module gives them."""
        losses, weights = self.losses(full_precision(outputs), target)
        return (losses * weights).mean()

    def training_step(self, batch: Mapping[str, Any], batch_idx: int) -> Tensor:
        loss = self.loss(self(batch["values"]), batch["target"])
        self.log("train/loss", loss, prog_bar=True, batch_size=len(batch["values"]))
        return loss

    def validation_step(self, batch: Mapping[str, Any], batch_idx: int) -> None:
        self._evaluate(batch, "val")

    def test_step(self, batch: Mapping[str, Any], batch_idx: int) -> None:
        self._evaluate(batch, "test")

    def _evaluate(self, batch: Mapping[str, Any], split: str) -> None:
        outputs, target = full_precision(self(batch["values"])), batch["target"]
        if self.problem == "regression":
            self.score(split, predicted=outputs.squeeze(-1), exact=batch.get("exact", target))
            return
        losses, weights = self.losses(outputs, target)
        probabilities = self.probabilities(outputs)
        self.score(
            split,
            losses=losses,
            weights=weights,
            preds=self.decided(probabilities),
            probabilities=probabilities[:, 1] if self.problem == "binary" else probabilities,
            target=target.long(),
        )

    def probabilities(self, outputs: Tensor) -> Tensor:
        """Of outputs (B, n): a probability a class or label, (B, names); for regression the numbers in their units."""
        outputs = full_precision(outputs)
        if self.problem == "regression":
            return self.in_units(outputs)
        if self.problem == "multiclass":
            return outputs.softmax(dim=-1)
        if self.problem == "binary":
            return torch.cat([-outputs, outputs], dim=-1).sigmoid()  # 1 - p would lose a small one's digits
        return outputs.sigmoid()

    def decided(self, probabilities: Tensor) -> Tensor:
        """Of probabilities (B, names): class numbers (B,), or for multilabel a flag a label; of equals the first."""
        if self.problem == "multiclass":
            return probabilities.argmax(dim=-1)
        return (probabilities > 0.5)[:, 1].long() if self.problem == "binary" else (probabilities > 0.5).long()

    def in_units(self, standardised: Tensor) -> Tensor:
        """Regression targets in the table's own units, on the CPU: float64, which not every accelerator has."""
        return standardised.cpu().double() * self.data_identity["target_std"] + self.data_identity["target_mean"]

    def predict_step(self, batch: Mapping[str, Any], batch_idx: int) -> list[dict[str, Any]]:
        """A row a sample: id, prediction, and the probability of each class or label by name."""
        predicted = self.probabilities(self(batch["values"]))
        if self.problem == "regression":
            numbers = predicted.squeeze(-1).tolist()
            return [{"id": name, "prediction": number} for name, number in zip(batch["id"], numbers, strict=True)]
        rows: list[dict[str, Any]] = []
        for name, chosen, row in zip(batch["id"], self.decided(predicted).tolist(), as_written(predicted), strict=True):
            if self.problem == "multilabel":
                label = ";".join(target for target, flag in zip(self.names, chosen, strict=True) if flag)
            else:
                label = self.names[chosen]
            shares = {f"p_{target}": p for target, p in zip(self.names, row, strict=True)}
            rows.append({"id": name, "prediction": label} | shares)
        return rows
