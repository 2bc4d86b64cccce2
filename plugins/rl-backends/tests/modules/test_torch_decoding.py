"""The decoding engine over a small module, against plain passes, whoever shares the batch."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from decoding_rows import (
    GREEDY,
    LENGTHS,
    SOME,
    assert_same,
    check_that_a_short_call_does_not_wait,
    check_that_it_trains_on,
    check_that_rows_come_and_go,
    complete,
    prompts,
    rows_of,
    run,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from rl_backends import Completion, FailedRow, SamplingParams
from rl_backends.torch.decoding import DecodingEngine
from rl_backends.torch.slots import SlotDecoder, segment_mask
from rl_conformance.models import make_tokenizer
from rl_core.errors import ConfigError

if TYPE_CHECKING:
    from rl_backends.torch.slot_cache import SlotCache

VOCABULARY, HEADS, SHARED, WIDTH = 272, 4, 2, 8
CPU = torch.device("cpu")


class Attention(nn.Module):
    """Grouped-query attention that knows of a cache what SlotForward says."""

    def __init__(self, layer: int, dropout: float) -> None:
        super().__init__()
        self.layer, self.dropout = layer, nn.Dropout(dropout)
        self.qkv = nn.Linear(HEADS * WIDTH, (HEADS + 2 * SHARED) * WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor, cache: SlotCache | None) -> torch.Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, WIDTH)).transpose(1, 2)
        q, k, v = heads.split([HEADS, SHARED, SHARED], dim=1)
        if cache is not None:
            k, v = cache.update(k, v, self.layer)
        if mask.dtype == torch.bool:
            out = scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        else:
            cut = (torch.split(part, mask.flatten().tolist(), dim=2) for part in (q, k, v))
            parts = [
                scaled_dot_product_attention(*segment, is_causal=True, enable_gqa=True)
                for segment in zip(*cut, strict=True)
            ]
            out = torch.cat(parts, dim=2)
        return x + self.dropout(out.transpose(1, 2).flatten(2))


class Tiny(nn.Module):
    """Two layers, numbered as a pipeline's second stage would."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, HEADS * WIDTH)
        self.places = nn.Embedding(256, HEADS * WIDTH)
        self.layers = nn.ModuleList(Attention(layer, dropout) for layer in (5, 7))
        self.head = nn.Linear(HEADS * WIDTH, VOCABULARY)
        self.passes: list[tuple[int, ...]] = []
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(0, 0.3, generator=generator)
        self.eval()

    def forward(
        self,
        *,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        past_key_values: SlotCache | None = None,
        logits_to_keep: torch.Tensor | int = 0,
    ) -> torch.Tensor:
        self.passes.append(tuple(input_ids.shape))
        x = self.tokens(input_ids) + self.places(position_ids)
        for layer in self.layers:
            x = layer(x, attention_mask, past_key_values)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return self.head(x[:, kept])

    @torch.no_grad()
    def logits(self, ids: list[int]) -> torch.Tensor:
        """Of a row that is alone, without a cache."""
        places = torch.arange(len(ids))[None]
        return self(
            input_ids=torch.tensor([ids]),
            position_ids=places,
            attention_mask=segment_mask([len(ids)]),
        )[0]


def engine_of(model: Tiny, **options: Any) -> DecodingEngine:
    decoder = partial(SlotDecoder, model, CPU)
    return DecodingEngine(model, decoder, vocab_size=VOCABULARY, device=CPU, **options)


@pytest.mark.parametrize("max_batch_size", [1, 3, 256])
def test_greedy_rows_are_the_plain_passes(max_batch_size: int):
    model, batch = Tiny(), prompts(budgets=range(3, 13))
    for row, done in enumerate(run(engine_of(model, max_batch_size=max_batch_size), batch, GREEDY)):
        prompt = batch.token_ids(row)
        scores = model.logits([*prompt, *done.token_ids]).log_softmax(-1)[len(prompt) - 1 : -1]
        assert list(done.token_ids) == scores.argmax(-1).tolist()
        assert len(done.token_ids) == int(batch.budgets[row])
        expected = scores.amax(-1)
        torch.testing.assert_close(torch.tensor(done.logprobs), expected, atol=1e-4, rtol=0)


def test_equal_prompts_are_computed_once():
    model = Tiny()
    batch = prompts((20, 30)).select(torch.tensor([0, 1, 0, 0, 1]))
    done = run(engine_of(model), batch, GREEDY)
    assert model.passes[0] == (1, 50)
    assert_same([done[2], done[3], done[4]], [done[0], done[0], done[1]])


def test_a_prompt_longer_than_a_pass_is_admitted_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("rl_backends.torch.slots.PREFILL_TOKENS", 50)
    batch, model = prompts((120, 30, 30, 5)), Tiny()
    few = run(engine_of(model), batch, GREEDY)
    assert model.passes[0] == (1, 120)
    monkeypatch.undo()
    assert_same(few, run(engine_of(Tiny()), batch, GREEDY))


def test_stop_tokens_still_end_rows_that_watch_for_strings():
    engine = engine_of(Tiny(), tokenizer=make_tokenizer())
    stop = run(engine, prompts((8,)), GREEDY)[0].token_ids[2]
    sampling = SamplingParams(greedy=True, stop_token_ids=(stop,))
    (done,) = run(engine, prompts((8,), stops=[("never to be seen",)]), sampling)
    assert done.token_ids[-1] == stop
    assert not done.truncated


def test_stop_strings_without_a_tokenizer_name_the_row():
    stops = [()] * 3 + [("x",)] + [()] * 6
    with pytest.raises(ConfigError, match="row 3 has stop strings"):
        list(complete(engine_of(Tiny()), prompts(stops=stops), GREEDY))


def test_a_decoder_declares_what_it_admits():
    slots = SlotDecoder(Tiny(), CPU, 32)
    assert slots.room([5] * 10, 22, last=False) == 10
    assert slots.room([5] * 3, 29, last=False) == 0
    assert slots.room([5] * 3, 29, last=True) == 3


@pytest.mark.parametrize("penalty", [1.0, 1.4])
@SOME
@given(data=st.data())
def test_rows_come_and_go_and_each_is_what_it_is_alone(penalty: float, data: st.DataObject):
    engine = engine_of(Tiny(), max_batch_size=data.draw(st.integers(1, 6)))
    check_that_rows_come_and_go(engine, engine_of(Tiny()), penalty, data)


def test_a_short_call_does_not_wait_for_a_long_one():
    check_that_a_short_call_does_not_wait(engine_of(Tiny()))


def test_the_model_trains_on_where_it_was_training():
    model = Tiny(dropout=0.5)
    check_that_it_trains_on(model, engine_of(model))


@pytest.mark.parametrize("most", [0, 1, 2, 5])
def test_rows_that_memory_has_no_room_for_wait_and_those_it_never_has_fail_alone(
    monkeypatch: pytest.MonkeyPatch, most: int
):
    reserve = SlotDecoder.reserve

    def reserve_some(decoder: SlotDecoder, slots: int, limit: int) -> None:
        if slots > most or limit > 100:
            raise torch.OutOfMemoryError(f"{slots} slots of {limit}")
        reserve(decoder, slots, limit)

    batch = prompts()
    expected = run(engine_of(Tiny()), batch, GREEDY)
    engine = engine_of(Tiny())
    monkeypatch.setattr(SlotDecoder, "reserve", reserve_some)
    engine.submit(rows_of(batch, GREEDY))
    found = []
    while len(found) < len(batch):
        found += engine.collect()
    failed = {one.row for one in found if isinstance(one, FailedRow)}
    too_long = {row for row, length in enumerate(LENGTHS) if length + 12 > 100}
    assert failed == (too_long if most else set(range(len(batch))))
    done = sorted((one for one in found if isinstance(one, Completion)), key=lambda one: one.row)
    assert_same(done, [one for one in expected if one.row not in failed])
    assert not engine._batches
