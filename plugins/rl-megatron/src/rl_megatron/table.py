"""Which box of each tensor of a checkpoint a rank has, and where it lies in megatron's parameters.

One table for each architecture computes it from a rank's coordinates alone, so every rank knows
what every other one has. Loading, exporting, refits and checkpoints are all read off it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from rl_megatron.sizes import Coordinates, Sizes

if TYPE_CHECKING:
    import torch

    from rl_core.interfaces import Box
    from rl_megatron.architectures import Architecture

__all__ = ["Experts", "Piece", "Table", "padded_vocabulary"]

#: How the tensors of experts are named: one tensor of all, or one for each.
Experts = Literal["stacked", "separate"]

#: Names of the two tensors that may be one.
EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
#: Rows of the vocabulary on each rank are a multiple of it.
_VOCABULARY_MULTIPLE = 8


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of one tensor, on one rank.

    Attributes:
        name: The tensor's, in the checkpoint.
        shape: Of the whole tensor.
        box: For each dimension, the first index and the one after the last.
        parameter: Names that megatron's parameter may have, of which the model has one.
        rows: ``(of, first, after)``: of every ``of`` rows of the parameter the box has those from
            ``first`` to before ``after``.
        counts: Whether this rank is the one that counts the box where several ranks of a copy of
            the model have it.
        copy: Which of the ranks that have the same part of the model this is.
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    parameter: tuple[str, ...]
    rows: tuple[int, int, int]
    counts: bool
    copy: int

    @property
    def sends(self) -> bool:
        """Whether this rank is the one of all that gives the box."""
        return self.counts and self.copy == 0

    @property
    def sizes(self) -> tuple[int, ...]:
        """Of the box."""
        return tuple(after - first for first, after in self.box)

    @property
    def index(self) -> tuple[slice, ...]:
        """The box in the whole tensor."""
        return tuple(slice(first, after) for first, after in self.box)

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """The elements of the box, in their order, in a tensor of the parameter's shape.

        Returns:
            A view with as many elements as the box, of which it may be a reshape.
        """
        of, first, after = self.rows
        if len(tensor) == of:
            return tensor[first:after]
        return tensor.view(-1, of, *tensor.shape[1:])[:, first:after]

    def views(self, tensor: torch.Tensor) -> Iterator[tuple[Box, torch.Tensor]]:
        """The box, cut into boxes that lie in a tensor of the parameter's shape as they are.

        Yields:
            Each of them, of a group of heads or of all, and a view of its sizes.
        """
        view = self.view(tensor)
        if view.dim() <= len(self.box):
            yield self.box, view.view(self.sizes)
            return
        (first, after), *features = self.box
        height = view.shape[1]
        for start, rows in zip(range(first, after, height), view, strict=True):
            yield ((start, start + height), *features), rows

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """The box out of a tensor of the parameter's shape; a copy where it is not in one piece."""
        return self.view(tensor).reshape(self.sizes)

    def write(self, tensor: torch.Tensor, box: torch.Tensor) -> None:
        """Puts a box into a tensor of the parameter's shape."""
        target = self.view(tensor)
        target.copy_(box.reshape(target.shape))


@dataclass(frozen=True, slots=True)
class _Rank:
    """What a row of the table needs to know of a rank.

    Attributes:
        architecture: Of the model.
        at: The rank.
        experts: How experts are named.
    """

    architecture: Architecture
    at: Coordinates
    experts: Experts


#: Gives pieces of some checkpoint tensors, of names that begin with ``source``, in a parameter.
_Row = Callable[[_Rank, str, tuple[str, ...]], Iterator[Piece]]


class Table:
    """All tensors of a model, under the names that transformers has for them.

    Args:
        architecture: Of the model.
        experts: How experts are named.
    """

    def __init__(self, architecture: Architecture, experts: Experts = "stacked") -> None:
        self.architecture = architecture
        self._experts = experts

    @property
    def tied(self) -> tuple[str, str] | None:
        """The embedding, and the output layer that is the same tensor, if it is."""
        return (EMBEDDING, OUTPUT) if self.architecture.tied else None

    def pieces(self, at: Coordinates) -> list[Piece]:
        """What a rank has, layer by layer."""
        architecture, rank = self.architecture, _Rank(self.architecture, at, self._experts)
        found: list[Piece] = []
        if at.first:
            found += _vocabulary(rank, EMBEDDING, ("embedding.word_embeddings.weight",))
        each = architecture.layers // at.sizes.pipeline
        for local in range(each):
            layer = at.stage * each + local
            for source, targets, row in _layer(architecture):
                names = tuple(f"decoder.layers.{local}.{target}" for target in targets)
                found += row(rank, f"model.layers.{layer}.{source}", names)
        if not at.last:
            return found
        norm = _whole(architecture.hidden)
        found += norm(rank, "model.norm.weight", ("decoder.final_layernorm.weight",))
        if not architecture.tied:
            found += _vocabulary(rank, OUTPUT, ("output_layer.weight",))
        elif not at.first:  # a copy, which the first stage sends
            copies = _vocabulary(rank, EMBEDDING, ("output_layer.weight",))
            found += (replace(piece, counts=False) for piece in copies)
        return found

    def padding(self, at: Coordinates) -> set[str]:
        """Parameters of a rank that has no token of the vocabulary: no piece lies in them."""
        if any(_vocabulary(_Rank(self.architecture, at, self._experts), EMBEDDING, ())):
            return set()
        return {"embedding.word_embeddings.weight", "output_layer.weight"}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of all tensors."""
        alone = Coordinates(0, 0, 0, 0, Sizes())
        return {piece.name: piece.shape for piece in self.pieces(alone)}


def _layer(architecture: Architecture) -> Iterator[tuple[str, tuple[str, ...], _Row]]:
    """The tensors of a layer: in the checkpoint, in megatron-core's own and fused modules, and how.

    transformer-engine's matrices hold the norm before them.
    """
    a = architecture
    qkv, mlp, vector = "self_attention.linear_qkv", "mlp.linear_fc1", _whole(a.hidden)
    yield "input_layernorm.weight", ("input_layernorm.weight", f"{qkv}.layer_norm_weight"), vector
    yield "self_attn.", (f"{qkv}.weight",), _qkv("weight")
    if a.qkv_bias:
        yield "self_attn.", (f"{qkv}.bias",), _qkv("bias")
    if a.head_norm:
        for head in "qk":
            norm = (f"self_attention.{head}_layernorm.weight",)
            yield f"self_attn.{head}_norm.weight", norm, _whole(a.head)
    yield "self_attn.o_proj.weight", ("self_attention.linear_proj.weight",), _columns("heads")
    if a.linear_bias:
        yield "self_attn.o_proj.bias", ("self_attention.linear_proj.bias",), vector
    before = ("pre_mlp_layernorm.weight", f"{mlp}.layer_norm_weight")
    yield "post_attention_layernorm.weight", before, vector
    if a.experts:
        yield "mlp.gate.weight", ("mlp.router.weight",), _whole(a.experts, a.hidden)
        yield "mlp.experts.", ("mlp.experts.",), _experts
        return
    yield "mlp.", (f"{mlp}.weight",), _gate_up("weight")
    yield "mlp.down_proj.weight", ("mlp.linear_fc2.weight",), _columns("ffn")
    if a.linear_bias:
        yield "mlp.", (f"{mlp}.bias",), _gate_up("bias")
        yield "mlp.down_proj.bias", ("mlp.linear_fc2.bias",), vector


# -- how a tensor is split ------------------------------------------------------------------------


def _piece(
    rank: _Rank,
    name: str,
    parameter: tuple[str, ...],
    shape: tuple[int, ...],
    box: Box,
    rows: tuple[int, int, int] | None = None,
    *,
    expert: bool = False,
) -> Piece:
    """Of several ranks with one box the first counts it."""
    at = rank.at
    whole = all((0, size) == part for size, part in zip(shape, box, strict=True))
    copy = at.data // at.sizes.expert if expert else at.data
    height = box[0][1] - box[0][0]
    counts = expert or at.tensor == 0 or not whole
    return Piece(name, shape, box, parameter, rows or (height, 0, height), counts, copy)


def _part(size: int, at: Coordinates) -> tuple[int, int]:
    each = size // at.sizes.tensor
    return each * at.tensor, each * (at.tensor + 1)


def _whole(*shape: int) -> _Row:
    """The same on all tensor-parallel ranks."""

    def row(rank: _Rank, name: str, parameter: tuple[str, ...]) -> Iterator[Piece]:
        yield _piece(rank, name, parameter, shape, tuple((0, size) for size in shape))

    return row


def _vocabulary(rank: _Rank, name: str, parameter: tuple[str, ...]) -> Iterator[Piece]:
    """Rows of tokens; the last rank's may be padding, or even all of them."""
    a, at = rank.architecture, rank.at
    padded = padded_vocabulary(a.vocabulary, at.sizes.tensor)
    first, after = (min(edge, a.vocabulary) for edge in _part(padded, at))
    each = padded // at.sizes.tensor
    if after > first:
        shape, box = (a.vocabulary, a.hidden), ((first, after), (0, a.hidden))
        yield _piece(rank, name, parameter, shape, box, (each, 0, after - first))


def _columns(features: Literal["heads", "ffn"]) -> _Row:
    """Columns of a matrix with an input that is split."""

    def row(rank: _Rank, name: str, parameter: tuple[str, ...]) -> Iterator[Piece]:
        a = rank.architecture
        width = a.heads * a.head if features == "heads" else a.ffn
        box = (0, a.hidden), _part(width, rank.at)
        yield _piece(rank, name, parameter, (a.hidden, width), box)

    return row


def _qkv(kind: str) -> _Row:
    """Megatron has, for each group of heads, the rows of its queries, of its key and its value."""

    def row(rank: _Rank, source: str, parameter: tuple[str, ...]) -> Iterator[Piece]:
        a = rank.architecture
        queries = a.heads // a.groups * a.head
        of = queries + 2 * a.head
        features = (a.hidden,) if kind == "weight" else ()
        edges = {"q": (0, queries), "k": (queries, queries + a.head), "v": (of - a.head, of)}
        for letter, (first, after) in edges.items():
            size = (after - first) * a.groups
            yield _piece(
                rank,
                f"{source}{letter}_proj.{kind}",
                parameter,
                (size, *features),
                (_part(size, rank.at), *((0, n) for n in features)),
                (of, first, after),
            )

    return row


def _gate_up(kind: str) -> _Row:
    """Megatron has the rows of the gate, then those that go up, on each rank."""

    def row(rank: _Rank, source: str, parameter: tuple[str, ...]) -> Iterator[Piece]:
        a = rank.architecture
        features = (a.hidden,) if kind == "weight" else ()
        each = a.ffn // rank.at.sizes.tensor
        for place, name in enumerate(("gate_proj", "up_proj")):
            yield _piece(
                rank,
                f"{source}{name}.{kind}",
                parameter,
                (a.ffn, *features),
                (_part(a.ffn, rank.at), *((0, n) for n in features)),
                (2 * each, place * each, (place + 1) * each),
            )

    return row


def _local_experts(rank: _Rank, prefix: str, layer: str) -> Iterator[tuple[int, tuple[str, ...]]]:
    """An expert's number, and how megatron names a matrix of it: one module each, or grouped."""
    each = rank.architecture.experts // rank.at.sizes.expert
    for local in range(each):
        names = (f"local_experts.{local}.{layer}.weight", f"{layer}.weight{local}")
        yield each * rank.at.expert + local, tuple(prefix + name for name in names)


def _experts(rank: _Rank, source: str, parameter: tuple[str, ...]) -> Iterator[Piece]:
    """Gate and up of each expert, which are halves of one stacked tensor; then its way down."""
    a, [prefix] = rank.architecture, parameter
    each = a.ffn // rank.at.sizes.tensor
    first, after = _part(a.ffn, rank.at)
    for number, targets in _local_experts(rank, prefix, "linear_fc1"):
        for place, part in enumerate(("gate_proj", "up_proj")):
            rows = (2 * each, place * each, (place + 1) * each)
            if rank.experts == "stacked":
                offset = place * a.ffn
                yield _piece(
                    rank,
                    f"{source}gate_up_proj",
                    targets,
                    (a.experts, 2 * a.ffn, a.hidden),
                    ((number, number + 1), (first + offset, after + offset), (0, a.hidden)),
                    rows,
                    expert=True,
                )
            else:
                yield _piece(
                    rank,
                    f"{source}{number}.{part}.weight",
                    targets,
                    (a.ffn, a.hidden),
                    ((first, after), (0, a.hidden)),
                    rows,
                    expert=True,
                )
    for number, targets in _local_experts(rank, prefix, "linear_fc2"):
        name, shape = f"{source}{number}.down_proj.weight", (a.hidden, a.ffn)
        box: Box = ((0, a.hidden), (first, after))
        if rank.experts == "stacked":
            name, shape = f"{source}down_proj", (a.experts, *shape)  # type: ignore[assignment]
            box = ((number, number + 1), *box)
        yield _piece(rank, name, targets, shape, box, (a.hidden, 0, a.hidden), expert=True)


def padded_vocabulary(vocabulary: int, tensor: int) -> int:
    """Rows of an embedding over so many tensor-parallel ranks."""
    multiple = _VOCABULARY_MULTIPLE * tensor
    return -(-vocabulary // multiple) * multiple
