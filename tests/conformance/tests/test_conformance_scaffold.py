"""``rl new``: names, files, the contract that they keep, and the tutorial about them."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rl_conformance.outcome import Outcome, Status, Verdict
from rl_conformance.pytest_items import finish_session
from rl_conformance.registry import profile
from rl_conformance.run import run, select
from rl_conformance.scaffold.cli import app
from rl_conformance.scaffold.project import Project
from rl_conformance.settings import Settings
from rl_conformance.target import Target
from rl_core.config import check_config, config_keys
from rl_core.errors import ConfigError
from rl_core.plugins.discovery import load_object

ROOT = Path(__file__).parents[3]
TUTORIAL = ROOT / "docs" / "write-a-backend.md"


def _python(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=280)


def rl_new(*arguments: str) -> int:
    return app(["backend", *arguments])


# -- names -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "package", "title"),
    [("mine", "rl_mine", "Mine"), ("my-engine2", "rl_my_engine2", "MyEngine2"), ("x", "rl_x", "X")],
)
def test_a_name_becomes_a_package_and_a_class(name: str, package: str, title: str) -> None:
    project = Project.named(name)
    assert project.package == package
    assert f"class {title}Generation" in project.files()[f"src/{package}/generation.py"]


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("My_Engine", "write 'my-engine'"),
        ("2fast", "write 'fast'"),
        ("rl-mine", "write 'mine'"),
        ("rl_Mine", "write 'mine'"),
        ("a--b", "write 'a-b'"),
        ("mine/../../etc", "write 'mine-etc'"),
        ("x" * 21, "write '" + "x" * 20 + "'"),
        ("core", "choose another name"),
        ("rl-conformance", "choose another name"),
        ("", "choose another name"),
        ("été\n", "write 't'"),
    ],
)
def test_a_name_that_cannot_be_is_refused_with_a_nearer_one(name: str, fix: str) -> None:
    with pytest.raises(ConfigError, match="no backend can be named") as caught:
        Project.named(name)
    assert fix in str(caught.value.fix)


# -- the command -----------------------------------------------------------------------------------


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    kept = tmp_path / "rl-mine" / "notes.txt"
    kept.parent.mkdir()
    kept.write_text("kept")
    with pytest.raises(ConfigError, match="there already"):
        rl_new("mine", "--directory", str(tmp_path))
    assert [path.name for path in kept.parent.iterdir()] == ["notes.txt"]


# -- the files -------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["x", "mine", "anameoftwentyletters"])
def project(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Project.named(request.param).write(tmp_path_factory.mktemp("project"))


def test_the_python_files_compile_and_are_clean(project: Path) -> None:
    for path in project.rglob("*.py"):
        compile(path.read_text(), path, "exec")
    pytest.importorskip("ruff")
    for command in (["check", "--no-cache"], ["format", "--check", "--diff", "--no-cache"]):
        done = _python("-m", "ruff", *command, str(project))
        assert done.returncode == 0, done.stdout + done.stderr


# -- the backend -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """The backend of a new project, without an installation."""
    project = Project.named("not-installed")
    source = project.write(tmp_path_factory.mktemp("source")) / "src"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(source)
        manifest = load_object(f"{project.package}.manifest:BACKEND")
        spec = load_object(manifest.configs["generation"])

        def make(config: Mapping[str, Any]) -> Any:
            checked = check_config(spec, config, what=project.name)
            return load_object(manifest.factories["generation"]).from_config(checked)

        yield Target(
            name=project.name,
            manifest=manifest,
            make_generation=make,
            make_policy=make,
            config_keys={"generation": frozenset(config_keys(spec))},
            installed=False,
        )
        for module in [name for name in sys.modules if name.startswith(project.package)]:
            del sys.modules[module]


def test_the_backend_keeps_the_quick_clauses(target: Target) -> None:
    clauses = (
        "D2 or D4 or G3 or G4 or G5 or G6 or G7 or G8 or G9 or G11 or G13 or G16 or R2 or R14 or S3"
    )
    checks = select([], clauses)
    report = run(target, Settings(), checks, selection=clauses)
    bad = [f"{o.check}: {o.message}" for o in report.outcomes if o.status.bad]
    assert report.verdict is Verdict.PASSED, bad


@pytest.mark.parametrize("left_out", [0, 1])
def test_the_report_of_a_class_with_every_check_is_of_the_whole_suite(
    tmp_path: Path, left_out: int
) -> None:
    checks = profile("mine")[left_out:]
    outcomes = [Outcome(c.id, c.title, Status.PASSED, 0.0, "") for c in checks]
    options = {"rl_report": tmp_path / "report.json", "rl_backend": None}
    option = SimpleNamespace(keyword="", markexpr="")
    session: Any = SimpleNamespace(
        config=SimpleNamespace(
            getoption=options.get, option=option, invocation_params=SimpleNamespace(args=())
        ),
        exitstatus=0,
        shouldstop=False,
        shouldfail=False,
    )
    finish_session(session, {("mine", "cpu", "float32"): outcomes}, {}, 1.0)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["selection"] == ("the classes that were collected" if left_out else "")


# -- the tutorial ----------------------------------------------------------------------------------


@pytest.fixture
def tutorial() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tutorial", ROOT / "tests" / "tutorial.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["tutorial"] = module
    spec.loader.exec_module(module)
    return module


def test_what_the_tutorial_shows_is_in_the_project(tmp_path: Path, tutorial: ModuleType) -> None:
    project = Project.named("mine")
    reader = tutorial.Reader(project.write(tmp_path), tmp_path / "state")
    shown = [b for b in tutorial.blocks(TUTORIAL.read_text()) if b.title and not b.how]
    assert len(shown) > 10
    for block in shown:
        reader.follow(block)
    # What it breaks it mends.
    for path, text in project.files().items():
        assert (tmp_path / project.distribution / path).read_text() == text


def test_a_tutorial_that_says_what_is_not_so_is_found_out(
    tmp_path: Path, tutorial: ModuleType
) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    reader = tutorial.Reader(tmp_path, tmp_path / "state")
    console = "```console\n$ export X=3\n$ echo one $X\none ...\n```\n\n"
    page = console + '```text title="a.txt"\n{}\n```\n'
    for block in tutorial.blocks(page.format("two")):
        reader.follow(block)
    (long,) = tutorial.blocks("<!-- tutorial: long -->\n```console\n$ false\n```\n")
    tutorial.Reader(tmp_path, tmp_path / "other", short=True).follow(long)
    with pytest.raises(tutorial.TutorialError, match="exited with 1"):
        reader.follow(long)
    wrong = tutorial.blocks(page.format("three"))[1]
    with pytest.raises(tutorial.TutorialError, match=r"not in a\.txt"):
        reader.follow(wrong)
    for text, problem in (("$ false\n", "exited with 1"), ("$ echo a\nb\n", "did not print 'b'")):
        (block,) = tutorial.blocks(f"```console\n{text}```\n")
        with pytest.raises(tutorial.TutorialError, match=problem):
            reader.follow(block)
    with pytest.raises(tutorial.TutorialError, match="fences"):
        tutorial.blocks("```console nonsense\n$ false\n```\n")
    with pytest.raises(tutorial.TutorialError, match="2 times"):
        tutorial.patched("a\na\n", "-a\n+b\n")
