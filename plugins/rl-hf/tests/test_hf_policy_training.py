"""The policy learns: one step per global batch, whatever the split; nothing bad gets in."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

from rl_backends.policy.steps import learning_rate
from rl_conformance.models import FAMILIES
from rl_core.batch import BatchedDataDict
from rl_core.errors import CapabilityError, DataError, TrainingError
from rl_core.interfaces import LossFunction, LossInputType
from rl_hf.logprobs import token_logprobs
from rl_hf.policy import HuggingFacePolicy
from rl_losses import DPOLossFn, GRPOLossFn, NLLLossFn

LENGTHS = (20, 3, 11, 7, 16, 5, 9, 12)
PACKED = {"sequence_packing": {"enabled": True, "train_mb_tokens": 40}}
DYNAMIC = {"dynamic_batching": {"enabled": True, "train_mb_tokens": 96, "sequence_length_round": 8}}


class LogitNLL(LossFunction):
    """NLL from full logits: position t predicts token t+1."""

    input_type: ClassVar[LossInputType] = LossInputType.LOGIT

    def __call__(self, inputs, data, *, global_valid_seqs, global_valid_toks):
        scores = inputs[:, :-1].log_softmax(-1)
        chosen = scores.gather(-1, data["input_ids"][:, 1:, None])[..., 0]
        mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
        return -(chosen * mask).sum() / global_valid_toks, {}


class Faulty(NLLLossFn):
    """A test double: the share is not a number."""

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, dict[str, float]]:
        loss, metrics = super().__call__(*args, **kwargs)
        return loss * float("nan"), metrics


class InfiniteGradient(NLLLossFn):
    """A test double: the share is 0, its gradient is not finite."""

    def __call__(self, inputs, *args: Any, **kwargs: Any):
        return (inputs - inputs.detach()).abs().sqrt().sum(), {}


def batch(lengths: tuple[int, ...] = LENGTHS, width: int = 24) -> BatchedDataDict[Any]:
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(3, 272, (len(lengths), width), generator=generator)
    return BatchedDataDict(
        {
            "input_ids": ids,
            "input_lengths": torch.tensor(lengths),
            "token_mask": (torch.rand(len(lengths), width, generator=generator) < 0.8).float(),
            "sample_mask": torch.tensor([1.0] * (len(lengths) - 1) + [0.0]),
        }
    )


def weights(policy: HuggingFacePolicy) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in policy.model.state_dict().items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("loss_fn", [NLLLossFn(), LogitNLL()], ids=["logprob", "logit"])
def test_a_step_does_not_depend_on_how_rows_are_split(tiny, family, loss_fn):
    # A large eps: some biases have no gradient but rounding, which Adam would blow up to its rate.
    options: dict[str, Any] = {"optimizer": {"lr": 1e-3, "eps": 1e-3}, "temperature": 0.9}
    results, updated = [], []
    for config in ({}, {"train_micro_batch_size": 1}, PACKED, DYNAMIC):
        policy = HuggingFacePolicy(str(tiny(family)), **options, **config)
        results.append(policy.train(batch(), loss_fn))
        updated.append(weights(policy))
    for result, tensors in zip(results[1:], updated[1:], strict=True):
        for key in ("loss", "grad_norm"):
            assert result[key] == pytest.approx(results[0][key], rel=1e-5)
        for name, tensor in tensors.items():
            torch.testing.assert_close(tensor, updated[0][name], atol=1e-5, rtol=0, msg=name)


def test_full_logits_and_logprobs_give_one_loss(tiny):
    policy = HuggingFacePolicy(str(tiny()), temperature=0.7)
    a = policy.train(batch(), NLLLossFn(), eval_mode=True)["loss"]
    b = policy.train(batch(), LogitNLL(), eval_mode=True)["loss"]
    assert a == pytest.approx(b, rel=1e-6)


def test_gradient_checkpointing_changes_nothing(tiny):
    plain, saving = (
        HuggingFacePolicy(str(tiny()), optimizer={"lr": 1e-3}, gradient_checkpointing=flag)
        for flag in (False, True)
    )
    assert plain.train(batch(), NLLLossFn()) == saving.train(batch(), NLLLossFn())
    assert same(weights(plain), weights(saving))


def test_one_step_per_global_batch_and_every_step_in_the_history(tiny):
    policy = HuggingFacePolicy(str(tiny()), optimizer={"lr": 1.0e-3}, scheduler={"warmup_steps": 4})
    result = policy.train(batch(), NLLLossFn(), gbs=2)
    assert result["step_metrics"]["lr"] == [2.5e-4, 5e-4, 7.5e-4, 1e-3]
    assert result["lr"] == 1e-3
    assert result["loss"] == result["step_metrics"]["loss"][-1]
    assert result["global_valid_seqs"] == 1  # the last row does not count


def test_rows_that_are_no_multiple_of_the_global_batch_are_refused_before_any_step(tiny):
    policy = HuggingFacePolicy(str(tiny()))
    before = weights(policy)
    with pytest.raises(DataError, match="8 rows are no multiple of the 3 rows"):
        policy.train(batch(), NLLLossFn(), gbs=3)
    assert same(weights(policy), before)


def test_groups_stay_in_one_microbatch(tiny):
    data = batch()
    data["sample_mask"] = torch.tensor([1.0, 1, 1, 1, 0, 0, 1, 1])
    data["reference_policy_logprobs"] = torch.zeros(8, 24)
    results = [
        HuggingFacePolicy(str(tiny()), **config).train(data, DPOLossFn())["loss"]
        for config in ({}, {"train_micro_batch_size": 1}, PACKED, DYNAMIC)
    ]
    assert results[1:] == pytest.approx([results[0]] * 3, rel=1e-5)


def test_masked_rows_and_tokens_have_no_influence_at_all(tiny):
    data, other = batch(), batch()
    other["input_ids"][-1] = 5
    other["input_lengths"][-1] = 24
    first, second = (HuggingFacePolicy(str(tiny()), optimizer={"lr": 1e-3}) for _ in range(2))
    a, b = first.train(data, NLLLossFn()), second.train(other, NLLLossFn())
    assert a == b
    assert same(weights(first), weights(second))
    tail = {"token_mask": data["token_mask"].clone(), "input_ids": data["input_ids"].clone()}
    tail["token_mask"][0, 15:] = 0
    tail["input_ids"][0, 16:20] = 4
    masked = BatchedDataDict({**data, "token_mask": tail["token_mask"]})
    changed = BatchedDataDict({**data, **tail})
    for config in ({}, PACKED):
        policies = [HuggingFacePolicy(str(tiny()), **config) for _ in range(2)]
        a, b = (
            p.train(d, NLLLossFn())["loss"]
            for p, d in zip(policies, (masked, changed), strict=True)
        )
        assert a == pytest.approx(b, rel=1e-7)


def test_masks_default_to_all_ones(tiny):
    data = batch()
    data["token_mask"] = data["token_mask"].new_ones(8, 24)
    data["sample_mask"] = torch.ones(8)
    bare = BatchedDataDict({key: data[key] for key in ("input_ids", "input_lengths")})
    policy = HuggingFacePolicy(str(tiny()))
    a, b = (policy.train(d, NLLLossFn(), eval_mode=True) for d in (data, bare))
    assert a == b
    assert a["global_valid_toks"] == sum(LENGTHS) - len(LENGTHS)


def test_a_batch_in_which_nothing_counts_takes_no_step(tiny):
    policy = HuggingFacePolicy(str(tiny()), optimizer={"lr": 1.0, "weight_decay": 0.5})
    data, before = batch(), weights(policy)
    data["sample_mask"] = torch.zeros(8)
    result = policy.train(data, NLLLossFn())
    assert result["skipped_steps"] == 1
    assert same(weights(policy), before)


def test_evaluation_changes_nothing(tiny):
    policy = HuggingFacePolicy(str(tiny("qwen2", attention_dropout=0.3)), optimizer={"lr": 1e-2})
    policy.train(batch(), NLLLossFn())
    before, random = weights(policy), torch.get_rng_state()
    modes = [module.training for module in policy.model.modules()]
    first = policy.train(batch(), NLLLossFn(), eval_mode=True)
    assert policy.train(batch(), NLLLossFn(), eval_mode=True) == first
    assert same(weights(policy), before)
    assert torch.equal(torch.get_rng_state(), random)
    assert [module.training for module in policy.model.modules()] == modes


def test_dropout_draws_from_the_policys_own_stream(tiny):
    path = str(tiny("qwen2", attention_dropout=0.3))
    losses = []
    for global_seed, seed in ((1, 5), (2, 5), (2, 6)):
        torch.manual_seed(global_seed)
        state = torch.get_rng_state()
        losses.append(HuggingFacePolicy(path, seed=seed).train(batch(), NLLLossFn())["loss"])
        assert torch.equal(torch.get_rng_state(), state)
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.parametrize("loss_fn", [Faulty(), InfiniteGradient()], ids=["loss", "gradient"])
def test_what_is_not_finite_never_reaches_the_weights(tiny, loss_fn):
    policy = HuggingFacePolicy(str(tiny()), optimizer={"lr": 1e-2})
    healthy = HuggingFacePolicy(str(tiny()), optimizer={"lr": 1e-2})
    before = weights(policy)
    with pytest.raises(TrainingError, match="not finite"):
        policy.train(batch(), loss_fn)
    assert same(weights(policy), before)
    assert policy.train(batch(), NLLLossFn()) == healthy.train(batch(), NLLLossFn())
    assert same(weights(policy), weights(healthy))


def test_the_rows_of_a_loss_that_is_not_finite_are_named(tiny):
    with pytest.raises(TrainingError) as error:
        HuggingFacePolicy(str(tiny()), train_micro_batch_size=4).train(batch(), Faulty())
    assert error.value.details["rows"] == [0, 1, 2, 3]


def test_a_step_that_is_not_finite_is_skipped_where_so_configured(tiny):
    policy = HuggingFacePolicy(str(tiny()), non_finite="skip")
    before = weights(policy)
    result = policy.train(batch(), Faulty())
    assert result["skipped_steps"] == 1
    assert same(weights(policy), before)


def test_gradients_are_clipped_to_the_norm(tiny):
    updates = []
    for norm in (None, 1e-9):
        policy = HuggingFacePolicy(
            str(tiny()), max_grad_norm=norm, optimizer={"lr": 1e-3, "weight_decay": 0.0}
        )
        before = weights(policy)
        assert policy.train(batch(), NLLLossFn())["grad_norm"] > 1
        updates.append(max(float((t - before[n]).abs().max()) for n, t in weights(policy).items()))
    # Without clipping Adam's first step is the learning rate; far below eps it is not.
    assert updates[0] == pytest.approx(1e-3, rel=1e-2)
    assert updates[1] < 1e-4


def test_training_on_one_batch_lowers_its_nll(tiny):
    policy = HuggingFacePolicy(str(tiny()), optimizer={"lr": 1e-3})
    losses = [policy.train(batch(), NLLLossFn())["loss"] for _ in range(4)]
    assert losses == sorted(losses, reverse=True)


def test_a_policy_gradient_follows_its_advantages(tiny):
    policy, data = HuggingFacePolicy(str(tiny()), optimizer={"lr": 1e-3}), batch()
    before = policy.get_logprobs(data)["logprobs"]
    data["prev_logprobs"] = data["generation_logprobs"] = before
    data["reference_policy_logprobs"] = before
    sign = torch.tensor([1.0, -1] * 4)
    data["advantages"] = sign[:, None].expand(8, 24).contiguous()
    policy.train(data, GRPOLossFn())
    moved = ((policy.get_logprobs(data)["logprobs"] - before) * data["token_mask"]).sum(1)
    assert ((moved * sign)[:7] > 0).all()


def test_bfloat16_learns_from_steps_below_its_resolution(tiny):
    policy = HuggingFacePolicy(
        str(tiny()), torch_dtype="bfloat16", optimizer={"lr": 1e-4, "weight_decay": 0.0}
    )
    before = weights(policy)
    for _ in range(30):
        policy.train(batch(), NLLLossFn())
    exact = HuggingFacePolicy(str(tiny()), optimizer={"lr": 1e-4, "weight_decay": 0.0})
    start = weights(exact)
    for _ in range(30):
        exact.train(batch(), NLLLossFn())
    name = "model.layers.0.mlp.up_proj.weight"
    moved = (weights(policy)[name] - before[name]).float().norm()
    expected = (weights(exact)[name] - start[name]).norm()
    assert float(moved) == pytest.approx(float(expected), rel=0.2)


def test_float16_is_refused_for_training_alone(tiny):
    policy = HuggingFacePolicy(str(tiny()), torch_dtype="float16")
    policy.prepare_for_lp_inference()
    policy.get_logprobs(batch())
    policy.train(batch(), NLLLossFn(), eval_mode=True)
    policy.offload_after_refit()
    with pytest.raises(CapabilityError, match="loss scaling"):
        policy.train(batch(), NLLLossFn())


def test_lifecycle_calls_are_idempotent_and_leave_results(tiny):
    calls = ("prepare_for_training", "finish_training", "prepare_for_lp_inference")
    calls += ("offload_before_refit", "offload_after_refit")
    plain, moved = (HuggingFacePolicy(str(tiny()), optimizer={"lr": 1e-3}) for _ in range(2))
    for name in (*calls, *reversed(calls)):
        getattr(moved, name)()
        getattr(moved, name)()
        assert plain.train(batch(), NLLLossFn()) == moved.train(batch(), NLLLossFn())


def test_schedules_follow_their_formula():
    linear = {"name": "linear", "warmup_steps": 2, "total_steps": 6, "min_lr_ratio": 0.5}
    config = {"optimizer": {"lr": 1.0}, "scheduler": linear}
    rates = [learning_rate(step, config) for step in range(8)]
    assert rates == pytest.approx([0.5, 1, 1, 0.875, 0.75, 0.625, 0.5, 0.5])
    config["scheduler"] = {"name": "cosine", "total_steps": 4}
    assert learning_rate(2, config) == pytest.approx(0.5)
    assert learning_rate(9, config) == pytest.approx(0.0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_token_logprobs_and_their_gradient_equal_log_softmax(dtype, monkeypatch):
    monkeypatch.setattr("rl_hf.logprobs.CHUNK_ELEMENTS", 22)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(9, 11, dtype=dtype, requires_grad=True, generator=generator)
    positions, targets = torch.tensor([0, 3, 4, 8]), torch.tensor([1, 0, 10, 5])
    scale = torch.tensor([1.0, -2.0, 0.5, 3.0])
    found = token_logprobs(logits, positions, targets, 0.7)
    (gradient,) = torch.autograd.grad((found * scale).sum(), logits)
    expected = (logits.float() / 0.7).log_softmax(-1)[positions, targets]
    (wanted,) = torch.autograd.grad((expected * scale).sum(), logits)
    torch.testing.assert_close(found, expected)
    # The arithmetic is float32 whatever the logits are.
    atol, rtol = (1e-5, 1.6e-2) if dtype is torch.bfloat16 else (1e-6, 1e-5)
    torch.testing.assert_close(gradient, wanted, atol=atol, rtol=rtol)
