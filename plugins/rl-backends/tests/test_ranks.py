"""Ranks that lose a peer say which one, as far as they can see it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
from patience import enough_for
from torch import distributed as dist

from rl_backends.policy import ranks
from rl_backends.policy.ranks import RankGroup
from rl_core.errors import ConfigError, DeadlineError, WorkerDiedError
from rl_core.futures import spawn
from rl_core.interfaces import WorkerContext
from rl_core.ports import free_port

#: What the other rank does: it joins, and then leaves the first one alone.
PEER = """
import os, signal, sys, torch
from datetime import timedelta
from torch import distributed as dist
from rl_backends.policy.ranks import RankGroup
from rl_core.interfaces import WorkerContext
print("ready to join", flush=True)
port, what = int(sys.argv[1]), sys.argv[2]
group = RankGroup(WorkerContext(1, 2, 1, "127.0.0.1", port), timeout_s=60)
store = dist.TCPStore("127.0.0.1", int(sys.argv[3]), 2, False)
own = dist.ProcessGroupGloo(store, 1, 2, timedelta(seconds=60))
group.gather("ready")
if what == "runs":
    input()
os.kill(os.getpid(), signal.Signals[what])
"""


@pytest.fixture
def joined() -> Iterator[Callable[[str], tuple[RankGroup, Any]]]:
    """``joined(what)`` is rank 0, and another group of the same two, of which rank 1 did that."""
    peers = []

    def join(what: str) -> tuple[RankGroup, Any]:
        port, other = free_port(), free_port()
        command = [sys.executable, "-c", PEER, str(port), what, str(other)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        peer = subprocess.Popen(command, **pipes)
        peers.append(peer)
        patience = enough_for(peer.stdout.readline, least=2.0, times=1.0)
        group = RankGroup(WorkerContext(0, 2, 0, "127.0.0.1", port), timeout_s=patience)
        store = dist.TCPStore("127.0.0.1", other, 2, True)
        own = dist.ProcessGroupGloo(store, 0, 2, timedelta(seconds=patience))
        assert group.gather("ready") == ["ready", "ready"]
        return group, own

    yield join
    for peer in peers:
        peer.kill()
        peer.communicate()


FATES = [("SIGKILL", "has ended"), ("SIGSTOP", "its process is stopped")]


@pytest.mark.parametrize(("signal", "fate"), FATES)
def test_a_peer_that_is_gone_is_named(joined: Any, signal: str, fate: str) -> None:
    group, own = joined(signal)
    calls = [
        lambda: group.gather(1),
        lambda: group.sum_([torch.ones(2)]),
        lambda: own.allreduce([torch.ones(2)]).wait(),
    ]
    for call in calls:
        with (
            pytest.raises(WorkerDiedError, match=rf"rank 1 of 2 \(process \d+\).*{fate}") as raised,
            group.all_or_none("a sum"),
        ):
            call()
        assert raised.value.details["rank"] == 1
        assert raised.value.fix


def test_who_only_did_not_take_part_is_not_guessed(joined: Any) -> None:
    group, own = joined("runs")
    with (
        pytest.raises(
            WorkerDiedError, match=r"could not finish a sum: a peer .* are running"
        ) as raised,
        group.collectives("a sum"),
    ):
        own.allreduce([torch.ones(2)]).wait()
    assert "rank" not in raised.value.details


def test_what_no_collective_raised_is_raised_as_it_is() -> None:
    error = RuntimeError("out of memory")
    with pytest.raises(RuntimeError, match="out of memory") as raised, RankGroup().collectives(""):
        raise error
    assert raised.value is error


def test_who_does_not_come_has_as_long_as_all_may_take_to_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ranks, "MEETING_S", 1.5)
    with pytest.raises(DeadlineError, match="rank 0 of 2 did not reach its peers") as raised:
        RankGroup(WorkerContext(0, 2, 0, "127.0.0.1", free_port()), timeout_s=0.5)
    assert raised.value.details["seconds"] == 1.5


@pytest.mark.parametrize(("seen", "wrong"), [((0, 1), False), ((0, 0), True), ((), False)])
def test_ranks_that_would_share_a_gpu_are_refused_by_all(
    seen: tuple[int, ...], wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {torch.device("cuda", index): f"GPU-{index}" for index in (0, 1)}
    monkeypatch.setattr(ranks, "uuid_of", names.get)
    port = free_port()

    def check(rank: int) -> None:
        group = RankGroup(WorkerContext(rank, 2, rank, "127.0.0.1", port), timeout_s=60)
        try:
            group.check_gpus(torch.device("cuda", seen[rank]) if seen else torch.device("cpu"))
        finally:
            group.close()

    found = [spawn(f"rank-{rank}", partial(check, rank)) for rank in (0, 1)]
    for one in found:
        error = one.exception(60)
        assert isinstance(error, ConfigError) == wrong
        if wrong:
            assert "ranks 0 and 1 of 2 compute on the same GPU, GPU-0" in str(error)
