"""The entry point ``rl_backends: sglang``: what the backend is and can do, as data."""

from __future__ import annotations

from rl_core.plugins.manifest import BackendManifest, Capability, EngineRequirement
from rl_hosting.server.manifest import server_manifest

__all__ = ["BACKEND", "SERVER", "TINY", "VERSIONS"]

#: Of SGLang: what was tested.
VERSIONS = ">=0.5.21,<0.5.24"

_FULL = Capability("full")
_CUDA = ("cuda",)

BACKEND = BackendManifest(
    name="sglang",
    summary="Generation by SGLang, CPU and CUDA",
    factories={"generation": "rl_sglang.generation:SglangGeneration"},
    configs={"generation": "rl_sglang.config:SglangConfig"},
    capabilities={
        "generation": {
            "sleep": Capability(
                "full", devices=_CUDA, reason="on the CPU SGLang frees nothing when it sleeps"
            ),
            "async_generation": _FULL,
            "concurrent_calls": _FULL,
            "multi_sample": _FULL,
            "collective": _FULL,
            "staged": Capability("full", reason="with memory for a second copy of the weights"),
            "kv_scales": Capability(
                "full", devices=_CUDA, reason="SGLang on the CPU has no FP8 key/value cache"
            ),
            "adapters": Capability("full", reason="with the key lora, and peft"),
        }
    },
    engine=EngineRequirement(("sglang",), VERSIONS, extra="engine", elsewhere="sglang_cfg.python"),
)

SERVER = server_manifest("sglang-server", "an SGLang", "rl_sglang.server:SglangServerGeneration")

_SMALL = {"max_total_tokens": 16384}
_ADAPTERS = {"lora": {"r": 4, "target_modules": "all-linear"}}
_SMALL_ON_A_GPU = {"mem_fraction_static": 0.05, "disable_cuda_graph": True}
#: What the conformance suite sets for its tiny models; several engines run side by side.
TINY = {
    "cpu": {
        "generation": {"sglang_cfg": _SMALL},
        "adapters": {"sglang_cfg": _SMALL | _ADAPTERS},
    },
    "cuda": {
        "generation": {"sglang_cfg": _SMALL_ON_A_GPU},
        "adapters": {"sglang_cfg": _SMALL_ON_A_GPU | _ADAPTERS},
        "kv_scales": {"sglang_cfg": _SMALL_ON_A_GPU | {"kv_cache_dtype": "fp8_e4m3"}},
    },
}
