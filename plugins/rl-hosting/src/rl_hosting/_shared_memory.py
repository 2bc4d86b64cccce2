"""Which files in /dev/shm an engine made, so that they, and no others, are removed after it.

The kernel keeps no record of who made a file there, and a process that has one mapped need not have
made it. But it reports when a file is made and when one is closed (inotify), and a file is not
closed as long as the process that opened it has it open or mapped. So a file that nobody has closed
since it was made, and that processes of one session alone have, was made by one of them.
"""

from __future__ import annotations

import ctypes
import os
import struct
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

__all__ = ["MemoryWatch", "load_made", "remove_made", "save_made"]

_DIRECTORY = "/dev/shm"  # noqa: S108 - where Linux shows it
_RECORD = "shared-memory"
#: Of <sys/inotify.h>.
_CREATE, _CLOSE, _OVERFLOW, _IN_DIRECTORY = 0x100, 0x8 | 0x10, 0x4000, 1 << 30
_EVENT = struct.Struct("iIII")
_CHUNK = 1 << 16
#: Looks after which a new file that no session has is not looked for any more; the kernel reports a
#: file just before its maker has it.
_LOOKS = 3
#: How many times as long as a look nobody looks after it.
_REST = 4
_libc = ctypes.CDLL(None, use_errno=True)


class MemoryWatch:
    """Sees what is made in /dev/shm from now on.

    Where the kernel grants no watch (``fs.inotify.max_user_instances``), nothing is ever found.
    """

    def __init__(self) -> None:
        self._looks: dict[str, int] = {}  # at each new file that nobody has closed
        self._rest_until = 0.0
        self.events: int = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self.events >= 0:
            _libc.inotify_add_watch(self.events, _DIRECTORY.encode(), _CREATE | _CLOSE)

    @property
    def undecided(self) -> bool:
        """Whether to look again soon."""
        return bool(self._looks)

    def look(self, sessions: Collection[int], *, at_once: bool = True) -> dict[int, set[int]]:
        """The inodes of files that were made since the last look, by the session that made them.

        Args:
            sessions: Those of interest.
            at_once: Or else with some time between looks, which read much of /proc.
        """
        self._read()
        begin = time.monotonic()
        if not (self._looks and (at_once or begin >= self._rest_until)):
            return {}
        names, holders = list(self._looks), _holders()
        self._rest_until = time.monotonic() + _REST * (time.monotonic() - begin)
        self._read()  # what was closed before or while holders were looked for
        found: dict[int, set[int]] = {}
        for name in names:
            if (looks := self._looks.get(name)) is None:
                continue
            by: set[int] = set()
            with suppress(OSError):  # it is removed already
                inode = os.lstat(f"{_DIRECTORY}/{name}").st_ino
                by = holders.get(inode, by)
                if len(by) == 1 and by <= set(sessions):
                    [session] = by
                    found.setdefault(session, set()).add(inode)
            self._looks[name] = looks + 1
            if by or looks + 1 == _LOOKS:
                del self._looks[name]
        return found

    def close(self) -> None:
        """Ends it."""
        if self.events >= 0:
            os.close(self.events)

    def _read(self) -> None:
        data = b""
        with suppress(OSError):  # there is no more, or no watch
            while chunk := os.read(self.events, _CHUNK):
                data += chunk
        while data:
            _, mask, _, length = _EVENT.unpack_from(data)
            name = data[_EVENT.size : _EVENT.size + length].rstrip(b"\0")
            data = data[_EVENT.size + length :]
            if mask & _OVERFLOW:  # what was closed meanwhile is not known
                self._looks.clear()
            elif mask & _CREATE and not mask & _IN_DIRECTORY:
                self._looks[os.fsdecode(name)] = 0
            elif mask & _CLOSE:
                self._looks.pop(os.fsdecode(name), None)


def save_made(directory: str, inodes: Collection[int]) -> None:
    """Adds inodes to those that are recorded in a directory, for :func:`load_made`."""
    lines = "".join(f"{inode}\n" for inode in inodes)
    with suppress(OSError), open(f"{directory}/{_RECORD}", "a") as file:  # its session was ended
        file.write(lines)


def load_made(directory: str) -> set[int]:
    """The inodes that are recorded in a directory."""
    with suppress(OSError):
        return {int(line) for line in Path(directory, _RECORD).read_text().split()}
    return set()


def remove_made(session: int, inodes: Collection[int]) -> None:
    """Removes files of a session that no process outside of it has open or mapped."""
    if not inodes:
        return
    holders = _holders()
    for path in Path(_DIRECTORY).iterdir():
        with suppress(OSError):  # somebody removed it
            if (inode := path.lstat().st_ino) in inodes and holders.get(inode, set()) <= {session}:
                path.unlink()


def _holders() -> Mapping[int, set[int]]:
    """By inode, the sessions of the processes that have it open or mapped."""
    found: dict[int, set[int]] = {}
    for pid in psutil.pids():
        with suppress(OSError):  # it has ended, or is another user's
            session = os.getsid(pid)
            for line in Path(f"/proc/{pid}/maps").read_bytes().splitlines():
                if f" {_DIRECTORY}/".encode() in line:
                    found.setdefault(int(line.split(maxsplit=5)[4]), set()).add(session)
            for descriptor in os.listdir(f"/proc/{pid}/fd"):
                with suppress(OSError):
                    if os.readlink(link := f"/proc/{pid}/fd/{descriptor}").startswith(_DIRECTORY):
                        found.setdefault(os.stat(link).st_ino, set()).add(session)
    return found
