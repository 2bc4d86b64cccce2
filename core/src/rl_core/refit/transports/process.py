"""Is the process on the other side still there?"""

from __future__ import annotations

import os

from rl_core.refit.messages import Process

__all__ = ["is_alive", "this_process"]


def this_process() -> Process:
    """This process, as others can watch it."""
    pid = os.getpid()
    return Process(pid, _started(pid) or "", _namespace())


def is_alive(process: Process) -> bool:
    """False if the process has ended, even as a zombie or with its number taken by another.

    A process of another PID namespace cannot be seen and counts as alive: deadlines catch it.
    """
    if process.namespace != _namespace():
        return True
    if process.started:
        return _started(process.pid) == process.started
    try:
        os.kill(process.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _started(pid: int) -> str | None:
    """Start time in clock ticks since boot; None without /proc, or if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stat:
            fields = stat.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]
