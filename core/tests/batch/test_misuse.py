"""Numbers that count nothing: each is refused by its name, wherever it is given."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from rl_core.batch import BatchedDataDict, pack
from rl_core.errors import ConfigError, DataError

LENGTHS = torch.tensor([3, 4, 1, 2])
NO_NUMBERS = [True, 1.5, 2.0, math.nan, math.inf, "2", [1]]
DYNAMIC = "dynamic_batching_args"
PACKED = "sequence_packing_args"


def make_batch(width: int = 5, rows: int = 4) -> BatchedDataDict:
    return BatchedDataDict(
        {"input_ids": torch.ones(rows, width).long(), "input_lengths": LENGTHS[:rows].clone()}
    )


def planned() -> BatchedDataDict:
    shards, _ = make_batch().shard_by_batch_size(
        1, sequence_packing_args={"max_tokens_per_microbatch": 16}
    )
    return shards[0]


#: What is called with the number, by the parameter's name, and the least that is right.
PARAMETERS = {
    "pack capacity": (lambda n: pack([1], n), 1),
    "pack seed": (lambda n: pack([1], 8, "first_fit_shuffle", seed=n), 0),
    "pack bin_multiple": (lambda n: pack([1], 8, bin_multiple=n), 1),
    "pack min_bin_count": (lambda n: pack([1], 8, min_bin_count=n), 0),
    "shard shards": (lambda n: make_batch().shard_by_batch_size(n), 1),
    "shard batch_size": (lambda n: make_batch().shard_by_batch_size(2, n), 1),
    "shard group_size": (lambda n: make_batch().shard_by_batch_size(2, group_size=n), 1),
    "slice start": (lambda n: make_batch().slice(n, 2), None),
    "slice end": (lambda n: make_batch().slice(0, n), None),
    "chunk rank": (lambda n: make_batch().chunk(n, 2), None),
    "chunk chunks": (lambda n: make_batch().chunk(0, n), None),
    "repeat num_repeats": (lambda n: make_batch().repeat_interleave(n), None),
    "truncate dim": (lambda n: make_batch().truncate_tensors(n, 2), None),
    "truncate truncated_len": (lambda n: make_batch().truncate_tensors(1, n), None),
    "get_batch batch_idx": (lambda n: make_batch().get_batch(n, 2), None),
    "get_batch batch_size": (lambda n: make_batch().get_batch(0, n), 1),
    "planned get_batch batch_idx": (lambda n: planned().get_batch(n), None),
    "iterator microbatch_size": (lambda n: make_batch().make_microbatch_iterator(n), None),
    "dynamic iterator dim": (
        lambda n: list(planned().make_microbatch_iterator_with_dynamic_shapes(n)),
        None,
    ),
}


@pytest.mark.parametrize("where", PARAMETERS)
def test_what_is_no_whole_number_or_too_small_is_refused_by_name(where):
    call, least = PARAMETERS[where]
    name = where.split()[-1]
    for number in NO_NUMBERS if least is None else [*NO_NUMBERS, least - 1, -7]:
        with pytest.raises(ConfigError, match=f"^{name} must be a whole number, got ") as caught:
            call(number)
        assert caught.value.details["key"] == name
        assert "whole number" in str(caught.value.fix)


@pytest.mark.parametrize("kind", [np.int64, np.uint8, torch.tensor])
def test_whole_numbers_of_other_libraries_count(kind):
    assert pack([1, 1], 8, bin_multiple=kind(2)) == [[0], [1]]
    assert make_batch().slice(kind(1), kind(3)).size == 2
    assert len(make_batch().shard_by_batch_size(kind(2), kind(2))) == 2


@pytest.mark.parametrize("number", [0, -1, None, *NO_NUMBERS])
@pytest.mark.parametrize(
    ("way", "key"),
    [
        (DYNAMIC, "max_tokens_per_microbatch"),
        (DYNAMIC, "sequence_length_round"),
        (PACKED, "max_tokens_per_microbatch"),
        (PACKED, "sequence_length_pad_multiple"),
    ],
)
def test_a_bound_or_a_rounding_that_is_none_is_refused_by_name(way, key, number):
    args = {"max_tokens_per_microbatch": 16, key: number}
    with pytest.raises(ConfigError, match=f"{way}: '{key}' must be") as caught:
        make_batch().shard_by_batch_size(2, **{way: args})
    assert caught.value.details["key"] == key


@pytest.mark.parametrize("way", [DYNAMIC, PACKED])
def test_a_bound_below_the_longest_row_names_row_and_bound(way):
    args = {"max_tokens_per_microbatch": 3}
    with pytest.raises(DataError, match=r"row 1 takes 4 tokens .* max_tokens_per_microbatch is 3"):
        make_batch().shard_by_batch_size(1, **{way: args})


@pytest.mark.parametrize("way", [DYNAMIC, PACKED])
@pytest.mark.parametrize(
    "args", [16, "16", [16], {}, {"max_tokens_per_microbatch": 16, "input_key": [1]}]
)
def test_arguments_that_are_no_options_are_refused_before_they_are_read(way, args):
    with pytest.raises(ConfigError, match=way):
        make_batch().shard_by_batch_size(2, **{way: args})


def test_a_seed_below_zero_is_refused_by_name():
    args = {"max_tokens_per_microbatch": 16, "algorithm": "first_fit_shuffle", "seed": -1}
    with pytest.raises(ConfigError, match="'seed' must be >= 0"):
        make_batch().shard_by_batch_size(1, sequence_packing_args=args)


@pytest.mark.parametrize("pad", [True, 1.5, math.nan, math.inf, None, "0", [0], 2**70])
@pytest.mark.parametrize("width", [5, 7])
def test_a_pad_value_of_another_dtype_is_refused_by_its_key(pad, width):
    batches = [make_batch(5), make_batch(width)]
    with pytest.raises(DataError, match=r"'input_ids' is torch\.int64, which cannot be padded"):
        BatchedDataDict.from_batches(batches, {"input_ids": pad})


@pytest.mark.parametrize(
    ("dtype", "pad"),
    [(torch.uint8, 256), (torch.uint8, -1), (torch.float16, -1e9), (torch.bool, 2)],
)
def test_a_pad_value_beyond_the_dtype_is_refused(dtype, pad):
    batches = [{"x": torch.zeros(1, width, dtype=dtype)} for width in (1, 2)]
    with pytest.raises(DataError, match="cannot be padded with"):
        BatchedDataDict.from_batches(batches, {"x": pad})


def test_batches_may_come_from_a_generator_without_being_lost():
    merged = BatchedDataDict.from_batches(make_batch(rows=rows) for rows in (1, 2))
    assert merged.size == 3


@pytest.mark.parametrize("batches", [None, 3, [3], ["x"], [None], [[1]], {"x": [1]}])
def test_what_is_no_batches_is_refused(batches):
    with pytest.raises(DataError, match=r"takes a list of batches|a batch is a"):
        BatchedDataDict.from_batches(batches)


@pytest.mark.parametrize("pads", [0, True, [1], "x"])
def test_pad_values_without_keys_are_refused(pads):
    with pytest.raises(DataError, match="pad_value_dict as a mapping"):
        BatchedDataDict.from_batches([make_batch()], pads)


@pytest.mark.parametrize("rows", [None, "2", [None], ["2"], [[1], [1, 2]], 0.5, math.nan])
def test_rows_that_are_no_integers_are_refused(rows):
    with pytest.raises(DataError, match="row indices must be integers"):
        make_batch().select_indices(rows)
