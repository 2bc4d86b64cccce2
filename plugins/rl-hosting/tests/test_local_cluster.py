"""What is particular to workers in processes of this host; see also test_clusters."""

from __future__ import annotations

import concurrent.futures
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import psutil
import pytest
from cluster_doubles import CONFIG, EXIT, manifest_in, pids, stop, wait_until_gone
from patience import enough_for
from prompt_rows import prompts

from rl_core.errors import ConfigError, DeadlineError, WorkerDiedError
from rl_core.futures import spawn, within
from rl_hosting import LocalCluster, local_cluster
from rl_hosting.cluster import RemoteGeneration
from rl_hosting.local_cluster import LocalWorkers


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return manifest_in(tmp_path_factory.mktemp("double"))


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(2, threads=1) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def pair(manifest: Any) -> Iterator[LocalWorkers]:
    """Two workers, for the tests that leave them as they are."""
    with LocalCluster(2, threads=1) as cluster:
        yield RemoteGeneration(cluster, manifest, CONFIG)._group


def test_workers_have_what_they_are_given(cluster: LocalCluster, manifest: Any) -> None:
    environment = cluster.environment(manifest, 0)
    assert environment["OMP_NUM_THREADS"] == "1"
    assert environment["DOUBLE_SETTING"] == "from manifest"
    with LocalCluster(2, devices=[3, "4,5"]) as other:
        seen = [other.environment(manifest, place) for place in (0, 1)]
    assert [place["CUDA_VISIBLE_DEVICES"] for place in seen] == ["3", "4,5"]
    share = max(1, (os.cpu_count() or 1) // 2)
    assert {place["OMP_NUM_THREADS"] for place in seen} == {str(share)}


@pytest.mark.parametrize(
    ("count", "visible", "places", "expected"),
    [
        (8, None, 8, ["0", "1", "2", "3", "4", "5", "6", "7"]),
        (4, "6,7,GPU-a,GPU-b", 2, ["6,7", "GPU-a,GPU-b"]),
        (3, None, 2, ["0", "1"]),
        (1, None, 1, ["0"]),
        (1, "5", 2, ["5", "5"]),  # replicas of an engine may share one
        (0, None, 2, [None, None]),
    ],
)
def test_workers_have_an_equal_share_of_the_gpus(
    count: int,
    visible: str | None,
    places: int,
    expected: list[str | None],
    manifest: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with LocalCluster(places) as cluster:
        seen = [cluster.environment(manifest, place) for place in range(places)]
    assert [place.get("CUDA_VISIBLE_DEVICES") for place in seen] == expected


def test_what_cannot_be_built_leaves_no_process(cluster: LocalCluster, manifest: Any) -> None:
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(ConfigError, match="no model at 'missing'"):
        RemoteGeneration(cluster, manifest, {**CONFIG, "model_name": "missing"})
    time.sleep(0.2)
    wait_until_gone([p.pid for p in set(psutil.Process().children(recursive=True)) - before])


def test_a_worker_that_dies_is_named_with_its_rank(cluster: LocalCluster, manifest: Any) -> None:
    generation = RemoteGeneration(cluster, manifest, CONFIG)
    generation.prepare_for_generation()
    with pytest.raises(WorkerDiedError, match=r"worker-\d.*exit status 3") as caught:
        generation.generate(prompts([EXIT], [5]))
    assert caught.value.details["rank"] in (0, 1)
    processes = pids(generation)
    generation.shutdown()
    wait_until_gone(processes)


def test_a_worker_that_does_not_answer_is_named(cluster: LocalCluster, manifest: Any) -> None:
    generation = RemoteGeneration(cluster, manifest, CONFIG, call_deadline_s=60)
    generation.prepare_for_generation()
    generation._group.call_deadline_s = 1.0
    stopped = pids(generation)[1]
    stop(stopped)
    try:
        late = "worker-1 did not answer attribute"
        with pytest.raises(DeadlineError, match=late) as raised:
            generation._group.wait([generation._group.remote(1, "control", "attribute", "facts")])
        assert raised.value.details["rank"] == 1
    finally:
        os.kill(stopped, signal.SIGKILL)


def test_a_worker_that_does_not_answer_in_the_time_of_a_larger_call_is_named(
    cluster: LocalCluster, manifest: Any
) -> None:
    generation = RemoteGeneration(cluster, manifest, CONFIG)
    generation.prepare_for_generation()
    seconds = enough_for(lambda: generation._group.attributes("facts"), least=1.0)
    stopped = pids(generation)[1]
    stop(stopped)
    begun = time.monotonic()
    try:
        for ask in (generation._group.attributes, lambda n: generation._group.attribute(1, n)):
            with (
                pytest.raises(DeadlineError, match="rank 1 of 2 did not") as raised,
                within(seconds),
            ):
                ask("facts")
            assert raised.value.details["rank"] == 1
        assert time.monotonic() - begun < 10 * seconds
    finally:
        os.kill(stopped, signal.SIGKILL)


def test_calls_reach_a_worker_in_the_order_in_which_they_are_made(
    pair: LocalWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    second_sent = threading.Event()

    def late(name: str, function: Callable[[], Any]) -> Any:
        return spawn(name, lambda: (second_sent.wait(0.5), function())[1])

    with monkeypatch.context() as patched:
        patched.setattr(local_cluster, "spawn", late)
        first = pair.remote(0, "work", "call", "__setattr__", ("mark", 1), {})
    second = pair.remote(0, "work", "call", "__setattr__", ("mark", 2), {})
    second.add_done_callback(lambda _: second_sent.set())
    pair.wait([first, second])
    assert pair.attribute(0, "mark") == 2


@pytest.mark.parametrize("ask", ["submit_refit", "call_all", "call_each", "attributes"])
def test_all_ranks_get_the_calls_of_two_threads_in_one_order(
    pair: LocalWorkers, monkeypatch: pytest.MonkeyPatch, ask: str
) -> None:
    got: dict[tuple[int, str], None] = {}
    others: list[Future[Any]] = []

    def call(name: str) -> None:
        getattr(pair, ask)(name, *([pair.ranks] if ask == "call_each" else []))

    def remote(rank: int, group: str, method: str, name: str, *args: Any) -> Future[None]:
        got.setdefault((rank, name))
        if not others:  # another thread calls meanwhile
            others.append(spawn("another", lambda: call("another")))
            concurrent.futures.wait(others, 0.5)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    with monkeypatch.context() as patched:
        patched.setattr(pair, "remote", remote)
        call("one")
        others[0].result(60)
    orders = [[name for at, name in got if at == rank] for rank in pair.ranks]
    assert orders[0] == orders[1]
    assert len(orders[0]) == 2


def test_what_is_wrong_is_refused_before_anything_starts() -> None:
    for wrong in ({"world_size": 0}, {"world_size": 1, "threads": 0}):
        with pytest.raises(ConfigError, match="at least 1"):
            LocalCluster(**wrong)
    with pytest.raises(ConfigError, match="1 entries, but world_size is 2"):
        LocalCluster(2, devices=["0"])
