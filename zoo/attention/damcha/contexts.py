"""Which tokens share a context: every one has its own, or a block of ``context_stride`` tokens shares its first's."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.errors import ZooError


@dataclass
class PrefixState:
    """What the causal context needs to remember of the tokens already seen.

    ``total`` (B, D) is the sum over real tokens and ``count`` (B, 1) their number, both in float32 (float64 for
    float64 inputs); ``held`` (B, D) is the context of the block that the last token is in. A fresh state holds None
    until the first tokens arrive.
    """

    total: Tensor | None = None
    count: Tensor | None = None
    held: Tensor | None = None


def mean_context(x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
    """Mean over the real tokens: (B, T, D) -> (B, D), zero where a row has none."""
    wide = x.double() if x.dtype == torch.float64 else x.float()
    if padding_mask is None:
        return wide.mean(dim=1).to(x.dtype)
    real = padding_mask.bool().unsqueeze(-1)  # (B, T, 1)
    total = wide.masked_fill(~real, 0).sum(dim=1)
    return (total / real.sum(dim=1).clamp(min=1)).to(x.dtype)


def prefix_mean_context(x: Tensor, padding_mask: Tensor | None = None, state: PrefixState | None = None) -> Tensor:
    """Mean over the real tokens up to and including each position: (B, T, D) -> (B, T, D).

    Sums and counts are kept in float32 (float64 for float64 inputs): a bfloat16 running sum is wrong after a few
    hundred tokens. A prefix without a real token has context zero. With ``state`` the prefix goes on from the tokens
    seen before, and the state is brought up to date.
    """
    wide = x.double() if x.dtype == torch.float64 else x.float()
    if padding_mask is None:
        total = wide.cumsum(dim=1)
        count = torch.arange(1, x.shape[1] + 1, device=x.device, dtype=wide.dtype).view(1, -1, 1)
    else:
        real = padding_mask.bool().unsqueeze(-1)
        total = wide.masked_fill(~real, 0).cumsum(dim=1)
        count = real.to(wide.dtype).cumsum(dim=1)
    if state is not None:
        if state.total is not None and state.count is not None:
            if len(state.total) != len(x):
                raise ZooError(
                    f"cache: got {len(x)} rows, but it holds {len(state.total)}; use a new one for another batch"
                )
            total, count = total + state.total.unsqueeze(1), count + state.count.unsqueeze(1)
        state.total, state.count = total[:, -1], count[:, -1].expand(x.shape[0], 1)
    return (total / count.clamp(min=1)).to(x.dtype)


@dataclass(frozen=True)
class TokenBlocks:
    """Where T tokens lie in n blocks of ``width`` slots, as many as a block's tokens can need.

    ``slots`` (B, T) is the slot of every token, the last one + 1 for padding; None where token t is in slot t.
    """

    width: int
    tokens: int
    n: int
    slots: Tensor | None = None

    def gather(self, x: Tensor) -> Tensor:
        """Tokens (B, T, H, dh) by block, (B, n, H, width, dh); slots without a token are zero."""
        if self.width == 1:
            return x.unsqueeze(-2)
        B, T, H, dh = x.shape
        room = self.n * self.width
        if self.slots is None:
            if room > T:
                x = F.pad(x, (0, 0, 0, 0, 0, room - T))
        else:
            places = self.slots.unsqueeze(-1).expand(B, T, H * dh)
            x = x.new_zeros(B, room + 1, H * dh).scatter(1, places, x.flatten(2))[:, :room]
        return x.view(B, self.n, self.width, H, dh).transpose(2, 3)

    def scatter(self, y: Tensor) -> Tensor:
        """The way back; padding gets the numbers of some slot."""
        if self.width == 1:
            return y.squeeze(-2)
        B, n, H, s, dh = y.shape
        y = y.transpose(2, 3).reshape(B, n * s, H * dh)
        if self.slots is None:
            y = y[:, : self.tokens]
        else:
            y = y.gather(1, self.slots.clamp(max=n * s - 1).unsqueeze(-1).expand(-1, -1, H * dh))
        return y.view(B, self.tokens, H, dh)

    def spread(self, m: Tensor) -> Tensor:
        """What each block has, (B, n, ...), given to each of its tokens: (B, T, ...)."""
        if self.width == 1:
            return m
        if self.slots is None:
            return m.repeat_interleave(self.width, dim=1)[:, : self.tokens]
        rows = torch.arange(len(m), device=m.device).unsqueeze(1)
        return m[rows, (self.slots // self.width).clamp(max=self.n - 1)]

    def last(self, m: Tensor) -> Tensor:
        """Of what each block has, (B, n, ...), that of the block with each row's last real token: (B, ...)."""
        if self.slots is None:
            return m[:, -1]
        ends = self.slots.masked_fill(self.slots == self.n * self.width, 0).amax(dim=1) // self.width
        return m[torch.arange(len(m), device=m.device), ends]


def block_contexts(
    x: Tensor, stride: int, padding_mask: Tensor | None = None, state: PrefixState | None = None
) -> tuple[Tensor, TokenBlocks]:
    """The context of every block, (B, n, D), and where the tokens lie.

    A block's context is the mean over the real tokens up to and including the block's first. Blocks count real tokens
    from the start of the text, so neither padding nor how the text was cut into calls moves them.
    """
    B, T, D = x.shape
    fresh = state is None or state.count is None
    offset = None if state is None or state.count is None else state.count.long() % stride  # (B, 1)
    held = None if state is None else state.held
    means = prefix_mean_context(x, padding_mask, state)
    if stride == 1:
        return means, TokenBlocks(1, T, T)
    width = min(stride, T)
    if fresh and padding_mask is None:
        if torch.compiler.is_exporting() and state is None:  # counting blocks would bind the graph to some lengths
            return means.index_select(1, torch.arange(T, device=x.device) // stride * stride), TokenBlocks(1, T, T)
        contexts = means[:, ::width]
        blocks = TokenBlocks(width, T, contexts.shape[1])
        if state is not None:
            state.held = blocks.last(contexts)
        return contexts, blocks

    real = torch.ones(B, T, dtype=torch.bool, device=x.device) if padding_mask is None else padding_mask.bool()
    places = real.long().cumsum(dim=1) - 1  # (B, T)
    if offset is not None:
        places = places + offset
    n = -(-(T + (0 if fresh else stride - 1)) // stride)
    first = real & (places % stride == 0)
    where = torch.where(first, places // stride, n).unsqueeze(-1).expand(B, T, D)
    contexts = means.new_zeros(B, n + 1, D).scatter(1, where, means)[:, :n]
    if offset is not None and held is not None:
        begun = torch.where(offset > 0, held.to(x.dtype), contexts[:, 0])
        contexts = torch.cat([begun.unsqueeze(1), contexts[:, 1:]], dim=1)
    block = places // stride
    begin = block * stride if offset is None else torch.where(block == 0, offset, block * stride)
    slots = block * width + places - begin  # the tokens of a block begun earlier take its first slots
    blocks = TokenBlocks(width, T, n, torch.where(real, slots, n * width))
    if state is not None:
        state.held = blocks.last(contexts)
    return contexts, blocks
