"""Engines that keep different parts of a rank's tensors receive those, and nothing else."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from remote import Remote
from simple_pair import SOON
from torch._C import _distributed_c10d as c10d

from rl_backends.rank_job import follow
from rl_backends.refit_ranks import RefitRanks
from rl_backends.tensors import NamedTensorSink, NamedTensorSource
from rl_core.futures import spawn, wait
from rl_core.interfaces import Box, Piece, TensorSpec
from rl_core.weights import RefitReceiver, RefitSender
from rl_core.weights.receiving import receiver as receiving

ROWS, COLUMNS, COUNT = 256, 1024, 8
SHAPES = {f"w{n}": (ROWS, COLUMNS) for n in range(COUNT)} | {"norm": (COLUMNS,)}
MODEL = 4 * sum(torch.Size(shape).numel() for shape in SHAPES.values())
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

    def __init__(self, box: Box, host: str = "") -> None:
        receiving.boot_id = lambda: host
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


def new_rank(rank: int, hosts: str, store: Any, part: Part) -> RefitSender:
    sender = RefitSender(lambda: part, name=f"rank {rank}")
    if len(hosts) > 1:
        sender.ranks = RefitRanks(c10d.ProcessGroupGloo(store, rank, len(hosts)))
        sender.ranks.host = f"{hosts[rank]} pid:[1]"
    return sender


@contextmanager
def refitting(
    sources: list[Part], boxes: list[Box], hosts: tuple[str, str], **options: Any
) -> Iterator[tuple[list[RefitSender], dict[str, Any]]]:
    """Two refits, with the hosts of ranks and engines; the senders, and the second one's report."""
    with ExitStack() as stack:
        store = c10d.HashStore()
        made = [
            spawn("rank", lambda r=r, part=part: new_rank(r, hosts[0], store, part))
            for r, part in enumerate(sources)
        ]
        senders = wait(made, SOON)
        for sender in senders:
            stack.callback(sender.close)
        engines = [
            stack.enter_context(Remote(EngineProcess, box, host))
            for box, host in zip(boxes, hosts[1], strict=True)
        ]
        opened = senders[0].open("collective", SOON, ip="127.0.0.1", port=0, receivers=len(boxes))
        address = senders[0].kept.connections["collective"].end.address
        for engine in engines:
            engine.prepare({"ip": address["ip"], "port": address["port"]}, senders[0].prepare())
        wait(opened, SOON)
        options |= {"transport": "collective", "receivers": len(boxes), "deadline_s": SOON}
        for version in (1, 2):  # the connections of the second one are there
            for source in sources:
                for name, values in source.values(version).items():
                    source.tensors_by_name[name].copy_(values)
            for engine in engines:
                engine.start("refit", version)
            calls = [senders[0].send, *(partial(follow, sender) for sender in senders[1:])]
            report, *_ = wait([call(**options) for call in calls], SOON)
            found = [engine.result() for engine in engines]
        for box, (wire, counted) in zip(boxes, found, strict=True):
            kept = sum(tensor.nbytes for tensor in Part(box).tensors_by_name.values())
            assert counted == kept
            assert kept <= wire < kept + MESSAGES
        yield senders, report


@pytest.mark.parametrize("engines", BOXES)
@pytest.mark.parametrize("ranks", ["a", "aa"])
@pytest.mark.parametrize("bucket_bytes", [200_000, 8 << 20])
def test_an_engine_receives_what_it_keeps(ranks, engines, bucket_bytes):
    sources = [Part(box) for box in BOXES["rows" if len(ranks) > 1 else "everything"][: len(ranks)]]
    hosts = ranks, "aa"
    with refitting(sources, BOXES[engines], hosts, bucket_bytes=bucket_bytes) as (_, report):
        assert report["bytes"] == MODEL


@pytest.mark.parametrize(
    "options",
    [{}, {"delta": True}, {"isolation": "staged"}, {"verify": "installed"}, {"verify": "none"}],
    ids=str,
)
def test_each_engine_reads_from_the_copy_on_its_host(options):
    sources = [Part(box) for box in BOXES["everything"]]
    with refitting(sources, BOXES["everything"], ("ab", "ba"), **options) as (senders, report):
        assert report["bytes"] == 2 * MODEL  # what both ranks send
        assert report["tensors"] == len(SHAPES)
        lanes = [[*sender.kept.connections["collective"].lanes.values()] for sender in senders]
        members = [lane.ref["members"] for (lane,) in lanes]
        assert [len(each) for each in members] == [1, 1]
        assert members[0] != members[1]


def test_engines_with_no_copy_on_their_host_share_one():
    sources = [Part(box) for box in BOXES["everything"]]
    with refitting(sources, BOXES["everything"], ("ab", "cd")) as (_, report):
        assert report["bytes"] == MODEL
