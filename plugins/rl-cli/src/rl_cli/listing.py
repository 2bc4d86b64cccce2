"""Every installed backend, whole or broken: what ``rl backends`` shows. Imports no engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rl_core.errors import IncompatiblePluginError, MissingEngineError, PluginError
from rl_core.plugins.discovery import (
    BACKENDS,
    check_engine,
    engine_version,
    load_manifest,
    providers,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rl_core.plugins.discovery import Provider
    from rl_core.plugins.manifest import BackendManifest

__all__ = ["BackendListing", "inspect_all", "list_backends"]


@dataclass(frozen=True, slots=True)
class BackendListing:
    """What a listing shows of one provider of a backend.

    Attributes:
        provider: Where it comes from.
        manifest: None where it could not be loaded.
        engine: Installed ``"distribution version"`` of the engine, or "".
        error: What is wrong, with its cause and fix; None if it can be used here.
        duplicates: Other distributions that provide the same name.
    """

    provider: Provider
    manifest: BackendManifest | None = None
    engine: str = ""
    error: PluginError | None = None
    duplicates: tuple[str, ...] = ()

    @property
    def status(self) -> str:
        """``ready``, ``no engine``, ``wrong engine``, ``incompatible`` or ``broken``."""
        if isinstance(self.error, MissingEngineError):
            return "wrong engine" if self.engine else "no engine"
        if isinstance(self.error, IncompatiblePluginError):
            return "incompatible"
        return "broken" if self.error else "ready"


def list_backends() -> list[BackendListing]:
    """Lists every backend, whole or broken. Never raises for what a plugin does."""
    return inspect_all(providers(BACKENDS))


def inspect_all(found: Sequence[Provider]) -> list[BackendListing]:
    """Loads manifests and looks for engines; what fails, and rivals among these, are listed."""
    listings = []
    for provider in found:
        manifest, engine, problem = None, "", None
        try:
            manifest = load_manifest(provider)
            engine = " ".join(engine_version(manifest.engine) or ())
            check_engine(provider, manifest)
        except PluginError as error:
            problem = error
        same = [p.distribution for p in found if p.name == provider.name and p is not provider]
        listings.append(BackendListing(provider, manifest, engine, problem, tuple(same)))
    return listings
