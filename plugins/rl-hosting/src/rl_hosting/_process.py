"""A process with an engine or a worker in it, as the driver sees it: started, called and ended."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import threading
import time
import weakref
from contextlib import ExitStack, contextmanager, suppress
from copy import copy
from importlib.metadata import version
from socket import socketpair
from typing import IO, TYPE_CHECKING, Any

from rl_core.errors import (
    CapabilityError,
    ConfigError,
    DeadlineError,
    IncompatiblePluginError,
    LifecycleError,
    PluginError,
    RefitError,
    RemoteError,
    RLError,
    WorkerDiedError,
)
from rl_core.install import PROJECT, install_command
from rl_hosting._engine_host import HOST, SOCKETS
from rl_hosting._fork_client import ForkedProcess, ForkServer, per_process
from rl_hosting._inbox import Inbox
from rl_hosting._leftovers import (
    end_session,
    make_directory,
    remove_new_directory,
)
from rl_hosting._log import Log
from rl_hosting._messages import Channel, Hello, Progress, Request, encode, error_of
from rl_hosting._timing import (
    CLOSE_S,
    DRIVER_SEND_S,
    EXIT_STATUS_S,
    KILLED_S,
    LATE_CLOSE_S,
    POLL_S,
)

if TYPE_CHECKING:
    import concurrent.futures
    from collections.abc import Callable, Collection, Generator, Mapping, Sequence

    from rl_backends import Row

__all__ = ["HostedProcess"]


class HostedProcess:
    """A process that a fork server forked for an engine or a worker, and its socket.

    It ends with this process, however that ends. Any thread may call. Everything that it prints
    goes to a file without a name, the end of which is in ``details["log"]`` of every error.

    Args:
        name: How errors call it.
        engine: What its host is given: ``"module:Class"``, an :class:`~rl_hosting.Engine` that can
            be imported there; or a worker's name.
        environment: All of its variables.
        python: Its interpreter, in which rl-hosting and the engine are installed.
        verbose: Print what the engine prints.
        preload: Modules that are imported before the process is forked, and once for all engines
            with this environment. None of them may start threads or use a GPU.
        sockets: The variable that names the directory for the engine's own sockets, if there is
            one.
        host: ``"module:Class"`` of the object that answers the calls there.

    Raises:
        ConfigError: The interpreter does not run, or there is no room or no descriptor left for
            the process's files.
    """

    def __init__(
        self,
        name: str,
        engine: str,
        environment: Mapping[str, str],
        *,
        python: str = sys.executable,
        verbose: bool = False,
        preload: Sequence[str] = (),
        sockets: str = SOCKETS,
        host: str = HOST,
    ) -> None:
        if not hasattr(os, "pidfd_open"):
            raise CapabilityError("rl-hosting needs Linux", fix="use Linux", capability="host")
        self.name = name
        self._python = python
        self._plugin = engine.partition(".")[0].replace("_", "-")
        self._owner = os.getpid()
        self._numbers = itertools.count(1)
        self._ending = threading.Lock()
        self._why = ""
        directory, lock = make_directory(environment.get(sockets, ""))
        own = {sockets: directory, SOCKETS: directory}
        shared = {name: value for name, value in environment.items() if name not in own}
        with ExitStack() as undo:
            undo.callback(remove_new_directory, directory)
            undo.enter_context(lock)
            try:
                self._log = Log(show=verbose)
                undo.callback(self._log.close)
                ours, theirs = socketpair()
                undo.enter_context(ours)
                with theirs:
                    server = ForkServer.obtain(shared, self._log.fileno(), python, preload)
                    undo.callback(server.release)
                    ends = theirs.fileno(), self._log.fileno()
                    process = server.fork(*ends, per_process(environment) | own, engine, host)
            except RLError as error:
                self.with_log(error)
                raise
            except OSError as error:
                raise ConfigError(
                    f"{name}: the files of its process cannot be opened: {error}",
                    fix="raise the limit of open files (ulimit -n), or free space for temporary "
                    "files (TMPDIR)",
                    key="TMPDIR",
                ) from error
            undo.pop_all()
        self._process = process
        self._channel = Channel(ours)
        self._inbox = Inbox()
        self._owned = (process, self._channel, server, directory, lock, self._owner)
        self._finish = weakref.finalize(self, _end, *self._owned, 0.0)
        weakref.finalize(self, self._log.close)
        threading.Thread(
            target=self._inbox.read, args=(self._channel,), name=f"replies-{name}", daemon=True
        ).start()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def start(self, config: Mapping[str, Any], timeout_s: float) -> Any:
        """Waits for the process, and has its host load the model.

        Returns:
            Its facts.

        Raises:
            IncompatiblePluginError: Another release of rl-hosting is installed there.
            WorkerError: The engine refused.
            WorkerDiedError: It ended.
            DeadlineError: It did not start in time.
        """
        end = time.monotonic() + timeout_s
        try:
            try:
                self._process.wait_for_fork(timeout_s)
            except WorkerDiedError as error:
                error.message += self._log_lines()
                if self._python != sys.executable and "No module named" in error.message:
                    plugin = self._plugin if self._plugin in PROJECT else "rl-hosting"
                    error.fix = install_command(plugin, python=self._python)
                raise
            hello: Hello = self._wait(self._inbox.hello, "start", end, timeout_s)
            # One release may read otherwise what another writes.
            for name, theirs in hello.releases.items():
                if theirs != (ours := version(name)):
                    raise IncompatiblePluginError(
                        f"{self.name}: {hello.python} has {name} {theirs}, this process has {ours}",
                        fix=f"install {name} {ours} there, or {theirs} here",
                        version=theirs,
                    )
            return self._call("start", end, timeout_s, {"config": dict(config)})
        except PluginError as error:  # the log may explain it
            self.with_log(error).message += self._log_lines()
            raise
        except RLError as error:
            self.with_log(error)
            raise

    def call(
        self,
        method: str,
        timeout_s: float,
        *,
        on_sent: Callable[[], object] = lambda: None,
        **arguments: Any,
    ) -> Any:
        """Calls a method of the host.

        Args:
            method: Its name.
            timeout_s: Seconds.
            on_sent: Called once the host gets this call before those that are sent from then on.
            **arguments: Plain values.

        Raises:
            WorkerError: It raised; an instance of the class that it raised, too.
            WorkerDiedError: The process has ended.
            DeadlineError: It did not answer in time.
            LifecycleError: This process was forked from the owner of the engine.
        """
        return self._call(method, time.monotonic() + timeout_s, timeout_s, arguments, on_sent)

    def _call(
        self,
        method: str,
        end: float,
        seconds: float,
        arguments: dict[str, Any],
        on_sent: Callable[[], object] = lambda: None,
    ) -> Any:
        """As :meth:`call`, until a time; ``seconds`` is how long that is after the beginning."""
        number = next(self._numbers)
        with self._inbox.expecting(number) as answer:
            self._send(Request(method, arguments, number), max(0.0, end - time.monotonic()))
            on_sent()
            reply = self._wait(answer, method, end, seconds)
        if (error := error_of(reply)) is not None:
            raise self.with_log(error)
        return reply.value

    def tell(self, method: str, **arguments: Any) -> None:
        """Calls a method of the host without waiting for a reply.

        Raises:
            WorkerDiedError: The process has ended.
            DeadlineError: It does not read its socket.
        """
        self._send(Request(method, arguments), DRIVER_SEND_S)

    def submit(self, rows: Sequence[Row]) -> None:
        """Gives rows to the engine; :meth:`progress` returns them when they ended."""
        self.tell("submit", rows=rows)

    def cancel(self, keys: Collection[int]) -> None:
        """Takes rows back; they need not end."""
        self.tell("cancel", keys=list(keys))

    def progress(self, timeout_s: float) -> Progress | None:
        """Waits for rows that end.

        Returns:
            The next message about rows; None after the timeout, or if interrupted.

        Raises:
            WorkerDiedError: The process has ended.
            WorkerError: The engine failed, and lost all rows in it.
        """
        found = self._inbox.next_progress(min(timeout_s, POLL_S))
        if found is None and not self._alive():
            raise self._died()
        if found is not None and (error := error_of(found)) is not None:
            raise self.with_log(error)
        return found

    def interrupt(self) -> None:
        """Makes :meth:`progress` return."""
        self._inbox.wake()

    def close(self) -> None:
        """Ends the process and everything it started. Idempotent."""
        grace_s = LATE_CLOSE_S if self._inbox.owed else CLOSE_S
        self._end(grace_s, lambda: "was closed")
        self._log.close()

    def _end(self, grace_s: float, why: Callable[[], str]) -> None:
        with self._ending:  # a second caller waits until the process has ended
            self._why = self._why or why()
            if self._finish.detach():
                _end(*self._owned, grace_s)

    @property
    def owned(self) -> bool:
        """Whether this process owns the engine, and is not a forked child of the owner."""
        return os.getpid() == self._owner

    def check_owner(self) -> None:
        """Makes sure that this is not a forked child: the thread that reads is not in it.

        Raises:
            LifecycleError: It is.
        """
        if not self.owned:
            raise LifecycleError(
                f"{self.name}: the engine belongs to process {self._owner}, and this process was "
                "forked from it",
                fix=f"call it in process {self._owner}, or build an engine after the fork",
            )

    def _send(self, request: Request, timeout_s: float) -> None:
        self.check_owner()
        try:
            self._channel.send(encode(request), timeout_s)
        except DeadlineError as error:
            raise self._late(request.method, timeout_s) from error
        except OSError as error:
            raise self._died() from error

    def _wait(
        self, answer: concurrent.futures.Future[Any], method: str, end: float, seconds: float
    ) -> Any:
        while True:
            left = end - time.monotonic()
            try:
                return answer.result(min(POLL_S, max(0.0, left)))
            except TimeoutError:
                if not self._alive() and not answer.done():
                    raise self._died() from None
                if left <= 0:
                    raise self._late(method, seconds) from None
            except EOFError:
                raise self._died() from None

    def _alive(self) -> bool:
        return not self._inbox.ended and self._process.poll() is None

    def _died(self) -> RLError:
        """Ends the process, which is of no use any more; the error with the cause."""

        def why() -> str:
            code = self._process.poll()
            if code is None and self._inbox.broken is None:
                try:
                    code = self._process.wait(EXIT_STATUS_S)
                except subprocess.TimeoutExpired:
                    return "closed its socket, and was killed"
            return f"ended, exit status {code}"

        self._end(0.0, why)
        if self._inbox.broken is None:
            error: RLError = self._lost(self._why)
        else:
            error = copy(self._inbox.broken)  # raising it changes it
            error.message = f"{self.name}: {error.message}; the process was killed"
        self.with_log(error)
        return error

    def give_up(self, why: str) -> RLError:
        """Ends a process that is of no use any more.

        Args:
            why: What it did, for the error.

        Returns:
            The error for the callers that wait.
        """
        self._end(0.0, lambda: f"{why}, and was killed")
        error: RLError = self.with_log(self._lost(self._why))
        return error

    def _lost(self, why: str) -> WorkerDiedError:
        return WorkerDiedError(
            f"{self.name}: its process {self.pid} {why}{self._log_lines()}",
            fix="build a new backend; set verbose to True to see its log",
            worker=self.name,
        )

    def _late(self, method: str, seconds: float) -> RLError:
        error: RLError = self.with_log(
            DeadlineError(
                f"{self.name} did not answer {method} within {seconds:.0f} s{self._log_lines()}",
                fix="look at its log (set verbose to True); if it was loading a model, raise "
                "start_timeout_s",
                seconds=seconds,
            )
        )
        return error

    def with_log(self, error: Any) -> Any:
        """Puts the last lines of the log into the details of an error; returns it."""
        error.details.setdefault("log", self._log.tail())
        return error

    @contextmanager
    def logs_in_errors(self) -> Generator[None]:
        """Puts the last lines of the log into the details of errors that leave the context."""
        try:
            yield
        except (DeadlineError, RemoteError, RefitError, PluginError) as error:
            self.with_log(error)
            raise

    def _log_lines(self) -> str:
        text = self._log.cause()
        return f"; its log says:\n{text}" if text else ""


def _end(
    process: ForkedProcess,
    channel: Channel,
    server: ForkServer,
    sockets: str,
    lock: IO[str],
    owner: int,
    grace_s: float,
) -> None:
    """Closes the socket, upon which the process ends, and kills it if it does not."""
    if os.getpid() != owner:  # a finalizer in a forked child of the driver
        return
    channel.close()
    try:
        if process.pid:
            process.wait_for_end(grace_s)
    except subprocess.TimeoutExpired:
        process.kill()
        with suppress(subprocess.TimeoutExpired):
            process.wait_for_end(KILLED_S)
    finally:
        if process.pid and (process.lost or process.poll() is None):
            end_session(process.pid, sockets)  # the server, which would do it, died or hangs
        server.release()
        process.close()
        shutil.rmtree(sockets, ignore_errors=True)
        lock.close()
