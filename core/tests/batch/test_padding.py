"""The check for right-padded rows: what it finds, and what it cannot be asked."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_core.batch import BatchedDataDict, verify_right_padding
from rl_core.errors import ConfigError

IDS = torch.tensor([[5, 0, 6, 0], [7, 0, 0, 0], [8, 8, 8, 8]])


@pytest.mark.parametrize(
    "data",
    [
        {"input_ids": IDS, "input_lengths": torch.tensor([3, 1, 4])},
        {"output_ids": IDS, "unpadded_sequence_lengths": torch.tensor([4, 2, 4])},
    ],
)
def test_right_padded_rows_pass(data):
    assert verify_right_padding(BatchedDataDict(data)) == (True, None)


def test_the_first_bad_row_is_named_with_its_positions():
    data = {"input_ids": IDS, "input_lengths": torch.tensor([3, 1, 1])}
    with pytest.raises(ValueError, match=r"row 2: .*length 1, at positions 1, 2, 3") as caught:
        verify_right_padding(data)
    assert caught.value.details["row"] == 2


def test_a_problem_is_returned_when_asked_for():
    data = {"input_ids": IDS, "input_lengths": torch.tensor([0, 1, 4])}
    ok, message = verify_right_padding(data, raise_error=False)
    assert not ok
    assert "row 0" in message
    assert "positions 0, 2" in message


def test_lengths_may_be_a_list():
    assert verify_right_padding({"input_ids": IDS, "input_lengths": [3, 1, 4]}) == (True, None)
    ok, message = verify_right_padding(
        {"input_ids": IDS, "input_lengths": [3, 1, 2]}, raise_error=False
    )
    assert not ok
    assert "row 2" in message


@pytest.mark.parametrize("pad_value", [None, math.nan, 0.5, True, "0"])
def test_a_pad_value_that_is_no_token_is_the_callers_mistake(pad_value):
    data = {"input_ids": IDS, "input_lengths": torch.tensor([3, 1, 4])}
    with pytest.raises(ConfigError, match="pad_value must be a whole number") as caught:
        verify_right_padding(data, pad_value=pad_value, raise_error=False)
    assert caught.value.details["key"] == "pad_value"


def test_another_pad_value_is_honoured():
    data = {"input_ids": IDS, "input_lengths": torch.tensor([4, 4, 4])}
    assert verify_right_padding(data, pad_value=9) == (True, None)
    data["input_lengths"][1] = 1
    assert verify_right_padding(data, pad_value=9, raise_error=False)[0] is False


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "neither input_ids nor output_ids"),
        ({"input_ids": IDS}, "the batch has no input_lengths"),
        ({"input_ids": IDS, "input_lengths": [3, 1]}, "one length for each of 3 rows"),
        ({"input_ids": IDS, "input_lengths": [3, 1, 3.5]}, "values that are not integers"),
        ({"input_ids": IDS, "input_lengths": [3, 1, 2**70]}, "values that are not integers"),
        ({"input_ids": IDS, "input_lengths": torch.full((3,), math.nan)}, "not integers"),
        ({"input_ids": IDS, "input_lengths": torch.ones(3) > 0}, "not integers"),
        ({"input_ids": IDS, "input_lengths": torch.ones(3) * 1j}, "not integers"),
        (
            {"input_ids": IDS[0], "input_lengths": torch.ones(4)},
            "input_ids is not a tensor of shape",
        ),
        ({"input_ids": IDS, "input_lengths": torch.tensor([1, 5, 1])}, "row 1: length 5"),
        ({"input_ids": IDS, "input_lengths": torch.tensor([4, 4, -1])}, "row 2: length -1"),
    ],
)
def test_malformed_data_is_reported(data, message):
    ok, found = verify_right_padding(data, raise_error=False)
    assert not ok
    assert message in found


@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=5),
    spoiled=st.tuples(st.integers(0, 4), st.integers(0, 5)),
)
def test_a_token_past_the_length_is_found_wherever_it_stands(lengths, spoiled):
    row, position = spoiled[0] % len(lengths), spoiled[1]
    ids = torch.zeros(len(lengths), 6, dtype=torch.int64)
    ids[row, position] = 1
    ok, _ = verify_right_padding(
        {"input_ids": ids, "input_lengths": torch.tensor(lengths)}, raise_error=False
    )
    assert ok == (position < lengths[row])


def test_what_is_no_batch_is_refused():
    with pytest.raises(ConfigError, match="data is a Tensor, not a batch"):
        verify_right_padding(IDS, raise_error=False)
