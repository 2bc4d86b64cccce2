"""The entry point ``rl_backends: hf``: what the backend is and can do, as data."""

from __future__ import annotations

from typing import Any

from rl_core.plugins.manifest import BackendManifest, Capability, EngineRequirement

__all__ = ["BACKEND", "TINY"]

_FULL = Capability("full")
_CUDA = Capability("full", devices=("cuda",), reason="the weights are moved to host memory")

BACKEND = BackendManifest(
    name="hf",
    summary="Policy and generation on Hugging Face transformers, CPU and CUDA",
    factories={
        "generation": "rl_hf.generation:HuggingFaceGeneration",
        "policy": "rl_hf.policy:HuggingFacePolicy",
    },
    configs={
        "generation": "rl_hf.config:HuggingFaceGenerationConfig",
        "policy": "rl_hf.config:HuggingFacePolicyConfig",
    },
    capabilities={
        "generation": {
            "sleep": _CUDA,
            "async_generation": _FULL,
            "concurrent_calls": _FULL,
            "multi_sample": _FULL,
            "collective": _FULL,
            "staged": Capability("full", reason="with memory for a second copy of the weights"),
            "kv_scales": Capability("unsupported", reason="the KV cache has the model's dtype"),
            "adapters": Capability("unsupported", reason="a refit sends merged weights"),
        },
        "policy": {
            "topk_logits": _FULL,
            "offload": _CUDA,
            "policy_generate": _FULL,
            "fp8_kv_scales": Capability("full", reason="with torch's fused attention"),
            "score": Capability("full", reason="with a sequence classification checkpoint"),
            "collective": _FULL,
            "sharded": Capability("full", reason="with dtensor_cfg.enabled; ranks have own rows"),
        },
    },
    engine=EngineRequirement(("transformers",), ">=5.5,<6"),
)
_LAYOUTS: dict[str, Any] = {
    "fsdp2": {"ranks": 2, "config": {"dtensor_cfg": {"enabled": True}}, "own_rows": True},
}
#: What the conformance suite tries with its tiny models.
TINY: dict[str, dict[str, dict[str, Any]]] = {
    "cpu": {"sharded": _LAYOUTS},
    "cuda": {"sharded": _LAYOUTS},
}
