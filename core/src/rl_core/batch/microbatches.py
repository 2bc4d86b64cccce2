"""The one place that decides which rows share a microbatch.

Dynamic batching (rows of similar length share a padded microbatch) and sequence packing (rows share
a packed sequence), for several shards in step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, NotRequired, TypeAlias, TypedDict

import numpy as np
import torch

from rl_core.batch.packing import bin_loads, pack
from rl_core.config import Range, as_int, check_config
from rl_core.errors import ConfigError, DataError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "DynamicBatchingArgs",
    "Microbatch",
    "PlanScope",
    "SequencePackingArgs",
    "check_groups",
    "plan_dynamic",
    "plan_packed",
    "plan_shards",
    "planner",
    "row_lengths",
]


class DynamicBatchingArgs(TypedDict):
    """Microbatches of as many rows as fit, each narrowed to its longest row.

    Attributes:
        max_tokens_per_microbatch: Bound on rows times width of a microbatch.
        sequence_length_round: Widths are rounded up to a multiple of this. Default 1.
        input_key: Key of the tensor with the padded width as dim 1. Default ``"input_ids"``.
        input_lengths_key: Key of the ``[B]`` lengths. Default ``"input_lengths"``.
    """

    max_tokens_per_microbatch: Annotated[int, Range(ge=1)]
    sequence_length_round: NotRequired[Annotated[int, Range(ge=1)]]
    input_key: NotRequired[str]
    input_lengths_key: NotRequired[str]


class SequencePackingArgs(TypedDict):
    """Microbatches of rows that are laid end to end.

    Attributes:
        max_tokens_per_microbatch: Hard bound on the sum of padded lengths in a microbatch.
        sequence_length_pad_multiple: Each length is padded to a multiple of this. Default 1.
        input_key: Key of the padded tensor. Default ``"input_ids"``.
        input_lengths_key: Key of the ``[B]`` lengths. Default ``"input_lengths"``.
        algorithm: See :data:`rl_core.batch.packing.ALGORITHMS`. Default
            ``"modified_first_fit_decreasing"``.
        seed: Of ``"first_fit_shuffle"``. Default 0.
        microbatch_order: There is only one, from the fullest microbatch to the emptiest.
    """

    max_tokens_per_microbatch: Annotated[int, Range(ge=1)]
    sequence_length_pad_multiple: NotRequired[Annotated[int, Range(ge=1)]]
    input_key: NotRequired[str]
    input_lengths_key: NotRequired[str]
    algorithm: NotRequired[str]
    seed: NotRequired[Annotated[int, Range(ge=0)]]
    microbatch_order: NotRequired[Literal["largest_first"]]


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Rows (``[b]`` int64) that go through the model together, and their width or packed tokens."""

    rows: torch.Tensor
    length: int


@dataclass(frozen=True, slots=True)
class PlanScope:
    """Which rows a plan is for, and for whom.

    Attributes:
        first_row: Index of the first of the rows; the plan and its errors count from there.
        group_size: So many neighbouring rows stay in one microbatch.
        shards: Number of shards that work in step.
        width: Padded width of the batch, where known: no row is longer, and rounding up stops
            there.
    """

    first_row: int = 0
    group_size: int = 1
    shards: int = 1
    width: int | None = None


#: From ``[B]`` lengths, checked arguments and a scope to the microbatches of each shard.
Planner: TypeAlias = "Callable[[torch.Tensor, dict[str, Any], PlanScope], list[list[Microbatch]]]"


def planner(
    dynamic_batching_args: DynamicBatchingArgs | None,
    sequence_packing_args: SequencePackingArgs | None,
) -> tuple[Planner, dict[str, Any]]:
    """What plans microbatches that tokens bound, and its arguments, checked."""
    if dynamic_batching_args is not None and sequence_packing_args is not None:
        raise ConfigError(
            "dynamic_batching_args and sequence_packing_args exclude each other",
            fix="give one of them",
            key="sequence_packing_args",
        )
    if sequence_packing_args is not None:
        packing: Any = sequence_packing_args
        return plan_packed, check_config(SequencePackingArgs, packing, what="sequence_packing_args")
    given: Any = dynamic_batching_args
    return plan_dynamic, check_config(DynamicBatchingArgs, given, what="dynamic_batching_args")


def plan_shards(
    size: int, shards: int, batch_size: int, *, uneven: bool = False, group_size: int = 1
) -> list[torch.Tensor]:
    """Rows of each shard when every global batch is cut into equal runs.

    Raises:
        DataError: The counts do not divide.
    """
    check_groups(batch_size, group_size)
    groups = torch.arange(size).reshape(size // group_size, group_size)
    if uneven:
        return [part.flatten() for part in groups.tensor_split(shards)]
    if batch_size % (shards * group_size):
        raise DataError(
            f"{batch_size} rows cannot be cut into {shards} equal shards"
            + (f" of complete groups of {group_size}" if group_size > 1 else ""),
            fix=f"use a multiple of {shards * group_size}, or allow_uneven_shards, no batch_size",
        )
    chunks = size // batch_size if batch_size else 0
    per_shard = groups.reshape(chunks, shards, batch_size // shards).transpose(0, 1)
    return [rows.flatten() for rows in per_shard]


def plan_dynamic(
    lengths: torch.Tensor, options: dict[str, Any], scope: PlanScope
) -> list[list[Microbatch]]:
    """Dynamic batching of rows dealt to shards that work in step.

    Groups are sorted by length and dealt in turn, so position i holds rows of about one length in
    every shard, and microbatch j has the same number of rows and the same width in every shard.

    Returns:
        For each shard its microbatches, shortest first.

    Raises:
        DataError: A row (or group) alone exceeds the bound, or the counts do not divide.
    """
    bound = options["max_tokens_per_microbatch"]
    groups = row_lengths(lengths, scope).max(axis=1)
    shards = scope.shards
    if len(groups) % shards:
        raise DataError(
            f"dynamic batching cannot split {len(groups)} rows or groups over {shards} shards",
            fix=f"use a multiple of {shards}, or sequence_packing_args, which need none",
        )
    widths = _round_up(groups, options.get("sequence_length_round", 1))
    if scope.width is not None:
        widths = np.minimum(widths, max(scope.width, 1))
    _check_fits(widths * scope.group_size, bound, scope)
    order = np.argsort(widths, kind="stable").reshape(-1, shards)
    tops: list[int] = widths[order].max(axis=1).tolist() if len(order) else []
    plans: list[list[Microbatch]] = [[] for _ in range(shards)]
    start = 0
    for stop in range(1, len(tops) + 1):
        if stop < len(tops) and (stop + 1 - start) * scope.group_size * tops[stop] <= bound:
            continue  # the next row fits, too
        for shard in range(shards):
            rows = _expand(order[start:stop, shard], scope)
            plans[shard].append(Microbatch(rows, tops[stop - 1]))
        start = stop
    return plans


def plan_packed(
    lengths: torch.Tensor, options: dict[str, Any], scope: PlanScope
) -> list[list[Microbatch]]:
    """Sequence packing with the same number of bins in every shard.

    Returns:
        For each shard its bins, by falling load.

    Raises:
        ConfigError: There is no such algorithm.
        DataError: A row (or group) alone exceeds the bound, or there are fewer rows than shards.
    """
    bound = options["max_tokens_per_microbatch"]
    multiple = options.get("sequence_length_pad_multiple", 1)
    groups = _round_up(row_lengths(lengths, scope), multiple).sum(axis=1)
    _check_fits(groups, bound, scope)
    algorithm = options.get("algorithm", "modified_first_fit_decreasing")
    bins = pack(groups, bound, algorithm, seed=options.get("seed", 0), bin_multiple=scope.shards)
    if not bins:
        return [[] for _ in range(scope.shards)]
    loads = bin_loads(groups, bins)
    order = np.argsort(-loads, kind="stable")  # so that shards in step work on bins alike
    return [
        [
            Microbatch(_expand(np.array(bins[i], dtype=np.int64), scope), int(loads[i]))
            for i in order[shard :: scope.shards].tolist()
        ]
        for shard in range(scope.shards)
    ]


def check_groups(rows: int, group_size: int) -> None:
    """Raises DataError unless the rows are whole groups, ConfigError for a size below 1."""
    if rows % as_int("group_size", group_size, 1):
        raise DataError(
            f"the number of rows, {rows}, is not a multiple of the group size {group_size}",
            fix=f"give complete groups: {group_size} rows each, next to each other",
        )


def row_lengths(lengths: torch.Tensor, scope: PlanScope) -> np.ndarray[Any, Any]:
    """``[groups, group_size]`` int64 lengths, at least 1."""
    given: Any = lengths
    if not isinstance(given, torch.Tensor):
        raise DataError(
            f"lengths are a {type(given).__name__}, not a tensor",
            fix="give a tensor of integers of shape [rows]",
            key="lengths",
        )
    no_integers = lengths.dtype == torch.bool or lengths.is_floating_point() or lengths.is_complex()
    if lengths.dim() != 1 or no_integers:
        raise DataError(
            f"lengths are {lengths.dtype} of shape {list(lengths.shape)}",
            fix="give integers of shape [rows]",
            key="lengths",
        )
    flat = lengths.detach().cpu().to(torch.int64).numpy()
    check_groups(len(flat), scope.group_size)
    wrong = np.flatnonzero((flat < 0) | (flat > (np.inf if scope.width is None else scope.width)))
    if len(wrong):
        row = scope.first_row + int(wrong[0])
        raise DataError(
            f"row {row} has the length {int(flat[wrong[0]])}"
            + ("" if scope.width is None else f" in a batch of width {scope.width}"),
            fix="give each row's number of tokens, without padding",
            row=row,
        )
    groups: np.ndarray[Any, Any] = np.maximum(flat, 1).reshape(-1, scope.group_size)
    return groups


def _round_up(lengths: np.ndarray[Any, Any], multiple: int) -> np.ndarray[Any, Any]:
    rounded: np.ndarray[Any, Any] = -(-lengths // multiple) * multiple
    return rounded


def _check_fits(tokens: np.ndarray[Any, Any], bound: int, scope: PlanScope) -> None:
    over = np.flatnonzero(tokens > bound)
    if len(over):
        row = scope.first_row + int(over[0]) * scope.group_size
        what = f"row {row}" if scope.group_size == 1 else f"the group that starts with row {row}"
        raise DataError(
            f"{what} takes {int(tokens[over[0]])} tokens after rounding, but "
            f"max_tokens_per_microbatch is {bound}",
            fix="raise max_tokens_per_microbatch or shorten the row",
            row=row,
            key="max_tokens_per_microbatch",
        )


def _expand(groups: np.ndarray[Any, Any], scope: PlanScope) -> torch.Tensor:
    rows = groups[:, None] * scope.group_size + np.arange(scope.group_size)
    return torch.from_numpy(rows.reshape(-1) + scope.first_row)
