"""On the CPU, engines' processes are forked from one that has vLLM imported.

Importing vLLM takes some ten seconds, starting an engine of a small model two. So the first
engine of a driver starts ``python -m rl_vllm.forkserver FD PARENT``, which imports and then forks
a process for every engine that asks, until the last one with the same environment is closed.

A process with threads cannot be forked: the server runs no torch operation and has one OpenMP
thread; the number that was wanted is set in the forked process.
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
from contextlib import suppress
from typing import TYPE_CHECKING

from rl_core.errors import WorkerDiedError
from rl_vllm.host import END_LOOK_S, SOCKETS, VLLMS_SOCKETS, run_host

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Forked", "ForkServer", "main"]

#: Variables that a forked process may have of its own: torch sets the second while it is used, and
#: pytest the third for each test.
_OWN = (
    "OMP_NUM_THREADS",
    "TORCHINDUCTOR_CACHE_DIR",
    "PYTEST_CURRENT_TEST",
    SOCKETS,
    VLLMS_SOCKETS,
)
_PRELOADED = ("rl_vllm.engine", "rl_vllm.worker", "vllm.v1.worker.cpu_worker")
_MESSAGE = 1 << 16
#: Seconds for the server to import vLLM on a busy machine, and to answer.
_ANSWER_S = 300.0


class Forked:
    """A forked process, with the part of :class:`subprocess.Popen` that is needed.

    Args:
        pid: Of the process.
        status: Where the server writes the exit status.
    """

    def __init__(self, pid: int, status: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._status = status

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
        if self.returncode is None:
            ready = select.poll()  # select would not take high descriptors
            ready.register(self._status, select.POLLIN)
            if not ready.poll(timeout * 1e3):
                raise subprocess.TimeoutExpired(["rl_vllm.forkserver"], timeout)
            # A server that was killed says nothing; what it forked ends with it.
            self.returncode = int(os.read(self._status, _MESSAGE) or -signal.SIGKILL)
            os.close(self._status)
        return self.returncode

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
    """

    _servers: dict[str, ForkServer] = {}  # noqa: RUF012 - one per environment and process
    _turn = threading.RLock()  # a finalizer may release while its thread obtains

    def __init__(self, environment: Mapping[str, str], log: int | None) -> None:
        self.users = 0
        self._owner = os.getpid()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(_ANSWER_S)
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 - our own module
                [sys.executable, "-m", __name__, str(theirs.fileno()), str(self._owner)],
                env={**environment, "OMP_NUM_THREADS": "1"},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @classmethod
    def obtain(cls, environment: Mapping[str, str], log: int | None) -> ForkServer:
        """The server for an environment, which is started if there is none; then release it."""
        key = json.dumps([os.getpid(), log is None, sorted(_common(environment).items())])
        with cls._turn:
            server = cls._servers.get(key)
            if server is None or server._process.poll() is not None:
                server = cls._servers[key] = cls(_common(environment), log)
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
            self._process.wait(END_LOOK_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def fork(self, pipe: int, log: int | None, environment: Mapping[str, str]) -> Forked:
        """A new process that answers the calls of a pipe.

        Args:
            pipe: The process's end.
            log: Where it prints, or None for where the server does.
            environment: Of the process.

        Raises:
            WorkerDiedError: The server is gone.
        """
        own = {name: environment[name] for name in _OWN if name in environment}
        status, theirs = os.pipe()
        try:
            with self._turn:
                descriptors = [pipe, theirs, *([] if log is None else [log])]
                socket.send_fds(self._control, [json.dumps(own).encode()], descriptors)
                answer = self._control.recv(_MESSAGE)
            if not answer.isdigit():
                raise OSError(answer.decode() or "it ended")
        except OSError as error:
            os.close(status)
            raise WorkerDiedError(
                f"the process {self._process.pid}, which imports vLLM, did not fork: {error}",
                fix="look at what it prints with vllm_cfg.verbose",
            ) from error
        finally:
            os.close(theirs)
        return Forked(int(answer), status)


def _common(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in _OWN}


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


def _serve(control: socket.socket, parent: int) -> tuple[dict[str, str], list[int]] | None:
    """Forks until the driver is gone; in a forked process, what that was told."""
    children = _Children()
    children.selector.register(control, selectors.EVENT_READ)
    while os.getppid() == parent:
        for key, _ in children.selector.select(END_LOOK_S):
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
            children.add(pid, descriptors.pop(1), json.loads(message)[SOCKETS])
            for descriptor in descriptors:
                os.close(descriptor)
            control.send(str(pid).encode())
    return None


def _become_engine(own: dict[str, str], descriptors: list[int], parent: int) -> None:
    """In a forked process."""
    import torch

    os.setsid()
    pipe, *logs = descriptors
    for log in logs:
        os.dup2(log, sys.stdout.fileno())
        os.dup2(log, sys.stderr.fileno())
        os.close(log)
    os.environ.update(own)
    if "OMP_NUM_THREADS" in own:
        torch.set_num_threads(int(own["OMP_NUM_THREADS"].split(",")[0]))
    run_host(pipe, parent)


def _preload() -> None:
    for module in _PRELOADED:
        try:
            importlib.import_module(module)
        except Exception as error:  # the first call of the engine tells it
            print(f"{module} cannot be imported: {error!r}", file=sys.stderr)
            break
    gc.collect()
    gc.freeze()  # what is forked need not look through all of this, nor copy its pages


def main() -> None:
    """The server."""
    end, parent = map(int, sys.argv[1:])
    server = os.getpid()
    with socket.socket(fileno=end) as control:
        _preload()
        told = _serve(control, parent)
    if told is not None:
        own, descriptors = told
        _become_engine(own, descriptors, server)


if __name__ == "__main__":
    main()
