from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import tensor

from rl_core.errors import DataError
from rl_core.interfaces import LossType
from rl_losses import DPOLossFn

Call = Callable[..., tuple[torch.Tensor, dict[str, float]]]

# Row sums of policy minus reference: chosen 2 over two tokens, rejected -1 over one token.
POLICY = tensor([[0.0, -1.0, -2.0], [0.0, -4.0, -9.0]], dtype=torch.float64)
REFERENCE = tensor([[0.0, -2.0, -3.0], [0.0, -3.0, -9.0]], dtype=torch.float64)
TOKEN_MASK = tensor([[0, 1, 1], [0, 1, 0]])


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x))


@pytest.mark.parametrize(("average", "nll"), [(False, 3.0), (True, 1.5)])
def test_the_sft_term_is_the_chosen_answers_likelihood(
    call: Call, average: bool, nll: float
) -> None:
    loss_fn = DPOLossFn(
        beta=0.5, preference_loss_weight=2.0, sft_loss_weight=0.1, sft_average_log_probs=average
    )
    loss, metrics = call(
        loss_fn, POLICY, token_mask=TOKEN_MASK, reference_policy_logprobs=REFERENCE
    )
    assert loss.item() == pytest.approx(-2 * log_sigmoid(1.5) + 0.1 * nll)
    assert metrics["sft_loss"] == pytest.approx(nll)


def test_an_odd_number_of_rows_is_refused(call: Call) -> None:
    inputs = torch.zeros(3, 2)
    with pytest.raises(DataError, match="number of rows is 3"):
        call(DPOLossFn(), inputs, reference_policy_logprobs=inputs)


def test_a_pair_of_which_one_row_is_masked_is_refused_by_row(call: Call) -> None:
    inputs = torch.zeros(4, 2)
    with pytest.raises(DataError, match="rows 2 and 3 are a pair") as caught:
        call(
            DPOLossFn(),
            inputs,
            sample_mask=tensor([1, 1, 0, 1]),
            reference_policy_logprobs=inputs,
        )
    assert caught.value.details["row"] == 2


def test_pairs_stay_together_and_rows_are_counted() -> None:
    loss_fn = DPOLossFn()
    assert loss_fn.group_size == 2
    assert loss_fn.loss_type is LossType.SEQUENCE_LEVEL


def test_a_reference_that_was_rolled_is_refused_by_row(call: Call) -> None:
    reference = torch.tensor([[0.0, -1, -2, -3]]).repeat(2, 1)
    call(DPOLossFn(), reference - 0.1, reference_policy_logprobs=reference)
    with pytest.raises(DataError, match=r"row 0, position 0.*shifted by one") as refused:
        call(DPOLossFn(), reference - 0.1, reference_policy_logprobs=reference.roll(-1, 1))
    assert refused.value.details["row"] == 0
