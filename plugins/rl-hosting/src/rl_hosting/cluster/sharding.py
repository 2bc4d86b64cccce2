"""Which rows go to which worker, and how results find their places again."""

from __future__ import annotations

import heapq
import threading
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from rl_backends.inputs import input_lengths
from rl_core.batch import BatchedDataDict
from rl_core.errors import DataError, PluginError
from rl_core.interfaces import DataParallelRank

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Loads", "RowRanks", "collect", "deal", "padded_shards", "training_shards"]

T = TypeVar("T")


class RowRanks:
    """Which rows each worker of a policy gets, and which workers report results.

    Args:
        reported: By each worker as ``data_parallel``; None where each has other rows.
        name: Of the workers, for errors.

    Attributes:
        size: How many parts rows are dealt into.
        parts: For each worker, which part it gets.
        first: The worker that reports the first part.

    Raises:
        PluginError: A part has no worker that reports it, or several, or they disagree on the size.
    """

    def __init__(self, reported: Sequence[DataParallelRank | None], name: str) -> None:
        workers = len(reported)
        ranks = [r or DataParallelRank(i, workers) for i, r in enumerate(reported)]
        self.size = ranks[0].size
        self.parts = [rank.rank for rank in ranks]
        self._speakers = [worker for worker, rank in enumerate(ranks) if rank.reports]
        self._speakers.sort(key=lambda worker: ranks[worker].rank)
        speaking = [ranks[worker].rank for worker in self._speakers]
        self.first = self._speakers[0] if self._speakers else 0
        sizes = {rank.size for rank in ranks}
        known = set(range(self.size))
        if sizes != {self.size} or speaking != list(range(self.size)) or not known >= {*self.parts}:
            raise PluginError(
                f"{name}: its workers have contradictory data-parallel ranks: "
                f"{', '.join(f'{r.rank} of {r.size}' + ' (reports)' * r.reports for r in ranks)}",
                fix="report it to the backend's author: all ranks need the same size, and every "
                "rank one worker that reports",
            )

    def reported_values(self, results: Sequence[T]) -> list[T]:
        """The results of the workers that report them, in order of the parts."""
        return [results[worker] for worker in self._speakers]


class Loads:
    """What each of several replicas has to do, so that the next row goes to the one with the least.

    A copy in another process counts the calls there.

    Args:
        parts: How many replicas.
    """

    def __init__(self, parts: int) -> None:
        self._guard = threading.Lock()
        self._loads = [0] * parts

    def __reduce__(self) -> tuple[type[Loads], tuple[int]]:
        return Loads, (len(self._loads),)

    def assign(self, sizes: Sequence[int]) -> dict[int, list[int]]:
        """Assigns items, the largest first.

        Args:
            sizes: What each of them costs.

        Returns:
            Indices of items, ascending, of each part that has any.
        """
        parts: dict[int, list[int]] = {}
        with self._guard:
            heap = [(load, part) for part, load in enumerate(self._loads)]
            heapq.heapify(heap)
            for item in sorted(range(len(sizes)), key=lambda item: -sizes[item]):
                load, part = heap[0]
                heapq.heapreplace(heap, (load + sizes[item], part))
                self._loads[part] += sizes[item]
                parts.setdefault(part, []).append(item)
        return {part: sorted(items) for part, items in sorted(parts.items())}

    def release(self, part: int, size: int, _: object = None) -> None:
        """A part has done so much; can be a future's callback."""
        with self._guard:
            self._loads[part] -= size


def deal(lengths: torch.Tensor, parts: int) -> torch.Tensor:
    """Deals items to parts so that sums of lengths are close and counts differ by one at most.

    Args:
        lengths: ``[N]`` size of each item.
        parts: How many parts.

    Returns:
        ``[parts, ceil(N / parts)]`` int64 indices, ascending in each row; N stands for "none".
    """
    count = len(lengths)
    rounds = -(-count // parts)
    table = torch.full((rounds * parts,), count)
    table[:count] = torch.argsort(lengths, descending=True, stable=True)
    table = table.view(rounds, parts)
    table[1::2] = table[1::2].flip(1)  # back and forth, so that nobody always gets the longest
    return table.T.sort(dim=1).values


def collect(
    results: Sequence[BatchedDataDict[Any]], indices: torch.Tensor, rows: int, **pad: int
) -> BatchedDataDict[Any]:
    """Puts the rows of several results into their original order.

    Args:
        results: One batch for each part.
        indices: Original index of every row of all parts, one after the other; those from
            ``rows`` on are dropped.
        rows: How many rows there are to be.
        **pad: Pad values by key.
    """
    merged: BatchedDataDict[Any] = BatchedDataDict.from_batches(list(results), pad_value_dict=pad)
    return merged.select_indices(torch.argsort(indices, stable=True)[:rows])


def padded_shards(
    data: BatchedDataDict[Any], parts: int
) -> tuple[list[BatchedDataDict[Any]], torch.Tensor]:
    """Shards of equal row count, by repeating the first row where one is missing.

    Args:
        data: Rows to score, or what a generation returned.
        parts: How many shards.

    Returns:
        The shards, and what :func:`collect` needs as ``indices``.
    """
    generated = "input_ids" not in data and "unpadded_sequence_lengths" in data
    lengths = data["unpadded_sequence_lengths"] if generated else input_lengths(data)
    table = deal(lengths, parts)
    rows = torch.where(table < len(lengths), table, 0)
    return [data.select_indices(part) for part in rows], table.flatten()


def training_shards(
    data: BatchedDataDict[Any], parts: int, gbs: int, group_size: int
) -> tuple[list[BatchedDataDict[Any]], int]:
    """Divides the rows of every global batch, groups kept whole, into equally many rows.

    Args:
        data: See :class:`~rl_core.interfaces.TrainingDatumSpec`.
        parts: How many workers.
        gbs: Rows for each step.
        group_size: Neighbouring rows that stay together.

    Returns:
        One batch for each worker, steps in order, and the global batch size that these make,
        rows without influence (``sample_mask`` 0) included.

    Raises:
        DataError: The rows are no multiple of ``gbs``, or ``gbs`` none of the group size.
    """
    lengths = input_lengths(data)
    if not len(lengths) or gbs < 1 or len(lengths) % gbs or gbs % group_size:
        raise DataError(
            f"the number of rows, {len(lengths)}, is not a multiple of the global batch size "
            f"{gbs}, or {gbs} is not a multiple of the loss's group size {group_size}",
            fix="drop or repeat rows, set another gbs, or fill up with rows of sample_mask 0",
            key="gbs",
        )
    sizes = lengths.view(-1, group_size).sum(1)
    missing = len(sizes)
    tables = []
    for index, step in enumerate(sizes.view(-1, gbs // group_size)):
        table = deal(step, parts)
        tables.append(torch.where(table < len(step), table + index * len(step), missing))
    groups = torch.cat(tables, dim=1)
    rows = (groups[..., None] * group_size + torch.arange(group_size)).flatten(1)
    return [_masked(data, part) for part in rows], tables[0].numel() * group_size


def _masked(data: BatchedDataDict[Any], rows: torch.Tensor) -> BatchedDataDict[Any]:
    """The rows; indices past the end start again at the first row, with ``sample_mask`` 0."""
    real = rows < data.size
    shard = data.select_indices(rows % data.size)
    if not real.all():
        mask = shard.get("sample_mask", torch.ones(len(rows)))
        shard["sample_mask"] = mask * real.to(mask.dtype)
    return shard
