"""Ranks that are killed, stopped or hang in a refit: named in time, and the next refit works."""

from __future__ import annotations

import itertools
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import sharded
from cluster_doubles import pids, wait_until_gone
from sharded import engine_of, same, weights

from rl_conformance.reference.generation import ReferenceGeneration
from rl_core.errors import LoopWarning, RLError, WeightsTornError, WorkerDiedError
from rl_core.interfaces import WeightSink
from rl_core.weights import refit
from rl_hosting import LocalCluster
from rl_hosting.cluster import RemotePolicy

#: Seconds for a refit, and by when its failure must be known.
DEADLINE_S, SOON_S = 30.0, 12.0
#: Seconds for what hangs in a collective to end: gloo cannot be interrupted.
CLOSED_S = 40.0
PHASES = ("discover", "admit", "first tensor", "middle tensor", "last tensor", "seal", "commit")
#: What ordinary CI runs of all that can happen to 2 ranks.
SAMPLE = [
    ("admit", "SIGKILL", 1),
    ("middle tensor", "SIGKILL", 0),
    ("middle tensor", "SIGSTOP", 1),
]


def cases() -> Iterator[Any]:
    for ranks, phase, name in itertools.product((2, 4), PHASES, ("SIGKILL", "SIGSTOP")):
        for victim in {0, ranks - 1}:
            sampled = ranks == 2 and (phase, name, victim) in SAMPLE
            marks = [] if sampled else [pytest.mark.full]
            label = f"{ranks}-{phase}-{name}-rank{victim}".replace(" ", "-")
            yield pytest.param(ranks, phase, name, victim, id=label, marks=marks)


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return sharded.manifest_in(tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="module")
def warm(manifest: Any, model: Path) -> Iterator[None]:
    """Keeps the process that others are forked from."""
    with LocalCluster(1, threads=1) as one, sharded.sharded_policy(one, manifest, model):
        yield


@pytest.fixture
def start(warm: None, manifest: Any, model: Path) -> Iterator[Callable[[int], RemotePolicy]]:
    """Starts a policy over some ranks; all that is left of it afterwards is killed."""
    started = []

    def start(ranks: int) -> RemotePolicy:
        cluster = LocalCluster(ranks, threads=1)
        config = sharded.config_of(model, shard_ranks=ranks)
        started.append((cluster, sharded.RemotePolicy(cluster, manifest, config)))
        return started[-1][1]

    yield start
    for cluster, policy in started:
        for process in pids(policy):
            end(process)
        cluster.shutdown()
        wait_until_gone(pids(policy))


def end(process: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


def at(phase: str, engine: ReferenceGeneration, happens: Callable[[], None]) -> list[float]:
    """Has something happen once, when the engine is in a phase; the moment at which it did."""
    moments: list[float] = []

    def once() -> None:
        if not moments:
            happens()
            moments.append(time.monotonic())

    if phase == "discover":
        answer = engine.receive_weights
        engine.receive_weights = lambda *a, **k: (once(), answer(*a, **k))[1]
    elif phase == "commit":
        engine._receiver._on_commit = lambda version: once()
    else:
        make = engine.weight_sink
        names = [spec.name for spec in make().specs() if spec.alias_of is None]
        places = {"first tensor": 0, "middle tensor": len(names) // 2, "last tensor": -1}

        def sink() -> WeightSink:
            made = make()
            made.pieces = lambda: None  # so that every tensor is written through the sink
            begin, write, finish = made.begin, made.write, made.finish
            if phase == "admit":
                made.begin = lambda version: (once(), begin(version))[1]
            elif phase == "seal":
                made.finish = lambda version: (once(), finish(version))[1]
            else:
                wanted = names[places[phase]]

                def writing(name: str, *args: Any, **kwargs: Any) -> None:
                    if name == wanted:
                        once()
                    write(name, *args, **kwargs)

                made.write = writing
            return made

        engine._receiver._new_sink = sink
    return moments


def restored(engine: ReferenceGeneration) -> None:
    engine.__dict__.pop("receive_weights", None)
    engine._receiver._new_sink = engine.weight_sink
    engine._receiver._on_commit = engine._on_commit


def all_closed(policy: RemotePolicy, ranks: set[int]) -> None:
    """Waits until every source of these ranks is closed."""
    until = time.monotonic() + CLOSED_S
    for rank in ranks:
        while (count := policy._group.attribute(rank, "sources"))["made"] != count["closed"]:
            assert time.monotonic() < until, f"rank {rank}: {count}"
            time.sleep(0.05)


@pytest.mark.parametrize(("ranks", "phase", "name", "victim"), list(cases()))
def test_a_rank_that_is_killed_or_stopped_is_named_in_time(
    start: Callable[[int], RemotePolicy],
    model: Path,
    ranks: int,
    phase: str,
    name: str,
    victim: int,
) -> None:
    policy, engine = start(ranks), engine_of(model)
    refit(policy, engine, deadline_s=DEADLINE_S)
    old, process = weights(engine), pids(policy)[victim]
    moments = at(phase, engine, lambda: os.kill(process, signal.Signals[name]))
    report, error = None, None
    try:
        report = refit(policy, engine, deadline_s=DEADLINE_S, bucket_bytes=65536)
    except RLError as raised:
        error = raised
    assert moments, "it did not happen"
    # Who is stopped before it takes part is named as any other who does not come: at the deadline.
    absent = name == "SIGSTOP" and phase in ("discover", "admit")
    assert time.monotonic() - moments[0] < (DEADLINE_S if absent else SOON_S)
    restored(engine)
    if error is None:  # a follower has no part in the commit, nor in what is read already
        assert report is not None
        assert victim
        assert name == "SIGKILL"
        assert phase in ("last tensor", "seal", "commit")
    else:
        assert error.details.get("rank") == victim, error
        gone = "died|ended" if name == "SIGKILL" else "stopped|does not answer"
        assert re.search(gone, str(error)), error
    engine.prepare_for_generation()
    try:
        engine._receiver.check()
        torn = False
    except WeightsTornError:
        torn = True
    assert torn or error is None or same(weights(engine), old) or phase == "commit"

    if name == "SIGSTOP":
        os.kill(process, signal.SIGCONT)
    all_closed(policy, set(range(ranks)) - {victim})

    if name == "SIGKILL":
        with pytest.raises(WorkerDiedError):
            policy.prepare_refit_info()
        processes = pids(policy)
        policy.shutdown()
        wait_until_gone(processes)
        policy = start(ranks)
    another = pytest.warns(LoopWarning, match="another trainer")
    with another if name == "SIGKILL" else nullcontext():
        refit(policy, engine, deadline_s=DEADLINE_S)
    engine._receiver.check()
    assert same(weights(engine), old)
    all_closed(policy, set(range(ranks)))
