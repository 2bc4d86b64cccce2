"""The manifest: what a backend is and can do, as data, without importing its engine.

A plugin exposes one :class:`BackendManifest` through the entry-point group ``rl_core.backends``.
The module that holds it imports only the standard library and ``rl_core``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "CONTRACT_VERSION",
    "GENERATION_CAPABILITIES",
    "POLICY_CAPABILITIES",
    "SINCE",
    "BackendManifest",
    "Capability",
    "EngineRequirement",
]

#: Version of the contract that this core speaks; a plugin must share its major number.
CONTRACT_VERSION = "1.1"

GENERATION_CAPABILITIES = (
    "sleep",
    "async_generation",
    "concurrent_calls",
    "multi_sample",
    "collective",
    "staged",
    "kv_scales",
)
POLICY_CAPABILITIES = (
    "topk_logits",
    "offload",
    "policy_generate",
    "fp8_kv_scales",
    "score",
    "collective",
)

#: Versions of the contract in which capabilities came, of those that did not come with the first.
SINCE = {"concurrent_calls": "1.1"}

Level = Literal["full", "versioned", "unsupported", "not_implemented"]
Kind = Literal["generation", "policy"]


@dataclass(frozen=True, slots=True)
class Capability:
    """How far a backend offers one capability.

    Attributes:
        level: ``full``; ``versioned``: with an engine in the range ``engine``; ``unsupported``:
            by nature, calling it raises CapabilityError before touching state (without
            ``concurrent_calls``, calls wait for each other); ``not_implemented``: not yet,
            likewise refused.
        engine: Version range for ``versioned``, such as ``">=0.30"``.
        devices: Device types on which it holds; elsewhere the suite reports ``not_run``.
        reason: Why not, or what to know.
    """

    level: Level
    engine: str = ""
    devices: tuple[str, ...] = ("cpu", "cuda")
    reason: str = ""


@dataclass(frozen=True, slots=True)
class EngineRequirement:
    """The engine behind a plugin.

    Attributes:
        distributions: Names it may be installed under, in order of preference.
        versions: Supported range, a PEP 440 specifier such as ``">=5.0,<6"``.
        extra: The plugin's extra that installs it, or "" if the plugin itself does.
    """

    distributions: tuple[str, ...]
    versions: str
    extra: str = ""


@dataclass(frozen=True, slots=True)
class BackendManifest:
    """Everything the product needs to know of a backend before importing it.

    Attributes:
        name: The name users write in ``backend``.
        summary: One line for listings.
        contract: Contract version the plugin was written for.
        factories: For each kind, ``"module:Class"``; the class has
            ``from_config(config, *, worker=None)``.
        configs: For each kind, ``"module:TypedDict"`` that its configuration is checked against.
        capabilities: For each kind, every capability of that kind.
        engine: What must be installed where it runs.
        environment: Variables set in a worker's own process before anything is imported.
        devices: Device types the backend runs on.
        tolerances: Largest accepted ``(mean, max)`` absolute log-prob difference from a float32
            reference, by torch dtype name.
        refit_constant_bytes: Memory a refit may use beyond its buffers. Digests take up to 40 MiB
            of a GPU, on each side.
        released_fraction: For ``sleep`` and ``offload``: fraction of the device memory of weights
            or KV cache that is given back.
    """

    name: str
    summary: str
    factories: Mapping[Kind, str]
    configs: Mapping[Kind, str]
    capabilities: Mapping[Kind, Mapping[str, Capability]]
    engine: EngineRequirement
    contract: str = CONTRACT_VERSION
    environment: Mapping[str, str] = field(default_factory=dict)
    devices: tuple[str, ...] = ("cpu", "cuda")
    tolerances: Mapping[str, tuple[float, float]] = field(
        default_factory=lambda: {"float32": (1e-4, 1e-3), "bfloat16": (3e-2, 2e-1)}
    )
    refit_constant_bytes: int = 96 << 20
    released_fraction: float = 0.9

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds the backend offers, such as ``("generation", "policy")``."""
        return tuple(self.factories)
