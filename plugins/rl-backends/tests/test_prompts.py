"""Which batches become prompts, and which row is named where one does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_backends import Completion, ModelFacts, PromptBatch, SamplingParams
from rl_backends.generation.prompts import assemble_output, assemble_row
from rl_core.batch import BatchedDataDict
from rl_core.errors import DataError

PAD = 300  # above what a byte holds
FACTS = ModelFacts(PAD, (1,), 200, 8)
IDS = torch.tensor([[5, 6, PAD], [7, PAD, PAD]])
LENGTHS = torch.tensor([2, 1])
MASK = torch.tensor([[1, 1, 0], [1, 0, 0]])


def prompts(sampling: SamplingParams | None = None, **columns: Any) -> PromptBatch:
    return PromptBatch.from_data(BatchedDataDict(columns), sampling or SamplingParams(), FACTS)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_smaller_integers_are_taken(dtype):
    ids = torch.tensor([[5, 6, 0], [7, 0, 0]], dtype=dtype)
    assert prompts(input_ids=ids, input_lengths=LENGTHS).input_ids.dtype == torch.int64


@pytest.mark.parametrize("ids", [IDS.float(), IDS > 5, IDS[0], IDS.tolist()])
def test_ids_that_are_no_matrix_of_integers_are_refused(ids):
    with pytest.raises(DataError, match="input_ids"):
        prompts(input_ids=ids, input_lengths=LENGTHS)


@pytest.mark.parametrize(
    "lengths", [LENGTHS.float(), LENGTHS[:, None], LENGTHS[:1], [2, 1], torch.tensor(2)]
)
@pytest.mark.parametrize("mask", [None, MASK])
def test_lengths_of_another_shape_or_kind_are_refused(lengths, mask):
    with pytest.raises(DataError, match="input_lengths"):
        prompts(input_ids=IDS, input_lengths=lengths, attention_mask=mask)


@pytest.mark.parametrize("mask", [MASK[:1], MASK.tolist()])
def test_a_mask_of_another_shape_or_kind_is_refused(mask):
    with pytest.raises(DataError, match="attention_mask"):
        prompts(input_ids=IDS, attention_mask=mask)


def test_a_batch_without_lengths_is_refused():
    with pytest.raises(DataError, match="neither"):
        prompts(input_ids=IDS)


@pytest.mark.parametrize("seed", [torch.tensor([1]), torch.tensor([1.5, 2.5]), [1, 2], 3])
def test_seeds_of_another_shape_or_kind_are_refused(seed):
    with pytest.raises(DataError, match="seed"):
        prompts(input_ids=IDS, input_lengths=LENGTHS, seed=seed)


def test_seeds_of_the_rows_win_over_the_configs():
    made = prompts(
        SamplingParams(seed=3),
        input_ids=IDS,
        input_lengths=LENGTHS,
        seed=torch.tensor([8, -1], dtype=torch.int32),
    )
    assert made.seeds.tolist() == [8, 2**63 - 1]
    assert made.seeds.dtype == torch.int64


@pytest.mark.parametrize("stops", [["a"], "ab", ["ab", None], [[""], None], [[3], None], [5, None]])
def test_stop_strings_of_another_kind_are_refused(stops):
    with pytest.raises(DataError, match="stop_strings"):
        prompts(input_ids=IDS, input_lengths=LENGTHS, stop_strings=stops)


def test_sampling_reads_the_config_and_off_is_zero():
    for off in (None, -1, 0):
        assert SamplingParams.from_config({"top_k": off}, FACTS).top_k == 0
    read = SamplingParams.from_config(
        {"stop_token_ids": [4, 1], "eos_token_id": [9], "do_sample": False}, FACTS
    )
    assert read.stop_token_ids == (4, 1, 9)
    assert read.greedy
    assert SamplingParams.from_config({}, FACTS).stop_token_ids == (1,)


@given(
    rows=st.lists(
        st.tuples(st.integers(1, 3), st.lists(st.integers(0, 199), max_size=5), st.booleans()),
        min_size=1,
        max_size=4,
    ),
    at=st.integers(0, 3),
)
def test_a_row_is_laid_out_as_a_batch_of_its_own(rows, at):
    row = at % len(rows)
    lengths = torch.tensor([length for length, *_ in rows])
    ids = torch.where(torch.arange(3) < lengths[:, None], torch.arange(3) + lengths[:, None], PAD)
    data = BatchedDataDict(
        {
            "input_ids": ids,
            "input_lengths": lengths,
            "idx": [*range(len(rows))],
            "score": torch.rand(len(rows), 2),
            "output_ids": ids,
            "nothing": None,
        }
    )
    made = PromptBatch.from_data(data, SamplingParams(), FACTS)
    _, tokens, truncated = rows[row]
    done = Completion(row, tokens, [-0.5] * len(tokens), truncated)
    expected = assemble_output(
        data.slice(row, row + 1),
        made.select(torch.tensor([row])),
        [Completion(0, done.token_ids, done.logprobs, truncated)],
        pad_token_id=PAD,
        weights=(3, 5),
    )
    found = assemble_row(data, made, done, weights=(3, 5))
    assert list(found) == list(expected)
    for key, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(found[key], value), key
            assert found[key].dtype == value.dtype
        else:
            assert found[key] == value
