"""The backend under test: its manifest, and how to build one."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass, field
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_core.errors import BrokenPluginError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rl_conformance.settings import Settings
    from rl_core.interfaces import ColocatablePolicyInterface, GenerationInterface
    from rl_core.plugins.discovery import Provider
    from rl_core.plugins.manifest import BackendManifest

__all__ = ["API_KEY", "Target", "revision"]

#: The variable that has the key of a server under test.
API_KEY = "RL_SERVER_API_KEY"

#: What backends call the dtype of the weights; the first that its configuration knows is set.
_DTYPE_KEYS = ("torch_dtype", "dtype", "precision")
#: What the suite chooses itself.
_CHOSEN = frozenset({"backend", "model_name"})


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
        tiny: By device and kind, the configuration that the plugin wants for the suite's tiny
            models, under ``"kv_scales"`` that of an engine with an FP8 cache, under ``"adapters"``
            that of one which serves adapters of rank 4 of all linear layers but the output, and
            under ``"sharded"``, by name, the layouts in which a copy of the model is spread over
            ranks: ``{"tp2": {"ranks": 2, "config": {...}}}``, with ``"own_rows": True`` where each
            of these ranks has other rows; the entry point of the backend's name in the group
            ``rl_core.conformance``.
    """

    name: str
    manifest: BackendManifest
    make_generation: Callable[[Mapping[str, Any]], GenerationInterface]
    make_policy: Callable[[Mapping[str, Any]], ColocatablePolicyInterface]
    config_keys: Mapping[str, frozenset[str]]
    versions: Mapping[str, str] = field(default_factory=dict)
    installed: bool = True
    tiny: Mapping[str, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)

    @classmethod
    def find(cls, name: str) -> Target:
        """The installed backend of that name.

        Raises:
            PluginError: It is missing, ambiguous, broken or incompatible.
        """
        from rl_core.config import config_keys
        from rl_core.create import create_generation, create_policy
        from rl_core.plugins.discovery import CONFORMANCE, engine_version, load_object, providers
        from rl_core.plugins.registry import find_provider, resolve

        provider = find_provider(name)
        manifest = resolve(name)
        keys: dict[str, frozenset[str]] = {
            kind: frozenset(config_keys(load_object(reference, provider)))
            for kind, reference in manifest.configs.items()
        }
        engine = engine_version(manifest.engine)
        own = (provider.distribution, provider.name)
        tiny: dict[str, Any] = {}
        for found in providers(CONFORMANCE):
            if (found.distribution, found.name) == own:
                tiny |= _checked(load_object(found.value, found), found)
        return cls(
            name=name,
            manifest=manifest,
            make_generation=create_generation,
            make_policy=create_policy,
            config_keys=keys,
            tiny=tiny,
            versions={
                "plugin": str(provider),
                "engine": " ".join(engine or ("not installed",)),
                **revision(next(iter(manifest.factories.values())).partition(".")[0]),
            },
        )

    def own_settings(self, settings: Settings) -> Mapping[str, Mapping[str, Any]]:
        """What the plugin wants for the models of a run, by kind or capability."""
        return self.tiny.get(settings.device, {}) if settings.model is None else {}

    def layouts(self, settings: Settings) -> dict[str, Mapping[str, Any]]:
        """The layouts of a copy over ranks that a run tries, as far as there are GPUs for them.

        These are all, or few that have, between them, each value of each key that a layout sets,
        the least ranks and the most ranks.
        """
        layouts = self.tiny.get(settings.device, {}).get("sharded", {})
        if settings.device == "cuda":
            import torch

            gpus = torch.cuda.device_count()
            layouts = {name: each for name, each in layouts.items() if each["ranks"] <= gpus}
        if settings.layouts == "all":
            return dict(layouts)
        ranks = [layout["ranks"] for layout in layouts.values()]
        missing = {
            name: {f"{layout['ranks']} ranks", *map(str, layout["config"].items())}
            - {f"{count} ranks" for count in ranks if min(ranks) < count < max(ranks)}
            for name, layout in layouts.items()
        }
        few = set[str]()
        while any(missing.values()):
            best = max(missing, key=lambda name: len(missing[name]))
            few.add(best)
            missing = {name: values - missing[best] for name, values in missing.items()}
        return {name: layout for name, layout in layouts.items() if name in few}

    def base_config(
        self, kind: str, settings: Settings, dtype: str | None = None
    ) -> dict[str, Any]:
        """The keys that a backend of this kind needs in any check of a run.

        Args:
            kind: ``"generation"`` or ``"policy"``.
            settings: Of the run.
            dtype: Of the weights, if not that of the run.
        """
        known = self.config_keys.get(kind, frozenset())
        config: dict[str, Any] = {"backend": self.name}
        config |= self.own_settings(settings).get(kind, {})
        if "url" in known:
            config |= {"url": settings.url, "api_key": os.environ.get(API_KEY)}
        named = [key for key in _DTYPE_KEYS if key in known][:1]
        config |= dict.fromkeys(named, dtype or settings.dtype)
        return config | ({"device": settings.device} if "device" in known else {})


def _checked(tiny: Any, provider: Provider) -> dict[str, Any]:
    """Settings for tiny models: by device and kind, and none that choose what is examined."""
    try:
        for kinds in tiny.values():
            for kind, config in kinds.items():
                if kind == "sharded":
                    _check_layouts(config)
                elif _CHOSEN & config.keys():
                    raise TypeError("it sets backend or model_name")
        return dict(tiny)
    except (AttributeError, TypeError) as error:
        raise BrokenPluginError(
            f"{provider}: {provider.value!r} holds no configurations by device and kind: {error}",
            fix=f"report this to the authors of {provider.distribution}",
        ) from error


def _check_layouts(layouts: Mapping[str, Any]) -> None:
    for name, layout in layouts.items():
        if layout.keys() - {"own_rows"} != {"ranks", "config"}:
            raise TypeError(f"layout {name!r} has {sorted(layout)}, not 'ranks' and 'config'")
        ranks = layout["ranks"]
        if not isinstance(ranks, int) or ranks < 2:
            raise TypeError(f"layout {name!r} has {ranks!r} ranks, not a number of at least 2")
        if _CHOSEN & layout["config"].keys():
            raise TypeError(f"layout {name!r} sets backend or model_name")


def revision(package: str) -> dict[str, str]:
    """The commit of a package's sources, under ``"revision"``; nothing if git does not track them.

    ``-dirty`` at its end means that files of the checkout differ from the commit.
    """
    spec = util.find_spec(package)
    if spec is None or spec.origin is None:
        return {}
    git = ["git", "-C", str(Path(spec.origin).parent)]
    found = ""
    for command in (
        ["ls-files", "--error-unmatch", spec.origin],
        ["describe", "--always", "--dirty"],
    ):
        try:
            done = subprocess.run([*git, *command], capture_output=True, text=True, timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            return {}
        if done.returncode:
            return {}
        found = done.stdout.strip()
    return {"revision": found}
