"""Listing finds what is installed, imports as little as it can, and never raises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from installed import NO_ENGINE, Install

from rl_cli.listing import BackendListing, list_backends
from rl_core.errors import (
    BrokenPluginError,
    IncompatiblePluginError,
    MissingEngineError,
)
from rl_core.plugins.discovery import (
    BACKENDS,
    CONFORMANCE,
    HOOKS,
    TRANSPORTS,
    check_engine,
    load_manifest,
    load_object,
    providers,
)
from rl_core.plugins.manifest import (
    POLICY_CAPABILITIES,
    BackendManifest,
    Capability,
    EngineRequirement,
    manifest_problems,
)


def toys() -> list[BackendListing]:
    return [listing for listing in list_backends() if listing.provider.name == "toy"]


def toy() -> BackendListing:
    (listing,) = toys()
    return listing


def test_providers_come_from_metadata_without_importing_the_plugin(install: Install) -> None:
    install.toy()
    (found,) = [p for p in providers(BACKENDS) if p.name == "toy"]
    assert (found.distribution, found.version) == ("rl-toy", "1.0")
    assert found.value == "toy.manifest:BACKEND"
    assert found.qualified_name == "rl-toy:toy"
    assert "toy" not in sys.modules


@pytest.mark.parametrize("group", [BACKENDS, TRANSPORTS, HOOKS, CONFORMANCE])
def test_every_group_is_listed(install: Install, group: str) -> None:
    install("rl-thing", {group: {"thing": "thing.module:THING"}})
    assert "rl-thing:thing" in [p.qualified_name for p in providers(group)]


def test_entry_points_of_other_groups_are_left_out(install: Install) -> None:
    install("rl-thing", {"console_scripts": {"thing": "thing:main"}, BACKENDS: {"x": "x:X"}})
    found = [p for p in providers(BACKENDS) if p.distribution == "rl-thing"]
    assert [p.name for p in found] == ["x"]


def test_whole_backend_is_ready_with_its_engine(install: Install) -> None:
    install.toy()
    listing = toy()
    assert listing.status == "ready"
    assert listing.engine.startswith("pluggy ")
    assert listing.manifest is not None
    assert listing.manifest.kinds == ("generation",)
    assert "toy.backend" not in sys.modules


def test_absent_engine_is_listed_with_the_command_that_installs_it(install: Install) -> None:
    install.toy(engine="EngineRequirement(('no-such-engine',), '>=2', extra='engine')")
    listing = toy()
    assert listing.status == "no engine"
    assert isinstance(listing.error, MissingEngineError)
    assert listing.error.fix == 'pip install "rl-toy[engine]"'


@pytest.mark.parametrize(
    ("origin", "wanted"),
    [
        ({"url": "file:///src/rl-toy", "dir_info": {}}, "file:///src/rl-toy"),
        (
            {"url": "https://h.org/toy", "vcs_info": {"vcs": "git", "commit_id": "c0ffee"}},
            "git+https://h.org/toy@c0ffee",
        ),
        (
            {
                "url": "https://h.org/all",
                "vcs_info": {"vcs": "git", "commit_id": "c0ffee"},
                "subdirectory": "plugins/rl-toy",
            },
            "git+https://h.org/all@c0ffee#subdirectory=plugins/rl-toy",
        ),
    ],
)
def test_plugin_that_came_from_no_index_is_installed_again_from_where_it_came(
    install: Install, origin: dict[str, Any], wanted: str
) -> None:
    root = install.toy(engine="EngineRequirement(('no-such-engine',), '>=2', extra='engine')")
    (root / "direct_url.json").write_text(json.dumps(origin))
    error = toy().error
    assert error is not None
    assert error.fix == f'pip install "rl-toy[engine] @ {wanted}"'


@pytest.mark.parametrize("half", ["METADATA", "direct_url.json"])
def test_half_removed_plugin_without_its_engine_is_listed(install: Install, half: str) -> None:
    (install.toy(engine=NO_ENGINE) / half).write_text("\n")
    assert toy().status == "no engine"


def test_engine_out_of_range_names_both_versions(install: Install) -> None:
    install.toy(engine="EngineRequirement(('pluggy',), '>=90,<91')")
    listing = toy()
    assert listing.status == "wrong engine"
    assert listing.engine.startswith("pluggy ")
    with pytest.raises(MissingEngineError, match=r"needs pluggy >=90,<91; \d") as caught:
        check_engine(listing.provider, load_manifest(listing.provider))
    assert caught.value.fix == 'pip install "pluggy>=90,<91"'


def test_second_name_of_an_engine_counts(install: Install) -> None:
    install.toy(engine="EngineRequirement(('no-such-engine', 'pluggy'), '>=1')")
    assert toy().status == "ready"


def test_local_and_pre_release_versions_are_in_range(install: Install) -> None:
    install("toy-engine", {}, version="2.1.0rc1+cpu")
    install.toy(engine="EngineRequirement(('toy-engine',), '>=2,<3')")
    assert toy().engine == "toy-engine 2.1.0rc1+cpu"


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("def", "SyntaxError"),
        ("", "AttributeError"),
        ("BACKEND = {'name': 'toy'}", "of type dict, not a BackendManifest"),
    ],
)
def test_broken_manifest_is_listed_with_its_cause(
    install: Install, source: str, cause: str
) -> None:
    install("rl-toy", {BACKENDS: {"toy": "bad:BACKEND"}}, {"bad": source}, version="1.2")
    listing = toy()
    assert listing.status == "broken"
    assert isinstance(listing.error, BrokenPluginError)
    assert "rl-toy 1.2" in listing.error.message
    assert cause in listing.error.message
    assert "rl-toy" in (listing.error.fix or "")


@pytest.mark.parametrize(
    ("field", "expression", "problem"),
    [
        ("name", "'other'", "its name is 'other' but its entry point is 'toy'"),
        ("summary", "''", "the summary is empty"),
        ("factories", "{}", "factories is empty"),
        ("factories", "['toy.backend:Toy']", "'factories' must be Mapping["),
        ("factories", "{'generation': 'toy.backend'}", "not 'module:attribute'"),
        ("factories", "{'reward': 'toy.backend:Toy'}", "'factories.reward' must be 'generation'"),
        ("configs", "{}", "configs and factories have different kinds"),
        ("capabilities", "{}", "capabilities and factories have different kinds"),
        ("capabilities", "{'generation': {}}", "does not declare adapters, async_generation"),
        ("capabilities", "{'generation': {'fly': Capability('full')}}", "the unknown fly"),
        ("capabilities", "{'generation': {'sleep': 'full'}}", "must be Capability, got 'full'"),
        ("capabilities", "{'generation': {'sleep': Capability('some')}}", "the unknown level"),
        (
            "capabilities",
            "{'generation': {'sleep': Capability('versioned', engine='new')}}",
            "names no engine range: 'new'",
        ),
        ("engine", "None", "'engine' must be EngineRequirement, got None"),
        ("engine", "EngineRequirement((), '>=1')", "at least one name"),
        ("engine", "EngineRequirement('pluggy', '>=1')", "'distributions' must be tuple["),
        ("engine", "EngineRequirement(('pluggy',), 'new')", "not a PEP 440 range"),
        ("engine", "EngineRequirement(('pluggy',), '')", "not a PEP 440 range"),
    ],
)
def test_incomplete_manifest_is_broken_and_says_why(
    install: Install, field: str, expression: str, problem: str
) -> None:
    install.toy(**{field: expression})
    listing = toy()
    assert listing.status == "broken"
    assert problem in str(listing.error)


@pytest.mark.parametrize(("contract", "upgrade"), [("2.0", "rl-core"), ("0.9", "rl-toy")])
def test_other_contract_version_names_what_to_upgrade(
    install: Install, contract: str, upgrade: str
) -> None:
    install.toy(contract=repr(contract))
    listing = toy()
    assert listing.status == "incompatible"
    assert isinstance(listing.error, IncompatiblePluginError)
    assert listing.error.fix == f"install a newer release of {upgrade}"


def test_newer_minor_version_of_the_contract_is_compatible(install: Install) -> None:
    install.toy(contract="'1.99'")
    assert toy().status == "ready"


def test_every_capability_is_declared() -> None:
    known = [name for name in POLICY_CAPABILITIES if name != "sharded"]
    manifest = BackendManifest(
        name="toy",
        summary="A policy",
        factories={"policy": "toy.backend:Toy"},
        configs={"policy": "toy.config:ToyConfig"},
        capabilities={"policy": dict.fromkeys(known, Capability("full"))},
        engine=EngineRequirement(("pluggy",), ">=1"),
    )
    problems = ["capabilities['policy'] does not declare sharded"]
    assert manifest_problems(manifest, "toy") == problems


def test_two_providers_of_one_name_are_both_listed(install: Install) -> None:
    install.toy("rl-toy")
    install.toy("rl-toy-two")
    assert [listing.duplicates for listing in toys()] == [("rl-toy-two",), ("rl-toy",)]


def test_copy_further_down_the_path_is_shadowed(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = install.toy()
    older = tmp_path / "older"
    (older / info.name).mkdir(parents=True)
    for file in info.iterdir():
        (older / info.name / file.name).write_text(file.read_text())
    monkeypatch.setattr(sys, "path", [*sys.path, str(older)])
    assert len(toys()) == 1


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b"[rl_core.backends]\nnot a line\n", "malformed"),
        (b"[rl_core.backends]\nx = not valid!\n", "not module:attribute"),
        (b"[rl_core.backends]\nx = sys\n", "of type module, not a BackendManifest"),
        (b"\xff\xfe[rl_core.backends]", "cannot be read"),
    ],
)
def test_malformed_entry_points_are_listed_as_broken(
    install: Install, text: bytes, problem: str
) -> None:
    info = install("rl-mess", {})
    (info / "entry_points.txt").write_bytes(text)
    (listing,) = [item for item in list_backends() if item.provider.distribution == "rl-mess"]
    assert listing.status == "broken"
    assert problem in str(listing.error)


def test_distribution_without_metadata_is_still_listed(install: Install) -> None:
    info = install("rl-bare", {BACKENDS: {"bare": "bare:BACKEND"}})
    (info / "METADATA").unlink()
    (listing,) = [item for item in list_backends() if item.provider.name == "bare"]
    assert listing.provider.distribution == "unknown"
    assert listing.status == "broken"


def test_nested_attributes_are_loaded() -> None:
    assert load_object("sys:version_info.major") == sys.version_info.major


@pytest.mark.parametrize(
    "code",
    [
        "import rl_core",
        "import rl_core; rl_core.GenerationConfig, rl_core.ConfigError, rl_core.__version__",
        "from rl_cli.listing import list_backends; list_backends()",
        "from rl_core import create_generation, create_policy",
    ],
)
def test_light_uses_import_neither_torch_nor_ray_nor_an_engine(code: str) -> None:
    heavy = "('torch', 'ray', 'transformers', 'numpy', 'zmq')"
    check = f"import sys; bad = [m for m in {heavy} if m in sys.modules]; sys.exit(str(bad or ''))"
    result = subprocess.run(
        [sys.executable, "-c", f"{code}\n{check}"], capture_output=True, text=True, timeout=280
    )
    assert result.stderr.strip() == ""


def test_directory_that_is_on_the_path_twice_counts_once(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = install.toy().parent
    monkeypatch.setattr(sys, "path", [*sys.path, str(root)])
    assert [listing.duplicates for listing in toys()] == [()]


def test_engine_without_a_version_is_out_of_range(install: Install) -> None:
    (install("toy-engine", {}) / "METADATA").unlink()
    install.toy(engine="EngineRequirement(('toy-engine',), '>=2,<3')")
    assert toy().status == "wrong engine"
