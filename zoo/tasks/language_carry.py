"""Weights of a language model carried over to another vocabulary, by the text of its tokens."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from zoo.checkpoint.transfer import Axis, TensorTransfer, carry
from zoo.tokenizer import END_OF_TEXT, Tokenizer


def adapt_text(
    network: nn.Module, saved: Mapping[str, Tensor], saved_tokenizer: Tokenizer, tokenizer: Tokenizer
) -> tuple[dict[str, Tensor], list[TensorTransfer]]:
    """A state dict for ``network`` from the weights of a language model with another vocabulary.

    Rows of embedding and head go by the text of their token. A token that is new starts as the mean of the tokens that
    its text had there, or afresh where it had none. Learned positions go by their number. What has another shape stays
    as ``network`` has it.

    Args:
        network: the model to fill; it isn't changed.
        saved: the other model's state dict.
        saved_tokenizer: its tokenizer.
        tokenizer: the tokenizer of ``network``.

    Returns:
        The state dict, and what became of each tensor.
    """
    own = {name: tensor.detach() for name, tensor in network.state_dict().items()}
    here, there = _token_texts(tokenizer), _token_texts(saved_tokenizer)
    axes: dict[str, list[Axis]] = {name: [Axis(0, "tokens", here, there)] for name in _VOCABULARY}
    positions = "position_embedding.weight"
    if positions in own and positions in saved:
        axes[positions] = [Axis(0, "positions", range(len(own[positions])), range(len(saved[positions])))]
    source = dict(saved)
    tied = own["head.weight"].data_ptr() == own["embedding.weight"].data_ptr()
    apart = tied and "head.weight" in source and not torch.equal(source["head.weight"], source["embedding.weight"])
    if apart:
        source["head.weight"] = source["embedding.weight"]
    filled, transfers = carry(own, source, axes)
    known = set(there)
    new = {i: text for i, text in enumerate(tokenizer.token_bytes) if text and text not in known}
    pieces = {i: numbers for i, text in new.items() if (numbers := saved_tokenizer.encode_bytes(text))}
    for transfer in transfers:
        if transfer.tensor in _VOCABULARY and transfer.outcome == "moved" and pieces:
            theirs = source[transfer.tensor]
            for i, numbers in pieces.items():
                filled[transfer.tensor][i] = theirs[numbers].mean(dim=0)
            n = len(here) - len(new)
            transfer.note = f"{n} of {len(here)} tokens by their text, {len(pieces)} as the mean of its tokens there"
        if apart and transfer.tensor == "head.weight":
            transfer.outcome, transfer.note = "dropped", "tied to the embedding here"
    return filled, transfers


_VOCABULARY = ("embedding.weight", "head.weight")


def _token_texts(tokenizer: Tokenizer) -> list[bytes | str]:
    return [text or END_OF_TEXT for text in tokenizer.token_bytes]
