"""The backend under test: its manifest, and how to build one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rl_core.interfaces import ColocatablePolicyInterface, GenerationInterface
    from rl_core.plugins.manifest import BackendManifest

__all__ = ["Target"]

#: What backends call the dtype of the weights; the first that its configuration knows is set.
_DTYPE_KEYS = ("torch_dtype", "dtype", "precision")


@dataclass(frozen=True, slots=True)
class Target:
    """A backend under test.

    Attributes:
        name: Its name, as ``rl backends list`` shows it.
        manifest: What it declares.
        make_generation: Builds its generation side from a configuration.
        make_policy: Builds its policy side from a configuration.
        config_keys: For each kind, the configuration keys it knows.
        versions: Of the plugin and of its engine, for the report.
        installed: Whether discovery finds it under its name.
    """

    name: str
    manifest: BackendManifest
    make_generation: Callable[[Mapping[str, Any]], GenerationInterface]
    make_policy: Callable[[Mapping[str, Any]], ColocatablePolicyInterface]
    config_keys: Mapping[str, frozenset[str]]
    versions: Mapping[str, str] = field(default_factory=dict)
    installed: bool = True

    @classmethod
    def find(cls, name: str) -> Target:
        """The installed backend of that name.

        Raises:
            PluginError: It is missing, ambiguous, broken or incompatible.
        """
        from rl_core.plugins.config import config_keys
        from rl_core.plugins.discovery import engine_version, load_object
        from rl_core.plugins.factory import create_generation, create_policy
        from rl_core.plugins.registry import find_backend, resolve

        provider = find_backend(name)
        manifest = resolve(name)
        keys: dict[str, frozenset[str]] = {
            kind: frozenset(config_keys(load_object(reference, provider)))
            for kind, reference in manifest.configs.items()
        }
        engine = engine_version(manifest.engine)
        return cls(
            name=name,
            manifest=manifest,
            make_generation=create_generation,
            make_policy=create_policy,
            config_keys=keys,
            versions={"plugin": str(provider), "engine": " ".join(engine or ("not installed",))},
        )

    def base_config(self, kind: str, dtype: str, device: str) -> dict[str, Any]:
        """The keys that put a backend of this kind on a device, in a dtype."""
        known = self.config_keys.get(kind, frozenset())
        config: dict[str, Any] = {"backend": self.name}
        config |= dict.fromkeys([key for key in _DTYPE_KEYS if key in known][:1], dtype)
        return config | ({"device": device} if "device" in known else {})
