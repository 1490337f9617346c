"""Pairs of texts: a source, and a target that is to be written for it."""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch.utils.data import DataLoader

from datamodules.answers import AnswerRows, answer_batch
from datamodules.base import ZooDataModule
from datamodules.loaders import ResumableLoader, ShuffledSampler
from datamodules.sources.base import PAIRS, PairSource, make_source
from datamodules.splits import SPLITS, split_pairs
from datamodules.text import cache_folder, check_tokenizer, kept_tokenizer, read_prompts, unusable_cache
from datamodules.text_reading import no_text, read_head, whole_characters
from datamodules.text_tables import TABLES, table_records
from zoo.errors import ZooError
from zoo.tokenizer import ByteTokenizer, TextTokenizer, train_bpe

Pairs: TypeAlias = Sequence[tuple[str, str]]


# ---------------------------------------------------------------------- a user's file


def read_pairs(path: str, source_field: str, target_field: str, errors: str) -> list[tuple[str, str]]:
    """The pairs of a file, in its order.

    Args:
        path: a .csv, .tsv, .jsonl, .ndjson or .json file.
        source_field: the column or field of the sources.
        target_field: that of the targets.
        errors: what to do with bytes that are no UTF-8, NULs, and halves of surrogate pairs: strict, replace or ignore.

    Raises:
        ZooError: if there is no such file, it can't be read, lacks a column, or has no rows, or a row without text.
    """
    file = Path(path).expanduser()
    if file.suffix.lower() not in TABLES:
        raise ZooError(f"data.path: got {path}; pairs are read from {', '.join(TABLES)}, so name such a file")
    if not file.is_file():
        raise ZooError(f"data.path: {path} is no file; name a table with the columns of source and target")
    if source_field == target_field:
        raise ZooError(f"data.target_field: got {target_field!r}, which is the source's too; name another")
    try:
        if (fault := no_text(read_head(file))) and errors == "strict":
            raise ZooError(f"data.path: {file} {fault}")
        fields = {"data.source_field": source_field, "data.target_field": target_field}
        pairs = []
        for number, (source, target) in enumerate(table_records(file, fields, errors), start=1):
            for field, text in ((source_field, source), (target_field, target)):
                if not text.strip():
                    raise ZooError(
                        f"data.path: {file} has no text in {field!r} of row {number}; write it there, or drop the row"
                    )
            pairs.append((source, target))
    except OSError as error:
        raise ZooError(f"data.path: {file} can't be read ({error.strerror}); check its permissions") from None
    if not pairs:
        raise ZooError(f"data.path: {file} is empty; give rows with a source and a target")
    return pairs


# ---------------------------------------------------------------------- what Lightning sees


def _listed(rows: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    return {name: [row[name] for row in rows] for name in rows[0]}


class TextPairDataModule(ZooDataModule):
    """Pairs of texts, one source and its target a row: a named set of pairs, or your file.

    A row is the source's tokens, the separator's, the target's, and the end of a text. Batches are dicts with
    ``inputs`` (B, T), ``targets`` (B, T), -100 but for the target's tokens and the end, and, where rows differ in
    length, ``padding_mask`` (B, T), true at real tokens. Pairs of equal sources are in one split.

    Args:
        path: a table (.csv, .tsv, .jsonl, .ndjson, .json) with a pair a row. Of a named set that is fetched, the folder
            that its own folder is in; left out, the cache.
        source_field: the column, or field, of the sources.
        target_field: that of the targets.
        tokenizer: ``byte``, ``bpe`` (learned from the training pairs), or a checkpoint (file, address or name of zoo
            list), whose tokenizer is used.
        vocab_size: number of BPE tokens, at least 257.
        window: tokens a pair at the most, separator and end among them.
        separator: the text between source and target; a prompt is a source with it.
        too_long: what to do about pairs longer than the window: refuse, or cut, first the end of the source, then,
            where the target alone is too long, the target's, which then has no end.
        batch_size: pairs a batch.
        val_fraction: share of the different sources held out for validation.
        test_fraction: share held out for the test.
        split_seed: decides which, together with the sources' own text.
        n_generated: for how many of the test pairs the test also writes the likeliest target, token by token.
        num_workers: loader processes; 0 loads in the main one, which is enough.
        encoding_errors: what to do with bytes that are no UTF-8, NULs, and halves of surrogate pairs in JSON: strict
            (refuse), replace or ignore.
        prompts: for predict: a .txt file with a source a line, or a .jsonl or .ndjson file with a field "prompt"; left
            out, the sources of the test.
        cache_dir: where tokenizers are kept; default ZOO_CACHE or the user's cache folder.
        source: a named set of pairs. auto: your file if there is a path, or stdlib_signatures.
        source_options: what the named set has to be told, by name.
        download: fetch the named set where it isn't there.

    Raises:
        ZooError: for an argument out of range, here; for unreadable, empty, too few or too long pairs in
            ``prepare_data`` and ``setup``.
    """

    sources = PAIRS
    kept_settings: ClassVar[tuple[str, ...]] = (*ZooDataModule.kept_settings, "window", "separator", "too_long")

    def __init__(
        self,
        path: str | None = None,
        source_field: str = "source",
        target_field: str = "target",
        tokenizer: str = "bpe",
        vocab_size: int = 1024,
        window: int = 128,
        separator: str = "\n",
        too_long: Literal["refuse", "cut"] = "refuse",
        batch_size: int = 32,
        val_fraction: float = 0.05,
        test_fraction: float = 0.05,
        split_seed: int = 0,
        n_generated: int = 64,
        num_workers: int = 0,
        encoding_errors: Literal["strict", "replace", "ignore"] = "strict",
        prompts: str | None = None,
        cache_dir: str | None = None,
        source: str = "auto",
        source_options: dict[str, Any] | None = None,
        download: bool = False,
    ) -> None:
        super().__init__()
        if path == "":
            raise ZooError("data.path: got an empty text; name a file, or leave it out for the embedded pairs")
        if not 0 <= split_seed < 1 << 32:
            raise ZooError(f"data.split_seed: got {split_seed}; must be at least 0, and less than 2^32")
        if too_long not in ("refuse", "cut"):
            raise ZooError(f"data.too_long: got {too_long!r}; must be refuse or cut")
        for name, value, least in (
            ("window", window, 4),
            ("batch_size", batch_size, 1),
            ("n_generated", n_generated, 0),
        ):
            if value < least:
                raise ZooError(f"data.{name}: got {value}; must be at least {least}")
        for name, share in (("val_fraction", val_fraction), ("test_fraction", test_fraction)):
            if not 0 < share < 0.5:
                raise ZooError(f"data.{name}: got {share}; must lie between 0 and 0.5")
        if num_workers < 0:
            raise ZooError(f"data.num_workers: got {num_workers}; must be 0 or more")
        if not separator:
            raise ZooError("data.separator: got an empty text; give one, so that it shows where a target begins")
        self._tokenizer: TextTokenizer | None = check_tokenizer(tokenizer, vocab_size)
        self._pair_source: PairSource | None = None
        if source != "auto" or path is None:
            name = "stdlib_signatures" if source == "auto" else source
            self._pair_source = make_source(PAIRS, name, path, source_options)
        elif source_options:
            raise ZooError(f"data.source_options: got {source_options} with a file of yours; leave them out")
        self.save_hyperparameters()
        self.window, self.batch_size = window, batch_size
        self._found: tuple[Pairs, dict[str, Any], np.ndarray] | None = None
        self._rows: tuple[list[np.ndarray], list[np.ndarray]] | None = None

    @staticmethod
    def as_in_checkpoint(path: str) -> dict[str, Any]:
        """Arguments with which other pairs are read as a checkpoint's were: with its vocabulary."""
        return {"tokenizer": path}

    # ------------------------------------------------------------------ preparation

    @property
    def _only_prompts(self) -> bool:
        """Whether the pairs aren't needed: predicting for sources in a file, with the tokenizer at hand."""
        predicting = self.trainer is not None and self.trainer.state.fn == "predict" and self.hparams["prompts"]
        return bool(predicting) and (self._tokenizer is not None or self.hparams["tokenizer"] == ByteTokenizer.kind)

    def _read(self) -> tuple[Pairs, dict[str, Any], np.ndarray]:
        """The pairs, where they came from, and their splits."""
        if self._found is not None:
            return self._found
        h, named, about = self.hparams, self._pair_source, {}
        pairs: Pairs
        if named is None:
            pairs = read_pairs(h["path"], h["source_field"], h["target_field"], h["encoding_errors"])
        else:
            data = named.read()
            about = dict(data.about)
            where = f"data.source: {named.name}"
            pairs = [
                (
                    whole_characters(source, h["encoding_errors"], where),
                    whole_characters(target, h["encoding_errors"], where),
                )
                for source, target in data.pairs
            ]
        splits = split_pairs([source for source, _ in pairs], h["val_fraction"], h["test_fraction"], h["split_seed"])
        content = hashlib.sha256()
        for pair in pairs:
            for text in pair:
                content.update(hashlib.sha256(text.encode()).digest())
        source = {
            "name": Path(h["path"]).name if named is None else named.shown,
            "pairs": len(pairs),
            "sha256": content.hexdigest(),
            "separator": h["separator"],
            "split": {name: h[name] for name in ("val_fraction", "test_fraction", "split_seed")},
        }
        self._found = pairs, source | about, splits
        return self._found

    def prepare_data(self) -> None:
        """Fetch the pairs, if that was asked for; learn the tokenizer, unless the cache has it."""
        if not self._only_prompts:
            if self._pair_source is not None and self.hparams["download"]:
                self._pair_source.fetch()
            self._tokenizer = self._get_tokenizer()

    def _get_tokenizer(self) -> TextTokenizer:
        h = self.hparams
        if self._tokenizer is not None:
            return self._tokenizer
        if h["tokenizer"] == ByteTokenizer.kind:
            return ByteTokenizer()
        pairs, source, splits = self._read()
        cache = cache_folder(h["cache_dir"])
        key = {name: source[name] for name in ("sha256", "separator", "split")} | {"vocab_size": h["vocab_size"]}

        def texts() -> Iterator[str]:
            for (source, target), split in zip(pairs, splits.tolist(), strict=True):
                if split == 0:
                    yield source + h["separator"]
                    yield target

        try:
            return kept_tokenizer(cache, {"pairs": key}, lambda: train_bpe(texts(), h["vocab_size"]))
        except OSError as error:
            raise unusable_cache(cache, error) from None

    def setup(self, stage: str) -> None:
        """Tokenise the pairs."""
        self._tokenizer = self._get_tokenizer() if not self._only_prompts else self._tokenizer or ByteTokenizer()
        vocabulary = {"kind": "text", **self._tokenizer.identity()}
        if self._only_prompts:
            self._identity = vocabulary | {"source": {"name": "prompts"}}
            return
        pairs, source, splits = self._read()
        self._identity = vocabulary | {"source": source}
        if self._rows is None:
            self._rows = self._tokenise(pairs, self._tokenizer)
            counts = ", ".join(
                f"{n:,} {split}" for n, split in zip(np.bincount(splits, minlength=3), SPLITS, strict=True)
            )
            rank_zero_info(f"Pairs: {counts}; {self._tokenizer.vocab_size:,} tokens in the vocabulary")

    def _tokenise(self, pairs: Pairs, tokenizer: TextTokenizer) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Tokens of each pair, and which of them are the target's or the end.

        Raises:
            ZooError: naming the longest, if some don't fit the window and are to be refused.
        """
        separator = self.hparams["separator"]
        # a source and its separator are encoded together, as zoo generate encodes a prompt
        prompts = tokenizer.encode_batch([source + separator for source, _ in pairs])
        targets = [[*tokens, tokenizer.end] for tokens in tokenizer.encode_batch([target for _, target in pairs])]
        lengths = np.array([len(prompt) + len(target) for prompt, target in zip(prompts, targets, strict=True)])
        long = np.flatnonzero(lengths > self.window)
        if long.size:
            self._tell_too_long(pairs, lengths, long)
            between = tokenizer.encode(separator)
            for i in long.tolist():
                prompts[i], targets[i] = self._cut(tokenizer.encode(pairs[i][0]), between, targets[i])
        tokens = [np.array(prompt + target, np.int32) for prompt, target in zip(prompts, targets, strict=True)]
        is_answer = [np.arange(len(row)) >= len(prompt) for row, prompt in zip(tokens, prompts, strict=True)]
        return tokens, is_answer

    def _tell_too_long(self, pairs: Pairs, lengths: np.ndarray, long: np.ndarray) -> None:
        worst = int(long[lengths[long].argmax()])
        found = f"{long.size:,} of {len(pairs):,} pairs have more tokens, the longest {lengths[worst]:,}"
        if self.hparams["too_long"] == "refuse":
            raise ZooError(
                f"data.window: got {self.window}, but {found} (its source begins {pairs[worst][0][:40]!r}); give a "
                "larger window, drop those pairs, or set data.too_long to cut"
            )
        rank_zero_info(f"data.too_long: {found}; they are cut to {self.window}")

    def _cut(self, source: list[int], between: list[int], target: list[int]) -> tuple[list[int], list[int]]:
        if len(between) > self.window - 2:
            raise ZooError(
                f"data.window: got {self.window}, but the separator has {len(between)} tokens; give a larger window"
            )
        target = target[: self.window - len(between) - 1]  # with room for one token of the source
        return source[: self.window - len(between) - len(target)] + between, target

    # ------------------------------------------------------------------ loaders

    def _of_split(self, split: str, n_generated: int | None = None) -> AnswerRows:
        if self._rows is None or self._found is None:
            raise ZooError("TextPairDataModule: no data yet; call prepare_data() and setup('fit') first")
        chosen = np.flatnonzero(self._found[2] == SPLITS.index(split)).tolist()
        tokens, is_answer = ([column[i] for i in chosen] for column in self._rows)
        return AnswerRows(tokens, is_answer, n_generated)

    def train_dataloader(self) -> ResumableLoader:
        rows = self._of_split("train")
        replicas, rank = (self.trainer.world_size, self.trainer.global_rank) if self.trainer else (1, 0)
        sampler = ShuffledSampler(len(rows), replicas, rank, self.hparams["split_seed"], len(rows) >= replicas)
        if len(sampler) < self.batch_size:
            rank_zero_warn(f"There are {len(sampler)} training pairs, fewer than a batch of {self.batch_size}")
        options = self._options() | {"collate_fn": answer_batch}
        return self._training_loader(rows, sampler, drop_last=len(sampler) >= self.batch_size, **options)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self._of_split("val"), collate_fn=answer_batch, **self._options())

    def test_dataloader(self) -> DataLoader[Any]:
        rows = self._of_split("test", self.hparams["n_generated"] or None)
        return DataLoader(rows, collate_fn=answer_batch, **self._options())

    def predict_dataloader(self) -> DataLoader[Any]:
        """The sources of the file that ``prompts`` names, or of the test with their targets."""
        h, tokenizer = self.hparams, self._tokenizer
        rows: list[dict[str, Any]]
        if h["prompts"] and tokenizer is not None:
            sources = read_prompts(Path(h["prompts"]), h["encoding_errors"])
            prompts = tokenizer.encode_batch([source + h["separator"] for source in sources])
            rows = [{"source": source, "prompts": prompt} for source, prompt in zip(sources, prompts, strict=True)]
        else:
            test = self._of_split("test")
            pairs, _, splits = self._read()
            held = [pair for pair, split in zip(pairs, splits.tolist(), strict=True) if split == SPLITS.index("test")]
            rows = [
                {"source": source, "target": target, "prompts": test[i].tokens[~test[i].is_answer].tolist()}
                for i, (source, target) in enumerate(held)
            ]
        return DataLoader(rows, batch_size=self.batch_size, collate_fn=_listed)  # type: ignore[arg-type]
