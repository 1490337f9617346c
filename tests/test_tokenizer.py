"""Text to tokens and back."""

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from zoo.checkpoint.identity import digest
from zoo.errors import ZooError
from zoo.tokenizer import _LONGEST, END_OF_TEXT, ByteTokenizer, tokenizer_from_identity, train_bpe

BPE = train_bpe(["def alpha(x): return x\n" * 20, "für immer und ewig\n" * 20], 320)
TOKENIZERS = {"byte": ByteTokenizer(), "bpe": BPE}
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(text=texts)
@settings(deadline=None, max_examples=100)
def test_any_text_comes_back_from_its_tokens(kind, text):
    tokenizer = TOKENIZERS[kind]
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(text=texts)
@settings(deadline=None, max_examples=50)
def test_token_bytes_add_up_to_the_text(kind, text):
    tokenizer = TOKENIZERS[kind]
    assert sum(len(tokenizer.token_bytes[n]) for n in tokenizer.encode(text)) == len(text.encode())


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(text=texts)
@settings(deadline=None, max_examples=50)
def test_streamed_text_equals_decoded_text_with_no_broken_character(kind, text):
    tokenizer = TOKENIZERS[kind]
    push = tokenizer.incremental_decoder()
    pieces = [push(number, False) for number in tokenizer.encode(text)] + [push(None, True)]
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert all("\ufffd" not in piece for piece in pieces)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_identity_alone_rebuilds_the_tokenizer(kind):
    tokenizer = TOKENIZERS[kind]
    again = tokenizer_from_identity({"kind": "text", **tokenizer.identity()})
    text = "def alpha(x): return für\n"
    assert again.encode(text) == tokenizer.encode(text)
    assert again.token_bytes == tokenizer.token_bytes
    assert digest(again.identity()) == digest(tokenizer.identity())


def test_bpe_learns_the_same_tokens_every_time_and_has_the_size_asked_for():
    texts = ["one two three two one " * 30, "four five six\n" * 30]
    assert train_bpe(texts, 280).identity() == train_bpe(texts, 280).identity()
    assert BPE.vocab_size <= 320
    assert BPE.tokens[BPE.end] == END_OF_TEXT


def test_bpe_has_merges_that_shorten_its_own_text():
    text = "def alpha(x): return x\n"
    assert len(BPE.encode(text)) < len(text) / 2


def test_the_end_of_a_text_written_out_is_no_end_of_text():
    for tokenizer in TOKENIZERS.values():
        assert tokenizer.end not in tokenizer.encode(f"a{END_OF_TEXT}b")
        assert tokenizer.decode([tokenizer.end]) == ""


def test_too_small_a_vocabulary_is_refused():
    with pytest.raises(ZooError, match=r"vocab_size: got 256; bpe needs at least 257"):
        train_bpe(["abc"], 256)


def test_identity_of_other_data_is_refused():
    with pytest.raises(ZooError, match="kind 'image'"):
        tokenizer_from_identity({"kind": "image", "classes": ["cat"]})


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_half_of_a_surrogate_pair_is_refused_in_one_line(kind):
    with pytest.raises(ZooError, match=r"text: .* half of a surrogate pair \('\\ud83d'\) as character 3"):
        TOKENIZERS[kind].encode_batch(["fine", "ab\ud83d"])


# ---------------------------------------------------------------------- long words


DICE = random.Random(0)
LONG = {
    "one word": "".join(DICE.choices("ACGT", k=300_000)),
    "no stops": "".join(chr(0x4E00 + int(2000 * DICE.random() ** 3)) for _ in range(100_000)),
    "blanks": " " * 300_000,
}


@pytest.mark.parametrize("kind", LONG)
def test_learning_from_one_long_word_ends_and_loses_nothing(kind):
    text = LONG[kind]
    start = time.process_time()
    tokenizer = train_bpe([text], 500)
    # about a second; with the whole word at once 45 and more
    assert time.process_time() - start < 10
    numbers = tokenizer.encode(text)
    assert len(numbers) < 0.7 * len(text.encode())
    assert tokenizer.decode(numbers) == text


def test_words_of_ordinary_length_are_learned_from_whole(monkeypatch):
    word = "ab" * (_LONGEST // 2)
    text = f"{word} {word[1:]}!\n\n  def für(x): return '_' * 80  # {'=' * 80}\n" * 5
    bounded = train_bpe([text], 400).identity()
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False)
    monkeypatch.setattr("zoo.tokenizer._words_to_learn_from", lambda: whole)
    assert train_bpe([text], 400).identity() == bounded
    assert any(len(token) > 64 for token in bounded["tokens"])
