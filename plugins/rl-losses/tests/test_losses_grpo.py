from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import tensor

from rl_core.errors import DataError, LoopWarning
from rl_losses import GRPOLossFn, kl_penalty

Call = Callable[..., tuple[torch.Tensor, dict[str, float]]]


def rows_with_ratios(ratios: list[list[float]], **data: Any) -> dict[str, Any]:
    """Rows whose scored tokens have these ratios; the previous policy gave each 0.1."""
    ratio = tensor(ratios, dtype=torch.float64)
    prev = torch.full_like(ratio, 0.1).log()
    pad = torch.nn.functional.pad
    return {"inputs": pad(prev + ratio.log(), (1, 0)), "prev_logprobs": pad(prev, (1, 0)), **data}


def no_kl(**options: Any) -> GRPOLossFn:
    return GRPOLossFn(reference_policy_kl_penalty=0.0, **options)


# -- the clip ----------------------------------------------------------------------------------


def test_a_ratio_that_would_overflow_keeps_value_and_gradient_finite(call: Call) -> None:
    inputs = tensor([[0.0, -1.0, -1.0]], requires_grad=True)
    previous = tensor([[0.0, -1000.0, 0.0]])
    loss, metrics = call(no_kl(), inputs, prev_logprobs=previous, advantages=tensor([1.0]))
    (gradient,) = torch.autograd.grad(loss, inputs)
    assert metrics["probs_ratio_max"] == pytest.approx(math.exp(20))
    assert gradient.isfinite().all()


# -- levels ------------------------------------------------------------------------------------


def test_advantages_per_token_and_per_row(call: Call) -> None:
    rows = rows_with_ratios([[1.0, 1.0]])
    per_token, _ = call(no_kl(), advantages=tensor([[9.0, 1.0, 3.0]]), **rows)
    per_row, _ = call(no_kl(), advantages=tensor([2.0]), **rows)
    assert per_token.item() == pytest.approx(-2.0)
    assert per_row.item() == pytest.approx(-2.0)


# -- the correction for an engine that disagrees -----------------------------------------------


def test_without_the_correction_generation_logprobs_only_feed_metrics(call: Call) -> None:
    rows = rows_with_ratios([[1.1, 0.9]], advantages=tensor([1.0]))
    generated = rows["prev_logprobs"] + tensor([[0.0, 0.5, -0.25]])
    without, _ = call(no_kl(), **rows)
    loss, metrics = call(no_kl(), generation_logprobs=generated, **rows)
    assert loss.item() == without.item()
    assert metrics["token_mult_prob_error"] == pytest.approx((math.exp(0.5) + math.exp(0.25)) / 2)
    assert metrics["token_mult_prob_error_max"] == pytest.approx(math.exp(0.5))
    # With d = prev - generation, exp(d) - 1 - d.
    kl = (math.exp(-0.5) - 1 + 0.5 + math.exp(0.25) - 1 - 0.25) / 2
    assert metrics["gen_kl_error"] == pytest.approx(kl)


# -- the penalty -------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_an_unbiased_estimator_has_the_kl_as_its_mean(estimator: Any) -> None:
    policy, reference = torch.randn(2, 50, generator=torch.Generator().manual_seed(0)).double()
    policy, reference = policy.log_softmax(-1), reference.log_softmax(-1)
    expected = (policy.exp() * (policy - reference)).sum()
    mean = (policy.exp() * kl_penalty(policy, reference, estimator)).sum()
    assert mean.item() == pytest.approx(expected.item())


def test_k2_has_the_gradient_of_the_kl_on_samples_of_the_policy() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, reference = torch.randn(2, 20, generator=generator, dtype=torch.float64)
    reference = reference.log_softmax(-1)
    logits.requires_grad_()
    policy = logits.log_softmax(-1)
    kl = (policy.exp() * (policy - reference)).sum()
    expected_k2 = (policy.detach().exp() * kl_penalty(policy, reference, "k2")).sum()
    torch.testing.assert_close(
        torch.autograd.grad(expected_k2, logits, retain_graph=True),
        torch.autograd.grad(kl, logits),
    )


def test_k3_keeps_value_and_gradient_finite_where_it_would_overflow() -> None:
    policy = tensor([-1000.0], requires_grad=True)
    penalty = kl_penalty(policy, tensor([0.0]))
    (gradient,) = torch.autograd.grad(penalty.sum(), policy)
    assert penalty.item() == pytest.approx(math.exp(20) - 21)
    assert gradient.isfinite().all()


def test_a_reference_without_a_penalty_only_feeds_the_metric(call: Call) -> None:
    rows = rows_with_ratios([[1.1]], advantages=tensor([1.0]))
    without, _ = call(no_kl(), **rows)
    loss, metrics = call(no_kl(), reference_policy_logprobs=rows["inputs"] - 1.0, **rows)
    assert loss.item() == without.item()
    assert metrics["kl"] == pytest.approx(math.exp(-1.0))


@pytest.mark.parametrize("weight", ["sampling", "generation"])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_gradient_is_that_of_nemo_rl(call: Call, estimator: Any, weight: Any) -> None:
    def their_kl(logprobs: torch.Tensor) -> torch.Tensor:
        weights = (logprobs - (logprobs.detach() if weight == "sampling" else generated)).exp()
        difference = reference - logprobs
        clamped = difference.clamp(-1.0, 1.0)
        weights = torch.where(difference == clamped, weights, weights.detach())
        k3 = clamped.exp() - 1 - clamped
        kl = {"k1": -clamped, "k2": clamped.square() / 2, "k3": k3}[estimator]
        return (weights * kl).clamp(-0.4, 0.4).mean()

    reference = tensor([-1.2, -1.9, -4.0, -0.5, -1.0], dtype=torch.float64)
    inputs = tensor([-1.0, -1.0, -2.0, -2.0, -1.5], dtype=torch.float64, requires_grad=True)
    generated = inputs.detach() + tensor([0.1, -0.1, 0.2, 0.0, 0.3])
    loss_fn = GRPOLossFn(
        reference_policy_kl_penalty=0.5,
        kl_estimator=estimator,
        kl_gradient=weight,
        kl_input_clamp=1.0,
        kl_output_clamp=0.4,
    )
    pad = torch.nn.functional.pad
    loss, _ = call(
        loss_fn,
        pad(inputs, (1, 0))[None],
        prev_logprobs=pad(inputs.detach(), (1, 0))[None],
        generation_logprobs=pad(generated, (1, 0))[None],
        reference_policy_logprobs=pad(reference, (1, 0))[None],
        advantages=tensor([0.0]),
    )
    expected = 0.5 * their_kl(inputs)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(
        torch.autograd.grad(loss, inputs), torch.autograd.grad(expected, inputs)
    )


# -- other surrogates, masks and terms ---------------------------------------------------------


@pytest.mark.parametrize(
    ("advantage", "ratios", "expected"),
    [
        (2.0, [1.1, 0.5], [math.log(1.1), math.log(0.5)]),
        (2.0, [2.0, 1.0], [0.4, 0.0]),  # a gain is clipped
        (-2.0, [2.0, 0.1], [math.log(2.0), -0.4]),
    ],
)
def test_gmpo_is_the_geometric_mean_of_clipped_ratios(
    call: Call, advantage: float, ratios: list[float], expected: list[float]
) -> None:
    loss_fn = no_kl(surrogate="gmpo", ratio_clip_min=0.4, ratio_clip_max=0.4)
    rows = rows_with_ratios([ratios], advantages=tensor([advantage]))
    inputs = rows.pop("inputs").requires_grad_()
    loss, metrics = call(loss_fn, inputs, **rows)
    assert loss.item() == pytest.approx(-advantage * math.exp(sum(expected) / 2))
    clipped = [abs(math.log(r) - e) > 1e-9 for r, e in zip(ratios, expected, strict=True)]
    assert metrics["clip_fraction"] == sum(clipped) / 2
    (gradient,) = torch.autograd.grad(loss, inputs)
    share = [0.0 if stopped else loss.item() / 2 for stopped in clipped]
    assert gradient[0, 1:].tolist() == pytest.approx(share)


def test_the_likelihood_of_rewarded_rows_is_added(call: Call) -> None:
    rows = rows_with_ratios([[1.0, 1.0], [1.0, 1.0]], advantages=tensor([0.0, 0.0]))
    loss, metrics = call(no_kl(positive_nll_weight=0.1), rewards=tensor([1.0, 0.0]), **rows)
    assert metrics["positive_nll"] == pytest.approx(-math.log(0.1) / 2)
    assert loss.item() == pytest.approx(0.1 * metrics["positive_nll"])


# -- metrics -----------------------------------------------------------------------------------


def test_metrics_of_the_ratio(call: Call) -> None:
    rows = rows_with_ratios([[0.5, 1.5, 1.0]], advantages=tensor([1.0]))
    _, metrics = call(no_kl(), **rows)
    assert metrics == {
        "probs_ratio": pytest.approx(1.0),
        "probs_ratio_min": pytest.approx(0.5),
        "probs_ratio_max": pytest.approx(1.5),
        "clip_fraction": pytest.approx(1 / 3),
        "approx_entropy": pytest.approx(-math.log(0.1**3 * 0.75) / 3),
    }


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("generation_logprobs", math.nan),
        ("prev_logprobs", -math.inf),
        ("reference_policy_logprobs", -math.inf),
    ],
)
def test_a_token_without_a_probability_is_named(call: Call, key: str, value: float) -> None:
    scores = torch.tensor([[0.0, -1, -2], [0, -1, -2]])
    rows: dict[str, Any] = {
        name: scores.clone() for name in ("generation_logprobs", "prev_logprobs")
    }
    rows |= {"reference_policy_logprobs": scores.clone(), "advantages": torch.ones(2)}
    rows[key][1, 2] = value
    loss_fn = GRPOLossFn(importance_sampling_cap=2.0)
    with pytest.raises(DataError, match=f"'{key}' is {value} at row 1, position 2"):
        call(loss_fn, scores, **rows)
    call(loss_fn, scores, token_mask=torch.tensor([[1, 1, 1], [1, 1, 0]]), **rows)


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_a_token_that_the_engine_cannot_have_sampled_is_left_out(
    call: Call, ratio: str, cap: float | None
) -> None:
    scores = torch.tensor([[0.0, -1, -2], [0, -1, -2]])
    rows: dict[str, Any] = {"prev_logprobs": scores - 0.1, "advantages": torch.tensor([1.0, -2.0])}
    rows["generation_logprobs"] = scores - tensor([[0, 0.2, 0.3], [0, 0.1, math.inf]])
    loss_fn = no_kl(importance_sampling_cap=cap, importance_ratio=ratio)
    inputs = scores.clone().requires_grad_()
    with pytest.warns(LoopWarning, match="left out of the loss"):
        loss, metrics = call(loss_fn, inputs, **rows)
    (gradient,) = torch.autograd.grad(loss, inputs)
    masked = {"token_mask": torch.tensor([[1, 1, 1], [1, 1, 0]])}
    expected, others = call(loss_fn, inputs, **rows, **masked)
    assert loss.item() * 4 == pytest.approx(expected.item() * 3)
    assert gradient[1, 2] == 0
    assert metrics["impossible_fraction"] == 0.25
    assert others["impossible_fraction"] == 0
    assert all(math.isfinite(value) for value in metrics.values())


def test_rolled_logprobs_are_refused_by_row(call: Call) -> None:
    scores = torch.tensor([[0.0, -1, -2, 0], [0, -1, -2, -3]])
    mask = torch.tensor([[0, 1, 1, 0], [0, 0, 1, 1]])
    rows: dict[str, Any] = {"advantages": torch.ones(2), "token_mask": mask}
    call(no_kl(), scores, prev_logprobs=scores, **rows)
    with pytest.raises(DataError, match=r"row 0, position 0.*shifted by one"):
        call(no_kl(), scores, prev_logprobs=scores.roll(-1, 1), **rows)
