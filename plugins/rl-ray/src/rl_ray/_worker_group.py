"""Workers as Ray actors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ray

from rl_hosting.cluster.launcher import Workers, wait_for_all
from rl_hosting.cluster.remote_error import as_text
from rl_hosting.cluster.worker import CONCURRENCY_GROUPS, Worker
from rl_ray._futures import as_future

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence

    from rl_core.interfaces import Future
    from rl_core.plugins.manifest import BackendManifest, Kind

__all__ = ["WorkerGroup"]


class _RayWorker(Worker):
    """The actor."""

    @as_text
    def place(self) -> dict[str, Any]:
        """See :meth:`Worker.place`."""
        return {
            **super().place(),
            "node": ray.get_runtime_context().get_node_id(),
            "address": ray.util.get_node_ip_address(),
        }


class WorkerGroup(Workers):
    """Actors, each hosting the backend embedded in its own process.

    Args:
        name: How errors call them.
        manifest: Names the backend.
        kind: ``"generation"`` or ``"policy"``.
        config: The checked configuration of the backend.
        options: Ray's, for each actor.
        released: Called when the actors have ended; may be called again.
        call_deadline_s: Seconds that any one call may take, loading the model included.
    """

    def __init__(
        self,
        name: str,
        manifest: BackendManifest,
        kind: Kind,
        config: Mapping[str, Any],
        *,
        options: Sequence[Mapping[str, Any]],
        released: Callable[[], None],
        call_deadline_s: float,
    ) -> None:
        super().__init__(name, len(options), manifest, kind, call_deadline_s)
        self._released = released
        actor_class = ray.remote(concurrency_groups=CONCURRENCY_GROUPS)(_RayWorker)
        try:
            for rank, chosen in enumerate(options):
                worker = f"{name}-worker-{rank}"
                self.processes.append(actor_class.options(name=worker, **chosen).remote(worker))
            self.build([self.remote(rank, "control", "place") for rank in self.ranks], config)
        except BaseException:
            self.end()
            raise

    def remote(self, rank: int, group: str, method: str, *args: Any) -> Future:
        """See :meth:`Workers.remote`; the result is an object ref."""
        call = getattr(self.process(rank), method).options(concurrency_group=group)
        reference: Future = call.remote(*args)
        return reference

    def stream(self, rank: int, stream_id: str, data: Any, greedy: bool) -> AsyncIterator[Future]:
        """See :meth:`Workers.stream`: Ray's generator of references."""
        options = {"concurrency_group": "generate", "num_returns": "streaming"}
        method = self.process(rank).stream.options(**options)
        rows: AsyncIterator[Future] = method.remote(stream_id, data, greedy)
        return rows

    def shutdown(self) -> bool:
        """See :meth:`Workers.shutdown`."""
        if not ray.is_initialized():  # the actors ended with it
            self.processes.clear()
        return super().shutdown()

    def end(self) -> None:
        """See :meth:`Workers.end`."""
        actors, self.processes = self.processes, []
        try:
            if ray.is_initialized():
                for actor in actors:
                    ray.kill(actor)
                wait_for_all(as_future(actor.place.remote()) for actor in actors)
        finally:
            self._released()
