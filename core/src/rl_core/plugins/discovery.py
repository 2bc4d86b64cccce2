"""Finds plugins: which distributions provide what, and whether it is whole.

Three levels of cost. L0 reads the metadata of installed distributions and imports nothing of a
plugin (:func:`providers`). L1 imports the small module that holds a manifest
(:func:`load_manifest`). L2, importing the backend itself, is left to the process that runs it.
"""

from __future__ import annotations

import pkgutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import importlib_metadata

from rl_core.errors import (
    BrokenPluginError,
    IncompatiblePluginError,
    MissingEngineError,
    PluginError,
)
from rl_core.install import engine_extra, install_command
from rl_core.plugins.manifest import (
    CONTRACT_VERSION,
    BackendManifest,
    is_importable,
    manifest_problems,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from importlib_metadata import Distribution

    from rl_core.plugins.manifest import EngineRequirement

__all__ = [
    "BACKENDS",
    "CONFORMANCE",
    "HOOKS",
    "TRANSPORTS",
    "Provider",
    "check_engine",
    "engine_version",
    "load_manifest",
    "load_object",
    "providers",
]

BACKENDS = "rl_core.backends"
TRANSPORTS = "rl_core.transports"
HOOKS = "rl_core.plugins"
CONFORMANCE = "rl_core.conformance"


@dataclass(frozen=True, slots=True)
class Provider:
    """One entry point of an installed distribution, as its metadata states it.

    Attributes:
        name: What the entry point provides, such as ``"vllm"``.
        distribution: The distribution that declares it.
        version: The distribution's version.
        value: ``"module:attribute"``, or ``"module"`` where the group takes modules.
        group: The entry-point group.
        location: The directory on the path that holds the distribution's metadata.
        problem: Why the metadata cannot be used, or "".
    """

    name: str
    distribution: str
    version: str
    value: str
    group: str
    location: str
    problem: str = ""

    @property
    def qualified_name(self) -> str:
        """``dist:name``, which stays unambiguous when two distributions provide one name."""
        return f"{self.distribution}:{self.name}"

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"

    def error(
        self, cls: type[PluginError], message: str, *, fix: str, **details: Any
    ) -> PluginError:
        """An error of the given class that names this plugin."""
        return cls(
            message, fix=fix, distribution=self.distribution, version=self.version, **details
        )


def providers(group: str) -> list[Provider]:
    """Lists the entry points of a group, sorted by name and distribution. Imports nothing.

    Returns:
        Also entry points with malformed metadata, with ``problem`` set. Never raises for what a
        distribution contains.
    """
    found = {  # a set, because a directory may be on the path twice
        provider
        for dist in _distributions()
        for provider in _entry_points(dist, group)
        # Another copy of a distribution may come first on the path, as imports see it.
        if _location(next(iter(_distributions(name=_facts(dist)[0])), dist)) == _location(dist)
    }
    return sorted(found, key=lambda p: (p.name, p.distribution))


def _distributions(**where: Any) -> Iterable[Distribution]:
    return cast("Iterable[Distribution]", importlib_metadata.distributions(**where))


def _entry_points(dist: Distribution, group: str) -> Iterator[Provider]:
    try:
        text = dist.read_text("entry_points.txt") or ""
        if f"[{group}]" not in text.replace(" ", ""):
            return
        entry_points = list(dist.entry_points.select(group=group))
    except Exception as error:
        problem = f"entry_points.txt cannot be read, or is malformed: {error}"
        yield Provider("?", *_facts(dist), "", group, _location(dist), problem)
        return
    facts = _facts(dist)
    for entry_point in entry_points:
        value = entry_point.value
        problem = "" if is_importable(value) else f"entry point {value!r} is not module:attribute"
        yield Provider(entry_point.name, *facts, value, group, _location(dist), problem)


def _facts(dist: Distribution) -> tuple[str, str]:
    """Name and version, ``"unknown"`` where the metadata lacks them."""
    # The mail parser behind dist.metadata costs more than the rest of a listing.
    try:
        lines = (dist.read_text("METADATA") or dist.read_text("PKG-INFO") or "").splitlines()
    except (OSError, UnicodeDecodeError):
        lines = []
    keys = {key: value.strip() for key, _, value in (s.partition(":") for s in reversed(lines))}
    return keys.get("Name", "unknown"), keys.get("Version", "unknown")


def _location(dist: Distribution) -> str:
    return str(dist.locate_file(""))


def load_object(reference: str, provider: Provider | None = None) -> Any:
    """Imports ``"module:attribute"``, or ``"module"``.

    Args:
        reference: Where the object is.
        provider: The plugin it belongs to, for the error.

    Raises:
        BrokenPluginError: The module cannot be imported or lacks the attribute; the original
            exception is the cause.
    """
    try:
        # Without a colon the module's own ImportError would become a lack of an attribute.
        return pkgutil.resolve_name(reference if ":" in reference else f"{reference}:")
    except (Exception, SystemExit) as error:
        who = f"{provider}: " if provider else ""
        name = provider.distribution if provider else ""
        raise BrokenPluginError(
            f"{who}cannot load {reference!r}: {type(error).__name__}: {error}",
            fix=f"reinstall {name}, or uninstall it" if name else f"make {reference!r} importable",
            distribution=name,
            version=provider.version if provider else "",
            reference=reference,
        ) from error


def load_manifest(provider: Provider) -> BackendManifest:
    """Imports and validates the manifest of a backend.

    Raises:
        BrokenPluginError: It cannot be imported, is not a manifest or is not complete.
        IncompatiblePluginError: It was written for another major version of the contract.
    """
    if provider.problem:
        raise provider.error(
            BrokenPluginError,
            f"{provider}: {provider.problem}",
            fix=f"reinstall {provider.distribution}, or report this to its authors",
        )
    manifest = load_object(provider.value, provider)
    if not isinstance(manifest, BackendManifest):
        raise provider.error(
            BrokenPluginError,
            f"{provider}: {provider.value!r} is of type {type(manifest).__name__}, "
            "not a BackendManifest",
            fix=f"report this to the authors of {provider.distribution}",
        )
    theirs, ours = str(manifest.contract).split(".")[0], CONTRACT_VERSION.split(".")[0]
    if theirs != ours:
        newer = theirs.isdecimal() and int(theirs) > int(ours)
        upgrade = "rl-core" if newer else provider.distribution
        raise provider.error(
            IncompatiblePluginError,
            f"{provider} is written for version {manifest.contract} of the contract; "
            f"this rl-core implements {CONTRACT_VERSION}",
            fix=f"install a newer release of {upgrade}",
            contract=str(manifest.contract),
        )
    problems = manifest_problems(manifest, provider.name)
    if problems:
        raise provider.error(
            BrokenPluginError,
            f"{provider}: the manifest {provider.value!r} is not valid: {'; '.join(problems)}",
            fix=f"report this to the authors of {provider.distribution}",
            problems=problems,
        )
    return manifest


def engine_version(engine: EngineRequirement) -> tuple[str, str] | None:
    """The installed ``(distribution, version)`` of an engine, or None. Imports nothing."""
    for name in engine.distributions:
        for dist in _distributions(name=name):
            return name, _facts(dist)[1]
    return None


def check_engine(provider: Provider, manifest: BackendManifest) -> None:
    """Makes sure, from metadata alone, that the engine is installed here and in range.

    Raises:
        MissingEngineError: It is not installed or out of range; the fix is the pip command.
    """
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion, Version

    engine, name = manifest.engine, provider.distribution
    wanted = f"{engine.distributions[0]} {engine.versions}".strip()
    installed = engine_version(engine)
    if installed is None:
        raise provider.error(
            MissingEngineError,
            f"the backend '{manifest.name}' ({provider}) needs {wanted}, which is not installed",
            fix=install_command(name, extra=engine_extra(name, engine.extra)),
            engine=engine.distributions[0],
        )
    name, version = installed
    try:
        fits = SpecifierSet(engine.versions).contains(Version(version), prereleases=True)
    except InvalidVersion:  # such as what a half-removed distribution leaves
        fits = False
    if not fits:
        raise provider.error(
            MissingEngineError,
            f"the backend '{manifest.name}' ({provider}) needs {wanted}; {version} is installed",
            fix=f'pip install "{name}{engine.versions}"',
            engine=name,
            engine_version=version,
        )
