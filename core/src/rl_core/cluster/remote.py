"""What generation and policy backends on a cluster have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rl_core.cluster.launcher import Cluster
    from rl_core.interfaces import Future
    from rl_core.plugins.manifest import BackendManifest, Kind

__all__ = ["RemoteBackend"]


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
        cluster: Cluster,
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

    def _worker_config(self) -> dict[str, Any]:
        """The configuration that each worker gets."""
        return self.config

    def _connect(self) -> None:
        """Asks the workers for what must be known here."""

    def _refit(self, method: str, *args: Any, **kwargs: Any) -> list[Future]:
        ranks = self._group.joint_ranks
        return [self._group.submit_refit(rank, method, *args, **kwargs) for rank in ranks]

    def shutdown(self) -> bool:
        """Ends the workers; see the interface."""
        return self._group.shutdown()
