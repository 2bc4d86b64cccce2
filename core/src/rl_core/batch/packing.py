"""Bin packing: which sequences share one row of ``capacity`` tokens.

Every algorithm is a function from lengths to bins. They differ in how much order they keep and how
little space they waste; none looks at every open bin for every sequence.
"""

from __future__ import annotations

import reprlib
from bisect import bisect_right
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from rl_core.config import as_int, nearest
from rl_core.errors import ConfigError, DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["ALGORITHMS", "bin_loads", "pack"]

Lengths: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"
Bins: TypeAlias = "list[list[int]]"


def pack(
    lengths: Sequence[int] | Lengths,
    capacity: int,
    algorithm: str = "modified_first_fit_decreasing",
    *,
    seed: int = 0,
    bin_multiple: int = 1,
    min_bin_count: int = 0,
) -> Bins:
    """Distributes sequences over bins, each sequence to exactly one bin.

    Args:
        lengths: ``[n]`` integer number of tokens of each sequence, at least 1.
        capacity: Hard bound on the sum of lengths in a bin.
        algorithm: A name in :data:`ALGORITHMS`.
        seed: Of the shuffle in ``first_fit_shuffle``; the others do not use it.
        bin_multiple: The number of bins is a multiple of this; the heaviest bins are split until
            it is.
        min_bin_count: At least so many bins, and then the next multiple.

    Returns:
        For each bin the indices of its sequences. No bin is empty.

    Raises:
        ConfigError: The algorithm is unknown, or a number is no whole number or too small.
        DataError: A length is not an integer in ``[1, capacity]``, or there are fewer sequences
            than bins: a microbatch without rows is none.
    """
    if algorithm not in list(ALGORITHMS):
        close = nearest(str(algorithm), ALGORITHMS)
        raise ConfigError(
            f"unknown packing algorithm {algorithm!r}",
            fix=f"use {close!r}" if close else f"use one of {', '.join(ALGORITHMS)}",
            key="algorithm",
        )
    capacity, seed = as_int("capacity", capacity, 1), as_int("seed", seed, 0)
    bin_multiple = as_int("bin_multiple", bin_multiple, 1)
    min_bin_count = as_int("min_bin_count", min_bin_count, 0)
    try:
        sizes = np.asarray(lengths)
    except (TypeError, ValueError, RuntimeError):  # ragged lists, tensors that are not on the CPU
        sizes = np.asarray(None)
    if sizes.ndim != 1 or (len(sizes) and sizes.dtype.kind not in "iu"):
        raise DataError(
            f"lengths are {reprlib.repr(lengths)}",
            fix="give integers of shape [sequences], on the CPU",
            key="lengths",
        )
    outside = np.flatnonzero((sizes < 1) | (sizes > capacity))
    if len(outside):
        index = int(outside[0])
        raise DataError(
            f"sequence {index} has {sizes[index]} tokens, but a bin holds 1 to {capacity}",
            fix="raise max_tokens_per_microbatch or shorten the sequence",
            row=index,
        )
    sizes = sizes.astype(np.int64)
    bins = ALGORITHMS[algorithm](sizes, capacity, seed) if len(sizes) else []
    wanted = max(len(bins), min_bin_count)
    wanted += -wanted % bin_multiple
    if wanted == len(bins):
        return bins
    if len(sizes) < wanted:
        raise DataError(
            f"{wanted} bins were requested for {len(sizes)} sequences, which need {len(bins)}",
            fix="give at least one sequence for each bin: use a larger batch, or fewer shards",
        )
    loads = bin_loads(sizes, bins).tolist()
    heap = [(-load, i) for i, load in enumerate(loads) if len(bins[i]) > 1]
    heapify(heap)
    while len(bins) < wanted:
        _, source = heappop(heap)
        members = bins[source]
        bins[source] = members[::2]
        bins.append(members[1::2])
        for part in (source, len(bins) - 1):
            if len(bins[part]) > 1:
                heappush(heap, (-int(sizes[bins[part]].sum()), part))
    return bins


def bin_loads(lengths: Lengths, bins: Sequence[Sequence[int]]) -> Lengths:
    """``[len(bins)]`` sums of the lengths in each bin; bins must not be empty."""
    counts = np.fromiter(map(len, bins), np.int64, len(bins))
    members = np.fromiter((i for members in bins for i in members), np.int64, int(counts.sum()))
    loads: Lengths = np.add.reduceat(lengths[members], np.cumsum(counts) - counts)
    return loads


def first_fit_decreasing(lengths: Lengths, capacity: int, _seed: int = 0) -> Bins:
    """The longest first, into the first bin that has room."""
    # Lengths only shrink, so a bin changes between the two heaps once per visit.
    order = np.argsort(-lengths, kind="stable")
    # Runs of one length are placed together: as many as fit into the first bin with room.
    sizes, starts = np.unique(-lengths[order], return_index=True)
    rows: list[int] = order.tolist()
    smallest = int(lengths.min())
    bins: Bins = []
    room: list[int] = []
    fitting: list[int] = []
    waiting: list[tuple[int, int]] = []
    bounds = [*starts.tolist(), len(rows)]
    for run, length in enumerate((-sizes).tolist()):
        while waiting and -waiting[0][0] >= length:
            heappush(fitting, heappop(waiting)[1])
        start, stop = bounds[run], bounds[run + 1]
        while start < stop:
            if not fitting:
                fitting.append(len(bins))
                bins.append([])
                room.append(capacity)
            target = fitting[0]
            end = min(stop, start + room[target] // length)
            bins[target] += rows[start:end]
            room[target] -= (end - start) * length
            start = end
            if room[target] < length:
                heappop(fitting)
                if room[target] >= smallest:
                    heappush(waiting, (-room[target], target))
    return bins


def first_fit_shuffle(lengths: Lengths, capacity: int, seed: int) -> Bins:
    """In a shuffled order; a tree of maxima has the leftmost bin with enough room."""
    order = np.random.default_rng(seed).permutation(len(lengths))
    leaves = 1 << (len(order) - 1).bit_length()
    room = [capacity] * (2 * leaves)  # node i holds the maximum of nodes 2i and 2i + 1
    bins: Bins = []
    for row, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        node = 1
        while node < leaves:
            node *= 2
            if room[node] < length:
                node += 1
        if node - leaves == len(bins):
            bins.append([])
        bins[node - leaves].append(row)
        room[node] -= length
        while node > 1:
            node //= 2
            most = max(room[2 * node], room[2 * node + 1])
            if room[node] == most:
                break
            room[node] = most
    return bins


def concatenative(lengths: Lengths, capacity: int, _seed: int = 0) -> Bins:
    """In the order of the batch; a sequence that does not fit begins a new bin."""
    bins: Bins = []
    room = 0
    for row, length in enumerate(lengths.tolist()):
        if length > room:
            bins.append([])
            room = capacity
        bins[-1].append(row)
        room -= length
    return bins


class _Pool:
    """Sequences not packed yet, by length: the smallest, and the largest up to a limit."""

    def __init__(self, lengths: Lengths, rows: Lengths) -> None:
        order = rows[np.argsort(lengths[rows], kind="stable")]
        sizes, starts = np.unique(lengths[order], return_index=True)
        self.sizes: list[int] = sizes.tolist()
        # Reversed, so that pop() takes the row that comes first in the batch.
        self.rows: Bins = [part[::-1].tolist() for part in np.split(order, starts[1:])]

    def remaining(self) -> Lengths:
        return np.array([row for rows in self.rows for row in rows], dtype=np.int64)

    def take_smallest(self) -> tuple[int, int] | None:
        """Removes a shortest sequence; its row and length."""
        return self._take(0) if self.sizes else None

    def take_largest(self, limit: int) -> tuple[int, int] | None:
        """Removes a longest sequence of at most ``limit`` tokens; its row and length."""
        slot = bisect_right(self.sizes, limit) - 1
        return self._take(slot) if slot >= 0 else None

    def _take(self, slot: int) -> tuple[int, int]:
        row, size = self.rows[slot].pop(), self.sizes[slot]
        if not self.rows[slot]:
            del self.rows[slot], self.sizes[slot]
        return row, size


def modified_first_fit_decreasing(lengths: Lengths, capacity: int, _seed: int = 0) -> Bins:
    """As Johnson and Garey describe it: "A 71/60 theorem for bin packing", 1985."""
    if 2 * int(lengths.max()) <= capacity:  # nothing to pair: what follows would come to the same
        return first_fit_decreasing(lengths, capacity)
    rows = np.argsort(-lengths, kind="stable")
    portion = lengths[rows]
    is_large = 2 * portion > capacity
    is_medium = ~is_large & (3 * portion > capacity)
    is_small = ~is_large & ~is_medium & (6 * portion > capacity)
    bins: Bins = [[row] for row in rows[is_large].tolist()]
    room: list[int] = (capacity - portion[is_large]).tolist()

    medium = _Pool(lengths, rows[is_medium])
    for target, members in enumerate(bins):
        if found := medium.take_largest(room[target]):
            members.append(found[0])
            room[target] -= found[1]

    small, unpaired = _Pool(lengths, rows[is_small]), []
    for target in reversed(range(len(bins))):
        if len(bins[target]) > 1:
            continue
        if (least := small.take_smallest()) is None:
            break
        if (most := small.take_largest(room[target] - least[1])) is None:
            unpaired.append(least[0])
            break  # the bins still to come have less room
        bins[target] += [least[0], most[0]]
        room[target] -= least[1] + most[1]

    tiny = rows[~is_large & ~is_medium & ~is_small]
    left = np.concatenate(
        [medium.remaining(), small.remaining(), np.array(unpaired, dtype=np.int64), tiny]
    )
    rest = _Pool(lengths, np.sort(left))
    for target, members in enumerate(bins):
        while found := rest.take_largest(room[target]):
            members.append(found[0])
            room[target] -= found[1]
    left = np.sort(rest.remaining())
    if len(left):
        last = first_fit_decreasing(lengths[left], capacity)
        bins += [left[members].tolist() for members in last]
    return bins


#: Name of each algorithm, as ``SequencePackingArgs["algorithm"]`` spells it.
ALGORITHMS: dict[str, Callable[[Lengths, int, int], Bins]] = {
    "concatenative": concatenative,
    "first_fit_decreasing": first_fit_decreasing,
    "first_fit_shuffle": first_fit_shuffle,
    "modified_first_fit_decreasing": modified_first_fit_decreasing,
}
