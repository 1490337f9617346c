"""The language family's task."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, ClassVar, TypeAlias, Unpack, cast

import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.export import Dim
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities import dim_zero_cat

from zoo.attention.base import Attention
from zoo.attention.damcha import DamchaAttention
from zoo.attention.damcha.method import OPTIONS, SWITCHES, chosen_attention, reset_options, switches_in
from zoo.checkpoint.identity import digest
from zoo.checkpoint.transfer import TensorTransfer
from zoo.errors import ZooError
from zoo.models.decoder import LanguageModel, check_sampling
from zoo.options import plain_options, weight_options
from zoo.tasks.base import ExampleInputs
from zoo.tasks.language_carry import adapt_text
from zoo.tasks.layers import layer_depths
from zoo.tasks.pretrained import Pretrained
from zoo.tasks.scores import Ratio, ScoredTask, full_precision
from zoo.tasks.settings import defaults_of, plain
from zoo.tasks.start import StartOptions
from zoo.tokenizer import NO_TARGET, TextTokenizer, Tokenizer, tokenizer_from_identity


class CrossEntropy(Ratio):
    """Mean cross-entropy of a token, in nats."""

    higher_is_better = False

    def update(self, nats: Tensor, n_tokens: Tensor) -> None:
        """Add the summed cross-entropy of some tokens, in nats, and their number."""
        super().update(nats, n_tokens)


class Perplexity(CrossEntropy):
    """The exponential of the mean cross-entropy. (torchmetrics' takes a logarithm of a softmax, which may be zero.)"""

    def compute(self) -> Tensor:
        return super().compute().exp()


class BitsPerByte(Ratio):
    r"""Cross-entropy in bits for each byte of text: :math:`-\sum \log_2 p(token) / \sum bytes(token)`.

    Unlike perplexity it doesn't depend on the tokenizer. The end of a text costs bits and has no bytes.
    """

    higher_is_better = False
    nothing = "no byte of text"

    def update(self, nats: Tensor, n_bytes: Tensor) -> None:
        """Add the summed cross-entropy of some tokens, in nats, and the number of bytes they stand for."""
        super().update(nats, n_bytes)

    def compute(self) -> Tensor:
        return super().compute() / math.log(2)


class TokenAccuracy(Ratio):
    """The share of the targets that are the likeliest token."""

    higher_is_better = True

    def update(self, hits: Tensor, n_tokens: Tensor) -> None:
        """Add the number of targets that were the likeliest token, and the number of all."""
        super().update(hits, n_tokens)


class ExactMatch(Ratio):
    """The share of the rows whose targets were all right."""

    higher_is_better = True

    def update(self, whole: Tensor, n_rows: Tensor) -> None:
        """Add the number of rows that were right as a whole, and the number of all."""
        super().update(whole, n_rows)


class RowQuantile(Metric):
    """A quantile of the rows' negative log-likelihoods, in nats; between two rows by the straight line through them.

    Args:
        q: which, from 0 to 1.
    """

    full_state_update = False
    higher_is_better = False
    rows: list[Tensor]

    def __init__(self, q: float) -> None:
        super().__init__()
        self.q = q
        self.add_state("rows", [], dist_reduce_fx="cat")

    def update(self, row_nats: Tensor) -> None:
        """Add rows (B,)."""
        self.rows.append(row_nats.detach())

    def compute(self) -> Tensor:
        return dim_zero_cat(self.rows).cpu().double().quantile(self.q).float().to(self.device)


class RowMean(Ratio):
    """The mean of the rows' negative log-likelihoods, in nats."""

    higher_is_better = False

    def update(self, row_nats: Tensor, n_rows: Tensor) -> None:
        """Add rows (B,), and their number."""
        super().update(row_nats.sum(), n_rows)


def metrics_for(prefix: str, of_text: bool = True) -> MetricCollection:
    """The figures of tokens; tokens that aren't text have no bytes."""
    metrics: dict[str, Any] = {"loss": CrossEntropy()}
    if of_text:
        metrics |= {"perplexity": Perplexity(), "bits_per_byte": BitsPerByte()}
    return MetricCollection(metrics, prefix=prefix, compute_groups=False)


def answer_metrics_for(prefix: str, of_pairs: bool = False) -> MetricCollection:
    """The figures of rows of which some targets count; of pairs of texts also the likelihoods of whole targets."""
    metrics: dict[str, Any] = {"accuracy": TokenAccuracy(), "exact_match": ExactMatch()}
    if of_pairs:
        quartiles = {"nll_q1": 0.25, "nll_median": 0.5, "nll_q3": 0.75}
        metrics |= {"nll": RowMean()} | {name: RowQuantile(q) for name, q in quartiles.items()}
    return MetricCollection(metrics, prefix=prefix, compute_groups=False)


Batch: TypeAlias = Tensor | Mapping[str, Any]


_STACK = ("d_model", "n_heads", "d_ff", "n_layers", "norm_first", "positions", "max_len", "tie_embeddings")
_SEEN = str.maketrans(
    {" ": "\N{MIDDLE DOT}", "\n": "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}", "\t": "\N{RIGHTWARDS ARROW}"}
)
# the method's own names for what attention is, and those of our additions; kl_weight is read on its own
_METHOD = (*SWITCHES, *(name for name in OPTIONS if name != "kl_weight"))


class LanguageModelTask(ScoredTask):
    r"""Train a causal language model with any attention of the zoo; DAMCHA if nothing is said.

    A batch is token numbers (B, T + 1), all but the last of which are inputs and all but the first targets; or, where
    only some targets count, a dict with ``inputs`` (B, T), ``targets`` (B, T), -100 where none counts, and where rows
    are padded ``padding_mask`` (B, T), true at real tokens. The loss is the mean over the targets that count:

    .. math:: L = -\frac{1}{|C|} \sum_{(b, t) \in C} \log p(y_{b,t} \mid x_{b,1..t})

    Logs ``train/loss``, and for the held-out splits ``loss`` and, of text, ``perplexity`` and ``bits_per_byte``. Where
    only some targets count also ``accuracy`` (of tokens) and ``exact_match``: the share of the rows whose counted
    targets are all the likeliest token, given the right ones before, which is the share whose whole answer comes out
    of greedy generation. Of pairs of texts the test adds ``nll``, the mean negative log-likelihood of a whole target in
    nats, its quartiles ``nll_q1``, ``nll_median`` and ``nll_q3``, and ``generated_match``, the share of right answers
    among those that were generated, token by token.

    Args:
        d_model: model width D.
        n_heads: number of heads; divides d_model.
        d_ff: width of the feed-forward layers.
        n_layers: number of layers.
        dropout: dropout probability, everywhere.
        attention: name of the attention; --model.attention.help lists them. It takes the place of use_M and the
            method's other switches below.
        attention_options: its options by name; --model.attention.help NAME describes them.
        use_M: False gives ordinary attention (then use_mlp and share_mlp must be False too).
        use_mlp: generate the metric from the input; False with use_M learns one matrix a layer (static).
        share_mlp: one generator for the stack; False gives each layer its own.
        norm_first: pre-norm; False is the published post-norm.
        mlp_hidden: hidden widths of the generator; its last layer has (last width) x D x D weights.
        positions: sinusoidal (no longest length) or learned.
        max_len: longest sequence with learned positions.
        tie_embeddings: use the token embedding as the head's weight.
        diag_scale: factor of the metric's diagonal blocks.
        off_diag_scale: factor of its other blocks.
        off_diag_mode: where off-diagonal blocks come from: mlp, linear_comb, bayesian or separate_B.
        off_diag_alpha_init: starting spread of the coefficients of linear_comb and bayesian.
        use_layer_bias: add a low-rank bias to each layer's metric.
        layer_bias_rank: its rank.
        compact_rank: generate a metric of this rank instead of a full one; 0 is full rank.
        free_M: take the generator's raw output, whatever off_diag_mode says.
        context_stride: s > 1 gives s tokens in a row the metric of the first of them, which saves time and memory; an
            addition of this zoo. 1 is the method.
        chunk_size: how many metrics exist at once; less memory, more time, the same numbers. Left out: what is faster.
        identity_start: every head's metric starts as the identity; an addition of this zoo, not the method's.
        generator_lr_factor: factor of the learning rate for the generator's parameters; an addition of this zoo, not
            the method's.
        key_projection: keys are slices of a learned projection of a layer's input, not of the input itself; an addition
            of this zoo, not the method's.
        use_multihead_M: accepted for compatibility with the method's command line; changes nothing.
        kl_weight: weight of the KL term of off_diag_mode bayesian in the loss.
        lr: AdamW's learning rate at its height.
        weight_decay: decoupled decay, on matrices only.
        beta2: AdamW's second decay rate.
        warmup: share of the run's steps in which the learning rate rises to lr; then it falls along a cosine.
        min_lr: share of lr that is left at the end.
        max_new_tokens: for samples and predict: tokens to add to a prompt at the most.
        temperature: for samples and predict: divides the logits; 0 takes the likeliest token.
        top_k: for samples and predict: choose among the k likeliest tokens only.
        top_p: for samples and predict: choose among the likeliest tokens with this much probability only.
        stop: for samples and predict: texts that end a continuation.
        sample_seed: for samples and predict: makes them repeatable.
        start: what the run starts from, and which part of the network is trained, as of every task.
    """

    predictions_suffix: ClassVar[str] = ".jsonl"
    network: LanguageModel
    bytes_of_token: Tensor
    network_settings: ClassVar[tuple[str, ...]] = (
        *(*_STACK, "attention", "attention_options", *SWITCHES),
        *("off_diag_mode", "use_layer_bias", "layer_bias_rank", "compact_rank", "free_M", "context_stride"),
        "key_projection",
    )
    free_settings: ClassVar[tuple[str, ...]] = (
        *ScoredTask.free_settings,
        *("chunk_size", "off_diag_alpha_init", "identity_start", "use_multihead_M"),
        *("max_new_tokens", "temperature", "top_k", "top_p", "stop", "sample_seed"),
    )
    mismatch_advice = (
        "To use this text with the checkpoint's vocabulary, set data.tokenizer to the checkpoint file (for sequences, "
        "data.source and its options as it has them); to train on it anew, leave --ckpt_path out"
    )
    pretrained_advice = (
        "To use its vocabulary, set data.tokenizer to it as well; to carry its weights over to this one, token by "
        "token, set model.on_mismatch to adapt"
    )

    def __init__(
        self,
        d_model: int = 128,
        n_heads: int = 4,
        d_ff: int = 512,
        n_layers: int = 4,
        dropout: float = 0.1,
        attention: str | None = None,
        attention_options: dict[str, Any] | None = None,
        use_M: bool = True,
        use_mlp: bool = True,
        share_mlp: bool = True,
        norm_first: bool = False,
        mlp_hidden: Sequence[int] = (256, 512),
        positions: str = "sinusoidal",
        max_len: int = 1024,
        tie_embeddings: bool = False,
        diag_scale: float = 1.0,
        off_diag_scale: float = 1.0,
        off_diag_mode: str = "mlp",
        off_diag_alpha_init: float = 0.1,
        use_layer_bias: bool = False,
        layer_bias_rank: int = 16,
        compact_rank: int = 0,
        free_M: bool = False,
        context_stride: int = 1,
        chunk_size: int | None = None,
        identity_start: bool = False,
        generator_lr_factor: float = 1.0,
        key_projection: bool = False,
        use_multihead_M: bool = True,
        kl_weight: float = 1e-4,
        lr: float = 3e-3,
        weight_decay: float = 0.1,
        beta2: float = 0.95,
        warmup: float = 0.05,
        min_lr: float = 0.0,
        max_new_tokens: int = 200,
        temperature: float = 0.8,
        top_k: int | None = None,
        top_p: float | None = 0.95,
        stop: Sequence[str] = (),
        sample_seed: int = 0,
        **start: Unpack[StartOptions],
    ) -> None:
        super().__init__(lr, weight_decay, beta2, warmup, min_lr, **start)
        check_sampling(max_new_tokens, temperature, top_k, top_p)
        if any(not text for text in stop):
            raise ZooError("stop: got an empty text; every stop needs at least one character")
        self._make_network(vocab_size=1, device="meta")  # a setting without meaning is refused before any data is read
        if attention not in (None, DamchaAttention.name):
            defaults, h = defaults_of(LanguageModelTask), plain(self.settings)
            if unread := [name for name in _METHOD if h[name] != defaults[name]]:
                rank_zero_info(f"model.attention: {attention} takes the place of {', '.join(unread)}, which isn't read")

    def _make_network(self, vocab_size: int, device: str | None = None) -> LanguageModel:
        h = self.settings
        passed = {name: h[name] for name in (*_STACK, "dropout", "attention", "attention_options")}
        passed |= self._switches(h)
        if h["attention"] in (None, DamchaAttention.name) and h["kl_weight"] != defaults_of(type(self))["kl_weight"]:
            passed["kl_weight"] = h["kl_weight"]
        with nullcontext() if device is None else torch.device(device):
            return LanguageModel(vocab_size=vocab_size, **passed)

    @staticmethod
    def _switches(settings: Mapping[str, Any]) -> dict[str, Any]:
        """The method's switches that count: all of them where no attention is named; beside ``damcha`` those that
        aren't as they are by default; beside another none."""
        if settings["attention"] is None:
            return {name: settings[name] for name in _METHOD}
        if settings["attention"] != DamchaAttention.name:
            return {}
        defaults, which = defaults_of(LanguageModelTask), set(_METHOD) - {"use_M", "use_mlp"}
        return {name: settings[name] for name in sorted(which) if plain(settings[name]) != defaults[name]}

    @classmethod
    def _attention(cls, settings: Mapping[str, Any]) -> tuple[type[Attention], Any]:
        """The attention that settings mean, and its options."""
        named, options, n_layers = (settings[name] for name in ("attention", "attention_options", "n_layers"))
        return chosen_attention(named, options, switches_in(cls._switches(settings)), "text", n_layers)

    @classmethod
    def kept_of(cls, settings: Mapping[str, Any]) -> dict[str, Any]:
        full = defaults_of(cls) | dict(settings)
        options = plain_options(cls._attention(full)[1])
        kept = {name: value for name, value in super().kept_of(settings).items() if name not in _METHOD}
        return kept | {name: value for name, value in options.items() if name not in cls.free_settings}

    @classmethod
    def network_of(cls, settings: Mapping[str, Any]) -> dict[str, Any]:
        full = defaults_of(cls) | dict(settings)
        kind, options = cls._attention(full)
        found = {name: full[name] for name in _STACK}
        if kind.stack.norm_first is not None:
            found["norm_first"] = kind.stack.norm_first
        return found | {"attention": kind.name, "attention_options": weight_options(options)}

    def build(self, identity: Mapping[str, Any]) -> None:
        self.tokenizer: Tokenizer = tokenizer_from_identity(identity)
        self.network = self._make_network(self.tokenizer.vocab_size)
        sizes = torch.tensor([len(piece) for piece in self.tokenizer.token_bytes])
        self.register_buffer("bytes_of_token", sizes, persistent=False)
        self.of_text = isinstance(self.tokenizer, TextTokenizer)
        self.scores = torch.nn.ModuleDict({split: metrics_for(f"{split}/", self.of_text) for split in ("val", "test")})
        self.answer_scores = torch.nn.ModuleDict(
            {split: answer_metrics_for(f"{split}/", self.of_text and split == "test") for split in ("val", "test")}
        )
        self.generated_scores = MetricCollection({"generated_match": ExactMatch()}, prefix="test/")

    def example_inputs(self) -> ExampleInputs:
        random, longest = torch.Generator().manual_seed(0), self.network.max_len
        shapes = [(2, min(8, longest)), (1, 1), (3, min(24, longest))]
        tokens = [torch.randint(self.network.vocab_size, shape, generator=random) for shape in shapes]
        return ExampleInputs("tokens", tokens, {0: Dim("batch"), 1: Dim("length", max=longest)})

    def inputs_of(self, batch: Tensor) -> Tensor:
        return batch[:, :-1]

    def token_names(self, inputs: Tensor) -> list[str]:
        """Each token's text, with blanks and the ends of lines to be seen."""
        end = self.tokenizer.end
        return [
            "<end>" if token == end else self.tokenizer.decode([token]).translate(_SEEN) for token in inputs[0].tolist()
        ]

    def with_attention_options(self, options: Mapping[str, Any]) -> dict[str, Any] | None:
        settings = plain(self.settings)
        return reset_options(settings, settings, self._attention(settings)[0], options)

    def graph_properties(self) -> dict[str, str]:
        return {"tokens_digest": digest({"tokens": self.data_identity["tokens"]})}

    @property
    def hub_pipeline(self) -> str:
        return "text-generation"

    def depths(self) -> dict[str, int]:
        """What a stack shares belongs to the stem, whose output it reads; a tied embedding belongs to the head."""
        stem = (
            "position_embedding.",
            f"decoder.{self.network.decoder.attention.shared_name}.",
            *(() if self.settings["tie_embeddings"] else ("embedding.",)),
        )
        return layer_depths(self.network, "decoder.layers", stem)

    def heads(self) -> tuple[str, ...]:
        return ("embedding.",) if self.settings["tie_embeddings"] else ("head.",)

    def carry_over(self, source: Pretrained) -> tuple[dict[str, Tensor], list[TensorTransfer]]:
        return adapt_text(self.network, source.weights(), tokenizer_from_identity(source.identity), self.tokenizer)

    def forward(self, tokens: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Logits (B, T, V) of the next token at every position of tokens (B, T)."""
        return self.network(tokens, padding_mask)

    # ------------------------------------------------------------------ steps

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        inputs, targets, padding_mask = _parts(batch)
        logits = full_precision(self(inputs, padding_mask))
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=NO_TARGET)
        self.log("train/loss", loss, prog_bar=True)
        return self.with_auxiliary(loss, self.network.decoder.auxiliary_losses())

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate(batch, "val")

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate(batch, "test")
        if isinstance(batch, Mapping) and "generate" in batch:
            self._generate_answers(batch)

    def _evaluate(self, batch: Batch, split: str) -> None:
        inputs, targets, padding_mask = _parts(batch)
        logits = full_precision(self(inputs, padding_mask))
        nats = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none", ignore_index=NO_TARGET)
        counted = targets != NO_TARGET
        n_tokens = counted.sum()
        n_bytes = (self.bytes_of_token[targets.clamp(min=0)] * counted).sum()
        self.score(
            split,
            shown="bits_per_byte" if self.of_text else "loss",
            nats=nats.sum(),
            n_tokens=n_tokens,
            n_bytes=n_bytes,
        )
        if isinstance(batch, Mapping):
            hits = (logits.argmax(dim=-1) == targets) & counted
            self.update_and_log(
                cast(MetricCollection, self.answer_scores[split]),
                f"{split}/accuracy",
                hits=hits.sum(),
                n_tokens=n_tokens,
                whole=(hits == counted).all(dim=1).sum(),
                n_rows=torch.ones_like(targets[:, 0]).sum(),
                row_nats=nats.view_as(targets).sum(dim=1),
            )

    def _generate_answers(self, batch: Mapping[str, Tensor]) -> None:
        """Score the answers that greedy generation gives to some of a batch's rows, those that ``generate`` says."""
        rows = batch["generate"].nonzero().flatten().tolist()
        counted = batch["targets"] != NO_TARGET
        answers = [batch["targets"][i][counted[i]].tolist() for i in rows]
        prompts = [batch["inputs"][i, : int(counted[i].int().argmax()) + 1].tolist() for i in rows]
        found = self._greedy(prompts, max(map(len, answers))) if rows else []
        whole = sum(a == b for a, b in zip(found, answers, strict=True))
        counts = {"whole": torch.tensor(whole), "n_rows": torch.tensor(len(rows))}
        self.update_and_log(self.generated_scores, "", **{name: n.to(self.device) for name, n in counts.items()})

    def _greedy(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
        """The likeliest next tokens of prompts, up to the end of a text, that with it.

        Prompts of other lengths than the longest may have no room for as many tokens with learned positions.
        """
        longest = max(map(len, prompts))
        if self.network.positions == "learned" and longest + max_new_tokens > self.network.max_len:
            if len(prompts) > 1:  # one at a time there is room for each
                return [self._greedy([prompt], max_new_tokens)[0] for prompt in prompts]
            max_new_tokens = max(0, self.network.max_len - longest)
        stop = [] if self.tokenizer.end is None else [[self.tokenizer.end]]
        return self.network.generate(prompts, max_new_tokens, temperature=0, stop=stop)

    def predict_step(self, batch: Sequence[str] | Mapping[str, Any], batch_idx: int) -> list[dict[str, Any]]:
        """A continuation for each prompt; the greedy one for each source; the likeliest answers in each sequence."""
        if isinstance(batch, Mapping):
            return self._predict_targets(batch) if "prompts" in batch else self._predict_answers(batch)
        continuations = self.generate(batch, seed=self.settings["sample_seed"] + batch_idx)
        return [
            {"prompt": prompt, "continuation": continuation}
            for prompt, continuation in zip(batch, continuations, strict=True)
        ]

    def _predict_targets(self, batch: Mapping[str, Any]) -> list[dict[str, Any]]:
        """What greedy generation makes of sources, beside the targets where they are known."""
        found = self._greedy(batch["prompts"], self.settings["max_new_tokens"])
        rows = []
        for i, (source, numbers) in enumerate(zip(batch["source"], found, strict=True)):
            ended = numbers[-1:] == [self.tokenizer.end]
            row = {"source": source, "output": self.tokenizer.decode(numbers)}
            if "target" in batch:
                target = batch["target"][i]
                row |= {"target": target, "exact_match": ended and row["output"] == target}
            rows.append(row)
        return rows

    def _predict_answers(self, batch: Mapping[str, Tensor]) -> list[dict[str, Any]]:
        """The likeliest tokens at the places that count, beside the right ones."""
        inputs, targets, padding_mask = _parts(batch)
        likeliest, counted = self(inputs, padding_mask).argmax(dim=-1), targets != NO_TARGET
        rows = []
        for i in range(len(inputs)):
            texts = (inputs[i], targets[i][counted[i]], likeliest[i][counted[i]])
            sequence, answer, output = (self.tokenizer.decode(numbers.tolist()).strip() for numbers in texts)
            rows.append({"sequence": sequence, "answer": answer, "output": output, "exact_match": answer == output})
        return rows

    # ------------------------------------------------------------------ text

    def encode_prompt(self, prompt: str) -> list[int]:
        """Tokens of a prompt; an empty one starts a new text."""
        try:
            prompt.encode()
        except UnicodeEncodeError:
            raise ZooError(f"prompt: got {prompt!r}, which holds bytes that are no UTF-8; convert it") from None
        numbers = self.tokenizer.encode(prompt)
        if not numbers and self.tokenizer.end is None:
            raise ZooError(
                f"prompt: got an empty one, but this model reads symbols; give some, such as {self.tokenizer.tokens[0]}"
            )
        return numbers or [cast(int, self.tokenizer.end)]

    def generate(self, prompts: Sequence[str], **settings: Any) -> list[str]:
        """Continue texts, all at once.

        Args:
            prompts: texts of any lengths; an empty one starts a new text.
            settings: ``max_new_tokens``, ``temperature``, ``top_k``, ``top_p``, ``stop`` and ``seed``, where they
                differ from this task's own.

        Returns:
            The continuations. Each ends at the end of a text, before a ``stop`` text, or after ``max_new_tokens``.

        Raises:
            ZooError: for a setting out of range, or learned positions that end too early.
        """
        texts = ["" for _ in prompts]
        for row, piece in self.stream(prompts, **settings):
            texts[row] += piece
        return texts

    def stream(self, prompts: Sequence[str], **settings: Any) -> Iterator[tuple[int, str]]:
        """As ``generate``, in pieces (number of the prompt, text) as they are made."""
        if not self.is_built:
            raise ZooError("generate: this task has no network yet; load a checkpoint with load_from_checkpoint")
        own = {name: self.settings[name] for name in ("max_new_tokens", "temperature", "top_k", "top_p", "stop")}
        own["seed"] = self.settings["sample_seed"]
        if isinstance(prompts, str):
            raise ZooError("prompts: got one text; give a list of texts")
        if unknown := set(settings) - set(own):
            raise ZooError(f"generate: got {', '.join(sorted(unknown))}; it knows {', '.join(own)}")
        chosen = {**own, **settings}
        stops: Sequence[str] = chosen.pop("stop")
        if isinstance(stops, str) or any(not stop for stop in stops):
            raise ZooError(f"stop: got {stops!r}; give a list of texts, none of them empty")
        rows = [_Row(self.tokenizer, stops) for _ in prompts]
        encoded = [self.encode_prompt(prompt) for prompt in prompts]
        ends = [] if self.tokenizer.end is None else [[self.tokenizer.end]]
        for step in self.network.stream(encoded, stop=ends, **chosen):
            for i, (row, token) in enumerate(zip(rows, step, strict=True)):
                if token is not None and (piece := row.push(token)):
                    yield i, piece
            if all(row.ended for row in rows):
                break
        for i, row in enumerate(rows):
            if piece := row.finish():
                yield i, piece


def _parts(batch: Batch) -> tuple[Tensor, Tensor, Tensor | None]:
    """Inputs (B, T), targets (B, T), and which inputs are real (B, T); None where all are."""
    if isinstance(batch, Tensor):
        return batch[:, :-1], batch[:, 1:], None
    return batch["inputs"], batch["targets"], batch.get("padding_mask")


class _Row:
    """One continuation: whole characters out of token bytes, cut before the first stop text."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self.decode, self.stops = tokenizer.incremental_decoder(), stops
        self.held, self.ended = "", False

    def push(self, token: int) -> str:
        return "" if self.ended else self._release(self.decode(token, False))

    def finish(self) -> str:
        if self.ended:
            return ""
        text = self._release(self.decode(None, True))
        return text if self.ended else text + self.held

    def _release(self, piece: str) -> str:
        self.held += piece
        places = [place for stop in self.stops if (place := self.held.find(stop)) >= 0]
        if places:
            self.ended = True
            return self.held[: min(places)]
        # keep back what may be the beginning of a stop text
        keep = max((n for stop in self.stops for n in range(1, len(stop)) if self.held.endswith(stop[:n])), default=0)
        text, self.held = self.held[: len(self.held) - keep], self.held[len(self.held) - keep :]
        return text
