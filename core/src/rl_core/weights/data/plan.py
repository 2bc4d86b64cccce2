"""Which bytes of which tensors lie where.

Both sides derive it from the manifest, the size of a bucket, the data mode, what is skipped, and
the size of a block.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import msgspec
import xxhash

from rl_core.errors import ConfigError
from rl_core.weights.data.parts import LanePlaces

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from rl_core.interfaces.weights import TensorSpec
    from rl_core.weights.data.manifest import WeightManifest
    from rl_core.weights.data.parts import Partition

__all__ = [
    "ALIGN",
    "BLOCK",
    "BY_ALL",
    "MAX_BUCKETS",
    "SLOTS",
    "Bucket",
    "DataMode",
    "Runs",
    "Segment",
    "TransferPlan",
    "make_plan",
]

#: Bytes under one digest on the CPU, at most: they are in its cache when they were just copied.
BLOCK = 512 << 10
#: Bytes to which every segment is aligned: a cache line, and any dtype's size.
ALIGN = 64
#: Buffers of a packed refit: one is packed while the other is loaded.
SLOTS = 2
#: Buckets of a direct refit that may be announced and not loaded: enough to keep loaders busy.
_ANNOUNCED = 3
#: What ``LaneInfo.reads`` has for a part that every receiver of the lane reads.
BY_ALL = 2
#: First byte, and that after the last, of stretches of a lane.
Runs: TypeAlias = "list[tuple[int, int]]"
_NOWHERE = LanePlaces()
#: Buckets that a plan may have: making one with more takes longer than a second.
MAX_BUCKETS = 1 << 16


class DataMode(enum.StrEnum):
    """How buckets share the lane.

    Attributes:
        DIRECT: Every part has one place, which is where the trainer keeps it.
        PACKED: Buckets take turns in two slots.
    """

    DIRECT = "direct"
    PACKED = "packed"


class Segment(NamedTuple):
    """A run of elements of one part, and its place in the lane.

    Attributes:
        tensor: Index of the part in the manifest's ``owned``.
        spec: All of the part, with the dtype it travels in.
        offset: Index of the first element in the flattened part.
        elements: How many.
        start: First byte in the lane; of the part, if that has strides.
        stop: As many bytes after it as the elements have.
        last: The part ends here.
        strides: Of the part in the lane, in elements; empty where it lies in one piece.
    """

    tensor: int
    spec: TensorSpec
    offset: int
    elements: int
    start: int
    stop: int
    last: bool
    strides: tuple[int, ...] = ()

    @property
    def whole(self) -> bool:
        """This is all of the part."""
        return self.last and self.offset == 0

    def of(self, lane: torch.Tensor) -> torch.Tensor:
        """The segment's elements: 1-D, of the dtype that travels; not of one with strides."""
        return lane[self.start : self.stop].view(self.spec.torch_dtype)

    def part_in(self, lane: torch.Tensor) -> torch.Tensor:
        """All elements of a part that has strides."""
        dtype = self.spec.torch_dtype
        elements = lane[: len(lane) // dtype.itemsize * dtype.itemsize].view(dtype)
        first = elements.storage_offset() + self.start // dtype.itemsize
        return elements.as_strided(self.spec.shape, self.strides, first)

    def blocks(self, size: int) -> list[tuple[int, int]]:
        """First and last byte, in the lane, of the pieces that are hashed one by one."""
        edges = [*range(self.start, self.stop, size), self.stop]
        return list(pairwise(edges))


@dataclass(frozen=True, slots=True)
class Bucket:
    """The segments that travel together."""

    segments: tuple[Segment, ...]

    @property
    def name(self) -> str:
        """What errors call it: its first tensor."""
        return f"from {self.segments[0].spec.name} on"

    @property
    def nbytes(self) -> int:
        """Bytes that a copy of the bucket takes."""
        return sum(_align(segment.stop - segment.start) for segment in self.segments)

    def runs(self, reads: bytes) -> Runs | None:
        """What a receiver reads of a packed lane, by the ``reads`` of its ``LaneInfo``.

        None if every receiver of the lane reads all of the bucket.
        """
        if not reads or all(reads[segment.tensor] == BY_ALL for segment in self.segments):
            return None
        found: Runs = []
        for segment in self.segments:
            if not reads[segment.tensor]:
                continue
            near = bool(found) and segment.start - found[-1][1] < ALIGN  # nothing lies between
            found.append((found.pop()[0] if near else segment.start, segment.stop))
        return found

    @property
    def start(self) -> int:
        """First byte in the lane."""
        return self.segments[0].start

    @property
    def stop(self) -> int:
        """Byte after the last in the lane."""
        return self.segments[-1].stop


@dataclass(frozen=True)
class TransferPlan:
    """Every bucket of one refit, in order.

    Attributes:
        mode: How the buckets share the lane.
        buckets: What travels.
        window: Buckets that may be announced and not loaded.
        lane_bytes: Size of the lane.
        block_bytes: Largest piece of a segment that is hashed at once.
        sent: Indices of the parts that travel.
    """

    mode: DataMode
    buckets: tuple[Bucket, ...]
    window: int
    lane_bytes: int
    block_bytes: int
    sent: tuple[int, ...]

    @cached_property
    def nbytes(self) -> int:
        """Bytes that travel, without padding."""
        return sum(s.stop - s.start for bucket in self.buckets for s in bucket.segments)

    @cached_property
    def digest(self) -> str:
        """128-bit hash over the place of every segment."""
        buckets = [
            [
                (s.tensor, s.spec.name, s.spec.dtype, s.offset, s.elements, s.start, s.strides)
                for s in b.segments
            ]
            for b in self.buckets
        ]
        slots = 0 if self.mode is DataMode.DIRECT else self.window
        whole = (buckets, slots, self.lane_bytes, self.block_bytes)
        return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(whole))


def make_plan(
    parts: Partition,
    bucket_bytes: int,
    mode: DataMode = DataMode.PACKED,
    skip: bytes = b"",
    block: int = BLOCK,
    places: LanePlaces = _NOWHERE,
) -> TransferPlan:
    """Fills buckets in the manifest's order.

    A part that fits in a bucket is never split, so that loaders mostly see whole tensors; a
    larger one starts a new bucket and is cut into pieces that fill theirs.

    Args:
        parts: What there is to send.
        bucket_bytes: Most bytes of a bucket.
        mode: How the buckets share the lane.
        skip: A byte for each part, 1 for those that are not sent; empty if all are.
        block: Most bytes under one digest.
        places: Where the parts are in a direct lane.

    Raises:
        ConfigError: Buckets of that size would be too many.
        RefitProtocolError: A part that is sent is not in the direct lane.
    """
    manifest = parts.manifest
    size = bucket_bytes // ALIGN * ALIGN
    total = manifest.nbytes
    least = max(ALIGN, _align(-(-total // MAX_BUCKETS)))
    if size < least:
        raise ConfigError(
            f"bucket_bytes is {bucket_bytes}; a model of {total} bytes needs at least {least}",
            fix="set bucket_bytes to tens of megabytes, such as 64_000_000, or leave it out",
            key="bucket_bytes",
        )
    sent = [i for i in range(len(manifest.owned)) if not (skip and skip[i])]
    block = min(block, size)
    filled = _fill(manifest, sent, size, size // block * block)
    if mode is DataMode.DIRECT:
        window = _ANNOUNCED
        own, lane = places.find(parts, sent)
        moved = [[_at(s, *own[s.tensor]) for s in bucket] for bucket in filled]
    else:
        window = max(1, min(SLOTS, len(filled)))
        slot = _align(max((bucket[-1].stop for bucket in filled), default=0))
        moved = [[_at(s, i % window * slot + s.start) for s in b] for i, b in enumerate(filled)]
        lane = window * slot
    buckets = tuple(Bucket(tuple(bucket)) for bucket in moved)
    return TransferPlan(mode, buckets, window, lane, block, tuple(sent))


def _fill(
    manifest: WeightManifest, sent: Iterable[int], size: int, piece: int
) -> list[list[Segment]]:
    """Buckets with their segments placed from 0 on.

    A tensor larger than ``size`` is cut into pieces of ``piece`` bytes, so that the blocks are
    those of the whole tensor.
    """
    buckets: list[list[Segment]] = []
    position = size + 1  # no bucket is open
    for index in sent:
        spec = manifest.owned[index]
        itemsize, total, offset = spec.torch_dtype.itemsize, spec.numel, 0
        while offset < total:
            start, left = _align(position), total - offset
            if start + left * itemsize > size:
                buckets.append([])
                start = 0
            count = left if left * itemsize <= size else piece // itemsize
            position = start + count * itemsize
            offset += count
            last = offset == total
            buckets[-1].append(Segment(index, spec, offset - count, count, start, position, last))
    return buckets


def _at(segment: Segment, start: int, strides: tuple[int, ...] | None = None) -> Segment:
    """A segment at another place, or, with strides, where its part begins in a direct lane."""
    tensor, spec, offset, elements, begin, stop, last, _ = segment
    if strides == ():  # it lies there in one piece
        start += offset * spec.torch_dtype.itemsize
    stop += start - begin
    return Segment(tensor, spec, offset, elements, start, stop, last, strides or ())


def _align(position: int) -> int:
    return -(-position // ALIGN) * ALIGN
