"""The policy scores: log-probs, reference, top-k logits, FP8 scales, rewards, generation."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from rl_conformance.oracle import Oracle
from rl_core.batch import BatchedDataDict
from rl_core.errors import CapabilityError, ConfigError, DataError, DeadlineError, LifecycleError
from rl_hf.policy import HuggingFacePolicy
from rl_losses import NLLLossFn

LENGTHS = (20, 3, 1, 7, 16, 5)
PACKED = {"enabled": True, "train_mb_tokens": 30}


def batch(lengths: tuple[int, ...] = LENGTHS, width: int = 24) -> BatchedDataDict[Any]:
    ids = torch.randint(3, 272, (len(lengths), width), generator=torch.Generator().manual_seed(7))
    rows = torch.tensor(lengths)
    ids[torch.arange(width) >= rows[:, None]] = 0
    return BatchedDataDict({"input_ids": ids, "input_lengths": rows})


WINDOW = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}


@pytest.mark.parametrize(
    ("family", "of_model", "config"),
    [(family, {}, {"attn_implementation": "eager"}) for family in ("llama", "qwen2", "qwen3")]
    + [(family, {}, {}) for family in ("llama", "qwen2", "qwen3", "qwen2_5_vl")]
    + [("qwen2", WINDOW, {})],
)
def test_packed_rows_equal_the_plain_forward_pass(tiny, family, of_model, config):
    path, data = tiny(family, **of_model), batch()
    policy = HuggingFacePolicy(str(path), temperature=0.7, sequence_packing=PACKED, **config)
    expected = Oracle(path).batch_logprobs(data["input_ids"], data["input_lengths"], 0.7)
    for size in (None, 1, 4):
        scores = policy.get_logprobs(data, size)["logprobs"]
        torch.testing.assert_close(scores, expected, atol=1e-4, rtol=0)


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


def test_padding_width_and_what_stands_in_it_do_not_matter(tiny):
    policy = HuggingFacePolicy(str(tiny()))
    narrow, wide = batch(width=20), batch(width=20)
    wide["input_ids"] = torch.cat([wide["input_ids"], torch.full((6, 9), -100)], 1)
    a, b = policy.get_logprobs(narrow)["logprobs"], policy.get_logprobs(wide)["logprobs"]
    assert torch.equal(a, b[:, :20])
    assert not b[:, 20:].any()


def test_an_empty_batch_gives_an_empty_result(tiny):
    data = BatchedDataDict(
        {"input_ids": torch.zeros(0, 5, dtype=torch.int64), "input_lengths": torch.zeros(0).long()}
    )
    assert HuggingFacePolicy(str(tiny())).get_logprobs(data)["logprobs"].shape == (0, 5)


@pytest.mark.parametrize("reference", ["swap", "copy"])
def test_a_failing_reference_call_leaves_weights_and_modes(tiny, reference, monkeypatch):
    policy = HuggingFacePolicy(str(tiny()), reference=reference, optimizer={"lr": 1e-2})
    data = batch()
    policy.train(data, NLLLossFn())
    before = {name: tensor.clone() for name, tensor in policy.model.state_dict().items()}

    def fail(*_: object) -> None:
        raise RuntimeError("a fault in the forward pass")

    monkeypatch.setattr("rl_hf.forward.Forward.logprobs", fail)
    with pytest.raises(RuntimeError, match="a fault"):
        policy.get_reference_policy_logprobs(data)
    assert torch.is_grad_enabled()
    for name, tensor in policy.model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_without_a_reference_asking_for_it_is_refused(tiny):
    policy = HuggingFacePolicy(str(tiny()), reference="none")
    with pytest.raises(CapabilityError, match="no reference"):
        policy.get_reference_policy_logprobs(batch())


def test_more_than_the_vocabulary_is_no_topk(tiny):
    with pytest.raises(DataError, match="272 tokens"):
        HuggingFacePolicy(str(tiny())).get_topk_logits(batch(), 273)


def test_fp8_scales_do_not_depend_on_microbatches_and_fall_with_the_percentile(tiny):
    policy, data = HuggingFacePolicy(str(tiny())), batch()
    whole = policy.calibrate_qkv_fp8_scales(data, 6, percentile=90, include_q=True)
    split = policy.calibrate_qkv_fp8_scales(data, 1, percentile=90, include_q=True)
    top = policy.calibrate_qkv_fp8_scales(data, percentile=100, include_q=True)
    for layer, scales in whole["layers"].items():
        for kind, scale in scales.items():
            assert split["layers"][layer][kind] == pytest.approx(scale, rel=0.01)
            assert scale < top["layers"][layer][kind]


def test_rewards_come_from_each_rows_last_token(tmp_path: Path):
    config = transformers.LlamaConfig(
        vocab_size=272,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_labels=1,
        pad_token_id=0,
    )
    model = transformers.LlamaForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path)
    packing, data = HuggingFacePolicy(str(tmp_path), sequence_packing=PACKED), batch()
    policy = HuggingFacePolicy(str(tmp_path))
    data["input_ids"][0, 19] = 0  # the pad token as a real one
    scores = policy.score(data)["scores"]
    torch.testing.assert_close(packing.score(data)["scores"], scores)
    for row, length in enumerate(LENGTHS):
        hidden = model.model(data["input_ids"][row : row + 1, :length]).last_hidden_state
        torch.testing.assert_close(scores[row], model.score(hidden[0, -1])[0])
    with pytest.raises(CapabilityError, match="language model"):
        policy.get_logprobs(data)


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
    data = batch((4, 300), width=300)
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
