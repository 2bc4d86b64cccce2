"""Plans of the microbatches of one batch: a fixed number of rows, or bounded by tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rl_core.batch.microbatches import PlanScope, planner, row_lengths
from rl_core.config import as_int
from rl_core.errors import ConfigError

if TYPE_CHECKING:
    from rl_core.batch.microbatches import DynamicBatchingArgs, SequencePackingArgs

__all__ = ["plan_microbatches"]


def plan_microbatches(
    lengths: torch.Tensor,
    *,
    micro_batch_size: int | None = None,
    dynamic_batching_args: DynamicBatchingArgs | None = None,
    sequence_packing_args: SequencePackingArgs | None = None,
    width: int | None = None,
    group_size: int = 1,
) -> list[torch.Tensor]:
    """Cuts one local batch into microbatches. Every row is in exactly one.

    Args:
        lengths: ``[B]`` integer tokens of each row; a row takes at least one.
        micro_batch_size: Rows per microbatch, in order; the last may hold fewer. Rounded down to
            whole groups, but never below one.
        dynamic_batching_args: Instead of a fixed size.
        sequence_packing_args: Instead of a fixed size.
        width: Padded width of the batch: no row is longer, and dynamic batching rounds up no
            further.
        group_size: So many neighbouring rows stay in one microbatch (2 for preference pairs).

    Returns:
        ``[b]`` int64 row indices for each microbatch.

    Raises:
        ConfigError: Not exactly one of the three ways is given, or its arguments, the group size
            or the width are wrong.
        DataError: A row or group is longer than a microbatch, a row is longer than ``width``, or B
            is no multiple of the group.
    """
    given = (micro_batch_size, dynamic_batching_args, sequence_packing_args)
    if sum(way is not None for way in given) != 1:
        raise ConfigError(
            "the microbatch plan needs one of micro_batch_size, dynamic_batching_args and "
            "sequence_packing_args",
            fix="give exactly one of them",
            key="micro_batch_size",
        )
    scope = PlanScope(
        group_size=as_int("group_size", group_size, 1),
        width=None if width is None else as_int("width", width, 0),
    )
    if micro_batch_size is None:
        plan, options = planner(dynamic_batching_args, sequence_packing_args)
        return [part.rows for part in plan(lengths, options, scope)[0]]
    micro_batch_size = as_int("micro_batch_size", micro_batch_size, 1)
    rows = torch.arange(row_lengths(lengths, scope).size)
    step = max(1, micro_batch_size // scope.group_size) * scope.group_size
    return [rows[start : start + step] for start in range(0, len(rows), step)]
