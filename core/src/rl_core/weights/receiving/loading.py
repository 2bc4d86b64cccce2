"""The receiver's side of the bytes: out of a lane, verified, into the engine."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise, zip_longest
from operator import is_, setitem
from typing import TYPE_CHECKING, NamedTuple

import torch

from rl_core.errors import ManifestMismatchError, RefitCorrupted, RefitProtocolError
from rl_core.interfaces.weights import Piece
from rl_core.weights.data.digests import (
    DIGEST_BYTES,
    DigestTable,
    Hasher,
    TensorHasher,
    as_view,
)
from rl_core.weights.data.parts import box_of, layout_of, lying, narrowed, runs_in, sizes_of
from rl_core.weights.data.plan import ALIGN
from rl_core.weights.data.runs import copy_run, flat, is_plain, write_run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from rl_core.interfaces.weights import TensorSpec, WeightSink
    from rl_core.weights.data.digests import BlockHash
    from rl_core.weights.data.manifest import WeightManifest
    from rl_core.weights.data.parts import Layout, Partition
    from rl_core.weights.data.plan import Segment, TransferPlan

#: Bytes that are verified together, at most, but for one block: on the CPU what fits a cache, so
#: that they are read from memory once; on a device what a copy may take besides.
_GROUP = 1 << 20
_DEVICE_GROUP = 64 << 20
#: Up to here, copying bytes is faster than telling torch to; on a device, many at once are.
_TINY = 512 << 10


class _Run(NamedTuple):
    """Some bytes of a segment, from one place in the lane to another."""

    segment: Segment
    start: int
    stop: int

    @property
    def offset(self) -> int:
        """Index of its first element in the flattened part."""
        begin = self.segment.start
        return self.segment.offset + (self.start - begin) // self.segment.spec.torch_dtype.itemsize

    def of(self, data: torch.Tensor, begin: int = 0) -> torch.Tensor:
        """Its elements, in bytes of which the first is ``begin`` in the lane."""
        return data[self.start - begin : self.stop - begin].view(self.segment.spec.torch_dtype)


class _Step(NamedTuple):
    """Some bytes on their way into the engine.

    The lane is another process's: what was read there once may be other bytes when it is read
    again. So they are copied out of it, and verified where nobody else writes.

    Attributes:
        first: Index of the first block among those of the bucket.
        names: The part of each block.
        copies: Calls that copy them out of the lane.
        digests: Digests the copy.
        writes: Calls that write the copy to wherever it is not yet.
        in_place: The copy is in the engine's own tensors.
    """

    first: int
    names: list[str]
    copies: list[Callable[[], object]]
    digests: Callable[[], list[bytes]]
    writes: list[Callable[[], object]]
    in_place: bool


def kept_of(
    theirs: WeightManifest, expected: WeightManifest, pieces: Iterable[Piece] | None
) -> Layout:
    """The boxes of a sink's pieces, of the trainer's tensors.

    What the trainer ties and the engine does not is wanted for each of the engine's tensors.
    """
    if pieces is None:
        return {}
    owned = expected.index
    named = [p for p in pieces if p.name in owned]
    for name, _, tensor in named:
        if tensor is not None and tensor.dtype != (spec := expected.by_name[name]).torch_dtype:
            raise ManifestMismatchError(
                f"{name}: the engine describes it as {spec.dtype}, but keeps {tensor.dtype}",
                fix="correct specs() or pieces() of the weight sink",
                mistyped=[name],
            )
    roots = (
        p if theirs.by_name[p.name].alias_of is None else p._replace(name=theirs.root(p.name))
        for p in named
    )
    return {index: sorted(boxes) for index, boxes in layout_of(theirs, roots).items()}


class Places:
    """Where an engine keeps each part."""

    def __init__(
        self,
        sink: WeightSink,
        parts: Partition,
        expected: WeightManifest,
        pieces: Sequence[Piece] | None,
    ) -> None:
        self.sink = sink
        self.parts = parts
        self.expected = expected
        #: By name of the engine's tensor, what it keeps of it.
        self.kept: dict[str, list[Piece]] = {spec.name: [] for spec in expected.owned}
        #: By name of a part, the engine's tensors with it, and its place; None is written by calls.
        self.of_part: dict[str, list[tuple[TensorSpec, torch.Tensor | None]]] = {}
        if pieces is None:
            pieces = [Piece(spec.name, box_of(spec), None) for spec in expected.owned]
        index, manifest = parts.whole.index, parts.manifest
        for piece in pieces:
            if piece.name not in self.kept:
                continue
            self.kept[piece.name].append(piece)
            root, spec = parts.whole.root(piece.name), expected.by_name[piece.name]
            for number in parts.of_box(index[root], piece.box):
                part, place = manifest.owned[number], piece.tensor
                place = None if place is None else narrowed(place.detach(), piece.box, part)
                self.of_part.setdefault(part.name, []).append((spec, place))
        check_apart((p for p in pieces if p.name in self.kept), parts.whole.root)
        self._tensors, self._lying = [piece.tensor for piece in pieces], lying(pieces)

    def is_written_in_place(self, part: TensorSpec, device: torch.device) -> bool:
        """Whether the bytes that are sent of a part can be copied to where the engine has it."""
        return all(
            place is not None
            and (place.device, place.dtype) == (device, part.torch_dtype)
            and is_plain(place)
            for _, place in self.of_part.get(part.name, ())
        )

    def serves(self, sink: WeightSink) -> bool:
        """Whether this sink has the same tensors, as they lay, and writes none by its own calls."""
        pieces = sink.pieces() or ()
        tensors = [piece.tensor for piece in pieces]
        if any(tensor is None for tensor in tensors) or self._lying != lying(pieces):
            return False
        return all(map(is_, self._tensors, tensors))

    @cached_property
    def lasting(self) -> set[int]:
        """The addresses of all places."""
        places = (place for found in self.of_part.values() for _, place in found)
        return {place.data_ptr() for place in places if place is not None}


class ReceiverBuckets:
    """The buckets of a plan on their way from a receiver's lane into an engine's tensors.

    Views, copies and hashers are made once for each bucket, and used by all refits with this plan.

    Args:
        places: Where the engine keeps each part.
        plan: What comes.
        data: The lane.
        block_hash: Of the sender.
        reads: As of ``LaneInfo``.
    """

    def __init__(
        self,
        places: Places,
        plan: TransferPlan,
        data: torch.Tensor,
        block_hash: BlockHash,
        reads: bytes,
    ) -> None:
        self.places = places
        self.plan = plan
        self.data = data
        self._hash = block_hash
        self.reads = reads
        self._sunk = False  # some part is written by calls of the sink
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._steps: dict[tuple[int, bool], list[_Step]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes that are taken from the lane."""
        return sum(
            s.stop - s.start for n in range(len(self.plan.buckets)) for s in self.segments(n)
        )

    def segments(self, index: int) -> list[Segment]:
        """What is taken of a bucket."""
        segments, reads = self.plan.buckets[index].segments, self.reads
        return [s for s in segments if reads[s.tensor]] if reads else list(segments)

    def forget_steps(self, *, all_of_them: bool) -> None:
        """Drops what holds the lane, or only what holds a refit's sink."""
        if all_of_them:
            self.data = self.data[:0].clone()  # views of it keep the memory mapped
        if all_of_them or self._sunk:
            self._steps.clear()

    def steps(self, index: int, *, verified: bool) -> list[_Step]:
        """What is done with a bucket."""
        key = (index, verified)
        if key in self._steps:
            return self._steps[key]
        steps = self._steps[key] = []
        for first, group, in_place in self._groups(index):
            if not verified and not group[0].segment.strides:
                writes = self._writes(group, self.data, 0)
                steps.append(_Step(first, [], [], list, writes, False))
                continue
            make = self._verified_in_place if in_place else self._verified_beside
            steps.append(make(first, group))
        return steps

    def _groups(self, index: int) -> Iterator[tuple[int, list[_Run], bool]]:
        """Runs that are verified together, the number of their first block, and whether in place.

        Those that are not verified in place lie one after another in the lane.
        """
        plan, size, device = self.plan, self.plan.block_bytes, self.data.device
        group: list[_Run] = []
        first = block = 0
        before = False
        for segment in plan.buckets[index].segments:
            blocks = -(-(segment.stop - segment.start) // size)
            if self.reads and not self.reads[segment.tensor]:
                if group:
                    yield first, group, before
                    group = []
                block += blocks
                continue
            in_place = self.places.is_written_in_place(segment.spec, device)
            most = max(1, _GROUP // size) * size  # bytes of a run; at least those of a group
            room = _GROUP
            if device.type != "cpu":  # but for parts with strides, which go one by one
                most = room = plan.lane_bytes if in_place else _DEVICE_GROUP // size * size
            for start, stop in segment.blocks(most):
                apart = group and (
                    stop - group[0].start > room
                    or segment.strides
                    or group[-1].segment.strides
                    or start not in (group[-1].stop, -(-group[-1].stop // ALIGN) * ALIGN)
                    or in_place != before
                )
                if apart:
                    yield first, group, before
                    group = []
                if not group:
                    first = block
                group.append(_Run(segment, start, stop))
                before = in_place
                block += -(-(stop - start) // size)
        if group:
            yield first, group, before

    def _verified_in_place(self, first: int, group: list[_Run]) -> _Step:
        """A step that verifies in the engine's own tensors what was copied there."""
        copies: list[Callable[[], object]] = []
        pairs, runs, ties = [], [], []
        for run in group:
            target, *others = (
                _elements(place, run) for _, place in self.places.of_part[run.segment.spec.name]
            )
            if run.segment.strides:
                copies.append(partial(copy_run, target, run.segment.part_in(self.data), run.offset))
            else:
                pairs.append((target, run.of(self.data)))
            runs.append(target.view(torch.uint8))
            ties += [(other, target) for other in others]
        digests = Hasher(runs, self._hash, self.plan.block_bytes).digests
        return _Step(
            first, self._names(group), copies + copiers(pairs), digests, copiers(ties), True
        )

    def _verified_beside(self, first: int, group: list[_Run]) -> _Step:
        """A step that verifies a separate copy, and writes that."""
        begin = group[0].start // ALIGN * ALIGN  # a cut piece may start at any of its elements
        size = group[-1].stop - begin
        if not len(self._scratch):  # one for all groups
            block = self.plan.block_bytes
            most = max(_GROUP, block) if self.data.device.type == "cpu" else _DEVICE_GROUP
            largest = max(bucket.nbytes for bucket in self.plan.buckets)
            self._scratch = self.data.new_empty(min(most, largest) + ALIGN)
        kept = self._scratch[:size]
        copy: Callable[[], object] = partial(kept.copy_, self.data[begin : begin + size])
        if (segment := group[0].segment).strides:
            target = group[0].of(kept, begin)
            copy = partial(copy_run, target, segment.part_in(self.data), group[0].offset)
        runs = [run.of(kept, begin).view(torch.uint8) for run in group]
        hasher = Hasher(runs, self._hash, self.plan.block_bytes)
        writes = self._writes(group, kept, begin)
        return _Step(first, self._names(group), [copy], hasher.digests, writes, False)

    def _names(self, group: list[_Run]) -> list[str]:
        size = self.plan.block_bytes
        return [p.segment.spec.name for p in group for _ in range(p.start, p.stop, size)]

    def _writes(
        self, group: list[_Run], data: torch.Tensor, begin: int
    ) -> list[Callable[[], object]]:
        """Calls that write runs wherever the engine wants them."""
        writes: list[Callable[[], object]] = []
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for run in group:
            part = run.segment.spec
            elements = run.of(data, begin)
            for spec, place in self.places.of_part[part.name]:
                if place is None:
                    self._sunk = True
                    for offset, some in runs_in(spec.shape, part, run.offset, len(elements)):
                        write = partial(self.places.sink.write, spec.name, offset, elements[some])
                        writes.append(partial(write, of=spec))
                elif is_plain(place):
                    pairs.append((_elements(place, run), elements))
                else:
                    writes.append(partial(write_run, place, run.offset, elements))
        return writes + copiers(pairs)


def _elements(place: torch.Tensor | None, run: _Run) -> torch.Tensor:
    """The elements of a run, 1-D, where the engine has its part in one piece."""
    assert place is not None
    count = (run.stop - run.start) // run.segment.spec.torch_dtype.itemsize
    return flat(place)[run.offset : run.offset + count]


def check_apart(pieces: Iterable[Piece], owner: Callable[[str], str] = str) -> None:
    """Makes sure that no piece lies in another one's memory, unless both are the same elements.

    What is not contiguous is not looked at: views of one tensor may interleave.

    Args:
        pieces: Of an engine.
        owner: Gives the tensor of the trainer that is sent for one of the engine.
    """
    ranges = sorted(
        (target.data_ptr(), target.data_ptr() + target.nbytes, owner(name), name, box)
        for name, box, target in pieces
        if target is not None and target.nbytes and target.is_contiguous() and target.data_ptr()
    )
    for one, other in pairwise(ranges):
        if other[0] < one[1] and (one[:3], one[4]) != (other[:3], other[4]):
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


@dataclass
class ReceiverLanes:
    """All lanes of a refit, kept for the next one.

    Attributes:
        places: Where the engine keeps each part.
        keeps: A byte for each part, 1 for those that it keeps.
        lanes: By the rank of the trainer.
        hasher: Digests what is installed.
    """

    places: Places
    keeps: bytes
    lanes: dict[int, ReceiverBuckets]
    hasher: TensorHasher

    def fits(self, sink: WeightSink, data: Mapping[int, torch.Tensor]) -> bool:
        """Whether they serve a refit with this sink and this memory."""
        same = all(buckets.data is data[rank] for rank, buckets in self.lanes.items())
        return same and self.places.serves(sink)

    def detach(self) -> None:
        """Drops all views of the lanes, so that memory is unmapped; they fit nothing then."""
        for buckets in self.lanes.values():
            buckets.forget_steps(all_of_them=True)

    def drop_sink(self) -> None:
        """Lets go of a refit's sink, which may hold a copy of what the engine had."""
        self.places.__dict__.pop("sink", None)
        for buckets in self.lanes.values():
            buckets.forget_steps(all_of_them=False)


class Loader:
    """Writes the buckets of one refit."""

    def __init__(
        self,
        lanes: ReceiverLanes,
        *,
        verify: str,
        known: dict[str, bytes],
        mark_torn: Callable[[], None],
    ) -> None:
        self.known = known
        self._all = lanes
        self.lanes = lanes.lanes
        self._places = lanes.places
        self._verify = verify
        self._mark_torn = mark_torn
        manifest = lanes.places.parts.manifest
        self._tables = {lane: DigestTable(manifest, known) for lane in lanes.lanes}

    @property
    def nbytes(self) -> int:
        """Bytes that the engine takes."""
        return sum(buckets.nbytes for buckets in self.lanes.values())

    @torch.no_grad()
    def load(self, index: int, digests: bytes, lane: int) -> None:
        """Verifies a bucket step by step and writes it.

        The digests that are remembered are those of the copy that is the engine's, or that was
        written to it: whatever happens to the lane meanwhile, they are those of its tensors.
        """
        buckets, table = self.lanes[lane], self._tables[lane]
        steps = buckets.steps(index, verified=self._verify != "none")
        if self._verify == "none":
            self._mark_torn()
            self.known.clear()
            for step in steps:
                for call in (*step.copies, *step.writes):
                    call()
            return
        segments = buckets.segments(index)
        table.forget(segments)
        found: list[bytes] = []
        for step in steps:
            if step.in_place:
                self._mark_torn()
            for copy in step.copies:
                copy()
            of_step = step.digests()
            found += of_step
            after = step.first + len(of_step)
            announced = digests[step.first * DIGEST_BYTES : after * DIGEST_BYTES]
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
        table.add(segments, found, buckets.plan.block_bytes)

    def check_sealed(self, digest: str) -> None:
        """Compares all that the engine has, sent now or held before, with the sender's."""
        table = DigestTable(self._places.parts.manifest, self.known)
        if self._verify != "none" and table.digest(self._all.keeps) != digest:
            raise RefitCorrupted(
                "the engine's tensors after this delta refit are not the trainer's",
                fix="call refit again without delta",
            )

    @torch.no_grad()
    def check_installed(self) -> None:
        """Reads every tensor back and compares it with what it should be."""
        places, expected, wrong = self._places, self._places.expected, set[str]()
        parts, owned = places.parts, places.parts.manifest.owned
        names = [spec.name for spec in expected.tensors]
        # What is to be read of each name, and the part of each thing that is digested.
        nothing: list[Piece | None] = [None]  # of an empty tensor, which is read all the same
        due = [(n, one) for n in names for one in places.kept.get(expected.root(n), nothing)]
        part_of: dict[str, str] = {}

        def sound() -> Iterator[tuple[str, TensorSpec, torch.Tensor]]:
            read = places.sink.read(names)
            for (wanted, piece), (name, tensor) in zip_longest(due, read, fillvalue=("", None)):
                spec = expected.by_name.get(wanted)
                if spec is None or name != wanted:
                    wrong.update({wanted or name})
                    return
                box = box_of(spec) if piece is None else piece.box
                if tensor is None or not spec.numel:  # compared by the sink, or nothing to compare
                    continue
                if (tensor.shape, tensor.dtype) != (sizes_of(box), spec.torch_dtype):
                    wrong.add(name)
                    continue
                for number in parts.of_box(parts.whole.index[parts.whole.root(name)], box):
                    key = f"{len(part_of)}"
                    part_of[key] = owned[number].name
                    sources[key] = name
                    yield key, owned[number], narrowed(tensor, box, owned[number])

        sources: dict[str, str] = {}
        found = self._all.hasher.digests(sound(), places.lasting)
        wrong |= {sources[k] for k, digest in found.items() if digest != self.known.get(part_of[k])}
        if wrong:
            listed = [name for name in names if name in wrong] or sorted(wrong)
            raise RefitCorrupted(
                f"tensors not installed as they arrived ({len(listed)}): {', '.join(listed[:5])}",
                fix="report it to the backend's author: its sink drops, misplaces or converts them",
                tensors=listed,
            )


def settle(sink: WeightSink) -> None:
    """Waits until what was written is there: engines compute on other streams."""
    device = torch.device(sink.device)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
