"""An engine's shared memory, which nobody removes when its processes are killed.

Its workers talk through it. Python's resource tracker, which would remove some of it, is killed
with the others, and of what C++ code makes it never hears.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

__all__ = ["SharedMemory"]

_DIRECTORY = Path("/dev/shm")  # noqa: S108 - where Linux shows it


class SharedMemory:
    """What the processes of a session have mapped at one time.

    Taken when an engine has started and no refit has begun, it is the engine's alone.

    Args:
        session: Its leader's process id.
    """

    def __init__(self, session: int) -> None:
        # Semaphores are mapped under a name that they lose at once: inodes tell what is the same.
        self._inodes: set[int] = set()
        for process in _processes(session):
            with suppress(OSError):  # it has ended
                for line in (process / "maps").read_text(errors="replace").splitlines():
                    _, _, _, _, inode, *path = line.split(maxsplit=5)
                    if path and path[0].startswith(f"{_DIRECTORY}/"):
                        self._inodes.add(int(inode))

    def remove(self) -> None:
        """Removes what is still there."""
        for path in _DIRECTORY.iterdir() if self._inodes else ():
            with suppress(OSError):  # it has gone, or is somebody else's
                if path.lstat().st_ino in self._inodes:
                    path.unlink()


def _processes(session: int) -> list[Path]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if os.getsid(int(process.name)) == session:
                found.append(process)
    return found
