"""The ranks of this process's models: where they meet, and their process groups."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import distributed as dist

from rl_backends.policy.ranks import RankGroup, meet
from rl_core.errors import ConfigError
from rl_core.interfaces import WorkerContext
from rl_megatron.cpu import without_cuda
from rl_megatron.engine import parallel_state, tensor_parallel
from rl_megatron.model import model_device

if TYPE_CHECKING:
    from rl_megatron.sizes import Sizes

__all__ = ["ParallelState"]


class ParallelState:
    """The process groups of this process's ranks, which megatron-core keeps for all its models.

    Several policies of one process share them, and must agree on the sizes.

    Attributes:
        here: Where this rank is.
        messages: All ranks, over tensors of the CPU.
        ranks: They, for messages.
    """

    _alive: ClassVar[ParallelState | None] = None

    def __init__(self, sizes: Sizes, worker: WorkerContext | None, timeout_s: float) -> None:
        self.sizes = sizes
        self.users = 0
        self._timeout = timedelta(seconds=timeout_s)
        self._owns_default_group = not dist.is_initialized()
        self._owns_groups = False
        try:
            if self._owns_default_group:
                worker = worker or WorkerContext()
                alone = worker.world_size == 1
                with nullcontext(dist.HashStore()) if alone else meet(worker, timeout_s) as store:  # type: ignore[attr-defined]
                    dist.init_process_group(
                        "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
                        store=store,
                        rank=worker.rank,
                        world_size=worker.world_size,
                        timeout=self._timeout,
                    )
            if dist.get_world_size() != sizes.world:
                raise ConfigError(
                    f"torch.distributed was initialised with world size {dist.get_world_size()}, "
                    f"but the policy needs {sizes.world}",
                    fix="let the policy initialise torch.distributed, or start "
                    f"{sizes.world} ranks",
                    key="tensor_model_parallel_size",
                )
            if parallel_state.is_initialized():
                raise ConfigError(
                    "other code has already initialised megatron-core's process groups in this "
                    "process",
                    fix="build the policy first, or in workers: create_policy(config, "
                    "LocalCluster(n))",
                    key="tensor_model_parallel_size",
                )
            self.here = sizes.coordinates(dist.get_rank())
            self.messages = dist.new_group(backend="gloo", timeout=self._timeout)
            self.ranks = RankGroup.of(self.messages)
            self.ranks.check_gpus(model_device())
            self._owns_groups = True
            with without_cuda():
                parallel_state.initialize_model_parallel(
                    tensor_model_parallel_size=sizes.tensor,
                    pipeline_model_parallel_size=sizes.pipeline,
                    expert_model_parallel_size=sizes.expert,
                    distributed_timeout_minutes=timeout_s / 60,
                    create_gloo_process_groups=False,
                )
                tensor_parallel.model_parallel_cuda_manual_seed(
                    1, inference_rng_tracker=not torch.cuda.is_available(), force_reset_rng=True
                )
        except BaseException:
            self._end()
            raise

    @classmethod
    def joined(cls, sizes: Sizes, worker: WorkerContext | None, timeout_s: float) -> ParallelState:
        """This process's ranks, made by the first policy; each is to :meth:`leave`.

        Raises:
            ConfigError: Another policy of this process is spread otherwise.
            DeadlineError: The peers did not all come in time.
        """
        if cls._alive is None:
            cls._alive = cls(sizes, worker, timeout_s)
        if cls._alive.sizes != sizes:
            raise ConfigError(
                f"another policy of this process has {cls._alive.sizes}, this one has {sizes}: "
                "megatron-core allows one parallel layout in a process",
                fix="shut the other one down, or build one in workers: create_policy(config, "
                "LocalCluster(n))",
                key="tensor_model_parallel_size",
            )
        cls._alive.users += 1
        return cls._alive

    def leave(self) -> None:
        """The last policy that leaves ends the groups."""
        self.users -= 1
        if not self.users:
            type(self)._alive = None
            self._end()

    def _end(self) -> None:
        """Torch is as it was before, and no thread or socket of the groups is left."""
        if "messages" in self.__dict__:
            dist.destroy_process_group(self.__dict__.pop("messages"))
        if "ranks" in self.__dict__:
            self.ranks.close()
        if self._owns_groups:
            parallel_state.destroy_model_parallel()
        if self._owns_default_group and dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()  # a model holds groups, and is in circles of references
