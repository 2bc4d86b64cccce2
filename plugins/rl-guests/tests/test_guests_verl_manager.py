"""verl's checkpoint manager and workers on Ray, with the engine ``rl_core``: updates and faults.

In place of a model and an inference engine, the trainer makes tensors, and rollouts keep them.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import sys
import time
from contextlib import ExitStack
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from rl_conformance.faults import a_bit_changes
from rl_core.errors import RefitCorrupted

if TYPE_CHECKING:
    from collections.abc import Iterator

if importlib.util.find_spec("verl") is None:
    pytest.skip("verl is not installed here", allow_module_level=True)

import ray
from verl.checkpoint_engine.base import (
    CheckpointEngineManager,
    CheckpointEngineRegistry,
    CheckpointEngineWorker,
)
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.distributed import initialize_global_process_group_ray
from verl.workers.config import CheckpointEngineConfig, RolloutConfig
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.rollout import BaseRollout, RolloutReplica

pytestmark = [pytest.mark.ray, pytest.mark.slow]

DEADLINE_S = 20.0
ENGINE = {
    "backend": "rl_core",
    "update_weights_bucket_megabytes": 1,
    "engine_kwargs": {"rl_core": {"deadline_s": DEADLINE_S}},
}


def tensors(seed: int) -> dict[str, torch.Tensor]:
    """Some 5 MB: several buckets, and a tensor that is larger than one."""
    generator = torch.Generator().manual_seed(seed)
    dtypes = [torch.float32, torch.bfloat16, torch.int64]
    made = {
        f"layer.{i}": (100 * torch.randn(300, 201, generator=generator)).to(dtypes[i % 3])
        for i in range(12)
    }
    return {**made, "large": torch.randn(600, 700, generator=generator), "none": torch.empty(0, 3)}


class Trainer(ActorRolloutRefWorker):  # type: ignore[misc]
    """verl's worker of the trainer: its updates and its engine's calls, with tensors of ours."""

    def __init__(self, config: CheckpointEngineConfig) -> None:
        Worker.__init__(self)
        initialize_global_process_group_ray(backend="cpu:gloo")
        self.actor = SimpleNamespace(engine=self)
        self.checkpoint_engine = CheckpointEngineRegistry.new(
            config.backend,
            is_master=torch.distributed.get_rank() == 0,
            bucket_size=config.update_weights_bucket_megabytes << 20,
            **config.engine_kwargs[config.backend],
        )
        self.faults = ExitStack()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def plan(self, seed: int, fault: str = "") -> int:
        """What the next update sends, and what goes wrong in it; returns the process."""
        self.faults.close()
        self.seed, self.killed = seed, fault == "killed" and self.rank == 0
        if fault == "damaged" and self.rank == 0:
            self.faults.enter_context(a_bit_changes())
        return os.getpid()

    def get_per_tensor_param(self) -> tuple[Iterator[tuple[str, torch.Tensor]], None]:
        """What its model's engine has, which needs a GPU."""
        return self.weights(), None

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number, item in enumerate(tensors(self.seed).items()):
            if number == 9 and self.killed:
                os.kill(os.getpid(), signal.SIGKILL)
            yield item


class Adapter(BaseRollout):  # type: ignore[misc]
    """What a rollout worker loads its weights with: keeps those of the last whole update."""

    def __init__(self, config: RolloutConfig) -> None:
        super().__init__(config, {}, device_mesh=None)
        self.fault = ""
        self.loaded: dict[str, torch.Tensor] = {}
        self.begun = asyncio.Event()

    async def resume(self, tags: list[str]) -> None:
        raise NotImplementedError

    async def release(self) -> None:
        raise NotImplementedError

    async def update_weights(self, weights: Any, **options: Any) -> None:
        fault, self.fault = self.fault, ""
        got: dict[str, torch.Tensor] = {}
        async for name, tensor in weights:
            self.begun.set()
            got[name] = tensor.clone()
            if fault == "full":
                raise MemoryError("no room for this tensor")
            if fault == "slow":
                fault, self.begun = "", asyncio.Event()
                await self.begun.wait()  # for the next update
        self.loaded = got


class Rollout(CheckpointEngineWorker):  # type: ignore[misc]
    """verl's worker beside an inference engine, which is not there."""

    def __init__(self, rollout_config: RolloutConfig) -> None:
        super().__init__(rollout_config, None, Adapter(rollout_config))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def plan(self, faults: list[str]) -> None:
        self.server_adapter.fault = faults[self.rank]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def loaded(self) -> dict[str, torch.Tensor]:
        return self.server_adapter.loaded


class Server:
    """In place of vLLM's or SGLang's: notes what the manager asks of it."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def abort_all_requests(self, reject_request: bool) -> None:
        self.calls.append("abort")

    def release_kv_cache(self) -> None:
        self.calls.append("release")

    def resume_kv_cache(self) -> None:
        self.calls.append("restore")

    def resume_generation(self) -> None:
        self.calls.append("resume")

    def asked(self) -> list[str]:
        calls, self.calls = self.calls, []
        return calls


class Replica(RolloutReplica):  # type: ignore[misc]
    async def launch_servers(self) -> None:
        self.servers = [ray.remote(num_cpus=0)(Server).remote()]


class Cluster:
    """A trainer of two ranks and two replicas of one rollout worker each, in two bundles."""

    def __init__(self) -> None:
        self.config = CheckpointEngineConfig(**ENGINE)
        self.pool = RayResourcePool([2], use_gpu=False, max_colocate_count=1)
        rollout = RolloutConfig(name="vllm", checkpoint_engine=self.config)
        self.rollout = self.group(Rollout, rollout_config=rollout)
        self.replicas = [Replica(rank, rollout, None) for rank in range(2)]
        for replica in self.replicas:
            asyncio.run(replica.init_hybrid(self.rollout))
        self.start_trainer()

    def group(self, kind: type[Worker], **arguments: Any) -> RayWorkerGroup:
        wanted = RayClassWithInitArgs(ray.remote(kind), **arguments)
        return RayWorkerGroup(self.pool, wanted)

    def start_trainer(self) -> None:
        self.trainer = self.group(Trainer, config=self.config)
        self.manager = CheckpointEngineManager(self.config, self.trainer, self.replicas)

    def update(self, seed: int, fault: str = "", at_rollouts: tuple[str, str] = ("", "")) -> None:
        """By the manager, which returns or raises long before the deadline."""
        self.trainer.plan(seed, fault)
        self.rollout.plan(list(at_rollouts))
        end = time.monotonic() + DEADLINE_S / 2
        try:
            assert self.manager.update_weights(global_steps=seed) == {}
        finally:
            assert time.monotonic() < end

    def require(self, seed: int) -> None:
        """All rollout workers have exactly these tensors."""
        wanted = tensors(seed)
        for got in self.rollout.loaded():
            assert list(got) == list(wanted)
            for name, tensor in wanted.items():
                assert got[name].dtype == tensor.dtype
                assert torch.equal(got[name], tensor), name

    def asked(self) -> list[list[str]]:
        return [ray.get(replica.servers[0].asked.remote()) for replica in self.replicas]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    module = sys.modules[__name__]
    ray.cloudpickle.register_pickle_by_value(module)  # workers cannot import it
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        yield Cluster()
    finally:
        ray.shutdown()
        ray.cloudpickle.unregister_pickle_by_value(module)


def test_all_rollouts_get_exactly_the_trainers_tensors_twice(cluster):
    processes = {*cluster.trainer.plan(0), os.getpid()}
    assert len(processes) == 3
    for seed in (1, 2):
        cluster.update(seed)
        cluster.require(seed)
        assert cluster.asked() == [["abort", "release", "restore", "resume"]] * 2


def test_a_byte_that_changes_fails_the_update_and_not_the_next(cluster):
    cluster.update(3)
    cluster.asked()
    with pytest.raises(RefitCorrupted):
        cluster.update(4, "damaged")
    cluster.require(3)
    assert cluster.asked() == [["abort", "release"]] * 2  # verl's manager leaves it at that
    cluster.update(5)
    cluster.require(5)


def test_a_killed_trainer_fails_the_update_and_a_new_one_goes_on(cluster):
    cluster.update(6)
    with pytest.raises(ray.exceptions.ActorDiedError):
        cluster.update(7, "killed")
    cluster.require(6)
    cluster.start_trainer()
    cluster.update(8)
    cluster.require(8)


def test_what_is_left_of_a_failed_update_takes_nothing_of_the_next(cluster):
    with pytest.raises(MemoryError, match="no room"):
        cluster.update(9, at_rollouts=("full", "slow"))
    cluster.update(10)
    cluster.require(10)
