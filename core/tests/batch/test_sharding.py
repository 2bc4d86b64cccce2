"""Shards: every row in exactly one, bounds and equal microbatch counts, order restored."""

from __future__ import annotations

import pytest
import torch

from rl_core.batch import BatchedDataDict
from rl_core.errors import ConfigError, DataError, MissingKeyError

WIDTH = 12


def make_batch(lengths: list[int]) -> BatchedDataDict:
    rows = len(lengths)
    return BatchedDataDict(
        {
            "input_ids": torch.arange(rows * WIDTH).reshape(rows, WIDTH),
            "input_lengths": torch.tensor(lengths, dtype=torch.int64),
            "row": list(range(rows)),
        }
    )


def test_uneven_rows_can_be_packed():
    shards, _ = make_batch([1, 2, 3]).shard_by_batch_size(
        2, allow_uneven_shards=True, sequence_packing_args={"max_tokens_per_microbatch": 12}
    )
    assert [len(shard.micro_batch_indices[0]) for shard in shards] == [1, 1]


def test_a_plan_does_not_outlive_a_new_order():
    shards, _ = make_batch([1, 2]).shard_by_batch_size(
        1, sequence_packing_args={"max_tokens_per_microbatch": 12}
    )
    shards[0].reorder_data([1, 0])
    assert shards[0].micro_batch_indices is None


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        ({"shards": 4}, DataError, "6 rows cannot be cut into 4 equal shards"),
        ({"shards": 3, "group_size": 4}, DataError, "not a multiple of the group size 4"),
        (
            {"shards": 1, "batch_size": 4},
            DataError,
            "batch_size 4 does not divide the number of rows 6",
        ),
        (
            {"shards": 1, "batch_size": 6, "allow_uneven_shards": True},
            ConfigError,
            "exclude each other",
        ),
        (
            {
                "shards": 1,
                "dynamic_batching_args": {"max_tokens_per_microbatch": 9},
                "sequence_packing_args": {"max_tokens_per_microbatch": 9},
            },
            ConfigError,
            "exclude each other",
        ),
        (
            {"shards": 4, "dynamic_batching_args": {"max_tokens_per_microbatch": 9}},
            DataError,
            "rows or groups over 4 shards",
        ),
        (
            {"shards": 8, "sequence_packing_args": {"max_tokens_per_microbatch": 9}},
            DataError,
            "8 bins were requested for 6 sequences, which need 3",
        ),
        (
            {
                "shards": 1,
                "batch_size": 2,
                "sequence_packing_args": {"max_tokens_per_microbatch": 5},
            },
            DataError,
            "row 5 takes 6 tokens",
        ),
        (
            {
                "shards": 1,
                "dynamic_batching_args": {"max_tokens_per_microbatch": 9, "input_key": "ids"},
            },
            MissingKeyError,
            "a tensor 'ids'",
        ),
    ],
)
def test_what_cannot_be_sharded_says_why(call, error, message):
    with pytest.raises(error, match=message):
        make_batch([1, 2, 3, 4, 5, 6]).shard_by_batch_size(**call)


@pytest.mark.parametrize("way", ["dynamic_batching_args", "sequence_packing_args"])
def test_a_length_above_the_width_is_named_by_its_row(way):
    with pytest.raises(DataError, match=f"row 3 has the length 13 in a batch of width {WIDTH}"):
        make_batch([1, 2, 3, 13]).shard_by_batch_size(
            1, 2, **{way: {"max_tokens_per_microbatch": 99}}
        )


def test_get_batch_needs_a_size_without_a_plan():
    with pytest.raises(DataError, match="get_batch needs batch_size"):
        make_batch([1, 2]).get_batch(0)


def test_a_plan_for_rows_without_width_names_the_key():
    batch = BatchedDataDict({"input_ids": torch.arange(2), "input_lengths": torch.ones(2).long()})
    with pytest.raises(MissingKeyError, match="'input_ids' of 2 or more dims"):
        batch.shard_by_batch_size(1, sequence_packing_args={"max_tokens_per_microbatch": 4})


@pytest.mark.parametrize("size", [0, 3])
def test_the_number_of_microbatches_is_refused_where_the_iterator_is(size):
    with pytest.raises(DataError, match="does not divide the number of rows"):
        make_batch([1, 2, 3, 4]).get_microbatch_iterator_len(size)
