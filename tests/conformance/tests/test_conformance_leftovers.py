"""What counts as left behind, and what is somebody else's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from rl_conformance import leftovers
from rl_conformance.leftovers import Leftovers, adopting_orphans, left_each_time

HOLDER = """
import mmap, sys
with open(sys.argv[1], "r+b") as file:
    mapped = mmap.mmap(file.fileno(), 4096)
print("ready", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def shared() -> Iterator[Path]:
    path = Path(f"/dev/shm/rl-conformance-test-{os.getpid()}")
    yield path
    path.unlink(missing_ok=True)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "_RELEASE_S", 0.1)


@pytest.mark.parametrize("times", [1, 4])
def test_only_what_stays_each_time_is_left_behind(shared: Path, times: int) -> None:
    names = [shared.with_name(f"{shared.name}-{n}") for n in range(times)]
    waiting = iter(names)
    try:
        left = left_each_time(lambda: next(waiting, Path(os.devnull)).write_bytes(bytes(4096)))
        assert (f"shared memory {names[-1].name}" in left) == (times == 4)
    finally:
        for name in names:
            name.unlink()


def test_a_process_that_left_the_tree_is_left_behind() -> None:
    """A daemon: its parent has ended."""
    script = "from subprocess import *; print(Popen(['sleep', '600'], stdout=DEVNULL).pid)"
    with adopting_orphans():
        before = Leftovers.now()
        done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, timeout=60)
        pid = int(done.stdout)
        assert f"process {pid}" in before.wait_until_back(0.1)
        os.kill(pid, signal.SIGKILL)
        assert f"process {pid}" not in before.wait_until_back(30)
    os.waitpid(pid, 0)  # init waits for orphans; who adopts one has to


def test_shared_memory_that_another_program_uses_is_its_own(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared.write_bytes(bytes(4096))
    command = [sys.executable, "-c", HOLDER, str(shared)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        holder.stdout.readline()
        now = Leftovers.now()
        without = replace(now, shared_memory=now.shared_memory - {shared.name})
        assert [what for what in now.beyond(without) if "shared" in what]
        monkeypatch.setattr(psutil.Process, "children", lambda *_, **__: [])  # another's child
        assert now.beyond(without) == []
        holder.stdin.write(b"\n")
        holder.stdin.close()
        holder.wait(30)
        assert [what for what in now.beyond(without) if "shared" in what]


def test_files_that_stay_open_are_counted() -> None:
    before = Leftovers.now()
    with ExitStack() as opened:
        for _ in range(50):  # threads of other tests may close some of theirs
            opened.enter_context(Path(__file__).open())
        assert any("file descriptors" in what for what in before.wait_until_back(0.1))
