"""Text to tokens and back, rebuilt from a data identity alone."""

import codecs
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

from zoo.errors import ZooError
from zoo.registry import nearest

END_OF_TEXT = "<|endoftext|>"
NO_TARGET = -100
"""What stands in the place of a target that doesn't count: PyTorch's ``ignore_index``."""
_LONGEST = 512  # bytes of a word that merges are learned from: a merge costs the square of its word's length


def refuse_lone_surrogates(text: str, where: str) -> None:
    """Raise ZooError, which starts with ``where``, if a text has half of a surrogate pair, as JSON may."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ZooError(
            f"{where} has half of a surrogate pair ({text[error.start]!r}) as character {error.start + 1}; give the "
            "whole character, or drop it"
        ) from None


class Tokenizer(ABC):
    """Texts to token numbers and back.

    Attributes:
        tokens: the token strings, in order.
        token_bytes: the bytes each stands for; none for the end of a text.
        end: number of the token that ends a text; None where none does.
    """

    kind: str
    tokens: list[str]
    token_bytes: list[bytes]

    @property
    def vocab_size(self) -> int:
        return len(self.tokens)

    @property
    @abstractmethod
    def end(self) -> int | None: ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token numbers of each text, without an end-of-text token.

        Raises:
            ZooError: for a text with half of a surrogate pair, which has no bytes.
        """
        try:
            return self._encode_batch(texts)
        except (UnicodeEncodeError, TypeError):
            for text in texts:
                refuse_lone_surrogates(text, "text: got one that")
            raise

    @abstractmethod
    def _encode_batch(self, texts: Sequence[str]) -> list[list[int]]: ...

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """The part of a data identity that ``tokenizer_from_identity`` needs."""

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    @abstractmethod
    def encode_bytes(self, data: bytes) -> list[int]:
        """Token numbers of bytes that need not be UTF-8; none where no tokens stand for them."""

    def decode(self, numbers: Iterable[int]) -> str:
        """Text of token numbers; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(self.token_bytes[number] for number in numbers).decode(errors="replace")

    def incremental_decoder(self) -> Callable[[int | None, bool], str]:
        """A function (token or None, whether it is the last) -> text that is whole by then.

        A character whose bytes come in several tokens comes out with the last of them.
        """
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

        def push(number: int | None, final: bool) -> str:
            return decoder.decode(b"" if number is None else self.token_bytes[number], final)

        return push


class TextTokenizer(Tokenizer):
    """Tokens over bytes: whatever the text, decoding gives it back."""

    @property
    def end(self) -> int:
        return self.tokens.index(END_OF_TEXT)

    def encode_bytes(self, data: bytes) -> list[int]:
        try:
            return self.encode(data.decode())
        except UnicodeDecodeError:
            place = {piece: i for i, piece in enumerate(self.token_bytes) if len(piece) == 1}
            return [place[data[i : i + 1]] for i in range(len(data))]


class ByteTokenizer(TextTokenizer):
    """One token a byte, and the end of a text: 257 tokens, nothing to train."""

    kind = "byte"

    def __init__(self) -> None:
        self.tokens = [f"{byte:02x}" for byte in range(256)] + [END_OF_TEXT]
        self.token_bytes = [bytes([byte]) for byte in range(256)] + [b""]

    def _encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(text.encode()) for text in texts]

    def identity(self) -> dict[str, Any]:
        return {"tokenizer": self.kind, "tokens": self.tokens}


class BPETokenizer(TextTokenizer):
    """Byte-level byte pair encoding, by the ``tokenizers`` library.

    Args:
        tokens: the token strings in order, in the library's byte alphabet.
        merges: the merges in order, each "left right".
    """

    kind = "bpe"

    def __init__(self, tokens: Sequence[str], merges: Sequence[str]) -> None:
        self.tokens, self.merges = list(tokens), list(merges)
        pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
        self._tokenizer = _byte_level(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=pairs))
        alphabet = _byte_alphabet()
        self.token_bytes = [
            b"" if token == END_OF_TEXT else bytes(alphabet[character] for character in token) for token in tokens
        ]

    def _encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(list(texts))]

    def identity(self) -> dict[str, Any]:
        return {"tokenizer": self.kind, "tokens": self.tokens, "merges": self.merges}


class SymbolTokenizer(Tokenizer):
    """One token a symbol, with blanks between them; there is no other text, and no end.

    Args:
        symbols: the symbols, in order.
    """

    kind = "symbols"

    def __init__(self, symbols: Sequence[str]) -> None:
        self.tokens = list(symbols)
        self.token_bytes = [f"{symbol} ".encode() for symbol in symbols]
        self._numbers = {symbol: i for i, symbol in enumerate(symbols)}

    @property
    def end(self) -> None:
        return None

    def _encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [[self._number(symbol) for symbol in text.split()] for text in texts]

    def _number(self, symbol: str) -> int:
        if symbol not in self._numbers:
            raise ZooError(
                f"text: got {symbol!r}, which is no symbol of this vocabulary; {nearest(symbol, self.tokens)}, with "
                "blanks between them"
            )
        return self._numbers[symbol]

    def encode_bytes(self, data: bytes) -> list[int]:
        symbols = data.decode(errors="replace").split()
        return [self._numbers[symbol] for symbol in symbols] if set(symbols) <= set(self._numbers) else []

    def identity(self) -> dict[str, Any]:
        return {"tokenizer": self.kind, "tokens": self.tokens}


def train_bpe(texts: Iterable[str], vocab_size: int) -> BPETokenizer:
    """Learn a BPE tokenizer of ``vocab_size`` tokens, the end of a text among them.

    Words of more than 512 bytes are learned from in parts; they are encoded whole.

    Raises:
        ZooError: if ``vocab_size`` has no room for the 256 bytes and the end of a text.
    """
    if vocab_size < 257:
        raise ZooError(
            f"vocab_size: got {vocab_size}; bpe needs at least 257 (256 bytes and the end of a text), so give more or "
            "set tokenizer: byte"
        )
    tokenizer = _byte_level(models.BPE())
    tokenizer.pre_tokenizer = _words_to_learn_from()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[END_OF_TEXT],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    learned = _model_state(tokenizer)
    vocab: dict[str, int] = learned["vocab"]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in learned["merges"]]
    return BPETokenizer(sorted(vocab, key=vocab.__getitem__), merges)


def tokenizer_from_identity(identity: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that a data identity of text, or of symbols, describes.

    Raises:
        ZooError: if the identity is of another kind.
    """
    if identity.get("tokenizer") == SymbolTokenizer.kind:
        return SymbolTokenizer(identity["tokens"])
    return text_tokenizer(identity)


def text_tokenizer(identity: Mapping[str, Any]) -> TextTokenizer:
    """The tokenizer that a data identity of kind ``text`` describes.

    Raises:
        ZooError: if the identity is of another kind.
    """
    kind = identity.get("tokenizer")
    if kind == ByteTokenizer.kind:
        return ByteTokenizer()
    if kind == BPETokenizer.kind:
        return BPETokenizer(identity["tokens"], identity["merges"])
    raise ZooError(
        f"identity: got kind {identity.get('kind')!r} with tokenizer {kind!r}; a language model needs text with a byte "
        "or bpe tokenizer"
    )


def _byte_level(model: models.BPE) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _words_to_learn_from() -> pre_tokenizers.PreTokenizer:
    parts = pre_tokenizers.Split(Regex(f".{{1,{_LONGEST}}}"), "isolated")
    return pre_tokenizers.Sequence([pre_tokenizers.ByteLevel(add_prefix_space=False), parts])


def _model_state(tokenizer: tokenizers.Tokenizer) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(tokenizer.to_str())["model"]
    return state


def _byte_alphabet() -> dict[str, int]:
    """Which byte each character of the byte-level alphabet stands for: printable ones for themselves, the rest in
    order from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}
