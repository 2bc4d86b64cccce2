"""A fork server and the processes it forks, as the driver sees them."""

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
from typing import TYPE_CHECKING, Any

import psutil

from rl_core.errors import ConfigError, DeadlineError, WorkerDiedError
from rl_hosting._fork_server import MESSAGE
from rl_hosting._leftovers import is_in_state
from rl_hosting._timing import POLL_S, SERVER_CLOSE_S

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["ForkServer", "ForkedProcess", "per_process"]

#: Variables that may differ between the processes of one server: GPUs, which torch looks for when
#: it uses the first, what torch sets meanwhile, and what pytest sets.
_PER_PROCESS = (
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "PYTEST_CURRENT_TEST",
    "TORCHINDUCTOR_CACHE_DIR",
)
#: The lines that a server writes of a process.
_PID_LINE, _STATUS_LINE = 1, 2


class ForkedProcess:
    """A process that a fork server forked, with the part of :class:`subprocess.Popen` we need.

    Any thread may call.

    Args:
        status: A pipe, to which the server writes a line when the process has begun (its id), and
            one when the process and all that it left have ended (its exit status).
        server: Its server.

    Attributes:
        pid: Its id, once :meth:`wait_for_fork` has returned.
        returncode: Its exit status, negative for a signal, once it is known.
        lost: True if the server ended without writing the status.
    """

    def __init__(self, status: int, server: ForkServer) -> None:
        self.pid = 0
        self.returncode: int | None = None
        self.lost = False
        self._status = status
        self._server = server
        self._received = b""
        self._guard = threading.Lock()
        os.set_blocking(status, False)

    def wait_for_fork(self, timeout_s: float) -> None:
        """Waits until it is forked.

        Raises:
            WorkerDiedError: It could not be.
            DeadlineError: The server is busy importing, or hangs.
        """
        line = self._read_line(_PID_LINE, timeout_s)
        if line is not None and line.isdigit():
            self.pid = int(line)
        elif line is None:
            raise DeadlineError(
                f"process {self._server.pid}, which imports the engine, did not fork within "
                f"{timeout_s:.0f} s",
                fix="look at its log for what it imports, or raise start_timeout_s",
                seconds=timeout_s,
            )
        else:
            raise WorkerDiedError(
                f"process {self._server.pid}, which imports the engine, did not fork: "
                f"{line or 'it has ended'}",
                fix="look at its log; check that rl-hosting is installed for that Python, and that "
                "the limits (ulimit -a) allow one more process and its files",
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
            line = self._read_line(_STATUS_LINE, timeout)
            if line is None:
                raise subprocess.TimeoutExpired(["rl_hosting._fork_server"], timeout)
            # A server that was killed writes nothing; what it forked ends with it.
            self.lost = not line
            self.returncode = int(line or -signal.SIGKILL)
        return self.returncode

    def wait_for_end(self, timeout_s: float) -> None:
        """Waits until it has ended, and what it left is removed unless the server is stopped.

        Raises:
            subprocess.TimeoutExpired: It still runs.
        """
        end = time.monotonic() + timeout_s
        while True:
            with suppress(subprocess.TimeoutExpired):
                self.wait(min(POLL_S, max(0.0, end - time.monotonic())))
                return
            if is_in_state(self._server.pid, psutil.STATUS_STOPPED) and (
                not psutil.pid_exists(self.pid) or is_in_state(self.pid, psutil.STATUS_ZOMBIE)
            ):
                return
            if time.monotonic() >= end:
                raise subprocess.TimeoutExpired(["rl_hosting._fork_server"], timeout_s)

    def kill(self) -> None:
        """Has the server kill it, if it still runs; the server looks at what it has before."""
        if self.pid and self.poll() is None:
            with suppress(OSError):  # it has ended, and with it what it forked
                self._server.ask({"kill": self.pid})

    def close(self) -> None:
        """Closes the pipe. Idempotent."""
        with self._guard:
            if self._status >= 0:
                os.close(self._status)
            self._status = -1

    def _read_line(self, number: int, timeout_s: float) -> str | None:
        """A line of the server's: empty if it will never come, None if it has not come yet."""
        end = time.monotonic() + timeout_s
        while True:
            with self._guard:
                ended = self._status < 0
                with suppress(BlockingIOError):
                    while not ended and self._received.count(b"\n") < number:
                        new = os.read(self._status, MESSAGE)
                        self._received += new
                        ended = not new
                lines, status = self._received.split(b"\n"), self._status
            if len(lines) > number:
                return lines[number - 1].decode(errors="replace")
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

    _servers: dict[str, ForkServer] = {}  # noqa: RUF012 - one for an environment and a process
    # Reentrant: the garbage collector may run a finalizer, which releases, within obtain.
    _turn = threading.RLock()

    def __init__(
        self, environment: Mapping[str, str], log: int | None, python: str, preload: Sequence[str]
    ) -> None:
        self.users = 0
        self._owner = os.getpid()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(SERVER_CLOSE_S)
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
                f"python: {python!r} cannot be started: {error}",
                fix="set python to the interpreter of an environment that has rl-hosting and the "
                "engine",
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

        Environments that differ only by :func:`per_process` share one.
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
        """Ends it with its last user."""
        with self._turn:
            self.users -= 1
            if self.users or os.getpid() != self._owner:
                return
            for key in [key for key, server in self._servers.items() if server is self]:
                del self._servers[key]
        with suppress(OSError):  # it has ended
            # To close it would not be enough: a child that the driver forked has it, too.
            self._control.shutdown(socket.SHUT_RDWR)
        self._control.close()
        try:
            stopped = is_in_state(self.pid, psutil.STATUS_STOPPED)
            self._process.wait(0.0 if stopped else SERVER_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def fork(
        self, end: int, log: int, environment: Mapping[str, str], engine: str, host: str
    ) -> ForkedProcess:
        """Has the server fork a process that answers the calls of a socket.

        Args:
            end: Descriptor of the process's end of the socket.
            log: Descriptor to which it prints.
            environment: The variables that it has besides the server's.
            engine: ``"module:Class"`` of the engine, which the host gets.
            host: ``"module:Class"`` of the object that answers the calls.

        Raises:
            WorkerDiedError: The server has ended.
        """
        request = {"environment": dict(environment), "engine": engine, "host": host}
        status, theirs = os.pipe()
        try:
            self.ask(request, end, theirs, log)
        except TimeoutError as error:
            os.close(status)
            raise DeadlineError(
                f"process {self._process.pid}, which imports the engine, did not take a request "
                f"within {SERVER_CLOSE_S:g} s",
                fix=f"end it (kill -9 {self._process.pid}), and build the backend again",
                seconds=SERVER_CLOSE_S,
            ) from error
        except OSError:  # it has ended: its end of the pipe is closed, and who waits on it fails
            pass
        finally:
            os.close(theirs)
        return ForkedProcess(status, self)

    def ask(self, request: Mapping[str, Any], *descriptors: int) -> None:
        """Sends a request.

        Raises:
            TimeoutError: The server takes none.
            OSError: It has ended.
        """
        socket.send_fds(self._control, [json.dumps(request).encode()], descriptors)

    @property
    def pid(self) -> int:
        """Of its process."""
        return self._process.pid


def per_process(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that may differ between the processes of one server."""
    return {name: value for name, value in environment.items() if name in _PER_PROCESS}
