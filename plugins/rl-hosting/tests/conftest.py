"""Engines whose server has everything imported, and that nothing is left when a test has ended."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from fake_backend import FakeGeneration, environment, until

from rl_hosting._fork_client import ForkServer

#: Seconds for what is killed to be gone.
GONE_S = 60.0
PRELOAD = ["fake_backend"]
MARK = "RL_HOSTING_TEST"


def processes(mark: str) -> set[psutil.Process]:
    """Those that have a variable of the test's in the environment they began with."""
    found = set()
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != "zombie":
                found.add(process)
        except psutil.Error:
            continue
    return found - {psutil.Process()}


def described(process: psutil.Process) -> str:
    """What it runs, and for whom."""
    try:
        return f"{process} of {process.ppid()}: {' '.join(process.cmdline())[:300]}"
    except psutil.Error:
        return str(process)


@pytest.fixture(scope="session")
def mark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    tmp_path_factory.getbasetemp()  # before anybody changes where temporary files go
    os.environ[MARK] = str(os.getpid())
    yield os.environ[MARK]
    del os.environ[MARK]


@pytest.fixture(scope="session")
def imported(mark: str) -> Iterator[ForkServer]:
    """Keeps the process that has the fake engine imported from test to test."""
    with tempfile.TemporaryFile() as log:
        server = ForkServer.obtain(environment(), log.fileno(), sys.executable, PRELOAD)
        # Popen returns before the kernel shows the environment of what it started: a test would
        # take the server for a process that an engine left.
        until(lambda: server._process.pid in {process.pid for process in processes(mark)})
        yield server
        server.release()


def threads() -> set[str]:
    return {t.name for t in threading.enumerate() if t.name.startswith(("replies", "engine-log"))}


@pytest.fixture(autouse=True)
def nothing_stays_behind(
    mark: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """No process, file, thread or descriptor."""
    if "imported" in request.fixturenames:
        request.getfixturevalue("imported")
    directory = Path(tempfile.mkdtemp(prefix="rlt-", dir="/tmp"))
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    # What a fixture of the module or the session has stays.
    memory, before, reading = set(os.listdir("/dev/shm")), processes(mark), threads()
    yield

    def left() -> list[Any]:
        return [
            *map(described, processes(mark) - before),
            *(n for n in os.listdir("/dev/shm") if n not in memory and "rl-fake" in n),
            *directory.rglob("rl-engine-*"),
            *(threads() - reading),
        ]

    end = time.monotonic() + GONE_S
    while (found := left()) and time.monotonic() < end:
        time.sleep(0.05)
    shutil.rmtree(directory)
    assert not found


@pytest.fixture
def start(imported: ForkServer) -> Iterator[Callable[..., FakeGeneration]]:
    """``start(**config)`` is an engine that is awake; all end with the test."""
    made: list[FakeGeneration] = []

    def build(**config: Any) -> FakeGeneration:
        hosting = {"preload": PRELOAD, **config.pop("hosting", {})}
        made.append(FakeGeneration(hosting=hosting, **config))
        return made[-1]

    yield build
    for engine in made:
        engine.shutdown()
