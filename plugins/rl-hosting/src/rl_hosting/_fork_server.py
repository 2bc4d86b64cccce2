"""The process beside a driver that forks its engines and ends what they leave.

``python -m rl_hosting._fork_server FD DRIVER MODULE...`` imports some modules and forks a process
for every engine that the driver requests, until the last one with the same environment is closed.
Importing an engine can take ten seconds, starting it with a small model two: only the first engine
waits.

It is the parent of every engine, and becomes the parent of every orphan of an engine's processes
(PR_SET_CHILD_SUBREAPER). So it alone knows an engine's exit status, can end its orphans, and does
both also when the driver is killed while the engine is stopped.

A process with threads cannot be forked, because locks that they hold stay locked in the child: the
server runs no torch operation and has one OpenMP thread; the number that was wanted is set in the
forked process. Nor can one that has used a GPU, because a child cannot use its context.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import resource
import selectors
import signal
import socket
import sys
import time
from contextlib import suppress
from typing import Any

import psutil

from rl_hosting._engine_host import SOCKETS, run_host
from rl_hosting._leftovers import end_session, kill
from rl_hosting._shared_memory import MemoryWatch, remove_made, save_made
from rl_hosting._timing import MEMORY_POLL_S, PARENT_POLL_S

__all__ = ["MESSAGE", "main"]

#: Bytes of a request, which is one message.
MESSAGE = 1 << 16
#: Bytes that a log may take on the disk, and those at its end that are kept when it takes more.
_LOG_BYTES, _KEPT_BYTES = 32 << 20, 1 << 16
#: Bytes of a block of a file, as stat counts them.
_BLOCK = 512
#: Descriptors that an engine needs here, and those that are kept for the server's own work.
_DESCRIPTORS, _SPARE = 3, 8
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
        self.made = set[int]()  # inodes of its shared memory

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
        control: The socket on which the driver requests engines.
        driver: The driver's process.
    """

    def __init__(self, control: socket.socket, driver: psutil.Process) -> None:
        self._control = control
        self._driver = driver
        self._children: dict[int, _Child] = {}
        self._watch = MemoryWatch()
        self._selector = selectors.PollSelector()  # epoll would be shared by what is forked
        self._selector.register(control, selectors.EVENT_READ)
        if self._watch.events >= 0:
            self._selector.register(self._watch.events, selectors.EVENT_READ)

    def serve(self) -> tuple[dict[str, Any], int, int] | None:
        """Serves until the driver has ended, or has closed the socket.

        Returns:
            None in the server. In a process that was forked, the request for it, and the
            descriptors of its socket and its log.
        """
        looked = 0.0
        while os.getppid() == self._driver.pid:
            patience = MEMORY_POLL_S if self._watch.undecided else PARENT_POLL_S
            for key, _ in self._selector.select(patience):
                if key.data is not None:
                    self._reap(key.data)
                elif key.fileobj is self._control:
                    message, descriptors, _, _ = socket.recv_fds(
                        self._control, MESSAGE, _DESCRIPTORS
                    )
                    if not message:
                        self._end()
                        return None
                    if forked := self._answer(message, descriptors):
                        return forked
            self._look(at_once=False)
            if time.monotonic() - looked < PARENT_POLL_S:
                continue
            looked = time.monotonic()
            for child in self._children.values():
                child.trim()
            with suppress(OSError):  # no descriptor is left for it: the limit was lowered
                self._reap_orphans()
        self._end()
        return None

    def _look(self, *, at_once: bool = True) -> None:
        """Takes note of the shared memory that engines have made."""
        for pid, made in self._watch.look(self._children, at_once=at_once).items():
            self._children[pid].made |= made
            save_made(self._children[pid].sockets, made)

    def _answer(
        self, message: bytes, descriptors: list[int]
    ) -> tuple[dict[str, Any], int, int] | None:
        """Handles a request. The driver gets the error if it fails; other engines go on."""
        pid = -1
        try:
            request = json.loads(message)
            if "kill" in request:
                self._look()  # what an engine has is known only while it lives
                if request["kill"] in self._children:
                    os.kill(request["kill"], signal.SIGKILL)
                return None
            limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            used = len(os.listdir("/proc/self/fd"))
            if len(descriptors) < _DESCRIPTORS or used + _SPARE > limit:
                raise OSError(f"it has {used} of {limit} file descriptors in use (ulimit -Hn)")
            end, status, log = descriptors
            pid = os.fork()
            if pid:
                child = _Child(pid, status, log, request["environment"][SOCKETS])
        except (OSError, ValueError) as error:
            if pid > 0:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            for status in descriptors[1:2]:
                _report(status, str(error))
            for descriptor in descriptors:
                os.close(descriptor)
            return None
        if pid == 0:
            os.setsid()
            for other in self._children.values():
                other.close()
            self._selector.close()
            self._watch.close()
            os.close(status)
            return request, end, log
        os.close(end)
        self._children[pid] = child
        self._selector.register(child.ended, selectors.EVENT_READ, child)
        _report(status, str(pid))
        return None

    def _reap(self, child: _Child) -> None:
        """Ends what an engine left and reports its status; for an engine that has ended.

        It is reaped last: as long as it is a zombie, no other process can get its id, which is the
        id of its session.
        """
        self._look()
        end_session(child.pid, child.sockets, child.made)
        del self._children[child.pid]
        self._reap_orphans(child)
        remove_made(child.pid, child.made)  # what orphans in other sessions still had
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
            self._look()
            with suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
            self._reap(child)


def _report(status: int, line: str) -> None:
    with suppress(BrokenPipeError):  # the driver has ended, or closed it
        os.write(status, f"{line}\n".encode())


def _become_engine(
    request: dict[str, Any], end: int, log: int, driver: psutil.Process, files: tuple[int, int]
) -> None:
    """Gives the forked process what the request contains: output, limits, variables, threads."""
    with suppress(OSError, ValueError):  # somebody has lowered it meanwhile
        resource.setrlimit(resource.RLIMIT_NOFILE, files)
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
    # Every engine takes some descriptors here. Those that are forked have the driver's limit again.
    files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files[1], files[1]))
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
        _become_engine(*forked, driver, files)


if __name__ == "__main__":
    main()
