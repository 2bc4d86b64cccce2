"""What :func:`rl_core.create_generation` and :func:`rl_core.create_policy` are given."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rl_hosting.cluster.launcher import Launcher

if TYPE_CHECKING:
    from rl_core.plugins.manifest import BackendManifest, Kind

__all__ = ["Cluster"]


class Cluster(Launcher):
    """Places for workers, from which backends run."""

    def remote_backend(self, manifest: BackendManifest, kind: Kind, config: dict[str, Any]) -> Any:
        """See :meth:`rl_core.interfaces.Cluster.remote_backend`."""
        from rl_hosting.cluster.generation import RemoteGeneration
        from rl_hosting.cluster.policy import RemotePolicy

        remote = RemoteGeneration if kind == "generation" else RemotePolicy
        return remote(self, manifest, config)
