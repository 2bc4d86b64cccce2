"""From the name a user wrote to the one manifest that it means, or a typed error."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from rl_core.config import nearest
from rl_core.errors import AmbiguousBackendError, BackendNotFoundError, PluginError
from rl_core.install import PROJECT, install_command
from rl_core.plugins.discovery import (
    BACKENDS,
    TRANSPORTS,
    Provider,
    check_engine,
    load_manifest,
    providers,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rl_core.plugins.manifest import BackendManifest, Kind

__all__ = ["find_provider", "match_providers", "resolve"]

_KINDS = {BACKENDS: "backend", TRANSPORTS: "refit transport"}


def match_providers(name: str, group: str = BACKENDS) -> list[Provider]:
    """All providers that a name may mean, from metadata alone.

    Args:
        name: As ``rl backends list`` shows it, or ``dist:name``.
        group: The entry-point group: that of backends, or of transports.

    Raises:
        BackendNotFoundError: Nothing installed provides it; names the nearest match.
    """
    known = providers(group)
    distribution, _, short = name.rpartition(":")
    found = [
        provider
        for provider in known
        if provider.name == short
        and _canonical(distribution) in ("", _canonical(provider.distribution))
    ]
    if found:
        return found
    names = sorted({provider.name for provider in known})
    match = {"nccl": "collective", "gloo": "collective"}.get(short) or nearest(short, names)
    others = [provider.qualified_name for provider in known if provider.name == short]
    if others:
        fix = f"write {' or '.join(map(repr, others))}"
    elif match:
        fix = f"write {match!r}"
    else:
        ours = f"rl-{short.removesuffix('-server')}"
        fix = install_command(ours) if ours in PROJECT else "install the plugin that provides it"
        if group == BACKENDS:
            fix += "; `rl backends list` shows what is installed"
    raise BackendNotFoundError(
        f"no installed plugin provides the {_KINDS[group]} {name!r}; "
        f"installed are: {', '.join(names) or 'none'}",
        fix=fix,
        name=name,
        installed=names,
        nearest=match or "",
    )


def find_provider(name: str, group: str = BACKENDS) -> Provider:
    """As :func:`match_providers`, but one; AmbiguousBackendError if several can be loaded."""
    found = match_providers(name, group)
    if len(found) > 1 and group == BACKENDS:
        whole = []
        for provider in found:
            with suppress(PluginError):
                load_manifest(provider)
                whole.append(provider)
        found = whole or found
    if len(found) > 1:
        raise AmbiguousBackendError(
            f"several plugins provide the {_KINDS[group]} {name!r}: {', '.join(map(str, found))}",
            fix=f"write {' or '.join(repr(p.qualified_name) for p in found)}, or uninstall one",
            name=name,
            candidates=[provider.qualified_name for provider in found],
        )
    return found[0]


def resolve(
    name: str, kind: Kind | None = None, *, config: Mapping[str, Any] | None = None
) -> BackendManifest:
    """The manifest of a backend. Never falls back to another one.

    Args:
        name: As ``rl backends list`` shows it, or ``dist:name``.
        kind: What it must offer; anything if None.
        config: Also make sure that the engine is there for this configuration: in this environment,
            unless it names another. Only the process that runs the backend needs it.

    Raises:
        BackendNotFoundError: Nothing installed provides it, or not of this kind.
        AmbiguousBackendError: Several distributions provide it and none was named.
        BrokenPluginError: Its manifest cannot be loaded or is not valid; the cause is chained.
        IncompatiblePluginError: It was written for another version of the contract.
        MissingEngineError: The engine is not installed here or out of range, and has to be.
    """
    provider = find_provider(name)
    manifest = load_manifest(provider)
    if kind is not None and kind not in manifest.kinds:
        raise provider.error(
            BackendNotFoundError,
            f"the backend {name!r} ({provider}) offers {', '.join(manifest.kinds)}, not {kind}",
            fix=f"choose a backend that offers {kind}: rl backends list",
            name=name,
        )
    if config is not None and not manifest.engine.is_elsewhere(config):
        check_engine(provider, manifest)
    return manifest


def _canonical(distribution: str) -> str:
    return distribution.lower().replace("_", "-").replace(".", "-")
