"""The language model around the decoder: positions, padding, and generation with its cache."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zoo.attention.damcha.metric import StructuredMLPForM
from zoo.errors import ZooError
from zoo.models.decoder import DecoderCache, LanguageModel, choose_tokens, sinusoids

MODES = {
    "shared": {},
    "independent": {"share_mlp": False},
    "static": {"share_mlp": False, "use_mlp": False},
    "standard": {"share_mlp": False, "use_mlp": False, "use_M": False},
    "pre-norm": {"norm_first": True},
    "linear_comb": {"off_diag_mode": "linear_comb"},
    "bayesian": {"off_diag_mode": "bayesian"},
    "separate_B": {"off_diag_mode": "separate_B"},
    "compact": {"compact_rank": 2},
    "layer_bias": {"use_layer_bias": True},
    "independent_layer_bias": {"use_layer_bias": True, "share_mlp": False},
    "learned": {"positions": "learned"},
    "tied": {"tie_embeddings": True},
    "stride": {"context_stride": 4},
    "stride_independent": {"context_stride": 3, "share_mlp": False},
    "stride_compact": {"context_stride": 3, "compact_rank": 2},
    "chunks": {"chunk_size": 2},
}


def make(mode="shared", seed=0, **options):
    torch.manual_seed(seed)
    settings = {"max_len": 64, "mlp_hidden": (8,), **MODES[mode], **options}
    # float64: a greedy choice then never hangs on the rounding of a differently shaped product
    return LanguageModel(40, 16, 4, 32, 3, **settings).double().eval()


def greedy_without_cache(model, prompt, n):
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(n):
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("mode", MODES)
@given(
    prompts=st.lists(st.lists(st.integers(0, 39), min_size=1, max_size=9), min_size=1, max_size=4),
    seed=st.integers(0, 99),
)
@settings(deadline=None, max_examples=6)
def test_greedy_with_the_cache_equals_greedy_without_for_padded_batches(mode, prompts, seed):
    model = make(mode, seed)
    together = model.generate(prompts, 12, temperature=0)
    assert together == [greedy_without_cache(model, prompt, 12) for prompt in prompts]


def test_each_new_token_costs_one_generator_pass_over_itself(monkeypatch):
    model = make("shared")
    seen = []
    original = StructuredMLPForM.causal_metrics

    def counted(self, x, *args, **kwargs):
        seen.append(x.shape[1])
        return original(self, x, *args, **kwargs)

    monkeypatch.setattr(StructuredMLPForM, "causal_metrics", counted)
    model.generate([[1, 2, 3, 4, 5]], 6, temperature=0)
    assert seen == [5, 1, 1, 1, 1, 1]


def test_the_fused_weight_is_summed_once_for_a_whole_generation(monkeypatch):
    model = make("shared")
    calls = []
    original = StructuredMLPForM._fuse
    monkeypatch.setattr(StructuredMLPForM, "_fuse", lambda self: calls.append(1) or original(self))
    model.generate([[1, 2, 3]], 8, temperature=0)
    assert len(calls) == 1


def test_running_sum_in_the_cache_is_float32_for_a_bfloat16_model():
    model = make("shared").to(torch.bfloat16)
    cache = DecoderCache(model.decoder, 8)
    with torch.no_grad():
        model(torch.tensor([[1, 2, 3]]), cache=cache)
    assert cache.shared.total.dtype == torch.float32
    assert cache.shared.count.tolist() == [[3.0]]


@pytest.mark.parametrize("mode", ["shared", "independent", "standard", "learned"])
def test_padding_on_either_side_gives_the_logits_of_no_padding(mode):
    model = make(mode)
    tokens = torch.randint(40, (1, 6))
    alone = model(tokens)
    for left, right in ((3, 0), (0, 3), (2, 2)):
        padded = torch.nn.functional.pad(tokens, (left, right), value=7)
        real = torch.zeros_like(padded, dtype=torch.bool)
        real[:, left : left + 6] = True
        # float64 sums of other lengths: rounding only
        torch.testing.assert_close(model(padded, real)[:, left : left + 6], alone, rtol=0, atol=1e-10)


def test_sinusoidal_positions_go_on_past_max_len():
    short, long = make(max_len=8), make(max_len=64)
    tokens = torch.randint(40, (2, 20))
    torch.testing.assert_close(short(tokens), long(tokens))
    assert len(short.generate([[1, 2, 3]], 30, temperature=0)[0]) == 30


def test_learned_positions_end_with_a_clear_error_before_anything_is_made():
    model = make("learned")
    with pytest.raises(ZooError, match=r"got 65 positions; learned positions end at max_len 64"):
        model(torch.randint(40, (1, 65)))
    steps = model.stream([[1, 2]], 63)
    with pytest.raises(ZooError, match="got 65 positions"):
        next(steps)


def test_sinusoids_are_sines_and_cosines_of_the_published_rates():
    table = sinusoids(torch.arange(5), 6)
    for p in range(5):
        for k in range(3):
            angle = torch.tensor(p / 10_000 ** (2 * k / 6))
            assert table[p, 2 * k] == pytest.approx(float(angle.sin()), abs=1e-6)
            assert table[p, 2 * k + 1] == pytest.approx(float(angle.cos()), abs=1e-6)


def test_tied_head_is_the_embedding_and_untied_is_not():
    tied, untied = make("tied"), make("shared")
    assert tied.head.weight is tied.embedding.weight
    assert sum(p.numel() for p in untied.parameters()) - sum(p.numel() for p in tied.parameters()) == 40 * 16


def test_same_seed_same_text_other_seed_other_text():
    model = make()
    first, again, other = (model.generate([[1], [2, 3]], 20, seed=seed) for seed in (5, 5, 6))
    assert first == again != other


def test_generation_leaves_mode_and_global_randomness_alone():
    model = make().train()
    torch.manual_seed(3)
    before = torch.get_rng_state()
    model.generate([[1, 2]], 3)
    assert model.training
    assert torch.equal(before, torch.get_rng_state())


def test_stop_ends_a_row_with_the_sequence_and_leaves_the_others_running():
    model = make()
    free = model.generate([[1, 2], [3]], 12, temperature=0)
    stop = free[0][3:5]
    first_place = next(i for i in range(11) if free[0][i : i + 2] == stop)
    stopped = model.generate([[1, 2], [3]], 12, temperature=0, stop=[stop])
    assert stopped[0] == free[0][: first_place + 2]
    if not any(free[1][i : i + 2] == stop for i in range(11)):
        assert stopped[1] == free[1]


def test_top_k_and_top_p_leave_only_the_likeliest_tokens():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]]).repeat(400, 1)  # probabilities 0.64, 0.24, 0.09, 0.03
    random = torch.Generator().manual_seed(0)
    assert set(choose_tokens(logits, 1.0, 2, None, random).tolist()) == {0, 1}
    assert set(choose_tokens(logits, 1.0, None, 0.7, random).tolist()) == {0, 1}
    assert set(choose_tokens(logits, 1.0, None, 0.5, random).tolist()) == {0}
    assert set(choose_tokens(logits, 1.0, None, None, random).tolist()) == {0, 1, 2, 3}
    assert set(choose_tokens(logits, 1e-30, None, None, random).tolist()) == {0}


def test_sampled_frequencies_follow_the_probabilities():
    logits = torch.tensor([[1.0, 0.0, -1.0]]).repeat(20_000, 1)
    chosen = choose_tokens(logits, 2.0, None, None, torch.Generator().manual_seed(0))
    expected = (logits[0] / 2).softmax(-1)
    # standard error of a share of 20,000 draws is below 0.0036; four of them
    torch.testing.assert_close(chosen.bincount(minlength=3) / 20_000, expected, rtol=0, atol=0.015)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": []}, "prompts: got none"),
        ({"prompts": [[1], []]}, "number 1 is empty"),
        ({"prompts": [[1, 40]]}, "number 0 has token 40; tokens lie in 0..39"),
        ({"prompts": [[-1]]}, "has token -1"),
        ({"prompts": [[1]], "max_new_tokens": -1}, "max_new_tokens: got -1"),
        ({"prompts": [[1]], "temperature": -0.5}, "temperature: got -0.5"),
        ({"prompts": [[1]], "temperature": float("nan")}, "temperature: got nan"),
        ({"prompts": [[1]], "top_k": 0}, "top_k: got 0"),
        ({"prompts": [[1]], "top_p": 0.0}, "top_p: got 0.0"),
        ({"prompts": [[1]], "top_p": 1.5}, "top_p: got 1.5"),
        ({"prompts": [[1]], "stop": [[]]}, "stop: got an empty sequence"),
    ],
)
def test_requests_out_of_range_are_refused_by_name(arguments, message):
    with pytest.raises(ZooError, match=message):
        make().generate(**arguments)


def test_no_new_tokens_asked_none_made():
    assert make().generate([[1], [2, 3]], 0) == [[], []]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"positions": "rotary"}, "positions: got 'rotary'"),
        ({"max_len": 0}, "max_len: got 0"),
        ({"dropout": 1.0}, "dropout: got 1.0"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(options, message):
    with pytest.raises(ZooError, match=message):
        LanguageModel(40, 16, 4, 32, 2, **options)
