"""Engines' processes that are forked from one that has the engine imported.

Importing an engine can take some ten seconds, starting it with a small model two. So the first
engine of a driver starts ``python -m rl_hosting.forkserver FD PARENT MODULE...``, which imports and
then forks a process for every engine that asks, until the last one with the same environment is
closed.

A process with threads cannot be forked: the server runs no torch operation and has one OpenMP
thread; the number that was wanted is set in the forked process. Nor can one that has used a GPU.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from rl_core.errors import WorkerDiedError
from rl_hosting.host import PARENT_POLL_S, SOCKETS, run_host

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Forked", "ForkServer", "main"]

#: Variables that a forked process may have of its own, besides that of its engine's sockets: its
#: GPUs, which torch looks for when it uses the first, what torch sets meanwhile, and what pytest
#: sets for each test.
_PER_PROCESS = (
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "PYTEST_CURRENT_TEST",
    "TORCHINDUCTOR_CACHE_DIR",
    SOCKETS,
)
_MESSAGE = 1 << 16
#: Seconds for which one of several threads that wait for a process keeps the others waiting.
_LOOK_S = 0.05
#: Seconds for the server to import an engine on a busy machine, and to answer.
_ANSWER_S = 300.0


class Forked:
    """A forked process, with the part of :class:`subprocess.Popen` that is needed. Any thread asks.

    Args:
        pid: Of the process.
        status: Where the server writes the exit status.
    """

    def __init__(self, pid: int, status: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._status = status
        self._turn = threading.Lock()

    def poll(self) -> int | None:
        """The exit status, negative for a signal, or None while it runs."""
        with suppress(subprocess.TimeoutExpired):
            return self.wait(0.0)
        return None

    def wait(self, timeout: float) -> int:
        """The exit status.

        Raises:
            subprocess.TimeoutExpired: It still runs.
        """
        end = time.monotonic() + timeout
        while True:
            left = max(0.0, end - time.monotonic())
            with self._turn:  # of the descriptor, which is closed once it has said it
                if self.returncode is not None:
                    return self.returncode
                ready = select.poll()  # select would not take high descriptors
                ready.register(self._status, select.POLLIN)
                if ready.poll(min(left, _LOOK_S) * 1e3):
                    # A server that was killed says nothing; what it forked ends with it.
                    self.returncode = int(os.read(self._status, _MESSAGE) or -signal.SIGKILL)
                    os.close(self._status)
                    return self.returncode
            if not left:
                raise subprocess.TimeoutExpired(["rl_hosting.forkserver"], timeout)

    def kill(self) -> None:
        """Kills it, if it still runs."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


class ForkServer:
    """The server, seen from the driver. Use :meth:`obtain` and :meth:`release`.

    Args:
        environment: Of the server and of all that it forks.
        log: Where the server and the first process print, or None for this process's output.
        python: Its interpreter.
        preload: Modules that it imports.
    """

    _servers: dict[str, ForkServer] = {}  # noqa: RUF012 - one per environment and process
    _turn = threading.RLock()  # a finalizer may release while its thread obtains

    def __init__(
        self, environment: Mapping[str, str], log: int | None, python: str, preload: Sequence[str]
    ) -> None:
        self.users = 0
        self._owner = os.getpid()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(_ANSWER_S)
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 - our own module
                [python, "-m", __name__, str(theirs.fileno()), str(self._owner), *preload],
                env={**environment, "OMP_NUM_THREADS": "1"},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @classmethod
    def obtain(
        cls,
        environment: Mapping[str, str],
        log: int | None,
        python: str,
        preload: Sequence[str],
    ) -> ForkServer:
        """The server for an environment, which is started if there is none; then release it."""
        common = sorted(_common(environment).items())
        key = json.dumps([os.getpid(), log is None, python, list(preload), common])
        with cls._turn:
            server = cls._servers.get(key)
            if server is None or server._process.poll() is not None:
                server = cls._servers[key] = cls(_common(environment), log, python, preload)
            server.users += 1
            return server

    def release(self) -> None:
        """Gives it up; with its last user it ends."""
        with self._turn:
            self.users -= 1
            if self.users or os.getpid() != self._owner:
                return
            for key in [key for key, server in self._servers.items() if server is self]:
                del self._servers[key]
        self._control.close()
        try:
            self._process.wait(PARENT_POLL_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def fork(
        self, end: int, log: int | None, environment: Mapping[str, str], engine: str, host: str
    ) -> Forked:
        """A new process that answers the calls of a socket.

        Args:
            end: The process's end.
            log: Where it prints, or None for where the server does.
            environment: Of the process.
            engine: ``"module:Class"``.
            host: Likewise, what answers the calls.

        Raises:
            WorkerDiedError: The server is gone.
        """
        told = {"environment": _own(environment), "engine": engine, "host": host}
        message = json.dumps(told).encode()
        status, theirs = os.pipe()
        try:
            with self._turn:
                descriptors = [end, theirs, *([] if log is None else [log])]
                socket.send_fds(self._control, [message], descriptors)
                answer = self._control.recv(_MESSAGE)
            if not answer.isdigit():
                raise OSError(answer.decode() or "it ended")
        except OSError as error:
            os.close(status)
            raise WorkerDiedError(
                f"the process {self._process.pid}, which imports the engine, did not fork: {error}",
                fix="look at what it prints with verbose",
            ) from error
        finally:
            os.close(theirs)
        return Forked(int(answer), status)


def _own(environment: Mapping[str, str]) -> dict[str, str]:
    """What a forked process has of its own; the engine may know its sockets by another name."""
    sockets = environment[SOCKETS]
    return {n: v for n, v in environment.items() if n in _PER_PROCESS or v == sockets}


def _common(environment: Mapping[str, str]) -> dict[str, str]:
    own = _own(environment)
    return {name: value for name, value in environment.items() if name not in own}


# -- the server's own process ----------------------------------------------------------------------


class _Children:
    """The processes that were forked, where each one's exit status is to go, and its sockets."""

    def __init__(self) -> None:
        self.selector = selectors.PollSelector()  # epoll would be shared by what is forked

    def add(self, pid: int, status: int, sockets: str) -> None:
        self.selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, status, sockets))

    def reap(self, key: selectors.SelectorKey) -> None:
        pid, status, sockets = key.data
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        shutil.rmtree(sockets, ignore_errors=True)  # it was killed, and the driver may be, too
        with suppress(BrokenPipeError):
            os.write(status, str(code).encode())
        self._forget(key)

    def forget_all(self) -> None:
        """In a forked process: they are not its own."""
        for key in list(self.selector.get_map().values()):
            if key.data is not None:
                self._forget(key)
        self.selector.close()

    def _forget(self, key: selectors.SelectorKey) -> None:
        self.selector.unregister(key.fileobj)
        os.close(key.fd)
        os.close(key.data[1])


def _serve(control: socket.socket, parent: int) -> tuple[dict[str, Any], list[int]] | None:
    """Forks until the driver is gone; in a forked process, what that was told."""
    children = _Children()
    children.selector.register(control, selectors.EVENT_READ)
    while os.getppid() == parent:
        for key, _ in children.selector.select(PARENT_POLL_S):
            if key.data is not None:
                children.reap(key)
                continue
            message, descriptors, _, _ = socket.recv_fds(control, _MESSAGE, 3)
            if not message:
                return None
            try:
                pid = os.fork()
            except OSError as error:  # others live on
                for descriptor in descriptors:
                    os.close(descriptor)
                control.send(f"fork: {error}".encode())
                continue
            if pid == 0:
                children.forget_all()
                os.close(descriptors.pop(1))
                return json.loads(message), descriptors
            sockets = json.loads(message)["environment"][SOCKETS]
            children.add(pid, descriptors.pop(1), sockets)
            for descriptor in descriptors:
                os.close(descriptor)
            control.send(str(pid).encode())
    return None


def _become_engine(told: dict[str, Any], descriptors: list[int], parent: int) -> None:
    """In a forked process."""
    import torch

    os.setsid()
    end, *logs = descriptors
    own = told["environment"]
    for log in logs:
        os.dup2(log, sys.stdout.fileno())
        os.dup2(log, sys.stderr.fileno())
        os.close(log)
    os.environ.update(own)
    if "OMP_NUM_THREADS" in own:
        torch.set_num_threads(int(own["OMP_NUM_THREADS"].split(",")[0]))
    run_host(end, parent, told["engine"], told["host"])


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
    server = os.getpid()
    with socket.socket(fileno=int(end)) as control:
        _preload(modules)
        forked = _serve(control, int(parent))
    if forked is not None:
        told, descriptors = forked
        _become_engine(told, descriptors, server)


if __name__ == "__main__":
    main()
