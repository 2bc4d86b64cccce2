"""The receiver's side of the bytes: from a lane into the engine, checked on the way."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from rl_core.errors import RefitCorrupted
from rl_core.refit.digests import DIGEST_BYTES, Digester, DigestTable, as_view, hasher
from rl_core.refit.hashing import hash_views
from rl_core.refit.manifest import dtype_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from rl_core.interfaces.weights import TensorSpec, WeightSink
    from rl_core.refit.manifest import WeightManifest
    from rl_core.refit.plan import Segment, TransferPlan

__all__ = ["Loader", "Route"]

#: Segments of at most this many bytes are hashed and copied in groups of about a megabyte: what
#: was hashed is copied while it is in the cache, and a group costs little more than its bytes.
_SMALL = 256 << 10
_GROUP = 1 << 20
#: Up to here, copying bytes is faster than telling torch to.
_TINY = 512 << 10


class _Step(NamedTuple):
    """Some bytes that are verified, then written."""

    name: str
    blocks: int
    digests: Callable[[], list[bytes]]
    writes: list[Callable[[], object]]


class Route:
    """The way from a lane to an engine's tensors: views and copies, made once for many refits.

    Args:
        sink: The engine's tensors.
        wire: The trainer's manifest, in the dtypes that travel.
        expected: The sink's own.
        plan: What lies where in the lane.
        data: The receiver's end of the lane, uint8.
        kind: Of all digests, as of :func:`rl_core.refit.hashing.kind_for`.
    """

    def __init__(
        self,
        sink: WeightSink,
        wire: WeightManifest,
        expected: WeightManifest,
        plan: TransferPlan,
        data: torch.Tensor,
        kind: str,
    ) -> None:
        self.sink = sink
        self.wire = wire
        self.expected = expected
        self.plan = plan
        self.data = data
        self._targets: Mapping[str, torch.Tensor] = sink.targets() or {}
        self._where = [target.data_ptr() for target in self._targets.values()]
        # What the trainer ties and the engine does not is written to each of its storages.
        self._places: dict[str, list[TensorSpec]] = {}
        for spec in expected.owned:
            self._places.setdefault(wire.root(spec.name), []).append(spec)
        self._steps: dict[int, list[_Step]] = {}
        self.digester = Digester(plan.block_bytes, kind, keep=bool(self._targets))

    def leads(
        self,
        sink: WeightSink,
        wire: WeightManifest,
        expected: WeightManifest,
        plan: TransferPlan,
        data: torch.Tensor,
    ) -> bool:
        """Whether it is the way between these; ``sink`` takes the place of the one before."""
        same = wire is self.wire and expected is self.expected and plan is self.plan
        targets = sink.targets()
        if not same or data is not self.data or not targets:
            return False
        known = self._targets
        if targets is not known and any(known.get(n) is not t for n, t in targets.items()):
            return False
        self.sink = sink
        return [target.data_ptr() for target in targets.values()] == self._where

    def let_go(self) -> None:
        """Forgets the lane's bytes; this way leads nowhere any more."""
        self.data = self.data[:0].clone()
        self._steps.clear()

    def steps(self, index: int) -> list[_Step]:
        """What is done with a bucket."""
        if index not in self._steps:
            self._steps[index] = list(self._make_steps(self.plan.buckets[index].segments))
        return self._steps[index]

    def _make_steps(self, segments: Sequence[Segment]) -> Iterator[_Step]:
        group: list[Segment] = []
        size = 0
        for segment in segments:
            nbytes = segment.stop - segment.start
            if nbytes > _SMALL and self.data.device.type == "cpu":
                if group:  # steps come in the order of the sender's digests
                    yield self._together(group)
                    group, size = [], 0
                yield from self._by_blocks(segment)
                continue
            group.append(segment)
            size += nbytes
            if size > _GROUP and self.data.device.type == "cpu":
                yield self._together(group)
                group, size = [], 0
        if group:
            yield self._together(group)

    def _together(self, segments: Sequence[Segment]) -> _Step:
        """One step for whole segments."""
        size = self.plan.block_bytes
        blocks = sum(-(-(s.stop - s.start) // size) for s in segments)
        digests = hasher(segments, self.data, size)
        writes = [write for s in segments for write in self._writes(s, s.start, s.stop)]
        return _Step(segments[0].spec.name, blocks, digests, writes)

    def _by_blocks(self, segment: Segment) -> Iterator[_Step]:
        """A step for every block if blocks can be written one by one, else one for all."""
        if any(spec.name not in self._targets for spec in self._places[segment.spec.name]):
            yield self._together([segment])
            return
        for start, stop in segment.blocks(self.plan.block_bytes):
            digests = partial(hash_views, [as_view(self.data[start:stop])])
            writes = self._writes(segment, start, stop)
            yield _Step(segment.spec.name, 1, digests, writes)

    def _writes(self, segment: Segment, start: int, stop: int) -> list[Callable[[], object]]:
        """Calls that write some bytes of a segment wherever the engine wants them."""
        dtype = dtype_of(segment.spec)
        run = self.data[start:stop].view(dtype)
        offset = segment.offset + (start - segment.start) // dtype.itemsize
        writes: list[Callable[[], object]] = []
        for spec in self._places[segment.spec.name]:
            target = self._targets.get(spec.name)
            if target is None:
                data = run.to(dtype_of(spec))
                writes.append(partial(self.sink.write, spec.name, offset, data, of=spec))
                continue
            part = target.detach().view(-1)[offset : offset + len(run)]
            plain = part.dtype == dtype and part.device == run.device
            if plain and part.device.type == "cpu" and stop - start <= _TINY:
                writes.append(partial(_assign, as_view(part), as_view(run)))
            else:
                writes.append(partial(part.copy_, run))
        return writes


def _assign(target: memoryview, source: memoryview) -> None:
    target[:] = source


class Loader:
    """Writes the buckets of one refit.

    Args:
        route: From where to where.
        verify: ``"none"``, ``"wire"`` or ``"installed"``.
        known: Digests, by name, of what the engine has; kept up to date.
        touch: Called before anything is written.
    """

    def __init__(
        self, route: Route, *, verify: str, known: dict[str, bytes], touch: Callable[[], None]
    ) -> None:
        self.table = DigestTable(route.wire, known)
        self._route = route
        self._verify = verify
        self._touch = touch

    @torch.no_grad()
    def load(self, index: int, digests: bytes) -> None:
        """Verifies a bucket block by block and writes what is right.

        Args:
            index: Of the bucket.
            digests: Of its blocks, as the sender found them.

        Raises:
            RefitCorrupted: A block is not what the sender packed; it is not written.
        """
        self._touch()
        if self._verify == "none":
            self.table.known.clear()
            for step in self._route.steps(index):
                for write in step.writes:
                    write()
            return
        plan = self._route.plan
        bucket = plan.buckets[index]
        self.table.forget(bucket)
        found: list[bytes] = []
        for step in self._route.steps(index):
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
        self.table.add(bucket, found, plan.block_bytes)

    def check_sealed(self, digest: str) -> str:
        """Compares all that the engine has, sent now or held before, with the sender's.

        Returns:
            The digest.

        Raises:
            RefitCorrupted: They differ: the engine does not have what it is known to have.
        """
        if self._verify != "none" and self.table.digest != digest:
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
        route = self._route
        names = [spec.name for spec in route.expected.tensors]
        wrong, seen = [], set()
        for name, tensor in route.sink.read(names):
            seen.add(name)
            spec = route.expected.by_name[name]
            sound = tensor.shape == spec.shape and tensor.dtype == dtype_of(spec)
            if not (sound and self._matches(spec, tensor)):
                wrong.append(name)
        wrong += [name for name in names if name not in seen]
        if wrong:
            raise RefitCorrupted(
                f"{len(wrong)} tensors are not installed as they arrived: {', '.join(wrong[:5])}",
                fix="the engine's loader drops, misplaces or converts them",
                tensors=wrong,
            )

    def _matches(self, spec: TensorSpec, tensor: torch.Tensor) -> bool:
        if tensor.numel() == 0:
            return True
        known = self.table.known.get(self._route.wire.root(spec.name))
        return self._route.digester.of(tensor, spec) == known
