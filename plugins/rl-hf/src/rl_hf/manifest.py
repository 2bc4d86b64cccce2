"""The entry point ``rl_backends: hf``: what the backend is and can do, as data."""

from __future__ import annotations

from rl_core.plugins.manifest import BackendManifest, Capability, EngineRequirement

__all__ = ["BACKEND"]

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
            "sharded": Capability("unsupported", reason="every rank has the whole model"),
        },
    },
    engine=EngineRequirement(("transformers",), ">=5.5,<6"),
)
