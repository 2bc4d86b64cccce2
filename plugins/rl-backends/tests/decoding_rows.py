"""Rows in a decoding engine, over any model: how they are made, run and compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import nn

from rl_backends import Completion, FailedRow, PromptBatch, Row, SamplingParams
from rl_backends.generation.serving import ServedCall
from rl_backends.torch.decoding import DecodingEngine

LENGTHS = (1, 3, 40, 17, 17, 9, 120, 2, 64, 33)
GREEDY = SamplingParams(greedy=True)
SOME = settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))


def prompts(
    lengths: Sequence[int] = LENGTHS,
    budgets: Sequence[int] | int = 12,
    stops: Sequence[tuple[str, ...]] | None = None,
    seed: int = 0,
) -> PromptBatch:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 269, (len(lengths), max(lengths)), generator=generator)
    sizes = torch.tensor(lengths)
    ids[torch.arange(max(lengths)) >= sizes[:, None]] = 0
    return PromptBatch(
        ids,
        sizes,
        torch.tensor(budgets).expand(len(lengths)).clone(),
        stops or [()] * len(lengths),
        torch.arange(len(lengths)) * 1000 + 17,
    )


def rows_of(batch: PromptBatch, sampling: SamplingParams, first_key: int = 0) -> list[Row]:
    call = ServedCall("generate", batch, sampling, print)
    return [call.next_row(first_key + row) for row in range(len(batch))]


def complete(
    engine: DecodingEngine, batch: PromptBatch, sampling: SamplingParams
) -> Iterator[Completion]:
    engine.submit(rows_of(batch, sampling))
    missing = len(batch)
    while missing:
        for done in engine.collect():
            missing -= 1
            if isinstance(done, FailedRow):
                raise done.error
            yield done
    assert not engine._batches


def run(engine: DecodingEngine, batch: PromptBatch, sampling: SamplingParams) -> list[Completion]:
    done = sorted(complete(engine, batch, sampling), key=lambda completion: completion.row)
    assert [completion.row for completion in done] == list(range(len(batch)))
    return done


def assert_same(
    left: Sequence[Completion], right: Sequence[Completion], *, rounded: bool = False
) -> None:
    """Where passes of another shape round differently, the best two tokens may be as good as equal.

    Rounding decides then, and all after it is another.
    """
    for ours, theirs in zip(left, right, strict=True):
        pairs = zip(ours.token_ids, theirs.token_ids, strict=False)
        apart = next((at for at, (a, b) in enumerate(pairs) if a != b), None)
        if apart is None or not rounded:
            assert list(ours.token_ids) == list(theirs.token_ids)
            assert ours.truncated == theirs.truncated
        few = slice(None if apart is None else apart + 1)
        near = 1e-4 if apart is None else 1e-5
        found, expected = (torch.tensor(done.logprobs[few]) for done in (ours, theirs))
        torch.testing.assert_close(found, expected, atol=near, rtol=0)


def check_that_rows_come_and_go(
    engine: DecodingEngine,
    alone: DecodingEngine,
    penalty: float,
    data: st.DataObject,
    *,
    rounded: bool = False,
) -> None:
    """Each row is what it is alone, whatever calls it shares the engine with."""
    sampled = SamplingParams(temperature=1.3, repetition_penalty=penalty)
    greedy = SamplingParams(greedy=True, repetition_penalty=penalty)
    wanted: dict[int, Row] = {}
    found: dict[int, Completion] = {}
    key = 0
    for _ in range(data.draw(st.integers(1, 6))):
        lengths = data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=4))
        budgets = data.draw(st.lists(st.integers(1, 12), min_size=len(lengths), max_size=8))
        batch = prompts(lengths, budgets[: len(lengths)], seed=data.draw(st.integers(0, 3)))
        rows = rows_of(batch, data.draw(st.sampled_from((sampled, greedy))), key)
        key += len(rows)
        engine.submit(rows)
        wanted |= {row.key: row for row in rows}
        for _ in range(data.draw(st.integers(0, 8))):
            found |= {done.row: done for done in engine.collect()}
        gone = data.draw(st.sets(st.sampled_from(range(key)), max_size=2))
        engine.cancel(gone)
        wanted = {k: row for k, row in wanted.items() if k in found or k not in gone}
    for _ in range(500):
        found |= {done.row: done for done in engine.collect()}
    assert found.keys() == wanted.keys()
    assert not engine._batches
    for k, done in found.items():
        alone.submit([wanted[k]])
        expected: list[Any] = []
        while not expected:
            expected += alone.collect()
        assert_same([done], expected, rounded=rounded)


def check_that_a_short_call_does_not_wait(engine: DecodingEngine) -> None:
    engine.submit(rows_of(prompts((9,), budgets=(60,)), GREEDY))
    for _ in range(5):
        assert not engine.collect()
    engine.submit(rows_of(prompts((4,), budgets=(3,)), GREEDY, 1))
    done = [one.row for _ in range(5) for one in engine.collect()]
    assert done == [1]


def check_that_it_trains_on(
    model: nn.Module, engine: DecodingEngine, *, rounded: bool = False
) -> None:
    """A model with dropout is as it was between rows, and drops nothing in them."""
    model.train()
    rows = complete(engine, prompts((5, 5), budgets=(1, 5)), GREEDY)
    next(rows)
    assert model.training
    assert torch.is_grad_enabled()
    dropped = [*rows]
    model.eval()
    plain = run(engine, prompts((5, 5), budgets=(1, 5)), GREEDY)
    assert_same(dropped, plain[1:], rounded=rounded)
