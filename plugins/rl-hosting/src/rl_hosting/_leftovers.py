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
from pathlib import Path

import psutil

from rl_hosting._timing import KILL_S, TRACKER_S

__all__ = ["SessionMemory", "end_session", "kill", "session_processes", "stopped_processes"]

_DIRECTORY = Path("/dev/shm")  # noqa: S108 - where Linux shows it
_RECORD = "shared-memory"


class SessionMemory:
    """The shared memory that the processes of a session have mapped; refits map none with a name.

    Args:
        session: Its leader's process id.
    """

    def __init__(self, session: int) -> None:
        self._session = session
        # A semaphore is mapped under a temporary name, and has another one in /dev/shm: inodes tell
        # that both are the same.
        self._inodes: set[int] = set()

    def record(self) -> None:
        """Adds what they have mapped now."""
        pids = [process.pid for process in session_processes(self._session)]
        if self._session == os.getsid(0):
            pids.append(os.getpid())
        for pid in pids:
            with suppress(OSError):  # it has ended
                maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
                for line in maps.splitlines():
                    _, _, _, _, inode, *path = line.split(maxsplit=5)
                    if path and path[0].startswith(f"{_DIRECTORY}/"):
                        self._inodes.add(int(inode))

    def save(self, directory: str) -> None:
        """Writes what is recorded, and was saved before, to a file for :meth:`load`."""
        self.load(directory)
        lines = "".join(f"{inode}\n" for inode in sorted(self._inodes))
        with suppress(FileNotFoundError):  # the session was ended meanwhile
            Path(directory, _RECORD).write_text(lines)

    def load(self, directory: str) -> None:
        """Adds what was saved there, if something was."""
        with suppress(OSError):
            self._inodes |= {int(line) for line in Path(directory, _RECORD).read_text().split()}

    def remove(self) -> None:
        """Removes what is still there of all that is recorded."""
        for path in _DIRECTORY.iterdir() if self._inodes else ():
            with suppress(OSError):  # it has gone, or is somebody else's
                if path.lstat().st_ino in self._inodes:
                    path.unlink()


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
    found = []
    for process in session_processes(session):
        with suppress(psutil.Error):
            if process.status() == psutil.STATUS_STOPPED:
                found.append(process.pid)
    return found


def end_session(session: int, sockets: str, memory: SessionMemory | None = None) -> None:
    """Kills the processes of a session but this one, and removes what would stay behind.

    Args:
        session: Its leader's process id.
        sockets: The directory of its sockets, in which its shared memory may be recorded, too.
        memory: What is known of its shared memory, besides what it has mapped now.
    """
    memory = memory or SessionMemory(session)
    memory.load(sockets)
    memory.record()
    memory.remove()  # first: whoever waits for the processes finds nothing when they are gone
    shutil.rmtree(sockets, ignore_errors=True)
    while left := session_processes(session):  # they may be starting others
        trackers = []
        for process in left:
            with suppress(psutil.Error):
                if any("resource_tracker" in word for word in process.cmdline()):
                    trackers.append(process)
        if not kill([process for process in left if process not in trackers]):
            break  # in the kernel: they end when they leave it
        # A tracker removes what is left of Python's own when all that it served have ended.
        kill(psutil.wait_procs(trackers, TRACKER_S)[1])
    memory.remove()  # what they made meanwhile
    shutil.rmtree(sockets, ignore_errors=True)


def kill(processes: list[psutil.Process]) -> bool:
    """Kills processes and waits for them; whether they are gone."""
    for process in processes:
        with suppress(psutil.Error):
            process.send_signal(signal.SIGKILL)
    return not psutil.wait_procs(processes, KILL_S)[1]
