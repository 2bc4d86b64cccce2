"""Plugins that are installed for one test, and parties of a refit that are closed after it."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Protocol

import hypothesis
import pytest

from rl_core.plugins import hookspecs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from cuda_emulation import Gpu
    from simple_pair import Engine, Trainer

# How long an example takes says more about the machine than about what is tested.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

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


def manifest_module(**changes: str) -> str:
    """The module ``toy.manifest``, with fields replaced by other expressions."""
    fields = ", ".join(f"{key}={value}" for key, value in (TOY_MANIFEST | changes).items())
    return f"from rl_core.plugins.manifest import *\nBACKEND = BackendManifest({fields})\n"


class Install(Protocol):
    """Installs a distribution; ``toy`` installs one that provides the backend ``toy``."""

    def __call__(
        self,
        distribution: str,
        entry_points: Mapping[str, Mapping[str, str]],
        modules: Mapping[str, str] = ...,
        *,
        version: str = ...,
    ) -> Path: ...

    def toy(self, distribution: str = ..., **changes: str) -> Path: ...

    root: Path


class _Installer:
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
        modules = {
            f"{package}.__init__": "",
            f"{package}.manifest": manifest_module(**changes),
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
    yield _Installer(root)
    hookspecs._manager.cache_clear()
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(root)):
            del sys.modules[name]


@pytest.fixture
def keep() -> Iterator[Callable[[Any], Any]]:
    """Hands back what it is given, and closes it after the test."""
    with ExitStack() as stack:

        def keep(party: Any) -> Any:
            stack.callback(party.close)
            return party

        yield keep


@pytest.fixture
def pair(keep: Callable[[Any], Any]) -> tuple[Trainer, Engine]:
    """A trainer with every awkward kind of tensor, and an engine with zeros in their place."""
    from simple_pair import Engine, Trainer, blank, make_tensors

    tensors = make_tensors()
    return keep(Trainer(tensors)), keep(Engine(blank(tensors)))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """The CPU, which refits take for a GPU as long as the test runs."""
    from cuda_emulation import emulate

    return emulate(monkeypatch)


@pytest.fixture(params=["cpu", "as on a GPU"])
def either_device(request: pytest.FixtureRequest) -> None:
    """Runs a test twice, the second time with what stands for a GPU."""
    if request.param != "cpu":
        request.getfixturevalue("gpu")
