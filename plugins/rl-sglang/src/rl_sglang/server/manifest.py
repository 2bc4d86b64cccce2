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
                "unsupported", reason="this process cannot free the server's memory"
            ),
            "async_generation": _FULL,
            "concurrent_calls": _FULL,
            "multi_sample": _FULL,
            "collective": Capability(
                "full", reason="sends to this process; the server always loads files"
            ),
            "staged": Capability(
                "unsupported", reason="the server's weights cannot be read back to undo a refit"
            ),
            "kv_scales": Capability(
                "unsupported", reason="the server has no route for scales of its cache"
            ),
            "adapters": Capability("not_implemented", reason="a refit sends merged weights"),
        }
    },
    engine=EngineRequirement(("aiohttp",), ">=3.10,<4", extra="server"),
)
