"""Which rows go to which shard, and where the microbatches of a shard begin and end."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from rl_core.batch.microbatches import (
    DynamicBatchingArgs,
    Microbatch,
    PlanScope,
    SequencePackingArgs,
    check_groups,
    plan_dynamic,
    plan_packed,
)
from rl_core.config import as_int, check_config
from rl_core.errors import ConfigError, DataError


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """The rows of one shard (``[b]`` int64 indices into the batch), in order, and its plan.

    The plan's attributes are those of :class:`~rl_core.batch.BatchedDataDict`.
    """

    rows: torch.Tensor
    micro_batch_indices: list[list[list[int]]]
    micro_batch_lengths: list[list[int]]
    elem_counts_per_gb: list[int]


def plan_shards(
    size: int, shards: int, batch_size: int | None, *, uneven: bool, group_size: int
) -> list[torch.Tensor]:
    """Rows of each shard when every global batch is cut into equal runs.

    Args:
        size: Rows in total.
        shards: Number of shards.
        batch_size: Rows of one global batch; None takes all rows as one.
        uneven: Let shards differ by one group; only for one global batch.
        group_size: Neighbouring rows that stay in one shard.

    Raises:
        ConfigError: ``shards`` or ``batch_size`` makes no sense.
        DataError: The counts do not divide.
    """
    batch_size = _check_counts(size, shards, batch_size, uneven)
    check_groups(batch_size, group_size)
    groups = torch.arange(size).reshape(size // group_size, group_size)
    if uneven:
        return [part.flatten() for part in groups.tensor_split(shards)]
    if batch_size % (shards * group_size):
        raise DataError(
            f"a batch of {batch_size} rows does not divide into {shards} shards"
            + (f" of whole groups of {group_size}" if group_size > 1 else ""),
            fix="choose a multiple, or pass allow_uneven_shards=True",
        )
    chunks = size // batch_size if batch_size else 0
    per_shard = groups.reshape(chunks, shards, batch_size // shards).transpose(0, 1)
    return [rows.flatten() for rows in per_shard]


def plan_columns(
    dynamic_batching_args: DynamicBatchingArgs | None,
    sequence_packing_args: SequencePackingArgs | None,
) -> tuple[str, str]:
    """Keys of the padded tensor and of the lengths that a plan is made from.

    Raises:
        ConfigError: The arguments exclude each other or are wrong.
    """
    if dynamic_batching_args is not None and sequence_packing_args is not None:
        raise ConfigError(
            "dynamic_batching_args and sequence_packing_args exclude each other",
            fix="give one of them",
            key="sequence_packing_args",
        )
    if sequence_packing_args is None:
        args = check_config(
            DynamicBatchingArgs, dynamic_batching_args or {}, what="dynamic_batching_args"
        )
    else:
        args = check_config(
            SequencePackingArgs, sequence_packing_args, what="sequence_packing_args"
        )
    return args.get("input_key", "input_ids"), args.get("input_lengths_key", "input_lengths")


def planned_shards(
    lengths: torch.Tensor,
    shards: int,
    batch_size: int | None,
    *,
    dynamic_batching_args: DynamicBatchingArgs | None,
    sequence_packing_args: SequencePackingArgs | None,
    width: int | None,
    uneven: bool,
    group_size: int,
) -> list[ShardLayout]:
    """Shards with planned microbatches, in step over all shards.

    Raises:
        ConfigError: The arguments are wrong.
        DataError: The counts do not divide, or a row exceeds the bound.
    """
    batch_size = _check_counts(len(lengths), shards, batch_size, uneven)

    def plan(start: int) -> list[list[Microbatch]]:
        part = lengths[start : start + batch_size]
        scope = PlanScope(start, group_size, shards, width)
        if sequence_packing_args is not None:
            return plan_packed(part, sequence_packing_args, scope)
        assert dynamic_batching_args is not None
        return plan_dynamic(part, dynamic_batching_args, scope)

    plans = [plan(start) for start in range(0, len(lengths), max(batch_size, 1))]
    layouts = []
    for shard in range(shards):
        chunks = [chunk[shard] for chunk in plans]
        rows = [part.rows for chunk in chunks for part in chunk]
        ends = [list(accumulate(len(part.rows) for part in chunk)) for chunk in chunks]
        layout = ShardLayout(
            torch.cat(rows) if rows else torch.arange(0),
            [[list(pair) for pair in pairwise([0, *chunk_ends])] for chunk_ends in ends],
            [[part.length for part in chunk] for chunk in chunks],
            [chunk_ends[-1] for chunk_ends in ends],
        )
        layouts.append(layout)
    return layouts


def _check_counts(size: int, shards: int, batch_size: int | None, uneven: bool) -> int:
    as_int("shards", shards, 1)
    if batch_size is None:
        return size
    if uneven:
        raise ConfigError(
            "batch_size and allow_uneven_shards exclude each other",
            fix="leave batch_size out; the shards then cut the whole batch",
            key="batch_size",
        )
    if size % as_int("batch_size", batch_size, 1):
        raise DataError(
            f"{size} rows are not whole batches of {batch_size}",
            fix="use a batch_size that divides the number of rows",
        )
    return batch_size
