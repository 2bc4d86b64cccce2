# ruff: noqa: D102
"""The processes of ``bench_refit_ranks.py``: ranks of a trainer, and engines that keep parts."""

from __future__ import annotations

import math
import os
import threading
import time
import warnings
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from refit_bench.engine import Tensors
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from rl_backends.rank_job import follow
from rl_backends.refit_ranks import RefitRanks
from rl_core.futures import wait
from rl_core.interfaces import Piece
from rl_core.interfaces.weights import Box, TensorSpec
from rl_core.ports import free_port
from rl_core.weights import DEFAULT_BUCKET_BYTES, RefitReceiver, RefitSender, refit

__all__ = ["DEADLINE_S", "GRACE_S", "Case", "Engine", "ModuleRank", "Process", "Rank"]

DEADLINE_S = 30.0
GRACE_S = 20.0
ROWS = 1024
LOOPBACK = "127.0.0.1"

Span = tuple[float, float]


@dataclass(frozen=True)
class Case:
    """What is moved: tensors of two dimensions, of which ranks and engines have parts.

    Attributes:
        nbytes: Of all tensors, more or less.
        count: How many tensors.
        dtype: Torch's name of their dtype.
        rounds: Of which the best counts.
        ranks: Of the trainer.
        engines: How many.
        dim: Along which the engines are cut.
    """

    nbytes: int
    count: int
    dtype: str
    rounds: int
    ranks: int = 2
    engines: int = 2
    dim: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        itemsize = getattr(torch, self.dtype).itemsize
        return ROWS, max(8, self.nbytes // self.count // itemsize // ROWS // 8 * 8)

    @property
    def total(self) -> int:
        rows, columns = self.shape
        return self.count * rows * columns * getattr(torch, self.dtype).itemsize

    def box(self, index: int, of: int, dim: int) -> Box:
        """One of so many equal parts along a dimension."""
        box = [(0, size) for size in self.shape]
        each = self.shape[dim] // of
        box[dim] = (index * each, (index + 1) * each)
        return tuple(box)


class Part(Tensors):
    """The same elements of every tensor."""

    def __init__(self, case: Case, box: Box) -> None:
        sizes, dtype = [after - first for first, after in box], getattr(torch, case.dtype)
        super().__init__(
            {f"layers.{i}.weight": torch.rand(sizes, dtype=dtype) for i in range(case.count)}
        )
        self._specs = [TensorSpec(name, case.shape, case.dtype) for name in self.held]
        self.box = box

    def pieces(self) -> list[Piece]:
        return [Piece(name, self.box, tensor) for name, tensor in self.held.items()]


def clocked(call: Callable[[], Any]) -> tuple[Span, Any]:
    """When a call began and ended, and what it returned."""
    began = time.perf_counter()
    result = call()
    return (began, time.perf_counter()), result


class Process:
    """One that is measured; its methods are called from the one that measures.

    Attributes:
        sources: An engine's tensors, and those with the values that they should get.
        blocks: The same for as many bytes, each in one run.
    """

    def __init__(self, number: int, port: int, size: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        meeting = f"tcp://{LOOPBACK}:{port}"
        dist.init_process_group("gloo", meeting, rank=number, world_size=size)
        self.sources: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.blocks = self.sources

    def copy(self, blocks: bool) -> tuple[Span, None]:
        pairs = self.blocks if blocks else self.sources
        return clocked(lambda: [target.copy_(source) for target, source in pairs])[0], None

    def change(self) -> None:
        """Makes new weights, if it has the trainer's."""

    def clear(self) -> None:
        for target, _ in self.sources:
            target.zero_()

    def holds_all(self) -> bool:
        return all(torch.equal(target, source) for target, source in self.sources)

    def begin_peak(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")
        self.before = self.resident("VmRSS")

    def grown(self) -> int:
        """Bytes of resident memory at the peak that were not there before."""
        return self.resident("VmHWM") - self.before

    def resident(self, key: str) -> int:
        return int(Path("/proc/self/status").read_text().split(f"{key}:")[1].split()[0]) << 10


class Member(Process):
    """A rank or an engine, with its part of every tensor.

    Args:
        case: What is moved.
        number: Ranks come first, engines follow.
        port: Where all meet.
        folder: In memory, for files.
    """

    def __init__(self, case: Case, number: int, port: int, folder: Path) -> None:
        everybody = [*range(case.ranks + case.engines)]
        super().__init__(number, port, len(everybody))
        self.case, self.folder = case, folder
        self.trainer = dist.new_group(everybody[: case.ranks])
        self.engines = dist.new_group(everybody[case.ranks :])
        self.outer = dist.new_group([0, *everybody[case.ranks :]])
        is_rank = number < case.ranks
        self.index = number if is_rank else number - case.ranks
        of, dim = (case.ranks, 0) if is_rank else (case.engines, case.dim)
        self.part = Part(case, case.box(self.index, of, dim))
        names, width = list(self.part.held), max(1, DEFAULT_BUCKET_BYTES * case.count // case.total)
        self.buckets = [names[at : at + width] for at in range(0, len(names), width)]
        self.slots = torch.ones(2, width, *case.shape, dtype=getattr(torch, case.dtype))

    def shared(self, rank: int) -> torch.Tensor:
        """A rank's share of all tensors, in memory that every process may map."""
        shape = self.case.count, self.case.shape[0] // self.case.ranks, self.case.shape[1]
        how = {"size": math.prod(shape), "dtype": getattr(torch, self.case.dtype)}
        return torch.from_file(str(self.folder / str(rank)), shared=True, **how).view(shape)

    def sharded(self, group: Any, dim: int) -> dict[str, DTensor]:
        """The part as DTensors of a group."""
        mesh = DeviceMesh.from_group(group, "cpu")
        held = self.part.held.items()
        return {n: DTensor.from_local(t, mesh, [Shard(dim)], run_check=False) for n, t in held}


class Rank(Member):
    """One of the trainer."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.sender = RefitSender(lambda: self.part, name=f"rank {self.index}")
        if self.case.ranks > 1:
            self.sender.ranks = RefitRanks(self.trainer)
        self.file = self.shared(self.index)

    def prepare(self) -> Any:
        """What engines need to know of rank 0, where they meet for collectives included."""
        if self.index:
            return None
        meeting = {"ip": LOOPBACK, "port": free_port()}
        self.met = self.sender.open(
            "collective", DEADLINE_S, **meeting, receivers=self.case.engines
        )
        return meeting, self.sender.prepare()

    def change(self) -> None:
        """New weights, which are in the shared memory, too."""
        self.part.change(self.part.held)
        for target, tensor in zip(self.file, self.part.held.values(), strict=True):
            target.copy_(tensor)

    def refit(self, options: dict[str, Any]) -> tuple[Span, Any]:
        call = partial(follow, self.sender) if self.index else self.sender.send
        options = {"receivers": self.case.engines, "deadline_s": DEADLINE_S, **options}
        return clocked(lambda: wait(call(**options), DEADLINE_S + GRACE_S)[0])

    def gloo(self) -> tuple[Span, None]:
        return clocked(self.broadcast)

    def broadcast(self) -> None:
        """Whole tensors are gathered on rank 0, while those of the bucket before are broadcast."""
        first, pending = self.index == 0, list[Any]()
        how: dict[str, Any] = {"group": self.trainer, "async_op": True}
        for index, names in enumerate(self.buckets):
            slot = self.slots[index % 2, : len(names)]
            if len(pending) > 1:
                pending.pop(0).wait()
            works = [
                dist.gather(
                    self.part.held[name],
                    list(whole.chunk(self.case.ranks)) if first else None,
                    **how,
                )
                for name, whole in zip(names, slot, strict=True)
            ]
            for work in works:
                work.wait()
            if first:
                pending.append(dist.broadcast(slot, 0, group=self.outer, async_op=True))
        for work in pending:
            work.wait()

    def save(self) -> tuple[Span, Any]:
        tensors, group = self.sharded(self.trainer, 0), self.trainer
        warnings.filterwarnings("ignore", "Detected an existing checkpoint")
        writer = checkpoint.FileSystemWriter(self.folder / "saved")
        save = partial(checkpoint.save, tensors, storage_writer=writer, process_group=group)
        return clocked(save)[0], None


class Engine(Member):
    """Keeps a part of every tensor."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.receiver = RefitReceiver(
            lambda: self.part, name=f"engine {self.index}", lock=threading.RLock()
        )
        self.kept_bytes = sum(tensor.nbytes for tensor in self.part.held.values())
        files = [self.shared(rank) for rank in range(self.case.ranks)]
        (top, bottom), columns = self.part.box[0], slice(*self.part.box[1])
        each = len(files[0][0])
        for index, target in enumerate(self.part.held.values()):
            for rank, file in enumerate(files):
                first, after = max(top, rank * each), min(bottom, (rank + 1) * each)
                if first < after:
                    source = file[index, first - rank * each : after - rank * each, columns]
                    self.sources.append((target[first - top : after - top], source))
        if self.case.dim:
            held = zip(self.part.held.values(), files[self.index], strict=True)
            self.blocks = [(target.view(-1), file.view(-1)) for target, file in held]

    def prepare(self, meeting: dict[str, Any], info: dict[str, Any]) -> None:
        wait(self.receiver.open("collective", DEADLINE_S, meeting), DEADLINE_S)
        self.receiver.prepare(info)

    def refit(self, options: dict[str, Any]) -> tuple[Span, Any]:
        transport = options.get("transport", "ipc")
        span, [result] = clocked(
            lambda: wait(
                self.receiver.receive(transport=transport, deadline_s=DEADLINE_S),
                DEADLINE_S + GRACE_S,
            )
        )
        return span, result["bytes"] / self.kept_bytes

    def gloo(self) -> tuple[Span, None]:
        return clocked(self.take)

    def take(self) -> None:
        """Takes its part out of each bucket while the one after it arrives."""
        box = slice(None), *(slice(*ends) for ends in self.part.box)
        slots = [self.slots[i % 2, : len(names)] for i, names in enumerate(self.buckets)]
        following = (dist.broadcast(s, 0, group=self.outer, async_op=True) for s in slots)
        work = next(following)
        for names, slot in zip(self.buckets, slots, strict=True):
            work.wait()
            work = next(following, work)
            for name, part in zip(names, slot[box], strict=True):
                self.part.held[name].copy_(part)

    def load(self) -> tuple[Span, Any]:
        tensors, group = self.sharded(self.engines, self.case.dim), self.engines
        reader = checkpoint.FileSystemReader(self.folder / "saved")
        load = partial(checkpoint.load, tensors, storage_reader=reader, process_group=group)
        return clocked(load)[0], None


class ModuleRank(Process):
    """A rank of a trainer that knows nothing of refits; rank 0 has a module to generate with."""

    def __init__(self, case: Case, number: int, port: int, folder: Path) -> None:
        super().__init__(number, port, case.ranks)
        self.model, self.whole = self.module(case), nn.Module()
        self.engine = None
        if number == 0:
            self.whole, self.engine = deepcopy(self.model), deepcopy(self.model)
        fully_shard(self.model, mesh=init_device_mesh("cpu", (case.ranks,)))
        if self.engine is not None:
            sides = self.engine.state_dict().values(), self.whole.state_dict().values()
            self.sources += zip(*sides, strict=True)

    def module(self, case: Case) -> nn.Sequential:
        rows, columns = case.shape
        how: dict[str, Any] = {"bias": False, "dtype": getattr(torch, case.dtype)}
        return nn.Sequential(*(nn.Linear(columns, rows, **how) for _ in range(case.count)))

    @torch.no_grad()
    def change(self) -> None:
        for parameter in (*self.model.parameters(), *self.whole.parameters()):
            parameter.neg_()

    def refit(self, options: dict[str, Any]) -> tuple[Span, Any]:
        call = partial(refit, self.model, self.engine, deadline_s=DEADLINE_S, **options)
        span, report = clocked(call)
        return span, report.as_dict()
