"""What every loss promises, whatever its options: shares add up, and masks mean it."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.batch import BatchedDataDict
from rl_core.interfaces import LossFunction, LossInputType, LossType
from rl_losses import DPOLossFn, GRPOLossFn, NLLLossFn, TopkKLLossFn
from rl_losses.preferences import PREFERENCES, SMOOTHED

SEQUENCE = LossType.SEQUENCE_LEVEL
LOSSES: dict[str, LossFunction] = {
    "nll": NLLLossFn(),
    "nll-sequence": NLLLossFn(loss_type=SEQUENCE),
    "nll-smooth": NLLLossFn(label_smoothing=0.1),
    "grpo": GRPOLossFn(reference_policy_kl_penalty=0.1, importance_sampling_cap=1.5),
    "grpo-sequence": GRPOLossFn(loss_type=SEQUENCE, ratio_clip_c=3.0, kl_estimator="k2"),
    "gspo": GRPOLossFn(
        loss_type=SEQUENCE, importance_ratio="sequence", importance_sampling_cap=2.0
    ),
    "grpo-on-policy": GRPOLossFn(on_policy=True, kl_estimator="k1"),
    "dr-grpo": GRPOLossFn(loss_type=SEQUENCE, length_norm=7.0, kl_gradient="ratio"),
    "cispo": GRPOLossFn(surrogate="cispo", ratio_clip_max=4.0, kl_gradient="sampling"),
    "sapo": GRPOLossFn(surrogate="sapo", loss_type=SEQUENCE, kl_gradient="generation"),
    "gmpo": GRPOLossFn(surrogate="gmpo", loss_type=SEQUENCE, kl_output_clamp=0.05),
    "dppo": GRPOLossFn(surrogate="dppo", ratio_clip_c=20.0, kl_input_clamp=0.3),
    "icepop": GRPOLossFn(
        importance_sampling_cap=1.2,
        importance_sampling_floor=0.8,
        importance_sampling_outside="mask",
        off_policy_mask_threshold=0.1,
        positive_nll_weight=0.2,
    ),
    "rejection": GRPOLossFn(
        importance_sampling_cap=math.inf,
        importance_sampling_weight="sequence",
        rejection="seq_mean_k1",
        rejection_min=0.9,
        rejection_max=1.1,
    ),
    "vespo": GRPOLossFn(surrogate="vespo", importance_sampling_cap=1.5),
    "dppo-kl": GRPOLossFn(
        surrogate="dppo_kl",
        ratio_clip_min=0.02,
        ratio_clip_max=0.02,
        ratio_denominator="generation_logprobs",
        log_ratio_penalty=0.1,
    ),
    "reinforce": GRPOLossFn(
        surrogate="reinforce", kl_cov_penalty=0.3, rejection="seq_max_k3", rejection_max=0.02
    ),
    "entropy": GRPOLossFn(entropy_bonus=0.1, entropy_min=1.2),
    "dpo": DPOLossFn(label_smoothing=0.1, sft_loss_weight=0.5),
    "dpo-weighted": DPOLossFn(weighted=True, length_desensitization=0.5),
    "dpo-average": DPOLossFn(
        preference_average_log_probs=True, sft_loss_weight=0.5, sft_average_log_probs=True
    ),
    **{
        f"dpo-{name}": DPOLossFn(preference_loss=name)
        for name in sorted(set(PREFERENCES) - set(SMOOTHED))
    },
    "dpo-robust": DPOLossFn(preference_loss="robust", label_smoothing=0.2),
    "dpo-exo": DPOLossFn(preference_loss="exo_pair", label_smoothing=0.2),
    "topk-mixed": TopkKLLossFn(direction="mixed", mixing=0.3),
    "topk-whole": TopkKLLossFn(direction="mixed", renormalize="none"),
    "topk-jsd": TopkKLLossFn(direction="jsd", mixing=0.3),
    "topk-kl": TopkKLLossFn(),
    "topk-kl-reverse": TopkKLLossFn(direction="reverse", loss_type=SEQUENCE),
}
every_loss = pytest.mark.parametrize("loss_fn", LOSSES.values(), ids=LOSSES)

VOCABULARY, TOP_K = 5, 3


def make_rows(seed: int, pairs: int, width: int) -> BatchedDataDict[Any]:
    """Rows with random masks and the keys of all losses; ``inputs`` and ``logits`` among them."""
    generator = torch.Generator().manual_seed(seed)
    rows = 2 * pairs

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def coin(*shape: int) -> torch.Tensor:
        return (torch.rand(*shape, generator=generator) < 0.7).float()

    inputs = -normal(rows, width).abs()
    scored = torch.arange(width) > 0  # nothing predicts position 0
    logits = normal(rows, width, VOCABULARY)
    tokens = torch.randint(VOCABULARY, (rows, width), generator=generator)
    teacher = normal(rows, width - 1, VOCABULARY).topk(TOP_K)
    return BatchedDataDict(
        inputs=inputs,
        logits=logits,
        input_ids=tokens,
        rewards=normal(rows),
        token_mask=coin(rows, width),
        sample_mask=coin(pairs).repeat_interleave(2),
        advantages=normal(rows),
        prev_logprobs=inputs + 0.2 * normal(rows, width),
        generation_logprobs=inputs + 0.3 * normal(rows, width),
        high_covariance=coin(rows, width).bool(),
        reference_policy_logprobs=(inputs + 0.4 * normal(rows, width)) * scored,
        teacher_topk_logits=teacher.values,
        teacher_topk_indices=teacher.indices,
    )


def inputs_key(loss_fn: LossFunction) -> str:
    return "logits" if loss_fn.input_type is LossInputType.LOGIT else "inputs"


def valid_tokens(rows: BatchedDataDict[Any]) -> torch.Tensor:
    mask: torch.Tensor = rows["token_mask"] * rows["sample_mask"][:, None]
    return torch.nn.functional.pad(mask[:, 1:], (1, 0))


def evaluate(
    loss_fn: LossFunction, rows: BatchedDataDict[Any], cuts: list[int]
) -> tuple[float, torch.Tensor, dict[str, float]]:
    """Loss, gradient and metrics of rows that are split at ``cuts``."""
    counts = {
        "global_valid_seqs": rows["sample_mask"].sum(),
        "global_valid_toks": valid_tokens(rows).sum(),
    }
    key = inputs_key(loss_fn)
    leaf = rows[key].clone().requires_grad_()
    gradient = torch.zeros_like(leaf)
    total = 0.0
    metrics: dict[str, float] = {}
    bounds = [0, *cuts, len(leaf)]
    for start, stop in itertools.pairwise(bounds):
        part: BatchedDataDict[Any] = BatchedDataDict(
            {name: value[start:stop] for name, value in rows.items()}
        )
        loss, share = loss_fn(leaf[start:stop], part, **counts)
        gradient += torch.autograd.grad(loss, leaf)[0]
        total += loss.item()
        for name, value in share.items():
            if name not in metrics:
                metrics[name] = value
            elif name.endswith("_min"):
                metrics[name] = min(metrics[name], value)
            elif name.endswith("_max"):
                metrics[name] = max(metrics[name], value)
            else:
                metrics[name] += value
    return total, gradient, metrics


@st.composite
def splits(draw: st.DrawFn) -> tuple[BatchedDataDict[Any], list[int]]:
    """Rows, and where to cut them without parting a pair."""
    pairs = draw(st.integers(1, 6))
    rows = make_rows(draw(st.integers(0, 999)), pairs, draw(st.integers(2, 6)))
    cuts = draw(st.sets(st.integers(1, pairs).map(lambda pair: 2 * pair)))
    return rows, sorted(cuts - {2 * pairs})


@every_loss
@given(split=splits())
@settings(max_examples=25, deadline=None)
def test_any_split_gives_the_same_loss_gradient_and_metrics(
    loss_fn: LossFunction, split: tuple[BatchedDataDict[Any], list[int]]
) -> None:
    rows, cuts = split
    loss, gradient, metrics = evaluate(loss_fn, rows, cuts)
    whole_loss, whole_gradient, whole_metrics = evaluate(loss_fn, rows, [])
    assert loss == pytest.approx(whole_loss, abs=1e-12)
    torch.testing.assert_close(gradient, whole_gradient)
    assert metrics == pytest.approx(whole_metrics, abs=1e-12)


def poison(rows: BatchedDataDict[Any], value: float) -> BatchedDataDict[Any]:
    """The same rows with every floating value that is masked replaced."""
    valid = valid_tokens(rows).bool()
    spoiled: BatchedDataDict[Any] = BatchedDataDict(rows)
    for name in ("inputs", "prev_logprobs", "generation_logprobs", "reference_policy_logprobs"):
        spoiled[name] = torch.where(valid, rows[name], value)
    # A logit at t predicts token t+1, so the last position predicts nothing.
    predicts = torch.nn.functional.pad(valid[:, 1:], (0, 1))[..., None]
    spoiled["logits"] = torch.where(predicts, rows["logits"], value)
    spoiled["teacher_topk_logits"] = torch.where(
        predicts[:, :-1], rows["teacher_topk_logits"], value
    )
    for name in ("advantages", "rewards"):
        spoiled[name] = torch.where(valid.any(dim=1), rows[name], value)
    return spoiled


@every_loss
@given(seed=st.integers(0, 999), value=st.sampled_from([math.nan, math.inf, -math.inf]))
@settings(max_examples=15, deadline=None)
def test_what_is_masked_has_no_influence_whatever_it_is(
    loss_fn: LossFunction, seed: int, value: float
) -> None:
    rows = make_rows(seed, pairs=3, width=4)
    loss, gradient, metrics = evaluate(loss_fn, rows, [])
    with torch.autograd.set_detect_anomaly(True):  # no NaN inside the backward pass either
        spoiled_loss, spoiled_gradient, spoiled_metrics = evaluate(loss_fn, poison(rows, value), [])
    assert spoiled_loss == loss
    assert torch.equal(spoiled_gradient, gradient)
    assert spoiled_metrics == metrics


@every_loss
@pytest.mark.parametrize("mask", ["token_mask", "sample_mask"])
def test_a_batch_without_anything_valid_has_loss_zero_and_gradient_zero(
    loss_fn: LossFunction, mask: str
) -> None:
    rows = make_rows(0, pairs=2, width=4)
    rows[mask] = torch.zeros_like(rows[mask])
    if isinstance(loss_fn, DPOLossFn) and mask == "token_mask":
        rows["sample_mask"] = torch.zeros(4)
    loss, gradient, metrics = evaluate(loss_fn, poison(rows, math.nan), [])
    assert loss == 0.0
    assert torch.equal(gradient, torch.zeros_like(gradient))
    assert not any(math.isnan(value) for value in metrics.values())


# These have gradients that are not their values' by design, and tests of their own.
SURROGATE = {"grpo-on-policy", "cispo", "sapo", "dppo", "dppo-kl", "vespo", "dpo-weighted"}


@pytest.mark.parametrize("name", sorted(LOSSES.keys() - SURROGATE))
def test_the_gradient_is_that_of_the_value(name: str) -> None:
    loss_fn = LOSSES[name]
    rows = make_rows(1, pairs=2, width=4)
    counts = {"global_valid_seqs": torch.tensor(4.0), "global_valid_toks": torch.tensor(9.0)}
    leaf = rows[inputs_key(loss_fn)].clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: loss_fn(x, rows, **counts)[0], (leaf,))


@every_loss
def test_the_loss_of_float32_inputs_is_float32(loss_fn: LossFunction) -> None:
    rows = make_rows(2, pairs=2, width=4)
    loss, _ = loss_fn(
        rows[inputs_key(loss_fn)].float(),
        rows,
        global_valid_seqs=torch.tensor(4),
        global_valid_toks=torch.tensor(9),
    )
    assert loss.dtype == torch.float32
    assert loss.shape == ()


@every_loss
def test_rows_are_not_written_to(loss_fn: LossFunction) -> None:
    rows = make_rows(3, pairs=2, width=4)
    before = {name: value.clone() for name, value in rows.items()}
    evaluate(loss_fn, rows, [2])
    assert all(torch.equal(rows[name], value) for name, value in before.items())


@every_loss
def test_a_microbatch_without_rows_adds_nothing(loss_fn: LossFunction) -> None:
    rows = make_rows(4, pairs=2, width=4)
    loss, _, metrics = evaluate(loss_fn, rows, [0])
    whole_loss, _, whole_metrics = evaluate(loss_fn, rows, [])
    assert (loss, metrics) == (whole_loss, whole_metrics)
