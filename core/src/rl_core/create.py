"""Builds backends by name: the only way from a configuration to a running policy or engine."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast, is_typeddict

from rl_core.config import check_config
from rl_core.errors import BrokenPluginError, ConfigError
from rl_core.plugins.discovery import BACKENDS, load_object, providers
from rl_core.plugins.hookspecs import broken_hooks
from rl_core.plugins.registry import find_provider, resolve

if TYPE_CHECKING:
    from rl_core.interfaces import Cluster
    from rl_core.interfaces.generation import GenerationInterface
    from rl_core.interfaces.policy import ColocatablePolicyInterface
    from rl_core.plugins.manifest import Kind

__all__ = ["create_generation", "create_policy"]


def create_generation(
    config: Mapping[str, Any], cluster: Cluster | None = None
) -> GenerationInterface:
    """Builds the generation backend that ``config["backend"]`` names.

    Without a cluster the backend runs in this process. Variables that its manifest asks for are
    then set in ``os.environ``, except those that are set already: what you export wins.

    Args:
        config: A :class:`~rl_core.interfaces.GenerationConfig` with the backend's own keys.
        cluster: Where to run it in workers, such as rl-hosting's ``LocalCluster`` or rl-ray's
            ``RayVirtualCluster``. Its methods then keep their signatures.

    Raises:
        ConfigError: A key is unknown, missing, ill-typed or out of bounds. No model was loaded.
        PluginError: The backend is missing, ambiguous, broken or incompatible, or its engine is
            not installed; the subclass shows which, and ``fix`` how to get it.
    """
    backend = _create("generation", config, cluster)
    return cast("GenerationInterface", backend)


def create_policy(
    config: Mapping[str, Any], cluster: Cluster | None = None
) -> ColocatablePolicyInterface:
    """Builds the policy backend that ``config["backend"]`` names.

    As :func:`create_generation`, with a :class:`~rl_core.interfaces.PolicyConfig`.
    """
    backend = _create("policy", config, cluster)
    return cast("ColocatablePolicyInterface", backend)


def _create(kind: Kind, config: Mapping[str, Any], cluster: Cluster | None) -> Any:
    given: Any = config
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"create_{kind} takes a mapping, not a {type(given).__name__}",
            fix='pass a dict such as {"backend": "hf", "model_name": path}; dataclasses.asdict '
            "makes one of a dataclass",
            key="",
        )
    if cluster is not None and not hasattr(cluster, "remote_backend"):
        raise ConfigError(
            f"the cluster is {cluster!r}, a {type(cluster).__name__}",
            fix=f"pass a cluster: create_{kind}(config, LocalCluster(4)) of rl-hosting has 4 "
            "workers on this host",
            key="cluster",
        )
    name = given.get("backend")
    if not isinstance(name, str) or not name:
        sections = [
            k for k, part in given.items() if isinstance(part, Mapping) and "backend" in part
        ]
        fix = "set 'backend' to one of the names that `rl backends list` shows"
        fix = f"pass the section: config[{sections[0]!r}]" if sections else fix
        known = ", ".join(sorted({provider.name for provider in providers(BACKENDS)})) or "none"
        raise ConfigError(
            f"the configuration names no backend (installed: {known})", fix=fix, key="backend"
        )
    provider = find_provider(name)
    # On a cluster, the engine is installed where the workers run, not here.
    manifest = resolve(name, kind, config=given if cluster is None else None)
    spec = load_object(manifest.configs[kind], provider)
    if not is_typeddict(spec):
        raise provider.error(
            BrokenPluginError,
            f"{provider}: {manifest.configs[kind]!r} is not a TypedDict",
            fix=f"report this to the authors of {provider.distribution}",
        )
    checked = check_config(spec, config, what=f"{kind} backend {name!r}")
    for error in broken_hooks():
        warnings.warn(f"hooks of a plugin are not used: {error}", RuntimeWarning, stacklevel=3)
    if cluster is not None:
        return cluster.remote_backend(manifest, kind, checked)
    for variable, value in manifest.environment.items():
        os.environ.setdefault(variable, value)
    return load_object(f"{manifest.factories[kind]}.from_config", provider)(checked)
