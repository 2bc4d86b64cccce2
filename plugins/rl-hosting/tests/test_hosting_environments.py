"""An engine in another environment, with its own interpreter; and the example of the README."""

from __future__ import annotations

import itertools
import os
import re
import resource
import subprocess
import sys
import venv
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import psutil
import pytest
from fake_backend import FakeGeneration, environment, prompts

import rl_backends
import rl_core
import rl_hosting
from rl_core.errors import (
    ConfigError,
    DeadlineError,
    IncompatiblePluginError,
    RLError,
    WorkerDiedError,
)
from rl_hosting import _leftovers
from rl_hosting._process import HostedProcess

if TYPE_CHECKING:
    from collections.abc import Callable

README = Path(__file__).parents[1] / "README.md"
OURS = [
    str(Path(module.__file__).parents[1])
    for module in (rl_core, rl_backends, rl_hosting)
    if module.__file__
]


@pytest.fixture(scope="module")
def make_environment(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """``make_environment(paths)`` is the interpreter of an environment that finds them."""

    def make(*paths: str) -> str:
        root = tmp_path_factory.mktemp("environment")
        venv.create(root, with_pip=False, symlinks=True)
        [packages] = root.glob("lib/python*/site-packages")
        (packages / "found.pth").write_text("".join(f"{path}\n" for path in paths))
        return str(root / "bin" / "python")

    return make


def distributions() -> list[str]:
    """Where everything that is installed here is."""
    return [path for path in sys.path if "site-packages" in path]


def pretend(directory: Path, name: str, version: str) -> str:
    """A distribution that says it is of a version."""
    found = directory / f"{name.replace('-', '_')}-{version}.dist-info"
    found.mkdir(parents=True)
    (found / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return str(directory)


def build(python: str, **hosting: Any) -> FakeGeneration:
    return FakeGeneration(hosting={"python": python, **hosting})


def test_an_engine_of_another_environment(make_environment, tmp_path):
    python = make_environment(*OURS, *distributions())
    engine = build(python)
    try:
        assert engine.generate(prompts(5))["output_ids"].tolist() == [[5, 6, 7, 8, 9]]
        exe = os.readlink(f"/proc/{engine.pid}/exe")
        assert exe == os.path.realpath(python)
        assert Path(f"/proc/{engine.pid}/cmdline").read_text().split("\0")[0] == python
    finally:
        engine.shutdown()


@pytest.mark.parametrize("name", ["rl-core", "rl-backends", "rl-hosting"])
def test_another_release_there_is_refused(make_environment, tmp_path, name):
    python = make_environment(pretend(tmp_path, name, "9.9"), *OURS, *distributions())
    with pytest.raises(IncompatiblePluginError, match=rf"{python} has {name} 9\.9, this process"):
        build(python)


def test_an_environment_without_rl_hosting_is_named(make_environment):
    python = make_environment()
    with pytest.raises(WorkerDiedError, match="did not fork") as caught:
        build(python)
    assert "rl_hosting" in caught.value.details["log"]
    assert "No module named" in caught.value.message
    fix = str(caught.value.fix)
    assert f"{python} -m pip install" in fix
    assert [name in fix for name in ("core", "rl-backends", "rl-hosting")] == [True] * 3


@pytest.mark.parametrize("python", ["/nowhere/python", "/etc/passwd", "/tmp"])
def test_an_interpreter_that_does_not_run_is_refused(python):
    with pytest.raises(ConfigError, match=python):
        build(python)


def test_a_program_that_is_no_interpreter_is_named():
    with pytest.raises(WorkerDiedError, match="did not fork"):
        build("/bin/true")


def test_an_interpreter_that_hangs_is_named(tmp_path):
    hanging = tmp_path / "python"
    hanging.write_text("#!/bin/sh\nexec sleep 600\n")
    hanging.chmod(0o755)
    with pytest.raises(DeadlineError, match="did not fork"):
        build(str(hanging), start_timeout_s=0.5)


@pytest.mark.parametrize(
    "engine", ["nowhere:Engine", "fake_engine:Nothing", "fake_engine:DataError", "json:JSONDecoder"]
)
def test_an_engine_that_is_none_is_named(start: Callable[..., Any], engine):
    with pytest.raises(RLError, match=f"{engine}|{engine.partition(':')[2]}"):
        start(engine=engine)


def test_an_environment_without_variables(imported):
    python_path = os.pathsep.join([environment()["PYTHONPATH"], *OURS])
    engine = FakeGeneration(hosting={"environment": {"PYTHONPATH": python_path}})
    try:
        assert engine.generate(prompts(5)).size == 1
    finally:
        engine.shutdown()


@pytest.mark.full
def test_the_example_of_the_readme_runs(tmp_path):
    for name, code in re.findall(
        r"```python\n# (\w+\.py)\n(.*?)```", README.read_text(), re.DOTALL
    ):
        (tmp_path / name).write_text(code)
    done = subprocess.run(
        [sys.executable, "example.py"], cwd=tmp_path, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    [said] = re.findall(r"```text\n(.*?)```", README.read_text(), re.DOTALL)
    assert done.stdout == said


def test_engines_share_what_is_imported_unless_their_environments_differ():
    engines = []

    def server(sockets: str = "SOME_SOCKETS", **variables: str) -> int:
        given = {**environment(), "EMPTY": "", sockets: "", **variables}
        engine = HostedProcess("one", "fake_engine:FakeEngine", given, sockets=sockets)
        engines.append(engine)
        engine._process.wait_for_fork(30.0)
        return psutil.Process(engine._process.pid).ppid()

    first = server()
    assert server("OTHER_SOCKETS") == server(CUDA_VISIBLE_DEVICES="1") == first
    assert server(EMPTY="no") != first
    for engine in engines:
        engine.close()


def test_the_directory_of_a_driver_that_was_killed_is_removed_and_no_other(imported, tmp_path):
    killed, unlocked, young, full = (tmp_path / f"rl-engine-{n}" for n in "abcd")
    for directory in (killed, unlocked, young, full):
        directory.mkdir()
    (killed / "in-use").touch()
    (full / "made before there were locks").touch()
    environment_here = {**environment(), "SOME_SOCKETS": str(tmp_path)}
    for directory in (killed, unlocked, full):
        os.utime(directory, (0, 0))
    with mock.patch.object(_leftovers, "_LONGEST_PARENT", 200):
        engines = []
        for _ in range(2):
            engine = HostedProcess(
                "one", "fake_engine:FakeEngine", environment_here, sockets="SOME_SOCKETS"
            )
            os.utime(engine._owned[3], (0, 0))  # in use, however old
            engines.append(engine)
    assert {*tmp_path.iterdir()} == {young, full, *(Path(e._owned[3]) for e in engines)}
    for engine in engines:
        engine.close()
    assert {*tmp_path.iterdir()} == {young, full}


def test_a_directory_is_kept_as_long_as_the_engine_of_a_killed_driver_has_it(tmp_path):
    directory = tmp_path / "rl-engine-x"
    directory.mkdir()
    driver, engine = (_leftovers.lock_directory(str(directory)) for _ in range(2))
    os.utime(directory, (0, 0))
    driver.close()
    _leftovers._remove_unused(directory)
    assert directory.exists()
    engine.close()
    _leftovers._remove_unused(directory)
    assert not directory.exists()


def limit_with(room: int) -> int:
    """The least limit of descriptors under which so many numbers are free."""
    taken = {int(number) for number in os.listdir("/proc/self/fd")}
    free = (number for number in itertools.count() if number not in taken)
    return next(itertools.islice(free, room, None))


def test_a_driver_without_descriptors_is_told_so(start):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    for room in range(4):
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit_with(room), limits[1]))
        try:
            with pytest.raises(ConfigError, match="Too many open files"):
                start()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert len(os.listdir("/proc/self/fd")) == used


def test_a_directory_that_cannot_be_made_is_named(start):
    with (
        mock.patch("tempfile.mkdtemp", side_effect=OSError("No space left on device")),
        pytest.raises(ConfigError, match="No space left"),
    ):
        start()
