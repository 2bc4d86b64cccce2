"""The reference policy with its weights spread over ranks: each keeps a part of every tensor.

Ranks of one copy of the model have the same rows; copies are data-parallel. A rank has whole
tensors only while it computes, and rank 0 those that a refit reads, one after the other.
"""

from __future__ import annotations

from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NotRequired

import torch
from torch import distributed as dist
from torch import nn

from rl_conformance.reference import MANIFEST as REFERENCE
from rl_conformance.reference.config import ReferencePolicyConfig
from rl_conformance.reference.policy import ReferencePolicy
from rl_conformance.reference.stepping import make_optimizer
from rl_core.backends.tensors import module_tensors, tensor_specs
from rl_core.errors import ConfigError
from rl_core.interfaces import DataParallelRank
from rl_core.plugins.manifest import BackendManifest
from rl_core.refit import GatheredSource, RefitRanks

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence
    from pathlib import Path

    from rl_core.backends._steps import StepResult
    from rl_core.interfaces import TensorSpec, WeightSource, WorkerContext

__all__ = ["MANIFEST", "ShardedReferenceConfig", "ShardedReferencePolicy", "ShardedSource"]

#: What hangs in a gather because a rank has died ends then; one that is slow must not.
_GATHER = timedelta(seconds=20)

MANIFEST = BackendManifest(
    name="reference-sharded",
    summary="The reference policy with its weights spread over ranks",
    factories={"policy": "rl_conformance.reference.sharded:ShardedReferencePolicy"},
    configs={"policy": "rl_conformance.reference.sharded:ShardedReferenceConfig"},
    capabilities={"policy": REFERENCE.capabilities["policy"]},
    engine=REFERENCE.engine,
    devices=REFERENCE.devices,
)


class ShardedReferenceConfig(ReferencePolicyConfig):
    """A :class:`ReferencePolicyConfig`, and over how many ranks a copy is spread.

    Attributes:
        shard_ranks: Ranks that share one copy of the model; all of them if missing.
    """

    shard_ranks: NotRequired[int]


class Parts(nn.Module):
    """One rank's rows of every parameter of a model, in its order.

    Args:
        model: With whole parameters.
        shard: Which part.
        shards: Of how many.
    """

    def __init__(self, model: nn.Module, shard: int, shards: int) -> None:
        super().__init__()
        self.by_name: dict[str, nn.Parameter] = {}
        for number, (name, whole) in enumerate(model.named_parameters()):
            part = nn.Parameter(whole.detach().tensor_split(shards)[shard].clone())
            self.register_parameter(f"part{number}", part)
            self.by_name[name] = part


class ShardedReferencePolicy(ReferencePolicy):
    """A :class:`ReferencePolicy` whose weights and optimizer are spread over ranks.

    Args:
        model_name: Directory of the checkpoint.
        shard_ranks: Ranks that share one copy of the model.
        **config: See :class:`ReferencePolicy`.

    Attributes:
        sources: How many weight sources were made on this rank, and how many of them closed.
    """

    manifest = MANIFEST

    def __init__(self, model_name: str, *, shard_ranks: int | None = None, **config: Any) -> None:
        self._shard_ranks = shard_ranks
        self._optimizer_config = config.get("optimizer") or {}
        self.sources = {"made": 0, "closed": 0}
        self.parts: Parts | None = None
        self._is_whole = False
        super().__init__(model_name, **config)
        self._specs = tensor_specs(module_tensors(self.model))
        if self.worker is not None and self.worker.world_size > 1:
            self.refit_ranks = RefitRanks(dist.group.WORLD, address=self.worker.master_addr)
            self._shard(self.worker.rank % self.shards)

    def join(self, worker: WorkerContext) -> DataParallelRank | None:
        """See :meth:`ReferencePolicy.join`; also makes groups of the ranks of a copy, and of rows.

        Raises:
            ConfigError: The ranks make no whole number of copies.
        """
        super().join(worker)
        size, self.shards = worker.world_size, self._shard_ranks or worker.world_size
        if size % self.shards:
            raise ConfigError(
                f"{size} ranks are not whole copies of {self.shards} ranks each",
                fix="set shard_ranks to a divisor of the number of ranks",
                key="shard_ranks",
            )
        copies = [list(range(first, first + self.shards)) for first in range(0, size, self.shards)]
        self.copy_group = _own(copies, worker.rank)
        self.refit_group = _own(copies, worker.rank, timeout=_GATHER)
        rows = [list(range(shard, size, self.shards)) for shard in range(self.shards)]
        self.row_group = _own(rows, worker.rank)
        mine, part = divmod(worker.rank, self.shards)
        return DataParallelRank(mine, len(copies), part == 0)

    # -- the parts --------------------------------------------------------------------------------

    def _shard(self, shard: int) -> None:
        """Keeps this rank's part of the weights and of what the optimizer knows of them."""
        self.parts = Parts(self.model, shard, self.shards)
        whole, self.optimizer = self.optimizer, make_optimizer(self.parts, self._optimizer_config)
        for name, parameter in self.model.named_parameters():
            for key, value in whole.state.get(parameter, {}).items():
                part = value.tensor_split(self.shards)[shard].clone() if value.dim() else value
                self.optimizer.state[self.parts.by_name[name]][key] = part
        self._let_go_of_whole()

    def _let_go_of_whole(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None
            parameter.data = parameter.data.new_empty(0)

    def gathered(self, name: str, part: torch.Tensor, group: Any) -> torch.Tensor:
        """The whole tensor, of the same rows that a split gives.

        On all ranks of a copy; for a refit on rank 0 alone, so that the others wait for nobody else
        where one of them has died.
        """
        shape = next(tuple(spec.shape) for spec in self._specs if spec.name == name)
        rows = -(-shape[0] // self.shards)
        sent = part.new_zeros(rows, *shape[1:])
        sent[: len(part)] = part.detach()
        parts = [torch.empty_like(sent) for _ in range(self.shards)]
        if group is not self.refit_group:
            dist.all_gather(parts, sent, group=group)
        elif dist.get_rank():
            dist.gather(sent, None, dst=0, group=group)
            return sent
        else:
            dist.gather(sent, parts, dst=0, group=group)
        counts = [len(p) for p in torch.empty(shape[0]).tensor_split(self.shards)]
        return torch.cat([p[:count] for p, count in zip(parts, counts, strict=True)])

    @contextmanager
    def _whole(self) -> Generator[None]:
        """The model with whole tensors, for as long as something is computed."""
        if self.parts is None or self._is_whole:
            yield
            return
        self._is_whole = True
        try:
            for name, parameter in self.model.named_parameters():
                parameter.data = self.gathered(name, self.parts.by_name[name], self.copy_group)
            yield
        finally:
            self._is_whole = False
            self._let_go_of_whole()

    # -- what is computed -------------------------------------------------------------------------

    @contextmanager
    def running(self, *, training: bool) -> Generator[None]:
        """See :meth:`PolicyBackend.running`: whatever is computed is computed in it."""
        with self._whole(), super().running(training=training):
            yield

    def _step(self, *args: Any) -> StepResult:
        with self._whole():  # the gradients are those of whole tensors
            return super()._step(*args)

    def calibrate_qkv_fp8_scales(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """See :meth:`PolicyInterface.calibrate_qkv_fp8_scales`."""
        with self._whole():
            return super().calibrate_qkv_fp8_scales(*args, **kwargs)

    def take_step(self, lr: float, scale: float) -> None:
        """See :meth:`PolicyModel.take_step`: the gradients are whole, the optimizer's parts."""
        if self.parts is None:
            super().take_step(lr, scale)
            return
        assert self.worker is not None
        shard = self.worker.rank % self.shards
        for name, parameter in self.model.named_parameters():
            assert parameter.grad is not None
            part = parameter.grad.tensor_split(self.shards)[shard]
            self.parts.by_name[name].grad = part * scale
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()

    # -- what leaves it ---------------------------------------------------------------------------

    def write_checkpoint(self, directory: Path) -> None:
        """See :meth:`PolicyModel.write_checkpoint`: the file that one process writes."""
        if self.parts is None:
            super().write_checkpoint(directory)
            return
        parts = self.optimizer
        try:
            with self._whole():
                self.optimizer = make_optimizer(self.model, self._optimizer_config)
                for name, parameter in self.model.named_parameters():
                    for key, value in parts.state.get(self.parts.by_name[name], {}).items():
                        whole = value
                        if value.dim():
                            whole = self.gathered(name, value, self.copy_group)
                        self.optimizer.state[parameter][key] = whole
                for given, kept in zip(
                    self.optimizer.param_groups, parts.param_groups, strict=True
                ):
                    given["lr"] = kept["lr"]
                super().write_checkpoint(directory)
        finally:
            self.optimizer = parts

    def weight_source(self) -> WeightSource:
        """See :meth:`PolicyBackend.weight_source`."""
        if self.parts is None:
            return super().weight_source()
        return ShardedSource(self)

    @property
    def specs(self) -> Sequence[TensorSpec]:
        """Of whole tensors."""
        return self._specs


class ShardedSource(GatheredSource):
    """The tensors of a sharded policy, each put together when it is asked for.

    Args:
        policy: Whose.
    """

    def __init__(self, policy: ShardedReferencePolicy) -> None:
        super().__init__(policy.refit_ranks)
        self._policy, self._check = policy, policy.changes.watch()
        policy.sources["made"] += 1

    def specs(self) -> Sequence[TensorSpec]:
        """See :meth:`WeightSource.specs`."""
        return self._policy.specs

    def gather(self, name: str) -> torch.Tensor | None:
        """See :meth:`GatheredSource.gather`; copies after the first have nothing to give."""
        policy = self._policy
        assert policy.data_parallel is not None
        assert policy.parts is not None
        if policy.data_parallel.rank:
            return None
        part = policy.parts.by_name.get(name)
        if part is None:  # a buffer, which every rank has
            tensor: torch.Tensor = policy.model.state_dict()[name]
            return tensor
        return policy.gathered(name, part, policy.refit_group)

    def confirm_part(self) -> None:
        """See :meth:`GatheredSource.confirm_part`."""
        self._check()

    def close_part(self) -> None:
        """See :meth:`GatheredSource.close_part`."""
        self._policy.sources["closed"] += 1


def _own(groups: Sequence[Sequence[int]], rank: int, timeout: timedelta | None = None) -> Any:
    """Makes all of the groups, as every rank must; the one that this rank is in."""
    made = [(members, dist.new_group(list(members), timeout=timeout)) for members in groups]
    return next(group for members, group in made if rank in members)
