"""BatchedDataDict: rows, columns and what must not pass silently."""

from __future__ import annotations

import pickle

import pytest
import torch

from rl_core.batch import BatchedDataDict
from rl_core.errors import DataError, LifecycleError
from rl_core.interfaces import GenerationDatumSpec


def make_batch(rows: int = 6, width: int = 4) -> BatchedDataDict[GenerationDatumSpec]:
    return BatchedDataDict[GenerationDatumSpec](
        {
            "input_ids": torch.arange(rows * width).reshape(rows, width),
            "input_lengths": torch.arange(rows) % width + 1,
            "features": torch.arange(rows * width * 2.0).reshape(rows, width, 2),
            "names": [f"row {row}" for row in range(rows)],
            "mixed": [(row, {"nested": [row]}) for row in range(rows)],
        }
    )


def test_a_column_of_none_has_no_say_in_the_size_and_is_carried_along():
    batch = BatchedDataDict({"stop_strings": None, "x": torch.zeros(3)})
    assert batch.size == 3
    assert batch.select_indices([0])["stop_strings"] is None


@pytest.mark.parametrize(
    "operation",
    [
        lambda batch: batch.size,
        lambda batch: batch.slice(0, 1),
        lambda batch: batch.select_indices([0]),
        lambda batch: batch.reorder_data([0, 1]),
        lambda batch: batch.chunk(0, 1),
        lambda batch: batch.repeat_interleave(2),
        lambda batch: batch.shard_by_batch_size(1),
        lambda batch: BatchedDataDict.from_batches([batch]),
    ],
)
def test_unequal_columns_are_named_with_their_sizes(operation):
    batch = BatchedDataDict({"a": torch.zeros(2), "b": [1, 2, 3]})
    with pytest.raises(DataError, match="a: 2, b: 3"):
        operation(batch)


@pytest.mark.parametrize("value", [torch.tensor(1), 3, "text", (1, 2)])
def test_a_value_without_rows_is_named(value):
    with pytest.raises(DataError, match="'bad' holds"):
        _ = BatchedDataDict({"bad": value}).size


def test_select_of_nothing_keeps_the_keys():
    assert list(make_batch().select_indices([])) == list(make_batch())


@pytest.mark.parametrize(("dim", "length"), [(0, 2), (1, -1)])
def test_truncate_refuses_rows_and_negative_lengths(dim, length):
    with pytest.raises(DataError, match="cannot truncate"):
        make_batch().truncate_tensors(dim, length)


def test_a_batch_without_rows_may_lack_keys_and_does_not_decide_dtypes():
    merged = BatchedDataDict.from_batches(
        [{}, {"a": torch.empty(0, 9)}, {"a": torch.tensor([[1]]), "b": ["x"]}]
    )
    assert torch.equal(merged["a"], torch.tensor([[1]]))
    assert merged["b"] == ["x"]


@pytest.mark.parametrize(
    "other",
    [
        [1],
        torch.tensor([[1.0]]),
        torch.tensor([1]),
        torch.tensor([[[1]]]),
        None,
    ],
)
def test_batches_that_do_not_fit_name_the_key(other):
    with pytest.raises(DataError, match="'a'"):
        BatchedDataDict.from_batches([{"a": torch.tensor([[1]])}, {"a": other}])


def test_batches_of_another_kind_than_the_first_name_the_key():
    with pytest.raises(DataError, match="'a' is a list in one batch and a tensor in another"):
        BatchedDataDict.from_batches([{"a": [1]}, {"a": torch.tensor([1])}])


@pytest.mark.parametrize("size", [0, 4])
def test_a_microbatch_size_that_does_not_divide_is_refused_before_iterating(size):
    with pytest.raises(DataError, match=f"microbatch_size {size}"):
        make_batch().make_microbatch_iterator(size)


def test_planned_microbatches_need_a_plan():
    with pytest.raises(LifecycleError, match="no plan"):
        make_batch().make_microbatch_iterator_with_dynamic_shapes()


def test_the_type_argument_does_not_travel():
    class Unreadable(dict): ...

    batch = BatchedDataDict[Unreadable]({"x": [1]})
    assert pickle.loads(pickle.dumps(batch))["x"] == [1]


def test_a_batch_says_what_it_has_and_not_what_is_in_it():
    batch = BatchedDataDict(
        {"ids": torch.zeros(2, 3, dtype=torch.int64), "idx": [0, 1], "no": None}
    )
    assert (
        repr(batch)
        == "BatchedDataDict(rows 2, columns 3: ids: int64[2, 3], idx: list[2], no: None)"
    )
    assert repr(batch.slice(0, 1)).startswith("SlicedDataDict(rows 1, columns 3: ids: int64[1, 3]")
