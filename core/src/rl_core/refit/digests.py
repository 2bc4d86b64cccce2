"""Which bytes each side has: digests of blocks, of tensors, and of the whole model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import xxhash

from rl_core.refit.hashing import block_digests, hash_views, run_digests, tensor_digest
from rl_core.refit.manifest import dtype_of, numel

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rl_core.interfaces.weights import TensorSpec
    from rl_core.refit.manifest import WeightManifest
    from rl_core.refit.plan import Bucket, Segment

__all__ = ["DIGEST_BYTES", "DigestTable", "as_view", "copy_run", "digest_of", "hasher"]

DIGEST_BYTES = 16
_UNKNOWN = bytes(DIGEST_BYTES)


def as_view(data: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU."""
    return memoryview(data.detach().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def hasher(
    segments: Sequence[Segment], lane: torch.Tensor, block_bytes: int
) -> Callable[[], list[bytes]]:
    """A function that digests the blocks of some segments, on the device where they are."""
    if lane.device.type == "cpu":
        views = [
            as_view(lane[start:stop])
            for segment in segments
            for start, stop in segment.blocks(block_bytes)
        ]
        return lambda: hash_views(views)
    parts = [lane[s.start : s.stop] for s in segments]
    return lambda: [digest for run in run_digests(parts) for digest in run]


class DigestTable:
    """The digest of every tensor of a model.

    Args:
        manifest: The model, in the dtypes that travel.
        known: Digests by name; tensors that are not in it count as unknown.
    """

    def __init__(self, manifest: WeightManifest, known: dict[str, bytes] | None = None) -> None:
        self.known = {} if known is None else known
        self._manifest = manifest
        self._open: list[bytes] = []

    def add(self, bucket: Bucket, digests: Sequence[bytes], block_bytes: int) -> None:
        """Takes the block digests of a bucket; buckets come in order."""
        position = 0
        for segment in bucket.segments:
            blocks = -(-(segment.stop - segment.start) // block_bytes)
            part = digests[position : position + blocks]
            position += blocks
            if segment.last and not self._open:
                self.known[segment.spec.name] = tensor_digest(part)
                continue
            self._open += part
            if segment.last:
                self.known[segment.spec.name] = tensor_digest(self._open)
                self._open = []

    def forget(self, bucket: Bucket) -> None:
        """The tensors of a bucket are about to be written."""
        for segment in bucket.segments:
            self.known.pop(segment.spec.name, None)

    @property
    def flat(self) -> bytes:
        """All digests, in the manifest's order, zeros where unknown."""
        return b"".join(self.known.get(spec.name, _UNKNOWN) for spec in self._manifest.owned)

    @property
    def digest(self) -> str:
        """128-bit hash over the manifest and every tensor's digest."""
        return xxhash.xxh3_128_hexdigest(self._manifest.digest.encode() + self.flat)


def digest_of(tensor: torch.Tensor, spec: TensorSpec, block_bytes: int, kind: str) -> bytes:
    """The digest that a tensor gets when it travels as ``spec`` says.

    Args:
        tensor: Any strides, dtype and device; at most a block of it is copied.
        spec: With the dtype that travels.
        block_bytes: Largest piece that is hashed at once.
        kind: As of :func:`rl_core.refit.hashing.kind_for`, for the device of the lane.
    """
    dtype = dtype_of(spec)
    step, total = block_bytes // dtype.itemsize, numel(spec)
    if tensor.is_contiguous() and tensor.dtype == dtype:
        flat = tensor.detach().reshape(-1)
        parts = [flat[offset : offset + step].view(torch.uint8) for offset in range(0, total, step)]
        return tensor_digest([digest for run in run_digests(parts, kind) for digest in run])
    scratch = torch.empty(min(step, total), dtype=dtype, device=tensor.device)
    digests: list[bytes] = []
    for offset in range(0, total, step):
        part = scratch[: total - offset]
        copy_run(part, tensor, offset)
        digests += block_digests(part.view(torch.uint8), kind)
    return tensor_digest(digests)


def copy_run(target: torch.Tensor, source: torch.Tensor, offset: int) -> None:
    """Fills 1-D ``target`` with the elements of ``source`` from ``offset`` on, in logical order.

    Casts if the dtypes differ. ``source`` may have any strides and device; no copy of it is made.
    """
    count = target.numel()
    if source.is_contiguous():
        target.copy_(source.view(-1)[offset : offset + count])
        return
    width = source.numel() // source.shape[0]
    done = 0
    while done < count:
        row, within = divmod(offset + done, width)
        whole = 0 if within else (count - done) // width
        if whole:
            part = target[done : done + whole * width]
            part.view(whole, *source.shape[1:]).copy_(source[row : row + whole])
        else:
            part = target[done : done + min(width - within, count - done)]
            copy_run(part, source[row], within)
        done += part.numel()
