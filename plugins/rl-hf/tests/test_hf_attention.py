"""The attention that a model gets by default gives what the model's own does."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from prompt_rows import random_prompts
from transformers.models.gemma2.modeling_gemma2 import Gemma2PreTrainedModel

from rl_backends.torch.slots import segment_mask
from rl_conformance.models import make_tiny_model
from rl_conformance.oracle import Oracle
from rl_core.errors import CapabilityError, ConfigError
from rl_hf import attention
from rl_hf.attention import SEGMENTS, segment_attention
from rl_hf.generation import HuggingFaceGeneration
from rl_hf.own_attention import TOKENS, compare_attention
from rl_hf.policy import HuggingFacePolicy

LENGTHS = (20, 3, 1, 37, 16, 5)
GEMMA2 = {"model_type": "gemma2", "head_dim": 32, "tie_word_embeddings": True}
#: Options of attention that torch's fused kernels do not have, or that a packed row would miscount.
KINDS: dict[str, dict[str, Any]] = {
    "soft cap": {**GEMMA2, "attn_logit_softcapping": 1.0, "query_pre_attn_scalar": 1},
    "soft cap and window": {**GEMMA2, "attn_logit_softcapping": 1.0, "sliding_window": 7},
    "sinks and window": {
        "model_type": "gpt_oss",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 32,
        "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "window": {"model_type": "mistral", "sliding_window": 7},
    "window of the mask alone": {
        "model_type": "phimoe",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 30,
    },
    "chunks": {
        "model_type": "llama4_text",
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "head_dim": 32,
        "intermediate_size_mlp": 256,
        "attention_chunk_size": 48,
        "layer_types": ["chunked_attention", "full_attention"],
        "no_rope_layers": [1, 0],
        "moe_layers": [1],
    },
    "scaling": {"model_type": "granite", "attention_multiplier": 0.5},
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    paths: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in paths:
            folder = tmp_path_factory.mktemp("attention") / "model"
            paths[kind] = make_tiny_model(folder, "llama", weight_scale=5.0, **KINDS[kind])
        return paths[kind]

    return make


def loaded(path: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(path).eval()


@pytest.mark.parametrize("packing", [{}, {"sequence_packing": {"enabled": False}}])
@pytest.mark.parametrize("kind", KINDS)
def test_a_policy_scores_as_the_models_own_attention_does(made, kind, packing):
    path, data = made(kind), random_prompts(*LENGTHS)
    policy = HuggingFacePolicy(str(path), **packing)
    expected = Oracle(path).batch_logprobs(data["input_ids"], data["input_lengths"])
    torch.testing.assert_close(policy.get_logprobs(data)["logprobs"], expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_generates_as_the_models_own_attention_does(made, kind):
    path, data = made(kind), random_prompts(*LENGTHS)
    engine = HuggingFaceGeneration(str(path), max_new_tokens=6)
    engine.prepare_for_generation()
    out = engine.generate(data, greedy=True)
    ids, ends = out["output_ids"], out["unpadded_sequence_lengths"]
    expected = Oracle(path).batch_logprobs(ids, ends)
    expected[torch.arange(ids.shape[1]) < data["input_lengths"][:, None]] = 0
    torch.testing.assert_close(out["logprobs"], expected, atol=1e-4, rtol=0)


@pytest.mark.skipif(
    not Gemma2PreTrainedModel._supports_sdpa, reason="transformers itself never fuses it there"
)
def test_a_soft_cap_that_the_weights_do_not_reach_is_seen(tmp_path, caplog):
    """As published, and with weights so small that log-probs hardly show it."""
    path = make_tiny_model(tmp_path, "llama", weight_scale=1.0, **GEMMA2)
    policy = HuggingFacePolicy(str(path))
    assert policy.model.config._attn_implementation == "eager"
    assert "does not compute the attention of Gemma2ForCausalLM" in caplog.text
    assert "soft caps or sinks" in caplog.text


@pytest.mark.skipif(
    not Gemma2PreTrainedModel._supports_sdpa, reason="transformers itself never fuses it there"
)
def test_the_fused_attention_that_is_asked_for_is_refused_where_it_is_not_the_models(made):
    with pytest.raises(
        ConfigError, match="does not compute the attention of Gemma2ForCausalLM"
    ) as refused:
        HuggingFacePolicy(str(made("soft cap")), attn_implementation="sdpa")
    assert refused.value.details["key"] == "attn_implementation"


def test_rows_are_packed_with_the_attention_of_the_model(made):
    assert HuggingFacePolicy(str(made("soft cap and window"))).microbatching.packed
    assert HuggingFacePolicy(str(made("window"))).model.config._attn_implementation == SEGMENTS
    with pytest.raises(CapabilityError, match="attend in chunks"):
        HuggingFacePolicy(str(made("chunks")), sequence_packing={"enabled": True})


@pytest.mark.parametrize("window", [None, 3])
def test_neighbours_of_one_length_in_a_packed_row_are_one_call_and_the_same(window, monkeypatch):
    calls: list[int] = []
    fused = attention.sdpa_attention_forward

    def counted(module: Any, query: Any, *rest: Any, **options: Any) -> Any:
        calls.append(len(query))
        return fused(module, query, *rest, **options)

    monkeypatch.setattr(attention, "sdpa_attention_forward", counted)
    lengths = [6, 6, 6, 1, 1, 4, 6]
    module = torch.nn.Module().eval()
    module.is_causal = True
    query, key, value = torch.randn(3, 1, 2, sum(lengths), 8).unbind()
    options = {"scaling": 0.5, "sliding_window": window}
    found, _ = segment_attention(module, query, key, value, segment_mask(lengths), **options)
    assert calls == [3, 2, 1, 1]
    alone = [
        segment_attention(
            module,
            *(t[:, :, end - size : end] for t in (query, key, value)),
            segment_mask([size]),
            **options,
        )[0]
        for size, end in zip(lengths, accumulate(lengths), strict=True)
    ]
    assert torch.equal(found, torch.cat(alone, dim=1))


def test_a_window_above_what_is_tried_is_compared_by_its_rule(tiny):
    model = loaded(tiny(use_sliding_window=True, sliding_window=200, max_window_layers=1))
    alone = segment_mask([TOKENS])
    assert compare_attention(model, segment_attention, alone).fits
    for layer in model.model.layers:
        layer.self_attn.sliding_window = None  # the mask has one
    found = compare_attention(model, segment_attention, alone)
    assert not found.differs
    assert found.unlike
    assert not found.fits


def test_an_option_that_is_lost_in_single_tokens_alone_is_seen(made):
    def other(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
        if query.shape[2] == 1:
            options["scaling"] = None
        return segment_attention(module, query, key, value, mask, **options)

    model, alone = loaded(made("scaling")), segment_mask([TOKENS])
    assert compare_attention(model, segment_attention, alone).fits
    assert compare_attention(model, other, alone).differs


def test_comparing_leaves_model_and_random_state_as_they_were(made):
    model = loaded(made("soft cap"))
    before, attention = torch.get_rng_state(), model.config._attn_implementation
    compare_attention(model, segment_attention, segment_mask([TOKENS]))
    assert torch.equal(torch.get_rng_state(), before)
    assert model.config._attn_implementation == attention
