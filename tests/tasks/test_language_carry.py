"""Weights carried over to another vocabulary, by the text of its tokens."""

import pytest
import torch

from zoo.models.decoder import LanguageModel
from zoo.tasks.language_carry import adapt_text
from zoo.tokenizer import END_OF_TEXT, ByteTokenizer, train_bpe

CODE = ["def alpha(beta):\n    return beta + 1\n" * 20]
PLAY = ["Enter the king, and his alpha train. Now beta speaks: grün\n" * 20]
TOKENIZERS = {"byte": ByteTokenizer(), "code": train_bpe(CODE, 290), "play": train_bpe(PLAY, 300)}


def by_tensor(transfers):
    found = {transfer.tensor: transfer for transfer in transfers}
    assert len(found) == len(transfers)
    return found


def language_model(tokenizer, seed=0, **options):
    torch.manual_seed(seed)
    return LanguageModel(tokenizer.vocab_size, 8, 2, 16, 2, mlp_hidden=[4], **{"dropout": 0.0, **options}).eval()


def text_of(tokenizer, i):
    return tokenizer.token_bytes[i] or END_OF_TEXT


def expected_row(rows, there, here, i):
    """As written down: the row of the same text, or the mean of the rows of its pieces."""
    text = text_of(here, i)
    for j in range(there.vocab_size):
        if text_of(there, j) == text:
            return rows[j]
    try:
        pieces = there.encode(text.decode())
    except UnicodeDecodeError:
        pieces = [there.token_bytes.index(bytes([byte])) for byte in text]
    return sum(rows[j] for j in pieces) / len(pieces)


@pytest.mark.parametrize(("there", "here"), [(a, b) for a in TOKENIZERS for b in TOKENIZERS if a != b])
def test_rows_go_by_the_text_of_their_token(there, here):
    old, new = TOKENIZERS[there], TOKENIZERS[here]
    source, target = language_model(old), language_model(new, seed=1)
    state, transfers = adapt_text(target, source.state_dict(), old, new)
    for name in ("embedding.weight", "head.weight"):
        for i in range(new.vocab_size):
            torch.testing.assert_close(state[name][i], expected_row(source.state_dict()[name], old, new, i))
        assert by_tensor(transfers)[name].outcome == "moved"
    rest = {transfer.outcome for transfer in transfers if transfer.tensor not in ("embedding.weight", "head.weight")}
    assert rest == {"kept"}
    target.load_state_dict(state, strict=True)


def test_the_same_vocabulary_is_kept_whole():
    tokenizer = TOKENIZERS["code"]
    source, target = language_model(tokenizer), language_model(tokenizer, seed=1)
    state, transfers = adapt_text(target, source.state_dict(), tokenizer, tokenizer)
    assert {transfer.outcome for transfer in transfers} == {"kept"}
    target.load_state_dict(state)
    tokens = torch.arange(20)[None]
    assert torch.equal(source(tokens), target(tokens))


def test_tied_and_learned_and_deeper():
    old, new = TOKENIZERS["code"], TOKENIZERS["play"]
    options = {"tie_embeddings": True, "positions": "learned"}
    source = language_model(old, max_len=32, **options)
    torch.manual_seed(1)
    target = LanguageModel(new.vocab_size, 8, 2, 16, 3, mlp_hidden=[4], max_len=48, **options)
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    state, transfers = adapt_text(target, source.state_dict(), old, new)
    assert torch.equal(state["embedding.weight"], state["head.weight"])
    assert torch.equal(state["position_embedding.weight"][:32], source.state_dict()["position_embedding.weight"])
    assert torch.equal(state["position_embedding.weight"][32:], before["position_embedding.weight"][32:])
    assert "32 of 48 positions" in by_tensor(transfers)["position_embedding.weight"].note
    assert by_tensor(transfers)["decoder.layers.2.norm1.weight"].outcome == "new"
    assert torch.equal(state["decoder.layers.2.attention.W_v.weight"], before["decoder.layers.2.attention.W_v.weight"])
