"""Tables whose columns are nodes of a graph: read, matched by name, split, and scaled by the training rows alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pandas as pd
import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from datamodules.base import ZooDataModule
from datamodules.loaders import ResumableLoader, ShuffledSampler
from datamodules.sources.base import TABLES, TableData, TableSource, make_source
from datamodules.splits import SPLITS, split_rows, splits_of_column
from datamodules.table_columns import match_columns, mean_and_std, standardise
from datamodules.table_files import IN_MEMORY, Table, TableLike, is_table_name, read_edges, read_table
from datamodules.table_labels import (
    Labels,
    Problem,
    decide_problem,
    encode_labels,
    is_word_for_nothing,
    kind_of,
    refuse_missing_labels,
)
from zoo.checkpoint.checkpoint import Checkpoint
from zoo.errors import CheckpointMismatchError, ZooError, listed
from zoo.graph import AdjacencySpec, parse_adjacency
from zoo.lookalikes import refuse_look_alikes


class TableRows(Dataset[dict[str, Any]]):
    """Rows of a table: {"values": (n_inputs,), "id": name}, and "target" if it is known.

    A target in float64 is given in float32, and beside it whole, as "exact": the same bits taken for an int64, since
    Lightning rounds every number of a batch to the run's precision, and a score has to be of the number itself.
    """

    def __init__(self, values: Tensor, target: Tensor | None, ids: Sequence[str]) -> None:
        self.values, self.target, self.ids = values, target, ids

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, row: int) -> dict[str, Any]:
        item: dict[str, Any] = {"values": self.values[row], "id": self.ids[row]}
        if self.target is None:
            return item
        target = self.target[row]
        if target.dtype == torch.float64:
            return item | {"target": target.float(), "exact": target.view(torch.int64)}
        return item | {"target": target}

    def only(self, rows: np.ndarray) -> "TableRows":
        chosen = torch.from_numpy(rows)
        target = None if self.target is None else self.target[chosen]
        return TableRows(self.values[chosen], target, [self.ids[row] for row in rows.tolist()])

    def without_target(self) -> "TableRows":
        return TableRows(self.values, None, self.ids)


class GraphTableDataModule(ZooDataModule):
    """A table with a row a sample, whose columns are the input nodes of a graph.

    Batches are dicts: "values" (B, inputs) in float32, in the order of the graph's input nodes, standardised, NaN where
    nothing was measured; "target" (B,) in float32 for binary (0, 1) and regression (standardised), (B,) in int64 for
    multiclass, (B, labels) in float32 for multilabel; "id", a list of B texts. For regression also "exact" (B,), the
    target in float64 as int64 of the same bits. For predict there is no target.

    Args:
        features: .csv, .tsv, .parquet or .h5ad file (or DataFrame) with a row a sample, or the name of a table, as in
            source. Of a named table that is fetched, the folder that its own folder is in; left out, the cache.
        edges: .csv, .tsv or .parquet file (or DataFrame) with columns source and target, an edge a row. Left out: the
            graph that a named table brings.
        label: the column to predict, or a list of 0/1 columns; in an .h5ad a column of obs. Left out: the one that a
            named table brings.
        problem: binary, multiclass, multilabel or regression; auto looks at the label: text, booleans, integers or
            whole numbers with a point (1.0) with 2 values are binary, text or integers with 3 to 50 are multiclass,
            fractions are regression, several columns of 0/1 or true/false are multilabel. In text, 001 and 1E1 are no
            numbers, unless this says regression.
        missing_labels: the texts that mean no label, which is refused wherever one is needed. Left out: the empty text
            alone, so that NA, None and nan are labels as any other.
        id_column: column that names the rows in predictions and errors; left out, rows are numbered from 0, in an
            .h5ad named as in obs_names.
        split_column: column with train, val or test in every row.
        group_column: rows with the same value here never come into two splits.
        val_fraction: share of the rows (of the groups) held out for validation.
        test_fraction: share held out for the test.
        split_seed: decides which are held out, and the order of training rows.
        unmatched_columns: columns that are no input node: error, or ignore them.
        unmeasured_nodes: input nodes without a column: error, or take them as missing in every row.
        standardise: subtract the training rows' mean from each column and divide by their standard deviation. Targets
            of a regression always are.
        batch_size: rows a batch.
        num_workers: loader processes; 0 loads in the main one, which is enough for a table in memory.
        predict_features: for predict: the table to use, in the same columns, label not needed. Left out: the test rows.
        from_checkpoint: a checkpoint (file, address or name of zoo list) whose graph, classes and scaling are used in
            place of edges and training rows. Validation, test and predict then use every row of a table the checkpoint
            wasn't trained on.
        source: a named table, such as breast_cancer, which brings its graph, or pbmc68k_reduced. auto: features, or
            breast_cancer; with from_checkpoint and no features, the checkpoint's.
        source_options: what the named table has to be told, by name.
        download: fetch the named table where it isn't there.

    Raises:
        ZooError: for an argument out of range, here; for a table, graph or label that can't be used, in ``setup``.
    """

    sources = TABLES
    own_argument = "features"
    kept_settings: ClassVar[tuple[str, ...]] = (*ZooDataModule.kept_settings, "split_column", "group_column")

    def __init__(
        self,
        features: TableLike | None = None,
        edges: TableLike | None = None,
        label: str | list[str] | None = None,
        problem: Literal["auto", "binary", "multiclass", "multilabel", "regression"] = "auto",
        missing_labels: list[str] | None = None,
        id_column: str | None = None,
        split_column: str | None = None,
        group_column: str | None = None,
        val_fraction: float = 0.15,
        test_fraction: float = 0.15,
        split_seed: int = 0,
        unmatched_columns: Literal["error", "ignore"] = "error",
        unmeasured_nodes: Literal["error", "missing"] = "error",
        standardise: bool = True,
        batch_size: int = 32,
        num_workers: int = 0,
        predict_features: str | None = None,
        from_checkpoint: str | None = None,
        source: str = "auto",
        source_options: dict[str, Any] | None = None,
        download: bool = False,
    ) -> None:
        super().__init__()
        self._saved = _Saved.read(from_checkpoint) if from_checkpoint else None
        if self._saved is not None:  # before they are saved, as the next checkpoint needs them too
            source, source_options = self._saved.named_source(features, source, source_options)
        self._table_source = _named_table(features, source, source_options)
        for name, share in (("val_fraction", val_fraction), ("test_fraction", test_fraction)):
            if not 0 < share < 0.5:
                raise ZooError(f"data.{name}: got {share}; must lie between 0 and 0.5")
        for name, value, least in (
            ("batch_size", batch_size, 1),
            ("num_workers", num_workers, 0),
            ("split_seed", split_seed, 0),
        ):
            if not least <= value < 1 << 32:
                raise ZooError(f"data.{name}: got {value}; must be at least {least}, and less than 2^32")
        for name, choice, choices in (
            ("problem", problem, ("auto", "binary", "multiclass", "multilabel", "regression")),
            ("unmatched_columns", unmatched_columns, ("error", "ignore")),
            ("unmeasured_nodes", unmeasured_nodes, ("error", "missing")),
        ):
            if choice not in choices:
                raise ZooError(f"data.{name}: got {choice!r}; must be {' or '.join(choices)}")
        if self._table_source is None and edges is None and from_checkpoint is None:
            raise ZooError("data.edges: got none; name the file with the graph of these features")
        if self._table_source is None and label is None and from_checkpoint is None:
            raise ZooError("data.label: got none; name the column to predict")
        labels = [label] if isinstance(label, str) else label
        if labels is not None and (not labels or len(set(labels)) < len(labels)):
            raise ZooError(f"data.label: got {label}; name one column, or several different ones")
        if isinstance(missing_labels, str) or any(not isinstance(text, str) for text in missing_labels or ()):
            raise ZooError(f"data.missing_labels: got {missing_labels!r}; must be a list of texts, such as ['', 'NA']")
        self._features = features
        self._edges: TableLike | Path | None = edges
        # A checkpoint has to stay plain, so it gets a mark in place of a table in memory.
        features, edges = (IN_MEMORY if isinstance(given, pd.DataFrame) else given for given in (features, edges))
        self.save_hyperparameters()
        self.batch_size = batch_size
        self._given_labels = labels
        self._brought: TableData | None = None
        self._check_saved(problem)
        if self._saved is not None and self.hparams["edges"] == IN_MEMORY and isinstance(self._edges, str):
            self._edges = None  # the checkpoint's own settings say so, and it has the graph itself
        self._spec: AdjacencySpec | None = None if self._saved is None else self._saved.spec
        self._loaded: Literal["split", "evaluate", "predict"] | None = None
        self._rows: TableRows | None = None
        self._splits: np.ndarray | None = None  # None: every row is for evaluation
        self._asked: TableRows | None = None

    @staticmethod
    def as_in_checkpoint(path: str) -> dict[str, Any]:
        """Arguments with which another table is read as a checkpoint's was: its graph, classes and scaling."""
        return {"from_checkpoint": path, "edges": None}

    def _check_saved(self, problem: str) -> None:
        if self._saved is None:
            return
        path, identity = self.hparams["from_checkpoint"], self._saved.identity
        if self._labels != identity["targets"]:
            raise ZooError(
                f"data.label: got {listed(self._labels)}, but {path} predicts {listed(identity['targets'])}; rename "
                "the column, or leave data.label out"
            )
        if problem not in ("auto", identity["problem"]):
            raise ZooError(
                f"data.problem: got {problem}, but {path} was trained for {identity['problem']}; leave data.problem out"
            )

    # ------------------------------------------------------------------ preparation

    def prepare_data(self) -> None:
        """Fetch the named table, if that was asked for."""
        if self._table_source is not None and self.hparams["download"]:
            self._table_source.fetch()

    @property
    def _named(self) -> TableData | None:
        """What the named table brings; None for a table of the user's."""
        if self._brought is None and self._table_source is not None:
            self._brought = self._table_source.read()
        return self._brought

    @property
    def _labels(self) -> list[str]:
        """The columns to predict: given, of the checkpoint, or what the named table brings."""
        if self._given_labels is None:
            if self._saved is not None:
                return self._saved.identity["targets"]
            if self._named is None or self._named.label is None:
                name = "" if self._table_source is None else f", and {self._table_source.shown} brings none"
                raise ZooError(f"data.label: got none{name}; name the column to predict")
            label = self._named.label
            self._given_labels = [label] if isinstance(label, str) else list(label)
        return self._given_labels

    @property
    def spec(self) -> AdjacencySpec:
        """The graph: of the checkpoint if there is one, or of ``edges``.

        Raises:
            ZooError: if ``edges`` is no graph, or another one than the checkpoint's.
        """
        if self._spec is None:
            edges = self._edges
            if edges is None and self._named is not None:
                edges = self._named.edges
            if edges is None:
                raise ZooError("data.edges: got none, and the table brings none; name the file with the graph")
            self._spec = read_edges(edges)
        return self._spec

    def setup(self, stage: str) -> None:
        """Read, match, split and standardise the table, as far as the stage needs it."""
        path = self.hparams["predict_features"]
        predicting = stage == "predict" and path is not None
        wanted: Literal["split", "evaluate", "predict"] = "split"
        if self._saved is not None and stage != "fit":
            wanted = "predict" if stage == "predict" else "evaluate"
        # with a checkpoint's scaling, the table to predict is all that predicting needs
        if not (predicting and self._saved is not None) and self._loaded not in ("split", wanted):
            self._load(wanted)
        if predicting:
            table = read_table(path, "data.predict_features", [self.hparams["id_column"]])
            ids = table.row_ids(self.hparams["id_column"])
            identity = self._identity
            if identity is None and self._saved is not None:
                identity = self._identity = self._saved.with_source(_source(table))
            self._asked = self._measured(table, ids, None if identity is None else _scales(identity))[0]

    def _load(self, wanted: Literal["split", "evaluate", "predict"]) -> None:
        h, saved = self.hparams, self._saved
        if saved is not None and self._edges is not None:
            saved.check_graph(read_edges(self._edges))
        roles = {f"data.{name}": h[name] for name in ("id_column", "split_column", "group_column")}
        as_text = [*self._labels, *roles.values()]
        if self._table_source is not None and self._named is not None:
            table = read_table(self._named.table, "data.features", as_text, self._table_source.shown)
        else:
            table = read_table(self._features, "data.features", as_text)
        self._check_roles(roles)
        ids = table.row_ids(h["id_column"])
        labels = self._read_labels(table, ids, optional=wanted == "predict")
        splits = self._split(table, ids, labels, wanted)
        training = splits == 0 if splits is not None and wanted == "split" else None

        source = _source(table)
        if labels is not None and training is not None:
            source |= {"train_rows": int(training.sum()), "class_counts": self._counts(labels, training)}

        rows, scales = self._measured(table, ids, None if saved is None else _scales(saved.identity), training)
        unit = {} if saved is None else saved.unit
        if labels is not None:
            target = labels.target
            if labels.problem == "regression":
                unit = unit or _unit(target[training])
                target = (target - unit["target_mean"]) / unit["target_std"]
                if np.abs(target).max() > np.finfo(np.float32).max:
                    raise ZooError("data.label: the numbers are too large for float32; give them in a larger unit")
            dtypes: dict[str, Any] = {"multiclass": np.int64, "regression": np.float64}
            rows.target = torch.from_numpy(target.astype(dtypes.get(labels.problem, np.float32)))
        if saved is not None:
            self._identity = saved.with_source(source)
        elif labels is not None:  # as always without a checkpoint
            self._identity = {
                "kind": "table",
                "graph": self.spec.to_dict() | {"fingerprint": self.spec.fingerprint},
                "inputs": list(self.spec.input_nodes),
                "problem": labels.problem,
                **({"classes": labels.classes} if labels.classes else {}),
                "targets": list(self._labels),
                "mean": [mean for mean, _ in scales],
                "std": [std for _, std in scales],
                **unit,
                "source": source,
            }
        self._rows, self._splits, self._loaded = rows, splits, wanted
        self._brought = None  # it may be large
        self._report(table)

    def _read_labels(self, table: Table, ids: Sequence[str], optional: bool) -> Labels | None:
        """The label columns; where they are optional, only those of the checkpoint's own table, to split it again."""
        if optional and not (self._saved is not None and self._saved.made_of(table)):
            return None
        labels = pd.DataFrame({name: table.require("data.label", name) for name in self._labels})
        missing = self.hparams["missing_labels"]
        refuse_missing_labels(labels, ids, ("",) if missing is None else missing)
        if self._saved is not None:
            return encode_labels(labels, self._saved.problem, ids, self._saved.classes)
        problem = self.hparams["problem"]
        if problem == "auto":
            problem = decide_problem(labels)
            values = labels.iloc[:, 0]
            seen = f"{values.nunique()} {kind_of(values)} values"
            seen = "0 and 1 in every column" if len(self._labels) > 1 else seen
            rank_zero_info(f"data.problem: {problem}, from the label {listed(self._labels)} ({seen})")
        encoded = encode_labels(labels, problem, ids)
        if words := list(filter(is_word_for_nothing, encoded.classes)):
            rank_zero_info(f"data.label: class {listed(words)}; if that means no label, name it in data.missing_labels")
        return encoded

    def _check_roles(self, roles: Mapping[str, str | None]) -> None:
        used: dict[str, str] = {}
        inputs = set(self.spec.input_nodes)
        for argument, column in [*(("data.label", name) for name in self._labels), *roles.items()]:
            if column is None:
                continue
            if column in inputs:
                raise ZooError(
                    f"{argument}: got {column!r}, which is also an input node of the graph; a column is either "
                    "measured or that, so name another or take it out of the edges"
                )
            if column in used:
                raise ZooError(f"{argument}: got {column!r}, which is also {used[column]}; name another column")
            if argument != "data.id_column":  # rows may well be named by their group
                used[column] = argument

    def _split(self, table: Table, ids: Sequence[str], labels: Labels | None, wanted: str) -> np.ndarray | None:
        """The split of each row; None if all are for evaluation."""
        h = self.hparams
        column = h["split_column"]
        if column is not None and (wanted != "predict" or column in table.about.columns):
            return splits_of_column(table.require("data.split_column", column), ids)
        if labels is None or (wanted != "split" and self._saved is not None and not self._saved.made_of(table)):
            return None
        self._warn_of_other_split(table)
        groups = None
        if h["group_column"] is not None:
            values = table.require("data.group_column", h["group_column"])
            empty = np.flatnonzero(values.isna() | (values.astype(object) == ""))
            if empty.size:
                row = ids[int(empty[0])]
                raise ZooError(f"data.group_column: column {values.name!r} is empty in row {row!r}; fill it in")
            groups = values.astype(str).to_numpy(dtype=object)
            refuse_look_alikes(groups, f"data.group_column: groups of column {values.name!r}")
        classes = labels.target if labels.classes else None
        if classes is not None:
            counts = np.bincount(classes, minlength=len(labels.classes))
            rare = [name for name, count in zip(labels.classes, counts, strict=True) if count == 1]
            if rare:
                raise ZooError(
                    f"data.label: the classes {listed(rare)} have only 1 row; a class needs 2 to be trained on and "
                    "tested, so drop or merge them"
                )
        return split_rows(len(table), h["val_fraction"], h["test_fraction"], h["split_seed"], classes, groups)

    def _warn_of_other_split(self, table: Table) -> None:
        """A checkpoint's own table split in another way has training rows in its test split."""
        if self._saved is None or not self._saved.made_of(table):
            return
        names = ("val_fraction", "test_fraction", "split_seed", "split_column", "group_column")
        then = self._saved.settings
        other = [f"data.{name} was {then[name]}" for name in names if name in then and then[name] != self.hparams[name]]
        if other:
            rank_zero_warn(
                f"The checkpoint was trained on this table split in another way ({', '.join(other)}): rows it was "
                "trained on may be among the test rows"
            )

    def _counts(self, labels: Labels, training: np.ndarray) -> dict[str, int]:
        """Training rows of each class, or with each label; refused where there is nothing to learn."""
        target = labels.target[training]
        if not len(target):
            raise ZooError(f"data.split_column: no row of {self.hparams['split_column']!r} says train; some must")
        advice = "give it more rows, or split in another way (data.split_seed, data.split_column)"
        if labels.classes:
            counts = np.bincount(target, minlength=len(labels.classes)).tolist()
            missing = [name for name, count in zip(labels.classes, counts, strict=True) if not count]
            if missing:
                raise ZooError(f"data.label: no row of {listed(missing)} is in the training split; {advice}")
            return dict(zip(labels.classes, counts, strict=True))
        for name, values in zip(self._labels, np.atleast_2d(target.T), strict=True):
            if values.min() == values.max():
                raise ZooError(f"data.label: {name!r} is {values[0]:g} in every row of the training split; {advice}")
        if labels.problem == "regression":
            return {}
        return dict(zip(self._labels, target.sum(0).astype(int).tolist(), strict=True))

    def _measured(
        self,
        table: Table,
        ids: Sequence[str],
        fitted: Sequence[tuple[float, float]] | None,
        training: np.ndarray | None = None,
    ) -> tuple[TableRows, list[tuple[float, float]]]:
        h = self.hparams
        others = [*self._labels, *(h[name] for name in ("id_column", "split_column", "group_column") if h[name])]
        columns = match_columns(
            table, others, self.spec, h["unmatched_columns"] == "ignore", h["unmeasured_nodes"] == "missing"
        )
        values, scales = standardise(table, columns, ids, fitted, training, h["standardise"])
        return TableRows(values, None, ids), scales

    def _report(self, table: Table) -> None:
        identity = self.identity()
        if self._splits is None:
            rows = f"{len(table):,} rows, all of them used, as the checkpoint was trained on another table"
        else:
            counts = np.bincount(self._splits, minlength=3)
            rows = ", ".join(f"{count:,} {name}" for count, name in zip(counts, SPLITS, strict=True)) + " rows"
        classes = f" of {listed(identity['classes'])}" if "classes" in identity else ""
        rank_zero_info(
            f"Table {table.name}: {rows}; {len(identity['inputs']):,} inputs; {identity['problem']}{classes}"
        )

    # ------------------------------------------------------------------ loaders

    def _of_split(self, split: int) -> TableRows:
        if self._rows is None:
            raise ZooError("GraphTableDataModule: no data yet; call setup('fit') first")
        if self._splits is None:
            if split == 0:
                raise ZooError("train_dataloader: this table was taken whole for evaluation; call setup('fit') first")
            return self._rows
        rows = np.flatnonzero(self._splits == split)
        if not rows.size:
            name = self.hparams["split_column"]
            raise ZooError(f"data.split_column: no row of {name!r} says {SPLITS[split]}; some must for this command")
        return self._rows.only(rows)

    def train_dataloader(self) -> ResumableLoader:
        rows = self._of_split(0)
        replicas, rank = (self.trainer.world_size, self.trainer.global_rank) if self.trainer else (1, 0)
        sampler = ShuffledSampler(len(rows), replicas, rank, self.hparams["split_seed"])
        return self._training_loader(rows, sampler, **self._options())

    def val_dataloader(self) -> DataLoader[dict[str, Any]]:
        return DataLoader(self._of_split(1), **self._options())

    def test_dataloader(self) -> DataLoader[dict[str, Any]]:
        return DataLoader(self._of_split(2), **self._options())

    def predict_dataloader(self) -> DataLoader[dict[str, Any]]:
        rows = self._of_split(2) if self._asked is None else self._asked
        return DataLoader(rows.without_target(), **self._options())


def _named_table(features: TableLike | None, source: str, options: dict[str, Any] | None) -> TableSource | None:
    """The named table that the rows are of; None for a user's own."""
    if source == "auto" and features is None:
        return make_source(TABLES, "breast_cancer", options=options)
    if source == "auto" and isinstance(features, str) and is_table_name(features):
        return make_source(TABLES, features, options=options, argument="data.features")
    if source == "auto":
        if options:
            raise ZooError(f"data.source_options: got {options} with features of yours; leave them out")
        return None
    if isinstance(features, pd.DataFrame):
        raise ZooError(f"data.features: got a DataFrame with source {source}, which has its own; leave one out")
    return make_source(TABLES, source, features, options)


def _source(table: Table) -> dict[str, Any]:
    return {"name": table.name, "rows": len(table), "sha256": table.sha256}


def _unit(target: np.ndarray) -> dict[str, float]:
    """Mean and standard deviation of a regression's training rows."""
    mean, std = mean_and_std(target)
    if not np.isfinite([mean, std]).all():
        raise ZooError("data.label: the numbers are too large to be standardised; give them in a larger unit")
    return {"target_mean": mean, "target_std": std}


def _scales(identity: Mapping[str, Any]) -> list[tuple[float, float]]:
    return list(zip(identity["mean"], identity["std"], strict=True))


@dataclass(frozen=True)
class _Saved:
    """What a checkpoint says of the table it was trained on."""

    path: str
    identity: dict[str, Any]
    settings: dict[str, Any]
    spec: AdjacencySpec

    @classmethod
    def read(cls, path: str) -> "_Saved":
        checkpoint = Checkpoint.open(path)
        path, identity = checkpoint.path, checkpoint.identity
        if identity.get("kind") != "table":
            raise ZooError(
                f"data.from_checkpoint: {path} was trained on {identity.get('kind', 'nothing')}, not on a table with a "
                "graph; name a checkpoint of a graph model"
            )
        wanted = {"graph", "inputs", "problem", "targets", "mean", "std"}
        if not wanted <= set(identity):
            lacks = listed(sorted(wanted - set(identity)))
            raise ZooError(f"data.from_checkpoint: the identity in {path} lacks {lacks}; train with this version")
        spec = parse_adjacency(pd.DataFrame(identity["graph"]["edges"], columns=["source", "target"], dtype=object))
        inputs = list(spec.input_nodes)
        if identity["inputs"] != inputs or not len(inputs) == len(identity["mean"]) == len(identity["std"]):
            raise CheckpointMismatchError(
                f"data.from_checkpoint: the inputs in {path} aren't those of its graph; take another copy of the file"
            )
        return cls(path, identity, checkpoint.data_settings, spec)

    def named_source(
        self, features: TableLike | None, source: str, options: dict[str, Any] | None
    ) -> tuple[str, dict[str, Any] | None]:
        """The named table and its options: the checkpoint's where nothing else is given, none for other features."""
        own = self.settings.get("source", "auto")
        if features is None and source == "auto":
            return own, options or self.settings.get("source_options")
        others = isinstance(features, pd.DataFrame) or features not in (None, self.settings.get("features"))
        if source == own != "auto" and others:
            return "auto", None
        return source, options

    @property
    def problem(self) -> Problem:
        return self.identity["problem"]

    @property
    def classes(self) -> list[str] | None:
        return self.identity.get("classes")

    @property
    def unit(self) -> dict[str, float]:
        return {name: self.identity[name] for name in ("target_mean", "target_std") if name in self.identity}

    def made_of(self, table: Table) -> bool:
        return self.identity.get("source", {}).get("sha256") == table.sha256

    def check_graph(self, spec: AdjacencySpec) -> None:
        if spec.fingerprint != self.spec.fingerprint:
            raise CheckpointMismatchError(
                f"data.edges: another graph than that of {self.path}; leave data.edges out to use the checkpoint's, or "
                "data.from_checkpoint to train on this one"
            )

    def with_source(self, source: Mapping[str, Any]) -> dict[str, Any]:
        """The identity for another table; what was counted in the training rows stays unless counted anew."""
        return self.identity | {"source": self.identity.get("source", {}) | source}
