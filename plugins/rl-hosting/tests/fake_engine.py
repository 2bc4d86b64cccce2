"""A named test double: an engine without a model, and the backend in front of it.

A row continues its last token t with t+1, t+2, ..., one token a step; a step takes ``pause``
seconds. Tokens do things: 900 raises, 901 makes the row fail, 902 ends the process, 903 stops it,
904 never ends. Its one weight is added to every log-prob.
"""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Any

import torch

from rl_core.cluster.remote_error import as_plain
from rl_core.errors import DataError
from rl_core.interfaces import TensorSpec, WeightSink
from rl_hosting.engine import Engine
from rl_hosting.generation import HostedGeneration
from rl_hosting.wire import Done
from rl_hosting.worker import WorkerRefits

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from rl_hosting.wire import Prompt

RAISES, FAILS, EXITS, STOPS, ENDLESS = range(900, 905)
SIZE = 64


class Sink(WeightSink):
    def __init__(self, weights: torch.Tensor) -> None:
        self.weights = weights

    def specs(self) -> Sequence[TensorSpec]:
        return [TensorSpec("w", (SIZE,), "float32", role="parameter")]

    def write(self, name: str, offset: int, data: torch.Tensor, *, of: TensorSpec) -> None:
        self.weights[offset : offset + len(data)] = data

    def read(self, names: Any) -> Any:
        return ((name, self.weights) for name in names)


class FakeEngine(Engine):
    def __init__(self, config: Mapping[str, Any]) -> None:
        fake = config.get("fake", {})
        print("the fake engine starts", flush=True)
        if fake.get("refuses"):
            raise DataError("it does not like you", fix="be nicer")
        self.pause = fake.get("pause", 0.0)
        self.weights = torch.zeros(SIZE)
        workers = fake.get("workers", 1)
        self.refits = [
            WorkerRefits(lambda: Sink(self.weights), f"fake worker {rank}")
            for rank in range(workers)
        ]
        self.rows: dict[int, tuple[Prompt, int]] = {}
        self.steps = 0
        self.facts = {
            "pad_token_id": 0,
            "eos_token_ids": [1],
            "vocab_size": 1000,
            "max_model_len": 10_000,
            "workers": workers,
            "pid": os.getpid(),
        }

    @classmethod
    def start(cls, config: Mapping[str, Any]) -> FakeEngine:
        return cls(config)

    def submit(self, prompts: Sequence[Prompt]) -> None:
        self.rows |= {prompt.key: (prompt, 0) for prompt in prompts}

    def step(self) -> list[Done]:
        time.sleep(self.pause)
        self.steps += 1
        ended = []
        for key, (prompt, count) in list(self.rows.items()):
            first = prompt.token_ids[0]
            if first == RAISES:
                raise OSError("the fake engine is on fire")
            if first == FAILS:
                error = DataError(f"row {prompt.index} is bad", row=prompt.index)
                ended.append(Done(key, error=as_plain(error, "fake")))
            elif first == EXITS:
                print("last words", flush=True)
                os._exit(7)
            elif first == STOPS:
                os.kill(os.getpid(), signal.SIGSTOP)
            elif first != ENDLESS and count + 1 == prompt.budget:
                new = [(prompt.token_ids[-1] + i) % 1000 for i in range(1, prompt.budget + 1)]
                ended.append(Done(key, new, [-1.0 - float(self.weights[0])] * len(new), True))
            self.rows[key] = prompt, count + 1
        for done in ended:
            del self.rows[done.key]
        return ended

    def cancel(self, keys: Collection[int]) -> None:
        for key in keys:
            self.rows.pop(key, None)

    def tokens_made(self) -> int:
        return self.steps

    def call_workers(self, frame: bytes) -> list[bytes]:
        return [refits.answer_frame(frame) for refits in self.refits]

    def shutdown(self) -> None:
        print("the fake engine ends", flush=True)


class FakeGeneration(HostedGeneration):
    def __init__(self, **config: Any) -> None:
        hosting = config.pop("hosting", {})
        here = os.path.dirname(__file__)
        path = os.pathsep.join([here, *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
        super().__init__(
            {"max_new_tokens": 4, **config},
            engine="fake_engine:FakeEngine",
            name="the fake engine",
            environment={**os.environ, "PYTHONPATH": path},
            **hosting,
        )
        self.prepare_for_generation()
