"""The policy scores: log-probs, reference, top-k logits, FP8 scales, rewards, generation."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from prompt_rows import random_prompts

from rl_core.batch import BatchedDataDict
from rl_core.errors import CapabilityError, ConfigError, DataError, DeadlineError, LifecycleError
from rl_hf.policy import HuggingFacePolicy

LENGTHS = (20, 3, 1, 7, 16, 5)
batch = partial(random_prompts, *LENGTHS, width=24)
PACKED = {"enabled": True, "train_mb_tokens": 30}


def test_a_model_that_lets_packed_rows_see_each_other_packs_only_if_asked_and_is_refused(
    tmp_path: Path, caplog
):
    """Also where the weights are so small that it hardly shows in log-probs."""
    config = transformers.MambaConfig(
        vocab_size=272, hidden_size=32, num_hidden_layers=1, state_size=4
    )
    transformers.MambaForCausalLM(config).save_pretrained(tmp_path)
    policy = HuggingFacePolicy(str(tmp_path))
    assert not policy.microbatching.packed
    assert "MambaForCausalLM pads the rows of a microbatch" in caplog.text
    data = batch()
    ids = data["input_ids"][:1, : LENGTHS[0]]
    with torch.no_grad():
        logits = policy.model(input_ids=ids).logits[0, :-1].log_softmax(-1)
    expected = logits.gather(-1, ids[0, 1:, None])[:, 0]
    found = policy.get_logprobs(data)["logprobs"][0, 1 : LENGTHS[0]]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    with pytest.raises(CapabilityError, match="attend to each other"):
        HuggingFacePolicy(str(tmp_path), sequence_packing=PACKED)


@pytest.mark.parametrize(
    ("config", "packs"),
    [
        ({}, True),
        ({"train_micro_batch_size": 2}, True),
        ({"sequence_packing": {"train_mb_tokens": 64}}, True),
        ({"sequence_packing": {"enabled": False}}, False),
        ({"dynamic_batching": {"enabled": True}}, False),
    ],
    ids=["nothing", "rows", "tokens", "off", "dynamic"],
)
def test_rows_are_packed_unless_something_else_is_configured(tiny, config, packs):
    policy = HuggingFacePolicy(str(tiny()), **config)
    assert policy.microbatching.packed is packs
    assert policy.config["sequence_packing"]["enabled"] is packs


@pytest.mark.parametrize(
    ("config", "lengths", "shape"),
    [
        ({}, [8, 7, 8, 8], [4, 8]),
        ({}, [60, 1, 1, 1], [1, 63]),
        ({"sequence_packing": {"enabled": True}}, [8, 7, 8, 8], [1, 31]),
    ],
    ids=["nearly equal", "ragged", "asked for"],
)
def test_rows_are_packed_where_padding_costs_more_or_where_it_is_asked_for(
    tiny, config, lengths, shape
):
    policy = HuggingFacePolicy(str(tiny()), **config)
    shapes = []
    policy.model.get_input_embeddings().register_forward_pre_hook(
        lambda _module, args: shapes.append(list(args[0].shape))
    )
    ids = torch.randint(3, 270, (4, max(lengths)), generator=torch.Generator().manual_seed(0))
    policy.get_logprobs(BatchedDataDict({"input_ids": ids, "input_lengths": torch.tensor(lengths)}))
    assert shapes == [shape]


def test_without_a_reference_asking_for_it_is_refused(tiny):
    policy = HuggingFacePolicy(str(tiny()), reference="none")
    with pytest.raises(CapabilityError, match="no reference"):
        policy.get_reference_policy_logprobs(batch())


def test_more_than_the_vocabulary_is_no_topk(tiny):
    with pytest.raises(DataError, match="272 tokens"):
        HuggingFacePolicy(str(tiny())).get_topk_logits(batch(), 273)


def test_a_language_model_does_not_score(tiny):
    with pytest.raises(CapabilityError, match="one label"):
        HuggingFacePolicy(str(tiny())).score(batch())


def test_after_a_call_that_took_too_long_the_model_is_the_policys_again(tiny):
    generation = {"max_new_tokens": 10_000, "eos_token_id": [], "call_deadline_s": 0.3}
    policy = HuggingFacePolicy(str(tiny(max_position_embeddings=20_000)), generation=generation)
    expected = HuggingFacePolicy(str(tiny(max_position_embeddings=20_000))).get_logprobs(batch())
    policy.model.train()
    with pytest.raises(DeadlineError, match=r"0\.3 s"):
        policy.generate(batch())
    assert policy.model.training
    # Nothing computes with it any more.
    seen = []
    handle = policy.model.register_forward_pre_hook(lambda *_: seen.append(1))
    time.sleep(0.3)
    handle.remove()
    assert not seen
    assert torch.equal(policy.get_logprobs(batch())["logprobs"], expected["logprobs"])


@pytest.mark.parametrize(
    ("change", "row", "words"),
    [
        ({"input_lengths": torch.tensor([20, 3, 0, 7, 16, 5])}, 2, "length 0"),
        ({"input_lengths": torch.tensor([20, 3, 1, 99, 16, 5])}, 3, "width"),
        ({"input_ids": torch.full((6, 24), 272)}, 0, "vocabulary of 272"),
        ({"attention_mask": torch.ones(6, 24)}, 0, "disagree"),
    ],
)
def test_a_wrong_row_is_named(tiny, change, row, words):
    with pytest.raises(DataError, match=words) as error:
        HuggingFacePolicy(str(tiny())).get_logprobs(BatchedDataDict({**batch(), **change}))
    assert error.value.details["row"] == row


def test_a_row_past_the_context_is_named(tiny):
    data = random_prompts(4, 300)
    with pytest.raises(DataError, match="row 1 has 300 tokens, but the context has 256"):
        HuggingFacePolicy(str(tiny())).get_logprobs(data)


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"learning_rate": 1e-3}, "learning_rate"),
        ({"optimizer": {"lr": "fast"}}, "optimizer.lr"),
        ({"generation": {"max_new_token": 3}}, "max_new_token"),
        ({"scheduler": {"name": "cosine"}}, "scheduler.total_steps"),
        ({"load_in_8bit": True}, "load_in_8bit"),
        (
            {"sequence_packing": {"enabled": True}, "dynamic_batching": {"enabled": True}},
            "sequence_packing",
        ),
    ],
)
def test_a_wrong_configuration_names_its_key(tiny, config, key):
    with pytest.raises(ConfigError) as error:
        HuggingFacePolicy(str(tiny()), **config)
    assert error.value.details["key"] == key


def test_after_shutdown_calls_are_refused_and_shutdown_is_not(tiny):
    policy = HuggingFacePolicy(str(tiny()))
    assert policy.shutdown()
    assert policy.shutdown()
    for refused in (lambda: policy.get_logprobs(batch()), policy.weight_source):
        with pytest.raises(LifecycleError, match="after shutdown"):
            refused()
