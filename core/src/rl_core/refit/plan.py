"""The plan: how tensors are laid out in buckets. Both sides derive it from the manifest alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import xxhash

from rl_core.errors import ConfigError
from rl_core.refit.manifest import dtype_of, numel

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from rl_core.interfaces.weights import TensorSpec
    from rl_core.refit.manifest import WeightManifest

__all__ = ["ALIGN", "Bucket", "Segment", "TransferPlan", "group_plan", "make_plan"]

#: Bytes to which every segment is aligned in its bucket: a cache line, and any dtype's size.
ALIGN = 64


class Segment(NamedTuple):
    """A run of elements of one tensor, and its place in a bucket.

    Attributes:
        spec: The whole tensor, with the dtype it travels in.
        offset: Index of the first element in the flattened tensor.
        elements: How many.
        start: First byte in the bucket.
        stop: Byte after the last.
    """

    spec: TensorSpec
    offset: int
    elements: int
    start: int
    stop: int

    def of(self, slot: torch.Tensor) -> torch.Tensor:
        """The segment's elements in a slot: 1-D, of the dtype that travels."""
        return slot[self.start : self.stop].view(dtype_of(self.spec))


@dataclass(frozen=True, slots=True)
class Bucket:
    """The segments that travel together."""

    segments: tuple[Segment, ...]

    @property
    def nbytes(self) -> int:
        """Bytes from the bucket's start to the end of its last segment."""
        return self.segments[-1].stop


@dataclass(frozen=True)
class TransferPlan:
    """Every bucket of one refit, in order."""

    buckets: tuple[Bucket, ...]

    @cached_property
    def slot_bytes(self) -> int:
        """Size of a buffer that holds any of the buckets, a multiple of the alignment."""
        return _align(max((bucket.nbytes for bucket in self.buckets), default=0))

    @cached_property
    def digest(self) -> str:
        """128-bit hash over the place of every segment."""
        layout = [
            [(s.spec.name, s.spec.dtype, s.offset, s.elements, s.start) for s in bucket.segments]
            for bucket in self.buckets
        ]
        return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(layout))


def make_plan(manifest: WeightManifest, bucket_bytes: int) -> TransferPlan:
    """Fills buckets in the manifest's order.

    A tensor that fits in a bucket is never split, so that loaders mostly see whole tensors; a
    larger one starts a bucket of its own and is cut into pieces that fill theirs.

    Args:
        manifest: With the dtypes that travel.
        bucket_bytes: Upper bound of a bucket's size; rounded down to the alignment.

    Raises:
        ConfigError: ``bucket_bytes`` is smaller than the alignment.
    """
    size = bucket_bytes // ALIGN * ALIGN
    if size <= 0:
        raise ConfigError(
            f"bucket_bytes is {bucket_bytes}; the least is {ALIGN}",
            fix="use some tens of megabytes",
            key="bucket_bytes",
        )
    buckets: list[Bucket] = []
    filling: list[Segment] = []

    def close() -> None:
        if filling:
            buckets.append(Bucket(tuple(filling)))
            filling.clear()

    for spec in manifest.owned:
        itemsize, total, offset = dtype_of(spec).itemsize, numel(spec), 0
        while offset < total:
            start = _align(filling[-1].stop) if filling else 0
            if filling and start + (total - offset) * itemsize > size:
                close()
                start = 0
            count = min(total - offset, size // itemsize)
            filling.append(Segment(spec, offset, count, start, start + count * itemsize))
            offset += count
    close()
    return TransferPlan(tuple(buckets))


def group_plan(manifest: WeightManifest, names: Iterable[str]) -> TransferPlan:
    """All of the named tensors in one bucket, in the manifest's order."""
    wanted = set(names)
    part = type(manifest)(tuple(spec for spec in manifest.owned if spec.name in wanted))
    return make_plan(part, part.nbytes + ALIGN * (len(part.tensors) + 1))


def _align(position: int) -> int:
    return -(-position // ALIGN) * ALIGN
