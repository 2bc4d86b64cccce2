"""The receiver's side of the bytes: out of a lane, verified, into the engine."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from rl_core.errors import RefitCorrupted
from rl_core.refit._digests import DIGEST_BYTES, Digester, DigestTable, as_view, run_hasher
from rl_core.refit.manifest import dtype_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from rl_core.interfaces.weights import TensorSpec, WeightSink
    from rl_core.refit.hashing import BlockHash
    from rl_core.refit.manifest import WeightManifest
    from rl_core.refit.plan import Segment, TransferPlan

__all__ = ["Loader", "Route"]

#: Bytes that are verified together, at most, but for one block: on the CPU what fits a cache, so
#: that they are read from memory once; on a device what a copy may take besides.
_GROUP = 1 << 20
_DEVICE_GROUP = 64 << 20
#: Up to here, copying bytes is faster than telling torch to; on a device, many at once are.
_TINY = 512 << 10


class _Piece(NamedTuple):
    """Some bytes of a segment, from one place in the lane to another."""

    segment: Segment
    start: int
    stop: int

    def of(self, data: torch.Tensor, begin: int = 0) -> torch.Tensor:
        """Its elements, in bytes of which the first is ``begin`` in the lane."""
        return data[self.start - begin : self.stop - begin].view(dtype_of(self.segment.spec))


class _Step(NamedTuple):
    """Some bytes on their way into the engine.

    The lane is another process's: what was read there once may be other bytes when it is read
    again. So they are copied out of it, and verified where nobody else writes.

    Attributes:
        names: The tensor of each block.
        copies: Calls that copy them out of the lane.
        digests: Digests the copy.
        writes: Calls that write the copy to wherever it is not yet.
        in_place: The copy is in the engine's own tensors.
    """

    names: list[str]
    copies: list[Callable[[], object]]
    digests: Callable[[], list[bytes]]
    writes: list[Callable[[], object]]
    in_place: bool

    def take(self) -> None:
        """All of it, unverified."""
        for call in (*self.copies, *self.writes):
            call()


class Route:
    """The way from a lane to an engine's tensors: views and copies, made once for many refits.

    Args:
        sink: The engine's tensors.
        wire: The trainer's manifest, in the dtypes that travel.
        expected: The sink's own.
        plan: What lies where in the lane.
        data: The receiver's end of the lane, uint8.
        block_hash: The trainer's.
        first: Index of the bucket that is loaded first.
    """

    def __init__(
        self,
        sink: WeightSink,
        wire: WeightManifest,
        expected: WeightManifest,
        plan: TransferPlan,
        data: torch.Tensor,
        block_hash: BlockHash,
        first: int = 0,
    ) -> None:
        self.sink = sink
        self.wire = wire
        self.expected = expected
        self.plan = plan
        self.data = data
        self._hash = block_hash
        self._first = first
        self.targets: Mapping[str, torch.Tensor] = sink.targets() or {}
        self._where = [target.data_ptr() for target in self.targets.values()]
        # What the trainer ties and the engine does not is written to each of its storages.
        self._places: dict[str, list[TensorSpec]] = {}
        for spec in expected.owned:
            self._places.setdefault(wire.root(spec.name), []).append(spec)
        # Whether the bytes that are sent can be copied to where the engine's tensors are.
        self._in_place = all(
            (target := self.targets.get(spec.name)) is not None
            and (target.device, target.dtype) == (data.device, dtype_of(sent))
            and target.is_contiguous()
            for sent in (wire.owned[index] for index in plan.sent)
            for spec in self._places[sent.name]
        )
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._steps: dict[tuple[int, bool], list[_Step]] = {}
        self.digester = Digester(plan.block_bytes, block_hash)

    def fits(self, sink: WeightSink, data: torch.Tensor) -> bool:
        """Whether this route can be used again; adopts ``sink`` if so.

        It can if lane and targets are where they were. A sink without targets is written to by
        calls of its own, which a route made for another sink does not have.
        """
        targets = sink.targets()
        if data is not self.data or not targets:
            return False
        known = self.targets
        if targets is not known and any(known.get(n) is not t for n, t in targets.items()):
            return False
        self.sink = sink
        return [target.data_ptr() for target in targets.values()] == self._where

    def detach(self) -> None:
        """Drops all views of the lane, so that its memory is unmapped; it fits nothing then."""
        self.data = self.data[:0].clone()
        self._steps.clear()

    def steps(self, index: int, *, verified: bool) -> list[_Step]:
        """What is done with a bucket.

        The first step of all writes nothing of the engine before it is verified.
        """
        key = (index, verified)
        if key not in self._steps:
            make = self._landed if self._in_place else self._cached if verified else self._passed
            careful = verified and index == self._first
            self._steps[key] = [
                self._cached(group) if careful and number == 0 else make(group)
                for number, group in enumerate(self._groups(index))
            ]
        return self._steps[key]

    def _groups(self, index: int) -> Iterator[list[_Piece]]:
        """The pieces of a bucket that are verified together, in order."""
        block = self.plan.block_bytes
        whole, most = block, _GROUP
        if self.data.device.type != "cpu":
            whole = most = self.plan.lane_bytes if self._in_place else _DEVICE_GROUP
        group: list[_Piece] = []
        alone = index == self._first  # the first block of all, so that little is copied twice
        for segment in self.plan.buckets[index].segments:
            pieces = segment.blocks(whole)
            if alone and not group:
                stop = min(segment.start + block, segment.stop)
                pieces = [(segment.start, stop), *segment._replace(start=stop).blocks(whole)]
            for start, stop in pieces:
                if group and (alone or stop - group[0].start > most):
                    yield group
                    group, alone = [], False
                group.append(_Piece(segment, start, stop))
        yield group

    def _landed(self, group: list[_Piece]) -> _Step:
        """A step that verifies in the engine's own tensors what was copied there."""
        copies, runs, ties = [], [], []
        for piece in group:
            first, *others = (
                self._part(self.targets[spec.name], piece)
                for spec in self._places[piece.segment.spec.name]
            )
            copies.append((first, piece.of(self.data)))
            runs.append(first.view(torch.uint8))
            ties += [(other, first) for other in others]
        digests = run_hasher(runs, self.plan.block_bytes, self._hash)
        return _Step(self._names(group), copiers(copies), digests, copiers(ties), True)

    def _cached(self, group: list[_Piece]) -> _Step:
        """A step that verifies a copy of its own, and writes that."""
        begin, size = group[0].start, group[-1].stop - group[0].start
        if len(self._scratch) < size:
            self._scratch = self.data.new_empty(size)
        kept = self._scratch[:size]
        copy = partial(kept.copy_, self.data[begin : begin + size])
        runs = [piece.of(kept, begin).view(torch.uint8) for piece in group]
        digests = run_hasher(runs, self.plan.block_bytes, self._hash)
        return _Step(self._names(group), [copy], digests, self._writes(group, kept, begin), False)

    def _passed(self, group: list[_Piece]) -> _Step:
        """A step that verifies nothing."""
        return _Step([], [], list, self._writes(group, self.data, 0), False)

    def _names(self, group: list[_Piece]) -> list[str]:
        size = self.plan.block_bytes
        return [p.segment.spec.name for p in group for _ in range(p.start, p.stop, size)]

    def _part(self, target: torch.Tensor, piece: _Piece) -> torch.Tensor:
        """The elements of a target that a piece has, 1-D."""
        offset, count = self._span(piece)
        return target.detach().view(-1)[offset : offset + count]

    def _span(self, piece: _Piece) -> tuple[int, int]:
        """Index of its first element in the flattened tensor, and how many it has."""
        size = dtype_of(piece.segment.spec).itemsize
        offset = piece.segment.offset + (piece.start - piece.segment.start) // size
        return offset, (piece.stop - piece.start) // size

    def _writes(
        self, group: list[_Piece], data: torch.Tensor, begin: int
    ) -> list[Callable[[], object]]:
        """Calls that write pieces wherever the engine wants them, from bytes as of ``of``."""
        writes: list[Callable[[], object]] = []
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for piece in group:
            run, (offset, _) = piece.of(data, begin), self._span(piece)
            for spec in self._places[piece.segment.spec.name]:
                target = self.targets.get(spec.name)
                if target is None:
                    writes.append(partial(self.sink.write, spec.name, offset, run, of=spec))
                else:
                    pairs.append((self._part(target, piece), run))
        return writes + copiers(pairs)


def copiers(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[Callable[[], object]]:
    """Calls that copy 1-D sources to their targets."""
    calls: list[Callable[[], object]] = []
    together: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for target, source in pairs:
        plain = target.dtype == source.dtype and target.device == source.device
        if not plain or target.nbytes > _TINY:
            calls.append(partial(target.copy_, source))
        elif target.device.type == "cpu":
            calls.append(partial(_assign, as_view(target), as_view(source)))
        else:
            targets, sources = together.setdefault(target.dtype, ([], []))
            targets.append(target)
            sources.append(source)
    calls += [partial(torch._foreach_copy_, *lists) for lists in together.values()]
    return calls


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
        """Verifies a bucket step by step and writes it.

        The digests that are remembered are those of the copy that is the engine's, or that was
        written to it: whatever happens to the lane meanwhile, they are those of its tensors.

        Args:
            index: Of the bucket.
            digests: Of its blocks, as the sender found them.

        Raises:
            RefitCorrupted: A block is not what the sender packed. If it is the first of all,
                nothing was written.
        """
        steps = self._route.steps(index, verified=self._verify != "none")
        if self._verify == "none":
            self._touch()
            self.table.known.clear()
            for step in steps:
                step.take()
            return
        plan = self._route.plan
        bucket = plan.buckets[index]
        self.table.forget(bucket)
        found: list[bytes] = []
        for step in steps:
            if step.in_place:
                self._touch()
            for copy in step.copies:
                copy()
            begin = len(found) * DIGEST_BYTES
            found += step.digests()
            if b"".join(found[-len(step.names) :]) != digests[begin : len(found) * DIGEST_BYTES]:
                raise self._corrupted(index, step, found, digests)
            self._touch()
            for write in step.writes:
                write()
        self.table.add(bucket, found, plan.block_bytes)

    def _corrupted(
        self, index: int, step: _Step, found: list[bytes], digests: bytes
    ) -> RefitCorrupted:
        """Names the tensor of the first block that is wrong."""
        first = len(found) - len(step.names)
        name = next(
            name
            for at, name in enumerate(step.names, first)
            if found[at] != digests[at * DIGEST_BYTES : (at + 1) * DIGEST_BYTES]
        )
        return RefitCorrupted(
            f"bucket {index}, {name}: the bytes are not those that the sender packed",
            fix="refit again; if it happens twice, test the host's memory",
            bucket=index,
            tensor=name,
        )

    def check_sealed(self, digest: str) -> None:
        """Compares all that the engine has, sent now or held before, with the sender's.

        Raises:
            RefitCorrupted: They differ: the engine does not have what it is known to have.
        """
        if self._verify != "none" and self.table.digest != digest:
            raise RefitCorrupted(
                "the engine's tensors, with those it held before, are not the sender's",
                fix="refit again without delta",
            )

    @torch.no_grad()
    def check_installed(self) -> None:
        """Reads every tensor back and compares it with what it should be.

        Raises:
            RefitCorrupted: Names every tensor that is not what arrived.
        """
        route = self._route
        right = set()

        def sound() -> Iterator[tuple[TensorSpec, torch.Tensor]]:
            for name, tensor in route.sink.read([spec.name for spec in route.expected.tensors]):
                spec = route.expected.by_name[name]
                if tensor.shape == spec.shape and tensor.dtype == dtype_of(spec):
                    if tensor.numel():
                        yield spec, tensor
                    else:
                        right.add(name)

        for name, digest in route.digester.all(sound(), route.targets).items():
            if digest == self.table.known.get(route.wire.root(name)):
                right.add(name)
        wrong = [spec.name for spec in route.expected.tensors if spec.name not in right]
        if wrong:
            raise RefitCorrupted(
                f"{len(wrong)} tensors are not installed as they arrived: {', '.join(wrong[:5])}",
                fix="the engine's loader drops, misplaces or converts them",
                tensors=wrong,
            )
