"""The manifest: what a backend is and can do, as data, without importing its engine.

A plugin exposes one :class:`BackendManifest` through the entry-point group ``rl_core.backends``.
The module that holds it imports only the standard library and ``rl_core``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, get_args

from rl_core.config import check_config
from rl_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "CONTRACT_VERSION",
    "GENERATION_CAPABILITIES",
    "POLICY_CAPABILITIES",
    "BackendManifest",
    "Capability",
    "EngineRequirement",
    "is_importable",
    "manifest_problems",
]

#: Version of the contract that this core implements; a plugin must share its major number.
CONTRACT_VERSION = "1.0"

GENERATION_CAPABILITIES = (
    "sleep",
    "async_generation",
    "concurrent_calls",
    "multi_sample",
    "collective",
    "staged",
    "kv_scales",
    "adapters",
)
POLICY_CAPABILITIES = (
    "topk_logits",
    "offload",
    "policy_generate",
    "fp8_kv_scales",
    "score",
    "collective",
    "sharded",
)

Level = Literal["full", "versioned", "unsupported", "not_implemented"]
Kind = Literal["generation", "policy"]


@dataclass(frozen=True, slots=True)
class Capability:
    """How far a backend offers one capability.

    Attributes:
        level: ``full``; ``versioned``: with an engine in the range ``engine``; ``unsupported``:
            by nature, calling it raises CapabilityError before touching state (without
            ``concurrent_calls``, calls wait; without ``sharded``, ranks have separate rows);
            ``not_implemented``: not yet, likewise refused.
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
        elsewhere: Key of the configuration, such as ``"vllm_cfg.python"``, that names the
            interpreter of an environment which has the engine; it need not be installed here then.
    """

    distributions: tuple[str, ...]
    versions: str
    extra: str = ""
    elsewhere: str = ""

    def is_elsewhere(self, config: Mapping[str, Any]) -> bool:
        """Whether this configuration names an environment that has the engine."""
        found: Any = config
        for key in self.elsewhere.split("."):
            found = found.get(key) if isinstance(found, Mapping) else None
        return bool(found)


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
        refit_constant_bytes: What a refit may use beside buffers; digests take 40 MiB of each GPU.
        released_fraction: For ``sleep`` and ``offload``: fraction of the device memory of weights
            or KV cache that is freed.
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


_CAPABILITIES: dict[Kind, tuple[str, ...]] = {
    "generation": GENERATION_CAPABILITIES,
    "policy": POLICY_CAPABILITIES,
}


def is_importable(value: Any) -> bool:
    """Whether the value is ``"module:attribute"`` or ``"module"``."""
    if not isinstance(value, str):
        return False
    return all(part.isidentifier() for part in value.replace(":", ".", 1).split("."))


def manifest_problems(manifest: BackendManifest, name: str) -> list[str]:
    """Everything that keeps a manifest from being complete, one sentence each.

    Args:
        manifest: What the plugin declares.
        name: The name of its entry point.
    """
    from packaging.version import InvalidVersion, Version

    try:
        for given in (manifest, manifest.engine):
            values = {each.name: getattr(given, each.name) for each in fields(given)}
            check_config(type(given), values, what=type(given).__name__)
    except ConfigError as error:
        return [error.message]
    problems = []
    if manifest.name != name:
        problems.append(f"its name is {manifest.name!r} but its entry point is {name!r}")
    if not manifest.summary:
        problems.append("the summary is empty")
    if not manifest.factories:
        problems.append("factories is empty, so it offers nothing")
    for part in ("factories", "configs"):
        for kind, reference in getattr(manifest, part).items():
            if not is_importable(reference) or ":" not in reference:
                problems.append(f"{part}[{kind!r}] is {reference!r}, not 'module:attribute'")
    problems += [
        f"{part} and factories have different kinds"
        for part in ("configs", "capabilities")
        if set(getattr(manifest, part)) != set(manifest.factories)
    ]
    for kind, capabilities in manifest.capabilities.items():
        problems += _capability_problems(kind, capabilities, {*manifest.devices})
    try:
        Version(manifest.contract)
    except InvalidVersion:
        problems.append(f"contract is {manifest.contract!r}, not a version such as '1.0'")
    if not manifest.engine.distributions:
        problems.append("engine.distributions must have at least one name")
    if not _is_range(manifest.engine.versions):
        problems.append(
            f"engine.versions is {manifest.engine.versions!r}, not a PEP 440 range such as "
            "'>=1.0,<2'"
        )
    return problems


def _capability_problems(
    kind: Kind, declared: Mapping[str, Capability], devices: set[str]
) -> Iterator[str]:
    known = set(_CAPABILITIES[kind])
    if missing := sorted(known - set(declared)):
        yield f"capabilities[{kind!r}] does not declare {', '.join(missing)}"
    if unknown := sorted(set(declared) - known):
        yield f"capabilities[{kind!r}] declares the unknown {', '.join(unknown)}"
    for name, capability in declared.items():
        if capability.level not in get_args(Level):
            yield f"capability {name!r} has the unknown level {capability.level!r}"
        elif capability.level == "versioned" and not _is_range(capability.engine):
            yield f"capability {name!r} names no engine range: {capability.engine!r}"
        elif not devices & set(capability.devices):
            yield f"capability {name!r} has devices {capability.devices}, none of {sorted(devices)}"


def _is_range(specifier: str) -> bool:
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    try:
        return len(SpecifierSet(specifier)) > 0
    except InvalidSpecifier:
        return False
