"""A driver that ends, however it does, takes its engine with it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from fake_backend import HERE, until

from rl_hosting._leftovers import kill


def is_alive(process: psutil.Process) -> bool:
    """A zombie is somebody else's to reap."""
    with suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


class Driver:
    def __init__(self, moment: str, act: str = "") -> None:
        self.process = subprocess.Popen(
            [sys.executable, f"{HERE}/light_driver.py", moment, act],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self.process.stdout is not None
        engine, server, self.sockets = json.loads(self.process.stdout.readline())
        self.children: list[psutil.Process] = []
        self.engine, self.server = psutil.Process(engine), psutil.Process(server)

    def end(self, number: int) -> None:
        """Its own children, of which hosting knows nothing, live on: as long as the driver's socket
        is theirs, too."""
        with suppress(psutil.NoSuchProcess):
            children = psutil.Process(self.process.pid).children()
            self.children += [child for child in children if child != self.server]
        self.process.send_signal(number)
        self.process.wait(30)

    def is_gone(self) -> bool:
        return not any(map(is_alive, (self.engine, self.server))) and not os.path.exists(
            self.sockets
        )


@pytest.fixture
def drive(mark: str) -> Iterator[type[Driver]]:
    made: list[Driver] = []

    def build(*given: str) -> Driver:
        made.append(Driver(*given))
        return made[-1]

    yield build
    for driver in made:
        driver.end(signal.SIGKILL)
        driver.process.stdout.close()
        kill(driver.children)


MOMENTS = [
    "handshake", "start", "idle", "submit", "step", "decoding", "large", "sleep", "call_workers",
    "forked", "child", "shutdown",
]  # fmt: skip
HANGS = {"start", "submit", "step", "sleep", "call_workers", "shutdown"}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_driver_that_is_killed_takes_its_engine_with_it(drive, moment):
    driver = drive(moment, "hang" if moment in HANGS else "")
    driver.end(signal.SIGKILL)
    until(driver.is_gone, "the end of the engine")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_driver_that_is_told_to_end_takes_its_engine_with_it(drive, number):
    driver = drive("decoding")
    driver.end(number)
    until(driver.is_gone, "the end of the engine")


@pytest.mark.parametrize("moment", ["exit", "raises"])
def test_a_driver_that_ends_by_itself_takes_its_engine_with_it(drive, moment):
    driver = drive(moment)
    driver.process.wait(30)
    until(driver.is_gone, "the end of the engine")


@pytest.mark.parametrize("stopped", ["engine", "server"])
def test_a_driver_takes_what_is_stopped_with_it(drive, stopped):
    driver = drive("decoding")
    getattr(driver, stopped).suspend()
    driver.end(signal.SIGKILL)
    until(driver.is_gone, "the end of the engine")


def test_a_driver_that_is_stopped_for_a_while_keeps_its_engine(drive):
    driver = drive("decoding")
    driver.process.send_signal(signal.SIGSTOP)
    with pytest.raises(psutil.TimeoutExpired):
        driver.engine.wait(2)
    driver.process.send_signal(signal.SIGCONT)
    assert driver.engine.is_running()


@pytest.mark.parametrize("victim", ["server", "engine"])
def test_a_driver_outlives_its_engine(drive, victim):
    driver = drive("decoding")
    getattr(driver, victim).kill()
    until(lambda: not is_alive(driver.engine), "the end of the engine")
    assert driver.process.poll() is None


@pytest.mark.parametrize("ended", ["engine", "driver"])
def test_what_an_engine_leaves_is_ended_with_it(drive, ended):
    driver = drive("step", "leave")
    memory = Path("/dev/shm") / f"rl-fake-{driver.engine.pid}"
    until(memory.exists, "shared memory")
    time.sleep(1.5)  # the server looks twice a second
    left = driver.engine.children(recursive=True)
    assert len(left) == 3
    if ended == "engine":
        driver.engine.kill()
    else:
        driver.end(signal.SIGKILL)
    until(lambda: not any(map(is_alive, left)), "the end of its children")
    until(lambda: not memory.exists(), "the end of its memory")
