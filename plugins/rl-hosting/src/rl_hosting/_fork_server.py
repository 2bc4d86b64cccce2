"""The process beside a driver that forks its engines and ends what they leave.

``python -m rl_hosting._fork_server FD DRIVER MODULE...`` imports some modules and forks a process
for every engine that is asked for, until the last one with the same environment is closed.
Importing an engine can take ten seconds, starting it with a small model two: only the first engine
waits.

It is the parent of every engine, and becomes the parent of every orphan of an engine's processes
(PR_SET_CHILD_SUBREAPER). So it alone knows an engine's exit status, can end its orphans, and does
both also when the driver is killed while the engine is stopped.

A process with threads cannot be forked, because locks that they hold stay locked in the child: the
server runs no torch operation and has one OpenMP thread; the number that was wanted is set in the
forked process. Nor can one that has used a GPU, whose context a child cannot use.
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
from typing import Any

import psutil

from rl_hosting._engine_host import SOCKETS, run_host
from rl_hosting._leftovers import SessionMemory, end_session, kill
from rl_hosting._timing import NEW_MEMORY_S, PARENT_POLL_S

__all__ = ["MESSAGE", "main"]

#: Bytes of a request, which is one message.
MESSAGE = 1 << 16
#: Bytes that a log may take on the disk, and those at its end that are kept when it takes more.
_LOG_BYTES, _KEPT_BYTES = 32 << 20, 1 << 16
#: Bytes of a block of a file, as stat counts them.
_BLOCK = 512
_PR_SET_CHILD_SUBREAPER = 36
#: FALLOC_FL_PUNCH_HOLE, with which FALLOC_FL_KEEP_SIZE must be set.
_PUNCH_HOLE = 3
_libc = ctypes.CDLL(None)


class _Child:
    """An engine that was forked.

    Args:
        pid: Of its process.
        status: The pipe to the driver, for its id and its exit status.
        log: The file that it prints to.
        sockets: The directory of its sockets.
    """

    def __init__(self, pid: int, status: int, log: int, sockets: str) -> None:
        self.pid = pid
        self.status = status
        self.log = log
        self.sockets = sockets
        self.ended = os.pidfd_open(pid)
        self.memory = SessionMemory(pid)
        _report(status, str(pid))

    def trim(self) -> None:
        """Keeps an engine that prints without end from filling the disk."""
        found = os.fstat(self.log)
        if found.st_blocks * _BLOCK > _LOG_BYTES:
            # The beginning becomes a hole: the file keeps its length, and its writers their place.
            begin, length = ctypes.c_longlong(0), ctypes.c_longlong(found.st_size - _KEPT_BYTES)
            if _libc.fallocate(self.log, _PUNCH_HOLE, begin, length):
                os.ftruncate(self.log, 0)

    def close(self) -> None:
        """Closes its descriptors."""
        for descriptor in (self.ended, self.status, self.log):
            os.close(descriptor)


class _Server:
    """Forks engines, and ends what they leave.

    Args:
        control: The socket on which the driver asks for engines.
        driver: The driver's process.
    """

    def __init__(self, control: socket.socket, driver: psutil.Process) -> None:
        self._control = control
        self._driver = driver
        self._children: dict[int, _Child] = {}
        self._selector = selectors.PollSelector()  # epoll would be shared by what is forked
        self._selector.register(control, selectors.EVENT_READ)

    def serve(self) -> tuple[dict[str, Any], int, int] | None:
        """Serves until the driver is gone, or has closed the socket.

        Returns:
            None in the server. In a process that was forked, the request for it, and the
            descriptors of its socket and its log.
        """
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
            looked, before = time.monotonic(), seen
            with suppress(OSError):
                seen = set(os.listdir("/dev/shm"))  # noqa: S108 - where Linux shows it
            if seen - before:
                changed = looked
            for child in self._children.values():
                child.trim()
                if looked - changed < NEW_MEMORY_S:
                    child.memory.record()
            self._reap_orphans()
        self._end()
        return None

    def _fork(
        self, request: dict[str, Any], end: int, status: int, log: int
    ) -> tuple[dict[str, Any], int, int] | None:
        try:
            pid = os.fork()
        except OSError as error:  # others live on
            _report(status, f"fork: {error}")
            for descriptor in (end, status, log):
                os.close(descriptor)
            return None
        if pid == 0:
            os.setsid()
            for other in self._children.values():
                other.close()
            self._selector.close()
            os.close(status)
            return request, end, log
        os.close(end)
        child = self._children[pid] = _Child(pid, status, log, request["environment"][SOCKETS])
        self._selector.register(child.ended, selectors.EVENT_READ, child)
        return None

    def _reap(self, child: _Child) -> None:
        """Ends what an engine left and reports its status; for an engine that has ended.

        It is reaped last: as long as it is a zombie, no other process can get its id, which is the
        id of its session.
        """
        end_session(child.pid, child.sockets, child.memory)
        del self._children[child.pid]
        self._reap_orphans(child)
        code = os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])
        self._selector.unregister(child.ended)
        _report(child.status, str(code))
        child.close()

    def _reap_orphans(self, ended: _Child | None = None) -> None:
        """Reaps orphans of engines, and kills those of an engine that has ended.

        An orphan that is in no session of an engine is that engine's if its environment has the
        directory of that engine's sockets, or if there is no other engine.
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
            child.memory.record()
            with suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
            self._reap(child)


def _report(status: int, line: str) -> None:
    with suppress(BrokenPipeError):  # the driver is gone, or closed it
        os.write(status, f"{line}\n".encode())


def _become_engine(request: dict[str, Any], end: int, log: int, driver: psutil.Process) -> None:
    """Makes the forked process what was asked for: its output, its variables, its threads."""
    os.dup2(log, sys.stdout.fileno())
    os.dup2(log, sys.stderr.fileno())
    os.close(log)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    own = request["environment"]
    os.environ.pop("OMP_NUM_THREADS", None)  # the server's
    os.environ.update(own)
    if "torch" in sys.modules:
        import torch

        cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(int((own.get("OMP_NUM_THREADS") or str(cores)).split(",")[0]))
    run_host(end, driver, request["engine"], request["host"])


def main() -> None:
    """Runs the server, and in a process that it forks the engine."""
    end, parent, *modules = sys.argv[1:]
    try:
        driver = psutil.Process(int(parent))
    except psutil.NoSuchProcess:
        return
    # Orphans of an engine's processes become this one's children.
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    with socket.socket(fileno=int(end)) as control:
        for module in modules:
            try:
                importlib.import_module(module)
            except Exception as error:  # the engine's first call imports it again, and raises
                print(f"{module} cannot be imported: {error!r}", file=sys.stderr)
                break
        gc.collect()
        gc.freeze()  # collections in a forked process need not copy the pages of all of this
        forked = _Server(control, driver).serve()
    if forked is not None:
        _become_engine(*forked, driver)


if __name__ == "__main__":
    main()
