"""The policy learns: one step per global batch, whatever the split; nothing bad gets in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from module_weights import weights
from simple_pair import same

from rl_core.batch import BatchedDataDict
from rl_core.errors import CapabilityError, DataError, TrainingError
from rl_hf.logprobs import token_logprobs
from rl_hf.policy import HuggingFacePolicy
from rl_losses import NLLLossFn

LENGTHS = (20, 3, 11, 7, 16, 5, 9, 12)


class Faulty(NLLLossFn):
    """A test double: the share is not a number."""

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, dict[str, float]]:
        loss, metrics = super().__call__(*args, **kwargs)
        return loss * float("nan"), metrics


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


def test_text_alone_changes_in_a_model_of_images_and_text(tiny, tmp_path):
    policy = HuggingFacePolicy(str(tiny("qwen2_5_vl")), optimizer={"lr": 1e-2})
    before = weights(policy.model)
    policy.train(batch(), NLLLossFn())
    for name, tensor in weights(policy.model).items():
        assert tensor.equal(before[name]) == name.startswith("model.visual."), name
    source = policy.weight_source()
    assert {s.name for s in source.specs() if not s.trainable} == {
        name for name in before if name.startswith("model.visual.")
    }
    scored = policy.get_logprobs(batch())["logprobs"]
    policy.save_checkpoint(tmp_path / "saved")
    policy.export_hf(tmp_path / "exported")
    for path in (tmp_path / "saved", tmp_path / "exported"):
        again = HuggingFacePolicy(str(path))
        assert again.get_logprobs(batch())["logprobs"].equal(scored)


def test_images_are_refused(tiny):
    policy = HuggingFacePolicy(str(tiny("qwen2_5_vl")))
    data = batch()
    data["pixel_values"] = torch.zeros(8, 3)
    with pytest.raises(DataError, match="the batch has pixel_values, but engines and policies"):
        policy.train(data, NLLLossFn())
    with pytest.raises(DataError, match="the batch has pixel_values, but engines and policies"):
        policy.generate(data)


def test_the_rows_of_a_loss_that_is_not_finite_are_named(tiny):
    with pytest.raises(TrainingError) as error:
        HuggingFacePolicy(str(tiny()), train_micro_batch_size=4).train(batch(), Faulty())
    assert error.value.details["rows"] == [0, 1, 2, 3]


def test_a_step_that_is_not_finite_is_skipped_where_so_configured(tiny):
    policy = HuggingFacePolicy(str(tiny()), non_finite="skip")
    before = weights(policy.model)
    result = policy.train(batch(), Faulty())
    assert result["skipped_steps"] == 1
    assert same(weights(policy.model), before)


def test_bfloat16_learns_from_steps_below_its_resolution(tiny):
    policy = HuggingFacePolicy(
        str(tiny()), torch_dtype="bfloat16", optimizer={"lr": 1e-4, "weight_decay": 0.0}
    )
    before = weights(policy.model)
    for _ in range(30):
        policy.train(batch(), NLLLossFn())
    exact = HuggingFacePolicy(str(tiny()), optimizer={"lr": 1e-4, "weight_decay": 0.0})
    start = weights(exact.model)
    for _ in range(30):
        exact.train(batch(), NLLLossFn())
    name = "model.layers.0.mlp.up_proj.weight"
    moved = (weights(policy.model)[name] - before[name]).float().norm()
    expected = (weights(exact.model)[name] - start[name]).norm()
    assert float(moved) == pytest.approx(float(expected), rel=0.2)


def test_float16_is_refused_for_training_alone(tiny):
    policy = HuggingFacePolicy(str(tiny()), torch_dtype="float16")
    policy.prepare_for_lp_inference()
    policy.get_logprobs(batch())
    policy.train(batch(), NLLLossFn(), eval_mode=True)
    policy.offload_after_refit()
    with pytest.raises(CapabilityError, match="loss scaling"):
        policy.train(batch(), NLLLossFn())


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
