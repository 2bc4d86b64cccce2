"""What is the same for every launcher: results, errors, deaths and what is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from cluster_doubles import (
    BACKEND,
    CONFIG,
    DoubleGeneration,
    PairLoss,
    manifest_in,
    pids,
    stop,
    wait_until_gone,
)
from prompt_rows import prompts

from rl_core.batch import BatchedDataDict
from rl_core.errors import (
    ConfigError,
    DataError,
    DeadlineError,
    LifecycleError,
    WeightsTornError,
    WorkerDiedError,
    WorkerError,
)
from rl_core.futures import wait
from rl_core.weights import refit
from rl_hosting.cluster import RemoteGeneration, RemotePolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rl_hosting.cluster import Cluster

#: What a driver writes for two places.
TWO_PLACES = {"rl_hosting": "LocalCluster(2, threads=1)", "rl_ray": "RayVirtualCluster([2])"}


@pytest.fixture(
    scope="module",
    params=["rl_hosting", pytest.param("rl_ray", marks=[pytest.mark.ray, pytest.mark.full])],
)
def launcher(request: pytest.FixtureRequest) -> str:
    """The package whose cluster is under test."""
    pytest.importorskip(request.param)
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return manifest_in(tmp_path_factory.mktemp("double"))


@pytest.fixture(scope="module")
def launch(launcher: str) -> Callable[..., Any]:
    """Makes a cluster of so many places, with room for so many backends."""
    if launcher == "rl_hosting":
        from rl_hosting import LocalCluster

        return lambda places, groups=1: LocalCluster(places, threads=1)
    from rl_ray import RayVirtualCluster

    return lambda places, groups=1: RayVirtualCluster(
        [places], max_colocated_worker_groups=groups, ray_options={"num_cpus": 4}
    )


@pytest.fixture(scope="module")
def shared(launch: Callable[..., Any]) -> Iterator[Cluster]:
    """Holds the workers of the tests that leave them as they are."""
    with launch(2, groups=2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def pair(shared: Cluster, manifest: Any) -> RemoteGeneration:
    """Two replicas, awake."""
    generation = RemoteGeneration(shared, manifest, CONFIG)
    generation.prepare_for_generation()
    return generation


@pytest.fixture(scope="module")
def policy(
    shared: Cluster, manifest: Any, tmp_path_factory: pytest.TempPathFactory
) -> RemotePolicy:
    """Two data-parallel workers."""
    seen = tmp_path_factory.mktemp("seen")
    return RemotePolicy(shared, manifest, {**CONFIG, "model_name": str(seen)})


@pytest.fixture
def cluster(shared: Cluster, launch: Callable[..., Any]) -> Iterator[Cluster]:
    """Two places for the workers of one test."""
    with launch(2) as cluster:
        yield cluster


def embedded(**config: Any) -> DoubleGeneration:
    backend = DoubleGeneration.from_config({**CONFIG, **config})
    backend.prepare_for_generation()
    return backend


def assert_equal(one: BatchedDataDict[Any], other: BatchedDataDict[Any]) -> None:
    assert list(one) == list(other)
    for key, value in one.items():
        same = value.equal(other[key]) if isinstance(value, torch.Tensor) else value == other[key]
        assert same, key


RAGGED = [[5], [6, 7, 8, 9], [10, 11], [12, 13, 14], [15] * 9]


# -- generation ------------------------------------------------------------------------------------


def test_greedy_rows_over_two_replicas_equal_the_embedded_ones(pair: RemoteGeneration) -> None:
    data = prompts(*RAGGED, tag=["a", "b", "c", "d", "e"], score=torch.arange(5.0))
    assert_equal(pair.generate(data, greedy=True), embedded().generate(data, greedy=True))


def test_a_configured_seed_and_samples_equal_the_embedded_ones(
    cluster: Cluster, manifest: Any
) -> None:
    config = {**CONFIG, "seed": 7, "num_generations": 3, "pad_token_id": 999}
    generation = RemoteGeneration(cluster, manifest, config)
    generation.prepare_for_generation()
    data = prompts(*RAGGED)
    expected = embedded(seed=7, num_generations=3, pad_token_id=999).generate(data)
    assert_equal(generation.generate(data), expected)
    assert (expected["output_ids"] == 999).any()


def test_the_asynchronous_rows_make_up_the_batch(pair: RemoteGeneration) -> None:
    data = prompts(*RAGGED, seed=torch.arange(5), tag=list("abcde"))

    async def collect() -> dict[int, Any]:
        return {row: output async for row, output in pair.generate_async(data)}

    rows = asyncio.run(collect())
    batch = BatchedDataDict.from_batches([rows[row] for row in range(5)])
    assert_equal(batch, pair.generate(data))


def test_a_bad_row_is_named_by_its_place_in_the_whole_batch(pair: RemoteGeneration) -> None:
    data = prompts(*RAGGED)
    data["input_ids"][3, -1] = 5
    with pytest.raises(DataError, match="row 3"):
        pair.generate(data)


# -- errors and deaths -----------------------------------------------------------------------------


def test_a_backend_that_cannot_be_built_leaves_its_place_free(
    cluster: Cluster, manifest: Any
) -> None:
    with pytest.raises(ConfigError, match="no model at 'missing'") as caught:
        RemoteGeneration(cluster, manifest, {**CONFIG, "model_name": "missing"}, num_workers=1)
    assert caught.value.details["key"] == "model_name"
    with pytest.raises(AttributeError, match="facts"):
        RemoteGeneration(cluster, manifest, {**CONFIG, "fault": "no facts"}, num_workers=1)
    assert RemoteGeneration(cluster, manifest, CONFIG, num_workers=1).weights_version == 0


def test_a_plugin_that_the_workers_lack_is_named(cluster: Cluster) -> None:
    with pytest.raises(WorkerError, match=r"BackendNotFoundError.*double"):
        RemoteGeneration(cluster, BACKEND, CONFIG, num_workers=1)


def test_a_killed_worker_is_named_and_shutdown_still_works(cluster: Cluster, manifest: Any) -> None:
    generation = RemoteGeneration(cluster, manifest, CONFIG)
    generation.prepare_for_generation()
    victim, survivor = pids(generation)
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match="worker-0"):
        generation.generate(prompts(*RAGGED))
    assert generation.shutdown()
    wait_until_gone([survivor])


def test_a_call_has_a_deadline(pair: RemoteGeneration, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair._group, "call_deadline_s", 0.5)
    stopped = pids(pair)[0]
    stop(stopped)
    try:
        with pytest.raises(DeadlineError):
            pair.prepare_for_generation()
    finally:
        os.kill(stopped, signal.SIGCONT)


def test_shutdown_ends_the_processes_and_can_be_repeated(cluster: Cluster, manifest: Any) -> None:
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
from cluster_doubles import BACKEND, CONFIG
from rl_hosting.cluster import RemoteGeneration
from {launcher} import *

manifest = replace(BACKEND, environment={environment!r})
generation = RemoteGeneration({cluster}, manifest, CONFIG)
print(*[place["pid"] for place in generation._group.places], flush=True)
sys.stdin.read()
"""


def test_workers_end_with_a_driver_that_is_killed(launcher: str, manifest: Any) -> None:
    environment = dict(manifest.environment)
    made = TWO_PLACES[launcher]
    driver = DRIVER.format(launcher=launcher, environment=environment, cluster=made)
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    with subprocess.Popen(
        [sys.executable, "-c", driver],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**inherited, "PYTHONPATH": environment["PYTHONPATH"]},
    ) as process:
        assert process.stdout is not None
        workers = [int(pid) for pid in process.stdout.readline().split()]
        process.kill()
    assert len(workers) == 2
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
    assert output["weights_origin"].tolist() == [report.origin] * 5
    assert pair.weights_origin == policy.weights_origin == report.origin
    assert output["logprobs"].min() == -3.0


def test_replicas_of_different_versions_do_not_serve_until_a_refit(
    pair: RemoteGeneration, policy: RemotePolicy
) -> None:
    pair._group.call(0, "prepare_refit_info", policy.prepare_refit_info())
    sending = policy.send_weights(receivers=1, deadline_s=60)
    alone, options = "receive_weights", {"deadline_s": 60}
    pair._group.remote(0, "begin", "begin", "alone", alone, (), options)
    wait([*sending, pair._group.remote(0, "refit", "finish", "alone", 60)], 60)
    with pytest.raises(WeightsTornError, match="have different weights"):
        _ = pair.weights_version
    with pytest.raises(WeightsTornError, match="have different weights"):
        pair.generate(prompts(*RAGGED))
    report = refit(policy, pair, deadline_s=60)
    assert pair.weights_version == report.version


# -- policy ----------------------------------------------------------------------------------------


def test_a_loss_of_the_users_own_file_reaches_the_workers(policy: RemotePolicy) -> None:
    class Own(PairLoss):
        group_size = 1

    data = prompts([1], [2], sample_mask=torch.ones(2))
    assert policy.train(data, Own(), gbs=2)["loss"] == 0.5


# -- the cluster -----------------------------------------------------------------------------------


def test_more_workers_than_places_are_refused(cluster: Cluster, manifest: Any) -> None:
    with pytest.raises(
        ConfigError, match="num_workers is 3, but the number of places of the cluster is 2"
    ):
        RemoteGeneration(cluster, manifest, CONFIG, num_workers=3)
