"""What is taken for a moment only is seen, here and in children."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

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
exact = pytest.mark.skipif(not MemoryPeak().exact, reason="this system keeps no peaks")


@exact
def test_what_was_given_back_counts() -> None:
    peak = MemoryPeak()
    torch.ones(MUCH, dtype=torch.uint8)
    assert 0.9 * MUCH < peak.resident() < 1.5 * MUCH


@exact
def test_what_was_before_does_not_count() -> None:
    torch.ones(MUCH, dtype=torch.uint8)
    assert MemoryPeak().resident() < MUCH / 2


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
    torch.ones(4 * MUCH, dtype=torch.uint8)  # the peak of this process, long ago
    monkeypatch.setattr(memory, "_begin_anew", lambda process: False)
    peak = MemoryPeak()
    torch.ones(MUCH, dtype=torch.uint8)
    assert peak.resident() < MUCH / 2
    kept = torch.ones(MUCH, dtype=torch.uint8)
    assert peak.resident() > 0.9 * MUCH
    del kept
