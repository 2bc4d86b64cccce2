"""What is taken for a moment only is seen, here and in children."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys

import pytest

from rl_conformance import memory
from rl_conformance.memory import MemoryPeak

MUCH = 64 << 20
CHILD = f"""
import sys
print("ready", flush=True)
sys.stdin.readline()
taken = bytearray({MUCH})
taken[::4096] = b"1" * len(taken[::4096])
del taken
print("done", flush=True)
sys.stdin.readline()
"""
#: glibc gives its tensors pages that it has freed and kept.
HEAP = """
import torch
from rl_conformance.memory import MemoryPeak
many = [torch.ones(16_000) for _ in range(2000)]
pin = torch.ones(100)
del many
peak = MemoryPeak(trim=True)
torch.ones(64 << 20, dtype=torch.uint8)
print(peak.resident())
"""
exact = pytest.mark.skipif(not MemoryPeak().exact, reason="this system keeps no peaks")
glibc = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="another libc")


def pages(nbytes: int) -> mmap.mmap:
    """Memory that does not come from an allocator, and goes back as a whole."""
    taken = mmap.mmap(-1, nbytes)
    for start in range(0, nbytes, mmap.PAGESIZE):
        taken[start] = 1
    return taken


@exact
def test_what_was_given_back_counts() -> None:
    peak = MemoryPeak()
    pages(MUCH).close()
    assert 0.9 * MUCH < peak.resident() < 1.5 * MUCH


@exact
def test_what_was_before_does_not_count() -> None:
    pages(MUCH).close()
    assert MemoryPeak().resident() < MUCH / 2


@exact
@glibc
def test_what_is_taken_from_freed_memory_counts() -> None:
    command = [sys.executable, "-c", HEAP]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert 0.9 * MUCH < int(done.stdout) < 1.5 * MUCH


@exact
def test_children_count() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdout.readline()
        peak = MemoryPeak()
        child.stdin.write("\n")
        child.stdin.flush()
        child.stdout.readline()
        assert 0.9 * MUCH < peak.resident() < 1.5 * MUCH
        child.stdin.write("\n")


def test_a_child_that_has_ended_does_not_count() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        peak = MemoryPeak()
        assert child.stdin is not None
        child.stdin.write(b"\n")
        child.stdin.close()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert peak.resident() < MUCH  # it is a zombie
    assert peak.resident() < MUCH


def test_where_no_peak_can_be_had_what_is_kept_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    pages(4 * MUCH).close()  # the peak of this process, long ago
    monkeypatch.setattr(memory, "_begin_anew", lambda process: False)
    peak = MemoryPeak()
    pages(MUCH).close()
    assert peak.resident() < MUCH / 2
    kept = pages(MUCH)
    assert peak.resident() > 0.9 * MUCH
    kept.close()
