"""A rank of a foreign trainer whose module has DTensors, in a process of its own."""

from __future__ import annotations

import gc
import os
import threading
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from rl_backends.modules import ModuleReceiver
from rl_conformance.doubles import Engines
from rl_core.weights import refit


class Net(nn.Module):
    """Tied weights, buffers, and sizes that no number of ranks divides."""

    def __init__(self, seed: int, width: int = 13, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(11, 6, dtype=dtype)
        self.norm = nn.BatchNorm1d(6, dtype=dtype)
        self.up = nn.Linear(6, width, dtype=dtype)
        self.down = nn.Linear(width, 6, dtype=dtype)
        self.head = nn.Linear(6, 11, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight
        self.norm.running_mean += torch.randn(6, dtype=dtype)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.head(self.down(self.up(self.norm(self.embed(ids)))))
        return hidden


def tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def shard(model: Net, kind: str) -> None:
    """Shards a model over all ranks, in one of the ways that trainers do."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    if kind == "fsdp":
        fully_shard(model.up, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif kind == "offloaded":
        policy = CPUOffloadPolicy(pin_memory=False)
        fully_shard(model, mesh=mesh, offload_policy=policy)
    elif kind == "tensor parallel":
        tensor_parallel(model, mesh)
    elif kind == "copies":
        distribute_module(model, mesh)
        model.head.weight = model.embed.weight
    elif kind != "plain":
        square = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("outer", "inner"))
        if kind == "replicated":
            fully_shard(model, mesh=square)
        else:
            tensor_parallel(model, square["inner"])
            fully_shard(model, mesh=square["outer"])


class MeshRank:
    """``build`` makes a module and an engine, which rank 0 has; ``refit`` is the trainer's call."""

    def __init__(self, rank: int, size: int, port: int) -> None:
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(port)
        dist.init_process_group("gloo", rank=rank, world_size=size)
        self.rank = rank
        self.model: Any = None
        self.engine: Any = None

    def build(self, kind: str, seed: int = 1, width: int = 13, engine: str = "float32") -> None:
        self.model = Net(seed, width)
        self.model.norm.running_mean += self.rank  # as ranks with rows of their own have it
        shard(self.model, kind)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.engine = Net(99, dtype=getattr(torch, engine)) if self.rank == 0 else None

    def shard(self, kind: str) -> None:
        shard(self.model, kind)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)

    def refit(self, **options: Any) -> dict[str, Any]:
        return refit(self.model, self.engine, **{"deadline_s": 120.0} | options).as_dict()

    def spoil(self) -> None:
        self.model.up.weight.to_local().data[-1, 0] = torch.nan

    def fail(self) -> None:
        """Fails to refit a module, before it comes to the other ranks."""
        refit(self.model, {})  # type: ignore[arg-type]

    def state(self) -> dict[str, torch.Tensor]:
        return {name: t.clone() for name, t in self.engine.state_dict().items()}

    def change(self) -> None:
        """A step with gradients that do not depend on how the module is sharded."""
        for number, parameter in enumerate(self.model.parameters()):
            parameter.grad = torch.full_like(parameter, 0.5 + number)
        self.optimizer.step()

    @torch.no_grad()
    def change_alone(self, *, counted: bool) -> None:
        """Doubles this rank's part of every parameter, with or without torch's counting it."""
        for parameter in self.model.parameters():
            local = parameter.to_local()
            (local if counted else local.data).mul_(2)

    def train(self) -> float:
        """A step through the module, with clipped gradients; the loss."""
        self.optimizer.zero_grad()
        loss = self.model.train()(torch.tensor([1, 2, 3])).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()
        return loss.item()

    def load(self, factor: int, assign: bool) -> None:
        """Other values, copied into the parameters, or in new ones with a new optimizer."""
        state = {name: t * factor for name, t in self.model.state_dict().items()}
        self.model.load_state_dict(state | {"head.weight": state["embed.weight"]}, assign=assign)
        if assign:
            self.model.head.weight = self.model.embed.weight
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)

    def convert(self) -> None:
        """Puts every parameter into new memory, and the module knows of it."""
        self.model.double().float()

    def keep_state(self, *, keep: bool = True) -> None:
        self.kept = self.model.state_dict() if keep else None

    def full(self, name: str) -> torch.Tensor:
        whole: torch.Tensor = self.model.state_dict()[name].full_tensor().detach()
        return whole

    def two_engines(self) -> None:
        self.receiving = [Net(98), Net(97)]
        self.engine = Engines(*map(ModuleReceiver, self.receiving))

    def received(self) -> list[dict[str, torch.Tensor]]:
        """What both of them have."""
        return [dict(engine.state_dict()) for engine in self.receiving]

    def drop(self) -> tuple[int, int]:
        """Descriptors and threads that are left without the module and the engine."""
        self.model = self.engine = self.optimizer = None
        gc.collect()
        return len(os.listdir("/proc/self/fd")), threading.active_count()
