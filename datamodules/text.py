"""Text, tokenised once into a memory-mapped cache and served in windows."""

import csv
import glob
import hashlib
import json
import os
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from datamodules.base import SPLITS, ZooDataModule
from datamodules.loaders import ResumableLoader, WindowSampler
from zoo.errors import ZooError
from zoo.identity import digest, read_checkpoint, read_claim
from zoo.remote import default_cache
from zoo.shelf import resolve
from zoo.tokenizer import ByteTokenizer, Tokenizer, tokenizer_from_identity, train_bpe

PLAIN = (".txt", ".md", ".py")
TABLES = (".jsonl", ".csv")
_PIECE = 1 << 20  # bytes of text read, and encoded, at a time
_FEW = 20  # a corpus of fewer documents is split inside each, by position
_FORMAT = 1  # part of the cache key: raise it when the files in the cache change their meaning


@dataclass(frozen=True)
class TextFile:
    """A file of the corpus; ``name`` is its path below the corpus, the same on every machine."""

    name: str
    path: Path

    @property
    def is_table(self) -> bool:
        return self.path.suffix.lower() in TABLES


def stdlib_files() -> list[TextFile]:
    """The Python sources of the running interpreter's standard library, without its tests and installed packages."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3"}
    files = (
        TextFile(path.relative_to(root).as_posix(), path)
        for path in root.rglob("*.py")
        # what the build wrote (_sysconfigdata_...) differs between machines of one version
        if not left_out.intersection(path.relative_to(root).parts) and not path.name.startswith("_sysconfigdata")
    )
    return sorted(files, key=lambda file: file.name)


def find_files(path: str, field: str | None) -> list[TextFile]:
    """The files of a user's corpus: a file, a folder, or a glob.

    A folder gives its .txt, .md and .py files, and with ``field`` its .jsonl and .csv files too.

    Raises:
        ZooError: if there is nothing to read, or a table without a ``field``.
    """
    expanded = Path(path).expanduser()
    if expanded.is_file():
        found, root = [expanded], expanded.parent
    elif expanded.is_dir():
        wanted = PLAIN + (TABLES if field else ())
        root = expanded
        found = [p for p in expanded.rglob("*") if p.is_file() and p.suffix.lower() in wanted]
        if not found:
            others = sorted({p.suffix or p.name for p in expanded.rglob("*") if p.is_file()})
            hint = " and give data.field for tables" if set(others) & set(TABLES) and not field else ""
            raise ZooError(
                f"data.path: folder {path} has no {', '.join(wanted)} file (found: {', '.join(others) or 'nothing'}); "
                f"put text there{hint}"
            )
    else:
        found = [Path(p) for p in glob.glob(str(expanded), recursive=True) if Path(p).is_file()]
        if not found:
            raise ZooError(f"data.path: {path} is no file, no folder and matches nothing; check the path")
        root = Path(os.path.commonpath([p.parent for p in found]))
    files = sorted((TextFile(p.relative_to(root).as_posix(), p) for p in found), key=lambda file: file.name)
    if not field and (table := next((file for file in files if file.is_table), None)):
        raise ZooError(
            f"data.field: got none, but {table.path} is a table; name the {_column_word(table)} with the text"
        )
    return files


def _column_word(file: TextFile) -> str:
    return "column" if file.path.suffix.lower() == ".csv" else "field"


# ---------------------------------------------------------------------- documents: their number, texts and splits


def count_rows(file: TextFile, field: str) -> int:
    """Number of texts in a table."""
    return sum(1 for _ in table_rows(file, field))


def table_rows(file: TextFile, field: str) -> Iterator[str]:
    """The texts of a .jsonl or .csv file, one a row; rows without text are left out.

    Raises:
        ZooError: naming file and line, if a row is malformed or has no such field.
    """
    if file.path.suffix.lower() == ".csv":
        yield from _csv_rows(file, field)
        return
    with open(file.path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:  # also undecodable bytes
                raise ZooError(f"data.path: {file.path} line {number} is no JSON ({error}); mend or drop it") from None
            if not isinstance(row, dict) or field not in row:
                has = ", ".join(map(str, row)) if isinstance(row, dict) else type(row).__name__
                raise ZooError(
                    f"data.field: got {field!r}, but {file.path} line {number} has {has}; name a field every line has"
                )
            if not isinstance(row[field], str):
                raise ZooError(
                    f"data.field: {file.path} line {number}: {field!r} is a {type(row[field]).__name__}; must be text"
                )
            if row[field]:
                yield row[field]


def _csv_rows(file: TextFile, field: str) -> Iterator[str]:
    csv.field_size_limit((1 << 31) - 1)  # a cell may be a whole text
    try:
        with open(file.path, encoding="utf-8-sig", newline="") as handle:
            rows = csv.reader(handle, strict=True)
            header = next(rows, None)
            if not header:
                raise ZooError(f"data.path: {file.path} is empty; give a table with a header and rows")
            if header.count(field) != 1:
                found = "more than one such column" if field in header else f"the columns {', '.join(header)}"
                raise ZooError(f"data.field: got {field!r}, but {file.path} has {found}; name one of them")
            place = header.index(field)
            for row in rows:
                if row and len(row) != len(header):
                    raise ZooError(
                        f"data.path: {file.path} line {rows.line_num} has {len(row)} cells, the header {len(header)}; "
                        "put texts with commas in quotes"
                    )
                if row and row[place]:
                    yield row[place]
    except csv.Error as error:
        raise ZooError(f"data.path: {file.path} is no readable CSV ({error}); mend it") from None
    except UnicodeDecodeError as error:
        raise ZooError(
            f"data.path: {file.path} has bytes that are no UTF-8, the first at offset {error.start}; convert it"
        ) from None


def _undecodable(path: Path, offset: int) -> str:
    return (
        f"data.path: {path} has bytes that are no UTF-8, the first at offset {offset}; convert it (iconv -t utf-8) or "
        "set data.encoding_errors to replace or ignore"
    )


def file_pieces(path: Path, start: int, end: int, errors: str) -> Iterator[str]:
    """The text of bytes start..end of a file, in pieces of about a MiB that end with a line where they can."""
    rest = b""
    offset = start
    with open(path, "rb") as file:
        file.seek(start)
        while (block := file.read(min(_PIECE, end - start))) or rest:
            start += len(block)
            data = rest + block
            cut = len(data) if not block else data.rfind(b"\n") + 1 or _whole_characters(data)
            piece, rest = data[:cut], data[cut:]
            try:
                text = piece.decode(errors=errors)
            except UnicodeDecodeError as error:
                raise ZooError(_undecodable(path, offset + error.start)) from None
            offset += len(piece)
            if text:
                yield text


def _whole_characters(data: bytes) -> int:
    """Length of ``data`` without a last UTF-8 character that may go on past it."""
    for back in range(1, min(4, len(data)) + 1):
        if data[-back] & 0xC0 != 0x80:
            return len(data) - back if data[-back] >= 0xC0 else len(data)
    return len(data)


def _line_start(path: Path, offset: int) -> int:
    """The first line start at or after ``offset``; where the file has no line end there, the next character."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        if offset:
            file.seek(offset - 1)
            file.readline(_PIECE)
        place = file.tell()
        if offset and place < size:
            file.seek(place - 1)
            if file.read(1) == b"\n":
                return place
        if not offset or place < size:
            return place
        file.seek(offset)  # the last line began before the offset: cut inside it
        while (byte := file.read(1)) and byte[0] & 0xC0 == 0x80:
            offset += 1
    return offset


def split_numbers(names: Iterable[str], n: int, val_fraction: float, test_fraction: float, seed: int) -> np.ndarray:
    """0, 1 or 2 (train, val, test) for each of n documents, by the order of the SHA-256 of seed and name."""
    keys = np.fromiter(
        (int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8]) for name in names), np.uint64, count=n
    )
    order = np.argsort(keys, kind="stable")
    n_test, n_val = (max(1, round(n * fraction)) for fraction in (test_fraction, val_fraction))
    splits = np.zeros(n, dtype=np.uint8)
    splits[order[:n_test]] = 2
    splits[order[n_test : n_test + n_val]] = 1
    return splits


@dataclass(frozen=True)
class Corpus:
    """Files, how their texts are found, and how they are split.

    ``iterate`` gives (split, pieces of text) a document, never holding more than a piece.
    """

    files: list[TextFile]
    field: str | None
    encoding_errors: str
    val_fraction: float
    test_fraction: float
    seed: int

    @property
    def n_bytes(self) -> int:
        return sum(file.path.stat().st_size for file in self.files)

    def content_digest(self) -> str:
        """SHA-256 over the names and bytes of all files."""
        total = hashlib.sha256()
        for file in self.files:
            with open(file.path, "rb") as handle:
                total.update(f"{file.name}\0{hashlib.file_digest(handle, 'sha256').hexdigest()}\n".encode())
        return total.hexdigest()

    def iterate(self) -> Iterator[tuple[int, Iterator[str]]]:
        counts = [count_rows(file, self.field) if file.is_table and self.field else 1 for file in self.files]
        n = sum(counts)
        if n >= _FEW:
            names = (f"{file.name}:{i}" for file, count in zip(self.files, counts, strict=True) for i in range(count))
            splits = split_numbers(names, n, self.val_fraction, self.test_fraction, self.seed)
        else:
            train_end = 1 - self.val_fraction - self.test_fraction
            places = (np.arange(n) + 0.5) / max(n, 1)
            splits = (places >= train_end).astype(np.uint8) + (places >= 1 - self.test_fraction)
        number = 0
        for file in self.files:
            if file.is_table and self.field:
                for text in table_rows(file, self.field):
                    yield int(splits[number]), iter((text,))
                    number += 1
            elif n >= _FEW:
                yield int(splits[number]), file_pieces(file.path, 0, file.path.stat().st_size, self.encoding_errors)
                number += 1
            else:
                yield from self._cut_by_position(file)
                number += 1

    def _cut_by_position(self, file: TextFile) -> Iterator[tuple[int, Iterator[str]]]:
        size = file.path.stat().st_size
        shares = (1 - self.val_fraction - self.test_fraction, 1 - self.test_fraction)
        cuts = [0, *(_line_start(file.path, int(size * share)) for share in shares), size]
        for split in range(3):
            if cuts[split] < cuts[split + 1]:
                yield split, file_pieces(file.path, cuts[split], cuts[split + 1], self.encoding_errors)


# ---------------------------------------------------------------------- the cache


def train_tokenizer(corpus: Corpus, vocab_size: int) -> Tokenizer:
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


def write_tokens(corpus: Corpus, tokenizer: Tokenizer, folder: Path) -> dict[str, int]:
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
                if size >= _PIECE:
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
    """Text in windows of tokens, from Python's own standard library or from your files.

    Batches are token numbers (batch_size, window + 1): all but the last are inputs, all but the first are targets.
    Validation and test use windows that follow one another without overlap.

    Args:
        path: a file, folder or glob (.txt, .md, .py; .jsonl and .csv with ``field``). Left out: the source of the
            running Python's standard library, tests excluded.
        field: the .jsonl field or .csv column that holds the text.
        tokenizer: ``byte``, ``bpe`` (learned from the training split), or a checkpoint (file, address or name of zoo
            list), whose tokenizer is used.
        vocab_size: number of BPE tokens, at least 257.
        window: tokens a window.
        batch_size: windows a batch.
        val_fraction: share of the documents held out for validation; of fewer than 20 documents, share of each.
        test_fraction: share held out for the test.
        split_seed: decides which documents are held out.
        num_workers: loader processes; 0 loads in the main one, which is enough for memory-mapped tokens.
        encoding_errors: what to do with bytes that are no UTF-8: strict (refuse), replace or ignore.
        prompts: for predict: a .txt file with a prompt a line, or a .jsonl file with a field "prompt".
        cache_dir: where tokens are kept; default ZOO_CACHE or the user's cache folder.

    Raises:
        ZooError: for an argument out of range, here; for unreadable, empty or too short a corpus, in ``prepare_data``
            and ``setup``.
    """

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
        checkpoint = tokenizer if tokenizer in ("byte", "bpe") else resolve(tokenizer)
        if tokenizer not in ("byte", "bpe") and not Path(checkpoint).is_file():
            raise ZooError(
                f"data.tokenizer: got {tokenizer!r}; give byte, bpe or an existing checkpoint file, an address or a "
                "name of zoo list"
            )
        if tokenizer == "bpe" and vocab_size < 257:
            raise ZooError(f"data.vocab_size: got {vocab_size}; bpe needs at least 257, or set tokenizer: byte")
        self.save_hyperparameters()
        self.window, self.batch_size = window, batch_size
        self._folder: Path | None = None
        self._tokenizer: Tokenizer | None = None
        if tokenizer not in ("byte", "bpe"):
            claim = read_claim(read_checkpoint(checkpoint), checkpoint)
            self._tokenizer = tokenizer_from_identity(claim["identity"])

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
        h = self.hparams
        files = find_files(h["path"], h["field"]) if h["path"] else stdlib_files()
        corpus = Corpus(files, h["field"], h["encoding_errors"], h["val_fraction"], h["test_fraction"], h["split_seed"])
        if corpus.n_bytes == 0:
            raise ZooError(f"data.path: {h['path']} is empty; give files with text in them")
        source = {
            "name": Path(h["path"]).name if h["path"] else "python-stdlib",
            "files": len(files),
            "bytes": corpus.n_bytes,
            "sha256": corpus.content_digest(),
            "split": {name: h[name] for name in ("val_fraction", "test_fraction", "split_seed")},
        }
        if not h["path"]:
            source["python"] = ".".join(map(str, sys.version_info[:3]))
        return corpus, source

    def prepare_data(self) -> None:
        """Tokenise the corpus, unless the cache has it."""
        if not self._only_prompts:
            self._folder = self._cached(*self._corpus())

    def _cached(self, corpus: Corpus, source: dict[str, Any]) -> Path:
        """The folder with the tokens of a corpus, filled if need be."""
        h = self.hparams
        cache = Path(h["cache_dir"]).expanduser() if h["cache_dir"] else default_cache()
        key = {"format": _FORMAT, "content": source["sha256"]}
        key |= {name: h[name] for name in ("field", "val_fraction", "test_fraction", "split_seed", "encoding_errors")}
        try:
            if self._tokenizer is None:
                self._tokenizer = self._make_tokenizer(corpus, cache, key)
            key["tokenizer"] = digest(self._tokenizer.identity())
            folder = cache / "text" / digest(key)[:32]
            if not (folder / "meta.json").is_file():
                self._fill(folder, corpus, self._tokenizer, source)
        except OSError as error:
            raise ZooError(
                f"data.cache_dir: {cache} can't be used ({error.strerror}: {error.filename}); set data.cache_dir or "
                "ZOO_CACHE to a folder with room"
            ) from None
        return folder

    def _make_tokenizer(self, corpus: Corpus, cache: Path, key: dict[str, Any]) -> Tokenizer:
        if self.hparams["tokenizer"] == ByteTokenizer.kind:
            return ByteTokenizer()
        vocab_size = self.hparams["vocab_size"]
        file = cache / "tokenizers" / f"{digest({**key, 'vocab_size': vocab_size})[:32]}.json"
        if file.is_file():
            return tokenizer_from_identity(json.loads(file.read_text()))
        tokenizer = train_tokenizer(corpus, vocab_size)
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as scratch:
            json.dump(tokenizer.identity(), scratch)
        os.replace(scratch.name, file)
        return tokenizer

    def _fill(self, folder: Path, corpus: Corpus, tokenizer: Tokenizer, source: dict[str, Any]) -> None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".writing-", dir=folder.parent))
        try:
            counts = write_tokens(corpus, tokenizer, scratch)
            identity = {"kind": "text", **tokenizer.identity(), "source": source}
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
        self._identity, counts = meta["identity"], meta["tokens"]
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
        return ResumableLoader(windows, sampler, drop_last=len(sampler) >= self.batch_size, **self._options())

    def val_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(self._windows("val", stride=self.window), **self._options())

    def test_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(self._windows("test", stride=self.window), **self._options())

    def predict_dataloader(self) -> DataLoader[str]:
        path = self.hparams["prompts"]
        if not path:
            raise ZooError("data.prompts: got none; predict continues the prompts of a file, so name one")
        prompts = read_prompts(Path(path))
        return DataLoader(prompts, batch_size=self.batch_size, collate_fn=list)  # type: ignore[arg-type]


def _prompt(path: Path, number: int, line: str) -> str:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
        raise ZooError(f'data.prompts: {path} line {number} is no JSON object with a text "prompt"; mend or drop it')
    prompt: str = row["prompt"]
    return prompt


def read_prompts(path: Path) -> list[str]:
    """Prompts of a .txt file (one a line) or a .jsonl file (field "prompt").

    Raises:
        ZooError: if there is no such file, or no prompt in it.
    """
    if not path.is_file():
        raise ZooError(f"data.prompts: there is no file {path}; check the path")
    try:
        lines = [line.removesuffix("\r") for line in path.read_text(encoding="utf-8-sig").split("\n")]
    except UnicodeDecodeError as error:
        raise ZooError(
            f"data.prompts: {path} has bytes that are no UTF-8, at offset {error.start}; convert it"
        ) from None
    if path.suffix.lower() == ".jsonl":
        prompts = [_prompt(path, i, line) for i, line in enumerate(lines, start=1) if line.strip()]
    elif path.suffix.lower() == ".txt":
        prompts = [line for line in lines if line]
    else:
        raise ZooError(f"data.prompts: got {path}; give a .txt file with a prompt a line, or a .jsonl file")
    if not prompts:
        raise ZooError(f"data.prompts: {path} has no prompt; write one a line")
    return prompts
