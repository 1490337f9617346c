"""What every attention must do, as checks over a name: run by test_contract.py over all that are registered, and by
tests that show each of them catches what it is for."""

import copy
import dataclasses
import importlib
import importlib.util
import pickle
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.oracles.compare import assert_same_with_gradients, gradients, padding, randomized
from zoo.attention import Attention, Masks, attention_class
from zoo.errors import ZooError
from zoo.models.decoder import DecoderCache, LanguageModel
from zoo.models.vision_transformer import VisionTransformer

H, DH, T = 4, 4, 5
WIDTH = H * DH
KINDS = ("left", "right", "scattered")
# Sums in another order, in float64 and of a few dozen terms of order one, differ by less than a hundredth of this.
SAME = {"rtol": 1e-9, "atol": 1e-9}


def layer(name: str, seed: int = 0, dropout: float = 0.0, bias: bool = True, **options: Any) -> Attention:
    """A layer in float64, with noise on every parameter, in the middle of its stack but on its own."""
    kind = attention_class(name)
    made = kind(WIDTH, H, 1, 3, dropout, bias, {**small(name), **options})
    return randomized(made, seed).eval()


def small(name: str) -> dict[str, Any]:
    """Options that make a layer small: hidden widths of 4."""
    return {
        item.name: (4,)
        for item in dataclasses.fields(attention_class(name).Options)
        if isinstance(item.default, tuple) and item.default and isinstance(item.default[0], int)
    }


def choices(name: str) -> list[dict[str, Any]]:
    """The defaults, and every other choice of an option that has few."""
    kind, found = attention_class(name), [{}]
    hints = get_type_hints(kind.Options)
    for item in dataclasses.fields(kind.Options):
        if get_origin(hints[item.name]) is Literal:
            found += [{item.name: value} for value in get_args(hints[item.name]) if value != item.default]
        elif hints[item.name] is bool:
            found.append({item.name: not item.default})
    return found


def tokens(seed: int = 0, B: int = 2) -> Tensor:
    return torch.randn(B, T, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def network(name: str, seed: int = 0, **options: Any) -> LanguageModel:
    torch.manual_seed(seed)
    given = {**small(name), **options}
    model = LanguageModel(23, WIDTH, H, 24, 3, dropout=0.0, attention=name, attention_options=given)
    return model.double().eval()


def pictures(name: str, **settings: Any) -> VisionTransformer:
    torch.manual_seed(0)
    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": WIDTH, "depth": 2, "num_heads": H, "num_classes": 3}
    return VisionTransformer(**{**sizes, "attention": name, "attention_options": small(name), **settings})


# ---------------------------------------------------------------------- a layer


def check_equations(name: str, options: dict[str, Any], causal: bool, kind: str, seed: int) -> None:
    """Values and gradients are those of the oracle, on both roads."""
    module = f"tests.oracles.attentions.{name}"
    if importlib.util.find_spec(module) is None:
        if attention_class(name).__module__.startswith("zoo."):
            pytest.fail(f"{module} isn't there; write the equations of {name} as loops, in float64")
        pytest.skip(f"{name} is no attention of this package, and has no oracle here")
    oracle = importlib.import_module(module).oracle
    attention, x = layer(name, seed, **options), tokens(seed).requires_grad_()
    real = padding(*x.shape[:2], seed, kind)
    masks = Masks(causal, None if kind == "none" else real)
    parameters = dict(attention.named_parameters())
    expected, expected_weights = oracle(parameters, x, real, H, attention.options, causal, attention.layer_idx)
    y, weights = attention(x, masks, need_weights=True)
    assert_same_with_gradients(y, expected, {"x": x, **parameters}, seed)
    assert_same_with_gradients(attention(x, masks)[0], expected, {"x": x, **parameters}, seed)
    if expected_weights is not None:
        torch.testing.assert_close(weights, expected_weights, **SAME)


def check_causal(name: str, options: dict[str, Any]) -> None:
    """No future token changes an earlier output, whatever it holds."""
    attention, x = layer(name, **options), tokens()
    y = attention(x, Masks(causal=True))[0]
    for t in range(1, T):
        changed = x.clone()
        changed[:, t:] = 50 * tokens(t)[:, t:]
        torch.testing.assert_close(attention(changed, Masks(causal=True))[0][:, :t], y[:, :t], **SAME)


def check_padding(name: str, options: dict[str, Any], kind: str, causal: bool) -> None:
    """Padding is as if it weren't there, NaN in it included, forward and backward."""
    attention, x, real = layer(name, **options), tokens(), padding(2, T, 3, kind)
    real[0, -1] = real[1, 0] = True
    filled = x.masked_fill(~real.unsqueeze(-1), float("nan")).requires_grad_()
    y = attention(filled, Masks(causal, real))[0]
    assert not y[~real].any()
    for b in range(2):
        alone = attention(x[b : b + 1, real[b]], Masks(causal))[0][0]
        torch.testing.assert_close(y[b, real[b]], alone, **SAME)
    found = gradients(y, [filled, *attention.parameters()], 0)
    assert all(torch.isfinite(grad).all() for grad in found)
    assert not found[0][~real].any()


def check_blind(name: str, options: dict[str, Any]) -> None:
    """A query that sees nothing mixes to zero, and gradients stay finite."""
    attention, x = layer(name, bias=False, **options), tokens().requires_grad_()
    nothing = torch.ones(T, T, dtype=torch.bool)
    nothing[2] = False
    y, weights = attention(x, Masks(extra=nothing), need_weights=True)
    assert not y[:, 2].any()
    assert weights is None or not weights[:, :, 2].any()
    real = torch.ones(2, T, dtype=torch.bool)
    real[0] = False
    for out in (y, attention(x, Masks(extra=nothing))[0], attention(x, Masks(True, real))[0]):
        assert all(torch.isfinite(grad).all() for grad in gradients(out, [x, *attention.parameters()], 0))


def check_cache(name: str, options: dict[str, Any], kind: str, cuts: tuple[int, ...]) -> None:
    """Text in pieces gives what text in one gives."""
    attention, x = layer(name, **options), tokens()
    real = None if kind == "none" else padding(2, T, 1, kind)
    whole = attention(x, Masks(True, real))[0]
    cache, parts = attention.new_cache(T), []
    for start, end in zip((0, *cuts), (*cuts, T), strict=True):
        part = None if real is None else real[:, start:end]
        parts.append(attention(x[:, start:end], Masks(True, part), cache=cache)[0])
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, **SAME)
    assert cache.length == T
    with pytest.raises(ZooError, match="cache: got"):
        attention(x[:, :1], Masks(True), cache=cache)


def check_copies(name: str, options: dict[str, Any]) -> None:
    """State dict, deep copy and pickle give the same layer."""
    attention, x = layer(name, **options), tokens()
    other = layer(name, seed=1, **options)
    other.load_state_dict(attention.state_dict(), strict=True)
    y = attention(x, Masks(True))[0]
    for twin in (other, copy.deepcopy(attention), pickle.loads(pickle.dumps(attention))):
        assert torch.equal(twin(x, Masks(True))[0], y)


def check_low_precision(name: str, options: dict[str, Any]) -> None:
    """bfloat16, by autocast and of its own, stays finite and near float32."""
    attention, x = layer(name, **options).float(), tokens().float()
    exact = attention(x, Masks(True))[0]
    with torch.autocast("cpu", torch.bfloat16):
        rough = attention(x, Masks(True))[0]
    # bfloat16 has 8 bits; scores of a few tens, exponentiated, are off by a tenth
    assert (rough.float() - exact).norm() < 0.3 * exact.norm()
    assert torch.isfinite(attention.bfloat16()(x.bfloat16(), Masks(True))[0]).all()


def check_options(name: str) -> None:
    """A name that is no option, and a value of no type of an option, are refused; every option is explained."""
    kind = attention_class(name)
    items = dataclasses.fields(kind.Options)
    with pytest.raises(ZooError, match="is no option of"):
        kind(WIDTH, H, options={"no_such_option": 1})
    for item in items:
        assert item.metadata["help"]
        with pytest.raises(ZooError, match=rf"^attention_options\.{item.name}: got "):
            kind(WIDTH, H, options={item.name: object()})


def check_dropout(name: str) -> None:
    """Dropout acts in training, and only there."""
    attention, x = layer(name, dropout=0.5), tokens()
    assert torch.equal(attention(x)[0], attention(x)[0])
    attention.train()
    assert not torch.equal(attention(x)[0], attention(x)[0])


def check_sizes(name: str) -> None:
    kind = attention_class(name)
    with pytest.raises(ZooError, match="n_heads: got 3 for d_model 16"):
        kind(16, 3)
    with pytest.raises(ZooError, match=r"x: got shape \(2, 5, 3\)"):
        layer(name)(torch.zeros(2, 5, 3))


# ---------------------------------------------------------------------- a language model


def check_stack_is_causal(name: str, options: dict[str, Any]) -> None:
    model = network(name, **options)
    text = torch.randint(23, (2, 9), generator=torch.Generator().manual_seed(0))
    logits = model(text)
    for t in (1, 5, 8):
        changed = text.clone()
        changed[:, t:] = (changed[:, t:] + 1 + torch.arange(9 - t)) % 23
        torch.testing.assert_close(model(changed)[:, :t], logits[:, :t], **SAME)


def check_generation(name: str, options: dict[str, Any]) -> None:
    """Cached greedy generation, prompts of several lengths at once, is uncached greedy generation, token for token."""
    model, prompts = network(name, **options), [[1, 2, 3], [4, 5, 6, 7, 8, 9], [10]]
    found = model.generate(prompts, 6, temperature=0)
    for prompt, continuation in zip(prompts, found, strict=True):
        text = list(prompt)
        for token in continuation:
            assert token == int(model(torch.tensor([text]))[0, -1].argmax())
            text.append(token)
    cache = DecoderCache(model.decoder, 12)
    whole = model(torch.tensor([prompts[1]]))
    parts = [model(torch.tensor([prompts[1][a:b]]), cache=cache) for a, b in ((0, 2), (2, 3), (3, 6))]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, **SAME)


def check_learning(name: str, options: dict[str, Any]) -> None:
    """Two steps lower the loss of a batch, and every parameter has a gradient."""
    model = network(name, **options).float().train()
    text = torch.randint(23, (4, 9), generator=torch.Generator().manual_seed(0))

    def loss() -> Tensor:
        return F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())

    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for _ in range(3):
        value = loss()
        losses.append(value.item())
        for term, weight in model.decoder.auxiliary_losses().values():
            value = value + weight * term
        optimizer.zero_grad()
        value.backward()
        assert [n for n, p in model.named_parameters() if p.grad is None] == []
        optimizer.step()
    assert losses[2] < losses[0]


def check_shown(name: str) -> None:
    """Matrices are matrices, by name, and losses finite numbers with weights."""
    model = network(name)
    model(torch.tensor([[1, 2, 3]]))
    for where, matrix in model.decoder.matrices():
        assert where.startswith("layer_")
        assert matrix.dim() == 2
        assert torch.isfinite(matrix).all()
    model.train()(torch.tensor([[1, 2, 3]]))
    for value, weight in model.decoder.auxiliary_losses().values():
        assert torch.isfinite(value)
        assert weight >= 0


def check_compiled(name: str) -> None:
    model, text = network(name), torch.tensor([[1, 2, 3, 4]])
    expected = model(text)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(model, backend="eager")(text), expected, **SAME)


def check_exported(name: str) -> None:
    """A language model and a vision transformer become graphs, or the attention says why not."""
    if reason := attention_class(name).no_export:
        pytest.skip(f"{name} can't be exported: {reason}")
    text, image = torch.tensor([[1, 2, 3, 4]]), torch.rand(1, 3, 16, 16)
    for model, example in ((network(name).float(), text), (pictures(name).eval(), image)):
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
        return y.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    y, grads = found()
    assert set(grads) == set(dict(model.named_parameters()))
    model.set_grad_checkpointing(True)
    again, same = found()
    torch.testing.assert_close(again, y, **SAME)
    for n, grad in grads.items():
        torch.testing.assert_close(same[n], grad, **SAME)


def check_causal_pictures(name: str) -> None:
    model = pictures(name, class_token=False, global_pool="").double().eval()
    image = torch.rand(1, 3, 16, 16, dtype=torch.float64)
    y = model.forward_features(image, is_causal=True)
    image[:, :, 12:] = 1 - image[:, :, 12:]  # the last row of patches
    changed = model.forward_features(image, is_causal=True)
    torch.testing.assert_close(changed[:, :12], y[:, :12], **SAME)
    if not attention_class(name).is_ordinary:  # timm's own may or may not know causal masks
        assert not torch.allclose(changed[:, 12:], y[:, 12:])
