"""The loops' calls, in their order, over real policies and engines, embedded and on a cluster."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import cloudpickle
import nemo_loops
import pytest
import ray
import torch

import rl_nemo
from rl_core import create_generation, create_policy
from rl_core.batch import BatchedDataDict
from rl_core.errors import CapabilityError, ConfigError, DataError, LifecycleError
from rl_core.futures import wait
from rl_core.ports import free_port
from rl_hosting import LocalCluster
from rl_losses import DPOLossFn, NLLLossFn
from rl_ray import RayVirtualCluster

SAMPLES = 4
PROMPTS = torch.randint(3, 200, (8, 5), generator=torch.Generator().manual_seed(0))


WHERE = ["embedded", pytest.param("cluster", marks=pytest.mark.full)]


@pytest.fixture(scope="module", params=WHERE)
def make(request: pytest.FixtureRequest, model: Path) -> Iterator[Any]:
    """``make("policy" or "generation", **config)``: in this process, or two workers of each."""
    cluster = LocalCluster(2) if request.param == "cluster" else None
    cloudpickle.register_pickle_by_value(nemo_loops)  # workers cannot import it
    with ExitStack() as stack:
        if cluster is not None:
            stack.enter_context(cluster)

        def build(kind: str, **config: Any) -> Any:
            create = {"policy": create_policy, "generation": create_generation}[kind]
            more = {"optimizer": {"lr": 1e-2}} if kind == "policy" else {"max_new_tokens": 6}
            given = {"backend": "hf", "model_name": str(model), **more, **config}
            made = create(given, cluster)
            stack.callback(made.shutdown)
            return made

        yield build
    cloudpickle.unregister_pickle_by_value(nemo_loops)


def reward(output: Any) -> torch.Tensor:
    """The share of small token ids in the answer: what a model learns in some steps."""
    start = output["unpadded_sequence_lengths"] - output["generation_lengths"]
    places = torch.arange(output["output_ids"].shape[1])
    answer = (places >= start[:, None]) & (places < output["unpadded_sequence_lengths"][:, None])
    good = (output["output_ids"] < 140) & answer
    return good.sum(1) / answer.sum(1).clamp(min=1)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["calls", "rows"])
def test_grpo_learns_and_engine_and_trainer_agree(
    make: Any, tmp_path: Path, asynchronous: bool
) -> None:
    policy, generation = make("policy"), make("generation", seed=3)
    synchronizer = rl_nemo.connect(policy, generation, verify="installed")
    timer = nemo_loops.Timer()
    assert synchronizer.is_stale
    history = nemo_loops.grpo_train(
        policy,
        generation,
        nemo_loops.ClippedPG(),
        PROMPTS,
        reward,
        steps=8,
        samples=SAMPLES,
        asynchronous=asynchronous,
        checkpoint=tmp_path,
        timer=timer,
    )
    assert not synchronizer.is_stale
    assert history[-1]["reward"] > history[0]["reward"] + 0.1
    assert max(step["apart"] for step in history) < 1e-4
    assert [round(step["num_valid_samples"]) for step in history] == [32] * 8
    assert generation.weights_version == synchronizer.report.version == 8
    labels = {"get_logprobs", "get_reference_policy_logprobs", "train"}
    assert labels < timer.times.keys()
    assert {len(timer.times[label]) for label in labels} == {8}
    resumed = make("policy", resume_from=str(tmp_path / "policy" / "weights"))
    rows = BatchedDataDict({"input_ids": PROMPTS, "input_lengths": torch.full((8,), 5)})
    assert torch.equal(
        resumed.get_logprobs(rows)["logprobs"], policy.get_logprobs(rows)["logprobs"]
    )


@pytest.mark.parametrize("colocated", [True, False])
def test_the_asynchronous_loop_s_order_of_calls(make: Any, colocated: bool) -> None:
    policy = make("policy")
    generation = make("generation", seed=3, colocated={"enabled": colocated})
    rl_nemo.connect(policy, generation)
    assert generation.blocks_training() is colocated
    history = nemo_loops.async_grpo_train(
        policy, generation, nemo_loops.ClippedPG(), PROMPTS, reward, steps=6, samples=SAMPLES
    )
    assert history[-1]["reward"] > history[0]["reward"] + 0.05
    assert generation.weights_version == 7


@pytest.mark.full
@pytest.mark.ray
def test_an_engine_generates_in_the_actor_it_is_sent_to(model: Path) -> None:
    @ray.remote(num_cpus=0)
    def collect(generation: Any, rows: Any) -> Any:
        return asyncio.run(nemo_loops.generate_responses_async(generation, rows))

    rows = nemo_loops.rows_of(PROMPTS, 1)
    ray.cloudpickle.register_pickle_by_value(nemo_loops)
    with RayVirtualCluster([2], ray_options={"num_cpus": 4}) as cluster:
        config = {"backend": "hf", "model_name": str(model), "max_new_tokens": 6, "seed": 3}
        generation = create_generation(config, cluster)
        rl_nemo.connect(create_policy({"backend": "hf", "model_name": str(model)}), generation)
        generation.prepare_for_generation()
        there = [wait([collect.remote(generation, rows)], 120)[0] for _ in range(2)]
        here = generation.generate(rows)
        generation.shutdown()
    ray.cloudpickle.unregister_pickle_by_value(nemo_loops)
    samples = [output["output_ids"].tolist() for output in (*there, here)]
    assert samples[0] != samples[1] != samples[2] != samples[0]  # streams of their own


def sequences() -> BatchedDataDict[Any]:
    ids = torch.randint(3, 200, (8, 9), generator=torch.Generator().manual_seed(1))
    lengths = torch.tensor([9, 4, 7, 9, 5, 6, 9, 8])
    mask = (torch.arange(9) < lengths[:, None]).float()
    mask[:, :2] = 0
    return BatchedDataDict(
        {
            "input_ids": ids,
            "input_lengths": lengths,
            "token_mask": mask,
            "sample_mask": torch.ones(8),
        }
    )


@pytest.mark.parametrize("batching", ["rows", "packed"])
@pytest.mark.parametrize("whose", ["theirs", "ours"])
def test_dpo_starts_at_log_2_and_learns(make: Any, whose: str, batching: str) -> None:
    packed = {"enabled": True, "train_mb_tokens": 32}
    policy = make("policy", **({"sequence_packing": packed} if batching == "packed" else {}))
    losses = {
        "theirs": lambda: rl_nemo.wrap_loss(nemo_loops.Preference(), group_size=2),
        "ours": lambda: rl_nemo.rolled_reference(
            DPOLossFn(beta=1.0, preference_average_log_probs=False)
        ),
    }
    pairs = [sequences() for _ in range(5)]
    history = nemo_loops.dpo_train(policy, losses[whose](), pairs, gbs=4, mbs=2)
    assert history[0]["loss"] == pytest.approx(0.6931, abs=1e-3)
    assert history[-1]["loss"] < history[0]["loss"] - 0.05


def test_ours_says_that_the_reference_is_rolled(make: Any) -> None:
    with pytest.raises(DataError, match="reference_policy_logprobs"):
        nemo_loops.dpo_train(make("policy"), DPOLossFn(), [sequences()], gbs=4, mbs=2)


def test_two_steps_of_a_call_count_once(make: Any) -> None:
    policy, data = make("policy", optimizer={"lr": 0.0}), sequences()
    once = nemo_loops.summed(policy.train(data, NLLLossFn(), gbs=8), {})
    twice = nemo_loops.summed(policy.train(data, NLLLossFn(), gbs=4), {})
    assert twice["loss"] == pytest.approx(once["loss"], rel=0.2)
    assert twice["lr"] == once["lr"]


def test_distillation(make: Any) -> None:
    student = make("policy", optimizer={"lr": 1e-3})
    teacher = make("policy", seed=7, reference="none")
    for _ in range(3):
        teacher.train(sequences(), NLLLossFn())
    generation = make("generation", seed=1)
    rl_nemo.connect(student, generation)
    loss = rl_nemo.wrap_loss(nemo_loops.Distillation())
    history = nemo_loops.distillation_train(student, teacher, generation, loss, PROMPTS, steps=8)
    assert history[-1]["loss"] < history[0]["loss"], history


# -- what goes wrong -------------------------------------------------------------------------------


def test_a_distillation_loss_that_is_not_wrapped_is_refused(make: Any) -> None:
    with pytest.raises(ConfigError, match="distillation"):
        make("policy").train(sequences(), nemo_loops.Distillation())


def test_a_loss_on_what_nobody_computes_is_refused() -> None:
    with pytest.raises(ConfigError, match="'draft', which no policy computes"):
        rl_nemo.wrap_loss(nemo_loops.Draft())


def test_two_paths_of_a_checkpoint_are_refused(make: Any, tmp_path: Path) -> None:
    policy = make("policy")
    for paths in ({}, {"path": tmp_path / "a", "weights_path": tmp_path / "b"}):
        with pytest.raises(ConfigError, match="one directory"):
            policy.save_checkpoint(**paths)


def test_an_engine_that_was_sent_elsewhere_does_not_refit() -> None:
    synchronizer = rl_nemo.RefitSynchronizer(None, None)  # type: ignore[arg-type]
    sent = pickle.loads(pickle.dumps(synchronizer))
    with pytest.raises(LifecycleError, match="no trainer"):
        sent.sync_weights()


def test_what_only_their_backends_have_is_refused_by_name(make: Any) -> None:
    policy, generation = make("policy"), make("generation")
    rl_nemo.connect(policy, generation)
    policy.offload_to_cpu()
    theirs = {"attach_fleet_health": (None, None), "get_collective_sender_spec": ()}
    for side, calls in (
        (generation, {**theirs, "nccl_reshard_refit": ()}),
        (policy, {"stream_weights_via_http": (["http://a"], 1), "nccl_reshard_refit": ({},)}),
    ):
        for method, arguments in calls.items():
            with pytest.raises(CapabilityError, match=f"^{method} is not supported"):
                getattr(side, method)(*arguments)


def test_their_arguments_have_their_places(make: Any) -> None:
    policy, generation = make("policy"), make("generation")
    rl_nemo.connect(policy, generation)
    data, timer = sequences(), nemo_loops.Timer()
    scores = [policy.get_logprobs(data, *more)["logprobs"] for more in [(timer,), (3, timer), ()]]
    assert len(timer.times["get_logprobs"]) == 2
    for other in scores[1:]:
        torch.testing.assert_close(scores[0], other)
    with pytest.raises(ConfigError, match="micro_batch_size"):
        policy.get_logprobs(data, "2")
    with pytest.raises(CapabilityError, match=r"^nccl_peer='vllm' is not supported"):
        policy.init_collective("127.0.0.1", 1, 2, train_world_size=1, nccl_peer="vllm")


def test_a_collective_of_their_own_peers(model: Path) -> None:
    config = {"backend": "hf", "model_name": str(model)}
    policy, generation = create_policy(config), create_generation(config)
    synchronizer = rl_nemo.connect(policy, generation, transport="collective")
    ranks: dict[str, Any] = {"ip": "127.0.0.1", "port": free_port(), "world_size": 2}
    opening = policy.init_collective(**ranks, train_world_size=1, nccl_peer="nemo")
    wait([*opening, *generation.init_collective(**ranks, train_world_size=1)], 60)
    synchronizer.sync_weights()
    assert synchronizer.report.transport == "collective"
    generation.shutdown()
    policy.shutdown()


def test_an_axis_that_there_is_not_is_named(make: Any, request: pytest.FixtureRequest) -> None:
    policy = make("policy")
    assert policy.get_free_memory_bytes() > 0
    annotations = policy.sharding_annotations
    workers = {"embedded": 1, "cluster": 2}[request.node.callspec.params["make"]]
    assert annotations.get_axis_size("data_parallel") == workers
    with pytest.raises(ConfigError, match="pipeline"):
        annotations.get_axis_size("pipeline")
