"""The batch that a policy trains on, from what an engine made."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch

from rl_core import BatchedDataDict, DataError
from rl_core.batch.provenance import Provenance
from rl_losses import training_batch


def output(**extra: Any) -> BatchedDataDict[Any]:
    """A prompt of 2 tokens with 2 more, and one of 1 with 1; three padded positions."""
    return BatchedDataDict(
        {
            "output_ids": torch.tensor([[5, 6, 7, 8], [9, 4, 0, 0]]),
            "generation_lengths": torch.tensor([2, 1]),
            "unpadded_sequence_lengths": torch.tensor([4, 2]),
            "logprobs": torch.tensor([[0, 0, -1.0, -2.0], [0, -3.0, 0, 0]]),
            "truncated": torch.tensor([True, False]),
            "weights_version": torch.tensor([3, 3]),
            **extra,
        }
    )


def test_generated_tokens_alone_count():
    made = output(answer=["a", "b"])
    batch = training_batch(made, [1.0, 0.0])
    assert batch["token_mask"].tolist() == [[0, 0, 1, 1], [0, 1, 0, 0]]
    assert batch["sample_mask"].tolist() == [1, 1]
    assert batch["input_ids"] is made["output_ids"]
    assert batch["input_lengths"].tolist() == [4, 2]
    assert batch["generation_logprobs"] is made["logprobs"]
    assert batch["weights_version"].tolist() == [3, 3]
    assert batch["answer"] == ["a", "b"]
    assert "advantages" not in batch
    assert "output_ids" not in batch


@pytest.mark.parametrize(
    "rewards", [[1, 0], torch.tensor([1, 0]), np.array([1.0, 0.0]), (True, False)]
)
def test_rewards_may_be_whatever_holds_numbers(rewards):
    batch = training_batch(output(), rewards, advantages=lambda r: r - r.mean())
    assert batch["rewards"].tolist() == [1, 0]
    assert batch["advantages"].tolist() == [0.5, -0.5]
    assert batch["advantages"].dtype == torch.float32


def test_advantages_may_be_given_for_rows_or_tokens():
    assert training_batch(output(), advantages=[1, 2])["advantages"].tolist() == [1, 2]
    assert training_batch(output(), advantages=torch.ones(2, 4))["advantages"].shape == (2, 4)


def test_truncated_rows_can_be_masked_whatever_their_reward():
    batch = training_batch(output(), [float("nan"), 1.0], mask_truncated=True)
    assert batch["sample_mask"].tolist() == [0, 1]


@pytest.mark.parametrize("key", ["rewards", "advantages"])
@pytest.mark.parametrize("given", [[1.0], [[1.0], [0.0]], 1.0, ["a", "b"], [None, 1.0]])
def test_what_is_not_one_number_for_each_row_is_refused(key, given):
    with pytest.raises(DataError, match=key):
        training_batch(output(), **{key: given})


def test_a_number_that_is_none_is_named_with_its_row():
    with pytest.raises(DataError, match="row 1") as refused:
        training_batch(output(), [0.0, float("inf")])
    assert refused.value.details["row"] == 1


@pytest.mark.parametrize("given", [{}, {"input_ids": torch.ones(2, 2)}])
def test_what_no_engine_returned_is_refused(given):
    with pytest.raises(DataError, match="generate"):
        training_batch(BatchedDataDict(given), [1.0, 0.0])


def test_advantages_of_no_rewards_and_keys_that_clash_are_refused():
    with pytest.raises(DataError, match="cannot compute advantages without rewards"):
        training_batch(output(), advantages=lambda rewards: rewards)
    with pytest.raises(DataError, match="rewards"):
        training_batch(output(rewards=torch.ones(2)), [1.0, 0.0])


def test_provenance_follows_the_rows_and_stays_in_the_process():
    made = output()
    made.provenance = Provenance("temperature 0.7")
    batch = training_batch(made, [1.0, 0.0])
    assert batch.select_indices([1]).slice(0, 1).provenance == Provenance("temperature 0.7")
    assert pickle.loads(pickle.dumps(batch)).provenance is None
    later = training_batch(made, [1.0, 0.0])
    assert BatchedDataDict.from_batches([later, batch]).provenance == batch.provenance
    later.provenance = Provenance("temperature 1")
    assert BatchedDataDict.from_batches([later, batch]).provenance == Provenance(None)
    later.provenance = None
    assert BatchedDataDict.from_batches([later, batch]).provenance is None
