"""Whole, broken, missing, doubled and outdated plugins, as built wheels in an environment."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.wheels

ROOT = Path(__file__).resolve().parents[3]
PYPROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "{version}"

[project.optional-dependencies]
engine = []

[project.entry-points."{group}"]
{entry_point} = "{value}"

[tool.hatch.build.targets.wheel]
packages = ["{package}"]
"""
MANIFEST = """
from rl_core.plugins.manifest import (
    GENERATION_CAPABILITIES, BackendManifest, Capability, EngineRequirement
)
CAPABILITIES = {{name: Capability("unsupported") for name in GENERATION_CAPABILITIES}}
BACKEND = BackendManifest(
    name="{entry_point}", summary="From {name}.",
    factories={{"generation": "{package}.backend:Backend"}},
    configs={{"generation": "rl_core.interfaces:GenerationConfig"}},
    capabilities={{"generation": {capabilities}}},
    engine=EngineRequirement(("{engine}",), "{versions}", extra="engine"),
    contract="{contract}",
)
"""
BACKEND = """
import {module}

class Backend:
    @classmethod
    def from_config(cls, config, *, worker=None):
        return cls()
"""
COMMAND = """
import sys

def app(argv):
    'Greets.'
    print(sys.argv[0], *argv)
"""


class Wheelhouse:
    """Builds wheels of small projects."""

    def __init__(self, root: Path) -> None:
        self.root, self.out = root, root / "wheels"

    def build(self, project: Path) -> None:
        command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(self.out)]
        subprocess.run(command, cwd=project, check=True, capture_output=True, timeout=60)

    def project(
        self,
        name: str,
        files: dict[str, str],
        *,
        group: str = "rl_core.backends",
        entry_point: str = "",
        value: str = "manifest:BACKEND",
        version: str = "1.0",
    ) -> None:
        package = name.replace("-", "_")
        root = self.root / name
        (root / package).mkdir(parents=True)
        facts = {
            "name": name,
            "version": version,
            "group": group,
            "entry_point": entry_point or name.removeprefix("rl-"),
            "value": f"{package}.{value}",
            "package": package,
        }
        (root / "pyproject.toml").write_text(PYPROJECT.format(**facts))
        for file, text in {"__init__.py": "", **files}.items():
            (root / package / file).write_text(text)
        self.build(root)

    def backend(
        self,
        name: str,
        entry_point: str = "",
        *,
        engine: str = "toy-engine",
        versions: str = ">=1,<2",
        contract: str = "1.0",
        capabilities: str = "CAPABILITIES",
    ) -> None:
        entry_point = entry_point or name.removeprefix("rl-")
        manifest = MANIFEST.format(
            name=name,
            entry_point=entry_point,
            package=name.replace("-", "_"),
            engine=engine,
            versions=versions,
            contract=contract,
            capabilities=capabilities,
        )
        backend = BACKEND.format(module=engine.replace("-", "_"))
        files = {"manifest.py": manifest, "backend.py": backend}
        self.project(name, files, entry_point=entry_point)


class Environment:
    """A virtual environment that sees this one's third-party packages and nothing of ours."""

    def __init__(self, root: Path) -> None:
        venv.create(root, symlinks=True)
        self.root = root
        self.bin = root / "bin"
        third_party = root / "third-party"
        third_party.mkdir()
        for path in Path(sysconfig.get_path("purelib")).iterdir():
            if not path.name.startswith(("rl_", "_editable", "__")) and path.suffix != ".pth":
                (third_party / path.name).symlink_to(path)
        (self.site_packages / "third_party.pth").write_text(f"{third_party}\n")

    @property
    def site_packages(self) -> Path:
        (found,) = self.root.glob("lib/python3*/site-packages")
        return found

    def install(self, wheels: Path) -> None:
        options = ["--quiet", "--no-index", "--no-deps", "--no-warn-script-location"]
        target = ["--python", str(self.bin / "python")]
        command = [sys.executable, "-m", "pip", *target, "install", *options, *wheels.glob("*.whl")]
        subprocess.run(command, check=True, capture_output=True, timeout=120)

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        program, *arguments = command
        return subprocess.run(
            [self.bin / program, *arguments], capture_output=True, text=True, timeout=60
        )

    def list(self) -> dict[str, dict[str, Any]]:
        """The listing by ``dist:name``."""
        backends = json.loads(self.run("rl", "backends", "list", "--json").stdout)["backends"]
        return {backend["qualified_name"]: backend for backend in backends}

    def create(self, name: str) -> str:
        """The class of the backend that the factory builds, or the error that it raises."""
        program = (
            "from rl_core import RLError, create_generation\n"
            f"config = {{'backend': {name!r}, 'model_name': 'm'}}\n"
            "try:\n    print(type(create_generation(config)).__module__)\n"
            "except RLError as error:\n    print(type(error).__name__, error)"
        )
        result = self.run("python", "-c", program)
        assert result.returncode == 0, result.stderr
        return result.stdout


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    root = tmp_path_factory.mktemp("wheels")
    wheels = Wheelhouse(root)
    wheels.build(ROOT / "core")
    wheels.build(ROOT / "plugins/rl-cli")
    wheels.project("toy-engine", {}, group="toy", version="1.5")
    wheels.backend("rl-whole")
    wheels.backend("rl-absent", engine="engine-nowhere", versions=">=2")
    wheels.backend("rl-outdated", versions=">=2,<3")
    wheels.backend("rl-future", contract="2.0")
    wheels.backend("rl-partial", capabilities="{}")
    wheels.backend("rl-twin-one", "twin")
    wheels.backend("rl-twin-two", "twin")
    wheels.project("rl-broken", {"manifest.py": "import package_nowhere"})
    group = "rl_core.commands"
    wheels.project("rl-greet", {"cli.py": COMMAND}, group=group, value="cli:app")
    wheels.project("rl-sulk", {"cli.py": "1 / 0"}, group=group, value="cli:app")
    environment = Environment(root / "env")
    environment.install(wheels.out)
    return environment


def test_whole_backend_is_ready(env: Environment) -> None:
    whole = env.list()["rl-whole:whole"]
    assert whole["status"] == "ready"
    assert whole["engine"] == "toy-engine 1.5"
    assert env.create("whole") == "rl_whole.backend\n"


def test_backend_without_its_engine_is_listed_and_names_the_pip_command(env: Environment) -> None:
    absent = env.list()["rl-absent:absent"]
    assert absent["status"] == "no engine"
    assert absent["manifest"]["kinds"] == ["generation"]
    assert absent["error"]["fix"].startswith('pip install "rl-absent[engine] @ file:///')
    raised = env.create("absent")
    assert raised.startswith("MissingEngineError")
    assert 'pip install "rl-absent[engine] @ file:///' in raised


def test_engine_out_of_range_is_named_with_both_versions(env: Environment) -> None:
    outdated = env.list()["rl-outdated:outdated"]
    assert outdated["status"] == "wrong engine"
    assert "needs toy-engine >=2,<3; 1.5 is installed" in outdated["error"]["message"]


def test_broken_backend_is_listed_with_its_cause_and_bricks_nothing(env: Environment) -> None:
    listing = env.list()
    broken = listing["rl-broken:broken"]
    assert broken["status"] == "broken"
    assert "No module named 'package_nowhere'" in broken["error"]["message"]
    assert broken["error"]["fix"] == "reinstall rl-broken, or uninstall it"
    assert listing["rl-whole:whole"]["status"] == "ready"
    raised = env.create("broken")
    assert raised.startswith("BrokenPluginError rl-broken 1.0")


def test_incomplete_manifest_is_broken(env: Environment) -> None:
    error = env.list()["rl-partial:partial"]["error"]
    assert error["type"] == "BrokenPluginError"
    assert "does not declare adapters, async_generation" in error["message"]


def test_plugin_for_another_contract_version_is_incompatible(env: Environment) -> None:
    future = env.list()["rl-future:future"]
    assert future["status"] == "incompatible"
    assert future["error"]["fix"] == "install a newer release of rl-core"
    raised = env.create("future")
    assert raised.startswith("IncompatiblePluginError")


def test_two_providers_of_one_name_are_listed_and_the_bare_name_raises(env: Environment) -> None:
    listing = env.list()
    assert listing["rl-twin-one:twin"]["duplicates"] == ["rl-twin-two"]
    assert listing["rl-twin-two:twin"]["duplicates"] == ["rl-twin-one"]
    raised = env.create("twin")
    assert raised.startswith("AmbiguousBackendError")
    assert "'rl-twin-one:twin' or 'rl-twin-two:twin'" in raised
    assert env.create("rl-twin-two:twin") == "rl_twin_two.backend\n"


def test_listing_with_problems_exits_with_one(env: Environment) -> None:
    assert env.run("rl", "backends", "list").returncode == 1
    assert env.run("rl", "backends", "info", "whole").returncode == 0


def test_listing_imports_no_torch_no_ray_and_no_engine(env: Environment) -> None:
    code = (
        "import sys\n"
        "from rl_cli import main\n"
        "main(['backends', 'list'])\n"
        "heavy = {'torch', 'ray', 'numpy', 'toy_engine', 'rl_whole.backend'}\n"
        "print('imported', sorted(heavy & set(sys.modules)))"
    )
    result = env.run("python", "-c", code)
    assert "absent" in result.stdout
    assert "imported []" in result.stdout, result.stderr


def test_plugin_command_runs_beside_a_broken_one(env: Environment) -> None:
    assert env.run("rl", "greet", "--world").stdout == "rl greet --world\n"
    listed = env.run("rl", "--help")
    assert listed.returncode == 0
    shown = " ".join(listed.stdout.split())
    assert " greet Greets. " in shown
    assert " sulk (broken) rl-sulk 1.0: cannot load" in shown


def test_broken_command_raises_when_it_is_called(env: Environment) -> None:
    result = env.run("rl", "sulk", "--anything")
    assert result.returncode == 1
    assert "rl-sulk 1.0: cannot load 'rl_sulk.cli:app': ZeroDivisionError" in result.stderr
    assert "Traceback" not in result.stderr
