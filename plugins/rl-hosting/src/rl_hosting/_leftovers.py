"""What an engine's processes leave when they are killed: other processes, and shared memory.

An engine leads a session (``setsid``) of its own. Its workers communicate through shared memory,
which nobody removes when they are killed: Python's resource tracker, which would remove some of
it, is killed with the others, and does not know what C++ code makes.
"""

from __future__ import annotations

import os
import shutil
import signal
from contextlib import suppress
from typing import TYPE_CHECKING

import psutil

from rl_hosting._shared_memory import load_made, remove_made
from rl_hosting._timing import KILL_S

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = ["end_session", "is_in_state", "kill", "session_processes", "stopped_processes"]


def is_in_state(pid: int, state: str) -> bool:
    """Whether a process is there, and in one of psutil's states."""
    with suppress(psutil.Error):
        return bool(psutil.Process(pid).status() == state)
    return False


def session_processes(session: int) -> list[psutil.Process]:
    """The processes of a session, without this one and zombies."""
    found = []
    for pid in psutil.pids():
        with suppress(OSError, psutil.Error):
            if os.getsid(pid) == session and pid != os.getpid():
                process = psutil.Process(pid)
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
    return found


def stopped_processes(session: int) -> list[int]:
    """The ids of those that are stopped, as by SIGSTOP."""
    pids = [process.pid for process in session_processes(session)]
    return [pid for pid in pids if is_in_state(pid, psutil.STATUS_STOPPED)]


def end_session(session: int, sockets: str, made: Collection[int] = ()) -> None:
    """Kills the processes of a session but this one, and removes what would stay behind.

    Args:
        session: Its leader's process id.
        sockets: The directory of its sockets, in which its shared memory may be recorded, too.
        made: Inodes of shared memory that it made.
    """
    made = {*made, *load_made(sockets)}
    remove_made(session, made)  # first: what waits for the processes finds nothing after their end
    shutil.rmtree(sockets, ignore_errors=True)
    while left := session_processes(session):  # they may be starting others
        # At once, Python's resource trackers, too: those remove what a process only attached.
        if not kill(left):
            break  # in the kernel: they end when they leave it
    remove_made(session, made)  # what a process outside of the session still had
    shutil.rmtree(sockets, ignore_errors=True)


def kill(processes: list[psutil.Process]) -> bool:
    """Kills processes and waits for them; whether they are gone."""
    for process in processes:
        with suppress(psutil.Error):
            process.send_signal(signal.SIGKILL)
    return not psutil.wait_procs(processes, KILL_S)[1]
