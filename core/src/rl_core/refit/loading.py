"""The receiver's side of the bytes: from a lane into the engine, checked on the way."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from rl_core.errors import RefitCorrupted
from rl_core.refit.digests import DIGEST_BYTES, DigestTable, as_view, digest_of, hasher
from rl_core.refit.hashing import hash_views, kind_for
from rl_core.refit.manifest import dtype_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from rl_core.interfaces.weights import TensorSpec, WeightSink
    from rl_core.refit.manifest import WeightManifest
    from rl_core.refit.plan import Bucket, Segment, TransferPlan

__all__ = ["Loader"]

#: Segments of at most this many bytes are hashed and copied in groups, so that what was hashed is
#: copied while it is still in the cache, and a group costs little more than its bytes.
_SMALL = 256 << 10
_GROUP = 1 << 20


class _Step(NamedTuple):
    """Some bytes that are verified, then written."""

    digests: Callable[[], list[bytes]]
    blocks: int
    writes: list[Callable[[], object]]
    name: str


class Loader:
    """Writes the buckets of one refit to a sink.

    Args:
        sink: The engine's tensors.
        wire: The trainer's manifest, in the dtypes that travel.
        expected: The sink's own.
        plan: What lies where in the lane.
        data: The receiver's end of the lane, uint8.
        verify: ``"none"``, ``"wire"`` or ``"installed"``.
        known: Digests, by name, of what the engine has; kept up to date.
        touch: Called before anything is written.
    """

    def __init__(
        self,
        sink: WeightSink,
        wire: WeightManifest,
        expected: WeightManifest,
        plan: TransferPlan,
        data: torch.Tensor,
        *,
        verify: str,
        known: dict[str, bytes],
        touch: Callable[[], None],
    ) -> None:
        self.table = DigestTable(wire, known)
        self._sink = sink
        self._wire = wire
        self._expected = expected
        self._plan = plan
        self._data = data
        self._verify = verify
        self._touch = touch
        self._targets: Mapping[str, torch.Tensor] = sink.targets() or {}
        # What the trainer ties and the engine does not is written to each of its storages.
        self._places: dict[str, list[TensorSpec]] = {}
        for spec in expected.owned:
            self._places.setdefault(wire.root(spec.name), []).append(spec)

    @torch.no_grad()
    def load(self, index: int, digests: bytes) -> None:
        """Verifies a bucket block by block and writes what is right.

        Args:
            index: Of the bucket.
            digests: Of its blocks, as the sender found them.

        Raises:
            RefitCorrupted: A block is not what the sender packed; it is not written.
        """
        bucket = self._plan.buckets[index]
        self._touch()
        if self._verify == "none":
            self.table.known.clear()
            for step in self._steps(bucket):
                for write in step.writes:
                    write()
            return
        self.table.forget(bucket)
        found: list[bytes] = []
        for step in self._steps(bucket):
            begin = len(found) * DIGEST_BYTES
            blocks = step.digests()
            if b"".join(blocks) != digests[begin : begin + step.blocks * DIGEST_BYTES]:
                raise RefitCorrupted(
                    f"bucket {index}, {step.name}: the bytes are not those that the sender packed",
                    fix="refit again; if it happens twice, test the host's memory",
                    bucket=index,
                    tensor=step.name,
                )
            for write in step.writes:
                write()
            found += blocks
        self.table.add(bucket, found, self._plan.block_bytes)

    def check_sealed(self, digest: str) -> str:
        """Compares all that the engine has, sent now or held before, with the sender's.

        Returns:
            The digest.

        Raises:
            RefitCorrupted: They differ; nothing counts as held any more.
        """
        if self._verify != "none" and self.table.digest != digest:
            self.table.known.clear()
            raise RefitCorrupted(
                "the engine's tensors, with those it held before, are not the sender's",
                fix="refit again without delta",
            )
        return digest

    @torch.no_grad()
    def check_installed(self) -> None:
        """Reads every tensor back and compares it with what it should be.

        Raises:
            RefitCorrupted: Names every tensor that is not what arrived.
        """
        names = [spec.name for spec in self._expected.tensors]
        wrong, seen = [], set()
        for name, tensor in self._sink.read(names):
            seen.add(name)
            spec = self._expected.by_name[name]
            sound = tensor.shape == spec.shape and tensor.dtype == dtype_of(spec)
            if not (sound and self._matches(spec, tensor)):
                wrong.append(name)
        wrong += [name for name in names if name not in seen]
        if wrong:
            self.table.known.clear()
            raise RefitCorrupted(
                f"{len(wrong)} tensors are not installed as they arrived: {', '.join(wrong[:5])}",
                fix="the engine's loader drops, misplaces or converts them",
                tensors=wrong,
            )

    def _matches(self, spec: TensorSpec, tensor: torch.Tensor) -> bool:
        if tensor.numel() == 0:
            return True
        known = self.table.known.get(self._wire.root(spec.name))
        kind = kind_for(self._data.device)
        return digest_of(tensor, spec, self._plan.block_bytes, kind) == known

    # -- what is done with a bucket ---------------------------------------------------------------

    def _steps(self, bucket: Bucket) -> Iterator[_Step]:
        group: list[Segment] = []
        size = 0
        for segment in bucket.segments:
            nbytes = segment.stop - segment.start
            if nbytes > _SMALL:
                yield from self._blockwise(segment)
                continue
            group.append(segment)
            size += nbytes
            if size > _GROUP:
                yield self._together(group)
                group, size = [], 0
        if group:
            yield self._together(group)

    def _together(self, segments: Sequence[Segment]) -> _Step:
        """One step for whole segments."""
        size = self._plan.block_bytes
        writes = [write for s in segments for write in self._writes(s, s.start, s.stop)]
        blocks = sum(-(-(s.stop - s.start) // size) for s in segments)
        digests = hasher(segments, self._data, size)
        return _Step(digests, blocks, writes, segments[0].spec.name)

    def _blockwise(self, segment: Segment) -> Iterator[_Step]:
        """A step for every block if blocks can be written one by one, else one for all."""
        in_place = all(s.name in self._targets for s in self._places[segment.spec.name])
        if not in_place or self._data.device.type != "cpu":
            yield self._together([segment])
            return
        for start, stop in segment.blocks(self._plan.block_bytes):
            view = as_view(self._data[start:stop])
            digests = partial(hash_views, [view])
            yield _Step(digests, 1, self._writes(segment, start, stop), segment.spec.name)

    def _writes(self, segment: Segment, start: int, stop: int) -> list[Callable[[], object]]:
        """Calls that write some bytes of a segment wherever the engine wants them."""
        dtype = dtype_of(segment.spec)
        run = self._data[start:stop].view(dtype)
        offset = segment.offset + (start - segment.start) // dtype.itemsize
        writes: list[Callable[[], object]] = []
        for spec in self._places[segment.spec.name]:
            target = self._targets.get(spec.name)
            if target is None:
                data = run.to(dtype_of(spec))
                writes.append(partial(self._sink.write, spec.name, offset, data, of=spec))
            else:
                writes.append(partial(target.view(-1)[offset : offset + len(run)].copy_, run))
        return writes
