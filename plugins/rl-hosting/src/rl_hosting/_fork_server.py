"""The process beside a driver that forks its engines and ends what they leave.

``python -m rl_hosting._fork_server FD DRIVER MODULE...`` imports some modules and forks a process for
every engine that is asked for, until the last one with the same environment is closed. Importing an
engine can take some ten seconds, starting it with a small model two: only the first engine waits.

It is the parent of every engine, and of whatever an engine's processes leave when they end. So it
alone can tell of what an engine ended, kill what is left in time, and do both when the driver is
killed while the engine is stopped.

A process with threads cannot be forked: the server runs no torch operation and has one OpenMP
thread; the number that was wanted is set in the forked process. Nor can one that has used a GPU.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import psutil

from rl_hosting._engine_host import PARENT_POLL_S, SOCKETS, run_host
from rl_hosting._leftovers import SharedMemory, end_session, kill

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["MESSAGE", "main"]

#: Bytes of a request, which is one message.
MESSAGE = 1 << 16
#: Bytes of a log that are kept when it has grown to the second.
_KEPT, _LOG = 1 << 16, 32 << 20
#: Bytes of a block of a file, as stat counts them.
_BLOCK = 512
#: Seconds in which what is new in /dev/shm is mapped by whose it is.
_MAPPED_S = 3.0
_PR_SET_CHILD_SUBREAPER = 36
#: With the length kept, as the kernel wants it.
_PUNCH_HOLE = 3
_libc = ctypes.CDLL(None)


class _Child:
    """An engine that was forked.

    Args:
        pid: Of its process.
        status: Where the driver reads what becomes of it.
        log: What it prints to.
        sockets: The directory of its sockets.
    """

    def __init__(self, pid: int, status: int, log: int, sockets: str) -> None:
        self.pid = pid
        self.status = status
        self.log = log
        self.sockets = sockets
        self.ended = os.pidfd_open(pid)
        self.memory = SharedMemory(pid)
        self.tell(str(pid))

    def tell(self, what: str) -> None:
        """Writes a line for the driver."""
        _tell(self.status, what)

    def trim(self) -> None:
        """Keeps an engine that prints without end from filling the disk."""
        found = os.fstat(self.log)
        if (
            found.st_blocks * _BLOCK > _LOG
        ):  # the file keeps its length, and whoever writes its place
            begin, length = ctypes.c_longlong(0), ctypes.c_longlong(found.st_size - _KEPT)
            if _libc.fallocate(self.log, _PUNCH_HOLE, begin, length):
                os.ftruncate(self.log, 0)

    def close(self) -> None:
        """Closes its descriptors."""
        for descriptor in (self.ended, self.status, self.log):
            os.close(descriptor)


class _Server:
    """Forks, and reaps.

    Args:
        control: Where requests come from.
        driver: Its process.
    """

    def __init__(self, control: socket.socket, driver: psutil.Process) -> None:
        self._control = control
        self._driver = driver
        self._children: dict[int, _Child] = {}
        self._selector = selectors.PollSelector()  # epoll would be shared by what is forked
        self._selector.register(control, selectors.EVENT_READ)

    def serve(self) -> tuple[dict[str, Any], int, int] | None:
        """Until the driver is gone; in a forked process, what it was told, its socket and log."""
        looked, changed, seen = 0.0, 0.0, set[str]()
        while os.getppid() == self._driver.pid:
            for key, _ in self._selector.select(PARENT_POLL_S):
                if key.data is not None:
                    self._reap(key.data)
                    continue
                message, descriptors, _, _ = socket.recv_fds(self._control, MESSAGE, 3)
                if not message:
                    self._end()
                    return None
                if forked := self._fork(json.loads(message), *descriptors):
                    return forked
            if time.monotonic() - looked < PARENT_POLL_S:
                continue
            looked, before, seen = time.monotonic(), seen, set(_named_memory())
            if seen - before:
                changed = looked
            for child in self._children.values():
                child.trim()
                if looked - changed < _MAPPED_S:
                    child.memory.look()
            self._reap_orphans()
        self._end()
        return None

    def _fork(
        self, told: dict[str, Any], end: int, status: int, log: int
    ) -> tuple[dict[str, Any], int, int] | None:
        try:
            pid = os.fork()
        except OSError as error:  # others live on
            _tell(status, f"fork: {error}")
            for descriptor in (end, status, log):
                os.close(descriptor)
            return None
        if pid == 0:
            os.setsid()
            for other in self._children.values():
                other.close()
            self._selector.close()
            os.close(status)
            return told, end, log
        os.close(end)
        child = self._children[pid] = _Child(pid, status, log, told["environment"][SOCKETS])
        self._selector.register(child.ended, selectors.EVENT_READ, child)
        return None

    def _reap(self, child: _Child) -> None:
        """Ends what a process left while it is a zombie, so that nobody else has its number."""
        end_session(child.pid, child.sockets, child.memory)
        del self._children[child.pid]
        self._reap_orphans(child)
        code = os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])
        self._selector.unregister(child.ended)
        child.tell(str(code))
        child.close()

    def _reap_orphans(self, ended: _Child | None = None) -> None:
        """Reaps what engines left, and kills what left the session of one that has ended.

        It is known by the directory in its environment, or by there being no other engine.
        """
        for orphan in psutil.Process().children():
            with suppress(psutil.Error):
                if orphan.pid in self._children or (ended and orphan.pid == ended.pid):
                    continue
                if orphan.status() == psutil.STATUS_ZOMBIE:
                    orphan.wait(0)
                elif ended and (not self._children or ended.sockets in orphan.environ().values()):
                    kill([orphan, *orphan.children(recursive=True)])

    def _end(self) -> None:
        """Kills everything."""
        for child in list(self._children.values()):
            child.memory.look()
            with suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
            self._reap(child)


def _named_memory() -> list[str]:
    with suppress(OSError):
        return os.listdir("/dev/shm")  # noqa: S108 - where Linux shows it
    return []


def _tell(status: int, what: str) -> None:
    with suppress(BrokenPipeError):  # nobody wants to know
        os.write(status, f"{what}\n".encode())


def _become_engine(told: dict[str, Any], end: int, log: int, driver: psutil.Process) -> None:
    """In a forked process."""
    os.dup2(log, sys.stdout.fileno())
    os.dup2(log, sys.stderr.fileno())
    os.close(log)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    own = told["environment"]
    os.environ.pop("OMP_NUM_THREADS", None)  # the server's
    os.environ.update(own)
    if "torch" in sys.modules:
        import torch

        cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(int((own.get("OMP_NUM_THREADS") or str(cores)).split(",")[0]))
    run_host(end, driver, told["engine"], told["host"])


def _preload(modules: Sequence[str]) -> None:
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:  # the first call of the engine tells it
            print(f"{module} cannot be imported: {error!r}", file=sys.stderr)
            break
    gc.collect()
    gc.freeze()  # what is forked need not look through all of this, nor copy its pages


def main() -> None:
    """The server."""
    end, parent, *modules = sys.argv[1:]
    try:
        driver = psutil.Process(int(parent))
    except psutil.NoSuchProcess:
        return
    # What an engine's processes leave becomes ours.
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    with socket.socket(fileno=int(end)) as control:
        _preload(modules)
        forked = _Server(control, driver).serve()
    if forked is not None:
        _become_engine(*forked, driver)


if __name__ == "__main__":
    main()
