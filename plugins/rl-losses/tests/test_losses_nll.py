from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rl_core.interfaces import LossInputType, LossType
from rl_losses import NLLLossFn

Call = Callable[..., tuple[torch.Tensor, dict[str, float]]]

# Entry 0 is never scored; the second row has one valid token, the first has three.
LOGPROBS = torch.tensor([[0.0, -1.0, -2.0, -3.0], [0.0, -8.0, -5.0, 0.0]])
TOKEN_MASK = torch.tensor([[1, 1, 1, 1], [0, 1, 0, 0]])


def test_token_level_is_the_mean_over_all_valid_tokens(call: Call) -> None:
    loss, metrics = call(NLLLossFn(), LOGPROBS, token_mask=TOKEN_MASK)
    assert loss.item() == pytest.approx((1 + 2 + 3 + 8) / 4)
    assert metrics == {"nll": pytest.approx(3.5)}


def test_sequence_level_is_the_mean_of_row_means(call: Call) -> None:
    loss_fn = NLLLossFn(loss_type=LossType.SEQUENCE_LEVEL)
    loss, metrics = call(loss_fn, LOGPROBS, token_mask=TOKEN_MASK)
    assert loss.item() == pytest.approx(((1 + 2 + 3) / 3 + 8) / 2)
    assert metrics == {"nll": pytest.approx(3.5)}


def test_position_zero_never_counts(call: Call) -> None:
    spoiled = LOGPROBS.clone()
    spoiled[:, 0] = 100.0
    assert call(NLLLossFn(), spoiled)[0] == call(NLLLossFn(), LOGPROBS)[0]


def test_a_row_out_of_the_sample_mask_does_not_count(call: Call) -> None:
    loss, _ = call(NLLLossFn(), LOGPROBS, sample_mask=torch.tensor([1.0, 0.0]))
    assert loss.item() == pytest.approx(2.0)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32, torch.bfloat16])
def test_masks_may_be_of_any_dtype(call: Call, dtype: torch.dtype) -> None:
    loss, _ = call(NLLLossFn(), LOGPROBS, token_mask=TOKEN_MASK.to(dtype))
    assert loss.item() == pytest.approx(3.5)


def test_a_nan_that_counts_is_not_hidden(call: Call) -> None:
    spoiled = LOGPROBS.clone()
    spoiled[1, 1] = math.nan
    assert call(NLLLossFn(), spoiled, token_mask=TOKEN_MASK)[0].isnan()


def test_the_loss_tells_the_policy_what_it_wants() -> None:
    loss_fn: Any = NLLLossFn()
    assert (loss_fn.loss_type, loss_fn.input_type, loss_fn.group_size) == (
        LossType.TOKEN_LEVEL,
        LossInputType.LOGPROB,
        1,
    )


def test_label_smoothing_is_that_of_the_cross_entropy(call: Call) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 5, 7, dtype=torch.float64, generator=generator, requires_grad=True)
    tokens = torch.randint(7, (2, 5), generator=generator)
    loss, metrics = call(NLLLossFn(label_smoothing=0.1), logits, input_ids=tokens)
    flat = logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
    expected = torch.nn.functional.cross_entropy(*flat, label_smoothing=0.1)
    torch.testing.assert_close(loss, expected)
    assert metrics["nll"] == pytest.approx(torch.nn.functional.cross_entropy(*flat).item())
    torch.testing.assert_close(
        torch.autograd.grad(loss, logits), torch.autograd.grad(expected, logits)
    )
