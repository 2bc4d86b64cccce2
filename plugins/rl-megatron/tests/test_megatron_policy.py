"""One rank does what rl-hf does, whatever the model, the loss, and how rows are split."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import distributed as dist
from transformers import AutoModelForCausalLM

from rl_conformance.losses import LogitLikelihood, SequenceLikelihood
from rl_conformance.training import NegativeLogLikelihood, training_batch
from rl_core.batch import BatchedDataDict
from rl_core.errors import LifecycleError
from rl_hf.policy import HuggingFacePolicy
from rl_megatron.parallel import ParallelState
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
PACKED = {"sequence_packing": {"enabled": True, "train_mb_tokens": 40, "logprob_mb_tokens": 40}}
DYNAMIC = {"dynamic_batching": {"enabled": True, "train_mb_tokens": 96, "sequence_length_round": 8}}


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


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize(
    "loss", [NegativeLogLikelihood(), LogitLikelihood()], ids=["token", "logit"]
)
def test_a_step_does_not_depend_on_how_rows_are_split(tiny, built, family, loss):
    path, data, seen = str(tiny(family)), batch(), []
    for config in ({}, {"train_micro_batch_size": 1}, PACKED, DYNAMIC):
        policy = built(MegatronPolicy(path, **OPTIONS, **config))
        scores = policy.get_logprobs(data)["logprobs"]
        top = policy.get_topk_logits(data, 3)["topk_logits"]
        result = policy.train(data, loss)
        seen.append((scores, top, result, weights(policy)))
        policy.shutdown()
    for scores, top, result, tensors in seen[1:]:
        torch.testing.assert_close(scores, seen[0][0], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(top, seen[0][1], atol=1e-4, rtol=1e-4)
        for key in ("loss", "grad_norm"):
            assert result[key] == pytest.approx(seen[0][2][key], rel=1e-5)
        close(tensors, seen[0][3])


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("rows", [{}, PACKED], ids=["padded", "packed"])
def test_recompute_changes_no_gradient(tiny, built, family, dropout, rows):
    path, found = str(tiny(family, attention_dropout=dropout)), []
    for recompute in ("none", "full", "selective"):
        policy = built(MegatronPolicy(path, activation_recompute=recompute, **OPTIONS, **rows))
        results = [policy.train(batch(), NegativeLogLikelihood(), mbs=3) for _ in range(2)]
        found.append((results, weights(policy)))
        policy.shutdown()
    assert found[1][0] == found[0][0] == found[2][0]
    assert same(found[1][1], found[0][1])
    assert same(found[2][1], found[0][1])


def test_dropout_draws_from_the_policys_own_stream_and_anew_in_each_step(tiny, built):
    path, losses = str(tiny("llama", attention_dropout=0.3)), []
    for global_seed, seed in ((1, 5), (2, 5), (2, 6)):
        torch.manual_seed(global_seed)
        state = torch.get_rng_state()
        policy = built(MegatronPolicy(path, seed=seed, optimizer={"lr": 0.0}))
        losses.append([policy.train(batch(), NegativeLogLikelihood())["loss"] for _ in range(2)])
        assert torch.equal(torch.get_rng_state(), state)
        policy.shutdown()
    assert losses[0] == losses[1] != losses[2]
    assert losses[0][0] != losses[0][1]


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


@pytest.mark.parametrize("name", ["llama-llama3", "qwen2", "experts", "experts-tied"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_export_loads_in_transformers_bit_for_bit(tiny, built, tmp_path, name, dtype):
    family, more = MODELS[name]
    path = tiny(family, **more)
    policy = built(MegatronPolicy(str(path), torch_dtype=dtype, optimizer={"lr": 1e-2}))
    kind = getattr(torch, dtype)
    for step in range(2):
        policy.export_hf(tmp_path / str(step))
        if step == 0:  # what was read
            model = AutoModelForCausalLM.from_pretrained(path, dtype=kind)
            expected = {n: t for n, t in model.state_dict().items() if n in weights(policy)}
        else:
            expected = weights(policy)
        assert same(weights(policy), expected)
        model, info = AutoModelForCausalLM.from_pretrained(
            tmp_path / str(step), output_loading_info=True
        )
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        assert model.dtype == kind
        found = model.state_dict()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
        policy.train(batch(), NegativeLogLikelihood())


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


def test_steps_go_on_from_a_checkpoint_exactly(tiny, built, tmp_path):
    path = str(tiny("qwen3_moe", attention_dropout=0.3))
    for dtype in ("float32", "bfloat16"):
        options = {**OPTIONS, "torch_dtype": dtype}
        policy = built(MegatronPolicy(path, **options))
        policy.train(batch(), NegativeLogLikelihood())
        policy.save_checkpoint(tmp_path / dtype)
        other = built(MegatronPolicy(path, resume_from=str(tmp_path / dtype), **options))
        data = batch()
        assert policy.train(data, NegativeLogLikelihood()) == other.train(
            data, NegativeLogLikelihood()
        )
        assert same(weights(policy), weights(other))


@pytest.mark.parametrize("first", [0, 1])
def test_two_policies_live_side_by_side(tiny, built, first):
    policies = [
        built(MegatronPolicy(str(tiny(family)), **OPTIONS)) for family in ("llama", "qwen2")
    ]
    alone = built(HuggingFacePolicy(str(tiny(("llama", "qwen2")[1 - first])), **OPTIONS))
    for policy in policies:
        policy.train(batch(), NegativeLogLikelihood())
    alone.train(batch(), NegativeLogLikelihood())
    policies[first].shutdown()
    with pytest.raises(LifecycleError):
        policies[first].get_logprobs(batch())
    found, expected = (
        p.train(batch(), NegativeLogLikelihood())["loss"] for p in (policies[1 - first], alone)
    )
    assert found == pytest.approx(expected, rel=1e-5)
    policies[1 - first].shutdown()
    assert ParallelState._alive is None
    assert not dist.is_initialized()


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


def test_no_rows_that_count_take_no_step(tiny, built):
    policy, data = built(MegatronPolicy(str(tiny("qwen3_moe")), **OPTIONS)), batch()
    before = weights(policy)
    data["sample_mask"] = torch.zeros(8)
    assert policy.train(data, NegativeLogLikelihood())["skipped_steps"] == 1
    assert same(weights(policy), before)
    empty = BatchedDataDict({key: value[:0] for key, value in batch().items()})
    assert policy.get_logprobs(empty)["logprobs"].shape[0] == 0
