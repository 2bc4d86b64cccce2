"""Pip commands that are printed or documented name the place of what is of this project."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from rl_core import install as installing
from rl_core.install import PROJECT, engine_extra, install_command

ROOT = Path(__file__).parents[2]
PAGES = [
    path
    for pattern in (
        "*.md",
        "docs/**/*.md",
        "*/README.md",
        "plugins/*/README.md",
        "tests/*/README.md",
    )
    for path in ROOT.glob(pattern)
]
SOURCES = [
    path
    for pattern in ("core/src", "plugins/*/src", "tests/conformance/src", "examples")
    for folder in ROOT.glob(pattern)
    for path in folder.rglob("*.py")
]
FOLDERS = {"rl-core": "core", "rl-conformance": "tests/conformance"}


def commands(path: Path) -> list[str]:
    return re.findall(r"pip install ([^\n`#]*)", path.read_text(encoding="utf-8"))


def test_the_table_has_what_each_distribution_requires() -> None:
    for name, needs in PROJECT.items():
        folder = ROOT / FOLDERS.get(name, f"plugins/{name}")
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        required = {re.split(r"[\[<>=]", line)[0] for line in project.get("dependencies", [])}
        ours = {each for each in required if each in PROJECT} - {"rl-core"}
        below = {need for each in ours for need in PROJECT[each].split()}
        assert set(needs.split()) == ours | below, name


def test_no_command_names_a_distribution_of_ours_without_its_place() -> None:
    bare = re.compile(r"""(?:^|[\s"'])rl-(?:\w|-)+""")
    found = [
        f"{path.relative_to(ROOT)}: {command}"
        for path in [*PAGES, *SOURCES]
        for command in commands(path)
        if bare.search(re.split(r'", |,? or | which ', command)[0])
    ]
    assert found == []


def test_documented_commands_are_complete() -> None:
    incomplete = []
    for path in PAGES:
        for command in commands(path):
            named = re.findall(r"\./(?:core|plugins/rl-\w+|tests/conformance)", command)
            names = {
                {"./core": "rl-core", "./tests/conformance": "rl-conformance"}.get(
                    each, each.rpartition("/")[2]
                )
                for each in named
            }
            needs = {need for name in names for need in PROJECT[name].split()}
            if "rl-core" in names and not needs <= names:
                incomplete.append(f"{path.relative_to(ROOT)}: {command}")
    assert incomplete == []


def test_what_is_missing_is_in_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(installing, "_read", lambda name, file: "")
    assert install_command("rl-ray").split() == [
        *("pip", "install", "./plugins/rl-cli", "./plugins/rl-backends", "./plugins/rl-hosting"),
        "./plugins/rl-ray",
    ]


def test_folders_of_a_checkout_elsewhere_are_absolute(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(installing, "origin_of", lambda name: {})
    assert install_command("rl-ray") == f"pip install {ROOT}/plugins/rl-ray"
    monkeypatch.setattr(installing, "_root", lambda: None)
    wanted = "in a checkout of this project: pip install ./plugins/rl-ray"
    assert install_command("rl-ray") == wanted


def test_an_editable_plugin_stays_editable(monkeypatch: pytest.MonkeyPatch) -> None:
    origin = {"url": "file:///src/rl%20toy", "dir_info": {"editable": True}}
    monkeypatch.setattr(installing, "_read", lambda name, file: json.dumps(origin))
    assert install_command("rl-toy", "engine") == 'pip install -e "/src/rl toy[engine]"'


@pytest.mark.parametrize(
    ("driver", "build", "extra"),
    [
        ("", "", "cpu"),
        ("/bin/nvidia-smi", "cuda: Optional[str] = None", "cpu"),
        ("/bin/nvidia-smi", "cuda: Optional[str] = '13.0'", "engine"),
    ],
)
def test_the_extra_is_that_of_the_machine(
    monkeypatch: pytest.MonkeyPatch, driver: str, build: str, extra: str
) -> None:
    files = {"rl-toy": "Name: rl-toy\nProvides-Extra: cpu\nProvides-Extra: engine\n"}
    files["torch"] = f"debug = False\n{build}\n"
    monkeypatch.setattr(installing, "_read", lambda name, file: files.get(name, ""))
    monkeypatch.setattr(installing.shutil, "which", lambda name: driver)
    monkeypatch.setattr(installing.Path, "exists", lambda path: False)
    assert engine_extra("rl-toy", "engine") == extra
    assert engine_extra("rl-toy", "server") == "server"
