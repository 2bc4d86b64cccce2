"""What an engine's processes leave when they are killed: other processes, and shared memory.

An engine leads its own session (``setsid``). Its workers communicate through shared memory,
which nobody removes when they are killed: Python's resource tracker, which would remove some of
it, is killed with the others, and does not know what C++ code makes.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING

import psutil

from rl_core.errors import ConfigError
from rl_hosting._shared_memory import load_made, remove_made
from rl_hosting._timing import KILL_S, YOUNG_S

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = [
    "end_session",
    "is_in_state",
    "kill",
    "lock_directory",
    "make_directory",
    "remove_new_directory",
    "session_processes",
]

_PREFIX = "rl-engine-"
#: Characters of a directory's name: the path of a Unix socket has 107 at most, and engines append
#: up to 36 to that of their directory.
_LONGEST_PARENT = 50
_LOCK = "in-use"


def make_directory(wanted: str) -> tuple[str, IO[str]]:
    """Makes a directory for the sockets of an engine; removes those of killed drivers beside it.

    Args:
        wanted: Where it is made, or ``""`` for where temporary files are.

    Returns:
        Its path, and what :func:`lock_directory` gives.

    Raises:
        ConfigError: It cannot be made.
    """
    parent = "/tmp"  # noqa: S108 - mkdtemp makes a directory that is this user's alone
    try:
        wanted = wanted or tempfile.gettempdir()
        if len(wanted) < _LONGEST_PARENT and os.path.isdir(wanted):
            parent = wanted
        for left in Path(parent).glob(f"{_PREFIX}*"):
            _remove_unused(left)
        directory = tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
        try:
            return directory, lock_directory(directory)
        except OSError:
            os.rmdir(directory)
            raise
    except OSError as error:
        raise ConfigError(
            f"cannot create a directory for an engine's sockets in {parent}: {error}",
            fix="free space there, or set TMPDIR to a short path where this process may write",
            key="TMPDIR",
        ) from error


def lock_directory(directory: str) -> IO[str]:
    """Keeps others from removing it until the file is closed, or all processes with it ended.

    Raises:
        OSError: The directory is removed, or its disk is full.
    """
    lock = open(f"{directory}/{_LOCK}", "a")  # noqa: SIM115 - the caller's
    with suppress(OSError):  # a file system without locks, where nothing is removed either
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return lock


def remove_new_directory(directory: str) -> None:
    """Removes one that nobody has used, also where no descriptor is left, as rmtree needs them."""
    with suppress(OSError):
        os.unlink(f"{directory}/{_LOCK}")
        os.rmdir(directory)


def _remove_unused(directory: Path) -> None:
    """Removes the directory of a killed driver and its engine."""
    with suppress(OSError):  # it is in use, another user's, or removed meanwhile
        found = directory.lstat()
        if found.st_uid != os.geteuid() or time.time() - found.st_mtime < YOUNG_S:
            return
        try:
            with (directory / _LOCK).open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory)
        except FileNotFoundError:
            directory.rmdir()  # its driver was killed before it could lock it


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
    """Kills processes and waits for them; whether they ended."""
    for process in processes:
        with suppress(psutil.Error):
            process.send_signal(signal.SIGKILL)
    return not psutil.wait_procs(processes, KILL_S)[1]
