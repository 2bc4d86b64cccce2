"""A whole loop, and what it is told when it forgets something."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from rl_conformance.models import make_tiny_model
from rl_core import BatchedDataDict, DataError, LoopWarning, refit
from rl_core.errors import ConfigError
from rl_hf.generation import HuggingFaceGeneration
from rl_hf.policy import HuggingFacePolicy
from rl_losses import GRPOLossFn, NLLLossFn, training_batch

PROMPTS: BatchedDataDict[Any] = BatchedDataDict(
    {"input_ids": torch.tensor([[5, 6, 7], [8, 9, 4]]), "input_lengths": torch.tensor([3, 3])}
)
LOSS = GRPOLossFn(on_policy=True, reference_policy_kl_penalty=0.0)


@pytest.fixture
def pair(tiny):
    made = []

    def build(**config: Any) -> tuple[HuggingFacePolicy, HuggingFaceGeneration]:
        policy = HuggingFacePolicy(str(tiny()), reference="none")
        engine = HuggingFaceGeneration(str(tiny()), max_new_tokens=3, seed=0, **config)
        engine.prepare_for_generation()
        made.extend((policy, engine))
        return policy, engine

    yield build
    for backend in made:
        backend.shutdown()


def rollout(engine: Any) -> BatchedDataDict[Any]:
    return training_batch(engine.generate(PROMPTS), [1, 0], advantages=[1.0, -1.0])


def test_a_policy_that_generates_itself_needs_no_refit(pair):
    policy, _ = pair()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            policy.train(rollout(policy), LOSS)


def test_a_refit_warns_of_another_temperature(pair):
    policy, engine = pair(temperature=0.7)
    with pytest.warns(LoopWarning, match=r"temperature 0\.7") as said:
        refit(policy, engine)
    assert said[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        refit(policy, engine)


@pytest.mark.parametrize("loss_fn", [LOSS, NLLLossFn()])
def test_generation_output_is_scored_but_not_trained_on(pair, loss_fn):
    policy, engine = pair()
    output = engine.generate(PROMPTS)
    before = policy.get_logprobs(output)["logprobs"]
    with pytest.raises(DataError, match="training_batch"):
        policy.train(output, loss_fn)
    batch = training_batch(output, advantages=[1.0, -1.0])
    del batch["token_mask"]
    with pytest.raises(DataError, match="tokens of prompts would be trained"):
        policy.train(batch, loss_fn)
    assert torch.equal(policy.get_logprobs(output)["logprobs"], before)


def test_what_a_tokenizer_returns_is_scored_and_generated_from(pair):
    policy, engine = pair()
    tokenizer = policy.tokenizer
    encoded = tokenizer(["ab", "cde"], return_tensors="pt", padding=True, padding_side="right")
    assert engine.generate(encoded)["output_ids"].shape[0] == 2
    assert policy.get_logprobs(encoded)["logprobs"].shape == encoded["input_ids"].shape
    with pytest.raises(DataError, match="not a list of str"):
        policy.get_logprobs(["ab"])
    with pytest.raises(ConfigError, match=r"NLLLossFn\(\)"):
        policy.train(encoded, NLLLossFn)


def test_a_loss_of_another_library_trains(pair):
    policy, engine = pair()
    batch = rollout(engine)

    def nll(data, global_valid_seqs, global_valid_toks, next_token_logprobs):
        mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
        return -(next_token_logprobs * mask).sum() / global_valid_toks, {}

    theirs = policy.train(batch, nll, eval_mode=True)["loss"]
    assert theirs == pytest.approx(policy.train(batch, NLLLossFn(), eval_mode=True)["loss"])


@pytest.mark.parametrize("packed", [True, False])
def test_an_engine_that_computes_another_model_is_warned_of_when_its_rows_are_scored(
    tiny, tmp_path, packed
):
    """Of the same weights, and with options that look the same."""
    rope = {"rope_type": "default", "rope_theta": 50.0}
    other = make_tiny_model(tmp_path, rope_parameters=rope)
    policy = HuggingFacePolicy(str(tiny()), sequence_packing={"enabled": packed})
    engine = HuggingFaceGeneration(str(other), max_new_tokens=8, seed=0)
    same = HuggingFaceGeneration(str(tiny()), max_new_tokens=8, seed=0, torch_dtype="bfloat16")
    for one in (engine, same):
        one.prepare_for_generation()
        refit(policy, one)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        policy.get_logprobs(same.generate(PROMPTS))
    with pytest.warns(LoopWarning, match="the two compute different models") as said:
        policy.get_logprobs(engine.generate(PROMPTS))
    assert said[0].filename == __file__
    for backend in (policy, engine, same):
        backend.shutdown()
