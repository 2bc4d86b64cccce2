"""Parts: each tensor, cut wherever a piece of some rank or engine ends.

Plans, digests and messages are about parts. Both sides derive them from the same cuts. A tensor
that nobody cuts is its only part, so that a refit between whole models has no others.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, reduce
from itertools import pairwise, product
from operator import and_, attrgetter, or_
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import msgspec
import torch

from rl_core.errors import ManifestMismatchError, RefitProtocolError
from rl_core.interfaces.weights import Box, TensorSpec, whole_box
from rl_core.weights.data.manifest import WeightManifest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rl_core.interfaces.weights import Piece

__all__ = [
    "LanePlaces",
    "Layout",
    "Part",
    "Partition",
    "box_of",
    "check_layout",
    "layout_of",
    "lying",
    "narrowed",
    "readers_of",
    "runs_in",
    "sizes_of",
    "union",
    "without",
]

#: Parts of all tensors: a Ready message has 16 bytes for each, and a frame holds half a million.
_MOST_PARTS = 1 << 19
#: What is seen of each tensor, of 10,000 in a few milliseconds.
_SEEN = [getattr(torch.Tensor, name) for name in ("data_ptr", "stride", "is_conj", "is_neg")]
_SEEN += [attrgetter("shape"), attrgetter("dtype")]
#: The boxes that one process has of each tensor, by its index in ``owned``; absent is all of it.
Layout: TypeAlias = Mapping[int, Sequence[Box]]
#: By index of a tensor, for each dimension the indices at which it is cut.
Cuts: TypeAlias = Mapping[int, tuple[tuple[int, ...], ...]]


class Part(TensorSpec, frozen=True):
    """Some elements of a tensor; its own ``name`` and ``shape`` are those of the part.

    Attributes:
        of: Name of the tensor.
        at: Index of the first element in each dimension of the tensor.
    """

    of: str = ""
    at: tuple[int, ...] = ()


def box_of(spec: TensorSpec) -> Box:
    """Which elements of its tensor a part has."""
    if not isinstance(spec, Part):
        return whole_box(spec.shape)
    return tuple((first, first + size) for first, size in zip(spec.at, spec.shape, strict=True))


@lru_cache(maxsize=1024)
def sizes_of(box: Box) -> tuple[int, ...]:
    """The shape of a tensor with these elements."""
    return tuple(after - first for first, after in box)


def narrowed(tensor: torch.Tensor, box: Box, part: TensorSpec) -> torch.Tensor:
    """The elements of a part, in the tensor of a piece with that box."""
    if tensor.shape == part.shape:
        return tensor
    at = [first - start for (first, _), (start, _) in zip(box_of(part), box, strict=True)]
    return tensor[tuple(slice(n, n + size) for n, size in zip(at, part.shape, strict=True))]


def runs_in(
    shape: Sequence[int], part: TensorSpec, offset: int, count: int
) -> Iterator[tuple[int, slice]]:
    """Where a run of a part's elements is in the flattened tensor of a shape.

    Yields:
        The index of each stretch of them there, and which of the run's elements these are.
    """
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    first = sum(start * stride for (start, _), stride in zip(box_of(part), strides, strict=True))
    width, dim = 1, len(shape)
    while dim and (dim == len(shape) or part.shape[dim] == shape[dim]):
        dim -= 1
        width *= part.shape[dim]
    done = 0
    while done < count:
        row, within = divmod(offset + done, width)
        some = min(width - within, count - done)
        place = first + within
        for size, stride in zip(reversed(part.shape[:dim]), reversed(strides[:dim]), strict=True):
            row, index = divmod(row, size)
            place += index * stride
        yield place, slice(done, done + some)
        done += some


def layout_of(
    manifest: WeightManifest, pieces: Iterable[Piece] | None, *, sends: bool = False
) -> dict[int, list[Box]]:
    """The boxes of pieces; those of aliases are not looked at.

    Args:
        manifest: Of the tensors.
        pieces: Of a sink, or of a source.
        sends: They are a source's, which may make pieces that have no tensor.

    Raises:
        ManifestMismatchError: A piece is not in its tensor, has another shape than its box, or is
            not whole and has no tensor that is written to.
    """
    if pieces is None:
        return {}
    whole = manifest.boxes
    entire = bytearray(len(whole))
    found: dict[int, list[Box]] = {}  # of tensors that are not one whole piece
    made: set[int] = set()  # of which a piece has no tensor
    for piece in pieces:
        if (index := manifest.index.get(piece.name)) is None:
            continue
        spec, box, tensor = manifest.owned[index], piece.box, piece.tensor
        if box == whole[index]:
            fits = tensor is None or tensor.shape == spec.shape
        elif tensor is None:
            fits = sends and _is_within(box, spec.shape)
        else:
            fits = _is_within(box, spec.shape) and tensor.shape == sizes_of(box)
        if not fits:
            has = "no tensor" if tensor is None else f"a tensor of shape {list(tensor.shape)}"
            raise ManifestMismatchError(
                f"{piece.name}: a piece has the box {list(box)} and {has}; the whole tensor is "
                f"{list(spec.shape)} {spec.dtype}",
                fix="correct what pieces() of the weight source or sink gives",
                misshaped=[piece.name],
            )
        if index not in found and box == whole[index]:
            entire[index] = 1  # the engine may have it twice
            continue
        boxes = found.setdefault(index, [whole[index]] if entire[index] else [])
        if box not in boxes:
            boxes.append(box)
        if tensor is None:
            made.add(index)
        if sends and index in made and len(boxes) > 1:
            raise ManifestMismatchError(
                f"{piece.name}: a piece has no tensor, and there are others of that tensor",
                fix="give pieces() of the weight source one piece of it, or pieces with tensors",
                misshaped=[piece.name],
            )
    return {n: found.get(n, []) for n in range(len(whole)) if n in found or not entire[n]}


def lying(pieces: Iterable[Piece]) -> list[Any]:
    """The pieces, and where and as they lie, without holding their tensors."""
    names, boxes, tensors = [*zip(*pieces, strict=True)] or [(), (), ()]
    here, absent = [t for t in tensors if t is not None], [t is None for t in tensors]
    return [names, boxes, absent, *([*map(seen, here)] for seen in _SEEN)]


def readers_of(
    takes: Mapping[str, bytes], skip: bytes, *, first: int, idle: Collection[str]
) -> tuple[bytes, dict[str, bytes]]:
    """A mask like ``skip`` of a rank's plan, and by engine the ``reads`` of its ``LaneInfo``.

    Args:
        takes: By engine, a mask of the parts that it takes from this rank.
        skip: A mask of the parts that no engine needs; empty if all are needed.
        first: Which engine is the first, another one for every rank: they send to it first.
        idle: Engines that are among the readers, whether they read anything or not.
    """
    # A number has one byte for each part, so that all are compared at once.
    count, left = len(next(iter(takes.values()))), ~int.from_bytes(skip)
    reads = {key: int.from_bytes(mask) & left for key, mask in takes.items()}
    keys = [key for key, mask in reads.items() if mask or key in idle]
    given, all_of_it = reduce(or_, reads.values()), int.from_bytes(b"\1" * count)
    left_out = (all_of_it ^ given).to_bytes(count) if given != all_of_it else b""
    common = reduce(and_, (reads[key] for key in keys), given)
    at = first % max(1, len(keys))
    return left_out, {
        key: b"" if common == given else (reads[key] + common).to_bytes(count)
        for key in keys[at:] + keys[:at]
    }


def union(masks: Iterable[bytes]) -> bytes:
    """A 1 where any of the masks has one."""
    *_, last = masks = list(masks)
    return reduce(or_, map(int.from_bytes, masks)).to_bytes(len(last))


def without(mask: bytes, other: bytes) -> bytes:
    """A 1 where the mask has one, and the other has none."""
    return (int.from_bytes(mask) & ~int.from_bytes(other)).to_bytes(len(mask))


def check_layout(manifest: WeightManifest, layout: Layout, peer: str) -> None:
    """Raises RefitProtocolError for boxes, sent by ``peer``, that are in no tensor."""
    for index, boxes in layout.items():
        known = 0 <= index < len(manifest.owned)
        if not known or not all(_is_within(box, manifest.owned[index].shape) for box in boxes):
            raise RefitProtocolError(
                f"{peer} has boxes outside of the trainer's tensors", phase="DISCOVER", peer=peer
            )


def _is_within(box: Box, shape: Sequence[int]) -> bool:
    return len(box) == len(shape) and all(
        0 <= first < after <= size for (first, after), size in zip(box, shape, strict=True)
    )


@dataclass(frozen=True)
class Partition:
    """The parts of all tensors of a manifest.

    Attributes:
        whole: The tensors.
        cuts: Of those that are cut.
    """

    whole: WeightManifest
    cuts: Cuts = field(default_factory=dict)

    @classmethod
    def of(cls, whole: WeightManifest, layouts: Iterable[Layout]) -> Self:
        """The coarsest one in which each piece is some parts."""
        edges: dict[int, list[set[int]]] = {}
        for layout in layouts:
            for index, boxes in layout.items():
                shape = whole.owned[index].shape
                found = edges.setdefault(index, [set() for _ in shape])
                for box in boxes:
                    for inner, ends, size in zip(found, box, shape, strict=True):
                        inner.update(end for end in ends if 0 < end < size)
        cuts = {
            index: tuple(tuple(sorted(inner)) for inner in found)
            for index, found in sorted(edges.items())
            if any(found)
        }
        return cls(whole, cuts)

    def __post_init__(self) -> None:
        counts = (math.prod(len(at) + 1 for at in inner) for inner in self.cuts.values())
        if (parts := len(self.whole.owned) + sum(counts)) > _MOST_PARTS:
            raise RefitProtocolError(
                f"the pieces of trainer and engines cut the tensors into {parts} parts; at most "
                f"{_MOST_PARTS} are possible",
                phase="PREPARE",
                fix="give fewer and larger pieces",
            )

    @classmethod
    def checked(cls, whole: WeightManifest, cuts: Cuts, last: Self | None = None) -> Self:
        """The partition with cuts that another process sent; ``last`` if it has these.

        Raises:
            RefitProtocolError: They are no cuts of these tensors.
        """
        if last is not None and last.cuts == cuts and last.whole == whole:
            return last
        for index, inner in cuts.items():
            known = 0 <= index < len(whole.owned)
            shape = whole.owned[index].shape if known else ()
            sound = (
                known
                and len(inner) == len(shape)
                and all(
                    list(at) == sorted({*at}) and all(0 < a < size for a in at)
                    for at, size in zip(inner, shape, strict=True)
                )
            )
            if not sound:
                raise RefitProtocolError(
                    "the sender's cuts do not fit these tensors", phase="PREPARE"
                )
        return cls(whole, dict(cuts))

    @cached_property
    def _parts(self) -> tuple[WeightManifest, list[int]]:
        """All parts, and the number of the first one of each tensor."""
        parts: list[TensorSpec] = []
        starts = [0]
        for index, spec in enumerate(self.whole.owned):
            if index in self.cuts:
                edges = zip(self.cuts[index], spec.shape, strict=True)
                for box in product(*(pairwise((0, *inner, size)) for inner, size in edges)):
                    name = f"{spec.name}[{','.join(f'{first}:{after}' for first, after in box)}]"
                    at, fields = tuple(first for first, _ in box), (spec.role, None, spec.trainable)
                    parts.append(Part(name, sizes_of(box), spec.dtype, *fields, spec.name, at))
            else:
                parts.append(spec)
            starts.append(len(parts))
        return (WeightManifest(tuple(parts)) if self.cuts else self.whole), starts

    @property
    def manifest(self) -> WeightManifest:
        """The parts as tensors, in the order of their tensors; ``whole`` if nothing is cut."""
        return self._parts[0]

    def of_tensor(self, index: int) -> range:
        """Indices of the parts of a tensor."""
        starts = self._parts[1]
        return range(starts[index], starts[index + 1])

    def tensor_of(self, part: int) -> TensorSpec:
        """The tensor of a part."""
        spec = self.manifest.owned[part]
        return self.whole.by_name[spec.of] if isinstance(spec, Part) else spec

    def of_box(self, index: int, box: Box) -> list[int]:
        """Indices of the parts of a box."""
        parts = self.of_tensor(index)
        if index not in self.cuts:
            return list(parts)
        shape = self.whole.owned[index].shape
        number, ranges = 1, []
        for inner, size, ends in zip(
            reversed(self.cuts[index]), reversed(shape), reversed(box), strict=True
        ):
            side = (0, *inner, size)
            first, after = (bisect_left(side, end) for end in ends)
            ranges.append(range(first * number, after * number, number))
            number *= len(side) - 1
        return sorted(parts.start + sum(place) for place in product(*ranges))

    def mask(self, layout: Layout) -> bytes:
        """A byte for each part, 1 for those that a process with this layout has."""
        found = bytearray(b"\1") * len(self.manifest.owned)
        for index, boxes in layout.items():
            parts = self.of_tensor(index)
            found[parts.start : parts.stop] = bytes(len(parts))
            for box in boxes:
                for part in self.of_box(index, box):
                    found[part] = 1
        return bytes(found)

    def shared_out(
        self,
        layouts: Mapping[int, Layout],
        engines: Mapping[str, tuple[str, bytes]],
        hosts: Mapping[int, str],
        *,
        compared: bool,
    ) -> dict[int, dict[str, bytes]]:
        """By rank of a trainer, for each engine a mask of the parts that it takes from there.

        Of the ranks that have a part, engines take it from one on their host. Those that have none
        there all take it from the same one. Of several, it is the rank with the fewest bytes so
        far, so that none is busier than it has to be. If copies are not compared, it is the first
        rank, so that what an engine gets is one copy, and it is on another host unless all that
        the engines of a host keep is there.

        Args:
            layouts: Of the ranks.
            engines: The host of each, and a mask of the parts that it keeps.
            hosts: Of the ranks.
            compared: Copies of a part are compared before they count.
        """
        here = {rank: self.mask(layout) for rank, layout in layouts.items()}
        count, loads = len(self.manifest.owned), dict.fromkeys(here, 0)
        kept: dict[str, int] = {}  # by host, what any engine there keeps
        for host, mask in engines.values():
            kept[host] = kept.get(host, 0) | int.from_bytes(mask)
        keeps = {host: mask.to_bytes(count) for host, mask in kept.items()}
        lack = dict.fromkeys(keeps, b"")  # by host, what its ranks do not have
        if not compared:
            for host, mask in keeps.items():
                there = [has for rank, has in here.items() if hosts.get(rank) == host]
                lack[host] = without(mask, union([bytes(count), *there]))
        gives = {rank: {host: bytearray(mask) for host in keeps} for rank, mask in here.items()}
        shared: list[tuple[int, list[int]]] = []
        for part, having in enumerate(zip(*here.values(), strict=True) if len(here) > 1 else ()):
            found = [rank for rank, has in zip(here, having, strict=True) if has]
            if len(found) > 1:
                shared.append((part, found))
            for rank in found if len(found) == 1 else ():
                loads[rank] += self.manifest.owned[part].nbytes
        for part, found in shared:
            far = None  # the rank for all hosts without one that has it
            for host in (host for host, mask in keeps.items() if mask[part]):
                enough = bool(host) and not any(lack[host])
                near = [rank for rank in found if enough and hosts.get(rank) == host]
                source = None if near else far
                if source is None:
                    source = min(near or found, key=loads.__getitem__ if compared else int)
                    loads[source] += self.manifest.owned[part].nbytes
                far = far if near else source
                for rank in found:
                    gives[rank][host][part] = rank == source
        ints = {(r, host): int.from_bytes(m) for r, its in gives.items() for host, m in its.items()}
        return {
            rank: {
                engine: (int.from_bytes(mask) & ints[rank, host]).to_bytes(count)
                for engine, (host, mask) in engines.items()
            }
            for rank in here
        }

    def whole_tensors(self, skip: bytes) -> bytes:
        """A mask of the parts to leave out, where a tensor is sent whole or not at all."""
        left_out = bytearray(skip)
        for parts in map(self.of_tensor, self.cuts):
            if not all(skip[parts.start : parts.stop]):
                left_out[parts.start : parts.stop] = bytes(len(parts))
        return bytes(left_out)

    def has(self, layout: Layout) -> bool:
        """Whether each box of a checked layout is some whole parts."""
        for index, inner in Partition.of(self.whole, [layout]).cuts.items():
            own = self.cuts.get(index, ((),) * len(inner))
            if not all({*at} <= {*cut} for at, cut in zip(inner, own, strict=True)):
                return False
        return True


class LanePlaces(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the parts are in a direct lane, which is the memory of one host.

    Attributes:
        starts: The first byte of each part, 8 bytes each in the host's order; -1 for those that are
            not there.
        strides: In elements, by index, of parts that do not lie in one piece.
    """

    starts: bytes = b""
    strides: tuple[tuple[int, tuple[int, ...]], ...] = ()

    @classmethod
    def of(cls, parts: Partition, pieces: Iterable[Piece], base: int) -> Self:
        """Those of pieces that lie in a lane with this address."""
        starts = array("q", [-1]) * len(parts.manifest.owned)
        strides: dict[int, tuple[int, ...]] = {}
        for name, box, tensor in pieces:
            if (index := parts.whole.index.get(name)) is None or tensor is None:
                continue
            for part in parts.of_box(index, box):
                view = narrowed(tensor, box, parts.manifest.owned[part])
                starts[part] = view.data_ptr() - base
                strides.pop(part, None)
                if not view.is_contiguous():
                    strides[part] = view.stride()
        return cls(starts.tobytes(), tuple(strides.items()))

    def find(
        self, parts: Partition, sent: Iterable[int]
    ) -> tuple[dict[int, tuple[int, tuple[int, ...]]], int]:
        """First byte and strides of each part that is sent, and the end of them all.

        Raises:
            RefitProtocolError: A part is not in a lane of that size.
        """
        owned, strides, end = parts.manifest.owned, dict(self.strides), 0
        known = len(self.starts) == 8 * len(owned)
        starts = memoryview(self.starts).cast("q") if known else [-1] * len(owned)
        found: dict[int, tuple[int, tuple[int, ...]]] = {}
        for part in sent:
            spec, start, steps = owned[part], starts[part], strides.get(part, ())
            if not spec.numel:
                continue
            itemsize, last = spec.torch_dtype.itemsize, spec.numel - 1
            fits = start >= 0 and start % itemsize == 0
            if steps:
                fits &= len(steps) == len(spec.shape) and 0 <= min(steps) <= max(steps) < 1 << 48
                last = sum((size - 1) * step for size, step in zip(spec.shape, steps, strict=fits))
            if not fits:
                raise RefitProtocolError(
                    f"{spec.name} is sent through the trainer's memory, but has no place there",
                    phase="PREPARE",
                )
            found[part] = start, steps
            end = max(end, start + (last + 1) * itemsize)
        return found, end
