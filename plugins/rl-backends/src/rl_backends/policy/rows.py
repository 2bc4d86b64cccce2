"""Batches on their way into a policy: checked, masked, and cut into microbatches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from rl_backends.inputs import as_batch, check_limits, input_lengths
from rl_backends.policy.microbatches import plan_microbatches
from rl_core.batch import BatchedDataDict
from rl_core.batch.microbatches import check_groups
from rl_core.errors import ConfigError, DataError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "Microbatching",
    "RowLimits",
    "check_k",
    "counting_rows",
    "cut",
    "rows_per_step",
    "scoring_rows",
    "training_rows",
]

#: What generation calls the keys that scoring needs.
GENERATED = {"input_ids": "output_ids", "input_lengths": "unpadded_sequence_lengths"}

#: Rows of a microbatch, and tokens of one that is bounded by them, unless configured.
DEFAULT_ROWS = 8
DEFAULT_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class RowLimits:
    """What the model can read.

    Attributes:
        vocab_size: Token ids are below it.
        context: Most tokens of a row; None if the model names no limit.
    """

    vocab_size: int
    context: int | None


def scoring_rows(data: BatchedDataDict[Any], limits: RowLimits) -> BatchedDataDict[Any]:
    """Checks rows that are to be scored.

    Args:
        data: ``input_ids`` with ``input_lengths`` (or ``attention_mask``), or what a generation
            returned: ``output_ids`` with ``unpadded_sequence_lengths``.
        limits: The model's.

    Returns:
        ``input_ids`` ``[B, S]`` int64 and ``input_lengths`` ``[B]`` int64, on the CPU.

    Raises:
        DataError: Names the row and what is wrong with it.
    """
    data = as_batch(data, needed_by="the policy")
    if "input_ids" not in data and all(key in data for key in GENERATED.values()):
        data = BatchedDataDict({key: data[source] for key, source in GENERATED.items()})
    lengths = input_lengths(data)
    ids = data["input_ids"].to(torch.int64)
    check_limits(ids, lengths, vocab_size=limits.vocab_size, context=limits.context)
    return BatchedDataDict({"input_ids": ids, "input_lengths": lengths})


def training_rows(data: BatchedDataDict[Any], limits: RowLimits) -> BatchedDataDict[Any]:
    """Checks rows that are to be learned from and completes their masks.

    Args:
        data: See :class:`~rl_core.interfaces.TrainingDatumSpec`, as
            :class:`~rl_backends.policy.loop_checks.LoopChecks` lets it pass. A missing
            ``token_mask`` or ``sample_mask`` is all ones.
        limits: The model's.

    Returns:
        A new batch of the same columns, ``token_mask`` zero at position 0 and on padding.

    Raises:
        DataError: Names the row or key and what is wrong with it.
    """
    rows = BatchedDataDict[Any](dict(data)) | scoring_rows(data, limits)
    ids, lengths = rows["input_ids"], rows["input_lengths"]
    positions = torch.arange(ids.shape[1])
    scored = (positions > 0) & (positions < lengths[:, None])
    tokens = _mask(data, "token_mask", ids.shape)
    rows["token_mask"] = torch.where(scored, tokens, torch.zeros((), dtype=tokens.dtype))
    rows["sample_mask"] = _mask(data, "sample_mask", ids.shape[:1])
    _ = rows.size
    return rows


def _mask(data: BatchedDataDict[Any], key: str, shape: torch.Size) -> torch.Tensor:
    mask = data.get(key)
    if mask is None:
        return torch.ones(shape)
    if not isinstance(mask, torch.Tensor) or mask.shape != shape:
        found = list(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise DataError(
            f"{key} must be a tensor of shape {list(shape)}, not {found}",
            fix=f"give one value for each of {list(shape)}, or leave {key} out for all ones",
            key=key,
        )
    mask = mask.float() if mask.dtype == torch.bool else mask
    if mask.is_floating_point() and not mask.isfinite().all():
        raise DataError(f"{key} has values that are not finite", fix="use 0 and 1", key=key)
    return mask


def check_k(k: int, limits: RowLimits) -> None:
    """Raises a DataError unless there are k largest logits."""
    if not 1 <= k <= limits.vocab_size:
        raise DataError(
            f"k is {k}, but the vocabulary has {limits.vocab_size} tokens",
            fix=f"use 1 <= k <= {limits.vocab_size}",
            key="k",
        )


def counting_rows(sample_mask: torch.Tensor, group_size: int) -> torch.Tensor:
    """``[b]`` int64 indices of the whole groups in which some row counts.

    Args:
        sample_mask: ``[B]``.
        group_size: So many neighbouring rows belong together.

    Raises:
        ConfigError: The group size is below 1.
        DataError: The rows are not whole groups.
    """
    check_groups(len(sample_mask), group_size)
    counts = (sample_mask != 0).view(-1, group_size).any(1)
    return counts.repeat_interleave(group_size).nonzero()[:, 0]


def cut(rows: BatchedDataDict[Any], index: torch.Tensor) -> BatchedDataDict[Any]:
    """Some rows, their ``[B, S, ...]`` columns narrowed to the longest of them."""
    width = rows["input_ids"].shape[1]
    chosen = rows.select_indices(index)
    longest = int(chosen["input_lengths"].max())
    for key, value in chosen.items():
        if isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[1] == width:
            chosen[key] = value[:, :longest]
    return chosen


def rows_per_step(rows: int, gbs: int | None, workers: int) -> int:
    """Rows that one worker brings to each global batch.

    Args:
        rows: Rows the worker has.
        gbs: Rows of a global batch over all workers; None is all rows there are.
        workers: Number of data-parallel workers.

    Raises:
        DataError: There are no rows, or the numbers do not divide.
    """
    if rows == 0:
        raise DataError("there are no rows to train on", fix="pass at least one row")
    if gbs is None:
        return rows
    local, left = divmod(gbs, workers)
    if gbs < 1 or left:
        raise DataError(
            f"gbs {gbs} is not a positive multiple of the number of data-parallel workers, "
            f"{workers}",
            fix=f"set gbs to a multiple of {workers}",
            key="gbs",
        )
    if rows % local:
        each = f" per worker ({workers} workers)" if workers > 1 else ""
        raise DataError(
            f"the number of rows, {rows}, is not a multiple of the global batch size {local}{each}",
            fix="drop or repeat rows, set another gbs, or fill up with rows of sample_mask 0",
            key="gbs",
        )
    return local


class Microbatching:
    """Which rows go through the model together, by the configuration.

    With packing, tokens bound a microbatch if their number is configured or that of rows is not. A
    bound that is not configured lets every row pass.

    Args:
        config: A checked :class:`~rl_core.interfaces.PolicyConfig`.

    Raises:
        ConfigError: Dynamic batching and sequence packing are both enabled.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._dynamic = _enabled(config.get("dynamic_batching"))
        self._packing = _enabled(config.get("sequence_packing"))
        if self._dynamic and self._packing:
            raise ConfigError(
                "dynamic_batching and sequence_packing are both enabled",
                fix="enable one of them; packing wastes less",
                key="sequence_packing",
            )
        rows = config.get("train_micro_batch_size")
        self._rows = {"train": rows, "logprob": config.get("logprob_batch_size") or rows}

    @property
    def packed(self) -> bool:
        """Whether the rows of a microbatch are laid end to end."""
        return self._packing is not None

    def plan(
        self,
        lengths: torch.Tensor,
        kind: Literal["train", "logprob"],
        *,
        width: int,
        size: int | None = None,
        group_size: int = 1,
    ) -> list[torch.Tensor]:
        """Row indices of each microbatch.

        Args:
            lengths: ``[B]`` int64.
            width: Padded width of the batch.
            kind: Which of the configured sizes applies.
            size: Rows per microbatch, which then overrides the configuration.
            group_size: So many neighbouring rows stay together.

        Raises:
            DataError: A row (or group) does not fit, or the rows are not whole groups.
        """
        if not len(lengths):
            return []
        batching = self._packing or self._dynamic or {}
        bound = batching.get(f"{kind}_mb_tokens", batching.get("train_mb_tokens"))
        if size is None and bound is None and not self._dynamic:
            size = self._rows[kind] or (None if self._packing else DEFAULT_ROWS)
        if size is not None:
            return plan_microbatches(lengths, micro_batch_size=size, group_size=group_size)
        rounding = "sequence_length_round" if self._dynamic else "sequence_length_pad_multiple"
        multiple = batching.get(rounding, 64 if self._dynamic else 1)
        if bound is None:
            longest = -(-int(lengths.max()) // multiple) * multiple
            bound = max(DEFAULT_TOKENS, longest * group_size)
        args: Any = {"max_tokens_per_microbatch": bound, rounding: multiple}
        if self._dynamic:
            return plan_microbatches(
                lengths, dynamic_batching_args=args, width=width, group_size=group_size
            )
        if "algorithm" in batching:
            args["algorithm"] = batching["algorithm"]
        return plan_microbatches(lengths, sequence_packing_args=args, group_size=group_size)


def _enabled(batching: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    return batching if batching and batching.get("enabled") else None
