"""Text, tokenised once into a memory-mapped cache and served in windows."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import tokenizers
import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from datamodules.base import ZooDataModule
from datamodules.loaders import ResumableLoader, WindowSampler
from datamodules.sources.base import CORPORA, CorpusSource, make_source
from datamodules.splits import SPLITS
from datamodules.text_files import Corpus, TextFile, TextInMemory, find_files, named_files
from datamodules.text_reading import PIECE, no_text, read_head, whole_characters
from zoo.checkpoint.checkpoint import Checkpoint
from zoo.checkpoint.identity import digest
from zoo.checkpoint.index import resolve
from zoo.checkpoint.remote import default_cache
from zoo.errors import ZooError
from zoo.tokenizer import BPETokenizer, ByteTokenizer, TextTokenizer, text_tokenizer, train_bpe

_FORMAT = 2  # part of the cache key: raise it when the files in the cache change their meaning


# ---------------------------------------------------------------------- the cache


def train_tokenizer(corpus: Corpus, vocab_size: int) -> TextTokenizer:
    """BPE learned from the training split alone."""
    progress = tqdm(total=corpus.n_bytes, unit="B", unit_scale=True, desc="Learning the tokenizer", leave=False)

    def texts() -> Iterator[str]:
        for split, pieces in corpus.iterate():
            for piece in pieces:
                progress.update(len(piece))
                if split == 0:
                    yield piece

    with progress:
        return train_bpe(texts(), vocab_size)


def write_tokens(corpus: Corpus, tokenizer: TextTokenizer, folder: Path) -> dict[str, int]:
    """Tokenise a corpus into ``folder``/train.bin, val.bin and test.bin; returns the number of tokens of each."""
    dtype = token_dtype(tokenizer.vocab_size)
    end = np.array([tokenizer.end], dtype)
    counts = [0, 0, 0]
    with ExitStack() as stack:
        outputs = [stack.enter_context(open(folder / f"{split}.bin", "wb")) for split in SPLITS]
        progress = stack.enter_context(tqdm(total=corpus.n_bytes, unit="B", unit_scale=True, desc="Tokenising"))
        # Pieces are gathered to a MiB before they are encoded, so that small documents share a call. None ends one.
        waiting: list[tuple[int, str | None]] = []
        size = 0

        def flush() -> None:
            encoded = iter(tokenizer.encode_batch([text for _, text in waiting if text is not None]))
            for split, text in waiting:
                numbers = end if text is None else np.array(next(encoded), dtype)
                outputs[split].write(numbers.tobytes())
                counts[split] += len(numbers)
            waiting.clear()

        for split, pieces in corpus.iterate():
            some = False
            for piece in pieces:
                some = True
                waiting.append((split, piece))
                size += len(piece)
                if size >= PIECE:
                    flush()
                    progress.update(size)
                    size = 0
            if some:
                waiting.append((split, None))
        flush()
        progress.update(size)
    return dict(zip(SPLITS, counts, strict=True))


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


# ---------------------------------------------------------------------- the tokenizer


def check_tokenizer(tokenizer: str, vocab_size: int) -> TextTokenizer | None:
    """The tokenizer that a data module is told to use, if it is at hand: that of a checkpoint.

    Args:
        tokenizer: ``byte``, ``bpe``, or a checkpoint (file, address or name of zoo list).
        vocab_size: number of BPE tokens.

    Raises:
        ZooError: for anything else, a checkpoint that isn't of text, and a vocabulary that is too small.
    """
    if tokenizer in (ByteTokenizer.kind, BPETokenizer.kind):
        if tokenizer == BPETokenizer.kind and vocab_size < 257:
            raise ZooError(f"data.vocab_size: got {vocab_size}; bpe needs at least 257, or set tokenizer: byte")
        return None
    checkpoint = resolve(tokenizer)
    if not Path(checkpoint).is_file():
        raise ZooError(
            f"data.tokenizer: got {tokenizer!r}; give byte, bpe or an existing checkpoint file, an address or a "
            "name of zoo list"
        )
    identity = Checkpoint.open(checkpoint).identity
    if identity.get("kind") != "text":
        raise ZooError(
            f"data.tokenizer: got {tokenizer}, a checkpoint for {identity.get('kind')}, which reads no text; name one "
            "that was trained on text, or give byte or bpe"
        )
    return text_tokenizer(identity)


def kept_tokenizer(cache: Path, key: Mapping[str, Any], learn: Callable[[], TextTokenizer]) -> TextTokenizer:
    """The BPE tokenizer that was learned under a key before, or else is learned now and kept.

    Raises:
        OSError: if the cache can't be used.
    """
    file = cache / "tokenizers" / f"{digest({**key, 'tokenizers': tokenizers.__version__})[:32]}.json"
    if file.is_file():
        return text_tokenizer(json.loads(file.read_text()))
    tokenizer = learn()
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as scratch:
        json.dump(tokenizer.identity(), scratch)
    os.replace(scratch.name, file)
    return tokenizer


def cache_folder(cache_dir: str | None) -> Path:
    return Path(cache_dir).expanduser() if cache_dir else default_cache()


def unusable_cache(cache: Path, error: OSError) -> ZooError:
    return ZooError(
        f"data.cache_dir: {cache} can't be used ({error.strerror}: {error.filename}); set data.cache_dir or ZOO_CACHE "
        "to a folder with room"
    )


# ---------------------------------------------------------------------- what Lightning sees


class TokenWindows(Dataset[Tensor]):
    """Windows of ``window`` + 1 tokens of a memory-mapped file; item i starts at token i * ``stride``."""

    def __init__(self, path: Path, dtype: np.dtype[Any], window: int, stride: int) -> None:
        self.tokens = np.memmap(path, dtype=dtype, mode="r")
        self.window, self.stride = window, stride

    def __len__(self) -> int:
        return max(0, (len(self.tokens) - self.window - 1) // self.stride + 1)

    def __getitem__(self, index: int) -> Tensor:
        start = index * self.stride
        return torch.from_numpy(self.tokens[start : start + self.window + 1].astype(np.int64))


class TextDataModule(ZooDataModule):
    """Text in windows of tokens: a corpus by name, such as Python's own standard library, or your files.

    Batches are token numbers (batch_size, window + 1): all but the last are inputs, all but the first are targets.
    Validation and test use windows that follow one another without overlap.

    Args:
        path: a file, folder or glob (.txt, .md, .py; with ``field`` .jsonl, .ndjson, .json, .csv and .tsv). Links are
            followed; hidden files are left out unless they are named. A file of another kind that is named is plain
            text. Of a named corpus that is fetched, the folder that its own folder is in; left out, the cache.
        field: the column of a .csv or .tsv, or the field of the objects in a .jsonl, .ndjson or .json, that holds the
            text; rows without text are left out.
        tokenizer: ``byte``, ``bpe`` (learned from the training split), or a checkpoint (file, address or name of zoo
            list), whose tokenizer is used.
        vocab_size: number of BPE tokens, at least 257.
        window: tokens a window.
        batch_size: windows a batch.
        val_fraction: share of the documents held out for validation; of fewer than 20 documents, share of each.
        test_fraction: share held out for the test.
        split_seed: decides which documents are held out.
        num_workers: loader processes; 0 loads in the main one, which is enough for memory-mapped tokens.
        encoding_errors: what to do with bytes that are no UTF-8, NULs, and halves of surrogate pairs in JSON: strict
            (refuse), replace or ignore.
        prompts: for predict: a .txt file with a prompt a line, or a .jsonl or .ndjson file with a field "prompt".
        cache_dir: where tokens are kept; default ZOO_CACHE or the user's cache folder.
        source: a named corpus, such as stdlib, the source of the running Python's standard library. auto: your files if
            there is a path, or stdlib.
        source_options: what the named corpus has to be told, by name.
        download: fetch the named corpus where it isn't there.

    Raises:
        ZooError: for an argument out of range, here; for unreadable, empty or too short a corpus, in ``prepare_data``
            and ``setup``.
    """

    sources = CORPORA
    kept_settings: ClassVar[tuple[str, ...]] = (*ZooDataModule.kept_settings, "window")

    def __init__(
        self,
        path: str | None = None,
        field: str | None = None,
        tokenizer: str = "bpe",
        vocab_size: int = 2048,
        window: int = 128,
        batch_size: int = 32,
        val_fraction: float = 0.05,
        test_fraction: float = 0.05,
        split_seed: int = 0,
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
            raise ZooError(
                "data.path: got an empty text; name a file, folder or glob, or leave it out for the embedded text"
            )
        if not 0 <= split_seed < 1 << 32:
            raise ZooError(f"data.split_seed: got {split_seed}; must be at least 0, and less than 2^32")
        for name, value in (("window", window), ("batch_size", batch_size)):
            if value < 1:
                raise ZooError(f"data.{name}: got {value}; must be at least 1")
        for name, share in (("val_fraction", val_fraction), ("test_fraction", test_fraction)):
            if not 0 < share < 0.5:
                raise ZooError(f"data.{name}: got {share}; must lie between 0 and 0.5")
        if num_workers < 0:
            raise ZooError(f"data.num_workers: got {num_workers}; must be 0 or more")
        given = check_tokenizer(tokenizer, vocab_size)
        self._corpus_source: CorpusSource | None = None
        if source != "auto" or path is None:
            name = "stdlib" if source == "auto" else source
            self._corpus_source = make_source(CORPORA, name, path, source_options)
        elif source_options:
            raise ZooError(f"data.source_options: got {source_options} with files of yours; leave them out")
        self.save_hyperparameters()
        self.window, self.batch_size = window, batch_size
        self._folder: Path | None = None
        self._source: dict[str, Any] = {}
        self._tokenizer: TextTokenizer | None = given

    @staticmethod
    def as_in_checkpoint(path: str) -> dict[str, Any]:
        """Arguments with which other text is read as a checkpoint's was: with its vocabulary."""
        return {"tokenizer": path}

    # ------------------------------------------------------------------ preparation

    @property
    def _only_prompts(self) -> bool:
        """Whether the corpus isn't needed: predicting, with the tokenizer at hand."""
        predicting = self.trainer is not None and self.trainer.state.fn == "predict"
        return predicting and (self._tokenizer is not None or self.hparams["tokenizer"] == "byte")

    def _corpus(self) -> tuple[Corpus, dict[str, Any]]:
        h, named = self.hparams, self._corpus_source
        about: dict[str, Any] = {}
        files: Sequence[TextFile | TextInMemory]
        if named is None:
            files = find_files(h["path"], h["field"])
        elif h["field"]:
            raise ZooError(
                f"data.field: got {h['field']!r}, but the embedded text is no table; name yours in data.path"
            )
        else:
            data = named.read()
            files, about = named_files(data, h["encoding_errors"]), dict(data.about)
        corpus = Corpus(files, h["field"], h["encoding_errors"], h["val_fraction"], h["test_fraction"], h["split_seed"])
        source = {
            "name": Path(h["path"]).name if named is None else named.shown,
            "files": len(files),
            "bytes": corpus.n_bytes,
            "sha256": corpus.content_digest(),
            "split": {name: h[name] for name in ("val_fraction", "test_fraction", "split_seed")},
        }
        return corpus, source | about

    def prepare_data(self) -> None:
        """Fetch the corpus, if that was asked for; tokenise it, unless the cache has it."""
        if not self._only_prompts:
            if self._corpus_source is not None and self.hparams["download"]:
                self._corpus_source.fetch()
            self._folder = self._cached(*self._corpus())

    def _cached(self, corpus: Corpus, source: dict[str, Any]) -> Path:
        """The folder with the tokens of a corpus, filled if need be."""
        h, self._source = self.hparams, source
        cache = cache_folder(h["cache_dir"])
        key = {"format": _FORMAT, "content": source["sha256"]}
        key |= {name: h[name] for name in ("field", "val_fraction", "test_fraction", "split_seed", "encoding_errors")}
        try:
            if self._tokenizer is None:
                self._tokenizer = self._make_tokenizer(corpus, cache, key)
            key["tokenizer"] = digest(self._tokenizer.identity())
            folder = cache / "text" / digest(key)[:32]
            if not (folder / "meta.json").is_file():
                self._fill(folder, corpus, self._tokenizer)
        except OSError as error:
            raise unusable_cache(cache, error) from None
        return folder

    def _make_tokenizer(self, corpus: Corpus, cache: Path, key: dict[str, Any]) -> TextTokenizer:
        if self.hparams["tokenizer"] == ByteTokenizer.kind:
            return ByteTokenizer()
        vocab_size = self.hparams["vocab_size"]
        return kept_tokenizer(cache, {**key, "vocab_size": vocab_size}, lambda: train_tokenizer(corpus, vocab_size))

    def _fill(self, folder: Path, corpus: Corpus, tokenizer: TextTokenizer) -> None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".writing-", dir=folder.parent))
        try:
            counts = write_tokens(corpus, tokenizer, scratch)
            identity = {"kind": "text", **tokenizer.identity()}
            (scratch / "meta.json").write_text(json.dumps({"identity": identity, "tokens": counts}))
            try:
                scratch.rename(folder)
            except OSError:  # another process was faster
                if not (folder / "meta.json").is_file():
                    raise
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def setup(self, stage: str) -> None:
        """Open the tokens; check that every split holds a window."""
        if self._only_prompts:
            tokenizer = self._tokenizer or ByteTokenizer()
            self._identity = {"kind": "text", **tokenizer.identity(), "source": {"name": "prompts"}}
            return
        if self._folder is None:  # prepare_data ran in another process
            self._folder = self._cached(*self._corpus())
        meta = json.loads((self._folder / "meta.json").read_text())
        # The same tokens may have come from elsewhere when they were written, so where from isn't kept with them.
        self._identity, counts = meta["identity"] | {"source": self._source}, meta["tokens"]
        for split, count in counts.items():
            if count < self.window + 1:
                raise ZooError(
                    f"data.window: got {self.window}, but the {split} split has {count:,} tokens, fewer than a window "
                    "and its last target; give more text, a smaller window, or a larger share to this split"
                )
        listed = ", ".join(f"{counts[split]:,} {split}" for split in SPLITS)
        rank_zero_info(f"Text: {listed} tokens, {len(self._identity['tokens']):,} in the vocabulary")

    # ------------------------------------------------------------------ loaders

    def _windows(self, split: str, stride: int) -> TokenWindows:
        if self._folder is None:
            raise ZooError("TextDataModule: no data yet; call prepare_data() and setup('fit') first")
        return TokenWindows(
            self._folder / f"{split}.bin", token_dtype(len(self.identity()["tokens"])), self.window, stride
        )

    def train_dataloader(self) -> ResumableLoader:
        windows = self._windows("train", stride=1)
        replicas, rank = (self.trainer.world_size, self.trainer.global_rank) if self.trainer else (1, 0)
        sampler = WindowSampler(len(windows.tokens), self.window, replicas, rank, self.hparams["split_seed"])
        if len(sampler) < self.batch_size:
            rank_zero_warn(f"The training text fills {len(sampler)} windows, less than one batch of {self.batch_size}")
        return self._training_loader(windows, sampler, drop_last=len(sampler) >= self.batch_size, **self._options())

    def val_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(self._windows("val", stride=self.window), **self._options())

    def test_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(self._windows("test", stride=self.window), **self._options())

    def predict_dataloader(self) -> DataLoader[str]:
        path = self.hparams["prompts"]
        if not path:
            raise ZooError("data.prompts: got none; predict continues the prompts of a file, so name one")
        prompts = read_prompts(Path(path), self.hparams["encoding_errors"])
        return DataLoader(prompts, batch_size=self.batch_size, collate_fn=list)  # type: ignore[arg-type]


# ---------------------------------------------------------------------- prompts


def read_prompts(path: Path, errors: str = "strict") -> list[str]:
    """Prompts of a .txt file (one a line) or a .jsonl or .ndjson file (field "prompt").

    Raises:
        ZooError: if there is no such file, it is no text, or there is no prompt in it; if ``errors`` is strict, for
            bytes that are no UTF-8 and halves of surrogate pairs.
    """
    path = Path(os.path.expanduser(path))
    kind = path.suffix.lower()
    if not path.is_file():
        raise ZooError(f"data.prompts: there is no file {path}; check the path")
    if kind not in (".txt", ".jsonl", ".ndjson"):
        raise ZooError(f"data.prompts: got {path}; give a .txt file with a prompt a line, or a .jsonl file")
    if fault := no_text(read_head(path)):
        raise ZooError(f"data.prompts: {path} {fault}")
    try:
        text = path.read_text(encoding="utf-8-sig", errors=errors)
    except UnicodeDecodeError as error:
        raise ZooError(
            f"data.prompts: {path} has bytes that are no UTF-8, at offset {error.start}; convert it"
        ) from None
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    if kind != ".txt":
        lines = [_prompt(path, i, line, errors) for i, line in enumerate(lines, start=1) if line.strip()]
    prompts = [line for line in lines if line]
    if not prompts:
        raise ZooError(f"data.prompts: {path} has no prompt; write one a line")
    return prompts


def _prompt(path: Path, number: int, line: str, errors: str) -> str:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
        raise ZooError(f'data.prompts: {path} line {number} is no JSON object with a text "prompt"; mend or drop it')
    return whole_characters(row["prompt"], errors, f"data.prompts: {path} line {number}")
