"""Contexts that a block of tokens shares, and metrics of which only some exist at a time."""

import copy
import itertools
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.oracles.compare import SEEDS, TIGHT, LargestTensor, assert_same_with_gradients, examples, padding, randomized
from tests.oracles.damcha import block_start, context
from zoo.attention import BlockMetrics, MBasedAttention, PrefixState, StructuredMLPForM
from zoo.attention.damcha import deferred
from zoo.attention.damcha.contexts import block_contexts
from zoo.errors import ZooError
from zoo.models.decoder import Decoder

PADDINGS = st.sampled_from(["none", "left", "right", "scattered"])


def tokens(B, T, D=6, seed=0):
    return torch.randn(B, T, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def decoder(seed=0, **options):
    return randomized(Decoder(6, 3, 5, 3, 0.0, mlp_hidden=(4, 3), **options), seed)


@examples(40)
@given(T=st.integers(1, 9), stride=st.integers(1, 5), kind=PADDINGS, seed=SEEDS)
def test_context_of_a_block_is_the_mean_up_to_its_first_token(T, stride, kind, seed):
    x, real = tokens(2, T, 3, seed).requires_grad_(), padding(2, T, seed, kind)
    contexts, blocks = block_contexts(x, stride, None if kind == "none" else real)
    actual = blocks.spread(contexts) * real.unsqueeze(-1)
    rows = []
    for b in range(2):
        shown = real[b].tolist()
        ends = [block_start(shown, t, stride) + 1 for t in range(T)]
        rows.append(torch.stack([context(x[b, :end], shown[:end]) for end in ends]))
    assert_same_with_gradients(actual, torch.stack(rows) * real.unsqueeze(-1), {"x": x}, seed)


@examples(40)
@given(T=st.integers(1, 9), cuts=st.sets(st.integers(1, 8)), stride=st.integers(1, 5), kind=PADDINGS, seed=SEEDS)
def test_blocks_go_on_from_call_to_call(T, cuts, stride, kind, seed):
    x, real = tokens(2, T, 3, seed), padding(2, T, seed, kind)
    whole, blocks = block_contexts(x, stride, None if kind == "none" else real)
    edges, state, parts = [0, *sorted(cut for cut in cuts if cut < T), T], PrefixState(), []
    for start, end in itertools.pairwise(edges):
        part, its = block_contexts(x[:, start:end], stride, None if kind == "none" else real[:, start:end], state)
        parts.append(its.spread(part))
    shown = real.unsqueeze(-1)  # padding has no block
    torch.testing.assert_close(torch.cat(parts, dim=1) * shown, blocks.spread(whole) * shown, **TIGHT)


@examples(20)
@given(T=st.integers(1, 9), stride=st.integers(1, 5), kind=PADDINGS, seed=SEEDS)
def test_gathering_into_blocks_and_back_gives_the_real_tokens(T, stride, kind, seed):
    x, real = tokens(2, T, 6, seed).view(2, T, 3, 2), padding(2, T, seed, kind)
    _, blocks = block_contexts(x.flatten(2), stride, None if kind == "none" else real)
    gathered = blocks.gather(x)
    assert gathered.shape == (2, blocks.n, 3, min(stride, T), 2)
    shown = real.view(2, T, 1, 1)
    assert torch.equal(blocks.scatter(gathered) * shown, x * shown)


def test_only_the_first_token_of_a_block_moves_its_metric():
    generator = randomized(StructuredMLPForM(6, 3, (4,), 0.0, context_stride=4), 0).eval()
    x = tokens(1, 8)
    m = generator.head_metrics(x, causal=True)
    assert torch.equal(m[:, 0], m[:, 3])
    assert not torch.allclose(m[:, 3], m[:, 4])
    x[:, 5] += 1  # the second token of the second block
    assert torch.equal(generator.head_metrics(x, causal=True), m)
    x[:, 4] += 1
    changed = generator.head_metrics(x, causal=True)
    assert torch.equal(changed[:, :4], m[:, :4])
    assert not torch.allclose(changed[:, 4:], m[:, 4:])


def test_a_stride_makes_a_metric_for_each_block_alone():
    T, D, H = 64, 16, 2
    model = Decoder(D, H, D, 2, 0.0, mlp_hidden=(4,), context_stride=16)
    x = torch.randn(1, T, D, requires_grad=True)
    with LargestTensor() as seen:
        model(x).sum().backward()
    assert seen.operations > 50
    assert seen.numel < T * D * (D // H)  # as one each would have


@pytest.mark.parametrize("padded", [True, False])
def test_a_stride_beyond_the_text_costs_no_more_than_one_block(padded):
    model, x = decoder(context_stride=10**6), tokens(2, 7).requires_grad_()
    real = padding(2, 7, 0, "left") if padded else None
    with LargestTensor() as seen:
        model(x, real).sum().backward()
    assert seen.numel < 1000


@pytest.mark.parametrize("options", [{}, {"chunk_size": 2}, {"share_mlp": False}, {"context_stride": 2}])
def test_an_empty_batch_passes_forward_and_backward(options):
    model = decoder(**options)
    model(torch.zeros(0, 5, 6, dtype=torch.float64)).sum().backward()
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_an_exported_stride_holds_for_any_length():
    model, length = decoder(context_stride=3).eval(), torch.export.Dim("length", min=2, max=64)
    program = torch.export.export(model, (tokens(2, 12),), dynamic_shapes={"x": {1: length}})
    for T in (2, 5, 6, 31):
        torch.testing.assert_close(program.module()(tokens(2, T)), model(tokens(2, T)), **TIGHT)


@pytest.mark.parametrize("share", [True, False], ids=["shared", "independent"])
def test_chunks_bound_how_many_metrics_exist(share):
    T, D, H = 256, 16, 2
    model = Decoder(D, H, D, 2, 0.0, mlp_hidden=(4,), chunk_size=8, share_mlp=share)
    x = torch.randn(1, T, D, requires_grad=True)
    with LargestTensor() as forward:
        y = model(x).sum()
    with LargestTensor() as backward:
        y.backward()
    # The largest else: queries, keys and values, T D, and the generator's last map, 4 D D.
    assert max(forward.numel, backward.numel) <= T * D < T * D * (D // H)
    assert backward.operations > 50
    with torch.no_grad(), LargestTensor() as without:
        model(x)
    assert without.numel <= T * D


@pytest.mark.parametrize("chunk_size", [1, 3, 1000])
@pytest.mark.parametrize("share", [True, False], ids=["shared", "independent"])
def test_chunks_change_no_number(chunk_size, share):
    whole = decoder(share_mlp=share)
    parts = randomized(Decoder(6, 3, 5, 3, 0.0, mlp_hidden=(4, 3), share_mlp=share, chunk_size=chunk_size), 1)
    parts.load_state_dict(whole.state_dict())
    x = tokens(2, 7).requires_grad_()
    wanted = dict(zip([n for n, _ in parts.named_parameters()], parts.parameters(), strict=True))
    same = dict(zip(wanted, whole.parameters(), strict=True))
    got, want = parts(x), whole(x)
    torch.testing.assert_close(got, want, **TIGHT)
    for a, b in zip(
        torch.autograd.grad(got.square().sum(), [x, *wanted.values()]),
        torch.autograd.grad(want.square().sum(), [x, *same.values()]),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)


# ---------------------------------------------------------------------- memory that is used again


def kept(model):
    return model.shared_mlp._workspace._free


def test_memory_of_the_metrics_is_used_again_by_the_next_step():
    model, x = decoder(), tokens(2, 7)
    model(x).sum().backward()
    first = kept(model)
    assert first is not None
    y = model(x)
    assert kept(model) is None  # in use while the graph lives
    y.sum().backward()
    del y
    assert kept(model).data_ptr() == first.data_ptr()


def test_a_graph_that_lives_keeps_its_metrics_to_itself():
    model, first, second = decoder(), tokens(2, 7, seed=1), tokens(2, 7, seed=2)
    model(first).sum().backward()  # there is memory to be used again now
    parameters = list(model.parameters())
    want = [torch.autograd.grad(model(x).square().sum(), parameters) for x in (first, second)]
    a = model(first)
    b = model(second)
    with torch.no_grad():
        model(tokens(2, 7, seed=3))
    got = [torch.autograd.grad(y.square().sum(), parameters) for y in (a, b)]
    for grads, expected in zip(got, want, strict=True):
        assert all(torch.equal(g, e) for g, e in zip(grads, expected, strict=True))


@pytest.mark.parametrize("change", [lambda m: m.eval(), lambda m: m.float(), lambda m: m.train(False)])
def test_memory_is_let_go_when_the_model_changes(change):
    model = decoder().train()
    model(tokens(2, 7)).sum().backward()
    assert kept(model) is not None
    assert kept(change(model)) is None


@pytest.mark.parametrize("twin", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_have_memory_of_their_own(twin):
    model = decoder()
    model(tokens(2, 7)).sum().backward()
    other = twin(model)
    assert kept(other) is None
    assert other.shared_mlp._workspace is not model.shared_mlp._workspace


def test_memory_of_one_device_is_not_handed_to_another():
    """A graph may outlive a move of its model, and gives its memory back after it."""
    workspace = deferred.Workspace()
    workspace.give(torch.empty(6))
    assert workspace.take((2, 3), torch.empty(0, device="meta")).is_meta


def test_memory_of_inference_is_not_handed_to_training():
    model, x = decoder(), tokens(2, 40)
    with torch.inference_mode():
        model(x)
    model(x).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_metrics_are_stored_in_bfloat16_where_autocast_is_on(monkeypatch):
    made, original = [], deferred.Workspace.take
    monkeypatch.setattr(
        deferred.Workspace, "take", lambda self, shape, like: made.append(original(self, shape, like)) or made[-1]
    )
    model, x = decoder().float(), tokens(2, 40).float()
    model(x)
    with torch.autocast("cpu", torch.bfloat16):
        model(x)
    assert [m.dtype for m in made] == [torch.float32, torch.bfloat16]


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context_stride": 0}, "context_stride: got 0"),
        ({"context_stride": -2}, "context_stride: got -2"),
        ({"context_stride": 2.5}, "context_stride: got 2.5"),
        ({"context_stride": True}, "context_stride: got True"),
        ({"context_stride": 10**20}, "context_stride: got 1000"),
        ({"chunk_size": 0}, "chunk_size: got 0"),
        ({"chunk_size": "x"}, "chunk_size: got 'x'"),
        ({"chunk_size": 1.5}, "chunk_size: got 1.5"),
        ({"chunk_size": 4, "compact_rank": 2}, "chunk_size: got 4 with compact_rank 2"),
    ],
)
def test_settings_without_meaning_are_refused(options, message):
    with pytest.raises(ZooError, match=message):
        StructuredMLPForM(6, 3, (4,), **options)


def test_a_stride_without_a_generator_is_refused_and_a_chunk_size_let_pass():
    with pytest.raises(ZooError, match="context_stride: got 4 with use_mlp False"):
        MBasedAttention(6, 3, use_mlp=False, context_stride=4)
    MBasedAttention(6, 3, use_mlp=False, chunk_size=4)


def test_metrics_of_a_stack_can_be_handed_to_a_layer():
    generator = randomized(StructuredMLPForM(6, 3, (4,), 0.0, context_stride=2), 0).eval()
    layer = randomized(MBasedAttention(6, 3, 0.0, shared_mlp=generator), 1).eval()
    x = tokens(2, 5)
    metrics = generator.causal_metrics(x)
    assert isinstance(metrics, BlockMetrics)
    by_block = layer(x, is_causal=True, head_metrics=metrics)[0]
    by_query = layer(x, is_causal=True, head_metrics=generator.head_metrics(x, causal=True))[0]
    torch.testing.assert_close(by_block, by_query, **TIGHT)
    torch.testing.assert_close(by_block, layer(x, is_causal=True)[0], **TIGHT)
