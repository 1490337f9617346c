"""What every attention must do, as checks over a name: run by test_contract.py over all that are registered, and by
test_contract_catches.py over flawed ones, to show that each check catches what it is for."""

import copy
import dataclasses
import importlib
import importlib.util
import io
import itertools
import pickle
import re
from collections.abc import Sequence
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import timm
import torch
import torch.nn.functional as F
from hypothesis import reject
from torch import Tensor, nn

from tests.oracles.compare import LargestTensor, assert_same_with_gradients, gradients, padding, randomized
from zoo.attention import Attention, AuxiliaryLoss, Masks, attention_class
from zoo.attention.stacks import lr_factors
from zoo.errors import ZooError
from zoo.models.decoder import Decoder, DecoderCache, LanguageModel
from zoo.models.vision_transformer import VisionTransformer

H, DH, T = 4, 4, 5
WIDTH = H * DH
KINDS = ("left", "right", "scattered")
VOCABULARY = 23
# Sums in another order, in float64 and of a few dozen terms of order one, differ by less than a hundredth of this.
SAME = {"rtol": 1e-9, "atol": 1e-9}


def layer(
    name: str,
    seed: int = 0,
    dropout: float = 0.0,
    bias: bool = True,
    heads: tuple[int, int] = (H, DH),
    layer_idx: int = 1,
    **options: Any,
) -> Attention:
    """A layer in float64, with noise on every parameter, in its place among three but on its own.

    Args:
        heads: how many, and how wide each is.
    """
    n, width = heads
    torch.manual_seed(seed)
    made = attention_class(name)(n * width, n, layer_idx, 3, dropout, bias, {**small(name), **options})
    return randomized(made, seed).eval()


def small(name: str) -> dict[str, Any]:
    """Options that make a layer small: hidden widths of 4."""
    return {
        item.name: (4,)
        for item in dataclasses.fields(attention_class(name).Options)
        if isinstance(item.default, tuple) and item.default and isinstance(item.default[0], int)
    }


def others(hint: Any, default: Any) -> list[Any]:
    """Values of an option that aren't its default, as far as its type lets one guess."""
    if get_origin(hint) is Literal:
        found = list(get_args(hint))
    elif hint is bool:
        found = [True, False]
    elif hint is int:
        found = [2, 1, 3]
    elif hint is float:
        found = [default / 2, 0.25, 2.0, 7.0]
    elif hint is NoneType:
        found = [None]
    elif get_origin(hint) in (tuple, list, Sequence):
        found = [(3,), (3, 2)]
    else:
        found = [value for part in get_args(hint) for value in others(part, default)]
    return [value for value in found if value != default]


def choices(name: str) -> list[dict[str, Any]]:
    """The defaults, and each option by itself at other values: all where there are few, else one that is taken."""
    kind, found = attention_class(name), [{}]
    hints = get_type_hints(kind.Options)
    for item in dataclasses.fields(kind.Options):
        hint, taken = hints[item.name], []
        if hint is float or get_origin(hint) in (tuple, list, Sequence):
            continue
        for value in others(hint, item.default):
            try:
                kind(WIDTH, H, 1, 3, options={**small(name), item.name: value})
            except ZooError:  # it needs another option beside it
                continue
            taken.append({item.name: value})
        found += taken if hint is bool or get_origin(hint) is Literal else taken[:1]
    return found


def tokens(seed: int = 0, B: int = 2, n: int = T, width: int = WIDTH) -> Tensor:
    return torch.randn(B, n, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def text(seed: int = 0, B: int = 2, n: int = 9) -> Tensor:
    return torch.randint(VOCABULARY, (B, n), generator=torch.Generator().manual_seed(seed))


def network(name: str, seed: int = 0, n_layers: int = 3, **options: Any) -> LanguageModel:
    torch.manual_seed(seed)
    given = {**small(name), **options}
    model = LanguageModel(VOCABULARY, WIDTH, H, 24, n_layers, dropout=0.0, attention=name, attention_options=given)
    return model.double().eval()


def pictures(name: str, **settings: Any) -> VisionTransformer:
    torch.manual_seed(0)
    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": WIDTH, "depth": 2, "num_heads": H, "num_classes": 3}
    return VisionTransformer(**{**sizes, "attention": name, "attention_options": small(name), **settings})


# ---------------------------------------------------------------------- a layer


def check_equations(
    name: str,
    options: dict[str, Any],
    causal: bool,
    kind: str,
    seed: int,
    size: tuple[int, int, int, int] = (2, 4, H, DH),
    bias: bool = True,
    layer_idx: int = 1,
) -> None:
    """Values and gradients are those of the oracle, on both roads."""
    module = f"tests.oracles.attentions.{name}"
    if importlib.util.find_spec(module) is None:
        if attention_class(name).__module__.startswith("zoo."):
            pytest.fail(f"{module} isn't there; write the equations of {name} as loops, in float64")
        pytest.skip(f"{name} is no attention of this package, and has no oracle here")
    oracle = importlib.import_module(module).oracle
    B, n, heads, width = size
    try:
        attention = layer(name, seed, bias=bias, heads=(heads, width), layer_idx=layer_idx, **options)
    except ZooError:  # an attention may want even widths, or another number of heads for these options
        assert size[2:] != (H, DH)
        reject()
    real = padding(B, n, seed, kind)
    x = tokens(seed, B, n, heads * width).requires_grad_()
    masks = Masks(causal, None if kind == "none" else real)
    parameters = dict(attention.named_parameters())
    expected, expected_weights = oracle(parameters, x, real, heads, attention.options, causal, layer_idx)
    wanted = {"x": x, **parameters}
    y, nothing = attention(x, masks)
    assert nothing is None
    assert_same_with_gradients(y, expected, wanted, seed, **SAME)
    explicit, weights = attention(x, masks, need_weights=True)
    assert_same_with_gradients(explicit, expected, wanted, seed, **SAME)
    if expected_weights is not None:
        assert_same_with_gradients(weights, expected_weights, wanted, seed, **SAME)


def check_causal(name: str, options: dict[str, Any]) -> None:
    """No future token changes an earlier output, whatever it holds, and none has a gradient from it."""
    attention, x = layer(name, **options), tokens().requires_grad_()
    for need_weights in (False, True):
        y = attention(x, Masks(causal=True), need_weights=need_weights)[0]
        for t in range(1, T):
            changed = x.detach().clone()
            changed[:, t:] = 50 * tokens(t)[:, t:]
            other = attention(changed, Masks(causal=True), need_weights=need_weights)[0]
            torch.testing.assert_close(other[:, :t], y[:, :t], **SAME)
            assert not gradients(y[:, :t], [x], t)[0][:, t:].any()
        # and it is attention: the last token does see the first
        assert gradients(y[:, -1], [x], 0)[0][:, 0].any()


def check_padding(name: str, options: dict[str, Any], kind: str, causal: bool) -> None:
    """Padding is as if it weren't there, NaN in it included, forward and backward."""
    attention, x, real = layer(name, **options), tokens().requires_grad_(), padding(2, T, 3, kind)
    real[0, -1] = real[1, 0] = True
    filled = x.detach().masked_fill(~real.unsqueeze(-1), float("nan")).requires_grad_()
    for need_weights in (False, True)[: 1 + (kind == "scattered")]:
        y, weights = attention(filled, Masks(causal, real), need_weights=need_weights)
        assert not y[~real].any()
        assert weights is None or not weights.masked_select(~real.view(2, 1, 1, T)).any()
        found = gradients(y, [filled, *attention.parameters()], 0)
        assert all(torch.isfinite(grad).all() for grad in found)
        assert not found[0][~real].any()
        for b in range(2):
            alone = attention(x[b : b + 1, real[b]], Masks(causal), need_weights=need_weights)[0][0]
            torch.testing.assert_close(y[b, real[b]], alone, **SAME)
            here, there = gradients(y[b, real[b]], [filled], 1)[0], gradients(alone, [x], 1)[0]
            torch.testing.assert_close(here, there, **SAME)


def check_blind(name: str, options: dict[str, Any]) -> None:
    """A query that sees nothing mixes to zero, and gradients stay finite; so do rows of padding alone."""
    attention, x = layer(name, bias=False, **options), tokens().requires_grad_()
    hidden = torch.ones(T, T, dtype=torch.bool)
    hidden[2] = False
    real = torch.ones(2, T, dtype=torch.bool)
    real[0] = False
    filled = x.detach().masked_fill(~real.unsqueeze(-1), float("nan")).requires_grad_()
    for need_weights in (False, True):
        y, weights = attention(x, Masks(extra=hidden), need_weights=need_weights)
        assert not y[:, 2].any()
        assert weights is None or not weights[:, :, 2].any()
        for given, masks in (
            (x, Masks(extra=hidden)),
            (x, Masks(extra=torch.zeros(T, T).masked_fill(~hidden, float("-inf")))),
            (filled, Masks(True, real)),
            (filled, Masks(False, real)),
        ):
            out = attention(given, masks, need_weights=need_weights)[0]
            assert torch.isfinite(out).all()
            assert all(torch.isfinite(grad).all() for grad in gradients(out, [given, *attention.parameters()], 0))


def check_masks(name: str) -> None:
    """Masks of any type and shape that hide the same keys give the same output."""
    attention, x = layer(name), tokens()
    seen = torch.rand(T, T, generator=torch.Generator().manual_seed(0)) < 0.6
    added = torch.zeros(T, T, dtype=x.dtype).masked_fill(~seen, float("-inf"))
    expected = attention(x, Masks(extra=seen))[0]
    for mask in (seen.long(), added, seen.expand(2, -1, -1), seen.expand(2, H, -1, -1)):
        torch.testing.assert_close(attention(x, Masks(extra=mask))[0], expected, **SAME)
    both = attention(x, Masks(causal=True, extra=seen))[0]
    torch.testing.assert_close(
        attention(x, Masks(causal=True, extra=seen | torch.ones_like(seen).triu(1)))[0], both, **SAME
    )


def check_cache(name: str, options: dict[str, Any], kind: str, cuts: Sequence[int], seed: int = 1) -> None:
    """Text in pieces gives what text in one gives.

    Args:
        kind: where padding is; ``then none``: on the left of the first piece, and not said afterwards.
    """
    attention, x = layer(name, **options), tokens(seed)
    edges = [0, *sorted(cuts), T]
    real = None if kind == "none" else padding(2, T, seed, "left" if kind == "then none" else kind)
    if real is not None and kind == "then none":
        real[:, edges[1] :] = True
    filled = x if real is None else x.masked_fill(~real.unsqueeze(-1), float("nan"))
    whole = attention(filled, Masks(True, real))[0]
    cache, parts = attention.new_cache(T), []
    for start, end in itertools.pairwise(edges):
        part = None if real is None or (start and kind == "then none") else real[:, start:end]
        parts.append(attention(filled[:, start:end], Masks(True, part), cache=cache)[0])
        assert cache.length == end
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, **SAME)
    with pytest.raises(ZooError, match="cache: got"):
        attention(x[:, :1], Masks(True), cache=cache)


def check_copies(name: str, options: dict[str, Any]) -> None:
    """State dict, through a file of plain tensors, deep copy and pickle give the same layer."""
    attention, x = layer(name, **options), tokens()
    buffer, other = io.BytesIO(), layer(name, seed=1, **options)
    torch.save(attention.state_dict(), buffer)
    buffer.seek(0)
    other.load_state_dict(torch.load(buffer, weights_only=True), strict=True)
    y = attention(x, Masks(True))[0]
    for twin in (other, copy.deepcopy(attention), pickle.loads(pickle.dumps(attention))):
        assert torch.equal(twin(x, Masks(True))[0], y)


def check_low_precision(name: str, options: dict[str, Any]) -> None:
    """float32 is near float64; bfloat16, by autocast and of its own, stays finite and near, gradients too."""
    attention, x = layer(name, **options), tokens()
    precise = attention(x, Masks(True))[0]
    attention, x = attention.float(), x.float().requires_grad_()
    exact = attention(x, Masks(True))[0]
    torch.testing.assert_close(exact.double(), precise, rtol=1e-3, atol=1e-3)  # scores of tens, exponentiated
    with torch.autocast("cpu", torch.bfloat16):
        rough = attention(x, Masks(True))[0]
    # bfloat16 has 8 bits; scores of a few tens, exponentiated, are off by a tenth
    assert (rough.float() - exact).norm() < 0.3 * exact.norm()
    assert all(torch.isfinite(grad).all() for grad in gradients(rough, [x, *attention.parameters()], 0))
    cache, parts = attention.new_cache(T), []
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for start, end in ((0, 3), (3, 4), (4, 5)):
            parts.append(attention(x[:, start:end], Masks(True), cache=cache)[0])
    assert (torch.cat(parts, dim=1).float() - exact).norm() < 0.3 * exact.norm()
    own = attention.bfloat16()(x.bfloat16(), Masks(True))[0]
    assert own.dtype == torch.bfloat16
    assert torch.isfinite(own).all()


def check_options(name: str) -> None:
    """Each option has a meaning that is told; a wrong name or type is refused, saying the nearest or the right one."""
    kind = attention_class(name)
    hints = get_type_hints(kind.Options)
    with pytest.raises(ZooError, match="'no_such_option', which is no option of "):
        kind(WIDTH, H, options={"no_such_option": 1})
    with pytest.raises(ZooError, match="no_such_option"):
        LanguageModel(5, WIDTH, H, 8, 1, attention=name, attention_options={"no_such_option": 1})
    for item in dataclasses.fields(kind.Options):
        assert len(item.metadata["help"]) > 10
        with pytest.raises(ZooError, match=f"do you mean {item.name}?"):
            kind(WIDTH, H, options={f"{item.name}_": 1})
        wrong: list[Any] = [object(), {"a": 1}]
        if hints[item.name] in (int, float):
            wrong += [True, "1"]
        for value in wrong:
            with pytest.raises(ZooError, match=rf"^attention_options\.{item.name}: got .*; must be "):
                kind(WIDTH, H, options={item.name: value})


def check_options_act(name: str) -> None:
    """Every option changes parameters, their learning rates, outputs, losses, matrices or at least the number of
    operations."""
    kind = attention_class(name)
    hints, bases = get_type_hints(kind.Options), [{**small(name), **chosen} for chosen in choices(name)]
    known: dict[int, Any] = {}
    for item in dataclasses.fields(kind.Options):
        tried = False
        for i, base in enumerate(bases):
            if i not in known:
                known[i] = footprint(name, base)
            for value in others(hints[item.name], getattr(kind.Options(**base), item.name)):
                try:
                    changed = footprint(name, {**base, item.name: value})
                except ZooError:  # it doesn't go with this base
                    continue
                tried = tried or is_other(changed, known[i])
                if tried:
                    break
            if tried:
                break
        assert tried, f"option {item.name} of {name} changes nothing, whatever it is; take it out, or use it"
    assert not is_other(footprint(name, bases[0]), footprint(name, bases[0]))


def footprint(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """All that one can see of a stack with these options."""
    torch.manual_seed(0)
    decoder = Decoder(WIDTH, H, 8, 2, 0.0, attention=name, attention_options=options)
    start = {key: tensor.clone() for key, tensor in decoder.state_dict().items()}
    decoder, x = randomized(decoder, 0).eval(), tokens()
    with torch.no_grad(), LargestTensor() as counter:
        y = decoder(x)
    found = {"start": start, "causal": y, "full": decoder.attentions[0](x)[0].detach()}
    found["matrices"], found["operations"] = dict(decoder.matrices()), counter.operations
    found["lr_factors"] = lr_factors(decoder)
    torch.manual_seed(0)
    decoder.train()(x)
    found["losses"] = {key: (value.detach(), weight) for key, (value, weight) in decoder.auxiliary_losses().items()}
    return found


def is_other(one: Any, two: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() != two.keys() or any(is_other(one[key], two[key]) for key in one)
    if isinstance(one, tuple):
        return any(is_other(*pair) for pair in zip(one, two, strict=True))
    return not torch.equal(one, two) if isinstance(one, Tensor) else bool(one != two)


def check_dropout(name: str) -> None:
    """Dropout acts in training, and only there; without it, training is no other function."""
    attention, x = layer(name, dropout=0.5), tokens()
    y = attention(x)[0]
    assert torch.equal(attention(x)[0], y)
    attention.train()
    assert not torch.equal(attention(x)[0], attention(x)[0])
    for need_weights in (False, True):
        with_none = layer(name).train()(x, need_weights=need_weights)[0]
        torch.testing.assert_close(with_none, y, **SAME)


def check_sizes(name: str) -> None:
    """Sizes that don't fit are refused by name."""
    kind = attention_class(name)
    for D, n in ((16, 3), (16, 0), (0, 1), (8, 16)):
        with pytest.raises(ZooError, match=f"n_heads: got {n} for d_model {D}"):
            kind(D, n)
    with pytest.raises(ZooError, match="dropout: got 1"):
        kind(WIDTH, H, dropout=1.0)
    for shape in ((2, 5, 3), (5, WIDTH), (2, 5, 1, WIDTH)):
        with pytest.raises(ZooError, match=r"^x: got shape \("):
            layer(name)(torch.zeros(shape))
    with pytest.raises(ZooError, match=r"^padding_mask: got shape \(2, 4\)"):
        layer(name)(tokens(), Masks(padding=torch.ones(2, T - 1, dtype=torch.bool)))
    with pytest.raises(ZooError, match=r"^attn_mask: got shape \(4, 4\)"):
        layer(name)(tokens(), Masks(extra=torch.ones(T - 1, T - 1, dtype=torch.bool)))


def check_shown(name: str, options: dict[str, Any]) -> None:
    """Weights, matrices, losses, projections and factors of learning rates are what the contract says they are."""
    attention, x = layer(name, **options), tokens()
    weights = attention(x, Masks(True), need_weights=True)[1]
    assert weights is None or (weights.dim() == 4 and weights.shape[0] == 2 and weights.shape[2:] == (T, T))
    for mode in (False, True):
        attention.train(mode)(x, Masks(True))
        matrices = attention.matrices()
        assert isinstance(matrices, dict)
        for where, matrix in matrices.items():
            assert isinstance(where, str)
            assert matrix.dim() == 2
            assert not matrix.requires_grad
            assert torch.isfinite(matrix).all()
        for loss in attention.auxiliary_losses():
            assert isinstance(loss, AuxiliaryLoss)
            assert loss.value.dim() == 0
            assert torch.isfinite(loss.value)
            assert loss.weight >= 0
    with torch.no_grad():
        single_sample, masks = x[:1], Masks(True)
        y = attention.eval()(single_sample, masks)[0]
        shown = attention.shown(single_sample, masks, None)
        assert set(attention.matrices()) <= set(shown)
        for item in shown.values():
            assert item.values.dim() == len(item.axes) == len(set(item.axes)) <= 3
            assert all(re.fullmatch("[a-z_]+", axis) for axis in item.axes)
            sizes = dict(zip(item.axes, item.values.shape, strict=True))
            assert sizes.get("token", T) == T
            assert sizes.get("head", H) == H
            assert all(size % item.blocks == 0 for size in item.values.shape)
            assert not item.values.isinf().any()
        assert torch.equal(attention(single_sample, masks)[0], y)  # looking changes nothing
    for start, factor in attention.lr_factors().items():
        assert any(parameter.startswith(start) for parameter, _ in attention.named_parameters())
        assert 0 < factor < float("inf")
    for projection in attention.projections():
        assert isinstance(attention.get_submodule(projection), nn.Linear)
    model = network(name, **options).train()
    model(text())
    single = {loss.name for one in model.decoder.attentions for loss in one.auxiliary_losses()}
    assert set(model.decoder.auxiliary_losses()) == single
    assert all(where.split("/")[0] in ("layer_0", "layer_1", "layer_2") for where, _ in model.decoder.matrices())


# ---------------------------------------------------------------------- a language model


def check_stack_is_causal(name: str, options: dict[str, Any]) -> None:
    """No future token changes earlier logits, through embedding, positions, stack and head."""
    model, given = network(name, **options), text()
    logits = model(given)
    for t in (1, 5, 8):
        changed = given.clone()
        changed[:, t:] = (changed[:, t:] + 1 + torch.arange(9 - t)) % VOCABULARY
        torch.testing.assert_close(model(changed)[:, :t], logits[:, :t], **SAME)


def check_generation(name: str, options: dict[str, Any]) -> None:
    """Cached greedy generation, prompts of several lengths at once, is uncached greedy generation, token for token."""
    model, prompts = network(name, **options), [[1, 2, 3], [4, 5, 6, 7, 8, 9], [10]]
    found = model.generate(prompts, 6, temperature=0)
    with torch.no_grad():
        for prompt, continuation in zip(prompts, found, strict=True):
            # the choice after every token, in one pass: the model is causal
            logits = model(torch.tensor([[*prompt, *continuation[:-1]]]))[0, len(prompt) - 1 :]
            assert continuation == logits.argmax(dim=-1).tolist()
        cache = DecoderCache(model.decoder, 12)
        whole = model(torch.tensor([prompts[1]]))
        parts = [model(torch.tensor([prompts[1][a:b]]), cache=cache) for a, b in ((0, 2), (2, 3), (3, 6))]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, **SAME)


def check_learning(name: str, options: dict[str, Any]) -> None:
    """Three steps lower the loss of a batch, and every parameter has a gradient."""
    model, given = network(name, **options).float(), text(B=4)

    def loss() -> Tensor:
        return F.cross_entropy(model(given[:, :-1]).flatten(0, 1), given[:, 1:].flatten())

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    before = loss().item()
    model.train()
    for _ in range(3):
        value = loss()
        for term, weight in model.decoder.auxiliary_losses().values():
            value = value + weight * term
        optimizer.zero_grad()
        value.backward()
        assert [key for key, parameter in model.named_parameters() if parameter.grad is None] == []
        optimizer.step()
    model.eval()
    assert loss().item() < before


def check_positions(name: str) -> None:
    """Learned positions are there where the stack adds positions, and refused where the attention brings its own."""
    settings: dict[str, Any] = {"attention": name, "attention_options": small(name), "positions": "learned"}
    if attention_class(name).stack.positions:
        assert LanguageModel(5, WIDTH, H, 8, 1, **settings)(torch.tensor([[1, 2]])).shape == (1, 2, 5)
    else:
        with pytest.raises(ZooError, match=f"positions: got learned with attention {name}"):
            LanguageModel(5, WIDTH, H, 8, 1, **settings)
    model = network(name).double()  # the order of tokens matters, whoever tells them apart
    assert not torch.allclose(model(torch.tensor([[1, 2, 3]]))[0, 2], model(torch.tensor([[2, 1, 3]]))[0, 2])


def check_compiled(name: str) -> None:
    """torch.compile traces a layer, padded, and it is the same."""
    attention, x, masks = layer(name), tokens(), Masks(True, padding(2, T, 0, "left"))
    expected = attention(x, masks)[0]
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(attention, backend="eager")(x, masks)[0], expected, **SAME)


def check_exported(name: str) -> None:
    """A language model and a vision transformer become graphs, or the attention says why not."""
    if reason := attention_class(name).no_export:
        assert len(reason) > 10
        pytest.skip(f"{name} can't be exported: {reason}")
    language, vision = network(name, n_layers=1).float(), pictures(name, depth=1).eval()
    for model, example in ((language, torch.tensor([[1, 2, 3, 4]])), (vision, torch.rand(1, 3, 16, 16))):
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        graph = torch.export.export(model, (example,)).module()
        torch.testing.assert_close(graph(example), model(example), rtol=1e-4, atol=1e-5)  # float32, another order


# ---------------------------------------------------------------------- a vision transformer


def check_pictures(name: str, **settings: Any) -> None:
    """Every parameter learns, with the same gradients when blocks are run again for them."""
    model, image = pictures(name, **settings).double(), torch.rand(2, 3, 16, 16, dtype=torch.float64)

    def found() -> tuple[Tensor, dict[str, Tensor]]:
        model.zero_grad()
        y = model(image)
        y.square().sum().backward()
        return y.detach(), {key: p.grad for key, p in model.named_parameters() if p.grad is not None}

    y, grads = found()
    assert y.shape == (2, 3)
    assert set(grads) == set(dict(model.named_parameters()))
    model.set_grad_checkpointing(True)
    again, same = found()
    torch.testing.assert_close(again, y, **SAME)
    for key, grad in grads.items():
        torch.testing.assert_close(same[key], grad, **SAME)
    assert all(where.split("/")[0] in ("layer_0", "layer_1") for where, _ in model.matrices())
    for value, weight in model.auxiliary_losses().values():
        assert torch.isfinite(value)
        assert weight >= 0


def check_causal_pictures(name: str) -> None:
    """``is_causal`` hides later patches, and only those."""
    model = pictures(name, class_token=False, global_pool="").double().eval()
    image = torch.rand(1, 3, 16, 16, dtype=torch.float64)
    y = model.forward_features(image, is_causal=True)
    image[:, :, 12:] = 1 - image[:, :, 12:]  # the last row of patches
    changed = model.forward_features(image, is_causal=True)
    torch.testing.assert_close(changed[:, :12], y[:, :12], **SAME)
    assert not torch.allclose(changed[:, 12:], y[:, 12:])
    assert not torch.allclose(model.forward_features(image)[:, :12], y[:, :12])


def check_picture_sizes(name: str) -> None:
    """Pictures of another shape are taken where that is asked for, and places matter."""
    model = pictures(name, dynamic_img_size=True).double().eval()
    image = torch.rand(1, 3, 24, 16, dtype=torch.float64)
    assert model(image).shape == (1, 3)
    assert model.forward_features(image).shape == (1, 1 + 6 * 4, WIDTH)
    assert not torch.allclose(model(image.flip(2)), model(image))


def check_timm(name: str) -> None:
    """timm makes it by name, and it is saved and loaded strictly."""
    model, twin = (
        timm.create_model(
            "damcha_vit_tiny_patch4_32",
            attention=name,
            attention_options=small(name),
            embed_dim=WIDTH,
            depth=2,
            num_heads=H,
            num_classes=3,
        ).eval()
        for _ in range(2)
    )
    twin.load_state_dict(model.state_dict(), strict=True)
    image = torch.rand(2, 3, 32, 32)
    assert model.attention is attention_class(name)
    assert model(image).shape == (2, 3)
    assert torch.equal(twin(image), model(image))
