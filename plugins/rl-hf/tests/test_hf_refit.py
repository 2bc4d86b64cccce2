"""A policy whose parameters engines read in place stays the policy that it was."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from module_weights import weights
from prompt_rows import random_prompts
from simple_pair import same
from torch import nn

from rl_backends.torch.reference import make_reference
from rl_core.errors import ConfigError
from rl_core.weights import refit
from rl_hf.generation import HuggingFaceGeneration
from rl_hf.placement import Placement
from rl_hf.policy import HuggingFacePolicy
from rl_losses import NLLLossFn

OPTIONS: dict[str, Any] = {"optimizer": {"lr": 1e-3}}
LORA = {"r": 4, "alpha": 8.0, "target_modules": "all-linear"}


def train(policy: HuggingFacePolicy) -> float:
    return policy.train(random_prompts(12, 3, 7, 9), NLLLossFn())["loss"]


@pytest.fixture
def engine(tiny) -> Iterator[HuggingFaceGeneration]:
    engine = HuggingFaceGeneration(str(tiny(seed=1)), max_new_tokens=4)
    engine.prepare_for_generation()
    yield engine
    engine.shutdown()


@pytest.fixture
def moved(tiny, engine) -> Iterator[HuggingFacePolicy]:
    """A policy after a direct refit."""
    policy = HuggingFacePolicy(str(tiny()), **OPTIONS)
    assert refit(policy, engine).mode == "direct"
    yield policy
    policy.shutdown()


def test_the_parameters_stay_the_same_objects(tiny, engine):
    policy = HuggingFacePolicy(str(tiny()), **OPTIONS)
    before = dict(policy.model.named_parameters())
    refit(policy, engine)
    assert all(before[name] is p for name, p in policy.model.named_parameters())
    assert policy.model.lm_head.weight is policy.model.get_input_embeddings().weight
    policy.shutdown()


def test_a_copy_of_the_model_has_memory_of_its_own(moved):
    other = copy.deepcopy(moved.model)
    before = weights(moved.model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert same(weights(moved.model), before)


def test_adapters_are_merged_on_the_fly_and_cannot_be_read_in_place(tiny, engine):
    policy = HuggingFacePolicy(str(tiny()), lora=LORA, optimizer={"lr": 1e-2})
    with pytest.raises(ConfigError, match="computes its tensors during the refit"):
        refit(policy, engine, mode="direct")
    assert refit(policy, engine).mode == "packed"
    policy.shutdown()


def test_who_reads_the_weights_is_told_when_they_leave_their_device():
    told: list[str] = []
    model = nn.Linear(2, 2)
    reference = make_reference("none", model)
    elsewhere = Placement(
        model, torch.device("cuda"), spread=False, left=lambda: told.append("left")
    )
    elsewhere.model_to_host(reference)
    assert told == ["left"]
    here = Placement(model, torch.device("cpu"), spread=False, left=lambda: told.append("stays"))
    here.model_to_host(reference)
    assert told == ["left"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_offloading_frees_the_memory_that_engines_read(tiny, allocated):
    path = str(tiny(hidden_size=512, num_layers=4))
    for _ in range(2):  # the first leaves what torch and the hash keep for all that follow
        before, kept = allocated(), []
        policy = HuggingFacePolicy(path, device="cuda", **OPTIONS)
        engine = HuggingFaceGeneration(path, device="cuda")
        for _ in range(2):
            policy.prepare_for_training()
            train(policy)
            engine.prepare_for_generation()
            assert refit(policy, engine).mode == "direct"
            assert same(weights(engine._model), weights(policy.model))
            policy.offload_after_refit()
            engine.finish_generation()
            kept.append(allocated() - before)
        policy.shutdown()
        engine.shutdown()
    assert max(kept) < 1 << 20
