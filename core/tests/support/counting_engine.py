"""An engine that counts, and how its rows are asked for and collected."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from simple_pair import DictSink

from rl_backends import Completion, GenerationBackend, ModelFacts, PromptBatch, SamplingParams
from rl_core.batch import BatchedDataDict

PAD, EOS, VOCAB, CONTEXT = 0, 1, 50, 12


class CountingEngine(GenerationBackend):
    """Continues 5 with 6, 7, ... and starts sampled rows at a token drawn from the row's seed.

    Rows finish last first; ``before_row`` runs before each.
    """

    def __init__(self, **config: Any) -> None:
        facts = ModelFacts(PAD, (EOS,), VOCAB, CONTEXT)
        super().__init__({"max_new_tokens": 4} | config, facts)
        self.weights = {"w": torch.zeros(3)}
        self.calls: list[str] = []
        self.before_row: Callable[[int], Any] = lambda row: None
        self.closed_in: list[str] = []

    def complete(self, prompts: PromptBatch, sampling: SamplingParams) -> Iterator[Completion]:
        try:
            for row in reversed(range(len(prompts))):
                self.before_row(row)
                budget, last = int(prompts.budgets[row]), prompts.token_ids(row)[-1]
                if not sampling.greedy:
                    last = 2 + int(prompts.seeds[row]) % 37
                tokens = [(last + step) % VOCAB for step in range(1, budget + 1)]
                stops = [i for i, t in enumerate(tokens) if t in sampling.stop_token_ids]
                tokens = tokens[: stops[0] + 1] if stops else tokens
                yield Completion(row, tokens, [-0.5] * len(tokens), not stops)
        finally:
            self.closed_in.append(threading.current_thread().name)

    def weight_sink(self) -> DictSink:
        return DictSink(self.weights)

    def on_wake(self, tags: frozenset[str]) -> None:
        self.calls.append(f"wake {sorted(tags)}")

    def on_sleep(self, tags: frozenset[str]) -> None:
        self.calls.append(f"sleep {sorted(tags)}")

    def on_shutdown(self) -> None:
        self.calls.append("shutdown")


def collect(stream: Any) -> list[tuple[int, BatchedDataDict[Any]]]:
    async def read() -> list[tuple[int, BatchedDataDict[Any]]]:
        return [item async for item in stream]

    return asyncio.run(read())
