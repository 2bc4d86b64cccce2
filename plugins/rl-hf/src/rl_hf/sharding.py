"""A model in parts: each data-parallel rank has a shard of every parameter (FSDP2).

Adapters are small, so that each rank has all of them: it can merge its shard of a weight alone.

A layer is whole on a rank only while it computes. All ranks must then run the model equally often:
a rank with fewer microbatches runs it on a few tokens that count for nothing.
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from rl_backends.pieces import held_boxes, index_of, local_part, pieces_of
from rl_backends.policy.ranks import TIMEOUT_S, RankGroup, meet
from rl_core.errors import CapabilityError, ConfigError, LifecycleError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence

    from rl_core.interfaces import WorkerContext

__all__ = ["KEY", "Shards", "check_sharding"]

KEY = "dtensor_cfg"
#: What log-probs may change by when a model is sharded: nothing but the order of sums does.
TOLERANCE = 0.02

T = TypeVar("T")


def check_sharding(config: Mapping[str, Any], worker: WorkerContext | None) -> bool:
    """Whether a policy's model is to be sharded; one rank has all of it.

    Args:
        config: A checked :class:`~rl_hf.config.HuggingFacePolicyConfig`.
        worker: Of the policy.

    Raises:
        ConfigError: A key contradicts it.
    """
    if not (config.get(KEY) or {}).get("enabled") or worker is None or worker.world_size == 1:
        return False
    if config.get("device_map"):
        raise ConfigError(
            f"{KEY}.enabled shards the model over ranks, and device_map spreads it over devices of "
            "one process",
            fix=f"remove device_map, or set {KEY}.enabled to False",
            key=KEY,
        )
    return True


class Shards:
    """The ranks among which a model is sharded, and their process groups.

    Args:
        worker: Who this is among how many.
        device: Where the model computes.

    Attributes:
        ranks: All of them, for messages.
        messages: Their group, over tensors of the CPU.
        failed: Why this rank ended a pass before its end; the ranks are then no longer in step.

    Raises:
        ConfigError: Other code has initialised torch.distributed for other ranks.
        DeadlineError: The peers did not all come in time.
    """

    #: Policies of this process in the default group that the first of them made.
    _users: ClassVar[int] = 0
    _owns_default_group: ClassVar[bool] = False

    def __init__(self, worker: WorkerContext, device: torch.device) -> None:
        self._device = device
        kind = type(self)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self._groups: list[Any] = []
        if not dist.is_initialized():
            with meet(worker, TIMEOUT_S) as store:
                dist.init_process_group(
                    "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
                    store=store,
                    rank=worker.rank,
                    world_size=worker.world_size,
                    timeout=timedelta(seconds=TIMEOUT_S),
                )
            kind._owns_default_group = True
        if (dist.get_rank(), dist.get_world_size()) != (worker.rank, worker.world_size):
            raise ConfigError(
                f"{KEY}: torch.distributed was initialised as rank {dist.get_rank()} of "
                f"{dist.get_world_size()}, but this is rank {worker.rank} of {worker.world_size}",
                fix="let the policy initialise torch.distributed, or start it with the same ranks",
                key=KEY,
            )
        kind._users += 1
        self.failed = ""
        tensors = "nccl" if device.type == "cuda" else "gloo"
        with ExitStack() as unless_built:
            unless_built.callback(self._end_groups)
            self.messages = self._new_group("gloo", TIMEOUT_S)
            self.ranks = RankGroup.of(self.messages)
            unless_built.callback(self.ranks.close)
            self.ranks.check_gpus(device)
            self._group = self._new_group(tensors, TIMEOUT_S)
            unless_built.pop_all()

    def _new_group(self, backend: str, timeout_s: float) -> Any:
        group = dist.new_group(backend=backend, timeout=timedelta(seconds=timeout_s))
        self._groups.append(group)
        return group

    @torch.no_grad()
    def shard(
        self,
        model: nn.Module,
        inner: nn.Module,
        probe: Callable[[], torch.Tensor],
        *,
        kept: set[nn.Parameter] | None = None,
    ) -> None:
        """Leaves of a model this rank's shards; called on all ranks.

        Args:
            model: Whole, on its device.
            inner: The transformers model in it.
            probe: Runs the model on a few tokens; its result must stay what it is.
            kept: Parameters that each rank keeps whole. FSDP leaves their gradients alone.

        Raises:
            CapabilityError: The model cannot be sharded, which the probe shows.
        """
        kind = type(inner).__name__
        before = probe()
        mesh = DeviceMesh.from_group(self._group, self._device.type)
        # Frozen parameters and trained ones have their own dtypes, as in a model that is whole.
        precision = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
        for unit in (*_layers(inner), model):
            fully_shard(unit, mesh=mesh, mp_policy=precision, ignored_params=kept)
        try:
            off = float((probe() - before).abs().max())
            model.reshard()  # type: ignore[operator]
            reason = f"its log-probs change by {off:.3g}" if off > TOLERANCE else ""
        except (AssertionError, AttributeError, RuntimeError, TypeError, ValueError) as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
        if reason:
            raise CapabilityError(
                f"{kind} cannot be sharded by FSDP: {reason}",
                fix=f'set {KEY}.enabled to False, or use torch_dtype="float32" if its parameters '
                "have several dtypes",
            )

    def whole(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A tensor put together on rank 0, and None elsewhere; see :func:`whole_on_first`.

        Args:
            tensor: A parameter, or what was made of one.
        """
        made = whole_on_first(tensor, self._group, range(self.ranks.size), self._device)
        return None if self.ranks.rank else made

    def sum_(self, tensors: Iterable[torch.Tensor]) -> None:
        """Replaces tensors that all ranks have whole by their sums over the ranks."""
        for tensor in tensors:
            dist.all_reduce(tensor, group=self._group)

    @contextmanager
    def passing(self, what: str) -> Generator[None]:
        """Passes through the model, equally many on all ranks.

        Raises:
            WorkerDiedError: It lost a peer.
        """
        try:
            with self.ranks.collectives(what):
                yield
        except Exception as error:
            self.failed = f"{type(error).__name__}: {error}".splitlines()[0]
            self.ranks.out_of_step()
            raise

    def check(self) -> None:
        """Raises LifecycleError if the ranks are no longer in step."""
        if self.failed:
            raise LifecycleError(
                "this rank of a sharded model failed while layers were gathered "
                f"({self.failed}), so the ranks are no longer in step",
                fix="shut the policy down, and build it again from a checkpoint",
            )

    def in_step(
        self, found: Iterable[T], passes: Sequence[int], idle: Callable[[], object]
    ) -> Iterator[T]:
        """Results of microbatches, each computed with as many passes as on the other ranks.

        Args:
            found: The results; each is computed when it is asked for.
            passes: Through the model, that each of them takes.
            idle: Makes a pass that counts for nothing.
        """
        results = iter(found)
        for number, missing in enumerate(self.missing(passes)):
            result = [next(results)] if number < len(passes) else []
            for _ in range(missing):
                idle()
            yield from result

    def missing(self, passes: Sequence[int]) -> list[int]:
        """Passes that this rank lacks in each microbatch, of as many as the busiest rank has."""
        everybody: list[list[int]] = self.ranks.gather(list(passes))
        most = max(len(theirs) for theirs in everybody)
        padded = [theirs + [0] * (most - len(theirs)) for theirs in everybody]
        return [max(each) - each[self.ranks.rank] for each in zip(*padded, strict=True)]

    def leave(self) -> None:
        """Ends the groups; the last policy of the process ends the default group."""
        self.ranks.close()
        self._end_groups()

    def _end_groups(self) -> None:
        kind = type(self)
        for group in reversed(self._groups):
            with suppress(ValueError, RuntimeError):  # a peer that died has ended it
                dist.destroy_process_group(group)
        kind._users -= 1
        if not kind._users and kind._owns_default_group and dist.is_initialized():
            kind._owns_default_group = False
            dist.destroy_process_group()


def whole_on_first(
    tensor: torch.Tensor, group: Any, members: Sequence[int], device: torch.device
) -> torch.Tensor | None:
    """Puts a tensor together on the first rank of a group; called on all of them in one order.

    Of ranks that replicate each other, one sends.

    Args:
        tensor: A DTensor, on a mesh of these ranks or of some of them. Where the mesh has not the
            first rank, other ranks have the same values. A tensor without shards is as it is.
        group: A process group of torch that sends and receives tensors of the device.
        members: The ranks of the group, by their numbers in the mesh.
        device: On which tensors travel.

    Returns:
        The whole tensor, where the first rank has its shard of it; None on the other ranks.
    """
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    mesh, placements = tensor.device_mesh, tensor.placements
    places = product(*map(range, mesh.shape))
    place_of = dict(zip(mesh.mesh.flatten().tolist(), places, strict=True))
    first = place_of.get(members[0])
    if first is None:
        return None
    senders = {
        rank: place
        for rank, place in enumerate(map(place_of.get, members))
        if rank
        and place is not None
        and all(
            mine == theirs or not placement.is_replicate()
            for placement, mine, theirs in zip(placements, first, place, strict=True)
        )
    }
    if group.rank():
        if group.rank() in senders:
            for _, view in pieces_of(tensor):
                group.send([view.to(device).contiguous()], 0, 0).wait()
        return None
    whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=local_part(tensor).device)
    for box, view in pieces_of(tensor):
        whole[index_of(box)] = view
    for rank, place in senders.items():
        for box, _ in held_boxes(tensor.shape, placements, mesh.shape, place):
            target = whole[index_of(box)]
            landed = torch.empty(target.shape, dtype=target.dtype, device=device)
            group.recv([landed], rank, 0).wait()
            target.copy_(landed)
    return whole


def _layers(inner: nn.Module) -> list[nn.Module]:
    """The modules that are whole while they compute; all else is whole during a pass.

    They are the layers that transformers does not split, without those in others of them, and
    without those that share a parameter with the rest of the model.
    """
    kinds = set(getattr(inner, "_no_split_modules", None) or ())
    found = [module for module in inner.modules() if type(module).__name__ in kinds]
    inside = {part for module in found for part in module.modules() if part is not module}
    every = _uses(inner)
    return [
        layer
        for layer in found
        if layer not in inside
        and (own := _uses(layer))
        and all(every[parameter] == count for parameter, count in own.items())
    ]


def _uses(module: nn.Module) -> Counter[nn.Parameter]:
    """How often each parameter is in a module: more than once if it is tied."""
    return Counter(p for part in module.modules() for p in part.parameters(recurse=False))
