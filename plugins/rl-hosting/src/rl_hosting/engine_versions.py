"""Which release of an engine is installed, and whether a plugin was tested with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from packaging.specifiers import SpecifierSet

from rl_core.errors import IncompatiblePluginError
from rl_core.plugins import discovery

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rl_core.plugins.manifest import BackendManifest

__all__ = ["check_tested", "installed_version"]


def installed_version(backend: BackendManifest) -> str | None:
    """The installed version of a backend's engine, under whichever name it was installed."""
    found = discovery.engine_version(backend.engine)
    return found[1] if found else None


def check_tested(backend: BackendManifest, title: str, private: Mapping[str, str]) -> None:
    """Refuses an engine that the private parts were not checked against.

    Args:
        backend: Its manifest has the tested versions.
        title: How the engine's authors write its name.
        private: What of the engine the plugin touches that is not public, and what for.

    Raises:
        IncompatiblePluginError: Names the version, the range and what is touched.
    """
    found, tested = installed_version(backend), backend.engine.versions
    if found is not None and found not in SpecifierSet(tested, prereleases=True):
        touched = "\n".join(f"  {name}: {why}" for name, why in private.items())
        raise IncompatiblePluginError(
            f"{title} {found} is outside of {tested}; rl-{backend.name} uses parts of it that are "
            f"not public:\n{touched}",
            fix=f'pip install "{backend.name}{tested}", or install a newer rl-{backend.name}',
            version=found,
        )
