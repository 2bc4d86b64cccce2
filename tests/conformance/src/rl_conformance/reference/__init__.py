"""The reference: the smallest backends that keep the contract, slow and plain.

They complete a pair where the backend under test offers one kind only, and they are what the
suite itself is tested with.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rl_core.plugins.manifest import (
    GENERATION_CAPABILITIES,
    POLICY_CAPABILITIES,
    BackendManifest,
    Capability,
    EngineRequirement,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rl_conformance.target import Target

__all__ = [
    "LAYOUTS",
    "MANIFEST",
    "SHARDED",
    "core_target",
    "make_reference",
    "reference_target",
]

_FULL = Capability("full")
_NONE = Capability("unsupported", reason="the reference keeps to what the contract demands")

MANIFEST = BackendManifest(
    name="reference",
    summary="The conformance suite's own backend: plain torch, one row at a time",
    factories={
        "generation": "rl_conformance.reference.generation:ReferenceGeneration",
        "policy": "rl_conformance.reference.policy:ReferencePolicy",
    },
    configs={
        "generation": "rl_conformance.reference.config:ReferenceGenerationConfig",
        "policy": "rl_conformance.reference.config:ReferencePolicyConfig",
    },
    capabilities={
        "generation": {
            **dict.fromkeys(GENERATION_CAPABILITIES, _NONE),
            "async_generation": _FULL,
            "concurrent_calls": _FULL,
            "multi_sample": _FULL,
            "collective": _FULL,
            "staged": _FULL,
            "adapters": Capability("full", reason="with the key lora"),
            "kv_scales": Capability("full", reason='with kv_cache_dtype="fp8"'),
        },
        "policy": {
            **dict.fromkeys(POLICY_CAPABILITIES, _NONE),
            "topk_logits": _FULL,
            "fp8_kv_scales": _FULL,
            "collective": _FULL,
        },
    },
    engine=EngineRequirement(("transformers",), ">=5"),
    devices=("cpu",),
)

#: The same policy with its weights spread over ranks, in :mod:`rl_conformance.reference.sharded`.
SHARDED = BackendManifest(
    name="reference-sharded",
    summary="The reference policy with its weights spread over ranks",
    factories={"policy": "rl_conformance.reference.sharded:ShardedReferencePolicy"},
    configs={"policy": "rl_conformance.reference.sharded:ShardedReferenceConfig"},
    capabilities={
        "policy": {**MANIFEST.capabilities["policy"], "policy_generate": _FULL, "sharded": _FULL}
    },
    engine=MANIFEST.engine,
    devices=MANIFEST.devices,
)

_PARTS = {"shard_ranks": 2}
_VOCABULARY = _PARTS | {"vocab_parallel": True}
#: The ways in which the suite spreads it.
LAYOUTS = {
    "cpu": {
        "sharded": {
            "parts": {"ranks": 2, "config": _PARTS},
            "vocabulary": {"ranks": 2, "config": _VOCABULARY},
            "copies": {"ranks": 4, "config": _VOCABULARY},
        }
    }
}


def make_reference(kind: str, config: Mapping[str, Any]) -> Any:
    """A reference backend of a kind; keys that it does not know are checked as everywhere."""
    from rl_core.config import check_config
    from rl_core.plugins.discovery import load_object

    factory = load_object(MANIFEST.factories[kind])  # type: ignore[index]
    spec = load_object(MANIFEST.configs[kind])  # type: ignore[index]
    config = {**config, "backend": MANIFEST.name}
    return factory.from_config(check_config(spec, config, what=f"{kind} backend 'reference'"))


def reference_target(**changes: Any) -> Target:
    """The reference as a backend under test; ``changes`` replace parts of the target."""
    from rl_conformance.target import Target
    from rl_core.config import config_keys
    from rl_core.plugins.discovery import load_object

    parts: dict[str, Any] = {
        "name": MANIFEST.name,
        "manifest": MANIFEST,
        "make_generation": lambda config: make_reference("generation", config),
        "make_policy": lambda config: make_reference("policy", config),
        "config_keys": {
            kind: frozenset(config_keys(load_object(reference)))
            for kind, reference in MANIFEST.configs.items()
        },
        "installed": False,
    }
    return Target(**(parts | changes))


def core_target() -> Target:
    """Core itself; what must be built to look at it is the reference."""
    manifest = replace(MANIFEST, name="core", devices=("cpu", "cuda"))
    return reference_target(name="core", manifest=manifest)
