"""Mutants of the batch that crosses every interface."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch

from mutants.mutant import breaks
from rl_conformance.checks import b04_shards as checks
from rl_core.batch import BatchedDataDict, verify_right_padding


def _replaced(name: str, value: Any) -> AbstractContextManager[Any]:
    return mock.patch.object(BatchedDataDict, name, value)


@breaks("B1")
def the_first_column_counts() -> AbstractContextManager[Any]:
    """Columns of unequal length pass; the batch is as long as the first."""
    return _replaced("size", property(lambda self: len(next(iter(self.data.values()), ()))))


@breaks("B2")
def padding_is_always_zero() -> AbstractContextManager[Any]:
    """from_batches does not look at the pad values."""
    honest = BatchedDataDict.from_batches.__func__  # type: ignore[attr-defined]

    def merge(cls: Any, batches: Any, pad_value_dict: Any = None) -> Any:
        del pad_value_dict
        return honest(cls, batches)

    return _replaced("from_batches", classmethod(merge))


@breaks("B3", "B4")
def reordering_is_inverted() -> AbstractContextManager[Any]:
    """Place i gets row idx[i] instead of the other way round."""
    honest = BatchedDataDict.reorder_data

    def reorder(self: Any, rows: Any) -> None:
        honest(self, torch.as_tensor(rows).argsort().tolist())

    return _replaced("reorder_data", reorder)


@breaks("B4")
def global_batches_are_not_dealt() -> AbstractContextManager[Any]:
    """batch_size is not looked at: each shard is one run of rows."""
    honest = BatchedDataDict.shard_by_batch_size

    def shard(self: Any, shards: int, batch_size: Any = None, *args: Any, **kwargs: Any) -> Any:
        del batch_size
        return honest(self, shards, None, *args, **kwargs)

    return _replaced("shard_by_batch_size", shard)


@breaks("B5")
def the_last_microbatch_is_dropped() -> AbstractContextManager[Any]:
    """As a loader with drop_last would."""
    honest = BatchedDataDict.make_microbatch_iterator

    def iterate(self: Any, size: int) -> Iterator[Any]:
        return iter(list(honest(self, size))[:-1])

    return _replaced("make_microbatch_iterator", iterate)


@breaks("B6")
def plans_do_not_travel() -> AbstractContextManager[Any]:
    """Planned microbatches are lost with pickling."""
    honest = BatchedDataDict.__getstate__

    def state(self: Any) -> dict[str, Any]:
        return {**honest(self), "micro_batch_indices": None}

    return _replaced("__getstate__", state)


@breaks("B7")
def any_pad_value_will_do() -> AbstractContextManager[Any]:
    """Padding is looked for with 0 whatever was asked."""

    def verify(data: Any, pad_value: int = 0, raise_error: bool = True) -> Any:
        del pad_value
        return verify_right_padding(data, raise_error=raise_error)

    return mock.patch.object(checks, "verify_right_padding", verify)
