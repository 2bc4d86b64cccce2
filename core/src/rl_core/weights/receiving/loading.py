"""The receiver's side of the bytes: out of a lane, verified, into the engine."""

from __future__ import annotations

from functools import partial
from itertools import pairwise, zip_longest
from operator import setitem
from typing import TYPE_CHECKING, NamedTuple

import torch

from rl_core.errors import RefitCorrupted, RefitProtocolError
from rl_core.weights.data.digests import DIGEST_BYTES, DigestTable, Hasher, TensorHasher, as_view
from rl_core.weights.data.manifest import dtype_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from rl_core.interfaces.weights import TensorSpec, WeightSink
    from rl_core.weights.data.digests import BlockHash
    from rl_core.weights.data.manifest import WeightManifest
    from rl_core.weights.data.plan import Segment, TransferPlan

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


class ReceiverBuckets:
    """The buckets of a plan on their way from the receiver's lane into an engine's tensors.

    Views, copies and hashers are made once for each bucket, and used by all refits with this plan.
    """

    def __init__(
        self,
        sink: WeightSink,
        wire: WeightManifest,
        expected: WeightManifest,
        plan: TransferPlan,
        data: torch.Tensor,
        block_hash: BlockHash,
    ) -> None:
        self.sink = sink
        self.wire = wire
        self.expected = expected
        self.plan = plan
        self.data = data
        self._hash = block_hash
        self.targets: Mapping[str, torch.Tensor] = sink.targets() or {}
        self._addresses = [target.data_ptr() for target in self.targets.values()]
        # What the trainer ties and the engine does not is written to each of its storages.
        self._written_to: dict[str, list[TensorSpec]] = {}
        for spec in expected.owned:
            self._written_to.setdefault(wire.root(spec.name), []).append(spec)
        check_apart(
            (root, spec.name, self.targets[spec.name])
            for root, specs in self._written_to.items()
            for spec in specs
            if spec.name in self.targets
        )
        self._only_targets = all(
            spec.name in self.targets for specs in self._written_to.values() for spec in specs
        )
        # Whether the bytes that are sent can be copied to where the engine's tensors are.
        self._in_place = all(
            (target := self.targets.get(spec.name)) is not None
            and (target.device, target.dtype) == (data.device, dtype_of(sent))
            and target.is_contiguous()
            for sent in (wire.owned[index] for index in plan.sent)
            for spec in self._written_to[sent.name]
        )
        # The largest piece of a segment, and the most bytes, that are verified together.
        self._piece = max(1, _GROUP // plan.block_bytes) * plan.block_bytes
        self._group = _GROUP
        if data.device.type != "cpu":
            self._piece = self._group = plan.lane_bytes if self._in_place else _DEVICE_GROUP
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._steps: dict[tuple[int, bool], list[_Step]] = {}
        self.tensor_hasher = TensorHasher(block_hash, plan.block_bytes)

    def fits(self, sink: WeightSink, data: torch.Tensor) -> bool:
        """Whether what was made for another sink serves this one: lane and targets are the same.

        What has no target is written by calls of that sink.
        """
        targets, known = sink.targets() or {}, self.targets
        if data is not self.data or not self._only_targets:
            return False
        if targets is not known and any(known.get(n) is not t for n, t in targets.items()):
            return False
        return [target.data_ptr() for target in targets.values()] == self._addresses

    def detach(self) -> None:
        """Drops all views of the lane, so that its memory is unmapped; it fits nothing then."""
        self.data = self.data[:0].clone()
        self._steps.clear()

    def drop_sink(self) -> None:
        """Lets go of a refit's sink, which may hold a copy of what the engine had."""
        self.__dict__.pop("sink", None)
        self._steps = self._steps if self._only_targets else {}

    def steps(self, index: int, *, verified: bool) -> list[_Step]:
        """What is done with a bucket."""
        key = (index, verified)
        if key in self._steps:
            return self._steps[key]
        groups: list[list[_Piece]] = [[]]  # pieces that are verified together
        for segment in self.plan.buckets[index].segments:
            for start, stop in segment.blocks(self._piece):
                if groups[-1] and stop - groups[-1][0].start > self._group:
                    groups.append([])
                groups[-1].append(_Piece(segment, start, stop))
        if verified:
            make = self._verified_in_place if self._in_place else self._verified_beside
            steps = [make(group) for group in groups]
        else:
            writes = (self._writes(group, self.data, 0) for group in groups)
            steps = [_Step([], [], list, calls, False) for calls in writes]
        self._steps[key] = steps
        return steps

    def _verified_in_place(self, group: list[_Piece]) -> _Step:
        """A step that verifies in the engine's own tensors what was copied there."""
        copies, ties = [], []
        for piece in group:
            first, *others = (
                self._part(self.targets[spec.name], piece)
                for spec in self._written_to[piece.segment.spec.name]
            )
            copies.append((first, piece.of(self.data)))
            ties += [(other, first) for other in others]
        runs = [target.view(torch.uint8) for target, _ in copies]
        hasher = Hasher(runs, self._hash, self.plan.block_bytes)
        return _Step(self._names(group), copiers(copies), hasher.digests, copiers(ties), True)

    def _verified_beside(self, group: list[_Piece]) -> _Step:
        """A step that verifies a separate copy, and writes that."""
        begin, size = group[0].start, group[-1].stop - group[0].start
        if not len(self._scratch):  # one for all groups
            most = max(self._piece, self._group)
            largest = max(bucket.stop - bucket.start for bucket in self.plan.buckets)
            self._scratch = self.data.new_empty(min(most, largest))
        kept = self._scratch[:size]
        copy = partial(kept.copy_, self.data[begin : begin + size])
        runs = [piece.of(kept, begin).view(torch.uint8) for piece in group]
        hasher = Hasher(runs, self._hash, self.plan.block_bytes)
        writes = self._writes(group, kept, begin)
        return _Step(self._names(group), [copy], hasher.digests, writes, False)

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
        """Calls that write pieces wherever the engine wants them."""
        writes: list[Callable[[], object]] = []
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for piece in group:
            run, (offset, _) = piece.of(data, begin), self._span(piece)
            for spec in self._written_to[piece.segment.spec.name]:
                target = self.targets.get(spec.name)
                if target is None:
                    writes.append(partial(self.sink.write, spec.name, offset, run, of=spec))
                else:
                    pairs.append((self._part(target, piece), run))
        return writes + copiers(pairs)


def check_apart(targets: Iterable[tuple[str, str, torch.Tensor]]) -> None:
    """Makes sure that no target lies in another one's memory.

    What is not contiguous is not looked at: views of one tensor may interleave.
    """
    ranges = sorted(
        (target.data_ptr(), target.data_ptr() + target.nbytes, root, name)
        for root, name, target in targets
        if target.nbytes and target.is_contiguous() and target.data_ptr()
    )
    for one, other in pairwise(ranges):
        if other[0] < one[1] and one[:3] != other[:3]:
            raise RefitProtocolError(
                f"the engine's {one[3]} and {other[3]} overlap in memory, but are not tied",
                fix="declare ties in WeightSink.specs() (alias_of), or give each its own memory",
                phase="PREPARE",
            )


def copiers(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[Callable[[], object]]:
    """Calls that copy 1-D sources to their targets."""
    calls: list[Callable[[], object]] = []
    together: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for target, source in pairs:
        plain = target.dtype == source.dtype and target.device == source.device
        if not plain or target.nbytes > _TINY:
            calls.append(partial(target.copy_, source))
        elif target.device.type == "cpu":
            calls.append(partial(setitem, as_view(target), slice(None), as_view(source)))
        else:
            targets, sources = together.setdefault(target.dtype, ([], []))
            targets.append(target)
            sources.append(source)
    calls += [partial(torch._foreach_copy_, *lists) for lists in together.values()]
    return calls


class Loader:
    """Writes the buckets of one refit."""

    def __init__(
        self,
        buckets: ReceiverBuckets,
        *,
        verify: str,
        known: dict[str, bytes],
        mark_torn: Callable[[], None],
    ) -> None:
        self.table = DigestTable(buckets.wire, known)
        self._buckets = buckets
        self._verify = verify
        self._mark_torn = mark_torn

    @torch.no_grad()
    def load(self, index: int, digests: bytes) -> None:
        """Verifies a bucket step by step and writes it.

        The digests that are remembered are those of the copy that is the engine's, or that was
        written to it: whatever happens to the lane meanwhile, they are those of its tensors.
        """
        steps = self._buckets.steps(index, verified=self._verify != "none")
        if self._verify == "none":
            self._mark_torn()
            self.table.known.clear()
            for write in (write for step in steps for write in step.writes):
                write()
            return
        plan = self._buckets.plan
        bucket = plan.buckets[index]
        self.table.forget(bucket)
        found: list[bytes] = []
        for step in steps:
            if step.in_place:
                self._mark_torn()
            for copy in step.copies:
                copy()
            begin = len(found) * DIGEST_BYTES
            of_step = step.digests()
            found += of_step
            announced = digests[begin : len(found) * DIGEST_BYTES]
            if b"".join(of_step) != announced:
                parts = range(0, len(announced), DIGEST_BYTES)
                right = [announced[i : i + DIGEST_BYTES] for i in parts]
                pairs = zip_longest(of_step, right)
                name = next(n for n, (a, b) in zip(step.names, pairs, strict=False) if a != b)
                raise RefitCorrupted(
                    f"bucket {index}, {name}: the bytes are not those that the sender packed",
                    fix="call refit again; if it happens twice, test the host's memory",
                    bucket=index,
                    tensor=name,
                )
            self._mark_torn()
            for write in step.writes:
                write()
        self.table.add(bucket, found, plan.block_bytes)

    def check_sealed(self, digest: str) -> None:
        """Compares all that the engine has, sent now or held before, with the sender's."""
        if self._verify != "none" and self.table.digest != digest:
            raise RefitCorrupted(
                "the engine's tensors after this delta refit are not the trainer's",
                fix="call refit again without delta",
            )

    @torch.no_grad()
    def check_installed(self) -> None:
        """Reads every tensor back and compares it with what it should be."""
        buckets = self._buckets
        expected = buckets.expected
        right = set()

        def sound() -> Iterator[tuple[TensorSpec, torch.Tensor]]:
            for name, tensor in buckets.sink.read([spec.name for spec in expected.tensors]):
                spec = expected.by_name[name]
                if tensor is None or (tensor.shape, tensor.dtype) == (spec.shape, dtype_of(spec)):
                    if tensor is not None and tensor.numel():
                        yield spec, tensor
                    else:  # the sink has compared it, or there is nothing to compare
                        right.add(name)

        known, found = self.table.known, buckets.tensor_hasher.digests(sound(), buckets.targets)
        right |= {n for n, digest in found.items() if digest == known.get(buckets.wire.root(n))}
        if wrong := [spec.name for spec in expected.tensors if spec.name not in right]:
            raise RefitCorrupted(
                f"tensors not installed as they arrived ({len(wrong)}): {', '.join(wrong[:5])}",
                fix="report it to the backend's author: its sink drops, misplaces or converts them",
                tensors=wrong,
            )


def settle(sink: WeightSink) -> None:
    """Waits until what was written is there: engines compute on other streams."""
    device = torch.device(sink.device)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
