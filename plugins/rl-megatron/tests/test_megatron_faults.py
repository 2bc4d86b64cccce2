"""Ranks that are killed, stopped or fail: the driver is told soon, and nothing stays behind."""

from __future__ import annotations

import os
import resource
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from cluster_doubles import pids, wait_until_gone
from patience import enough_for

from rl_conformance.training import NegativeLogLikelihood, training_batch
from rl_core import create_generation, create_policy
from rl_core.batch import BatchedDataDict
from rl_core.errors import LifecycleError, RLError, WorkerDiedError
from rl_core.futures import spawn
from rl_core.weights import refit
from rl_hosting import LocalCluster
from rl_hosting.cluster import RemotePolicy
from rl_megatron.manifest import BACKEND
from rl_megatron.weights import CheckpointFiles

TENSOR, PIPELINE = "tensor_model_parallel_size", "pipeline_model_parallel_size"
#: Seconds for a call, and by when a failure must be known.
DEADLINE_S, SOON_S = 300.0, 120.0
OPTIONS: dict[str, Any] = {
    "backend": "megatron",
    "optimizer": {"lr": 1e-3, "eps": 1e-3},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {TENSOR: 2},
    "pp2": {PIPELINE: 2},
    "dp2": {},
}


@pytest.fixture(scope="module")
def warm(tiny: Callable[..., Path]) -> Iterator[float]:
    """Keeps the process that others are forked from; seconds for a rank that waits for another."""
    with LocalCluster(1, threads=1) as one:
        config = {**OPTIONS, "model_name": str(tiny())}
        create_policy(config, one).shutdown()
        seconds = enough_for(lambda: create_policy(config, one).shutdown(), least=10.0)
        policy = create_policy(config, one)
        yield seconds
        policy.shutdown()


@pytest.fixture
def start(
    warm: float, tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., RemotePolicy]]:
    """Starts a policy over two ranks; nothing is left of it afterwards."""
    directory = Path(tempfile.mkdtemp(prefix="rlm-", dir="/tmp"))
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    started: list[tuple[LocalCluster, RemotePolicy, list[int]]] = []

    def start(family: str = "llama", **config: Any) -> RemotePolicy:
        cluster = LocalCluster(2, threads=1)
        config = {**OPTIONS, "rank_timeout_s": warm, **config, "model_name": str(tiny(family))}
        policy = RemotePolicy(cluster, BACKEND, config, call_deadline_s=DEADLINE_S)
        started.append((cluster, policy, pids(policy)))
        return policy

    yield start
    for cluster, _, processes in started:
        for process in processes:
            tell(process, signal.SIGCONT)
        cluster.shutdown()
        wait_until_gone(processes)
    assert not [str(path) for path in directory.rglob("*") if path.is_socket() or path.is_file()]
    with suppress(OSError):
        directory.rmdir()


def tell(process: int, signal_: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, signal_)


def batch(**extra: Any) -> BatchedDataDict[Any]:
    return training_batch((12, 3, 31, 1, 17, 8, 2, 5), **extra)


def train(policy: Any) -> dict[str, Any]:
    found: dict[str, Any] = policy.train(batch(), NegativeLogLikelihood(), mbs=2)
    return found


def save(path: Path) -> Callable[[Any], Any]:
    return lambda policy: policy.save_checkpoint(path)


def fails_in(policy: RemotePolicy, victim: int, name: str, call: Callable[[Any], Any]) -> RLError:
    """The error of a call in whose midst a rank is killed, or stopped for good."""
    process = pids(policy)[victim]
    tell(process, signal.SIGSTOP)  # the other one waits for it
    begun = time.monotonic()
    calling = spawn("call", lambda: call(policy))
    if name == "SIGKILL":
        time.sleep(1.0)
        assert not calling.done()
        tell(process, signal.SIGKILL)
    with pytest.raises(RLError) as raised:
        calling.result(SOON_S)
    assert time.monotonic() - begun < SOON_S
    error: RLError = raised.value
    return error


def calls(tmp_path: Path, model: Path) -> dict[str, Callable[[Any], Any]]:
    def refits(policy: Any) -> None:
        config = {"backend": "hf", "model_name": str(model)}
        engine: Any = create_generation(config)
        try:
            refit(policy, engine, deadline_s=40.0, transport="ipc")
        finally:
            engine.shutdown()

    return {
        "train": train,
        "score": lambda policy: policy.get_logprobs(batch()),
        "save": save(tmp_path / "ck"),
        "refit": refits,
    }


def cases(name: str) -> Iterator[Any]:
    for layout in LAYOUTS:
        for call in ("train", "score", "save", "refit"):
            for victim in (0, 1):
                few = {"SIGKILL": [("tp2", "train", 1), ("pp2", "save", 0)], "SIGSTOP": []}
                marks = [] if (layout, call, victim) in few[name] else [pytest.mark.full]
                if (layout, call) != ("dp2", "score"):  # copies score on their own
                    yield pytest.param(layout, call, victim, marks=marks)


@pytest.mark.parametrize(("layout", "call", "victim"), list(cases("SIGKILL")))
def test_a_rank_that_is_killed_is_named(start, tiny, tmp_path, layout, call, victim):
    policy = start(**LAYOUTS[layout])
    train(policy)
    policy.save_checkpoint(tmp_path / "ck")
    before = policy.get_logprobs(batch())["logprobs"]
    error = fails_in(policy, victim, "SIGKILL", calls(tmp_path, tiny())[call])
    assert error.details.get("rank") == victim, (error, error.details)
    with pytest.raises(WorkerDiedError):
        policy.get_logprobs(batch())
    again = start(**LAYOUTS[layout], resume_from=str(tmp_path / "ck"))  # what was there is whole
    assert again.get_logprobs(batch())["logprobs"].equal(before)
    again.save_checkpoint(tmp_path / "ck")
    assert [path.name for path in tmp_path.iterdir() if "ck" in path.name] == ["ck"]


@pytest.mark.parametrize(("layout", "call", "victim"), list(cases("SIGSTOP")))
def test_a_rank_that_is_stopped_is_waited_for_no_longer_than_said(
    start, tiny, tmp_path, layout, call, victim
):
    policy = start(**LAYOUTS[layout])
    train(policy)
    error = fails_in(policy, victim, "SIGSTOP", calls(tmp_path, tiny())[call])
    assert error.details.get("rank") == victim, (error, error.details)


@contextmanager
def limited(policy: RemotePolicy, victim: int, what: int, least: int) -> Iterator[None]:
    """One rank's process may have no more of something."""
    process = pids(policy)[victim]
    before = resource.prlimit(process, what)
    resource.prlimit(process, what, (least, before[1]))
    try:
        yield
    finally:
        resource.prlimit(process, what, before)


@pytest.mark.parametrize(
    ("layout", "victim"),
    [
        ("dp2", 0),
        *(pytest.param(*case, marks=pytest.mark.full) for case in (("tp2", 0), ("tp2", 1))),
        *(pytest.param(*case, marks=pytest.mark.full) for case in (("pp2", 0), ("pp2", 1))),
    ],
)
def test_a_rank_that_cannot_write_says_so_and_all_go_on(start, tmp_path, layout, victim):
    policy = start(**LAYOUTS[layout], rank_timeout_s=DEADLINE_S)
    train(policy)
    begun = time.monotonic()
    with (
        limited(policy, victim, resource.RLIMIT_FSIZE, 20_000),
        pytest.raises(Exception, match="File too large") as raised,
    ):
        policy.save_checkpoint(tmp_path / "ck")
    assert time.monotonic() - begun < SOON_S
    assert not isinstance(raised.value, WorkerDiedError)
    assert not list(tmp_path.iterdir())
    train(policy)
    policy.save_checkpoint(tmp_path / "ck")
    expected = policy.get_logprobs(batch())["logprobs"]
    policy._group.call_all("load_checkpoint", tmp_path / "ck")
    assert policy.get_logprobs(batch())["logprobs"].equal(expected)


def test_a_rank_that_cannot_read_keeps_all_as_they_were(start, tmp_path):
    policy = start(rank_timeout_s=DEADLINE_S)
    policy.save_checkpoint(tmp_path / "ck")
    train(policy)
    expected = policy.get_logprobs(batch())["logprobs"]
    begun = time.monotonic()
    with (
        limited(policy, 1, resource.RLIMIT_NOFILE, 3),
        pytest.raises(Exception, match="Too many open files"),
    ):
        policy._group.call_all("load_checkpoint", tmp_path / "ck")
    assert time.monotonic() - begun < SOON_S
    assert policy._group.attributes("steps") == [1, 1]
    assert policy.get_logprobs(batch())["logprobs"].equal(expected)
    train(policy)


def refused(policy: Any, path: Path, model: Path, match: str) -> None:
    """Every call is refused by all ranks at once, and leaves no file."""
    for call in calls(path, model).values():
        with pytest.raises(LifecycleError, match=match):
            call(policy)
    assert not (path / "ck").exists()


def test_what_cannot_be_read_any_more_in_a_load_leaves_the_policy_refusing(
    tiny, tmp_path, monkeypatch
):
    policy = create_policy({**OPTIONS, "model_name": str(tiny())})
    policy.save_checkpoint(tmp_path / "before")
    expected = train(policy)["loss"]
    read, left = CheckpointFiles.read, [3]

    def fails(*args: Any) -> torch.Tensor:
        left[0] -= 1
        if left[0] < 0:
            raise OSError("Input/output error")
        return read(*args)

    monkeypatch.setattr(CheckpointFiles, "read", fails)
    with pytest.raises(OSError, match="Input/output error"):
        policy.load_checkpoint(tmp_path / "before")
    monkeypatch.undo()
    refused(policy, tmp_path, tiny(), "partly old and partly new")
    policy.load_checkpoint(tmp_path / "before")
    assert train(policy)["loss"] == expected
    policy.shutdown()


def test_a_rank_that_cannot_be_built_ends_the_others(tiny, warm):
    """Each reads the checkpoint on its own; here they all find the sizes wrong."""
    with LocalCluster(2, threads=1) as cluster, pytest.raises(RLError, match="3"):
        create_policy({**OPTIONS, TENSOR: 3, "model_name": str(tiny())}, cluster)
