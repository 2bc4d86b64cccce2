"""The engine's process, seen from the backend: started, called, and never left behind."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from contextlib import suppress
from typing import IO, TYPE_CHECKING, Any

from rl_core.errors import DeadlineError, PluginError, WorkerDiedError
from rl_vllm.forkserver import Forked, ForkServer
from rl_vllm.host import SOCKETS, VLLMS_SOCKETS
from rl_vllm.shared_memory import SharedMemory
from rl_vllm.wire import Reply, Request, decode, encode, raised

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from multiprocessing.connection import Connection

    from rl_vllm.wire import Row

__all__ = ["EngineBusyError", "EngineProcess"]

#: Seconds without a sign of life after which an engine that generates counts as hung.
SILENCE_S = 300.0
#: Seconds for an engine to end by itself.
_GRACE_S = 20.0
_LOOK_S = 0.2
_TAIL = 4000
_LONGEST = 50


class EngineBusyError(DeadlineError):
    """A call was not even begun in time, because of those before it."""


class EngineProcess:
    """One process that runs :mod:`rl_vllm.host`; it ends with this one, however that ends.

    Calls take turns. Everything the engine prints goes to a file without a name, whose end an
    error shows, or to this process's output.

    Args:
        name: How errors call it.
        environment: All of its variables.
        verbose: Print what the engine prints.
        forked: Fork it from a :class:`~rl_vllm.forkserver.ForkServer`, where that can be done.
    """

    def __init__(
        self, name: str, environment: Mapping[str, str], *, verbose: bool, forked: bool
    ) -> None:
        self.name = name
        self._turn = threading.Lock()
        self._calls = 0
        self._log: IO[bytes] | None = None
        if not verbose:
            self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._pipe, theirs = multiprocessing.Pipe()
        sockets = _directory(environment.get(VLLMS_SOCKETS) or tempfile.gettempdir())
        environment = {**environment, VLLMS_SOCKETS: sockets, SOCKETS: sockets}
        log = None if self._log is None else self._log.fileno()
        forked = forked and hasattr(os, "pidfd_open")
        self._server: ForkServer | None = None
        try:
            with theirs:
                self._server = ForkServer.obtain(environment, log) if forked else None
                self._process = self._start(theirs.fileno(), log, environment)
        except BaseException:
            self._pipe.close()
            if self._server is not None:
                self._server.release()
            shutil.rmtree(sockets, ignore_errors=True)
            raise
        self._left: list[SharedMemory] = []
        self._owned = (self._process, self._pipe, self._server, sockets, self._left, os.getpid())
        self._finish = weakref.finalize(self, _end, *self._owned, 0.0)

    def _start(
        self, end: int, log: int | None, environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes] | Forked:
        if self._server is not None:
            return self._server.fork(end, log, environment)
        return subprocess.Popen(  # noqa: S603 - our own module
            [sys.executable, "-m", "rl_vllm.host", str(end), str(os.getpid())],
            env=dict(environment),
            pass_fds=[end],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # an interrupt is for this process, which tells the engine
        )

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def start(self, config: Mapping[str, Any], timeout_s: float) -> Any:
        """Calls ``start``, and notes what must be removed if the engine is killed."""
        try:
            return self.call("start", timeout_s, config=config)
        except PluginError as error:  # of which the log may know more
            error.message += self._tail()
            raise
        finally:
            self._left.append(SharedMemory(self.pid))

    def call(self, method: str, timeout_s: float, **arguments: Any) -> Any:
        """Calls a method of the host.

        Args:
            method: Its name.
            timeout_s: Seconds, the wait for a call before this one included.
            **arguments: Plain values.

        Raises:
            WorkerError: It raised; an instance of the class that it raised, too.
            WorkerDiedError: The process is gone.
            DeadlineError: It did not answer in time; :class:`EngineBusyError` if it was not asked.
        """
        end = time.monotonic() + timeout_s
        if not self._turn.acquire(timeout=timeout_s):
            raise self._busy(method, timeout_s)
        try:
            self._send(Request(method, arguments, self._next()))
            return self._reply(method, end - time.monotonic()).value
        finally:
            self._turn.release()

    def stream(self, method: str, **arguments: Any) -> Iterator[Row]:
        """Calls a method that gives rows; one that is not read to its end is given up."""
        if not self._turn.acquire(timeout=SILENCE_S):
            raise self._busy(method, SILENCE_S)
        done = False
        try:
            self._send(Request(method, arguments, self._next()))
            while not done:
                try:
                    reply = self._reply(method, SILENCE_S)
                except DeadlineError:
                    self.close()  # it hangs: nothing more can be asked of it
                    done = True
                    raise
                except Exception:
                    done = True
                    raise
                done = reply.last
                yield from reply.rows
        finally:
            try:
                if not done:
                    self._give_up(method)
            finally:
                self._turn.release()

    def close(self) -> None:
        """Ends the process and everything it started. Idempotent."""
        if self._finish.detach():
            _end(*self._owned, _GRACE_S)
            if self._log is not None:
                self._log.close()

    def _next(self) -> int:
        self._calls += 1
        return self._calls

    def _give_up(self, method: str) -> None:
        self._send(Request("abort", number=self._calls))
        while not self._reply(method, SILENCE_S).last:
            pass

    def _send(self, request: Request) -> None:
        try:
            self._pipe.send_bytes(encode(request))
        except OSError as error:
            raise self._died() from error

    def _reply(self, method: str, timeout_s: float) -> Reply:
        end = time.monotonic() + timeout_s
        reply = Reply(number=-1)
        while reply.number != self._calls:  # the answer to a call that was given up
            while not self._ready(min(_LOOK_S, max(0.0, end - time.monotonic()))):
                if self._process.poll() is not None and not self._ready(0):
                    raise self._died()
                if time.monotonic() > end:
                    raise self._late(method, timeout_s)
            try:
                reply = decode(self._pipe.recv_bytes(), type=Reply)
            except (EOFError, OSError) as error:
                raise self._died() from error
        if (failure := raised(reply)) is not None:
            raise failure
        return reply

    def _ready(self, seconds: float) -> bool:
        """Whether something can be read, or the process is gone."""
        try:
            return self._pipe.poll(seconds)
        except OSError as error:
            raise self._died() from error

    def _died(self) -> WorkerDiedError:
        code = None
        if not self._pipe.closed:
            try:
                code = self._process.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
        for memory in self._left:  # now, not when somebody closes what is of no use any more
            memory.remove()
        return WorkerDiedError(
            f"{self.name}: the engine's process {self.pid} ended, exit status {code}{self._tail()}",
            fix="build a new backend; with vllm_cfg.verbose the engine's log is shown",
            worker=self.name,
        )

    def _busy(self, method: str, seconds: float) -> EngineBusyError:
        return EngineBusyError(
            f"{self.name}: {method} waited {seconds:.0f} s for the calls before it",
            fix="wait until what is being generated is done, or give it more time",
            seconds=seconds,
        )

    def _late(self, method: str, seconds: float) -> DeadlineError:
        return DeadlineError(
            f"{self.name}: {method} was not answered within {seconds:.0f} s{self._tail()}",
            fix="look at the engine's log (vllm_cfg.verbose), or give it more time",
            seconds=seconds,
        )

    def _tail(self) -> str:
        if self._log is None or self._log.closed:
            return ""
        size = os.fstat(self._log.fileno()).st_size
        tail = os.pread(self._log.fileno(), _TAIL, max(0, size - _TAIL))
        text = tail.decode(errors="replace").strip()
        return f"; its last words:\n{text}" if text else ""


def _directory(parent: str) -> str:
    """A private directory for sockets, whose names have 36 more characters of the 107 there may be.

    The parent is left where it is too long.
    """
    short = parent if len(parent) < _LONGEST and os.path.isdir(parent) else "/tmp"  # noqa: S108
    return tempfile.mkdtemp(prefix="rl-vllm-", dir=short)


def _end(
    process: subprocess.Popen[bytes] | Forked,
    pipe: Connection,
    server: ForkServer | None,
    sockets: str,
    left: list[SharedMemory],
    owner: int,
    grace_s: float,
) -> None:
    """Closes the pipe, which the engine takes for the end, and kills what does not follow."""
    if os.getpid() != owner:  # a forked child ends, not the one whose engine this is
        return
    if not pipe.closed:
        # Forked children of this process may have the pipe, too: closing it would not be seen.
        with suppress(OSError), socket.socket(fileno=os.dup(pipe.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)
        pipe.close()
    try:
        process.wait(grace_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(_GRACE_S)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what it started and did not end
        shutil.rmtree(sockets, ignore_errors=True)
        for memory in left:
            memory.remove()
        if server is not None:
            server.release()
