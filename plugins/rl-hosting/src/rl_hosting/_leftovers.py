"""What the processes of an engine leave when they are killed: other processes, and shared memory.

An engine leads a session of its own. Its workers talk through shared memory, which nobody removes
when they are killed: Python's resource tracker, which would remove some of it, is killed with the
others, and of what C++ code makes it never hears.
"""

from __future__ import annotations

import os
import shutil
import signal
from contextlib import suppress
from pathlib import Path

import psutil

__all__ = ["SharedMemory", "end_session", "kill", "members", "stopped"]

_DIRECTORY = Path("/dev/shm")  # noqa: S108 - where Linux shows it
_WRITTEN = "shared-memory"
#: Seconds for killed processes to be gone; one that is in the kernel takes its time.
_GONE_S = 2.0
#: Seconds for Python's resource trackers to do what they are there for.
_TRACKER_S = 1.0


class SharedMemory:
    """What the processes of a session have mapped; refits map nothing that has a name.

    Args:
        session: Its leader's process id.
    """

    def __init__(self, session: int) -> None:
        self._session = session
        # Semaphores are mapped under a name that they lose at once: inodes tell what is the same.
        self._inodes: set[int] = set()

    def look(self) -> None:
        """Notes what they have mapped now."""
        pids = [process.pid for process in members(self._session)]
        if self._session == os.getsid(0):
            pids.append(os.getpid())
        for pid in pids:
            with suppress(OSError):  # it has ended
                maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
                for line in maps.splitlines():
                    _, _, _, _, inode, *path = line.split(maxsplit=5)
                    if path and path[0].startswith(f"{_DIRECTORY}/"):
                        self._inodes.add(int(inode))

    def write(self, directory: str) -> None:
        """Writes down what it knows, for whoever removes it once all processes are dead."""
        lines = "".join(f"{inode}\n" for inode in sorted(self._inodes))
        Path(directory, _WRITTEN).write_text(lines)

    def read(self, directory: str) -> None:
        """Learns what was written down there, if something was."""
        with suppress(OSError):
            self._inodes |= {int(line) for line in Path(directory, _WRITTEN).read_text().split()}

    def remove(self) -> None:
        """Removes what is still there of it."""
        for path in _DIRECTORY.iterdir() if self._inodes else ():
            with suppress(OSError):  # it has gone, or is somebody else's
                if path.lstat().st_ino in self._inodes:
                    path.unlink()


def members(session: int) -> list[psutil.Process]:
    """The processes of a session, this one and zombies left out."""
    found = []
    for pid in psutil.pids():
        with suppress(OSError, psutil.Error):
            if os.getsid(pid) == session and pid != os.getpid():
                process = psutil.Process(pid)
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
    return found


def stopped(session: int) -> list[int]:
    """Those of them that are stopped, as by SIGSTOP."""
    found = []
    for process in members(session):
        with suppress(psutil.Error):
            if process.status() == psutil.STATUS_STOPPED:
                found.append(process.pid)
    return found


def end_session(session: int, sockets: str, memory: SharedMemory | None = None) -> None:
    """Kills what is left of a session but this process, and removes what would stay behind.

    Args:
        session: Its leader's process id.
        sockets: The directory of its sockets.
        memory: What is known of its shared memory, besides what it has mapped now.
    """
    memory = memory or SharedMemory(session)
    memory.read(sockets)
    memory.look()
    memory.remove()  # first, so that when they are gone nothing is left
    shutil.rmtree(sockets, ignore_errors=True)
    while left := members(session):  # they may be starting others
        trackers = [process for process in left if _is_tracker(process)]
        if not kill([process for process in left if process not in trackers]):
            break  # in the kernel: they end when they leave it
        kill(psutil.wait_procs(trackers, _TRACKER_S)[1])
    memory.remove()  # what they made meanwhile
    shutil.rmtree(sockets, ignore_errors=True)


def kill(processes: list[psutil.Process]) -> bool:
    """Kills processes and waits for them; whether they are gone."""
    for process in processes:
        with suppress(psutil.Error):
            process.send_signal(signal.SIGKILL)
    return not psutil.wait_procs(processes, _GONE_S)[1]


def _is_tracker(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return any("resource_tracker" in word for word in process.cmdline())
    return False
