"""Mutants of batches and of what compares a pair, in less usual places."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import torch

from mutants.mutant import breaks
from rl_conformance.diagnostics.agreement import Agreement, LogprobConsistency
from rl_core.batch import (
    BatchedDataDict,
    _columns,
    data_dict,
    microbatches,
    packing,
    padding,
)

if TYPE_CHECKING:
    from contextlib import AbstractContextManager


#: What needs no models.
_MEASURED = "A1 and (exponentials or infinity or each_mode)"


@breaks("B3", checks="B3")
def neighbours_are_taken_as_a_view() -> AbstractContextManager[Any]:
    """Where the chosen rows are a run, nothing is copied."""
    honest = _columns.take_rows

    def take(value: Any, rows: torch.Tensor) -> Any:
        start = int(rows[0]) if len(rows) else 0
        run = torch.equal(rows, torch.arange(start, start + len(rows)))
        view = isinstance(value, torch.Tensor) and run
        return value[start : start + len(rows)] if view else honest(value, rows)

    return mock.patch.object(data_dict, "take_rows", take)


@breaks("B3", checks="B3")
def repeated_items_are_one() -> AbstractContextManager[Any]:
    """The items of a list are repeated as they are."""
    return mock.patch.object(data_dict, "deepcopy", lambda item: item)


@breaks("B3", checks="B3")
def negative_rows_count_from_the_end() -> AbstractContextManager[Any]:
    """As in Python's own lists."""
    honest = _columns.index_of

    def index_of(indices: Any, size: int) -> torch.Tensor:
        rows = torch.as_tensor(indices)
        return honest(rows % size if rows.dtype != torch.bool and rows.numel() else rows, size)

    return mock.patch.multiple("rl_core.batch.data_dict", index_of=index_of)


@breaks("B3", checks="B3")
def a_mask_is_taken_for_numbers() -> AbstractContextManager[Any]:
    """True and False are rows 1 and 0."""
    honest = _columns.index_of
    return mock.patch.object(
        data_dict, "index_of", lambda rows, size: honest(torch.as_tensor(rows).long(), size)
    )


@breaks("B2", checks="B2")
def three_dimensions_are_padded_with_zero() -> AbstractContextManager[Any]:
    """The pad value is for matrices."""
    honest = _columns.concatenate

    def concatenate(key: str, parts: Any, pad_value: float) -> Any:
        deep = isinstance(parts[0], torch.Tensor) and parts[0].dim() > 2
        return honest(key, parts, 0 if deep else pad_value)

    return mock.patch.object(data_dict, "concatenate", concatenate)


@breaks("B4", checks="B4")
def uneven_shards_are_dealt_by_turns() -> AbstractContextManager[Any]:
    """Only where shards differ in size do neighbours part."""
    honest = microbatches.plan_shards

    def plan(
        size: int, shards: int, batch_size: int, *, uneven: bool = False, group_size: int = 1
    ) -> Any:
        if uneven and size % shards:
            return [torch.arange(n, size, shards) for n in range(shards)]
        return honest(size, shards, batch_size, uneven=uneven, group_size=group_size)

    return mock.patch.object(data_dict, "plan_shards", plan)


@breaks("B4", checks="B4")
def a_bin_may_hold_one_token_more() -> AbstractContextManager[Any]:
    """The bound is compared with less than or equal, one too late."""
    honest = packing.pack

    def pack(lengths: Any, capacity: int, *args: Any, **kwargs: Any) -> Any:
        return honest(lengths, capacity + 1, *args, **kwargs)

    return mock.patch.object(microbatches, "pack", pack)


@breaks("B4", checks="B4")
def packing_forgets_the_multiple() -> AbstractContextManager[Any]:
    """Bins are filled by lengths that are not rounded where they are long."""
    honest = microbatches._round_up

    def round_up(lengths: Any, multiple: int) -> Any:
        rounded = honest(lengths, multiple)
        return np.where(lengths > 3 * multiple, lengths, rounded)

    return mock.patch.object(microbatches, "_round_up", round_up)


@breaks("B4", checks="B4")
def shuffling_uses_numpys_own_generator() -> AbstractContextManager[Any]:
    """The order is reproducible, and what the user seeded is at another place afterwards."""
    honest = packing.ALGORITHMS["first_fit_shuffle"]

    def shuffle(*args: Any) -> Any:
        np.random.rand()
        return honest(*args)

    return mock.patch.dict(packing.ALGORITHMS, first_fit_shuffle=shuffle)


@breaks("B4", "B5", checks="B4 or B5")
def planning_sorts_the_batch_itself() -> AbstractContextManager[Any]:
    """Dynamic batching leaves the rows in the order that it likes."""
    honest = BatchedDataDict.shard_by_batch_size

    def shard(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = honest(self, *args, **kwargs)
        if kwargs.get("dynamic_batching_args") is not None:
            self["number"] = self["number"].flip(0).flip(0) * 1
            self["things"].sort(key=str)
        return found

    return mock.patch.object(BatchedDataDict, "shard_by_batch_size", shard)


@breaks("B5", checks="B5")
def every_global_batch_has_the_first_plan() -> AbstractContextManager[Any]:
    """get_batch gives the right rows, and the microbatches of batch 0."""
    honest = BatchedDataDict.get_batch

    def get_batch(self: Any, batch_idx: int, batch_size: int | None = None) -> Any:
        found = honest(self, batch_idx, batch_size)
        if self.micro_batch_indices is not None:
            found.micro_batch_indices = [self.micro_batch_indices[0]]
        return found

    return mock.patch.object(BatchedDataDict, "get_batch", get_batch)


@breaks("B6", checks="B6 and not ray")
def a_slice_travels_with_its_whole() -> AbstractContextManager[Any]:
    """All of a view's storage is pickled along."""
    return mock.patch.object(data_dict, "own_memory", lambda value: value)


@breaks("B7", checks="B7")
def the_last_position_is_not_looked_at() -> AbstractContextManager[Any]:
    """A token in the last place of a row passes for padding."""
    honest = padding._problem

    def problem(data: Any, pad_value: int) -> Any:
        message, row = honest(data, pad_value)
        ids = data.get("input_ids", data.get("output_ids"))
        if message is not None and f"positions {ids.shape[1] - 1}" in message:
            return None, None
        return message, row

    return mock.patch.object(padding, "_problem", problem)


def _between(error: Any) -> AbstractContextManager[Any]:
    """Agreement with an error of another making."""
    honest = Agreement.between.__func__  # type: ignore[attr-defined]

    def between(cls: Any, one: torch.Tensor, other: torch.Tensor, counted: torch.Tensor) -> Any:
        found = honest(cls, one, other, counted)
        object.__setattr__(found, "error", float(error(found, one, other, counted)))
        return found

    return mock.patch.object(Agreement, "between", classmethod(between))


@breaks("A1", checks=_MEASURED)
def the_exponential_of_the_mean() -> AbstractContextManager[Any]:
    """The mean is taken too early, which hides what is rare and large."""
    return _between(lambda found, *_: np.exp(found.mean))


@breaks("A1", checks=_MEASURED)
def rows_count_alike() -> AbstractContextManager[Any]:
    """The mean over rows of the mean over their tokens."""
    return _between(lambda found, *_: np.mean(found.row_errors))


@breaks("A1", checks=_MEASURED)
def errors_of_either_sign_cancel() -> AbstractContextManager[Any]:
    """The difference is not taken absolutely."""
    return _between(lambda _, one, other, counted: (one - other)[counted].double().exp().mean())


@breaks("A1", checks=_MEASURED)
def the_largest_counts() -> AbstractContextManager[Any]:
    """The worst token is taken for the mean."""
    return _between(lambda found, *_: np.exp(found.max))


@breaks("A1", checks=_MEASURED)
def greedy_speaks_for_both() -> AbstractContextManager[Any]:
    """What was sampled is generated, and not looked at."""
    return mock.patch.object(LogprobConsistency, "error", property(lambda self: self.greedy.error))


@breaks("A1", checks=_MEASURED)
def what_is_no_number_is_not_above() -> AbstractContextManager[Any]:
    """The error is compared the other way round."""
    return mock.patch.object(
        LogprobConsistency, "passed", property(lambda self: not self.error >= self.threshold)
    )
