"""Engines that keep different parts of a rank's tensors receive those, and nothing else."""

from __future__ import annotations

import os
import socket
import struct
import threading
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import torch
from remote import Remote
from simple_pair import SOON
from torch._C import _distributed_c10d as c10d

from rl_backends.refit_ranks import RefitRanks
from rl_core.futures import spawn, wait
from rl_core.interfaces import Box, Piece, TensorSpec
from rl_core.weights import RefitReceiver, RefitSender
from rl_core.weights.tensors import NamedTensorSink, NamedTensorSource

pytestmark = pytest.mark.concerns("core/")

ROWS, COLUMNS, COUNT = 256, 1024, 8
SHAPES = {f"w{n}": (ROWS, COLUMNS) for n in range(COUNT)} | {"norm": (COLUMNS,)}
#: For messages: the plan, digests, and what TCP itself sends.
MESSAGES = 64 << 10
#: Where the kernel has the bytes that were received, in what TCP_INFO gives.
RECEIVED_AT = 128


def half(index: int, dim: int) -> Box:
    box = [(0, ROWS), (0, COLUMNS)]
    box[dim] = box[dim][1] * index // 2, box[dim][1] * (index + 1) // 2
    return tuple(box)


BOXES: dict[str, list[Box]] = {
    "everything": [((0, ROWS), (0, COLUMNS))] * 2,
    "rows": [half(n, 0) for n in range(2)],
    "columns": [half(n, 1) for n in range(2)],
}


class Part(NamedTensorSource, NamedTensorSink):
    """All of the norm, and the same box of each matrix: what a rank sends, or an engine keeps."""

    def __init__(self, box: Box) -> None:
        self.boxes = dict.fromkeys(SHAPES, box) | {"norm": ((0, COLUMNS),)}
        super().__init__({name: self.cut(name, torch.zeros(SHAPES[name])) for name in SHAPES})

    def cut(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        return whole[tuple(slice(*ends) for ends in self.boxes[name])].contiguous()

    def specs(self) -> list[TensorSpec]:
        return [TensorSpec(name, shape, "float32") for name, shape in SHAPES.items()]

    def pieces(self) -> list[Piece]:
        return [Piece(name, self.boxes[name], t) for name, t in self.tensors_by_name.items()]

    def values(self, version: int) -> dict[str, torch.Tensor]:
        """Elements that are other ones everywhere, and in every version."""
        torch.manual_seed(version)
        return {name: self.cut(name, torch.rand(shape)) for name, shape in SHAPES.items()}


class EngineProcess:
    """An engine with its part, in a process whose sockets are its own."""

    def __init__(self, box: Box) -> None:
        self.part = Part(box)
        self.receiver = RefitReceiver(lambda: self.part, name="engine", lock=threading.RLock())

    def prepare(self, address: dict[str, Any], info: dict[str, Any]) -> None:
        wait(self.receiver.open("collective", SOON, address), SOON)
        self.receiver.prepare(info)

    def refit(self, version: int) -> tuple[int, int]:
        """Bytes that came through sockets, and those that the refit counted; all are right."""
        before = received()
        done = self.receiver.receive(transport="collective", deadline_s=SOON)
        counted = wait([done], SOON)[0]["bytes"]
        held, wanted = self.part.tensors_by_name, self.part.values(version)
        assert all(torch.equal(held[name], wanted[name]) for name in SHAPES)
        return received() - before, counted


def received() -> int:
    """Bytes that this process has received through its TCP sockets."""
    total = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            with closing(socket.socket(fileno=os.dup(int(entry.name)))) as one:
                if one.family == socket.AF_INET and one.type == socket.SOCK_STREAM:
                    info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    total += struct.unpack_from("Q", info, RECEIVED_AT)[0]
        except OSError:  # no socket, or closed meanwhile
            continue
    return total


def new_rank(rank: int, size: int, store: Any, part: Part) -> RefitSender:
    sender = RefitSender(lambda: part, name=f"rank {rank}")
    if size > 1:
        sender.ranks = RefitRanks(c10d.ProcessGroupGloo(store, rank, size))
    return sender


@pytest.mark.parametrize("engines", BOXES)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("bucket_bytes", [200_000, 8 << 20])
def test_an_engine_receives_what_it_keeps(ranks, engines, bucket_bytes):
    sources = [Part(box) for box in (BOXES["rows"] if ranks > 1 else BOXES["everything"][:1])]
    with ExitStack() as stack:
        store = c10d.HashStore()
        made = [
            spawn("rank", lambda r=r, part=part: new_rank(r, ranks, store, part))
            for r, part in enumerate(sources)
        ]
        senders = wait(made, SOON)
        for sender in senders:
            stack.callback(sender.close)
        parts = [stack.enter_context(Remote(EngineProcess, box)) for box in BOXES[engines]]
        opened = senders[0].open("collective", SOON, ip="127.0.0.1", port=0, receivers=2)
        address = senders[0].kept.connections["collective"].end.address
        for part in parts:
            part.prepare({"ip": address["ip"], "port": address["port"]}, senders[0].prepare())
        wait(opened, SOON)
        options = {"transport": "collective", "receivers": 2, "deadline_s": SOON}
        for version in (1, 2):  # the connections of the second one are there
            for source in sources:
                for name, values in source.values(version).items():
                    source.tensors_by_name[name].copy_(values)
            for part in parts:
                part.start("refit", version)
            calls = [senders[0].send, *(sender.follow for sender in senders[1:])]
            report, *_ = wait([c(**options, bucket_bytes=bucket_bytes) for c in calls], SOON)
            found = [part.result() for part in parts]
        assert report["bytes"] == 4 * sum(torch.Size(shape).numel() for shape in SHAPES.values())
        for box, (wire, counted) in zip(BOXES[engines], found, strict=True):
            kept = sum(tensor.nbytes for tensor in Part(box).tensors_by_name.values())
            assert counted == kept
            assert kept <= wire < kept + MESSAGES
