"""What is special to gated attention: what an open and a shut gate do."""

import torch

from tests.oracles.compare import TIGHT, randomized
from zoo.attention import Masks, create_attention


def make():
    layer = randomized(create_attention("gated", 12, 3), 0)
    return layer, torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_parameters_are_a_gate_a_head_more():
    layer = create_attention("gated", 128, 4, bias=False)
    assert sum(p.numel() for p in layer.parameters()) == 4 * 128**2 + 128 * 4


def test_open_gates_leave_standard_attention():
    layer, x = make()
    standard = create_attention("standard", 12, 3).double()
    standard.load_state_dict({name: p for name, p in layer.state_dict().items() if not name.startswith("gate.")})
    with torch.no_grad():
        layer.gate.bias.fill_(50)
    torch.testing.assert_close(layer(x, Masks(True))[0], standard(x, Masks(True))[0], **TIGHT)


def test_shut_gate_silences_its_head_and_no_other():
    layer, x = make()
    before = layer(x)[0]
    with torch.no_grad():
        layer.gate.bias[1] = -1000
        shut = layer(x)[0]
        layer.out_proj.weight[:, 4:8] = 0  # what head 1 would have said
        layer.gate.bias[1] = 1000
    torch.testing.assert_close(shut, layer(x)[0], **TIGHT)
    assert not torch.allclose(shut, before)


def test_gate_reads_the_token_that_asks_and_changes_no_weights():
    layer, x = make()
    with torch.no_grad():
        before, weights = layer(x, need_weights=True)
        layer.gate.weight[:, 0] += 3  # gates follow the first dimension more
        after, same = layer(x, need_weights=True)
        x[0, 0, 0] = x[1, 3, 0] = 0  # but for these tokens, who have none of it
        assert torch.equal(same, weights)
        assert not torch.allclose(after, before)
        strong = layer(x)[0]
        layer.gate.weight[:, 0] -= 3
        plain = layer(x)[0]
    torch.testing.assert_close(strong[0, 0], plain[0, 0], **TIGHT)
    torch.testing.assert_close(strong[1, 3], plain[1, 3], **TIGHT)
    assert not torch.allclose(strong[0, 1], plain[0, 1])
