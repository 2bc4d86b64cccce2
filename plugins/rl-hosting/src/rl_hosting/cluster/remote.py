"""What generation and policy backends on a cluster have in common."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rl_core.interfaces import Future
    from rl_core.plugins.manifest import BackendManifest, Kind
    from rl_hosting.cluster.launcher import Launcher

__all__ = ["RemoteBackend", "through"]

F = TypeVar("F", bound="Callable[..., Any]")


def through(forward: Callable[..., Any], method: F) -> F:
    """Defines a method of a remote backend, with the signature and docstring of an interface's.

    Args:
        forward: Called with the backend, the method's name and the arguments.
        method: The interface's.
    """

    @functools.wraps(method, updated=())  # it is not abstract any more
    def forwarded(self: RemoteBackend, *args: Any, **kwargs: Any) -> Any:
        return forward(self, method.__name__, *args, **kwargs)

    return cast("F", forwarded)


class RemoteBackend:
    """A backend in workers of a cluster.

    Args:
        cluster: Where the workers run.
        manifest: The backend.
        config: Its checked configuration.
        num_workers: How many; as many as the cluster has places if None.
        call_deadline_s: Seconds that any one call may take.
    """

    _kind: ClassVar[Kind]

    def __init__(
        self,
        cluster: Launcher,
        manifest: BackendManifest,
        config: Mapping[str, Any],
        *,
        num_workers: int | None = None,
        call_deadline_s: float = 3600.0,
    ) -> None:
        self.config = dict(config)
        self._group = cluster.workers(
            manifest,
            self._kind,
            self._worker_config(),
            num_workers=num_workers,
            call_deadline_s=call_deadline_s,
        )
        try:
            self._connect()
        except BaseException:
            self._group.shutdown()
            raise

    def __repr__(self) -> str:
        workers = f"{self._group.size} workers"
        what = f"{self.config['backend']!r}, model {self.config['model_name']!r}"
        return f"{type(self).__name__}({what}, {workers})"

    def _worker_config(self) -> dict[str, Any]:
        """The configuration that each worker gets."""
        return self.config

    def _connect(self) -> None:
        """Fetches from the workers what must be known here."""

    def _on_all(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Calls it on every worker; the first one's result."""
        return self._group.call_all(method, *args, **kwargs)[0]

    def _refit(self, method: str, *args: Any, **kwargs: Any) -> list[Future]:
        """One future for each worker that takes part, the first of which has the report."""
        return self._group.submit_refit(method, *args, **kwargs)

    def _collective(self, method: str, *args: Any, **kwargs: Any) -> list[Future]:
        """As :meth:`_refit`, of backends that offer it."""
        self._group.require("collective")
        return self._refit(method, *args, **kwargs)

    def cancel_refit(self, number: int) -> None:
        """Ends a refit in all workers that take part; see the interface."""
        for rank in self._group.ranks:
            self._group.remote(rank, "control", "call", "cancel_refit", (number,), {})

    def shutdown(self) -> bool:
        """Ends the workers; see the interface."""
        return self._group.shutdown()
