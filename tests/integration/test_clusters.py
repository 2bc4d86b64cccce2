"""Backends as Ray actors: results, errors, deaths and what is left behind."""

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
from rl_core.cluster import RayVirtualCluster, RemoteGeneration, RemotePolicy
from rl_core.errors import (
    CapabilityError,
    ConfigError,
    DataError,
    DeadlineError,
    LifecycleError,
    MissingEngineError,
    WeightsTornError,
    WorkerDiedError,
    WorkerError,
)
from rl_core.futures import wait
from rl_core.refit import refit

if TYPE_CHECKING:
    from collections.abc import Iterator

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.ray

ENGINE_ERROR = """
class EngineError(RuntimeError):
    def __init__(self, handle, text):
        super().__init__(text)
        self.handle = handle
"""
CONFIG = {"backend": "double", "model_name": "none", "max_new_tokens": 20}


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The double's manifest; its workers find the double, and an engine that is not here."""
    installed, engine = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("engine")
    info = installed / "rl_double-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rl-double\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[rl_core.backends]\ndouble=cluster_doubles:BACKEND\n")
    (engine / "only_in_workers.py").write_text(ENGINE_ERROR)
    path = os.pathsep.join(map(str, [Path(__file__).parent, installed, engine]))
    return replace(BACKEND, environment={"PYTHONPATH": path, "DOUBLE_SETTING": "from manifest"})


@pytest.fixture(scope="module")
def shared() -> Iterator[RayVirtualCluster]:
    """Starts Ray, and holds the workers of the tests that leave them as they are."""
    options = {"num_cpus": 4}
    with RayVirtualCluster([2], max_colocated_worker_groups=2, ray_options=options) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def pair(shared: RayVirtualCluster, manifest: Any) -> RemoteGeneration:
    """Two replicas, awake."""
    generation = RemoteGeneration(shared, manifest, CONFIG)
    generation.prepare_for_generation()
    return generation


@pytest.fixture(scope="module")
def policy(
    shared: RayVirtualCluster, manifest: Any, tmp_path_factory: pytest.TempPathFactory
) -> RemotePolicy:
    """Two data-parallel workers."""
    seen = tmp_path_factory.mktemp("seen")
    return RemotePolicy(shared, manifest, {**CONFIG, "model_name": str(seen)})


@pytest.fixture
def cluster(shared: RayVirtualCluster) -> Iterator[RayVirtualCluster]:
    """Two bundles for the workers of one test."""
    with RayVirtualCluster([2]) as cluster:
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


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until_gone(pids: list[int]) -> None:
    end = time.monotonic() + 30
    while any(map(alive, pids)):
        assert time.monotonic() < end, "processes are left behind"
        time.sleep(0.05)


def pids(generation: Any) -> list[int]:
    return [place["pid"] for place in generation._group.places]


RAGGED = [[5], [6, 7, 8, 9], [10, 11], [12, 13, 14], [15] * 9]


# -- generation ------------------------------------------------------------------------------------


def test_greedy_rows_over_two_replicas_equal_the_embedded_ones(pair: RemoteGeneration) -> None:
    data = prompts(*RAGGED, tag=["a", "b", "c", "d", "e"], score=torch.arange(5.0))
    assert_equal(pair.generate(data, greedy=True), embedded().generate(data, greedy=True))


def test_rows_with_given_seeds_equal_the_embedded_ones(pair: RemoteGeneration) -> None:
    data = prompts(*RAGGED, seed=torch.arange(5))
    assert_equal(pair.generate(data), embedded().generate(data))


def test_without_a_seed_two_calls_differ(pair: RemoteGeneration) -> None:
    data = prompts(*RAGGED)
    assert not pair.generate(data)["output_ids"].equal(pair.generate(data)["output_ids"])


def test_a_configured_seed_and_samples_equal_the_embedded_ones(
    cluster: RayVirtualCluster, manifest: Any
) -> None:
    config = {**CONFIG, "seed": 7, "num_samples": 3, "pad_token_id": 999}
    generation = RemoteGeneration(cluster, manifest, config)
    generation.prepare_for_generation()
    data = prompts(*RAGGED)
    expected = embedded(seed=7, num_samples=3, pad_token_id=999).generate(data)
    assert_equal(generation.generate(data), expected)
    assert (expected["output_ids"] == 999).any()


@pytest.mark.parametrize("rows", [[], [[3, 4]]])
def test_fewer_rows_than_replicas(pair: RemoteGeneration, rows: list[list[int]]) -> None:
    data = prompts(*rows)
    assert_equal(pair.generate(data, greedy=True), embedded().generate(data, greedy=True))


def test_the_asynchronous_rows_make_up_the_batch(pair: RemoteGeneration) -> None:
    data = prompts(*RAGGED, seed=torch.arange(5), tag=list("abcde"))

    async def collect() -> dict[int, Any]:
        return {row: output async for row, output in pair.generate_async(data)}

    rows = asyncio.run(collect())
    batch = BatchedDataDict.from_batches([rows[row] for row in range(5)])
    assert_equal(batch, pair.generate(data))


def test_asynchronous_rows_come_as_they_finish(pair: RemoteGeneration) -> None:
    data = prompts([FINISH_LATE], [5], [6], [7], [8], [9])

    async def order() -> list[int]:
        return [row async for row, _ in pair.generate_async(data, greedy=True)]

    # Rows 0, 2 and 4 share a replica, which finishes row 0 last.
    rows = asyncio.run(order())
    assert sorted(rows) == [0, 1, 2, 3, 4, 5]
    assert rows.index(0) > rows.index(2)
    assert rows.index(0) > rows.index(4)


def test_a_stream_that_is_left_early_frees_its_replicas(pair: RemoteGeneration) -> None:
    data = prompts(*RAGGED)

    async def first() -> None:
        stream = pair.generate_async(data)
        await anext(stream)
        await stream.aclose()

    asyncio.run(first())
    assert pair.generate(data, greedy=True).size == 5


def test_a_bad_row_is_named_by_its_place_in_the_whole_batch(pair: RemoteGeneration) -> None:
    data = prompts(*RAGGED)
    data["input_ids"][3, -1] = 5
    with pytest.raises(DataError, match="row 3"):
        pair.generate(data)


def test_generating_while_asleep_is_the_embedded_error(pair: RemoteGeneration) -> None:
    assert pair.finish_generation()
    with pytest.raises(LifecycleError, match="asleep") as caught:
        pair.generate(prompts([5]))
    assert isinstance(caught.value, WorkerError)
    assert pair.prepare_for_generation()


def test_a_worker_has_the_variables_of_the_manifest(pair: RemoteGeneration) -> None:
    assert pair._group.attributes("environment") == ["from manifest"] * 2


def test_workers_run_with_the_python_of_their_backend(
    shared: RayVirtualCluster, manifest: Any, tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nDOUBLE_SETTING="of python" exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    with RayVirtualCluster([1], py_executables={"double": str(python)}) as cluster:
        generation = RemoteGeneration(cluster, manifest, CONFIG)
        assert generation._group.attributes("environment") == ["of python"]


def test_a_python_that_is_not_there_is_refused(shared: RayVirtualCluster, manifest: Any) -> None:
    with (
        RayVirtualCluster([1], py_executables={"double": "/nowhere/python"}) as cluster,
        pytest.raises(ConfigError, match="/nowhere/python"),
    ):
        RemoteGeneration(cluster, manifest, CONFIG)


def test_unsupported_transports_are_refused_here(pair: RemoteGeneration) -> None:
    with pytest.raises(CapabilityError, match="collective"):
        pair.init_collective("127.0.0.1", 1, 2)


# -- errors and deaths -----------------------------------------------------------------------------


def test_an_exception_that_cannot_be_imported_here_arrives_as_text(pair: RemoteGeneration) -> None:
    with pytest.raises(RuntimeError, match="the engine is on fire") as caught:
        pair.generate(prompts([RAISE_FOREIGN]))
    error = caught.value
    assert isinstance(error, WorkerError)
    assert error.remote_type == "only_in_workers.EngineError"
    assert "in _fail" in error.remote_traceback
    assert "worker-0" in str(error)


def test_an_error_of_ours_keeps_class_fix_and_details(pair: RemoteGeneration) -> None:
    with pytest.raises(DataError) as caught:
        pair.generate(prompts([RAISE_DATA]))
    error = caught.value
    assert isinstance(error, WorkerError)
    assert (error.fix, error.details["row"]) == ("mend it", 7)


def test_a_stream_raises_the_same_errors(pair: RemoteGeneration) -> None:
    async def read() -> None:
        async for _ in pair.generate_async(prompts([RAISE_FOREIGN])):
            pass

    with pytest.raises(RuntimeError, match="on fire") as caught:
        asyncio.run(read())
    assert isinstance(caught.value, WorkerError)


def test_a_backend_that_cannot_be_built_leaves_the_place_free(
    cluster: RayVirtualCluster, manifest: Any
) -> None:
    with pytest.raises(ConfigError, match="no model at 'missing'") as caught:
        RemoteGeneration(cluster, manifest, {**CONFIG, "model_name": "missing"}, num_workers=1)
    assert caught.value.details["key"] == "model_name"
    cluster.claim("another group")


def test_a_backend_without_facts_is_an_error_that_leaves_no_worker(
    cluster: RayVirtualCluster, manifest: Any
) -> None:
    config = {**CONFIG, "fault": "no facts"}
    with pytest.raises(AttributeError, match="facts"):
        RemoteGeneration(cluster, manifest, config, num_workers=1)
    cluster.claim("another group")


def test_a_plugin_that_the_workers_lack_is_named(cluster: RayVirtualCluster) -> None:
    with pytest.raises(WorkerError, match=r"BackendNotFoundError.*double"):
        RemoteGeneration(cluster, BACKEND, CONFIG, num_workers=1)


def test_a_killed_worker_is_named_and_shutdown_still_works(
    cluster: RayVirtualCluster, manifest: Any
) -> None:
    generation = RemoteGeneration(cluster, manifest, CONFIG)
    generation.prepare_for_generation()
    victim, survivor = pids(generation)
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match="worker-0"):
        generation.generate(prompts(*RAGGED))
    assert generation.shutdown()
    wait_until_gone([survivor])


def test_a_worker_that_exits_in_a_call_is_an_error(
    cluster: RayVirtualCluster, manifest: Any
) -> None:
    generation = RemoteGeneration(cluster, manifest, CONFIG, num_workers=1)
    generation.prepare_for_generation()
    with pytest.raises(WorkerDiedError, match="worker-0"):
        generation.generate(prompts([EXIT]))


def test_a_call_has_a_deadline(pair: RemoteGeneration, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair._group, "call_deadline_s", 0.0)
    with pytest.raises(DeadlineError):
        pair.prepare_for_generation()


def test_shutdown_ends_the_processes_and_can_be_repeated(
    cluster: RayVirtualCluster, manifest: Any
) -> None:
    generation = RemoteGeneration(cluster, manifest, CONFIG, num_workers=1)
    processes = pids(generation)
    assert generation.shutdown()
    assert generation.shutdown()
    wait_until_gone(processes)
    with pytest.raises(LifecycleError, match="shutdown"):
        generation.prepare_for_generation()


DRIVER = """
import sys
from dataclasses import replace
sys.path.insert(0, sys.argv[1])
from cluster_doubles import BACKEND
from rl_core.cluster import RayVirtualCluster, RemoteGeneration

cluster = RayVirtualCluster([1])
manifest = replace(BACKEND, environment={"PYTHONPATH": sys.argv[2]})
config = {"backend": "double", "model_name": "none"}
generation = RemoteGeneration(cluster, manifest, config)
print(*[place["pid"] for place in generation._group.places], flush=True)
sys.stdin.read()
"""


def test_workers_end_with_a_driver_that_is_killed(manifest: Any) -> None:
    command = [sys.executable, "-c", DRIVER, str(Path(__file__).parent)]
    with subprocess.Popen(
        [*command, manifest.environment["PYTHONPATH"]],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={key: value for key, value in os.environ.items() if not key.startswith("RAY_")},
    ) as driver:
        assert driver.stdout is not None
        workers = [int(pid) for pid in driver.stdout.readline().split()]
        driver.kill()
    assert workers
    wait_until_gone(workers)


# -- refit -----------------------------------------------------------------------------------------


def test_a_refit_reaches_all_replicas_and_their_versions_agree(
    pair: RemoteGeneration, policy: RemotePolicy
) -> None:
    report = refit(policy, pair, deadline_s=60)
    assert report.receivers == 2
    assert pair.weights_version == report.version
    output = pair.generate(prompts(*RAGGED), greedy=True)
    assert output["weights_version"].tolist() == [report.version] * 5
    assert output["logprobs"].min() == -3.0


def test_the_older_handles_reach_all_replicas(pair: RemoteGeneration, policy: RemotePolicy) -> None:
    before = pair.weights_version
    pair.prepare_refit_info(policy.prepare_info_for_collective())
    for keys in policy.prepare_weights_for_ipc():
        assert pair.update_weights(policy.get_weights_ipc_handles(keys))
    assert pair.weights_version == before + 1


def test_replicas_of_different_versions_do_not_serve_until_a_refit(
    pair: RemoteGeneration, policy: RemotePolicy
) -> None:
    pair._group.call(0, "prepare_refit_info", policy.prepare_refit_info())
    sending = policy.stream_weights_via_ipc_zmq(receivers=1, deadline_s=60)
    receiving = pair._group.submit_refit(0, "update_weights_via_ipc_zmq", deadline_s=60)
    wait([*sending, receiving], 60)
    with pytest.raises(WeightsTornError, match="serve different weights"):
        _ = pair.weights_version
    with pytest.raises(WeightsTornError, match="serve different weights"):
        pair.generate(prompts(*RAGGED))
    report = refit(policy, pair, deadline_s=60)
    assert pair.weights_version == report.version


# -- policy ----------------------------------------------------------------------------------------


def test_scores_keep_order_and_width(policy: RemotePolicy) -> None:
    data = prompts(*RAGGED)
    data["input_ids"] = torch.nn.functional.pad(data["input_ids"], (0, 3))
    assert policy.get_logprobs(data)["logprobs"].equal(-data["input_ids"].float())
    reference = policy.get_reference_logprobs(data)["reference_logprobs"]
    assert reference.equal(-data["input_ids"].float())


def test_every_step_is_divided_among_the_ranks_with_groups_whole(policy: RemotePolicy) -> None:
    data = prompts(*[[row, row] for row in range(1, 13)], sample_mask=torch.ones(12))
    result = policy.train(data, PairLoss(), gbs=6)
    assert result == {"loss": 0.5, "rank": 0, "world_size": 2}
    seen = [(Path(policy.config["model_name"]) / f"rank{rank}").read_text() for rank in (0, 1)]
    # Three pairs a step: rank 0 fills up with the first pair, which does not count.
    assert seen == [
        "[1, 2, 1, 2, 7, 8, 1, 2] [1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0] 8\n",
        "[3, 4, 5, 6, 9, 10, 11, 12] [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0] 8\n",
    ]


def test_rows_that_do_not_fill_the_global_batches_are_refused(policy: RemotePolicy) -> None:
    with pytest.raises(DataError, match="no multiple"):
        policy.train(prompts([1], [2], [3], sample_mask=torch.ones(3)), PairLoss(), gbs=2)


def test_a_builtin_exception_keeps_its_class(policy: RemotePolicy) -> None:
    with pytest.raises(KeyError, match="no such checkpoint") as caught:
        policy.save_checkpoint("nowhere")
    assert isinstance(caught.value, WorkerError)


# -- the cluster -----------------------------------------------------------------------------------


def test_resources_that_are_not_there_are_named(shared: RayVirtualCluster) -> None:
    with pytest.raises(ConfigError, match=r"Asked for: \[9\] bundles of 1 CPU.*Ray has: 4 CPU"):
        RayVirtualCluster([9], deadline_s=0.5)


def test_more_groups_than_places_are_refused(cluster: RayVirtualCluster) -> None:
    cluster.claim("one")
    with pytest.raises(ConfigError, match=r"taken by one") as caught:
        cluster.claim("two")
    assert caught.value.fix is not None
    assert "max_colocated_worker_groups=2" in caught.value.fix


def test_a_cluster_that_is_shut_down_takes_no_group(shared: RayVirtualCluster) -> None:
    cluster = RayVirtualCluster([1])
    cluster.shutdown()
    cluster.shutdown()
    with pytest.raises(LifecycleError, match="shut down"):
        cluster.claim("one")


def test_workers_end_with_their_cluster(shared: RayVirtualCluster, manifest: Any) -> None:
    cluster = RayVirtualCluster([1])
    processes = pids(RemoteGeneration(cluster, manifest, CONFIG))
    cluster.shutdown()
    wait_until_gone(processes)


@pytest.mark.parametrize("bundles", [[], [0], [2, -1]])
def test_bundles_must_be_counts(bundles: list[int]) -> None:
    with pytest.raises(ConfigError, match="bundle_ct_per_node_list"):
        RayVirtualCluster(bundles)


def test_more_gpus_than_a_node_has_are_refused(shared: RayVirtualCluster) -> None:
    with pytest.raises(ConfigError, match="8 bundles with a GPU each, and has 4"):
        RayVirtualCluster([8], use_gpus=True, num_gpus_per_node=4)


def test_more_workers_than_bundles_are_refused(cluster: RayVirtualCluster, manifest: Any) -> None:
    with pytest.raises(ConfigError, match="num_workers is 3, the cluster has 2"):
        RemoteGeneration(cluster, manifest, CONFIG, num_workers=3)


def test_a_missing_ray_is_said_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingEngineError, match="cannot be imported") as caught:
        RayVirtualCluster([1])
    assert caught.value.fix == 'pip install "rl-core[ray]"'
