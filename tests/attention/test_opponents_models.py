"""The attentions that DAMCHA is compared with inside the language model and the vision transformer."""

import pytest
import torch

from tests.oracles.compare import randomized
from zoo.models.decoder import LanguageModel
from zoo.models.vision_transformer import VisionTransformer

NAMES = ["modern", "grouped", "gated", "forgetting", "differential", "elliptical"]


@pytest.mark.parametrize("name", NAMES)
def test_cached_generation_says_what_each_prompt_alone_gets_without_a_cache(name):
    model = randomized(LanguageModel(9, 8, 2, 12, 2, attention=name), 0).eval()
    prompts = [[1, 2, 3, 4, 5], [6], [7, 8, 1]]
    expected = []
    with torch.no_grad():
        for prompt in prompts:
            tokens = list(prompt)
            for _ in range(6):
                tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
            expected.append(tokens[len(prompt) :])
    assert model.generate(prompts, max_new_tokens=6, temperature=0.0) == expected


@pytest.mark.parametrize("name", NAMES)
def test_checkpointed_blocks_of_pictures_have_the_same_gradients(name):
    torch.manual_seed(0)
    model = VisionTransformer(
        img_size=16, patch_size=4, num_classes=3, embed_dim=24, depth=2, num_heads=2, attention=name
    )
    pictures, found = torch.randn(2, 3, 16, 16), []
    for again in (False, True):
        model.set_grad_checkpointing(again)
        found.append(torch.autograd.grad(model(pictures).square().sum(), list(model.parameters())))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want)
