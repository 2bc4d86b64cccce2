"""The check for right-padded rows: what it finds, and what it cannot be asked."""

from __future__ import annotations

import math

import pytest
import torch

from rl_core.batch import verify_right_padding
from rl_core.errors import ConfigError

IDS = torch.tensor([[5, 0, 6, 0], [7, 0, 0, 0], [8, 8, 8, 8]])


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


def test_what_is_no_batch_is_refused():
    with pytest.raises(ConfigError, match="data is a Tensor, not a batch"):
        verify_right_padding(IDS, raise_error=False)
