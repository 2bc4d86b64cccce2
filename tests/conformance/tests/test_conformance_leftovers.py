"""What counts as left behind, and what is somebody else's."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from rl_conformance import leftovers
from rl_conformance.leftovers import Leftovers

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


def test_shared_memory_that_stays_is_left_behind(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leftovers, "_OF_OTHERS_S", 0.5)
    before = Leftovers.now()
    shared.write_bytes(bytes(4096))
    assert f"shared memory {shared.name}" in before.wait_until_back(0.1)


def test_shared_memory_that_goes_away_in_a_while_is_not(shared: Path) -> None:
    before = Leftovers.now()
    shared.write_bytes(bytes(4096))
    timer = threading.Timer(1.0, shared.unlink)
    timer.start()
    assert f"shared memory {shared.name}" not in before.wait_until_back(5.0)
    timer.join()


def test_shared_memory_that_another_process_uses_is_its_own(shared: Path) -> None:
    shared.write_bytes(bytes(4096))
    command = [sys.executable, "-c", HOLDER, str(shared)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        holder.stdout.readline()
        now = Leftovers.now()
        without = replace(now, shared_memory=now.shared_memory - {shared.name})
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
