"""Workers in processes of this host: what core's tests show on Ray, and what is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cluster_doubles
import psutil
import pytest
import torch
from cluster_doubles import (
    BACKEND,
    EXIT,
    FINISH_LATE,
    RAISE_DATA,
    RAISE_FOREIGN,
    DoubleGeneration,
    PairLoss,
)

from rl_core.batch import BatchedDataDict
from rl_core.cluster import RemoteGeneration, RemotePolicy
from rl_core.errors import (
    CapabilityError,
    ConfigError,
    DataError,
    DeadlineError,
    LifecycleError,
    WorkerDiedError,
    WorkerError,
)
from rl_core.refit import refit
from rl_hosting import LocalCluster

if TYPE_CHECKING:
    from collections.abc import Iterator

ENGINE_ERROR = """
class EngineError(RuntimeError):
    def __init__(self, handle, text):
        super().__init__(text)
        self.handle = handle
"""
CONFIG = {"backend": "double", "model_name": "none", "max_new_tokens": 20}
RAGGED = [[5], [6, 7, 8, 9], [10, 11], [12, 13, 14], [15] * 9]


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The double's manifest; its workers find the double, and an engine that is not here."""
    installed, engine = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("engine")
    info = installed / "rl_double-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rl-double\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[rl_core.backends]\ndouble=cluster_doubles:BACKEND\n")
    (engine / "only_in_workers.py").write_text(ENGINE_ERROR)
    doubles = Path(cluster_doubles.__file__).parent
    path = os.pathsep.join(map(str, [doubles, installed, engine]))
    return replace(BACKEND, environment={"PYTHONPATH": path, "DOUBLE_SETTING": "from manifest"})


@pytest.fixture(scope="module")
def shared() -> Iterator[LocalCluster]:
    with LocalCluster(2, threads=1) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def pair(shared: LocalCluster, manifest: Any) -> RemoteGeneration:
    """Two replicas, awake."""
    generation = RemoteGeneration(shared, manifest, CONFIG)
    generation.prepare_for_generation()
    return generation


@pytest.fixture(scope="module")
def policy(
    shared: LocalCluster, manifest: Any, tmp_path_factory: pytest.TempPathFactory
) -> RemotePolicy:
    """Two data-parallel workers."""
    seen = tmp_path_factory.mktemp("seen")
    return RemotePolicy(shared, manifest, {**CONFIG, "model_name": str(seen)})


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(2, threads=1) as cluster:
        yield cluster


def prompts(*rows: list[int], **extra: Any) -> BatchedDataDict[Any]:
    width = max(map(len, rows), default=0)
    ids = [row + [0] * (width - len(row)) for row in rows]
    return BatchedDataDict(
        {
            "input_ids": torch.tensor(ids, dtype=torch.int64).reshape(len(rows), width),
            "input_lengths": torch.tensor([len(row) for row in rows], dtype=torch.int64),
            **extra,
        }
    )


def embedded(**config: Any) -> DoubleGeneration:
    backend = DoubleGeneration.from_config({**CONFIG, **config})
    backend.prepare_for_generation()
    return backend


def assert_equal(one: BatchedDataDict[Any], other: BatchedDataDict[Any]) -> None:
    assert list(one) == list(other)
    for key, value in one.items():
        same = value.equal(other[key]) if isinstance(value, torch.Tensor) else value == other[key]
        assert same, key


def pids(backend: Any) -> list[int]:
    return [place["pid"] for place in backend._group.places]


def wait_until_gone(processes: list[int]) -> None:
    end = time.monotonic() + 30
    while any(map(alive, processes)):
        assert time.monotonic() < end, "processes are left behind"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# -- results ---------------------------------------------------------------------------------------


def test_rows_over_two_replicas_equal_the_embedded_ones(pair: RemoteGeneration) -> None:
    data = prompts(*RAGGED, tag=["a", "b", "c", "d", "e"], score=torch.arange(5.0))
    assert_equal(pair.generate(data, greedy=True), embedded().generate(data, greedy=True))
    seeded = prompts(*RAGGED, seed=torch.arange(5))
    assert_equal(pair.generate(seeded), embedded().generate(seeded))


def test_the_asynchronous_rows_make_up_the_batch_and_come_as_they_finish(
    pair: RemoteGeneration,
) -> None:
    data = prompts([FINISH_LATE], [5], [6], [7], [8], [9], seed=torch.arange(6))

    async def rows() -> list[tuple[int, Any]]:
        return [(row, output) async for row, output in pair.generate_async(data)]

    found = asyncio.run(rows())
    assert [row for row, _ in found].index(0) >= 2  # after all of its replica
    outputs = dict(found)
    batch = BatchedDataDict.from_batches([outputs[row] for row in range(6)])
    assert_equal(batch, pair.generate(data))


def test_a_reader_that_leaves_ends_its_stream(pair: RemoteGeneration) -> None:
    async def first() -> int:
        stream = pair.generate_async(prompts(*RAGGED))
        async for row, _ in stream:
            await stream.aclose()
            return row
        return -1

    assert asyncio.run(first()) >= 0
    assert pair.generate(prompts(*RAGGED), greedy=True).size == 5


def test_a_refit_reaches_all_replicas(pair: RemoteGeneration, policy: RemotePolicy) -> None:
    report = refit(policy, pair, deadline_s=60)
    output = pair.generate(prompts(*RAGGED), greedy=True)
    assert output["weights_version"].tolist() == [report.version] * 5
    assert output["logprobs"].min() == -3.0


def test_scores_and_steps_are_dealt_to_the_ranks(policy: RemotePolicy) -> None:
    data = prompts(*RAGGED)
    assert policy.get_logprobs(data)["logprobs"].equal(-data["input_ids"].float())
    data = prompts(*[[row, row] for row in range(1, 13)], sample_mask=torch.ones(12))
    assert policy.train(data, PairLoss(), gbs=6) == {"loss": 0.5, "rank": 0, "world_size": 2}
    seen = [(Path(policy.config["model_name"]) / f"rank{rank}").read_text() for rank in (0, 1)]
    assert seen[0].startswith("[1, 2, 1, 2, 7, 8, 1, 2] [1.0, 1.0, 0.0, 0.0,")


def test_a_loss_of_the_users_own_file_reaches_the_workers(policy: RemotePolicy) -> None:
    class Own(PairLoss):
        group_size = 1

    data = prompts([1], [2], sample_mask=torch.ones(2))
    assert policy.train(data, Own(), gbs=2)["loss"] == 0.5


def test_workers_have_what_they_are_given(shared: LocalCluster, manifest: Any) -> None:
    environment = shared.environment(manifest, 0)
    assert environment["OMP_NUM_THREADS"] == "1"
    assert environment["DOUBLE_SETTING"] == "from manifest"
    with LocalCluster(2, devices=[3, "4,5"]) as cluster:
        seen = [cluster.environment(manifest, place) for place in (0, 1)]
    assert [place["CUDA_VISIBLE_DEVICES"] for place in seen] == ["3", "4,5"]
    share = max(1, (os.cpu_count() or 1) // 2)
    assert {place["OMP_NUM_THREADS"] for place in seen} == {str(share)}


# -- errors ----------------------------------------------------------------------------------------


def test_a_foreign_exception_arrives_as_text(pair: RemoteGeneration) -> None:
    with pytest.raises(WorkerError, match=r"EngineError in .*: the engine is on fire") as caught:
        pair.generate(prompts([5], [RAISE_FOREIGN]))
    assert "only_in_workers" in caught.value.remote_traceback


def test_one_of_ours_keeps_its_class(pair: RemoteGeneration, policy: RemotePolicy) -> None:
    with pytest.raises(DataError, match="row 7") as caught:
        pair.generate(prompts([5], [RAISE_DATA]))
    assert caught.value.fix == "mend it"
    with pytest.raises(KeyError, match="no such checkpoint"):
        policy.save_checkpoint("nowhere")


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
    generation = RemoteGeneration(cluster, manifest, CONFIG, call_deadline_s=20)
    generation.prepare_for_generation()
    generation._group.call_deadline_s = 1.0
    stopped = pids(generation)[1]
    os.kill(stopped, signal.SIGSTOP)
    try:
        with pytest.raises(DeadlineError, match="worker-1: attribute was not answered"):
            generation._group.wait([generation._group.remote(1, "control", "attribute", "facts")])
    finally:
        os.kill(stopped, signal.SIGKILL)


def test_what_is_wrong_is_refused_before_anything_starts(
    cluster: LocalCluster, manifest: Any
) -> None:
    with pytest.raises(ConfigError, match="num_workers is 3"):
        RemoteGeneration(cluster, manifest, CONFIG, num_workers=3)
    for wrong in ({"world_size": 0}, {"world_size": 1, "threads": 0}):
        with pytest.raises(ConfigError, match="at least 1"):
            LocalCluster(**wrong)
    with pytest.raises(ConfigError, match="1 entries for 2"):
        LocalCluster(2, devices=["0"])


def test_calls_after_shutdown_and_what_is_not_offered(
    cluster: LocalCluster, manifest: Any, tmp_path: Path
) -> None:
    policy = RemotePolicy(cluster, manifest, {**CONFIG, "model_name": str(tmp_path)})
    with pytest.raises(CapabilityError):
        policy.init_collective("127.0.0.1", 1, 2)
    processes = pids(policy)
    assert policy.shutdown()
    assert policy.shutdown()
    wait_until_gone(processes)
    with pytest.raises(LifecycleError, match="after shutdown"):
        policy.get_logprobs(prompts([1]))


def test_workers_end_with_a_driver_that_is_killed(manifest: Any) -> None:
    script = f"""
import sys
from dataclasses import replace
from cluster_doubles import BACKEND
from rl_core.cluster import RemoteGeneration
from rl_hosting import LocalCluster
manifest = replace(BACKEND, environment={dict(manifest.environment)!r})
generation = RemoteGeneration(LocalCluster(2, threads=1), manifest, {CONFIG!r})
print(*[place["pid"] for place in generation._group.places], flush=True)
sys.stdin.read()
"""
    environment = {**os.environ, "PYTHONPATH": manifest.environment["PYTHONPATH"]}
    driver = subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert driver.stdout is not None
    processes = [int(pid) for pid in driver.stdout.readline().split()]
    assert len(processes) == 2
    driver.kill()
    driver.communicate(timeout=20)
    wait_until_gone(processes)
