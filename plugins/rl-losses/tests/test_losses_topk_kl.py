from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import tensor

from rl_core.errors import DataError
from rl_core.interfaces import LossInputType
from rl_losses import TopkKLLossFn

Call = Callable[..., tuple[torch.Tensor, dict[str, float]]]


def logits_of(*probabilities: float) -> torch.Tensor:
    """One row of two tokens whose second is predicted with these probabilities."""
    predicted = tensor(probabilities, dtype=torch.float64).log()
    return torch.stack([predicted, torch.zeros_like(predicted)])[None]


def teacher_of(indices: list[int], probabilities: list[float]) -> dict[str, torch.Tensor]:
    return {
        "teacher_topk_indices": tensor([[indices]]),
        "teacher_topk_logits": tensor([[probabilities]], dtype=torch.float64).log() + 3.0,
    }


def test_forward_is_against_the_policys_whole_distribution(call: Call) -> None:
    loss, metrics = call(
        TopkKLLossFn(), logits_of(0.5, 0.3, 0.2), **teacher_of([2, 0], [0.75, 0.25])
    )
    expected = 0.75 * math.log(0.75 / 0.2) + 0.25 * math.log(0.25 / 0.5)
    assert loss.item() == pytest.approx(expected)
    assert metrics == {"kl": pytest.approx(expected), "teacher_mass": pytest.approx(0.7)}


def test_the_teachers_temperature_flattens_it(call: Call) -> None:
    loss, _ = call(
        TopkKLLossFn(teacher_temperature=2.0),
        logits_of(0.5, 0.5),
        **teacher_of([0, 1], [0.8, 0.2]),
    )
    assert loss.item() == pytest.approx(
        (2 / 3) * math.log((2 / 3) / 0.5) + (1 / 3) * math.log((1 / 3) / 0.5)
    )


def test_a_teachers_logit_of_minus_infinity_adds_nothing(call: Call) -> None:
    loss, _ = call(
        TopkKLLossFn(), logits_of(0.5, 0.3, 0.2), **teacher_of([0, 1, 2], [0.5, 0.5, 0.0])
    )
    assert loss.item() == pytest.approx(0.5 * math.log(0.5 / 0.5) + 0.5 * math.log(0.5 / 0.3))


def test_a_wider_teacher_is_cut_to_the_microbatch(call: Call) -> None:
    teacher = teacher_of([2, 0], [0.75, 0.25])
    wider = {key: torch.cat([value, value * 0], dim=1) for key, value in teacher.items()}
    logits = logits_of(0.5, 0.3, 0.2)
    assert call(TopkKLLossFn(), logits, **wider)[0] == call(TopkKLLossFn(), logits, **teacher)[0]


def test_a_teacher_that_is_too_short_is_refused(call: Call) -> None:
    with pytest.raises(DataError, match="has 1 positions, expected 3"):
        call(TopkKLLossFn(), torch.zeros(1, 4, 3), **teacher_of([0], [1.0]))


def test_it_asks_the_policy_for_logits() -> None:
    assert TopkKLLossFn.input_type is LossInputType.LOGIT


def test_a_teacher_without_candidates_is_refused(call: Call) -> None:
    nothing = {"teacher_topk_logits": torch.zeros(2, 3, 0)}
    nothing["teacher_topk_indices"] = torch.zeros(2, 3, 0, dtype=torch.int64)
    with pytest.raises(DataError, match="k is 0"):
        call(TopkKLLossFn(), torch.randn(2, 4, 7), **nothing)


def three_positions(**changed: torch.Tensor) -> dict[str, torch.Tensor]:
    """A teacher of two rows, three positions and two candidates."""
    return {
        "teacher_topk_logits": torch.zeros(2, 3, 2),
        "teacher_topk_indices": tensor([0, 6]).expand(2, 3, 2).clone(),
    } | changed


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_a_teacher_without_a_distribution_is_refused_by_row(
    call: Call, direction: str, value: float
) -> None:
    data = three_positions()
    data["teacher_topk_logits"][1, 2, 0] = value
    if direction == "forward" and value == -math.inf:
        data["teacher_topk_logits"][1, 2, 1] = value
    loss = TopkKLLossFn.from_config({"direction": direction})
    with pytest.raises(DataError, match=r"row 1, position 2 are \[.*not a distribution") as caught:
        call(loss, torch.zeros(2, 4, 7), **data)
    assert caught.value.details["row"] == 1
    masked = torch.ones(2, 4)
    masked[1, 3] = 0
    assert call(loss, torch.zeros(2, 4, 7), token_mask=masked, **data)[0].isfinite()


@pytest.mark.parametrize("index", [-1, 7])
def test_a_token_that_the_policy_does_not_have_is_refused_by_row(call: Call, index: int) -> None:
    data = three_positions()
    data["teacher_topk_indices"][1, 0, 1] = index
    with pytest.raises(DataError, match="row 1, position 0 names a token outside of the policy's"):
        call(TopkKLLossFn(), torch.zeros(2, 4, 7), **data)


def test_as_many_logits_as_indices(call: Call) -> None:
    data = three_positions(teacher_topk_logits=torch.zeros(2, 3, 1))
    with pytest.raises(DataError, match=r"has 1 entries .* has 2"):
        call(TopkKLLossFn(), torch.zeros(2, 4, 7), **data)


@pytest.mark.parametrize("kind", [torch.float32, torch.bool])
def test_indices_that_are_no_integers_are_refused(call: Call, kind: torch.dtype) -> None:
    data = three_positions(teacher_topk_indices=torch.zeros(2, 3, 2, dtype=kind))
    with pytest.raises(DataError, match="not token ids"):
        call(TopkKLLossFn(), torch.zeros(2, 4, 7), **data)


def test_indices_may_be_of_any_integer_width(call: Call) -> None:
    wide = three_positions()
    narrow = wide | {"teacher_topk_indices": wide["teacher_topk_indices"].short()}
    logits = torch.randn(2, 4, 7)
    assert call(TopkKLLossFn(), logits, **narrow) == call(TopkKLLossFn(), logits, **wide)


def test_mixed_is_both_directions(call: Call) -> None:
    logits, teacher = logits_of(0.5, 0.3, 0.2), teacher_of([2, 0], [0.75, 0.25])
    forward, reverse = (
        call(TopkKLLossFn(direction=direction), logits, **teacher)[0].item()
        for direction in ("forward", "reverse")
    )
    loss, _ = call(TopkKLLossFn(direction="mixed", mixing=0.3), logits, **teacher)
    assert loss.item() == pytest.approx(0.3 * forward + 0.7 * reverse)


def test_jsd_is_that_of_gkd_over_the_topk(call: Call) -> None:
    logits, teacher = logits_of(0.6, 0.2, 0.2), teacher_of([2, 0], [0.5, 0.5])
    loss, _ = call(TopkKLLossFn(direction="jsd", mixing=0.3), logits, **teacher)
    p, q = tensor([0.5, 0.5]).double(), tensor([0.25, 0.75]).double()
    m = 0.3 * p + 0.7 * q
    expected = 0.3 * (p * (p / m).log()).sum() + 0.7 * (q * (q / m).log()).sum()
    assert loss.item() == pytest.approx(expected.item())


@pytest.mark.parametrize("zero_outside_topk", [True, False])
@pytest.mark.parametrize("direction", ["forward", "reverse", "mixed"])
def test_renormalize_covers_both_distillations_of_nemo_rl(
    call: Call, direction: str, zero_outside_topk: bool
) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(1, 2, 9, generator=generator, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(1, 1, 9, generator=generator, dtype=torch.float64).topk(4)
    whole = logits[0, 0].log_softmax(-1)
    chosen = teacher.indices[0, 0]
    student = whole[chosen] if zero_outside_topk else logits[0, 0][chosen].log_softmax(-1)
    other = teacher.values[0, 0].log_softmax(-1)
    forward = (other.exp() * (other - student)).sum()
    reverse = (student.exp() * (student - other)).sum()
    if zero_outside_topk:
        outside = torch.ones(9, dtype=torch.bool)
        outside[chosen] = False
        rest = whole[outside]
        reverse = reverse + (rest.exp() * (rest + 100)).sum()
    mixed = 0.3 * forward + 0.7 * reverse
    expected = {"forward": forward, "reverse": reverse, "mixed": mixed}[direction]
    loss_fn = TopkKLLossFn(
        direction=direction,  # type: ignore[arg-type]
        renormalize="none" if zero_outside_topk else "both",
        **({"mixing": 0.3} if direction == "mixed" else {}),
    )
    loss, _ = call(
        loss_fn,
        logits,
        teacher_topk_logits=teacher.values,
        teacher_topk_indices=teacher.indices,
    )
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(
        torch.autograd.grad(loss, logits), torch.autograd.grad(expected, logits)
    )
