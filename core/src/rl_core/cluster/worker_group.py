"""Workers of one backend on a cluster: started, called with a deadline, ended."""

from __future__ import annotations

import shlex
import shutil
import time
import uuid
from typing import TYPE_CHECKING, Any

from rl_core.cluster.runtime import import_ray
from rl_core.cluster.worker import CONCURRENCY_GROUPS, Worker
from rl_core.errors import CapabilityError, ConfigError, LifecycleError, WorkerDiedError
from rl_core.futures import wait
from rl_core.interfaces import WorkerContext
from rl_core.plugins.validation import is_kept

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from rl_core.cluster.virtual_cluster import RayVirtualCluster
    from rl_core.interfaces import Future
    from rl_core.plugins.manifest import BackendManifest, Kind

__all__ = ["WorkerGroup"]

#: Seconds for the processes to start, before any model is loaded.
_START_DEADLINE_S = 300.0
_SHUTDOWN_DEADLINE_S = 60.0


class WorkerGroup:
    """One actor for each bundle, each hosting the backend embedded in its own process.

    Args:
        cluster: Where they run; the group takes one of its places.
        manifest: Names the backend and the variables of its processes.
        kind: ``"generation"`` or ``"policy"``.
        config: The checked configuration of the backend.
        num_workers: How many; as many as the cluster has bundles if None.
        call_deadline_s: Seconds that any one call may take, loading the model included.

    Attributes:
        places: For each worker its ``node``, ``address`` and ``pid``.

    Raises:
        ConfigError: More workers than bundles, or no place on the cluster.
        WorkerError: The backend could not be built in a worker; no worker is left behind.
        WorkerDiedError: A worker's process ended meanwhile.
        DeadlineError: It took too long.
    """

    def __init__(
        self,
        cluster: RayVirtualCluster,
        manifest: BackendManifest,
        kind: Kind,
        config: Mapping[str, Any],
        *,
        num_workers: int | None = None,
        call_deadline_s: float = 3600.0,
    ) -> None:
        self.name = f"{manifest.name}-{kind}-{uuid.uuid4().hex[:6]}"
        self.size = _checked_size(num_workers, cluster.world_size)
        self.call_deadline_s = call_deadline_s
        self._capabilities = manifest.capabilities[kind]
        # A backend of an earlier contract was promised one call at a time, by one thread.
        self._generating = "generate" if is_kept("concurrent_calls", manifest) else "work"
        self._cluster = cluster
        self._actors: list[Any] = []
        self.places: list[dict[str, Any]] = []
        cluster.claim(self.name)
        self._claimed = True
        try:
            self._start(manifest, kind, config)
        except BaseException:
            self._end()
            raise

    def _start(self, manifest: BackendManifest, kind: Kind, config: Mapping[str, Any]) -> None:
        environment: dict[str, Any] = {"env_vars": dict(manifest.environment)}
        if executable := self._cluster.py_executables.get(manifest.name):
            _check_executable(manifest.name, executable)
            environment["py_executable"] = executable
        actor_class = import_ray().remote(concurrency_groups=CONCURRENCY_GROUPS)(Worker)
        for rank in range(self.size):
            name = f"{self.name}-worker-{rank}"
            options = self._cluster.actor_options(rank)
            actor = actor_class.options(name=name, runtime_env=environment, **options).remote(name)
            self._actors.append(actor)
        starting = [self._remote(rank, "place", "control") for rank in self.ranks]
        self.places = wait(starting, min(_START_DEADLINE_S, self.call_deadline_s))
        self.wait(
            self._remote(rank, "build", "work", kind, dict(config), context)
            for rank, context in zip(self.ranks, _contexts(self.places), strict=True)
        )

    @property
    def ranks(self) -> range:
        """``0 .. size - 1``."""
        return range(self.size)

    # -- calls ----------------------------------------------------------------------------------

    def submit(self, rank: int, method: str, *args: Any, **kwargs: Any) -> Future:
        """Calls a method of one backend; its result comes later."""
        return self._remote(rank, "call", "work", method, args, kwargs)

    def submit_generate(self, rank: int, data: Any, greedy: bool) -> Future:
        """Lets one backend generate, beside whatever it generates already."""
        return self._remote(rank, "call", self._generating, "generate", (data, greedy), {})

    def submit_refit(self, rank: int, method: str, *args: Any, **kwargs: Any) -> Future:
        """Calls a method that returns futures; the result is what the first one ended with."""
        deadline = self.call_deadline_s
        return self._remote(rank, "call_and_wait", "refit", method, args, kwargs, deadline)

    def call(self, rank: int, method: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a method of one backend and waits."""
        return self.wait([self.submit(rank, method, *args, **kwargs)])[0]

    def call_all(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Calls a method of every backend and waits; results in order of the ranks."""
        return self.wait([self.submit(rank, method, *args, **kwargs) for rank in self.ranks])

    def attribute(self, rank: int, name: str) -> Any:
        """An attribute of one backend, also while it works."""
        return self.wait([self._remote(rank, "attribute", "control", name)])[0]

    def attributes(self, name: str) -> list[Any]:
        """An attribute of every backend, also while they work."""
        return self.wait([self._remote(rank, "attribute", "control", name) for rank in self.ranks])

    def stream(self, rank: int, stream_id: str, data: Any, greedy: bool) -> Any:
        """Ray's generator of references to the ``(row, output)`` of one backend."""
        return self._remote(
            rank, "stream", self._generating, stream_id, data, greedy, num_returns="streaming"
        )

    def abandon(self, rank: int, stream_id: str) -> None:
        """Tells a backend that nobody reads its stream any more."""
        self._remote(rank, "abandon", "control", stream_id)

    def require(self, capability: str) -> None:
        """Refuses, before any worker is asked, what the backend does not offer.

        Raises:
            CapabilityError: The manifest says so.
        """
        declared = self._capabilities[capability]
        if declared.level in ("unsupported", "not_implemented"):
            raise CapabilityError(
                f"{self.name} does not offer {capability}: {declared.level}",
                fix=declared.reason or None,
                capability=capability,
            )

    def wait(self, futures: Iterable[Future]) -> list[Any]:
        """Waits until the calls' deadline.

        Raises:
            WorkerError: A call raised; also an instance of the original's class, where known.
            WorkerDiedError: A worker's process is gone; names it.
            DeadlineError: The deadline passed.
        """
        return wait(list(futures), self.call_deadline_s)

    def _remote(self, rank: int, method: str, group: str, *args: Any, **options: Any) -> Any:
        if not self._actors:
            raise LifecycleError(
                f"the workers of {self.name} were called after shutdown", fix="build a new backend"
            )
        remote_method = getattr(self._actors[rank], method)
        return remote_method.options(concurrency_group=group, **options).remote(*args)

    # -- the end --------------------------------------------------------------------------------

    def shutdown(self) -> bool:
        """Shuts every backend down and ends its process. Idempotent.

        Raises:
            WorkerError: A backend failed to shut down; its process is gone all the same.
        """
        actors = self._actors if import_ray().is_initialized() else []
        try:
            _wait_for_all(
                actor.call.options(concurrency_group="control").remote("shutdown", (), {})
                for actor in actors
            )
        finally:
            self._end()
        return True

    def _end(self) -> None:
        actors, self._actors = self._actors, []
        ray = import_ray()
        try:
            if ray.is_initialized():
                for actor in actors:
                    ray.kill(actor)
                _wait_for_all(actor.place.remote() for actor in actors)
        finally:
            if self._claimed:
                self._claimed = False
                self._cluster.release(self.name)


def _wait_for_all(calls: Iterable[Future]) -> None:
    """Waits also for the calls after one that fails, and raises the first failure."""
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


def _check_executable(backend: str, executable: str) -> None:
    """Ray would wait for ever for a Python that is not there; on other nodes only it can tell."""
    if len(import_ray().nodes()) == 1 and not shutil.which(shlex.split(executable)[0]):
        raise ConfigError(
            f"the Python for workers of {backend!r} does not exist: {executable}",
            fix="correct py_executables of the RayVirtualCluster",
            key="py_executables",
        )


def _checked_size(num_workers: int | None, bundles: int) -> int:
    size = bundles if num_workers is None else num_workers
    if not 1 <= size <= bundles:
        raise ConfigError(
            f"num_workers is {size}, the cluster has {bundles} bundles",
            fix=f"give a number between 1 and {bundles}",
            key="num_workers",
        )
    return size


def _contexts(places: Sequence[Mapping[str, Any]]) -> list[WorkerContext]:
    nodes = [place["node"] for place in places]
    return [
        WorkerContext(
            rank=rank,
            world_size=len(places),
            local_rank=nodes[:rank].count(node),
            master_addr=places[0]["address"],
            master_port=places[0]["port"],
        )
        for rank, node in enumerate(nodes)
    ]
