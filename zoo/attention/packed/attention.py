"""Multi-head attention over the edges of a graph."""

import contextlib
import hashlib
import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any, Self, TypedDict, Unpack, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.utils import skip_init

from zoo.attention.packed.edges import CompressedEdges, Edges, IndexedEdges
from zoo.errors import CheckpointMismatchError, Kpnn2Error

if TYPE_CHECKING:
    from zoo.graph import AdjacencySpec  # which brings pandas, and takes a second that importing the zoo needn't

_DIGEST, _IDENTITY = "index_digest", "identity"
_DIGEST_BYTES = 32
_HALF = (torch.float16, torch.bfloat16)
_UNORDERED: tuple[type, ...] = (Set, type(iter(set())))  # sets by the letter, and what only seems to have an order
_ORDERED: tuple[type, ...] = (Sequence, type({}.keys()))  # an ordered set, the keys of a dictionary


class PackedOptions(TypedDict, total=False):
    """The options of ``PackedMultiheadAttention`` that a graph doesn't settle; described there."""

    dropout: float
    bias: bool
    kdim: int | None
    vdim: int | None
    batch_first: bool
    add_self_loops: bool
    generator: torch.Generator | None
    chunk_size: int | None


@dataclass(frozen=True)
class _Sorted:
    """Sorted edges, and what they were made of: detached views that share memory and version with the buffers."""

    source: Tensor
    target: Tensor
    versions: tuple[int | None, int | None]
    made_for: tuple[int, int, int | None]
    edges: Edges

    @classmethod
    def now(cls, source: Tensor, target: Tensor, made_for: tuple[int, int, int | None], edges: Edges) -> "_Sorted":
        return cls(source.detach(), target.detach(), (_version(source), _version(target)), made_for, edges)

    def is_of(self, source: Tensor, target: Tensor) -> bool:
        """Whether nothing has been written since, in memory that is still the same."""
        return None not in self.versions and all(
            old.data_ptr() == new.data_ptr()
            and old.shape == new.shape
            and old.stride() == new.stride()
            and old.device == new.device
            and version == _version(new)
            for old, new, version in zip((self.source, self.target), (source, target), self.versions, strict=True)
        )


class PackedMultiheadAttention(nn.Module):
    r"""Multi-head attention in which a query sees the keys at the sources of its edges, and no others.

    With :math:`N(i)` the visible sources of query i, for every head

    .. math::
        s_{ij} = q_i \cdot k_j / \sqrt{dh}, \quad a_{ij} = \exp(s_{ij}) / \sum_{l \in N(i)} \exp(s_{il}), \quad
        y_i = W_o \, concat_h \Big( \sum_{j \in N(i)} a_{ij} v_j \Big) + b_o

    Work and memory grow with the number of edges; where more than one in twenty pairs is an edge, on a CPU, work is
    that of dense attention, whose mask holds at most ``edges.MASK_PAIRS`` pairs at once. A query that sees no key mixes
    to zero, so its output is ``b_o``.
    Scores, softmax and mix of float16 and bfloat16 modules are computed in float32. Autocast is switched off inside:
    inputs are cast to the parameters' dtype, which ``.half()``, ``.double()`` or ``.to()`` change.

    Args:
        source_index: key position of each edge; 1-D integers, as a tensor, an array or an ordered collection, which is
            copied.
        target_index: query position of each edge, of the same length; no (source, target) pair may come twice.
        query_features: number of query positions L.
        key_features: number of key positions S.
        embed_dim: width D of queries, keys, values and outputs.
        num_heads: number of heads H; divides D.
        dropout: dropout probability of the attention weights, in training only.
        bias: whether the four projections have a bias.
        kdim: None or D; there for calls written for ``nn.MultiheadAttention``.
        vdim: None or D, likewise.
        batch_first: batched tensors are (..., seq, D); else (seq, batch, D).
        add_self_loops: append the missing edges (i, i), in ascending order; needs L = S.
        identity: what checkpoints of this layer claim to be for, usually ``spec.fingerprint``; None claims nothing.
        generator: source of the initial weights, which are then drawn without touching the global random state.
        chunk_size: how many edges are gathered at once, forward and backward; None takes all. It bounds memory and
            changes no number. On a CPU nothing is gathered, and it bounds how many indices one call takes, down to
            one sample and head; of a dense graph, how many pairs of query and key a mask has, down to one query.
            ``edges.MASK_PAIRS`` bounds masks without it, and is the most that is kept of one between calls.

    Attributes:
        head_dim: dh = D / H.
        nnz: number of edges, added self-loops included.
        source_index, target_index: int64 buffers (nnz). Writing to them rewires the layer; build a new one instead.
        q_proj, k_proj, v_proj, out_proj: ``nn.Linear`` from D to D.

    ``state_dict`` also holds ``index_digest``, the SHA-256 of the edges and the four sizes, and ``identity`` if there
    is one, as uint8 tensors on the CPU. Loading compares both, and the edges, before any tensor is copied.

    Raises:
        Kpnn2Error: for an argument that breaks a rule above, here and in ``forward``.
        CheckpointMismatchError: from ``load_state_dict``, for a checkpoint of other edges, sizes or identity. The
            layer is then unchanged. What a checkpoint lacks is no error.

    Source: packed attention, "PackedMultiheadAttention".
    """

    source_index: Tensor
    target_index: Tensor
    _sorted: "_Sorted | None" = None

    def __init__(
        self,
        source_index: object,
        target_index: object,
        query_features: int,
        key_features: int,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = True,
        add_self_loops: bool = False,
        *,
        identity: str | None = None,
        generator: torch.Generator | None = None,
        chunk_size: int | None = None,
    ) -> None:
        super().__init__()
        self.query_features = _positive("query_features", query_features)
        self.key_features = _positive("key_features", key_features)
        self.embed_dim = _positive("embed_dim", embed_dim)
        self.num_heads = _positive("num_heads", num_heads)
        if self.embed_dim % self.num_heads:
            raise Kpnn2Error(
                f"embed_dim: got {embed_dim} with num_heads {num_heads}; every head takes an equal share, so make "
                "embed_dim a multiple of num_heads"
            )
        self.head_dim = self.embed_dim // self.num_heads
        for name, width in (("kdim", kdim), ("vdim", vdim)):
            if width is not None and (not _is_int(width) or width != self.embed_dim):
                raise Kpnn2Error(
                    f"{name}: got {_show(width)}; keys and values are embed_dim = {embed_dim} wide, so leave {name} out"
                )
        if isinstance(dropout, bool) or not isinstance(dropout, (int, float)) or not 0 <= dropout <= 1:
            raise Kpnn2Error(f"dropout: got {_show(dropout)}; it is a probability, so pass a number from 0 to 1")
        self.dropout = float(dropout)
        for name, flag in (("bias", bias), ("batch_first", batch_first), ("add_self_loops", add_self_loops)):
            _check_flag(name, flag)
        self.batch_first, self.add_self_loops = batch_first, add_self_loops
        self.identity = _checked_identity(identity)
        self.chunk_size = None if chunk_size is None else _positive("chunk_size", chunk_size, "a positive int or None")
        _check_generator(generator)

        source, target = self._checked_edges(source_index, target_index)
        self.nnz = len(source)
        device = torch.empty(0).device
        # Under torch.device("meta") weights are promises that a checkpoint keeps; edges are needed to check it.
        indices_on = "cpu" if device.type == "meta" else device
        self.register_buffer("source_index", torch.from_numpy(source).to(indices_on))
        self.register_buffer("target_index", torch.from_numpy(target).to(indices_on))
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(self.embed_dim, self.embed_dim, bias=bias)
            if generator is None
            # nn.Linear itself would draw from the global random state.
            else skip_init(nn.Linear, self.embed_dim, self.embed_dim, bias=bias, device=device)  # type: ignore[no-untyped-call]
            for _ in range(4)
        )
        self.reset_parameters(generator)

    @classmethod
    def from_adjacency(
        cls, spec: "AdjacencySpec", embed_dim: int, num_heads: int, **options: Unpack[PackedOptions]
    ) -> Self:
        """Self-attention among the nodes of a graph, along its edges, that claims the graph's fingerprint.

        Args:
            spec: the graph; queries and keys are its nodes, in ``spec.nodes`` order.
            embed_dim: width D.
            num_heads: number of heads H.
            options: any other option of the layer.
        """
        n = spec.state_dim
        return cls(
            spec.source_index, spec.target_index, n, n, embed_dim, num_heads, identity=spec.fingerprint, **options
        )

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw the four weights anew, Xavier-uniform, and set the biases to zero.

        Args:
            generator: where to draw from; None is PyTorch's global random state. The same state as at construction
                gives the same weights again.

        Raises:
            Kpnn2Error: if ``generator`` is neither.
        """
        _check_generator(generator)
        for proj in (self.q_proj, self.k_proj, self.v_proj, self.out_proj):
            nn.init.xavier_uniform_(proj.weight, generator=generator)
            if proj.bias is not None:
                nn.init.zeros_(proj.bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend along the edges.

        Args:
            query: (..., L, D) or, not ``batch_first``, (L, B, D); unbatched it is (L, D) either way.
            key: (..., S, D), (S, B, D) or (S, D), with the batch shape of ``query``.
            value: as ``key``.
            key_padding_mask: bool, (..., S) with the batch shape first in either layout; True hides a key.
            need_weights: also return the attention weights.
            attn_mask: None only; the edges are the mask.
            average_attn_weights: average the weights over heads.
            is_causal: False only.

        Returns:
            The output, in the layout of ``query`` and the dtype of the parameters, and None or the weights in the
            order of the edges: (..., nnz), not ``batch_first`` (nnz, B), unbatched (nnz,); with another axis of H at
            the end unless averaged. As with ``nn.MultiheadAttention`` they are those after dropout.

        Raises:
            Kpnn2Error: if an argument has another type, dtype or shape than said here.
        """
        _check_flag("need_weights", need_weights)
        _check_flag("average_attn_weights", average_attn_weights)
        if attn_mask is not None:
            raise Kpnn2Error(
                f"attn_mask: got {_show(attn_mask)}; the edges are the mask, so leave it out and build the layer from "
                "the edges you want"
            )
        if is_causal is not False:
            raise Kpnn2Error(
                f"is_causal: got {_show(is_causal)}; the edges say who sees whom, so leave it False and build the "
                "layer from edges that point forward"
            )
        batch = self._batch_shape(query, key, value)
        hidden = self._hidden_keys(key_padding_mask, batch, query.device)  # (B, S) or None
        edges = self._sorted_edges()

        with _no_autocast(query.device.type):
            q = self._by_head(self.q_proj, query, batch)  # (B, L, H, dh)
            k = self._by_head(self.k_proj, key, batch, hidden)  # (B, S, H, dh)
            v = self._by_head(self.v_proj, value, batch, hidden)
            scale = 1 / math.sqrt(self.head_dim)
            plain = hidden is None and not need_weights and not (self.training and self.dropout)
            mix = edges.attend(q, k, v, scale) if plain else None  # (B, L, H, dh)
            if mix is None:
                scores = edges.dot(q, k, scale)
                if hidden is not None:
                    scores = edges.hide(scores, hidden)
                weights = F.dropout(edges.softmax(scores), self.dropout, self.training)
                mix = edges.mix(weights, v)
            output = self.out_proj(self._as_passed(mix.flatten(-2).to(self.out_proj.weight.dtype), batch))
            if not need_weights:
                return output, None
            weights = edges.as_given(weights, self.num_heads)  # (B, nnz, H)
            if average_attn_weights:
                weights = weights.mean(dim=-1, keepdim=True)
            weights = self._as_passed(weights.to(output.dtype), batch)
            return output, weights.squeeze(-1) if average_attn_weights else weights

    def _by_head(self, proj: nn.Linear, x: Tensor, batch: torch.Size, hidden: Tensor | None = None) -> Tensor:
        """Project, and lay out as (B, n, H, dh) in float32 or float64."""
        x = x.to(proj.weight.dtype)
        if not self.batch_first and x.dim() == 3:
            x = x.transpose(0, 1)
        x = x.reshape(math.prod(batch), *x.shape[-2:])
        if hidden is not None:
            x = x.masked_fill(hidden.unsqueeze(-1), 0)  # NaN in padding would survive a product with zero
        x = proj(x)
        x = x.to(torch.float32 if x.dtype in _HALF else x.dtype)
        return x.view(*x.shape[:2], self.num_heads, self.head_dim)

    def _as_passed(self, x: Tensor, batch: torch.Size) -> Tensor:
        """From (B, n, width) to the caller's layout."""
        if not self.batch_first and batch:
            return x.transpose(0, 1)
        return x.reshape(*batch, *x.shape[-2:])

    def _batch_shape(self, query: Tensor, key: Tensor, value: Tensor) -> torch.Size:
        shapes = []
        for name, x, length in (
            ("query", query, self.query_features),
            ("key", key, self.key_features),
            ("value", value, self.key_features),
        ):
            if not isinstance(x, Tensor) or not x.is_floating_point():
                raise Kpnn2Error(
                    f"{name}: got {_show(x)}; expected a tensor of real numbers, so convert it with .float()"
                )
            fits = x.dim() >= 2 if self.batch_first else x.dim() in (2, 3)
            where = -2 if self.batch_first or x.dim() == 2 else 0
            if not fits or x.shape[-1] != self.embed_dim or x.shape[where] != length:
                layout = "(..., {0}, {1})" if self.batch_first else "({0}, batch, {1})"
                wanted = layout.format(length, self.embed_dim)
                raise Kpnn2Error(
                    f"{name}: got shape {tuple(x.shape)}; expected {wanted} or unbatched {(length, self.embed_dim)}, "
                    f"with batch_first {self.batch_first}, so transpose it or build the layer for it"
                )
            shapes.append(x.shape[:-2] if where == -2 else x.shape[1:2])
        if not shapes[0] == shapes[1] == shapes[2]:
            raise Kpnn2Error(
                f"query, key, value: got batch shapes {', '.join(str(tuple(s)) for s in shapes)}; they must agree, so "
                "expand or slice the inputs"
            )
        return shapes[0]

    def _hidden_keys(self, mask: Tensor | None, batch: torch.Size, device: torch.device) -> Tensor | None:
        if mask is None:
            return None
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            raise Kpnn2Error(
                f"key_padding_mask: got {_show(mask)}; expected a bool tensor, True where a key is hidden, so convert "
                "it with .bool() or a comparison"
            )
        if mask.shape != (*batch, self.key_features):
            raise Kpnn2Error(
                f"key_padding_mask: got shape {tuple(mask.shape)}; expected {(*batch, self.key_features)}, the batch "
                "shape and then the keys, so reshape or expand it"
            )
        return mask.to(device).reshape(math.prod(batch), self.key_features)

    def extra_repr(self) -> str:
        return (
            f"query_features={self.query_features}, key_features={self.key_features}, embed_dim={self.embed_dim}, "
            f"num_heads={self.num_heads}, nnz={self.nnz}, dropout={self.dropout}, batch_first={self.batch_first}, "
            f"add_self_loops={self.add_self_loops}, chunk_size={self.chunk_size}"
        )

    # ------------------------------------------------------------------ edges

    def _checked_edges(self, source_index: object, target_index: object) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The edges as two arrays of the layer's own, self-loops added."""
        source, target = _integers("source_index", source_index), _integers("target_index", target_index)
        if len(source) != len(target):
            raise Kpnn2Error(
                f"source_index, target_index: got {len(source)} and {len(target)} entries; each edge has one in both, "
                "so pass arrays of one length"
            )
        if not len(source):
            raise Kpnn2Error("source_index, target_index: got no entries; a layer has at least one edge, so pass some")
        self._check_range(source, target)
        order = np.lexsort((target, source))
        s, t = source[order], target[order]
        again = (s[1:] == s[:-1]) & (t[1:] == t[:-1])
        if again.any():
            first = int(again.argmax())
            raise Kpnn2Error(
                f"source_index, target_index: got the pair ({s[first]}, {t[first]}) more than once, {again.sum()} "
                "repeats in all; an edge is given once, so drop the repeats"
            )
        if self.add_self_loops:
            if self.query_features != self.key_features:
                raise Kpnn2Error(
                    f"add_self_loops: got True with query_features {self.query_features} and key_features "
                    f"{self.key_features}; only where queries and keys are the same nodes is there a self-loop, so "
                    "leave it False"
                )
            lacking = np.ones(self.query_features, dtype=bool)
            lacking[source[source == target]] = False
            loops = np.flatnonzero(lacking)
            source, target = np.concatenate([source, loops]), np.concatenate([target, loops])
        return source, target

    def _check_range(self, source: NDArray[np.int64], target: NDArray[np.int64]) -> None:
        for name, index, bound, size in (
            ("source_index", source, "key_features", self.key_features),
            ("target_index", target, "query_features", self.query_features),
        ):
            wrong = (index < 0) | (index >= size)
            if wrong.any():
                first = int(wrong.argmax())
                raise Kpnn2Error(
                    f"{name}: got {index[first]} at {first}; positions run from 0 to {bound} - 1 = {size - 1}, so mend "
                    f"the index or set {bound} to the number of nodes it counts"
                )

    def _sorted_edges(self) -> Edges:
        """The edges in an order that suits the device.

        Made at the first use on a device, and again when the buffers hold something else or another size or chunk is
        set.
        """
        source, target = self.source_index, self.target_index
        if torch.compiler.is_compiling():  # values aren't known then, and any order is right
            order = torch.arange(self.nnz, device=source.device)
            return IndexedEdges(source, target, order, self.query_features, self.chunk_size)
        made_for = (self.query_features, self.key_features, self.chunk_size)
        kept = self._sorted
        if kept is not None and kept.made_for == made_for:
            if kept.is_of(source, target):
                return kept.edges
            # Loading and DistributedDataParallel write what is there already, and a sort costs more than a comparison.
            if kept.edges.are(source, target):
                self._sorted = _Sorted.now(source, target, made_for, kept.edges)
                return kept.edges
        self._check_range(source.cpu().numpy(), target.cpu().numpy())
        with torch.inference_mode(False):  # the first use may be a validation step, and training goes on with this
            edges = (
                CompressedEdges(source, target, self.key_features, self.query_features, self.chunk_size)
                if source.device.type == "cpu"
                else IndexedEdges.sort(source, target, self.query_features, self.chunk_size)
            )
        self._sorted = _Sorted.now(source, target, made_for, edges)
        return edges

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_sorted"}

    # ------------------------------------------------------------------ checkpoints

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + _DIGEST] = _as_tensor(self._index_digest())
        if self.identity is not None:
            destination[prefix + _IDENTITY] = _as_tensor(self.identity.encode())

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        found = _differences(self, state_dict, prefix)
        if found:
            raise _mismatch({_path(prefix): found})
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        own = (prefix + _DIGEST, prefix + _IDENTITY)
        unexpected_keys[:] = [key for key in unexpected_keys if key not in own]

    def _index_digest(self) -> bytes:
        edges = _edges_hash(self.source_index, self.target_index)
        return _sized(edges, self.query_features, self.key_features, self.embed_dim, self.num_heads)


def check_packed_layers(module: nn.Module, state_dict: Mapping[str, Any], prefix: str = "") -> None:
    """Check every packed attention layer of a module against a checkpoint, before anything of it is loaded.

    ``load_state_dict`` checks one layer after the other and has loaded some when another is refused; call this first.

    Args:
        module: any module; may itself be a ``PackedMultiheadAttention``.
        state_dict: the checkpoint.
        prefix: what the module's keys begin with in there, with the dot: empty, or such as ``"network."``.

    Raises:
        CheckpointMismatchError: listing every layer that differs, by path, and all that differs in it.
    """
    found = {}
    for name, layer in module.named_modules(remove_duplicate=False):
        if isinstance(layer, PackedMultiheadAttention):
            keys = f"{prefix}{name}." if name else prefix
            differences = _differences(layer, state_dict, keys)
            if differences:
                found[_path(keys)] = differences
    if found:
        raise _mismatch(found)


def _mismatch(found: Mapping[str, Sequence[str]]) -> CheckpointMismatchError:
    layers = " | ".join(f"{path}: {'; '.join(differences)}" for path, differences in found.items())
    return CheckpointMismatchError(
        f"made for another graph or another layer than this, so it was not loaded. {layers}. Load a "
        "checkpoint of the same graph and sizes, or build the layer from those the checkpoint was made with",
        argument="checkpoint",
    )


def _path(prefix: str) -> str:
    return prefix.removesuffix(".") or PackedMultiheadAttention.__name__


def _differences(layer: PackedMultiheadAttention, state_dict: Mapping[str, Any], prefix: str) -> list[str]:
    """All that a checkpoint says of edges, sizes and identity and that isn't so here."""
    found = _edge_differences(layer, state_dict, prefix)
    digest = state_dict.get(prefix + _DIGEST)
    if digest is not None:
        saved = _as_bytes(digest)
        if saved is None or len(saved) != _DIGEST_BYTES:
            found.append(
                f"{_DIGEST}: {_show(digest)} in the checkpoint; expected a 1-D uint8 tensor of {_DIGEST_BYTES}"
            )
        elif saved != layer._index_digest() and not found:
            found.append(_size_difference(layer, state_dict, prefix, saved))
    identity = state_dict.get(prefix + _IDENTITY)
    if identity is not None:
        saved = _as_bytes(identity)
        here = "none" if layer.identity is None else repr(layer.identity)
        if saved is None or not _is_utf8(saved):
            found.append(f"{_IDENTITY}: unreadable in the checkpoint (not UTF-8 in a 1-D uint8 tensor), {here} here")
        elif layer.identity is None or saved != layer.identity.encode():
            found.append(f"{_IDENTITY}: {saved.decode()!r} in the checkpoint, {here} here, so other names or edges")
    return found


def _edge_differences(layer: PackedMultiheadAttention, state_dict: Mapping[str, Any], prefix: str) -> list[str]:
    saved = [state_dict.get(prefix + name) for name in ("source_index", "target_index")]
    if saved[0] is None or saved[1] is None:
        return []  # load_state_dict names the keys that lack
    here = [layer.source_index.cpu(), layer.target_index.cpu()]
    if not all(isinstance(index, Tensor) and index.dim() == 1 and not index.is_floating_point() for index in saved):
        return [
            f"source_index, target_index: no 1-D integer tensors in the checkpoint ({', '.join(map(_show, saved))})"
        ]
    there = [cast(Tensor, index).cpu() for index in saved]
    n_here, n_there = len(here[0]), min(map(len, there))
    common = min(n_here, n_there)
    unlike = (there[0][:common] != here[0][:common]) | (there[1][:common] != here[1][:common])
    if len(there[0]) == len(there[1]) == n_here and not unlike.any():
        return []
    first = int(unlike.int().argmax()) if unlike.any() else common
    shown = [
        f"{int(source[first])} -> {int(target[first])}" if first < n else "no edge"
        for (source, target), n in ((there, n_there), (here, n_here))
    ]
    return [
        f"edges: {n_there} in the checkpoint, {n_here} here; first difference at edge {first}: {shown[0]} in the "
        f"checkpoint, {shown[1]} here"
    ]


def _size_difference(layer: PackedMultiheadAttention, state_dict: Mapping[str, Any], prefix: str, saved: bytes) -> str:
    """Which sizes a digest was taken with, found by trying: it is a hash and can't be read."""
    L, S, D, H = layer.query_features, layer.key_features, layer.embed_dim, layer.num_heads
    weight = state_dict.get(f"{prefix}q_proj.weight")
    width = weight.shape[0] if isinstance(weight, Tensor) and weight.dim() == 2 else D
    edges = _edges_hash(layer.source_index, layer.target_index)
    for heads in range(1, width + 1):
        if width % heads == 0 and _sized(edges, L, S, width, heads) == saved:
            return f"embed_dim {width} and num_heads {heads} in the checkpoint, {D} and {H} here"
    return (
        f"{_DIGEST}: {saved.hex()[:12]}... in the checkpoint, {layer._index_digest().hex()[:12]}... here: other sizes "
        f"or edges; here query_features is {L}, key_features {S}, embed_dim {D}, num_heads {H}"
    )


def _edges_hash(source: Tensor, target: Tensor) -> "hashlib._Hash":
    digest = hashlib.sha256()
    for index in (source, target):
        digest.update(index.detach().cpu().numpy().astype("<i8").tobytes())
    return digest


def _sized(edges: "hashlib._Hash", *sizes: int) -> bytes:
    digest = edges.copy()
    digest.update(np.array(sizes, dtype="<i8").tobytes())
    return digest.digest()


def _as_tensor(data: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy())


def _as_bytes(value: object) -> bytes | None:
    if not isinstance(value, Tensor) or value.dtype != torch.uint8 or value.dim() != 1:
        return None
    return value.detach().cpu().numpy().tobytes()


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


# ---------------------------------------------------------------------- arguments


def _is_int(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _positive(name: str, value: object, expected: str = "a positive int") -> int:
    if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
        raise Kpnn2Error(f"{name}: got {_show(value)}; expected {expected}, so pass one")
    return int(value)


def _check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise Kpnn2Error(f"{name}: got {_show(value)}; expected True or False, so pass one of them")


def _check_generator(generator: object) -> None:
    if generator is not None and not isinstance(generator, torch.Generator):
        raise Kpnn2Error(
            f"generator: got {_show(generator)}; expected a torch.Generator or None, so for a seed pass "
            "torch.Generator().manual_seed(seed)"
        )


def _checked_identity(identity: object) -> str | None:
    if identity is None:
        return None
    if not isinstance(identity, str):
        raise Kpnn2Error(f"identity: got {_show(identity)}; expected text or None, so pass spec.fingerprint")
    try:
        identity.encode()
    except UnicodeEncodeError:
        raise Kpnn2Error(
            f"identity: got {_show(identity)}, which UTF-8 can't hold; checkpoints keep it in UTF-8, so pass "
            "spec.fingerprint"
        ) from None
    return identity


def _integers(name: str, values: Any) -> NDArray[np.int64]:
    """A copy of the values as a 1-D int64 array."""
    if isinstance(values, Tensor):
        if values.is_floating_point() or values.is_complex():  # bfloat16 is no dtype of NumPy's
            raise _no_integers(name, _show(values))
        values = values.detach().cpu().numpy()
    if isinstance(values, np.ndarray):
        if values.ndim != 1 or values.dtype.kind not in "iu":
            raise _no_integers(name, f"shape {values.shape} and dtype {values.dtype}")
        return values.astype(np.int64)
    if isinstance(values, (str, bytes)):
        raise _no_integers(name, _show(values))
    if isinstance(values, _UNORDERED) and not isinstance(values, _ORDERED):
        raise Kpnn2Error(
            f"{name}: got {_show(values)}; edge e goes from source_index[e] to target_index[e], and a set has no "
            f"order, so pass spec.{name} or an integer tensor"
        )
    try:
        values = list(values)
    except TypeError:
        raise _no_integers(name, _show(values)) from None
    strange = {kind for kind in set(map(type, values)) if not issubclass(kind, Integral) or issubclass(kind, bool)}
    if strange:
        place = next(i for i, value in enumerate(values) if type(value) in strange)
        raise _no_integers(name, f"{_show(values[place])} at {place}")
    try:
        return np.array(values, dtype=np.int64)
    except OverflowError:
        raise _no_integers(name, f"{_show(max(values, key=abs))}, beyond 64 bits") from None


def _no_integers(name: str, got: str) -> Kpnn2Error:
    return Kpnn2Error(f"{name}: got {got}; expected 1-D integers, so pass spec.{name} or an integer tensor")


def _show(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and dtype {value.dtype}"
    text = " ".join(repr(value).split())
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"


def _version(buffer: Tensor) -> int | None:
    return None if buffer.is_inference() else buffer._version  # PyTorch doesn't count writes to inference tensors


def _no_autocast(device: str) -> contextlib.AbstractContextManager[Any]:
    if torch.amp.is_autocast_available(device):
        return torch.autocast(device, enabled=False)
    return contextlib.nullcontext()
