"""The entry point ``rl_backends: sglang-server``: what the backend can do, as data."""

from __future__ import annotations

from rl_core.plugins.manifest import BackendManifest, Capability, EngineRequirement

__all__ = ["BACKEND"]

_FULL = Capability("full")

BACKEND = BackendManifest(
    name="sglang-server",
    summary="Generation by an SGLang server that is already running",
    factories={"generation": "rl_sglang.server.generation:SglangServerGeneration"},
    configs={"generation": "rl_sglang.server.config:SglangServerConfig"},
    capabilities={
        "generation": {
            "sleep": Capability(
                "unsupported", reason="the server's memory is not this process's to free"
            ),
            "async_generation": _FULL,
            "concurrent_calls": _FULL,
            "multi_sample": _FULL,
            "collective": Capability(
                "full", reason="to this process; the server loads from a file system in any case"
            ),
            "staged": Capability(
                "unsupported", reason="what the server has cannot be read back, so not be undone"
            ),
            "kv_scales": Capability(
                "unsupported", reason="the server has no route that takes scales of its cache"
            ),
        }
    },
    engine=EngineRequirement(("aiohttp",), ">=3.10,<4", extra="server"),
)
