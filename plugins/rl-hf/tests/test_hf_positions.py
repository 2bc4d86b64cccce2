"""Models whose positions depend on the longest row of a pass: a row is scored as it is alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from prompt_rows import random_prompts

from rl_conformance.models import make_tiny_model
from rl_conformance.oracle import Oracle
from rl_hf.generation import HuggingFaceGeneration
from rl_hf.policy import HuggingFacePolicy
from rl_hf.positions import sharing_limit
from rl_losses import NLLLossFn

BOUNDARY = 32
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": BOUNDARY,
    "short_factor": [1.0] * 16,
    "long_factor": [1.0 + 0.5 * i for i in range(16)],
    "factor": 4.0,
}
LENGTHS = (10, 60, 32, 12, 33, 40)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("longrope") / "model"
    return make_tiny_model(folder, "llama", max_position_embeddings=128, rope_parameters=LONGROPE)


PACKING = pytest.mark.parametrize("packing", [True, False])


@PACKING
def test_rows_of_both_kinds_are_scored_as_each_alone(path, packing):
    data, oracle = random_prompts(*LENGTHS), Oracle(path)
    policy = HuggingFacePolicy(str(path), sequence_packing={"enabled": packing})
    expected = oracle.batch_logprobs(data["input_ids"], data["input_lengths"])
    for size in (None, 1, 4):
        got = policy.get_logprobs(data, size)["logprobs"]
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
    top = policy.get_topk_logits(data, 5)
    for row, length in enumerate(LENGTHS):
        best = oracle.logits(data["input_ids"][row, :length].tolist())[:-1].topk(5)
        found = top["topk_logits"][row]
        torch.testing.assert_close(found[: length - 1], best.values, atol=1e-4, rtol=0)
        assert torch.equal(top["topk_indices"][row, : length - 1], best.indices)
        assert not found[length - 1 :].any()


@PACKING
def test_a_step_is_that_of_each_row_alone(path, packing):
    data, oracle = random_prompts(*LENGTHS), Oracle(path)
    data["token_mask"] = (torch.arange(60) < data["input_lengths"][:, None]).float()
    data["token_mask"][:, 0] = 0
    policy = HuggingFacePolicy(str(path), sequence_packing={"enabled": packing})
    result = policy.train(data, NLLLossFn())
    loss, norm = oracle.nll(data["input_ids"], data["input_lengths"], data["token_mask"])
    assert float(result["loss"]) == pytest.approx(loss, rel=1e-4)
    assert float(result["grad_norm"]) == pytest.approx(norm, rel=1e-3)


def test_a_row_ends_where_its_tokens_would_be_scored_otherwise(path, caplog):
    engine = HuggingFaceGeneration(str(path), max_new_tokens=8)
    assert "rows of more than 32 tokens" in caplog.text
    engine.prepare_for_generation()
    data = random_prompts(10, 28, 60, 32, 33)
    out = engine.generate(data, greedy=True)
    assert out["generation_lengths"].tolist()[1:] == [4, 8, 0, 8]
    assert out["truncated"].tolist()[1:] == [True] * 4
    ends = out["unpadded_sequence_lengths"]
    expected = Oracle(path).batch_logprobs(out["output_ids"], ends)
    expected[torch.arange(expected.shape[1]) < data["input_lengths"][:, None]] = 0
    torch.testing.assert_close(out["logprobs"], expected, atol=1e-3, rtol=0)
    scored = HuggingFacePolicy(str(path)).get_logprobs(out)["logprobs"]
    scored[expected == 0] = 0
    torch.testing.assert_close(scored, out["logprobs"], atol=1e-3, rtol=0)


def test_other_models_have_no_such_boundary(tiny, path):
    load = transformers.AutoModelForCausalLM.from_pretrained
    assert sharing_limit(load(tiny("qwen3")).eval()) is None
    model = load(path).eval()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    assert sharing_limit(model) == BOUNDARY
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name]), name
