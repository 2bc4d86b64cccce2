"""Adapters: only they learn, the reference is the base, a refit sends merged weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rl_backends.base_weights import BASE
from rl_backends.tensors import NamedTensorSource
from rl_conformance.outcome import Status
from rl_conformance.run import run, select
from rl_conformance.settings import Settings
from rl_conformance.target import Target
from rl_core.batch import BatchedDataDict
from rl_core.errors import CapabilityError, ConfigError
from rl_hf import lora
from rl_hf.policy import HuggingFacePolicy
from rl_losses import NLLLossFn


def batch() -> BatchedDataDict[Any]:
    ids = torch.randint(3, 272, (4, 12), generator=torch.Generator().manual_seed(7))
    return BatchedDataDict({"input_ids": ids, "input_lengths": torch.tensor([12, 3, 7, 9])})


def with_adapters(path: Any, *, refit: str = "merged", **config: Any) -> HuggingFacePolicy:
    targets = config.pop("target_modules", "all-linear")
    lora = {"r": 4, "alpha": 8.0, "target_modules": targets, "refit": refit}
    return HuggingFacePolicy(str(path), lora=lora, optimizer={"lr": 1e-2}, **config)


def test_adapters_that_no_engine_serves_are_refused_when_the_policy_is_built(tiny):
    with pytest.raises(CapabilityError, match=r"embed_tokens.*Embedding"):
        with_adapters(tiny("llama"), refit="adapter", target_modules=["embed_tokens"])


def test_only_merged_weights_are_declared_as_trainable(tiny):
    specs = with_adapters(tiny()).weight_source().specs()
    assert all(spec.trainable == spec.name.endswith("proj.weight") for spec in specs)


def test_adapters_of_a_model_of_images_are_in_its_language_model_alone(tiny):
    policy = with_adapters(tiny("qwen2_5_vl"))
    trained = [name for name, p in policy.model.named_parameters() if p.requires_grad]
    assert trained
    assert all(".language_model.layers." in name for name in trained)


def test_a_refit_of_adapters_alone_tells_the_digests_of_what_it_does_not_send(tiny):
    merged = with_adapters(tiny()).prepare_refit_info()
    alone = with_adapters(tiny(), refit="adapter").prepare_refit_info()
    assert alone[BASE].keys() == {tensor["name"] for tensor in merged["tensors"]}
    assert BASE not in merged


def test_only_adapters_learn(tiny):
    policy = with_adapters(tiny())
    before = {name: tensor.clone() for name, tensor in policy.model.named_parameters()}
    policy.train(batch(), NLLLossFn())
    moved = {n for n, p in policy.model.named_parameters() if not torch.equal(p, before[n])}
    assert moved
    assert all("lora_" in name for name in moved)


def test_the_reference_is_the_base_model_bit_for_bit(tiny):
    plain = HuggingFacePolicy(str(tiny())).get_logprobs(batch())["logprobs"]
    policy = with_adapters(tiny())
    policy.train(batch(), NLLLossFn())
    trained = policy.get_logprobs(batch())["logprobs"]
    found = policy.get_reference_policy_logprobs(batch())["reference_logprobs"]
    assert torch.equal(found, plain)
    assert torch.equal(policy.get_logprobs(batch())["logprobs"], trained)
    assert all(p.requires_grad == ("lora_" in n) for n, p in policy.model.named_parameters())


def test_packed_rows_reach_the_adapters(tiny):
    packing = {"sequence_packing": {"enabled": True, "train_mb_tokens": 20}}
    losses = []
    for config in ({}, packing):
        policy = with_adapters(tiny(), **config)
        losses.append([policy.train(batch(), NLLLossFn())["loss"] for _ in range(3)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_adapters_start_from_the_seed_and_leave_the_global_random_state(tiny):
    state = torch.get_rng_state()
    made = [with_adapters(tiny(), seed=seed).model.state_dict() for seed in (1, 1, 2)]
    name = next(name for name in made[0] if "lora_A" in name)
    assert torch.equal(made[0][name], made[1][name])
    assert not torch.equal(made[0][name], made[2][name])
    assert torch.equal(torch.get_rng_state(), state)


def test_target_modules_that_are_not_there_are_named(tiny):
    with pytest.raises(ConfigError, match="no_proj"):
        HuggingFacePolicy(str(tiny()), lora={"target_modules": ["no_proj"]})


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize("module", ["lm_head", "embed_tokens"])
def test_adapters_on_tied_modules_are_refused(tiny, module):
    with pytest.raises(ConfigError, match="share one weight"):
        HuggingFacePolicy(str(tiny("qwen2")), lora={"r": 4, "target_modules": [module]})


def test_the_suite_notices_adapters_that_are_merged_twice(monkeypatch):
    once = lora._active
    monkeypatch.setattr(lora, "_active", lambda name, layer: 2 * once(name, layer))
    checks = select([], "adapters and (R1 or P9)")
    report = run(Target.find("hf"), Settings(), checks, selection="adapters")
    assert len(checks) == 4
    assert {outcome.status for outcome in report.outcomes} == {Status.FAILED}


def test_the_suite_notices_adapters_that_are_sent_without_their_scale(monkeypatch):
    monkeypatch.setattr(lora.AdapterWeightSource, "tensors", NamedTensorSource.tensors)
    checks = select([], "R1 and sent_alone")
    report = run(Target.find("hf"), Settings(), checks, selection="adapters")
    assert [outcome.status for outcome in report.outcomes] == [Status.FAILED]
