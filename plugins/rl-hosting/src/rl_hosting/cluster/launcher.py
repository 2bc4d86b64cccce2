"""Where workers run: one interface for every launcher.

``RayVirtualCluster`` of rl-ray is one, over any number of hosts; ``LocalCluster`` of rl-hosting is
another, with processes of this host. Whatever stands on these interfaces (remote policies and
generation, rows dealt to workers, errors of workers) works on both.
"""

from __future__ import annotations

import concurrent.futures
import threading
import time
import uuid
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from rl_core.errors import (
    CapabilityError,
    ConfigError,
    DeadlineError,
    LifecycleError,
    WorkerDiedError,
    WorkerError,
)
from rl_core.futures import as_concurrent, time_left, wait
from rl_core.interfaces import WorkerContext

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Mapping, Sequence

    from rl_core.interfaces import Future
    from rl_core.plugins.manifest import BackendManifest, Kind

__all__ = ["Launcher", "Workers", "checked_size", "wait_for_all"]

#: Seconds for workers to start, before any model is loaded, and to end by themselves.
_START_DEADLINE_S, _SHUTDOWN_DEADLINE_S = 300.0, 60.0
#: Seconds, at most, from a call that failed for want of a peer until that peer's end is known.
_DEATH_IS_KNOWN_S = 1.0


class Launcher(ABC):
    """Starts workers; a launcher's author derives from :class:`rl_hosting.cluster.Cluster`."""

    @property
    @abstractmethod
    def world_size(self) -> int:
        """How many places for workers there are."""

    @abstractmethod
    def workers(
        self,
        manifest: BackendManifest,
        kind: Kind,
        config: Mapping[str, Any],
        *,
        num_workers: int | None = None,
        call_deadline_s: float = 3600.0,
    ) -> Workers:
        """Starts workers, each with a backend; see :class:`Workers`."""


class Workers(ABC):
    """Workers of one backend, each in a separate process with its own devices.

    A launcher derives from it. Its constructor fills ``processes``, calls :meth:`build`, and calls
    :meth:`end` if either fails. Calls of one group are made one after the other, or as many at once
    as the group has threads (:data:`rl_hosting.cluster.worker.CONCURRENCY_GROUPS`).

    Args:
        name: How errors call them.
        size: How many.
        manifest: Names the backend and the variables of its processes.
        kind: ``"generation"`` or ``"policy"``.
        call_deadline_s: Seconds that any one call may take, loading the model included.

    Attributes:
        start_deadline_s: Seconds for the processes to start.
        places: For each worker its ``node``, ``address`` and ``pid``.
        processes: What the launcher calls each worker by; empty once they are shut down.

    A launcher's constructor raises:
        ConfigError: More workers than there is room for.
        WorkerError: The backend could not be built in a worker; no worker is left behind.
        WorkerDiedError: A worker's process ended meanwhile.
        DeadlineError: It took too long.
    """

    def __init__(
        self, name: str, size: int, manifest: BackendManifest, kind: Kind, call_deadline_s: float
    ) -> None:
        self.name = name
        self.size = size
        self.call_deadline_s = call_deadline_s
        self.start_deadline_s = min(_START_DEADLINE_S, call_deadline_s)
        self.places: list[dict[str, Any]] = []
        self.processes: list[Any] = []
        self._kind = kind
        # If two threads call at once, every rank must get the same thread's call first: ranks pair
        # their calls by order.
        self._asking = threading.Lock()
        self._capabilities = manifest.capabilities[kind]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_asking"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _asking=threading.Lock())

    #: Seconds for a launcher's calls to name the worker that missed the deadline.
    grace_s: ClassVar[float] = 0.0

    # -- what a launcher does -------------------------------------------------------------------

    @abstractmethod
    def remote(self, rank: int, group: str, method: str, *args: Any) -> Future:
        """Calls a method of one :class:`~rl_hosting.cluster.worker.Worker`; its result comes later.

        Calls reach the worker in the order in which they are made.

        Raises:
            LifecycleError: They were shut down.
        """

    @abstractmethod
    def stream(self, rank: int, stream_id: str, data: Any, greedy: bool) -> AsyncIterator[Future]:
        """The ``(row, output)`` of one backend as they come, each as a future that is done."""

    @abstractmethod
    def end(self) -> None:
        """Ends the processes, whatever they are doing, and empties ``processes``. Idempotent."""

    # -- what a launcher calls ------------------------------------------------------------------

    def build(self, starting: Iterable[Future], config: Mapping[str, Any]) -> None:
        """Lets every worker build its backend, once all of them have started.

        Args:
            starting: What each one's :meth:`~rl_hosting.cluster.worker.Worker.place` returns.
            config: The checked configuration of the backend.
        """
        self.places = wait(list(starting), self.start_deadline_s + self.grace_s)
        nodes = [place["node"] for place in self.places]
        building = []
        for rank, node in enumerate(nodes):
            context = WorkerContext(
                rank=rank,
                world_size=self.size,
                local_rank=nodes[:rank].count(node),
                master_addr=self.places[0]["address"],
                master_port=self.places[0]["port"],
            )
            building.append(self.remote(rank, "work", "build", self._kind, dict(config), context))
        self.wait(building, self.ranks)

    def process(self, rank: int) -> Any:
        """The entry of ``processes`` for one worker.

        Raises:
            LifecycleError: They were shut down.
        """
        if not self.processes:
            raise LifecycleError(
                f"{self.name} was called after shutdown", fix="build a new backend"
            )
        return self.processes[rank]

    # -- calls ----------------------------------------------------------------------------------

    @property
    def ranks(self) -> range:
        """``0 .. size - 1``."""
        return range(self.size)

    def submit_generate(self, rank: int, data: Any, greedy: bool) -> Future:
        """Lets one backend generate, beside whatever it generates already."""
        return self.remote(rank, "generate", "call", "generate", (data, greedy), {})

    def submit_refit(self, method: str, *args: Any, **kwargs: Any) -> list[Future]:
        """Calls a method that returns futures on every rank.

        All ranks begin such calls in one order, that of a thread's own calls.

        Returns:
            For each rank what the first of its futures ended with.
        """
        return self._begin(method, args, kwargs)[1]

    def begin_refit(self, method: str, *args: Any, **kwargs: Any) -> list[Future]:
        """As :meth:`submit_refit`; returns once all have begun."""
        begun, results = self._begin(method, args, kwargs)
        self.wait(begun, self.ranks)
        return results

    def _begin(
        self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Future], list[Future]]:
        name, seconds = uuid.uuid4().hex, self.call_deadline_s
        with self._asking:
            begun = [
                self.remote(rank, "begin", "begin", name, method, args, kwargs)
                for rank in self.ranks
            ]
        return begun, [self.remote(rank, "refit", "finish", name, seconds) for rank in self.ranks]

    def call(self, rank: int, method: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a method of one backend and waits."""
        return self._on([rank], "work", "call", method, args, kwargs)[0]

    def call_all(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Calls a method of every backend and waits; results in order of the ranks."""
        return self._on(self.ranks, "work", "call", method, args, kwargs)

    def call_each(self, method: str, first: Iterable[Any], *args: Any, **kwargs: Any) -> list[Any]:
        """As :meth:`call_all`, with a first argument of each rank's own."""
        with self._asking:
            calls = [
                self.remote(rank, "work", "call", method, (own, *args), kwargs)
                for rank, own in enumerate(first)
            ]
        return self.wait(calls, self.ranks)

    def attribute(self, rank: int, name: str) -> Any:
        """An attribute of one backend, also while it works."""
        return self._on([rank], "control", "attribute", name)[0]

    def attributes(self, name: str) -> list[Any]:
        """An attribute of every backend, also while they work."""
        return self._on(self.ranks, "control", "attribute", name)

    def _on(self, ranks: Sequence[int], group: str, method: str, *args: Any) -> list[Any]:
        with self._asking:
            calls = [self.remote(rank, group, method, *args) for rank in ranks]
        return self.wait(calls, ranks)

    def abandon(self, rank: int, stream_id: str) -> None:
        """Ends a stream of a backend that nobody reads any more."""
        self.remote(rank, "control", "abandon", stream_id)

    def require(self, capability: str) -> None:
        """Refuses, before any worker is called, what the backend does not offer.

        Raises:
            CapabilityError: The manifest does not declare it.
        """
        declared = self._capabilities[capability]
        if declared.level in ("unsupported", "not_implemented"):
            raise CapabilityError(
                f"{self.name} does not offer {capability}"
                + (f": {declared.reason}" if declared.reason else f" ({declared.level})"),
                fix="use another backend; `rl backends info NAME` shows what a backend offers",
                capability=capability,
            )

    def wait(self, futures: Iterable[Future], ranks: Sequence[int] = ()) -> list[Any]:
        """Waits until the calls' deadline, or that of :func:`rl_core.futures.within`.

        Args:
            futures: Of calls.
            ranks: The worker of each one, for the error if it does not come.

        Raises:
            WorkerError: A call raised; also an instance of the original's class, where known.
            WorkerDiedError: A worker's process has ended; names it.
            DeadlineError: The deadline passed; names the first worker that did not answer.
        """
        waited = [as_concurrent(future) for future in futures]
        seconds = time_left(self.call_deadline_s + self.grace_s)
        try:
            return wait(waited, seconds)
        except WorkerError as error:
            # A worker may report that it lost a peer before the end of the peer's process is known.
            concurrent.futures.wait(waited, timeout=_DEATH_IS_KNOWN_S)
            failures = [future.exception() for future in waited if future.done()]
            for failure in failures:
                if isinstance(failure, WorkerDiedError) and not isinstance(failure, WorkerError):
                    raise failure from error
            raise
        except DeadlineError as error:
            late = [ranks[place] for place in error.details.get("pending", ()) if ranks]
            if not late:
                raise
            raise DeadlineError(
                f"{self.name}: rank {' and '.join(map(str, late))} of {self.size} did not answer "
                f"within {seconds:g} s",
                fix="look at what that worker does (its log, py-spy dump); for more time, pass "
                "call_deadline_s to RemotePolicy or RemoteGeneration, or deadline_s to refit",
                seconds=seconds,
                rank=late[0],
            ) from error

    def shutdown(self) -> bool:
        """Shuts every backend down and ends its process. Idempotent.

        Raises:
            WorkerError: A backend failed to shut down; its process has ended all the same.
        """
        try:
            ranks = range(len(self.processes))
            wait_for_all(self.remote(rank, "control", "call", "shutdown", (), {}) for rank in ranks)
        finally:
            self.end()
        return True


def checked_size(num_workers: int | None, places: int) -> int:
    """How many workers, as many as there are places if None.

    Raises:
        ConfigError: More than there are, or none.
    """
    size = places if num_workers is None else num_workers
    if not 1 <= size <= places:
        raise ConfigError(
            f"num_workers is {size}, but the number of places of the cluster is {places}",
            fix=f"use 1 <= num_workers <= {places}",
            key="num_workers",
        )
    return size


def wait_for_all(calls: Iterable[Future]) -> None:
    """Waits for shutdowns, also for those after one that fails, and raises the first failure."""
    end = time.monotonic() + _SHUTDOWN_DEADLINE_S
    failures = []
    for call in list(calls):
        try:
            wait(call, max(0.0, end - time.monotonic()))
        except WorkerDiedError:
            pass  # which is what a shutdown is for
        except Exception as error:
            failures.append(error)
    if failures:
        raise failures[0]
