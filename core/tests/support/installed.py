"""Distributions that are installed for one test, a plugin of a backend "toy" among them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from rl_core.plugins import hookspecs

NO_ENGINE = "EngineRequirement(('no-such-engine',), '>=2', extra='engine')"

#: The fields of a valid manifest of a backend "toy", as Python expressions.
TOY_MANIFEST = {
    "name": "'toy'",
    "summary": "'A toy.'",
    "factories": "{'generation': 'toy.backend:Toy'}",
    "configs": "{'generation': 'toy.config:ToyConfig'}",
    "capabilities": (
        "{'generation': {name: Capability('unsupported') for name in GENERATION_CAPABILITIES}}"
    ),
    "engine": "EngineRequirement(('pluggy',), '>=1', extra='engine')",
    "environment": "{'TOY_MANIFEST_SET': 'manifest'}",
}
TOY_CONFIG = """
from typing import NotRequired
from rl_core.interfaces import GenerationConfig

class ToyConfig(GenerationConfig):
    toy_size: NotRequired[int]
"""
TOY_BACKEND = """
class Toy:
    def __init__(self, config):
        self.config = config

    @classmethod
    def from_config(cls, config, *, worker=None):
        return cls(config)
"""


class Install:
    """Installs a distribution; ``toy`` installs one that provides the backend ``toy``."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __call__(
        self,
        distribution: str,
        entry_points: Mapping[str, Mapping[str, str]],
        modules: Mapping[str, str] = {},
        *,
        version: str = "1.0",
    ) -> Path:
        info = self.root / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        head = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
        (info / "METADATA").write_text(f"{head}Provides-Extra: engine\n")
        sections = (
            f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in points.items())
            for group, points in entry_points.items()
        )
        (info / "entry_points.txt").write_text("\n".join(sections))
        for module, source in modules.items():
            path = self.root.joinpath(*module.split(".")).with_suffix(".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(source)
        return info

    def toy(self, distribution: str = "rl-toy", **changes: str) -> Path:
        package = distribution.removeprefix("rl-").replace("-", "_")
        fields = ", ".join(f"{key}={value}" for key, value in (TOY_MANIFEST | changes).items())
        manifest = f"from rl_core.plugins.manifest import *\nBACKEND = BackendManifest({fields})\n"
        modules = {
            f"{package}.__init__": "",
            f"{package}.manifest": manifest,
            f"{package}.config": TOY_CONFIG,
            f"{package}.backend": TOY_BACKEND,
        }
        return self(
            distribution, {"rl_core.backends": {"toy": f"{package}.manifest:BACKEND"}}, modules
        )


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Installs distributions that are gone after the test, modules and hooks included."""
    root = tmp_path / "site-packages"
    root.mkdir()
    monkeypatch.syspath_prepend(root)
    hookspecs._manager.cache_clear()
    before = set(sys.modules)
    yield Install(root)
    hookspecs._manager.cache_clear()
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(root)):
            del sys.modules[name]
