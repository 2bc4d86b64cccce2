"""The entry point ``rl_backends: megatron``: what the backend is and can do, as data."""

from __future__ import annotations

from typing import Any

from rl_core.plugins.manifest import BackendManifest, Capability, EngineRequirement

__all__ = ["BACKEND", "TINY"]

_FULL = Capability("full")
_CUDA = Capability("full", devices=("cuda",), reason="the weights are moved to host memory")

BACKEND = BackendManifest(
    name="megatron",
    summary="Policy on megatron-core: tensor, pipeline, expert and data parallel, CPU and CUDA",
    factories={"policy": "rl_megatron.policy:MegatronPolicy"},
    configs={"policy": "rl_megatron.config:MegatronPolicyConfig"},
    capabilities={
        "policy": {
            "topk_logits": _FULL,
            "offload": _CUDA,
            "policy_generate": _FULL,
            "fp8_kv_scales": _FULL,
            "score": Capability("unsupported", reason="rl-megatron has no reward models"),
            "collective": _FULL,
            "sharded": _FULL,
        },
    },
    engine=EngineRequirement(("megatron-core",), ">=0.16,<0.17", extra="engine"),
)
_LAYOUTS: dict[str, Any] = {
    "tp2": {"ranks": 2, "config": {"tensor_model_parallel_size": 2}},
    "pp2": {"ranks": 2, "config": {"pipeline_model_parallel_size": 2}},
    "tp2_dp2": {
        "ranks": 4,
        "config": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    },
}
#: What the conformance suite tries with its tiny models.
TINY: dict[str, dict[str, dict[str, Any]]] = {
    "cpu": {"sharded": _LAYOUTS},
    "cuda": {"sharded": _LAYOUTS},
}
