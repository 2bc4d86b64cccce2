"""What every backend for a running server can do, as data."""

from __future__ import annotations

from rl_core.plugins.manifest import BackendManifest, Capability, EngineRequirement

__all__ = ["server_manifest"]

_FULL = Capability("full")


def server_manifest(name: str, engine: str, factory: str) -> BackendManifest:
    """The manifest of such a backend.

    Args:
        name: Of the backend.
        engine: Of the server, with its article: ``"a vLLM"``.
        factory: ``"module:Class"`` of its :class:`~rl_hosting.server.generation.ServerGeneration`.
    """
    return BackendManifest(
        name=name,
        summary=f"Generation by {engine} server that is already running",
        factories={"generation": factory},
        configs={"generation": "rl_hosting.server.config:ServerConfig"},
        capabilities={
            "generation": {
                "sleep": Capability(
                    "unsupported", reason="this process cannot free the server's memory"
                ),
                "async_generation": _FULL,
                "concurrent_calls": _FULL,
                "multi_sample": _FULL,
                "collective": _FULL,
                "staged": Capability("full", reason="with memory for a second copy of the weights"),
                "kv_scales": Capability(
                    "not_implemented", reason="it was never tested with a server"
                ),
                "adapters": Capability("not_implemented", reason="a refit sends merged weights"),
            }
        },
        engine=EngineRequirement(("aiohttp",), ">=3.10,<4", extra="server"),
    )
