"""transformers models in the decoding engine, in slots and in groups, against plain passes."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from decoding_rows import (
    GREEDY,
    assert_same,
    prompts,
    run,
)

from rl_backends import SamplingParams
from rl_backends.torch.decoding import DecodingEngine
from rl_conformance.oracle import Oracle
from rl_hf.decoders import GroupDecoder, decoding_engine, fits_slots
from rl_hf.modeling import load_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from transformers import PreTrainedModel


same = partial(assert_same, rounded=True)


def load(path: Path, **config: Any) -> PreTrainedModel:
    return load_model({"model_name": str(path), **config}, for_training=False)


def in_groups(model: PreTrainedModel, **options: Any) -> DecodingEngine:
    decoder, device = partial(GroupDecoder, model), torch.device("cpu")
    return DecodingEngine(model, decoder, vocab_size=272, device=device, in_groups=True, **options)


FAMILIES = ("llama", "qwen2", "qwen3", "qwen2_5_vl")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("max_batch_size", [1, 3, 256])
def test_greedy_rows_are_the_plain_forward_passes(
    tiny: Callable[..., Path], family: str, max_batch_size: int
):
    path, batch = tiny(family), prompts(budgets=range(3, 13))
    oracle = Oracle(path)
    sampling = SamplingParams(greedy=True, stop_token_ids=(oracle.eos_token_id,))
    engine = decoding_engine(load(path), max_batch_size=max_batch_size)
    for row, done in enumerate(run(engine, batch, sampling)):
        prompt = batch.token_ids(row)
        expected = oracle.greedy(prompt, int(batch.budgets[row]))
        assert list(done.token_ids) == expected
        assert done.truncated == (expected[-1] != oracle.eos_token_id)
        scores = oracle.logprobs([*prompt, *expected])[len(prompt) :]
        torch.testing.assert_close(torch.tensor(done.logprobs), scores, atol=1e-3, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_known_families_share_slots(tiny: Callable[..., Path], family: str):
    assert fits_slots(load(tiny(family)))


@pytest.mark.parametrize(
    "overrides",
    [
        {"attn_implementation": "eager"},
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ],
)
def test_other_attention_decodes_in_groups_and_says_so(
    tiny: Callable[..., Path], overrides: dict[str, Any], caplog: pytest.LogCaptureFixture
):
    config = {key: value for key, value in overrides.items() if key == "attn_implementation"}
    path = tiny(**{key: value for key, value in overrides.items() if key not in config})
    oracle, batch = Oracle(path), prompts((4, 12, 4, 12, 30))
    with caplog.at_level(logging.WARNING):
        engine = decoding_engine(load(path, **config))
    assert "equal length" in caplog.text
    for row, done in enumerate(run(engine, batch, GREEDY)):
        ids = oracle.greedy(batch.token_ids(row), 12)
        assert list(done.token_ids)[: len(ids)] == ids


def test_a_model_that_lets_packed_prompts_see_each_other_decodes_in_groups(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
):
    model = load(tiny())
    forward = type(model.model.layers[0].self_attn).forward

    def blind(self: Any, *args: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        return forward(self, *args, attention_mask=None, **kwargs)

    monkeypatch.setattr(type(model.model.layers[0].self_attn), "forward", blind)
    assert not fits_slots(model)


def test_groups_and_slots_agree(tiny: Callable[..., Path]):
    model, batch = load(tiny("llama")), prompts(budgets=range(1, 11))
    sampling = SamplingParams(temperature=1.5, stop_token_ids=tuple(range(3, 40)))
    slots = run(decoding_engine(model), batch, sampling)
    assert len({len(done.token_ids) for done in slots}) > 2
    same(run(in_groups(model), batch, sampling), slots)


def test_bfloat16_scores_are_those_of_bfloat16_logits(tiny: Callable[..., Path]):
    model = load(tiny("llama"), torch_dtype="bfloat16")
    (done,) = run(decoding_engine(model), prompts((30,)), GREEDY)
    ids = [*prompts((30,)).token_ids(0), *done.token_ids]
    with torch.no_grad():
        scores = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)[29:-1]
    chosen = scores.gather(-1, torch.tensor(done.token_ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(done.logprobs), chosen, atol=0.2, rtol=0)


def test_a_group_is_admitted_when_the_one_before_is_done(tiny: Callable[..., Path]):
    group = GroupDecoder(load(tiny()), 32)
    assert group.room([7, 7, 5], 0, last=True) == 2
    assert group.room([7, 7, 5], 1, last=True) == 0
