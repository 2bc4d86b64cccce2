"""One rank does what rl-hf does, whatever the model, the loss, and how rows are split."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import distributed as dist

from rl_conformance.losses import LogitLikelihood, SequenceLikelihood
from rl_conformance.training import NegativeLogLikelihood, training_batch
from rl_core.batch import BatchedDataDict
from rl_hf.policy import HuggingFacePolicy
from rl_megatron.policy import MegatronPolicy

# A large eps: some biases have no gradient but rounding, which Adam would blow up to its rate.
OPTIONS: dict[str, Any] = {
    "optimizer": {"lr": 1e-3, "weight_decay": 0.1, "eps": 1e-3},
    "temperature": 0.8,
}
ROPE = {"factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e4}
BANDS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-linear": ("llama", {"rope_parameters": {**ROPE, "rope_type": "linear"}}),
    "llama-llama3": ("llama", {"rope_parameters": {**ROPE, **BANDS, "rope_type": "llama3"}}),
    "llama-yarn": ("llama", {"rope_parameters": {**ROPE, "rope_type": "yarn"}}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-odd": ("llama", {"vocab_size": 269, "num_key_value_heads": 1, "head_dim": 24}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "experts": ("qwen3_moe", {}),
    "experts-not-normalised": ("qwen3_moe", {"norm_topk_prob": False}),
    "experts-tied": ("qwen3_moe", {"tie_word_embeddings": True, "num_experts_per_tok": 4}),
}


def batch(**extra: Any) -> BatchedDataDict[Any]:
    return training_batch((12, 3, 30, 1, 17, 8, 2, 21), **extra)


def weights(policy: Any) -> dict[str, torch.Tensor]:
    source = policy.weight_source()
    try:
        names = [spec.name for spec in source.specs() if spec.alias_of is None]
        return {name: tensor.clone() for name, tensor in source.tensors(names)}
    finally:
        source.close()


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], atol: float = 2e-5) -> None:
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        torch.testing.assert_close(tensor, b[name], atol=atol, rtol=1e-4, msg=name)


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
def test_scores_and_steps_are_those_of_rl_hf(tiny, built, name):
    family, more = MODELS[name]
    path = str(tiny(family, **more))
    mine, other = (built(c(path, **OPTIONS)) for c in (MegatronPolicy, HuggingFacePolicy))
    data = batch()
    for _ in range(2):
        found, expected = (p.get_logprobs(data)["logprobs"] for p in (mine, other))
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        found, expected = (p.get_topk_logits(data, 5) for p in (mine, other))
        for key in found:
            torch.testing.assert_close(found[key], expected[key], atol=1e-4, rtol=1e-4)
        for loss in (NegativeLogLikelihood(), SequenceLikelihood(), LogitLikelihood()):
            found, expected = (p.train(data, loss, mbs=3) for p in (mine, other))
            for key in ("loss", "grad_norm"):
                assert found[key] == pytest.approx(expected[key], rel=2e-5), (loss, key)
    close(weights(mine), weights(other))
    found, expected = (p.get_reference_policy_logprobs(data) for p in (mine, other))
    key = "reference_logprobs"
    torch.testing.assert_close(found[key], expected[key], atol=1e-4, rtol=1e-4)


def test_what_dropout_keeps_is_scaled_up(tiny, built):
    """Over many draws, the loss is near the one without dropout, and gradients flow."""
    plain = built(MegatronPolicy(str(tiny("llama", weight_scale=2.0))))
    path = str(tiny("llama", weight_scale=2.0, attention_dropout=0.1))
    policy = built(MegatronPolicy(path, optimizer={"lr": 0.0}))
    data = batch()
    losses = torch.tensor([policy.train(data, NegativeLogLikelihood())["loss"] for _ in range(20)])
    expected = plain.train(data, NegativeLogLikelihood(), eval_mode=True)["loss"]
    assert losses.std() > 0
    assert abs(losses.mean() - expected) < 5 * losses.std() / 20**0.5 + 0.02
    scored = policy.train(data, NegativeLogLikelihood(), eval_mode=True)["loss"]
    assert scored == pytest.approx(expected, rel=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_bfloat16_weights_are_float32_masters_rounded(tiny, built, family):
    path = str(tiny(family))
    options = {"optimizer": {"lr": 1e-5, "eps": 1e-3}, "torch_dtype": "bfloat16"}
    mine, other = (built(c(path, **options)) for c in (MegatronPolicy, HuggingFacePolicy))
    data = batch()
    found, expected = (p.get_logprobs(data)["logprobs"] for p in (mine, other))
    assert (found - expected).abs().mean() < 0.1
    start = {name: p.detach().clone() for name, p in mine._module.named_parameters()}
    for _ in range(4):
        found, expected = (p.train(data, NegativeLogLikelihood())["loss"] for p in (mine, other))
        assert found == pytest.approx(expected, rel=2e-2)
    masters = mine._stepping.masters
    for name, parameter in mine._module.named_parameters():
        assert parameter.dtype == torch.bfloat16
        assert masters[name].dtype == torch.float32
        assert torch.equal(parameter.flatten(), masters[name].bfloat16())
    moved = [name for name in start if not torch.equal(masters[name], start[name].float())]
    assert set(moved) == set(start)  # steps that the weights are too coarse for are not lost
    assert {spec.dtype for spec in mine.weight_source().specs()} == {"bfloat16"}


def test_an_export_in_several_files_is_whole(tiny, built, tmp_path, monkeypatch):
    monkeypatch.setattr("rl_megatron.checkpoint.FILE_BYTES", 200_000)
    policy = built(MegatronPolicy(str(tiny())))
    policy.export_hf(tmp_path / "out")
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert same(found, weights(policy))
    again = built(MegatronPolicy(str(tmp_path / "out")))
    assert same(weights(again), weights(policy))


def test_a_process_group_of_the_user_stays(tiny, built):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        policy = built(MegatronPolicy(str(tiny())))
        policy.train(batch(), NegativeLogLikelihood())
        policy.shutdown()
        assert dist.is_initialized()
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [1, 1]
        again = built(MegatronPolicy(str(tiny())))
        again.shutdown()
        again.shutdown()
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()
