"""A named test double: the backend in front of the fake engine, whose workers have weights."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from fake_engine import ACTS, FakeEngine

from rl_core.batch import BatchedDataDict
from rl_core.interfaces import TensorSpec, WeightSink, WeightSource
from rl_core.weights import RefitSender
from rl_core.weights.spellings import SendsWeights
from rl_hosting.generation import HostedGeneration
from rl_hosting.worker_refits import WorkerRefits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

SOON = 40.0
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


def specs() -> list[TensorSpec]:
    return [TensorSpec(name, (size,), "float32") for name, size in SIZES.items()]


class Sink(WeightSink):
    """``act`` happens at a moment: ``begin``, ``write`` (of the last tensor) or ``finish``."""

    def __init__(self, weights: dict[str, torch.Tensor], acts: Mapping[str, str]) -> None:
        self.weights, self.acts = weights, acts

    def act(self, moment: str) -> None:
        if moment in self.acts:
            ACTS[self.acts[moment]]()

    def specs(self) -> Sequence[TensorSpec]:
        return specs()

    def begin(self, version: int) -> None:
        self.act("begin")

    def write(self, name: str, offset: int, data: torch.Tensor, *, of: TensorSpec) -> None:
        if name == "c":
            self.act("write")
        self.weights[name][offset : offset + len(data)] = data

    def finish(self, version: int) -> None:
        self.act("finish")

    def read(self, names: Any) -> Any:
        return ((name, self.weights[name]) for name in names)


def work(rank: int, acts: Mapping[str, str], frames: Any) -> None:
    """A worker's process."""
    torch.set_num_threads(1)
    weights = {name: torch.zeros(size) for name, size in SIZES.items()}
    refits = WorkerRefits(lambda: Sink(weights, acts if rank == 1 else {}), f"fake worker {rank}")
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


class Source(WeightSource):
    """Every element of every tensor has one value; ``before`` is called before each tensor."""

    def __init__(self, value: float = 1.0) -> None:
        self.weights = {name: torch.full((size,), value) for name, size in SIZES.items()}
        self.before: Callable[[str], Any] = lambda name: None

    def specs(self) -> Sequence[TensorSpec]:
        return specs()

    def tensors(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for name in names:
            self.before(name)
            yield name, self.weights[name]

    def persistent(self) -> Mapping[str, torch.Tensor] | None:
        return None

    def confirm(self) -> None:
        pass


class Trainer(SendsWeights):
    """What ``rl_core.refit`` calls of a policy."""

    def __init__(self, value: float = 1.0) -> None:
        self.source = Source(value)
        self.sender = self._sender = RefitSender(lambda: self.source, name="trainer")

    def close(self) -> None:
        self.sender.close()


def values(sink: Callable[[], Sink]) -> list[float]:
    """The value that all elements of each tensor have, beside the weights."""
    return [tensor.unique().item() for _, tensor in sink().read(SIZES)]
