"""Carry trained weights over to a network for other data, by name, and say what became of each."""

import hashlib
import math
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast

import torch
from timm.models import adapt_input_conv
from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn
from torch import Tensor, nn

from zoo.errors import ZooError, listed
from zoo.graph import AdjacencySpec
from zoo.tokenizer import END_OF_TEXT, Tokenizer


@dataclass
class Fate:
    """What became of a tensor: ``kept``, ``moved`` (other place or order), ``resized``, ``new`` or ``dropped``."""

    tensor: str
    fate: Literal["kept", "moved", "resized", "new", "dropped"]
    note: str = ""

    def plain(self) -> dict[str, str]:
        return asdict(self)


def summary(fates: Sequence[Fate]) -> str:
    """A Markdown table of what became of each tensor; those simply kept share a row."""
    same = [fate for fate in fates if fate.fate == "kept"]
    rows = [f"| {fate.fate} | {fate.tensor} | {fate.note} |" for fate in fates if fate.fate != "kept"]
    if same:
        rows.insert(0, f"| kept | {len(same)} tensors | as they were |")
    return "\n".join(["| | tensor | |", "|---|---|---|", *rows])


@dataclass
class Axis:
    """A dimension of a tensor whose places have names, here and there."""

    dim: int
    what: str
    here: Sequence[Hashable]
    there: Sequence[Hashable]

    @property
    def common(self) -> tuple[list[int], list[int]]:
        """The places, here and there, of the names that both have."""
        place = {name: i for i, name in enumerate(self.there)}
        pairs = [(i, place[name]) for i, name in enumerate(self.here) if name in place]
        return [i for i, _ in pairs], [i for _, i in pairs]

    def note(self) -> str:
        known, own = set(self.there), set(self.here)
        new = [name for name in self.here if name not in known]
        gone = [name for name in self.there if name not in own]
        parts = [f"{len(self.here) - len(new)} of {len(self.here)} {self.what} by name"]
        if new:
            parts.append(f"new: {_names(new)}")
        if gone:
            parts.append(f"gone: {_names(gone)}")
        return ", ".join(parts)


def _names(names: Sequence[Hashable]) -> str:
    return listed([name.decode(errors="replace") if isinstance(name, bytes) else name for name in names])


def rearrange(mine: Tensor, theirs: Tensor, axes: Sequence[Axis]) -> tuple[Tensor, str, str]:
    """``mine`` with the values of ``theirs`` wherever both have the names, the fate of the tensor, and a note on it."""
    named = {axis.dim: axis for axis in axes}
    if mine.ndim != theirs.ndim or any(mine.shape[d] != theirs.shape[d] for d in range(mine.ndim) if d not in named):
        return mine, "new", f"{_shape(theirs)} there, {_shape(mine)} here"
    changed = [axis for axis in axes if list(axis.here) != list(axis.there)]
    if not changed:
        return theirs, "kept", ""
    here: list[Tensor] = []
    there: list[Tensor] = []
    for d in range(mine.ndim):
        rows = named[d].common if d in named else (list(range(mine.shape[d])),) * 2
        if not rows[0]:
            return mine, "new", f"no {named[d].what} in common"
        for place, index in ((here, rows[0]), (there, rows[1])):
            place.append(torch.tensor(index).view(-1, *[1] * (mine.ndim - 1 - d)))
    filled = mine.clone()
    filled[tuple(here)] = theirs.to(mine.dtype)[tuple(there)]
    return filled, "moved", "; ".join(axis.note() for axis in changed)


def _carry(
    own: Mapping[str, Tensor], source: Mapping[str, Tensor], axes: Mapping[str, Sequence[Axis]]
) -> tuple[dict[str, Tensor], list[Fate]]:
    filled, fates = dict(own), []
    for name, mine in own.items():
        if name not in source:
            fates.append(Fate(name, "new", "not there"))
            continue
        filled[name], fate, note = rearrange(mine, source[name], axes.get(name, ()))
        fates.append(Fate(name, cast(Any, fate), note))
    fates += [Fate(name, "dropped", f"{_shape(source[name])}, no place here") for name in source if name not in own]
    return filled, fates


def weights_digest(state: Mapping[str, Tensor]) -> str:
    """SHA-256, as hex, over names, types, shapes and bytes of tensors, in the order of their names."""
    found = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def adapt_text(
    network: nn.Module, saved: Mapping[str, Tensor], saved_tokenizer: Tokenizer, tokenizer: Tokenizer
) -> tuple[dict[str, Tensor], list[Fate]]:
    """A state dict for ``network`` from the weights of a language model with another vocabulary.

    Rows of embedding and head go by the text of their token. A token that is new starts as the mean of the tokens that
    its text had there. Learned positions go by their number. What has another shape stays as ``network`` has it.

    Args:
        network: the model to fill; it isn't changed.
        saved: the other model's state dict.
        saved_tokenizer: its tokenizer.
        tokenizer: the tokenizer of ``network``.

    Returns:
        The state dict, and what became of each tensor.
    """
    own = {name: tensor.detach() for name, tensor in network.state_dict().items()}
    here, there = _token_texts(tokenizer), _token_texts(saved_tokenizer)
    axes: dict[str, list[Axis]] = {name: [Axis(0, "tokens", here, there)] for name in _VOCABULARY}
    positions = "position_embedding.weight"
    if positions in own and positions in saved:
        axes[positions] = [Axis(0, "positions", range(len(own[positions])), range(len(saved[positions])))]
    source = dict(saved)
    tied = own["head.weight"].data_ptr() == own["embedding.weight"].data_ptr()
    apart = tied and "head.weight" in source and not torch.equal(source["head.weight"], source["embedding.weight"])
    if apart:
        source["head.weight"] = source["embedding.weight"]
    filled, fates = _carry(own, source, axes)
    known = set(there)
    pieces = {
        i: saved_tokenizer.encode_bytes(text)
        for i, text in enumerate(tokenizer.token_bytes)
        if text and text not in known
    }
    for fate in fates:
        if fate.tensor in _VOCABULARY and fate.fate == "moved" and pieces:
            theirs = source[fate.tensor]
            for i, numbers in pieces.items():
                filled[fate.tensor][i] = theirs[numbers].mean(dim=0)
            n = len(here) - len(pieces)
            fate.note = f"{n} of {len(here)} tokens by their text, {len(pieces)} as the mean of its tokens there"
        if apart and fate.tensor == "head.weight":
            fate.fate, fate.note = "dropped", "tied to the embedding here"
    return filled, fates


_VOCABULARY = ("embedding.weight", "head.weight")


def _token_texts(tokenizer: Tokenizer) -> list[bytes | str]:
    return [text or END_OF_TEXT for text in tokenizer.token_bytes]


def adapt_table(
    network: nn.Module,
    saved: Mapping[str, Tensor],
    saved_identity: Mapping[str, Any],
    identity: Mapping[str, Any],
    readout: tuple[str, str],
    renamed: Mapping[str, str],
) -> tuple[dict[str, Tensor], list[Fate]]:
    """A state dict for ``network`` from the weights of a model on another graph.

    Embeddings go by the name of their node, scales and shifts by that of their input, readouts by node and by class or
    target. Packed layers keep their own edges and take the other's projections.

    Args:
        network: the ``GraphTokenModel`` to fill; it isn't changed.
        saved: the other model's state dict.
        saved_identity: the identity of the table it was trained on.
        identity: that of the table of ``network``.
        readout: which nodes are read, there and here: outputs or all.
        renamed: names of nodes, classes and targets here that were others there.

    Returns:
        The state dict, and what became of each tensor.

    Raises:
        ZooError: for a name in ``renamed`` that isn't there.
    """
    specs = [AdjacencySpec.from_dict(one["graph"]) for one in (saved_identity, identity)]
    what, answers = _answers(identity, renamed)
    answers_there = _answers(saved_identity, {})[1] if saved_identity["problem"] == identity["problem"] else []
    _check_renamed(
        renamed,
        [*specs[1].nodes, *identity.get("classes", ()), *identity["targets"]],
        [*specs[0].nodes, *saved_identity.get("classes", ()), *saved_identity["targets"]],
    )

    def axis(dim: int, what: str, there: Sequence[str], here: Sequence[str]) -> Axis:
        return Axis(dim, what, [renamed.get(name, name) for name in here], there)

    read = [spec.nodes if which == "all" else spec.output_nodes for spec, which in zip(specs, readout, strict=True)]
    nodes, inputs = [spec.nodes for spec in specs], [spec.input_nodes for spec in specs]
    axes = {
        "node_embedding": [axis(0, "nodes", *nodes)],
        "value_scale": [axis(0, "inputs", *inputs)],
        "value_shift": [axis(0, "inputs", *inputs)],
        "readout_weight": [axis(0, "nodes", *read), Axis(2, what, answers, answers_there)],
        "readout_bias": [Axis(0, what, answers, answers_there)],
    }
    source = {name: tensor for name, tensor in saved.items() if not name.endswith(_EDGES)}
    # a binary problem has one number, for the second class against the first
    turned = (
        identity["problem"] == "binary"
        and answers == answers_there
        and ([renamed.get(name, name) for name in identity["classes"]] != saved_identity["classes"])
    )
    if turned:
        source |= {name: -source[name] for name in _READOUT}
    own = {name: tensor.detach() for name, tensor in network.state_dict().items()}
    weights = {name: tensor for name, tensor in own.items() if not name.endswith(_EDGES)}
    filled, fates = _carry(weights, source, axes)
    for fate in fates:
        if turned and fate.tensor in _READOUT and fate.fate != "new":
            fate.fate, fate.note = "moved", "; ".join(["turned, as the classes are", *filter(None, [fate.note])])
    if specs[0].fingerprint != specs[1].fingerprint:
        there = {(a, b) for a, b in specs[0].to_dict()["edges"]}
        here = {(renamed.get(a, a), renamed.get(b, b)) for a, b in specs[1].to_dict()["edges"]}
        fates.append(Fate("edges", "moved", f"this graph's {len(here)}, {len(here & there)} of them there too"))
    return own | filled, fates


_READOUT = ("readout_weight", "readout_bias")
_EDGES = ("source_index", "target_index", "index_digest", "identity")


def _answers(identity: Mapping[str, Any], renamed: Mapping[str, str]) -> tuple[str, list[str]]:
    """What the readout's columns are, and their names as the other model has them."""
    problem = identity["problem"]
    names = [renamed.get(name, name) for name in identity["classes" if problem == "multiclass" else "targets"]]
    if problem == "binary":
        return "pairs of classes", [" or ".join(sorted(renamed.get(name, name) for name in identity["classes"]))]
    return ("classes" if problem == "multiclass" else "targets"), names


def _check_renamed(renamed: Mapping[str, str], here: Sequence[str], there: Sequence[str]) -> None:
    for names, known, where in ((renamed.keys(), here, "here"), (renamed.values(), there, "in the pretrained model")):
        if unknown := [name for name in names if name not in set(known)]:
            raise ZooError(
                f"model.renamed: got {listed(unknown)}, which is no node, class or target {where}; give names here "
                "with the names they had there"
            )
    taken = [renamed.get(name, name) for name in dict.fromkeys(here)]
    if len(set(taken)) < len(taken):
        raise ZooError("model.renamed: two names stand for the same one of the pretrained model; each can have one")


def adapt_pictures(
    network: nn.Module,
    saved: Mapping[str, Tensor],
    saved_classes: Sequence[str] | None,
    classes: Sequence[str],
    heads: Sequence[str],
) -> tuple[dict[str, Tensor], list[Fate]]:
    """A state dict for ``network`` from the weights of another picture model.

    Class rows of the head go by class name, the first convolution to other channels and positions to another size by
    timm's rules, and the value and output projections of ordinary attention into a ``MetricAttention``. Whatever has no
    counterpart of its shape stays as ``network`` has it.

    Args:
        network: the model to fill; it isn't changed.
        saved: the other model's state dict.
        saved_classes: its class names in order; None if nobody knows them.
        classes: the class names of ``network``.
        heads: names of the classifier's layers, in both.

    Returns:
        The state dict, and what became of each tensor.
    """
    own = {name: tensor.detach() for name, tensor in network.state_dict().items()}
    source, notes = dict(saved), {}
    for theirs_in, mine_in in (("qkv", "W_v"), ("proj", "out_proj")):
        for name in [name for name in source if re.search(rf"\.attn\.{theirs_in}\.(weight|bias)$", name)]:
            mine_at = name.replace(f".attn.{theirs_in}.", f".attn.{mine_in}.")
            if name not in own and mine_at in own:
                values = theirs_in == "qkv"
                source[mine_at] = source[name].chunk(3)[2] if values else source[name]
                notes[mine_at] = f"the values' third of {name}" if values else name
                del source[name]
    resized = _fit_pictures(network, source)

    starts = tuple(f"{head}." for head in heads)
    rows = {c: i for i, c in enumerate(saved_classes or ())}
    known = [c for c in classes if c in rows]
    others = "" if len(known) == len(classes) else "; the others new"
    reorder = saved_classes is None or list(saved_classes) != list(classes)
    filled, fates = dict(own), []
    for name, mine in own.items():
        theirs = resized.get(name)
        if theirs is not None and reorder and name.startswith(starts) and theirs.shape[1:] == mine.shape[1:]:
            if not known:
                fates.append(Fate(name, "new", "no class in common"))
                continue
            filled[name] = mine.clone()
            for i, c in enumerate(classes):
                if c in rows:
                    filled[name][i] = theirs[rows[c]]
            fates.append(Fate(name, "moved", f"rows of {len(known)} of {len(classes)} classes, by name{others}"))
        elif theirs is None or theirs.shape != mine.shape:
            was = "not there" if theirs is None else f"{_shape(theirs)} there"
            fates.append(Fate(name, "new", f"{was}, {_shape(mine)} here"))
        else:
            filled[name] = theirs
            if name in notes:
                fates.append(Fate(name, "moved", notes[name]))
            elif source[name].shape != theirs.shape:
                fates.append(Fate(name, "resized", f"{_shape(source[name])} to {_shape(theirs)}"))
            else:
                fates.append(Fate(name, "kept"))
    fates += [Fate(name, "dropped", f"{_shape(source[name])}, no place here") for name in source if name not in own]
    return filled, fates


def _fit_pictures(network: nn.Module, source: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``source`` with the first convolution fitted to the network's channels, patches and positions to its sizes."""
    own, fitted = network.state_dict(), dict(source)
    config = cast(Mapping[str, Any], getattr(network, "pretrained_cfg", None) or {})
    first = config.get("first_conv") or ()
    for name in [f"{conv}.weight" for conv in ([first] if isinstance(first, str) else first)]:
        if name in own and name in fitted and own[name].ndim == fitted[name].ndim == 4:
            there, here = fitted[name].shape[1], own[name].shape[1]
            if {there, here} == {1, 3}:  # not where the stem cuts pictures into blocks first
                fitted[name] = adapt_input_conv(here, fitted[name], base_chans=there)
    patches = "patch_embed.proj.weight"
    if not isinstance(network, VisionTransformer) or patches not in own:
        return fitted
    if patches in fitted and fitted[patches].shape[0] != own[patches].shape[0]:
        return fitted  # of another width
    positions = None if _may_resize(network, own, fitted) else fitted.pop("pos_embed", None)
    fitted = checkpoint_filter_fn(fitted, network)
    return fitted if positions is None else fitted | {"pos_embed": positions}


def _may_resize(network: VisionTransformer, own: Mapping[str, Tensor], source: Mapping[str, Tensor]) -> bool:
    """Whether timm may resize the positions: it takes them for those of a square, after as many tokens as here."""
    there, here = source.get("pos_embed"), own.get("pos_embed")
    if there is None or here is None or there.shape == here.shape:
        return False
    tokens = ("cls_token", "reg_token")
    if any((source[name].shape if name in source else 0) != (own[name].shape if name in own else 0) for name in tokens):
        return False
    patches = there.shape[1] - (0 if network.no_embed_class else network.num_prefix_tokens)
    return patches > 0 and math.isqrt(patches) ** 2 == patches


def _shape(tensor: Tensor) -> str:
    return " x ".join(map(str, tensor.shape)) or "a number"
