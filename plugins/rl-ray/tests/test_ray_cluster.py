"""What is particular to workers that are Ray actors; see also test_clusters."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from cluster_doubles import CONFIG, EXIT, manifest_in
from prompt_rows import prompts

from rl_core.errors import ConfigError, LifecycleError, WorkerDiedError
from rl_core.futures import spawn, wait
from rl_hosting.cluster import RemoteGeneration, RemotePolicy
from rl_ray import RayVirtualCluster

pytestmark = pytest.mark.ray

README = Path(__file__).parents[1] / "README.md"


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return manifest_in(tmp_path_factory.mktemp("double"))


@pytest.fixture(scope="module")
def shared() -> Iterator[RayVirtualCluster]:
    """Starts Ray, and keeps it."""
    with RayVirtualCluster([1], ray_options={"num_cpus": 4}) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared: RayVirtualCluster) -> Iterator[RayVirtualCluster]:
    """Two bundles for the workers of one test."""
    with RayVirtualCluster([2]) as cluster:
        yield cluster


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


def test_a_worker_that_exits_in_a_call_is_an_error(
    cluster: RayVirtualCluster, manifest: Any
) -> None:
    generation = RemoteGeneration(cluster, manifest, CONFIG, num_workers=1)
    generation.prepare_for_generation()
    with pytest.raises(WorkerDiedError, match="worker-0"):
        generation.generate(prompts([EXIT]))


def test_resources_that_are_not_there_are_named(shared: RayVirtualCluster) -> None:
    with pytest.raises(ConfigError, match=r"Requested: \[9\] bundles of 1 CPU.*nodes have: 4 CPU"):
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


@pytest.mark.parametrize("bundles", [[], [0], [2, -1]])
def test_bundles_must_be_counts(bundles: list[int]) -> None:
    with pytest.raises(ConfigError, match="bundle_ct_per_node_list"):
        RayVirtualCluster(bundles)


def test_more_gpus_than_a_node_has_are_refused(shared: RayVirtualCluster) -> None:
    with pytest.raises(
        ConfigError, match="8 bundles with one GPU each on a node, but num_gpus_per_node is 4"
    ):
        RayVirtualCluster([8], use_gpus=True, num_gpus_per_node=4)


def test_futures_of_workers_are_object_refs_and_can_be_waited_for_with_others(
    cluster: RayVirtualCluster, manifest: Any
) -> None:
    policy = RemotePolicy(cluster, manifest, {**CONFIG, "model_name": "."}, num_workers=1)
    reference = policy._group.remote(0, "work", "call", "get_logprobs", (prompts([1, 2]),), {})
    assert isinstance(reference, ray.ObjectRef)
    expected = torch.tensor([[-1.0, -2.0]])
    assert ray.get(reference, timeout=280)["logprobs"].equal(expected)
    found, other = wait([reference, spawn("other", lambda: "other")], 60)
    assert (found["logprobs"].equal(expected), other) == (True, "other")


@pytest.mark.full
def test_the_example_of_the_readme_prints_what_it_says(
    shared: RayVirtualCluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = README.read_text()
    [example] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    [said] = re.findall(r"```text\n(.*?)```", text, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(example, {})
    assert capsys.readouterr().out == said
