"""Helpers of OpenMP: whose they are, and that they are gone while somebody else decodes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

#: Of a process, since helpers are made as the first loops run, and threads of other tests count.
PROGRAM = """
import os, time, torch
from rl_backends.torch.decoding import DecodingEngine
from rl_backends.torch.openmp import release_threads

def threads():
    return len(os.listdir("/proc/self/task"))

def until(count):  # the system lists a thread for a moment after it ended
    end = time.monotonic() + 60
    while threads() != count:
        assert time.monotonic() < end, (threads(), count)

def compute():
    torch.ones(1 << 22).exp_()

torch.set_num_threads(3)
alone = threads()
compute()
assert threads() == alone + 2, "torch makes no helpers here"
release_threads()
until(alone)
release_threads()
compute()
assert threads() == alone + 2
engine = DecodingEngine(torch.nn.Module(), None, vocab_size=4, device=torch.device("cpu"))
until(alone)  # those of loading
compute()
engine.release_threads()
until(alone)
compute()
DecodingEngine(torch.nn.Module(), None, vocab_size=4, device=torch.device("meta"))
assert threads() == alone + 2, "nothing of the CPU decodes there"
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads in /proc")
def test_a_thread_that_waits_has_no_helpers():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert not done.returncode, done.stderr
