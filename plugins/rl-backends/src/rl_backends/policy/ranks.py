"""All workers of a policy: sums and small messages over a separate process group.

Messages are JSON in byte tensors; nothing is unpickled.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self

import msgspec
import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d

from rl_backends.changes import torn_weights
from rl_backends.ranks import RankProcess
from rl_backends.refit_ranks import gather
from rl_core.errors import ConfigError, DeadlineError, TrainingError, WorkerDiedError
from rl_core.weights.protocol.timing import EXIT_VISIBLE_S, TICK_S
from rl_core.weights.transports.cuda import uuid_of

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

    from rl_backends.changes import WeightChanges
    from rl_core.interfaces import WorkerContext

__all__ = ["RankGroup", "meet"]

#: Longest wait for a peer that is still working on its rows.
TIMEOUT_S = 600.0
#: Seconds at least for all peers to come: they start, and may load a model, at their own pace.
MEETING_S = 300.0
#: Gradients are summed in flat pieces of about this many elements.
PIECE_ELEMENTS = 1 << 24


@contextmanager
def meet(worker: WorkerContext, timeout_s: float) -> Generator[c10d.Store]:
    """The store of several workers, once all of them have come to rank 0's.

    In its body they join process groups over it.

    Args:
        worker: Who this is among how many, and where rank 0 listens.
        timeout_s: Longest wait for a peer from then on. To come they have at least
            ``MEETING_S``.

    Raises:
        ConfigError: There is no port to meet at.
        DeadlineError: The peers did not all come in time, or rank 0 could not listen.
    """
    if not worker.master_port:
        raise ConfigError(
            f"the {worker.world_size} workers have no port at which rank 0 listens",
            fix="set WorkerContext.master_port to a free TCP port of rank 0's node",
            key="master_port",
        )
    patience_s = max(timeout_s, MEETING_S)
    try:
        store: c10d.Store = dist.TCPStore(  # type: ignore[attr-defined]
            worker.master_addr,
            worker.master_port,
            worker.world_size,
            is_master=worker.rank == 0,
            timeout=timedelta(seconds=patience_s),
        )
        store.set_timeout(timedelta(seconds=timeout_s))
        yield store
    except (RuntimeError, dist.DistError) as error:
        raise DeadlineError(
            f"rank {worker.rank} of {worker.world_size} did not reach its peers at "
            f"{worker.master_addr}:{worker.master_port}: {error}",
            fix="start all workers with the same master_addr, and a master_port that is free there",
            seconds=patience_s,
        ) from error


class RankGroup:
    """One worker's connection to the others; alone, every method returns at once.

    Args:
        worker: Who this is among how many, and where rank 0 listens; None is alone.
        device: Where the gradients are.
        timeout_s: Longest wait for a peer.

    Raises:
        ConfigError: There are peers but no port to meet at, or two compute on one GPU.
        DeadlineError: The peers did not all come in time.
        WorkerDiedError: One died since.
    """

    def __init__(
        self,
        worker: WorkerContext | None = None,
        device: torch.device | None = None,
        *,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.rank = worker.rank if worker else 0
        self.size = worker.world_size if worker else 1
        self._timeout = timedelta(seconds=timeout_s)
        self._messages: Any = None
        self._tensors: Any = None
        self._processes: list[RankProcess] = []
        self._lost_a_peer = False
        if worker is None or self.size == 1:
            return
        device = device or torch.device("cpu")
        with meet(worker, self._timeout.total_seconds()) as store:
            self._messages = dist.ProcessGroupGloo(
                c10d.PrefixStore("messages", store), self.rank, self.size, self._timeout
            )
            self._tensors = self._messages
            if device.type == "cuda":
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = self._timeout
                self._tensors = dist.ProcessGroupNCCL(
                    c10d.PrefixStore("tensors", store), self.rank, self.size, options
                )
        self._introduce()
        self.check_gpus(device)

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Self:
        """The workers of a group of torch's that exchanges CPU tensors and stays its owner's.

        Called on all of them.
        """
        made = cls()
        made.rank, made.size = group.rank(), group.size()
        made._messages = made._tensors = group
        made._introduce()
        return made

    def check_gpus(self, device: torch.device) -> None:
        """Makes sure that no two workers compute on one GPU, which NCCL refuses; called on all.

        Raises:
            ConfigError: Two do.
        """
        uuids = self.gather(uuid_of(device))
        for rank, uuid in enumerate(uuids):
            if uuid is not None and (first := uuids.index(uuid)) != rank:
                raise ConfigError(
                    f"ranks {first} and {rank} of {self.size} compute on the same GPU, {uuid}",
                    fix="start at most as many ranks as there are GPUs, and give each its own GPU, "
                    'such as LocalCluster(2, devices=["0", "1"])',
                    key="world_size",
                )

    def _introduce(self) -> None:
        """So that a peer which is lost later can be looked at."""
        here = RankProcess.here(self.rank, self.size)
        self._processes = msgspec.convert(self.gather(msgspec.to_builtins(here)), list[RankProcess])

    def sum_(self, tensors: Iterable[torch.Tensor]) -> None:
        """Replaces tensors of one dtype and device by their sums over all ranks."""
        if self.size == 1:
            return
        for piece in _pieces(tensors):
            flat = torch.cat([tensor.reshape(-1) for tensor in piece])
            with self.collectives("a sum"):
                self._tensors.allreduce([flat]).wait()
            parts = torch.split(flat, [tensor.numel() for tensor in piece])
            for tensor, part in zip(piece, parts, strict=True):
                tensor.copy_(part.view_as(tensor))

    def gather(self, value: Any) -> list[Any]:
        """Everybody's value, by rank; numbers, strings, lists and dicts of them."""
        if self.size == 1:
            return [value]
        with self.collectives("a message"):
            return gather(self._messages, value)

    def check_weights(self, changes: WeightChanges) -> None:
        """Called on all ranks, with what each knows of its weights; raises on all or on none.

        Raises:
            LifecycleError: A rank's weights are torn, or of another state than rank 0's.
        """
        everybody = self.gather([changes.state, changes.torn])
        for rank, (state, torn) in enumerate(everybody):
            if torn:
                raise torn_weights(f"rank {rank}", torn)
            if state != everybody[0][0]:
                raise self._processes[rank].in_another_state(state, everybody[0][0])

    @contextmanager
    def all_or_none(self, what: str) -> Generator[None]:
        """A piece of work of each rank's own; if it fails on one, all raise.

        Raises:
            TrainingError: A peer's work failed; the own error is raised as it is.
            WorkerDiedError: A collective in it, or afterwards, lost a peer.
        """
        error: Exception | None = None
        try:
            with self.collectives(what):
                yield
        except Exception as raised:
            if self.size == 1 or self._lost_a_peer:  # which cannot answer
                raise
            error = raised
        outcomes = self.gather(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        for rank, failure in enumerate(outcomes):
            if failure is not None:
                raise TrainingError(
                    f"data-parallel rank {rank} failed at {what}, so all ranks stopped: {failure}",
                    fix=f"correct the error of rank {rank}",
                    rank=rank,
                )

    @contextmanager
    def collectives(self, what: str) -> Generator[None]:
        """Work in which ranks exchange tensors through their own groups.

        Raises:
            WorkerDiedError: It lost a peer, which died or did not take part in time; names it, as
                far as that can be seen from here.
        """
        try:
            yield
        except RuntimeError as error:
            # Gloo has no class of errors; each names a file of gloo, or a closed connection.
            gloo = any(word in str(error) for word in ("/gloo/", "pair closure"))
            if gloo or isinstance(error, dist.DistError):
                raise self._lost(what, error) from error
            raise

    def out_of_step(self) -> None:
        """Called on a rank that failed amid collectives: it exchanges nothing more, and raises."""
        self._lost_a_peer = True

    def close(self) -> None:
        """Leaves the group. Idempotent."""
        if self._tensors is not self._messages:  # before NCCL's destructor runs
            self._tensors.abort()
        self._messages = self._tensors = None

    def _lost(self, what: str, error: RuntimeError) -> WorkerDiedError:
        """The error for a collective that failed."""
        self._lost_a_peer = True
        end = time.monotonic() + EXIT_VISIBLE_S
        while not (ended := [p for p in self._processes if p.state() in ("ended", "stopped")]):
            if time.monotonic() > end:
                break
            time.sleep(TICK_S)
        peers = " and ".join(f"{process} {process.describe_state()}" for process in ended)
        peers = peers or "a peer has ended or did not take part; those on this host are running"
        return WorkerDiedError(
            f"rank {self.rank} of {self.size} could not finish {what}: {peers} ({error})",
            fix="look at the logs of the other workers, and build the policy again",
            **({"rank": ended[0].rank} if ended else {}),
        )


def _pieces(tensors: Iterable[torch.Tensor]) -> Generator[list[torch.Tensor]]:
    piece: list[torch.Tensor] = []
    for tensor in tensors:
        if piece and sum(t.numel() for t in piece) + tensor.numel() > PIECE_ELEMENTS:
            yield piece
            piece = []
        piece.append(tensor)
    if piece:
        yield piece
