"""The Hugging Face backend over Ray: what it returns embedded, it returns from workers."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_conformance.diagnostics.agreement import measure_log_probability_consistency
from rl_conformance.diagnostics.engine import random_prompts, test_max_model_len_respected
from rl_core import (
    BatchedDataDict,
    WorkerDiedError,
    create_generation,
    create_policy,
)
from rl_core.weights import refit
from rl_losses import NLLLossFn
from rl_ray import RayVirtualCluster

pytestmark = [pytest.mark.full, pytest.mark.ray, pytest.mark.usefixtures("one_thread")]

LENGTHS = [3, 9, 1, 14, 6, 6, 2, 11]


@pytest.fixture(scope="module")
def clusters() -> Iterator[dict[int, RayVirtualCluster]]:
    """Clusters of one and of two bundles, with places for a policy and an engine each."""
    first = RayVirtualCluster([1], max_colocated_worker_groups=2, ray_options={"num_cpus": 5})
    with first, RayVirtualCluster([2], max_colocated_worker_groups=2) as second:
        yield {1: first, 2: second}


def generation_config(model: Path, **config: Any) -> dict[str, Any]:
    return {"backend": "hf", "model_name": str(model), "max_new_tokens": 8, "seed": 3, **config}


def policy_config(model: Path, **config: Any) -> dict[str, Any]:
    return {
        "backend": "hf",
        "model_name": str(model),
        "train_micro_batch_size": 2,
        "optimizer": {"lr": 1e-3},
        **config,
    }


@pytest.fixture(scope="module")
def engines(model: Path, clusters: dict[int, RayVirtualCluster]) -> Iterator[dict[int, Any]]:
    """The engine embedded (0) and in one and two workers."""
    config = generation_config(model)
    found = {n: create_generation(config, clusters.get(n)) for n in (0, 1, 2)}
    for engine in found.values():
        engine.prepare_for_generation()
    yield found
    for engine in found.values():
        engine.shutdown()


@pytest.fixture(scope="module")
def policies(model: Path, clusters: dict[int, RayVirtualCluster]) -> Iterator[dict[int, Any]]:
    """The policy embedded (0) and in one and two workers."""
    config = policy_config(model)
    found = {n: create_policy(config, clusters.get(n)) for n in (0, 1, 2)}
    yield found
    for policy in found.values():
        policy.shutdown()


@pytest.fixture
def prompts() -> BatchedDataDict[Any]:
    data = random_prompts(269, LENGTHS)
    data["name"] = list("abcdefgh")
    data["seed"] = torch.arange(len(LENGTHS))
    return data


@pytest.fixture
def examples() -> BatchedDataDict[Any]:
    data = random_prompts(269, [length + 2 for length in LENGTHS], seed=1)
    data["token_mask"] = torch.ones(data["input_ids"].shape)
    data["token_mask"][:, 0] = 0
    data["sample_mask"] = torch.tensor([1.0, 1, 1, 0, 1, 1, 1, 1])
    return data


def equal(one: Any, other: Any, *, rtol: float = 0.0, atol: float = 0.0) -> None:
    assert set(one) == set(other)
    for key, value in one.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(value, other[key], rtol=rtol, atol=atol)
        else:
            assert value == other[key]


@pytest.mark.parametrize("eval_mode", [True, False])
@pytest.mark.parametrize("gbs", [8, 4])
def test_training_does_not_depend_on_the_workers(
    policies: dict[int, Any], examples: BatchedDataDict[Any], gbs: int, eval_mode: bool
) -> None:
    results = {
        n: policy.train(examples, NLLLossFn(), eval_mode, gbs=gbs) for n, policy in policies.items()
    }
    for n in (1, 2):
        for key in ("loss", "grad_norm", "global_valid_toks", "global_valid_seqs", "lr"):
            assert results[n][key] == pytest.approx(results[0][key], rel=1e-4, nan_ok=True), (
                n,
                key,
            )
    scores = {n: policy.get_logprobs(examples) for n, policy in policies.items()}
    equal(scores[1], scores[0], atol=1e-5)
    equal(scores[2], scores[0], atol=1e-3)


@pytest.mark.parametrize(("trainers", "replicas"), [(1, 2), (2, 1)])
def test_after_a_refit_across_processes_trainer_and_engine_agree(
    policies: dict[int, Any],
    engines: dict[int, Any],
    prompts: BatchedDataDict[Any],
    examples: BatchedDataDict[Any],
    trainers: int,
    replicas: int,
) -> None:
    policy, engine = policies[trainers], engines[replicas]
    for _ in range(2):
        policy.train(examples, NLLLossFn(), gbs=8)
    report = refit(policy, engine, deadline_s=60)
    assert (report.receivers, engine.weights_version) == (replicas, report.version)
    found = measure_log_probability_consistency(policy, engine, prompts, threshold=1.001)
    assert found.passed, found
    assert engine.generate(prompts)["weights_version"].unique().tolist() == [report.version]


def test_training_ends_with_an_error_if_a_worker_is_killed(
    model: Path, clusters: dict[int, RayVirtualCluster], examples: BatchedDataDict[Any]
) -> None:
    with RayVirtualCluster([2]) as cluster:
        policy: Any = create_policy(policy_config(model), cluster)
        os.kill(policy._group.places[1]["pid"], signal.SIGKILL)
        with pytest.raises(WorkerDiedError):
            policy.train(examples, NLLLossFn(), gbs=8)
        policy.shutdown()


def test_a_check_can_run_on_a_cluster(model: Path, clusters: dict[int, RayVirtualCluster]) -> None:
    with RayVirtualCluster([1]) as cluster:
        assert test_max_model_len_respected(str(model), max_model_len=16, cluster=cluster)
