from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import tensor

from rl_core.errors import DataError, LoopWarning
from rl_core.interfaces import LossType
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


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (1.0, 2.0, -2.0),
        (1.1, 2.0, -2.2),
        (1.5, 2.0, -2.56),  # a gain is clipped at 1.28
        (0.5, 2.0, -1.0),  # a loss of probability is not: it may be undone
        (0.5, -2.0, 1.6),  # a gain is clipped at 0.8
        (1.5, -2.0, 3.0),  # a loss is not
        (9.0, -2.0, 18.0),
    ],
)
def test_one_token_is_clipped_on_the_side_it_gains_on(
    call: Call, ratio: float, advantage: float, expected: float
) -> None:
    loss_fn = no_kl(ratio_clip_min=0.2, ratio_clip_max=0.28)
    loss, _ = call(loss_fn, **rows_with_ratios([[ratio]], advantages=tensor([advantage])))
    assert loss.item() == pytest.approx(expected)


def test_dual_clip_bounds_the_cost_of_a_bad_token(call: Call) -> None:
    rows = rows_with_ratios([[9.0], [2.0], [9.0]], advantages=tensor([-2.0, -2.0, 2.0]))
    loss, metrics = call(no_kl(ratio_clip_c=3.0), **rows)
    assert loss.item() == pytest.approx((3.0 * 2 + 2.0 * 2 - 1.2 * 2) / 3)
    assert metrics["clip_fraction"] == pytest.approx(2 / 3)


def test_a_clipped_token_has_no_gradient(call: Call) -> None:
    rows = rows_with_ratios([[1.5, 1.0]], advantages=tensor([1.0]))
    inputs = rows.pop("inputs").requires_grad_()
    (gradient,) = torch.autograd.grad(call(no_kl(), inputs, **rows)[0], inputs)
    assert gradient.tolist() == [[0.0, 0.0, pytest.approx(-0.5)]]


def test_an_infinite_upper_clip_is_off(call: Call) -> None:
    rows = rows_with_ratios([[7.0]], advantages=tensor([1.0]))
    loss, metrics = call(no_kl(ratio_clip_max=math.inf), **rows)
    assert loss.item() == pytest.approx(-7.0)
    assert metrics["clip_fraction"] == 0.0


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


@pytest.mark.parametrize(
    ("loss_type", "expected"),
    [(LossType.TOKEN_LEVEL, -(3 * 1 + 1 * 5) / 4), (LossType.SEQUENCE_LEVEL, -(1 + 5) / 2)],
)
def test_tokens_or_rows_weigh_the_same(call: Call, loss_type: LossType, expected: float) -> None:
    rows = rows_with_ratios([[1.0] * 3, [1.0] * 3], advantages=tensor([1.0, 5.0]))
    mask = tensor([[1, 1, 1, 1], [0, 1, 0, 0]])
    loss, _ = call(no_kl(loss_type=loss_type), token_mask=mask, **rows)
    assert loss.item() == pytest.approx(expected)


def test_the_sequence_ratio_is_the_geometric_mean_of_its_tokens(call: Call) -> None:
    rows = rows_with_ratios([[1.05, 0.9, 7.0]], advantages=tensor([1.0]))
    mask = tensor([[0, 1, 1, 0]])
    loss, metrics = call(no_kl(importance_ratio="sequence"), token_mask=mask, **rows)
    assert loss.item() == pytest.approx(-math.sqrt(1.05 * 0.9))
    assert metrics["probs_ratio_min"] == metrics["probs_ratio_max"]


def test_the_sequence_ratio_spreads_its_gradient_over_the_tokens(call: Call) -> None:
    rows = rows_with_ratios([[1.1, 1 / 1.1]], advantages=tensor([1.0]))
    inputs = rows.pop("inputs").requires_grad_()
    loss, _ = call(no_kl(importance_ratio="sequence"), inputs, **rows)
    (gradient,) = torch.autograd.grad(loss, inputs)
    assert gradient[0].tolist() == pytest.approx([0.0, -0.5, -0.5])


# -- on policy ---------------------------------------------------------------------------------


def test_on_policy_is_the_plain_policy_gradient_and_needs_no_previous(call: Call) -> None:
    inputs = tensor([[0.0, -0.3, -2.0]], requires_grad=True)
    loss, metrics = call(no_kl(on_policy=True), inputs, advantages=tensor([3.0]))
    (gradient,) = torch.autograd.grad(loss, inputs)
    assert loss.item() == pytest.approx(-3.0)
    assert metrics["probs_ratio"] == 1.0
    assert gradient.tolist() == [[0.0, -1.5, -1.5]]


# -- the correction for an engine that disagrees -----------------------------------------------


def test_importance_weights_are_prev_over_generation_up_to_the_cap(call: Call) -> None:
    rows = rows_with_ratios([[1.0, 1.0]], advantages=tensor([1.0]))
    generated = rows["prev_logprobs"] - tensor([[0.0, math.log(0.5), math.log(9.0)]])
    loss, metrics = call(no_kl(importance_sampling_cap=2.0), generation_logprobs=generated, **rows)
    assert loss.item() == pytest.approx(-(0.5 + 2.0) / 2)
    assert metrics["importance_weight"] == pytest.approx(1.25)
    assert metrics["importance_capped_fraction"] == 0.5


def test_with_sequence_ratios_the_weight_is_the_product_over_the_row(call: Call) -> None:
    rows = rows_with_ratios([[1.0, 1.0]], advantages=tensor([1.0]))
    generated = rows["prev_logprobs"] - tensor([[0.0, math.log(0.5), math.log(3.0)]])
    loss_fn = no_kl(importance_sampling_cap=math.inf, importance_ratio="sequence")
    loss, _ = call(loss_fn, generation_logprobs=generated, **rows)
    assert loss.item() == pytest.approx(-1.5)


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


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [("k1", -0.5), ("k2", 0.125), ("k3", math.exp(0.5) - 1.5)],
)
def test_kl_estimators_of_one_token(call: Call, estimator: Any, expected: float) -> None:
    inputs = tensor([[0.0, -2.0]], dtype=torch.float64)
    loss_fn = GRPOLossFn(reference_policy_kl_penalty=0.5, kl_estimator=estimator)
    loss, metrics = call(
        loss_fn,
        inputs,
        prev_logprobs=inputs,
        reference_policy_logprobs=inputs + 0.5,
        advantages=tensor([0.0]),
    )
    assert loss.item() == pytest.approx(0.5 * expected)
    assert metrics["kl"] == pytest.approx(expected)


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


def test_cispo_clips_the_weight_and_keeps_the_gradient(call: Call) -> None:
    rows = rows_with_ratios([[0.5, 1.0, 3.0]], advantages=tensor([2.0]))
    inputs = rows.pop("inputs").requires_grad_()
    loss, _ = call(no_kl(surrogate="cispo", ratio_clip_max=0.5), inputs, **rows)
    (gradient,) = torch.autograd.grad(loss, inputs)
    assert gradient[0, 1:].tolist() == pytest.approx([-2 * w / 3 for w in (0.8, 1.0, 1.5)])


def test_dppo_drops_tokens_whose_probability_moved_too_far(call: Call) -> None:
    rows = rows_with_ratios([[1.2, 3.0, 0.5], [1.2, 3.0, 0.5]], advantages=tensor([1.0, -1.0]))
    inputs = rows.pop("inputs").requires_grad_()
    bounds = {"ratio_clip_min": 0.04, "ratio_clip_max": 0.04, "ratio_clip_c": 2.0}
    loss, metrics = call(no_kl(surrogate="dppo", **bounds), inputs, **rows)
    (gradient,) = torch.autograd.grad(loss, inputs)
    # From 0.1 probabilities went to 0.12, 0.3 and 0.05.
    assert gradient[:, 1:].flatten().tolist() == pytest.approx(
        [-1.2 / 6, 0, -0.5 / 6, 1.2 / 6, 2.0 / 6, 0]
    )
    assert metrics["clip_fraction"] == pytest.approx(2 / 6)


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


def test_a_step_down_the_gradient_follows_the_advantages(call: Call) -> None:
    logits = torch.zeros(2, 3, 5, dtype=torch.float64, requires_grad=True)
    tokens = tensor([[1, 2, 3], [1, 3, 2]])

    def logprobs() -> torch.Tensor:
        scores = logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
        return torch.nn.functional.pad(scores, (1, 0))

    before = logprobs().detach()
    loss, _ = call(no_kl(), logprobs(), prev_logprobs=before, advantages=tensor([1.0, -1.0]))
    (gradient,) = torch.autograd.grad(loss, logits)
    with torch.no_grad():
        logits -= gradient
    change = (logprobs() - before).detach()[:, 1:]
    assert (change[0] > 0).all()
    assert (change[1] < 0).all()


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
