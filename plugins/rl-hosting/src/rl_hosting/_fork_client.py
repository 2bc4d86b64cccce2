"""A fork server, seen from the driver."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from rl_core.errors import ConfigError, DeadlineError, WorkerDiedError
from rl_hosting._fork_server import MESSAGE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["ForkServer", "Forked", "per_process"]

#: Variables that a forked process may have of its own: its GPUs, which torch looks for when it uses
#: the first, what torch sets meanwhile, and what pytest sets.
_PER_PROCESS = (
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "PYTEST_CURRENT_TEST",
    "TORCHINDUCTOR_CACHE_DIR",
)
#: Seconds for a server that is given up to end what it has.
_END_S = 3.0
_PID, _STATUS = 1, 2


class Forked:
    """An engine's process, with the part of :class:`subprocess.Popen` that is needed.

    Any thread may call.

    Args:
        status: Where the server writes a line when the process has begun, and one when it and all
            that it left has ended.
        server: Its process.
    """

    def __init__(self, status: int, server: subprocess.Popen[bytes]) -> None:
        self.pid = 0
        self.returncode: int | None = None
        self.lost = False
        self._status = status
        self._server = server
        self._said = b""
        self._guard = threading.Lock()
        os.set_blocking(status, False)

    def begin(self, timeout_s: float) -> None:
        """Waits until it is forked.

        Raises:
            WorkerDiedError: It could not be.
            DeadlineError: The server is busy importing, or hangs.
        """
        said = self._heard(_PID, timeout_s)
        if said is not None and said.isdigit():
            self.pid = int(said)
        elif said is None:
            raise DeadlineError(
                f"the process {self._server.pid}, which imports the engine, did not fork within "
                f"{timeout_s:.0f} s",
                fix="look at the log for what it imports, or give it more time",
                seconds=timeout_s,
            )
        else:
            raise WorkerDiedError(
                f"the process {self._server.pid}, which imports the engine, did not fork: "
                f"{said or 'it ended'}",
                fix="look at the log for why; rl-hosting must be installed there",
            )

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
            said = self._heard(_STATUS, timeout)
            if said is None:
                raise subprocess.TimeoutExpired(["rl_hosting._fork_server"], timeout)
            # A server that was killed says nothing; what it forked ends with it.
            self.lost = not said
            self.returncode = int(said or -signal.SIGKILL)
        return self.returncode

    def kill(self) -> None:
        """Kills it, if it still runs."""
        if self.pid and self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Nobody asks any more."""
        with self._guard:
            if self._status >= 0:
                os.close(self._status)
            self._status = -1

    def _heard(self, line: int, timeout_s: float) -> str | None:
        """A line of the server's, empty if it will not come, None if it has not."""
        end = time.monotonic() + timeout_s
        while True:
            with self._guard:
                ended = self._status < 0
                with suppress(BlockingIOError):
                    while not ended and self._said.count(b"\n") < line:
                        new = os.read(self._status, MESSAGE)
                        self._said += new
                        ended = not new
                said, status = self._said.split(b"\n"), self._status
            if len(said) > line:
                return said[line - 1].decode(errors="replace")
            if ended:
                return ""
            left = end - time.monotonic()
            if left <= 0:
                return None
            ready = select.poll()  # select would not take high descriptors
            ready.register(status, select.POLLIN)
            ready.poll(min(left, 1.0) * 1e3)


class ForkServer:
    """The server for one environment. Use :meth:`obtain` and :meth:`release`.

    Args:
        environment: Of the server and of all that it forks.
        log: Where the server prints, or None for this process's output.
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
        self._control.settimeout(_END_S)
        arguments = [str(theirs.fileno()), str(self._owner), *preload]
        try:
            with theirs:
                self._process = subprocess.Popen(  # noqa: S603 - our own module
                    [python, "-m", "rl_hosting._fork_server", *arguments],
                    # A process with OpenMP's threads could not be forked.
                    env={**environment, **({"OMP_NUM_THREADS": "1"} if preload else {})},
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # an interrupt is for the driver
                )
        except OSError as error:
            self._control.close()
            raise ConfigError(
                f"{python!r} does not run: {error}",
                fix="python is the interpreter of an environment with rl-hosting and the engine",
                key="python",
            ) from error

    @classmethod
    def obtain(
        cls,
        environment: Mapping[str, str],
        log: int | None,
        python: str,
        preload: Sequence[str],
    ) -> ForkServer:
        """The server for an environment, which is started if there is none; then release it.

        Those whose environments differ only by :func:`per_process` share one.
        """
        own = per_process(environment)
        shared = {name: value for name, value in environment.items() if name not in own}
        key = json.dumps([os.getpid(), python, list(preload), sorted(shared.items())])
        with cls._turn:
            server = cls._servers.get(key)
            if server is None or server._process.poll() is not None:
                server = cls._servers[key] = cls(shared, log, python, preload)
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
        with suppress(OSError):  # it is gone
            self._control.shutdown(socket.SHUT_RDWR)  # a forked child has it, too
        self._control.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def fork(
        self, end: int, log: int, environment: Mapping[str, str], engine: str, host: str
    ) -> Forked:
        """Asks for a process that answers the calls of a socket.

        Args:
            end: The process's end.
            log: Where it prints.
            environment: What the process has besides the server's.
            engine: ``"module:Class"``.
            host: Likewise, what answers the calls.

        Raises:
            WorkerDiedError: The server is gone.
        """
        told = {"environment": dict(environment), "engine": engine, "host": host}
        message = json.dumps(told).encode()
        status, theirs = os.pipe()
        try:
            socket.send_fds(self._control, [message], [end, theirs, log])
        except TimeoutError as error:
            os.close(status)
            raise DeadlineError(
                f"the process {self._process.pid}, which imports the engine, takes no request",
                fix="it may be stopped; end it, and build the backend again",
                seconds=_END_S,
            ) from error
        except OSError:  # it has ended: the pipe says so
            pass
        finally:
            os.close(theirs)
        return Forked(status, self._process)


def per_process(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of which processes of one server may have values of their own."""
    return {name: value for name, value in environment.items() if name in _PER_PROCESS}
