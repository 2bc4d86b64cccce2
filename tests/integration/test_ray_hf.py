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
    DataError,
    TrainingError,
    WorkerDiedError,
    WorkerError,
    create_generation,
    create_policy,
)
from rl_core.weights import refit
from rl_losses import NLLLossFn, training_batch
from rl_ray import RayVirtualCluster

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("one_thread")]

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


@pytest.mark.parametrize("greedy", [True, False])
def test_one_worker_generates_bit_for_bit_what_the_embedded_engine_does(
    engines: dict[int, Any], prompts: BatchedDataDict[Any], greedy: bool
) -> None:
    equal(engines[1].generate(prompts, greedy), engines[0].generate(prompts, greedy))


@pytest.mark.parametrize("greedy", [True, False])
def test_two_replicas_generate_the_same_tokens(
    engines: dict[int, Any], prompts: BatchedDataDict[Any], greedy: bool
) -> None:
    two, embedded = engines[2].generate(prompts, greedy), engines[0].generate(prompts, greedy)
    assert two["output_ids"].equal(embedded["output_ids"])
    equal(two, embedded, atol=1e-4)


@pytest.mark.parametrize(
    "method", ["get_logprobs", "get_reference_policy_logprobs", "get_topk_logits"]
)
def test_scores_are_the_embedded_ones(
    policies: dict[int, Any], examples: BatchedDataDict[Any], method: str
) -> None:
    arguments = (examples, 3) if method == "get_topk_logits" else (examples,)
    embedded = getattr(policies[0], method)(*arguments)
    equal(getattr(policies[1], method)(*arguments), embedded)
    equal(getattr(policies[2], method)(*arguments), embedded, atol=1e-4)


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


def test_steps_that_two_workers_cannot_halve_are_filled_up(
    policies: dict[int, Any], examples: BatchedDataDict[Any]
) -> None:
    seven = examples.slice(0, 7)
    results = [policy.train(seven, NLLLossFn(), True, gbs=7) for policy in policies.values()]
    assert results[2]["loss"] == pytest.approx(results[0]["loss"], rel=1e-4)
    assert results[2]["global_valid_toks"] == results[0]["global_valid_toks"]


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


def test_what_generate_returned_is_trained_on_as_a_training_batch(
    policies: dict[int, Any], engines: dict[int, Any], prompts: BatchedDataDict[Any]
) -> None:
    policy, engine = policies[2], engines[1]
    output = engine.generate(prompts)
    with pytest.raises(DataError, match="training_batch"):
        policy.train(output, NLLLossFn())
    refit(policy, engine, deadline_s=60)
    policy.train(training_batch(engine.generate(prompts)), NLLLossFn(), gbs=8)
    assert policy.weights_version == engine.weights_version > 0


def test_a_checkpoint_of_two_workers_continues_in_one_process(
    policies: dict[int, Any], examples: BatchedDataDict[Any], model: Path, tmp_path: Path
) -> None:
    policies[2].train(examples, NLLLossFn(), gbs=8)
    policies[2].save_checkpoint(str(tmp_path / "checkpoint"))
    config = policy_config(model, resume_from=str(tmp_path / "checkpoint"))
    alone = create_policy(config)
    equal(policies[2].get_logprobs(examples), alone.get_logprobs(examples), atol=1e-4)
    alone.shutdown()


class NotANumber(NLLLossFn):
    """A loss that goes wrong."""

    def __call__(self, inputs: torch.Tensor, data: Any, **counts: Any) -> Any:
        loss, metrics = super().__call__(inputs, data, **counts)
        return loss * float("nan"), metrics


def test_a_loss_that_is_not_a_number_is_raised_by_all_and_changes_nothing(
    policies: dict[int, Any], examples: BatchedDataDict[Any]
) -> None:
    for n, policy in policies.items():
        before = policy.get_logprobs(examples)
        with pytest.raises(TrainingError) as caught:
            policy.train(examples, NotANumber(), gbs=8)
        assert isinstance(caught.value, WorkerError) == (n > 0)
        equal(policy.get_logprobs(examples), before)


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
