"""The language family's networks: the decoder stack, and the language model around it."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.attention.base import Attention, AttentionCache, Masks, check_dropout, check_input
from zoo.attention.damcha.method import chosen_attention, known_switches, switches_in
from zoo.attention.stacks import layer_matrices, summed_losses
from zoo.errors import ZooError
from zoo.registry import nearest


class DecoderCache:
    """What a decoder keeps of the tokens it has seen, so that each new token costs one pass over itself alone.

    Args:
        decoder: whose layers make their own caches.
        capacity: how many tokens there is room for.
    """

    def __init__(self, decoder: "Decoder", capacity: int) -> None:
        self.layers = [cast(DecoderLayer, layer).attention.new_cache(capacity) for layer in decoder.layers]
        self.shared = None if decoder.stack_shared is None else decoder.stack_shared.new_cache()

    @property
    def length(self) -> int:
        return self.layers[0].length


class DecoderLayer(nn.Module):
    """Attention and feed-forward with residuals; post-norm as published, or pre-norm."""

    def __init__(self, attention: Attention, d_ff: int, dropout: float, norm_first: bool) -> None:
        super().__init__()
        d_model, norm = attention.d_model, _NORMS[attention.stack.norm]
        self.attention = attention
        self.feed_forward = nn.Sequential(
            nn.Linear(d_model, d_ff), nn.GELU(), nn.Dropout(dropout), nn.Linear(d_ff, d_model)
        )
        self.norm1, self.norm2 = norm(d_model), norm(d_model)
        self.dropout = nn.Dropout(dropout)
        self.norm_first = norm_first

    def forward(self, x: Tensor, masks: Masks, shared: Any, cache: AttentionCache | None) -> Tensor:
        def attend(h: Tensor) -> Tensor:
            return self.dropout(self.attention(h, masks, shared, cache)[0])

        if self.norm_first:
            x = x + attend(self.norm1(x))
            return x + self.dropout(self.feed_forward(self.norm2(x)))
        x = self.norm1(x + attend(x))
        return self.norm2(x + self.dropout(self.feed_forward(x)))


_NORMS: dict[str, type[nn.Module]] = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}


class Decoder(nn.Module):
    r"""A causal stack of attention layers, of any attention that is registered; DAMCHA if nothing is said.

    What an attention keeps for its whole stack is made once a forward pass, from the stack's input, and handed to every
    layer: with DAMCHA's ``share_mlp`` the metrics of all prefix means.

    Args:
        d_model: model width D.
        n_heads: number of heads H; divides D.
        d_ff: width of the feed-forward layers.
        n_layers: number of layers.
        dropout: dropout probability, everywhere.
        norm_first: pre-norm with a final norm; False is the published post-norm. An attention may insist on one.
        bias: whether the attention's projections have a bias.
        attention: name of the attention, see ``zoo.list_attentions()``; None for what the method's switches mean.
        attention_options: its options by name.
        switches: the method's: ``use_M`` (False is ordinary attention), ``use_mlp`` (False is the static ablation),
            ``share_mlp`` (one generator for the stack), ``mlp_hidden`` and the other options of ``damcha``, see
            ``DamchaOptions``; ``use_multihead_M`` is accepted and changes nothing.

    Raises:
        ZooError: for a value out of range or a combination of switches without meaning.

    Source: DAMCHA, section 3.4.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        d_ff: int,
        n_layers: int,
        dropout: float = 0.1,
        *,
        norm_first: bool = False,
        bias: bool = True,
        attention: str | None = None,
        attention_options: Mapping[str, Any] | None = None,
        **switches: Any,
    ) -> None:
        super().__init__()
        for name, value in (("d_ff", d_ff), ("n_layers", n_layers)):
            if value < 1:
                raise ZooError(f"{name}: got {value}; must be at least 1")
        check_dropout(dropout)
        meant = switches_in(switches)
        if switches:  # what is left is no switch
            name = next(iter(switches))
            raise ZooError(f"{name}: it is no option of a decoder; {nearest(name, known_switches())}")
        kind, options = chosen_attention(attention, attention_options, meant, "text", n_layers)
        self.d_model, self.attention = d_model, kind
        self.norm_first = norm_first if kind.stack.norm_first is None else kind.stack.norm_first
        shared = kind.make_shared(d_model, n_heads, n_layers, dropout, options)
        self.add_module(kind.shared_name, shared)
        self.layers = nn.ModuleList(
            DecoderLayer(
                kind(d_model, n_heads, i, n_layers, dropout, bias, options, shared), d_ff, dropout, self.norm_first
            )
            for i in range(n_layers)
        )
        self.norm = _NORMS[kind.stack.norm](d_model) if self.norm_first else nn.Identity()

    @property
    def stack_shared(self) -> Any:
        """What the layers' attention keeps for the whole stack; None for nothing."""
        return getattr(self, self.attention.shared_name)

    @property
    def attentions(self) -> list[Attention]:
        return [cast(DecoderLayer, layer).attention for layer in self.layers]

    def forward(self, x: Tensor, padding_mask: Tensor | None = None, cache: DecoderCache | None = None) -> Tensor:
        """Run the stack: (B, T, D) -> (B, T, D).

        Args:
            x: embedded tokens with their positions.
            padding_mask: (B, T), True or non-zero at real tokens; outputs elsewhere are zero.
            cache: what earlier tokens left; x then holds the new ones only.
        """
        check_input(x, self.d_model, padding_mask)
        if cache is not None and len(cache.layers) != len(self.layers):
            raise ZooError(
                f"cache: got one for {len(cache.layers)} layers; this decoder has {len(self.layers)}, so make it with "
                "DecoderCache(decoder, capacity)"
            )
        hidden = None if padding_mask is None else ~padding_mask.bool().unsqueeze(-1)
        if hidden is not None:
            x = x.masked_fill(hidden, 0)
        masks, shared = Masks(causal=True, padding=padding_mask), None
        if self.stack_shared is not None:
            shared = self.stack_shared.share(
                x, masks, None if cache is None else cache.shared, readers=len(self.layers)
            )
        for i, layer in enumerate(self.layers):
            x = layer(x, masks, shared, None if cache is None else cache.layers[i])
        x = self.norm(x)
        return x if hidden is None else x.masked_fill(hidden, 0)

    def matrices(self) -> list[tuple[str, Tensor]]:
        """What there is to look at in each layer after a forward pass, as ``layer_0`` for the method's metric M and
        ``layer_0/name`` for others; for pictures."""
        return layer_matrices(self.attentions)

    def get_M_matrices(self) -> list[tuple[str, Tensor]]:
        """Each layer's full metric (D, D), averaged over the last batch, each row's final prefix; for pictures.

        Empty for attention without one.
        """
        return [(name, matrix) for name, matrix in self.matrices() if "/" not in name]

    def auxiliary_losses(self) -> dict[str, tuple[Tensor, float]]:
        """Terms that the attention adds to the loss, by name: the sum over layers, and its weight."""
        return summed_losses(self.attentions)

    def get_kl_divergence(self) -> Tensor:
        """The generators' KL term, summed; zero for every ``off_diag_mode`` but bayesian."""
        found = self.auxiliary_losses().get("kl")
        return next(self.parameters()).new_zeros(()) if found is None else found[0]


def sinusoids(positions: Tensor, d_model: int) -> Tensor:
    r"""Sine and cosine of :math:`p / 10000^{2k/D}`, interleaved: positions (...) -> (..., D), float32."""
    rates = torch.exp(
        torch.arange(0, d_model, 2, device=positions.device, dtype=torch.float32) * (-math.log(10_000.0) / d_model)
    )
    angles = positions.unsqueeze(-1).float() * rates
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)[..., :d_model]


class LanguageModel(nn.Module):
    """Token embedding, positions, decoder and head.

    Args:
        vocab_size: number of tokens V.
        d_model, n_heads, d_ff, n_layers: as in ``Decoder``.
        max_len: with learned positions the longest sequence; sinusoidal ones go on past it.
        positions: ``sinusoidal`` or ``learned``.
        tie_embeddings: use the token embedding as the head's weight.
        options: further options of ``Decoder``.

    Raises:
        ZooError: for a value out of range, a token that isn't in the vocabulary, or too long an input.
    """

    position_table: Tensor

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        n_heads: int,
        d_ff: int,
        n_layers: int,
        max_len: int = 1024,
        positions: str = "sinusoidal",
        tie_embeddings: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        for name, value in (("vocab_size", vocab_size), ("max_len", max_len)):
            if value < 1:
                raise ZooError(f"{name}: got {value}; must be at least 1")
        if positions not in ("sinusoidal", "learned"):
            raise ZooError(f"positions: got {positions!r}; choose sinusoidal or learned")
        self.vocab_size, self.d_model, self.max_len, self.positions = vocab_size, d_model, max_len, positions
        self.decoder = Decoder(d_model, n_heads, d_ff, n_layers, **options)
        self.has_positions = self.decoder.attention.stack.positions
        if positions == "learned" and not self.has_positions:
            raise ZooError(
                f"positions: got learned with attention {self.decoder.attention.name}, which brings its own; leave it "
                "at sinusoidal, which is then not used either"
            )
        self.embedding = nn.Embedding(vocab_size, d_model)
        # With this spread, times sqrt(D) on the way in, inputs and (tied) logits both start at unit scale.
        nn.init.normal_(self.embedding.weight, std=d_model**-0.5)
        if positions == "learned":
            self.position_embedding = nn.Embedding(max_len, d_model)
            nn.init.normal_(self.position_embedding.weight, std=0.02)
        else:
            self.register_buffer("position_table", sinusoids(torch.arange(max_len), d_model), persistent=False)
        self.dropout = nn.Dropout(options.get("dropout", 0.1))
        self.head = nn.Linear(d_model, vocab_size, bias=False)
        if tie_embeddings:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, padding_mask: Tensor | None = None, cache: DecoderCache | None = None) -> Tensor:
        """Logits of the next token at every position: tokens (B, T) -> (B, T, V).

        Args:
            tokens: token numbers; at padding any valid ones.
            padding_mask: (B, T), True or non-zero at real tokens. Positions count real tokens, so padding on the left
                and on the right give the same logits.
            cache: what earlier calls have seen; tokens are then the new ones only.
        """
        return self.head(self.hidden_states(tokens, padding_mask, cache))

    def hidden_states(
        self, tokens: Tensor, padding_mask: Tensor | None = None, cache: DecoderCache | None = None
    ) -> Tensor:
        """The decoder's outputs before the head: tokens (B, T) -> (B, T, D)."""
        if tokens.dim() != 2:
            raise ZooError(f"tokens: got shape {tuple(tokens.shape)}; expected (batch, tokens)")
        x = self.embedding(tokens) * math.sqrt(self.d_model)
        if self.has_positions:
            x = x + self._positions(tokens, padding_mask, cache).to(x.dtype)
        return self.decoder(self.dropout(x), padding_mask, cache)

    def _positions(self, tokens: Tensor, padding_mask: Tensor | None, cache: DecoderCache | None) -> Tensor:
        start: int | Tensor = 0
        if cache is not None:
            real = cache.layers[0].visible_keys
            start = cache.length if real is None else real.sum(dim=1, keepdim=True)
        T = tokens.shape[1]
        if padding_mask is None and isinstance(start, int):
            self._check_length(start + T)
            if self.positions == "learned":
                return self.position_embedding.weight[start : start + T]
            if start + T <= self.max_len:
                return self.position_table[start : start + T]
            return sinusoids(torch.arange(start, start + T, device=tokens.device), self.d_model)
        steps = torch.ones_like(tokens) if padding_mask is None else padding_mask.bool().long()
        places = (start + steps.cumsum(dim=1) - 1).clamp(min=0)  # (B, T)
        if self.positions == "learned":
            self._check_length(int(places.max()) + 1)
            return self.position_embedding(places)
        return sinusoids(places, self.d_model)

    def _check_length(self, length: int) -> None:
        if self.positions == "learned" and length > self.max_len:
            raise ZooError(
                f"tokens: got {length} positions; learned positions end at max_len {self.max_len}, so give less text, "
                "ask for fewer new tokens, or train with positions: sinusoidal"
            )

    # ------------------------------------------------------------------ generation

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int = 100,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        stop: Sequence[Sequence[int]] = (),
    ) -> list[list[int]]:
        """Continue prompts of any lengths, all at once.

        Args:
            prompts: token numbers, at least one a prompt.
            max_new_tokens: how many tokens to add to each at the most.
            temperature: divides the logits; 0 takes the likeliest token.
            top_k: sample among the k likeliest tokens only.
            top_p: sample among the likeliest tokens that hold this much probability only.
            seed: makes the result repeatable.
            stop: token sequences; a continuation ends with the first it meets.

        Returns:
            The new tokens of each prompt.

        Raises:
            ZooError: for a value out of range, or positions that end too early.
        """
        continuations: list[list[int]] = [[] for _ in prompts]
        for step in self.stream(prompts, max_new_tokens, temperature, top_k, top_p, seed, stop):
            for row, token in zip(continuations, step, strict=True):
                if token is not None:
                    row.append(token)
        return continuations

    @torch.no_grad()
    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int = 100,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        stop: Sequence[Sequence[int]] = (),
    ) -> Iterator[list[int | None]]:
        """As ``generate``, one step at a time: each step gives a token a prompt, None where it has ended."""
        self._check_request(prompts, max_new_tokens, temperature, top_k, top_p, stop)
        if seed is not None and not -(1 << 63) <= seed < 1 << 63:
            raise ZooError(f"seed: got {seed}; it must fit 64 bits")
        device = self.embedding.weight.device
        longest = max(len(prompt) for prompt in prompts)
        self._check_length(longest + max_new_tokens)
        tokens = torch.zeros(len(prompts), longest, dtype=torch.long, device=device)
        real = torch.zeros_like(tokens, dtype=torch.bool)
        for i, prompt in enumerate(prompts):  # padded on the left: every row's next token then has the same place
            tokens[i, longest - len(prompt) :] = torch.tensor(prompt, device=device)
            real[i, longest - len(prompt) :] = True
        padding_mask = None if bool(real.all()) else real

        random = torch.Generator(device=device)
        random.manual_seed(seed) if seed is not None else random.seed()
        cache = DecoderCache(self.decoder, longest + max_new_tokens)
        tails: list[list[int]] = [[] for _ in prompts]
        running = [True] * len(prompts)
        was_training = self.training
        if was_training:
            self.eval()
        try:
            for _ in range(max_new_tokens):
                logits = self.head(self.hidden_states(tokens, padding_mask, cache)[:, -1])  # (B, V)
                tokens = choose_tokens(logits, temperature, top_k, top_p, random).unsqueeze(-1)
                padding_mask = None
                step: list[int | None] = []
                for i, token in enumerate(tokens.squeeze(-1).tolist()):
                    step.append(token if running[i] else None)
                    tails[i].append(token)
                    running[i] = running[i] and not any(tails[i][-len(end) :] == list(end) for end in stop)
                yield step
                if not any(running):
                    return
        finally:
            if was_training:
                self.train()

    def _check_request(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        temperature: float,
        top_k: int | None,
        top_p: float | None,
        stop: Sequence[Sequence[int]],
    ) -> None:
        if not prompts:
            raise ZooError("prompts: got none; give at least one")
        for i, prompt in enumerate(prompts):
            if not len(prompt):
                raise ZooError(f"prompts: number {i} is empty; give each at least one token")
            if min(prompt) < 0 or max(prompt) >= self.vocab_size:
                raise ZooError(
                    f"prompts: number {i} has token {max(prompt) if min(prompt) >= 0 else min(prompt)}; tokens lie in "
                    f"0..{self.vocab_size - 1}, so encode it with this model's tokenizer"
                )
        check_sampling(max_new_tokens, temperature, top_k, top_p)
        if any(not len(end) for end in stop):
            raise ZooError("stop: got an empty sequence; every stop needs at least one token")


def check_sampling(max_new_tokens: int, temperature: float, top_k: int | None, top_p: float | None) -> None:
    """Raise ZooError, by name, for a setting of generation that is out of range."""
    if max_new_tokens < 0:
        raise ZooError(f"max_new_tokens: got {max_new_tokens}; must be 0 or more")
    if not (temperature >= 0 and math.isfinite(temperature)):
        raise ZooError(f"temperature: got {temperature}; must be 0 (take the likeliest) or a positive number")
    if top_k is not None and top_k < 1:
        raise ZooError(f"top_k: got {top_k}; must be at least 1, or left out")
    if top_p is not None and not 0 < top_p <= 1:
        raise ZooError(f"top_p: got {top_p}; must lie in (0, 1], or be left out")


def choose_tokens(
    logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, random: torch.Generator
) -> Tensor:
    """Next tokens (B,) from logits (B, V)."""
    if temperature == 0:
        return logits.argmax(dim=-1)
    logits = logits.float()
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / temperature  # no overflow, however cold
    if top_k is not None:
        lowest = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < lowest, float("-inf"))
    if top_p is not None:
        ordered, order = logits.softmax(dim=-1).sort(dim=-1, descending=True)
        beyond = ordered.cumsum(dim=-1) - ordered >= top_p  # the first token stays in any case
        logits = logits.masked_fill(beyond.scatter(-1, order, beyond), float("-inf"))
    return torch.multinomial(F.softmax(logits, dim=-1), 1, generator=random).squeeze(-1)
