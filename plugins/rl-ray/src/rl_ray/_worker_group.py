"""Workers as Ray actors."""

from __future__ import annotations

import shlex
import shutil
import uuid
from typing import TYPE_CHECKING, Any

from rl_core.cluster.launcher import Workers, checked_size, contexts, wait_for_all
from rl_core.cluster.remote_error import as_text
from rl_core.cluster.runtime import import_ray
from rl_core.cluster.worker import CONCURRENCY_GROUPS, Worker
from rl_core.errors import ConfigError, LifecycleError
from rl_core.futures import wait

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from rl_core.cluster.virtual_cluster import RayVirtualCluster
    from rl_core.interfaces import Future
    from rl_core.plugins.manifest import BackendManifest, Kind

__all__ = ["WorkerGroup"]

#: Seconds for the processes to start, before any model is loaded.
_START_DEADLINE_S = 300.0


class _RayWorker(Worker):
    """The actor."""

    @as_text
    def place(self) -> dict[str, Any]:
        """See :meth:`Worker.place`."""
        import ray

        return {
            **super().place(),
            "node": ray.get_runtime_context().get_node_id(),
            "address": ray.util.get_node_ip_address(),
        }


class WorkerGroup(Workers):
    """One actor for each bundle, each hosting the backend embedded in its own process.

    Args:
        cluster: Where they run; the group takes one of its places.
        manifest: Names the backend and the variables of its processes.
        kind: ``"generation"`` or ``"policy"``.
        config: The checked configuration of the backend.
        num_workers: How many; as many as the cluster has bundles if None.
        call_deadline_s: Seconds that any one call may take, loading the model included.

    Raises:
        ConfigError: No place on the cluster; and see :class:`Workers`.
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
        name = f"{manifest.name}-{kind}-{uuid.uuid4().hex[:6]}"
        size = checked_size(num_workers, cluster.world_size)
        super().__init__(name, size, manifest, kind, call_deadline_s)
        self._cluster = cluster
        self._actors: list[Any] = []
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
        actor_class = import_ray().remote(concurrency_groups=CONCURRENCY_GROUPS)(_RayWorker)
        for rank in range(self.size):
            name = f"{self.name}-worker-{rank}"
            options = self._cluster.actor_options(rank)
            actor = actor_class.options(name=name, runtime_env=environment, **options).remote(name)
            self._actors.append(actor)
        starting = [self.remote(rank, "control", "place") for rank in self.ranks]
        self.places = wait(starting, min(_START_DEADLINE_S, self.call_deadline_s))
        self.wait(
            self.remote(rank, "work", "build", kind, dict(config), context)
            for rank, context in zip(self.ranks, contexts(self.places), strict=True)
        )

    def remote(self, rank: int, group: str, method: str, *args: Any) -> Future:
        """See :meth:`Workers.remote`."""
        return self._actor_method(rank, method).options(concurrency_group=group).remote(*args)

    def stream(self, rank: int, stream_id: str, data: Any, greedy: bool) -> AsyncIterator[Future]:
        """See :meth:`Workers.stream`: Ray's generator of references."""
        options = {"concurrency_group": self._generating, "num_returns": "streaming"}
        method = self._actor_method(rank, "stream").options(**options)
        rows: AsyncIterator[Future] = method.remote(stream_id, data, greedy)
        return rows

    def _actor_method(self, rank: int, method: str) -> Any:
        if not self._actors:
            raise LifecycleError(
                f"the workers of {self.name} were called after shutdown", fix="build a new backend"
            )
        return getattr(self._actors[rank], method)

    # -- the end --------------------------------------------------------------------------------

    def shutdown(self) -> bool:
        """See :meth:`Workers.shutdown`."""
        actors = self._actors if import_ray().is_initialized() else []
        try:
            wait_for_all(
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
                wait_for_all(actor.place.remote() for actor in actors)
        finally:
            if self._claimed:
                self._claimed = False
                self._cluster.release(self.name)


def _check_executable(backend: str, executable: str) -> None:
    """Ray would wait for ever for a Python that is not there; on other nodes only it can tell."""
    if len(import_ray().nodes()) == 1 and not shutil.which(shlex.split(executable)[0]):
        raise ConfigError(
            f"the Python for workers of {backend!r} does not exist: {executable}",
            fix="correct py_executables of the RayVirtualCluster",
            key="py_executables",
        )
