"""What is taken for a moment only is seen, here and in children."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

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
linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux keeps the peaks")


@linux
def test_what_was_given_back_counts() -> None:
    peak = MemoryPeak()
    torch.ones(MUCH, dtype=torch.uint8)
    assert 0.9 * MUCH < peak.resident() < 1.5 * MUCH


@linux
def test_what_was_before_does_not_count() -> None:
    torch.ones(MUCH, dtype=torch.uint8)
    assert MemoryPeak().resident() < MUCH / 2


@linux
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
        child.communicate(b"\n")
    assert peak.resident() < MUCH
