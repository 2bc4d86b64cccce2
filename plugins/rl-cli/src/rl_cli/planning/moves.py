"""The plan: one source for every element that an engine rank keeps.

Tensors that differ only by numbers in their names, such as one matrix of all layers and experts,
are one :class:`Stack`, of which these numbers are the first dimensions. Ranks that have the same
elements are one :class:`Shard`. So the work grows with the distinct shards, and not with tensors
times ranks.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from heapq import heapify, heapreplace
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from rl_core.errors import ManifestMismatchError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from rl_core.interfaces import Box

__all__ = ["ITEMSIZES", "Devices", "Move", "Shard", "Stack", "elements", "moves_of"]

#: Bytes of an element, by the name of its dtype.
ITEMSIZES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}
#: Ranks that an error names.
_NAMED = 4


class Shard(NamedTuple):
    """Some elements of a stack, and the ranks that have them.

    Attributes:
        box: For each dimension of the stack, the first index and the one after the last; the
            numbers in the names come first.
        ranks: Ascending.
    """

    box: Box
    ranks: tuple[int, ...]


class Stack(NamedTuple):
    """Tensors of one shape and dtype, of which some ranks of one side have some elements.

    Attributes:
        name: Of the tensors, with ``{}`` for each number.
        shape: Of one tensor.
        dtype: As torch names it.
        shards: Those of one side; a rank may be in several.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    shards: Sequence[Shard]

    def at(self, box: Box) -> str:
        """Name of the first tensor of a box, with the elements that the box has of it."""
        numbers = self.name.count("{}")
        inside = ",".join(f"{first}:{after}" for first, after in box[numbers:])
        return f"{self.name.format(*(first for first, _ in box))}[{inside}]"


@dataclass(frozen=True)
class Devices:
    """Where the ranks of both sides are.

    Attributes:
        trainer: The device of each rank.
        engine: The device of each rank.
        per_host: Devices that a host has; those of host 0 come first.
    """

    trainer: Sequence[int]
    engine: Sequence[int]
    per_host: int

    def distance(self, source: int, sink: int) -> int:
        """0 on one device, 1 on one host, 2 between hosts."""
        ours, theirs = self.trainer[source], self.engine[sink]
        return (ours != theirs) + (ours // self.per_host != theirs // self.per_host)

    def nearest(
        self, holders: Sequence[int], sinks: Sequence[int]
    ) -> Iterable[tuple[tuple[int, ...], list[int]]]:
        """Groups engine ranks by the trainer ranks that are nearest to them.

        Args:
            holders: Trainer ranks that have the same elements.
            sinks: Engine ranks that want these.

        Returns:
            Of the holders those that are equally near, each with the engine ranks near them.
        """
        device, host = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
        for holder in holders:
            device[self.trainer[holder]].append(holder)
            host[self.trainer[holder] // self.per_host].append(holder)
        groups: dict[tuple[int, ...], list[int]] = {}
        for sink in sinks:
            at = self.engine[sink]
            near = device.get(at) or host.get(at // self.per_host) or holders
            groups.setdefault(tuple(near), []).append(sink)
        return groups.items()


class Move(NamedTuple):
    """Elements that one trainer rank gives to some engine ranks.

    Attributes:
        stack: The engine's, whose name, shape and dtype the trainer's has, too.
        box: The elements.
        source: The trainer rank.
        sinks: Engine ranks, each of which gets all elements of the box.
        nbytes: What each of them gets.
    """

    stack: Stack
    box: Box
    source: int
    sinks: tuple[int, ...]
    nbytes: int


class _Cell(NamedTuple):
    """Elements that no box cuts, with a choice of sources for some engine ranks."""

    stack: Stack
    box: Box
    candidates: tuple[int, ...]
    sinks: list[int]

    def divide(self, load: list[int]) -> Iterator[Move]:
        """Divides the tensors, times the ranks that get them, over the candidates.

        Args:
            load: Bytes that each trainer rank sends so far; what it sends of these is added.
        """
        stack, box, candidates, sinks = self
        numbers = stack.name.count("{}")
        sizes = (len(sinks), *(after - first for first, after in box[:numbers]))
        nbytes = elements(box[numbers:]) * ITEMSIZES[stack.dtype]
        done = 0
        for source, count in _counts(candidates, load, prod(sizes), nbytes):
            load[source] += count * nbytes
            for (some, until), *inner in _boxes(sizes, done, done + count):
                outer = (
                    (start + first, start + after)
                    for (start, _), (first, after) in zip(box[:numbers], inner, strict=True)
                )
                part = (*outer, *box[numbers:])
                of_each = nbytes * elements(tuple(inner))
                yield Move(stack, part, source, tuple(sinks[some:until]), of_each)
            done += count


def elements(box: Box) -> int:
    """How many elements a box has."""
    return prod(after - first for first, after in box)


def moves_of(trainer: Iterable[Stack], engine: Iterable[Stack], devices: Devices) -> Iterator[Move]:
    """Chooses for every element that an engine rank keeps the one trainer rank that gives it.

    That is one of the nearest, and of these the one with the fewest bytes to send so far; the
    lower rank if they have equally many. Elements for which there is no choice come first. A tensor
    of which all elements have the same holders is not divided over them. The same arguments give
    the same moves in the same order, everywhere. A rank that needs its own alone keeps those that
    name it.

    Args:
        trainer: What the trainer's ranks have. Several stacks may have one name.
        engine: What the engine's ranks keep.
        devices: Of all ranks.

    Yields:
        Moves. The boxes that an engine rank gets do not overlap, and are together what it keeps.

    Raises:
        ManifestMismatchError: No trainer rank has what an engine rank keeps, or ranks disagree on
            a shape or dtype. The error names the tensor and the ranks.
    """
    had, wanted = _by_name(trainer, "trainer"), _by_name(engine, "engine")
    load = [0] * len(devices.trainer)
    choices: list[_Cell] = []
    for name, stack in wanted.items():
        source = had.get(name, stack._replace(shards=()))
        if (source.shape, source.dtype) != (stack.shape, stack.dtype):
            raise _contradiction(("trainer", source), ("engine", stack))
        for box, holders, sinks in _cells(stack, source.shards):
            for candidates, near in devices.nearest(holders, sinks):
                if candidates[1:]:
                    choices.append(_Cell(stack, box, candidates, near))
                    continue
                nbytes = elements(box) * ITEMSIZES[stack.dtype]
                load[candidates[0]] += nbytes * len(near)
                yield Move(stack, box, candidates[0], tuple(near), nbytes)
    choices.sort(key=lambda cell: len(cell.candidates))
    for cell in choices:
        yield from cell.divide(load)


def _by_name(stacks: Iterable[Stack], side: str) -> dict[str, Stack]:
    """Joins stacks of one name."""
    found: dict[str, Stack] = {}
    for stack in stacks:
        other = found.setdefault(stack.name, stack)
        if (stack.shape, stack.dtype) != (other.shape, other.dtype):
            raise _contradiction((side, other), (side, stack))
        bounds = stack.shape
        for shard in stack.shards:
            own = shard.box[stack.name.count("{}") :]
            if len(own) != len(bounds) or not all(
                0 <= first < after <= size for (first, after), size in zip(own, bounds, strict=True)
            ):
                raise ManifestMismatchError(
                    f"{stack.at(shard.box)}: {side} {_named(shard.ranks)}: these elements are not "
                    f"in a tensor of shape {list(bounds)}",
                    fix="correct the boxes of these ranks",
                    misshaped=[stack.name],
                )
        if stack is not other:
            found[stack.name] = other._replace(shards=(*other.shards, *stack.shards))
    return found


def _cells(
    stack: Stack, sources: Sequence[Shard]
) -> Iterator[tuple[Box, Sequence[int], Sequence[int]]]:
    """Cuts what is wanted so far that all elements of a cell have the same ranks on both sides."""
    pending: list[tuple[Box, list[tuple[bool, Shard]]]] = [
        ((), [(True, each) for each in sources] + [(False, each) for each in stack.shards])
    ]
    while pending:
        box, shards = pending.pop()
        wanted = [shard for is_source, shard in shards if not is_source]
        if not wanted:
            continue
        if not any(is_source for is_source, _ in shards):
            hole, ranks = (*box, *wanted[0].box[len(box) :]), _ranks(wanted)
            raise ManifestMismatchError(
                f"{stack.at(hole)}: no trainer rank has these elements, which engine "
                f"{_named(ranks)} must get",
                fix="let the trainer's ranks have all elements of the tensor, or leave the tensor "
                "out of what the engine keeps",
                missing=[stack.name],
                ranks=list(ranks),
            )
        if len(box) == len(wanted[0].box):
            holders = _ranks([shard for is_source, shard in shards if is_source])
            yield box, holders, _ranks(wanted)
        else:
            pending += reversed([*_cut(box, shards)])


def _cut(
    box: Box, shards: list[tuple[bool, Shard]]
) -> Iterator[tuple[Box, list[tuple[bool, Shard]]]]:
    """Cuts the next dimension wherever a shard begins or ends there."""
    dim = len(box)
    begin, end = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
    for number, (_, shard) in enumerate(shards):
        first, after = shard.box[dim]
        begin[first].append(number)
        end[after].append(number)
    here: dict[int, None] = {}
    for first, after in pairwise(sorted({*begin, *end})):
        for number in end[first]:
            del here[number]
        here.update(dict.fromkeys(begin[first]))
        if here:
            yield (*box, (first, after)), [shards[number] for number in here]


def _ranks(shards: Sequence[Shard]) -> Sequence[int]:
    if len(shards) == 1:
        return shards[0].ranks
    return tuple(sorted({rank for shard in shards for rank in shard.ranks}))


def _counts(
    candidates: Sequence[int], load: Sequence[int], units: int, size: int
) -> list[tuple[int, int]]:
    """How many of so many units of a size each one gets, so that the loads are as even as can be.

    They are the counts that one gets by giving each unit to the least loaded.
    """
    order = sorted(candidates, key=lambda rank: (load[rank], rank))
    total, part = units * size, 0
    for part, rank in enumerate(order, 1):
        total += load[rank]
        if part == len(order) or total <= load[order[part]] * part:
            break
    order = order[:part]
    counts = {rank: max(0, (total // part - load[rank]) // size) for rank in order}
    least = [(load[rank] + counts[rank] * size, rank) for rank in order]
    heapify(least)
    for _ in range(units - sum(counts.values())):
        bytes_, rank = least[0]
        heapreplace(least, (bytes_ + size, rank))
        counts[rank] += 1
    return [(rank, counts[rank]) for rank in sorted(order) if counts[rank]]


def _boxes(sizes: Sequence[int], first: int, after: int) -> Iterator[Box]:
    """The boxes of which a run of elements of a row-major array consists."""
    if not sizes:
        yield ()
        return
    width = prod(sizes[1:])
    head, tail = -(-first // width), after // width
    if head > tail:
        for inner in _boxes(sizes[1:], first - tail * width, after - tail * width):
            yield ((tail, head), *inner)
        return
    if first < head * width:
        for inner in _boxes(sizes[1:], first - (head - 1) * width, width):
            yield ((head - 1, head), *inner)
    if head < tail:
        yield ((head, tail), *((0, size) for size in sizes[1:]))
    if tail * width < after:
        for inner in _boxes(sizes[1:], 0, after - tail * width):
            yield ((tail, tail + 1), *inner)


def _named(ranks: Sequence[int]) -> str:
    some = ", ".join(map(str, ranks[:_NAMED]))
    more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    return f"rank{'s' * (len(ranks) != 1)} {some}{more}"


def _contradiction(*sides: tuple[str, Stack]) -> ManifestMismatchError:
    """An error for stacks of one name with different shapes or dtypes."""
    each = (
        f"{side} {_named(_ranks(stack.shards))}: {list(stack.shape)} {stack.dtype}"
        for side, stack in sides
    )
    (_, one), (_, other) = sides
    kind = "misshaped" if one.shape != other.shape else "mistyped"
    return ManifestMismatchError(
        f"{one.name}: {'; '.join(each)}",
        fix="give the tensor one shape and dtype on all ranks; what is cast travels in the dtype "
        "of the engine",
        **{kind: [one.name]},
    )
