"""Which bytes each side has: digests of blocks, of tensors, and of the whole model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import xxhash

from rl_core.refit import _fold
from rl_core.refit.hashing import block_digests, hash_views, start_digests, tensor_digest
from rl_core.refit.manifest import dtype_of, numel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from rl_core.interfaces.weights import TensorSpec
    from rl_core.refit.hashing import BlockHash
    from rl_core.refit.manifest import WeightManifest
    from rl_core.refit.plan import Bucket

__all__ = [
    "DIGEST_BYTES",
    "DigestTable",
    "Digester",
    "as_view",
    "copy_run",
    "run_hasher",
]

DIGEST_BYTES = 16
_UNKNOWN = bytes(DIGEST_BYTES)


def as_view(data: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU."""
    return memoryview(data.detach().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def run_hasher(
    runs: Sequence[torch.Tensor], block_bytes: int, block_hash: BlockHash
) -> Callable[[], list[bytes]]:
    """A function that digests the blocks of some runs of bytes, all in one list."""
    if block_hash.kind == "fold":
        begin = _fold.prepare(runs, block_hash.key, block_bytes)
        return lambda: [digest for run in begin()() for digest in run]
    views = [
        whole[start : start + block_bytes]
        for whole in map(as_view, runs)
        for start in range(0, len(whole), block_bytes)
    ]
    return lambda: hash_views(views, block_hash)


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
            nbytes = segment.stop - segment.start
            if nbytes <= block_bytes and segment.whole:
                self.known[segment.spec.name] = digests[position]
                position += 1
                continue
            blocks = -(-nbytes // block_bytes)
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


class Digester:
    """Digests tensors as they would travel.

    Args:
        block_bytes: Largest piece that is hashed at once.
        block_hash: The trainer's, for the device of the lane.
    """

    def __init__(self, block_bytes: int, block_hash: BlockHash) -> None:
        self._block = block_bytes
        self._hash = block_hash
        self._views: dict[tuple[str, int], list[memoryview]] = {}

    def of(self, tensor: torch.Tensor, spec: TensorSpec, *, lasts: bool = False) -> bytes:
        """The digest that a tensor gets when it travels as ``spec`` says.

        Args:
            tensor: Any strides, dtype and device; at most a block of it is copied.
            spec: With the dtype that travels.
            lasts: It stays where it is, so that views of it are made once. They hold its memory.
        """
        if not tensor.is_contiguous() or tensor.dtype != dtype_of(spec):
            return tensor_digest(self._copied(tensor, spec))
        if tensor.device.type == "cpu" and self._hash.kind != "fold":
            return tensor_digest(hash_views(self._seen(tensor, spec.name, lasts), self._hash))
        run = tensor.detach().reshape(-1).view(torch.uint8)
        return tensor_digest(block_digests(run, self._hash, block=self._block))

    def all(
        self,
        given: Iterable[tuple[TensorSpec, torch.Tensor]],
        lasting: Mapping[str, torch.Tensor],
    ) -> dict[str, bytes]:
        """The digests of many tensors, by name; a device is waited for when all are under way.

        Args:
            given: As for :meth:`of`. A tensor may be gone once the next is asked for.
            lasting: By name, tensors that stay: those of them that are given are digested together.
        """
        found: dict[str, bytes] = {}
        together: dict[torch.device, tuple[list[str], list[torch.Tensor]]] = {}
        begun: list[tuple[list[str], Callable[[], list[list[bytes]]]]] = []
        for spec, tensor in given:
            plain = tensor.is_contiguous() and tensor.dtype == dtype_of(spec)
            kept = lasting.get(spec.name)
            lasts = kept is not None and kept.data_ptr() == tensor.data_ptr()
            if self._hash.kind != "fold" or not plain:
                found[spec.name] = self.of(tensor, spec, lasts=lasts)
                continue
            run = tensor.detach().reshape(-1).view(torch.uint8)
            if lasts:
                names, runs = together.setdefault(run.device, ([], []))
                names.append(spec.name)
                runs.append(run)
            else:
                start = start_digests([run], self._hash, block=self._block)
                begun.append(([spec.name], start))
        for names, runs in together.values():
            begun.append((names, start_digests(runs, self._hash, block=self._block)))
        for names, finish in begun:
            found.update(zip(names, map(tensor_digest, finish()), strict=True))
        return found

    def _seen(self, tensor: torch.Tensor, name: str, lasts: bool) -> list[memoryview]:
        key = (name, tensor.data_ptr())
        views = self._views.get(key)
        if views is None:
            whole = as_view(tensor)
            starts = range(0, len(whole), self._block)
            views = [whole[start : start + self._block] for start in starts]
            if lasts:
                self._views[key] = views
        return views

    def _copied(self, tensor: torch.Tensor, spec: TensorSpec) -> list[bytes]:
        dtype = dtype_of(spec)
        step, total = self._block // dtype.itemsize, numel(spec)
        scratch = torch.empty(min(step, total), dtype=dtype, device=tensor.device)
        digests: list[bytes] = []
        for offset in range(0, total, step):
            part = scratch[: total - offset]
            copy_run(part, tensor, offset)
            digests += block_digests(part.view(torch.uint8), self._hash)
        return digests


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
