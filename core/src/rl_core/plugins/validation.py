"""Says what is wrong with a manifest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, get_args

from rl_core.plugins.manifest import (
    GENERATION_CAPABILITIES,
    POLICY_CAPABILITIES,
    SINCE,
    BackendManifest,
    Capability,
    EngineRequirement,
    Kind,
    Level,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["is_importable", "is_kept", "is_written_for", "manifest_problems"]

_CAPABILITIES: dict[str, tuple[str, ...]] = {
    "generation": GENERATION_CAPABILITIES,
    "policy": POLICY_CAPABILITIES,
}


def is_importable(value: Any) -> bool:
    """Whether the value is ``"module:attribute"`` or ``"module"``."""
    if not isinstance(value, str):
        return False
    return all(part.isidentifier() for part in value.replace(":", ".", 1).split("."))


def is_kept(capability: str, manifest: BackendManifest) -> bool:
    """Whether the contract that a backend was written for has a capability."""
    return is_written_for(SINCE.get(capability, "1.0"), manifest)


def is_written_for(contract: str, manifest: BackendManifest) -> bool:
    """Whether a backend was written for a version of the contract, or a later one."""
    from packaging.version import Version

    written = manifest.contract
    return not _is_version(written) or Version(written) >= Version(contract)


def manifest_problems(manifest: BackendManifest, name: str) -> list[str]:
    """Everything that keeps a manifest from being complete, one sentence each.

    Args:
        manifest: What the plugin declares.
        name: The name of its entry point.
    """
    ill_typed = [
        f"{field} is of type {type(getattr(manifest, field)).__name__}, not a mapping"
        for field in ("factories", "configs", "capabilities", "environment")
        if not isinstance(getattr(manifest, field), Mapping)
    ]
    if ill_typed:
        return ill_typed
    problems = []
    if manifest.name != name:
        problems.append(f"its name is {manifest.name!r} but its entry point is {name!r}")
    if not manifest.summary:
        problems.append("the summary is empty")
    if not manifest.factories:
        problems.append("factories is empty, so it offers nothing")
    for field in ("factories", "configs"):
        problems += _reference_problems(field, getattr(manifest, field))
    for field in ("configs", "capabilities"):
        if set(getattr(manifest, field)) != set(manifest.factories):
            problems.append(f"{field} and factories have different kinds")
    for kind, capabilities in manifest.capabilities.items():
        problems += _capability_problems(kind, capabilities, manifest)
    if not _is_version(manifest.contract):
        problems.append(f"contract is {manifest.contract!r}, not a version such as '1.0'")
    if not all(isinstance(text, str) for item in manifest.environment.items() for text in item):
        problems.append("environment must map strings to strings")
    return [*problems, *_engine_problems(manifest.engine)]


def _reference_problems(field: str, references: Mapping[Kind, str]) -> Iterator[str]:
    for kind, reference in references.items():
        if kind not in _CAPABILITIES:
            yield f"{field} has the unknown kind {kind!r}"
        if not is_importable(reference) or ":" not in reference:
            yield f"{field}[{kind!r}] is {reference!r}, not 'module:attribute'"


def _capability_problems(kind: str, declared: Any, manifest: BackendManifest) -> Iterator[str]:
    if not isinstance(declared, Mapping):
        yield f"capabilities[{kind!r}] is not a mapping"
        return
    devices = set(manifest.devices)
    known = set(_CAPABILITIES.get(kind, ()))
    if missing := sorted(c for c in known - set(declared) if is_kept(c, manifest)):
        yield f"capabilities[{kind!r}] does not declare {', '.join(missing)}"
    if unknown := sorted(set(declared) - known):
        yield f"capabilities[{kind!r}] declares the unknown {', '.join(unknown)}"
    for name, capability in declared.items():
        if not isinstance(capability, Capability) or capability.level not in get_args(Level):
            yield f"capability {name!r} is {capability!r}, not a Capability of a known level"
        elif capability.level == "versioned" and not _is_range(capability.engine):
            yield f"capability {name!r} names no engine range: {capability.engine!r}"
        elif not devices & set(capability.devices):
            yield f"capability {name!r} holds on {capability.devices}, none of {sorted(devices)}"


def _engine_problems(engine: Any) -> Iterator[str]:
    if not isinstance(engine, EngineRequirement):
        yield f"engine is {engine!r}, not an EngineRequirement"
        return
    if not engine.distributions or not isinstance(engine.distributions, tuple):
        yield "engine.distributions must be a tuple with at least one name"
    if not _is_range(engine.versions):
        yield f"engine.versions is {engine.versions!r}, not a PEP 440 range such as '>=1.0,<2'"


def _is_version(version: Any) -> bool:
    from packaging.version import InvalidVersion, Version

    try:
        return bool(Version(version).release)
    except (InvalidVersion, TypeError):
        return False


def _is_range(specifier: str) -> bool:
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    try:
        return len(SpecifierSet(specifier)) > 0
    except InvalidSpecifier:
        return False
