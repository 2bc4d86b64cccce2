"""Mutants of the batch that crosses every interface."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from rl_conformance.checks import data as checks
from rl_conformance.mutants.mutant import breaks
from rl_core.batch import BatchedDataDict, verify_right_padding

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def _replaced(name: str, value: Any) -> Iterator[None]:
    with mock.patch.object(BatchedDataDict, name, value):
        yield


@breaks("B1")
@contextmanager
def the_first_column_counts() -> Iterator[None]:
    """Columns of unequal length pass; the batch is as long as the first."""
    with _replaced("size", property(lambda self: len(next(iter(self.data.values()), ())))):
        yield


@breaks("B2")
@contextmanager
def padding_is_always_zero() -> Iterator[None]:
    """from_batches does not look at the pad values."""
    honest = BatchedDataDict.from_batches.__func__  # type: ignore[attr-defined]

    def merge(cls: Any, batches: Any, pad_value_dict: Any = None) -> Any:
        del pad_value_dict
        return honest(cls, batches)

    with _replaced("from_batches", classmethod(merge)):
        yield


@breaks("B3", "B4")
@contextmanager
def reordering_is_inverted() -> Iterator[None]:
    """Place i gets row idx[i] instead of the other way round."""
    honest = BatchedDataDict.reorder_data

    def reorder(self: Any, rows: Any) -> None:
        honest(self, torch.as_tensor(rows).argsort().tolist())

    with _replaced("reorder_data", reorder):
        yield


@breaks("B4")
@contextmanager
def global_batches_are_not_dealt() -> Iterator[None]:
    """batch_size is not looked at: each shard is one run of rows."""
    honest = BatchedDataDict.shard_by_batch_size

    def shard(self: Any, shards: int, batch_size: Any = None, *args: Any, **kwargs: Any) -> Any:
        del batch_size
        return honest(self, shards, None, *args, **kwargs)

    with _replaced("shard_by_batch_size", shard):
        yield


@breaks("B5")
@contextmanager
def the_last_microbatch_is_dropped() -> Iterator[None]:
    """As a loader with drop_last would."""
    honest = BatchedDataDict.make_microbatch_iterator

    def iterate(self: Any, size: int) -> Iterator[Any]:
        return iter(list(honest(self, size))[:-1])

    with _replaced("make_microbatch_iterator", iterate):
        yield


@breaks("B6")
@contextmanager
def plans_do_not_travel() -> Iterator[None]:
    """Planned microbatches are lost with pickling."""
    honest = BatchedDataDict.__getstate__

    def state(self: Any) -> dict[str, Any]:
        return {**honest(self), "micro_batch_indices": None}

    with _replaced("__getstate__", state):
        yield


@breaks("B7")
@contextmanager
def any_pad_value_will_do() -> Iterator[None]:
    """Padding is looked for with 0 whatever was asked."""

    def verify(data: Any, pad_value: int = 0, raise_error: bool = True) -> Any:
        del pad_value
        return verify_right_padding(data, raise_error=raise_error)

    with mock.patch.object(checks, "verify_right_padding", verify):
        yield
