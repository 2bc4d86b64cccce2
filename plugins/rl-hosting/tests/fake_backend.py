"""A named test double: the backend in front of the fake engine, whose workers have weights."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from fake_engine import ACTS, FakeEngine

from rl_conformance.doubles import Sink
from rl_core.batch import BatchedDataDict
from rl_hosting.generation import HostedGeneration
from rl_hosting.worker_refits import WorkerRefits

SOON = 60.0
HERE = str(Path(__file__).parent)
SIZES = {"a": 512, "b": 64, "c": 512}


def prompts(*tokens: int) -> BatchedDataDict[Any]:
    ids = torch.tensor([[token] for token in tokens])
    return BatchedDataDict({"input_ids": ids, "input_lengths": torch.ones(len(tokens)).long()})


def until(condition: Callable[[], Any], what: str = "it") -> None:
    end = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < end, f"{what} did not happen"
        time.sleep(0.01)


def filled(value: float) -> dict[str, torch.Tensor]:
    """Weights whose elements all have one value."""
    return {name: torch.full((size,), value) for name, size in SIZES.items()}


def work(rank: int, acts: Mapping[str, str], frames: Any) -> None:
    """A worker's process; the second one acts: at ``begin``, in the last tensor, at ``finish``."""
    torch.set_num_threads(1)
    weights, on = filled(0.0), {}
    if rank == 1:
        on = {"c" if moment == "write" else moment: ACTS[act] for moment, act in acts.items()}
    refits = WorkerRefits(lambda: Sink(weights, on), f"fake worker {rank}")
    while True:
        frames.send_bytes(refits.answer_frame(frames.recv_bytes()))


class WorkersEngine(FakeEngine):
    """With two workers, each in a process; ``worker_acts`` are the second one's."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        context, self.workers = multiprocessing.get_context("fork"), []
        self.pids = []
        for rank in range(2):
            ours, theirs = context.Pipe()
            args = rank, self.fake.get("worker_acts", {}), theirs
            worker = context.Process(target=work, args=args, daemon=True)
            worker.start()
            theirs.close()
            self.workers.append(ours)
            self.pids.append(worker.pid)
        self.facts |= {"workers": 2, "worker_pids": self.pids}

    def call_workers(self, frame: bytes) -> list[bytes]:
        self.act("call_workers")
        for worker in self.workers:
            worker.send_bytes(frame)
        return [worker.recv_bytes() for worker in self.workers]

    def shutdown(self) -> None:
        super().shutdown()
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)


def environment() -> dict[str, str]:
    path = os.pathsep.join([HERE, *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path}


class FakeGeneration(HostedGeneration):
    def __init__(self, *, engine: str = "fake_engine:FakeEngine", **config: Any) -> None:
        self.silence_s = config.pop("silence_s", self.silence_s)
        hosting = {"environment": environment(), **config.pop("hosting", {})}
        config = {"max_new_tokens": 4, **config}
        super().__init__(config, engine=engine, name="the fake engine", **hosting)
        self.prepare_for_generation()


def values(sink: Callable[[], Sink]) -> list[float]:
    """The value that all elements of each tensor have, beside the weights."""
    return [tensor.unique().item() for _, tensor in sink().read(SIZES)]
