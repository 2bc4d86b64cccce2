"""The engine's process, seen from the driver: started, called, and never left behind."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from contextlib import contextmanager, suppress
from copy import copy
from importlib.metadata import version
from socket import socketpair
from typing import TYPE_CHECKING, Any

from rl_core.errors import (
    CapabilityError,
    DeadlineError,
    IncompatiblePluginError,
    LifecycleError,
    PluginError,
    RefitError,
    RemoteError,
    RLError,
    WorkerDiedError,
)
from rl_hosting._engine_host import HOST, SOCKETS
from rl_hosting._fork_client import Forked, ForkServer, per_process
from rl_hosting._inbox import Inbox
from rl_hosting._leftovers import end_session, stopped
from rl_hosting._log import Log
from rl_hosting._messages import Channel, Hello, Progress, Request, encode, raised

if TYPE_CHECKING:
    import concurrent.futures
    from collections.abc import Callable, Collection, Generator, Mapping, Sequence

    from rl_hosting._messages import Prompt

__all__ = ["EngineProcess"]

#: Seconds for an engine to end by itself.
_GRACE_S = 20.0
#: Seconds for one that owes an answer, and for a killed one to be gone with all that it left.
_LATE_S, _KILLED_S = 1.0, 5.0
#: Seconds for one that closed its socket to be gone.
_STATUS_S = 2.0
#: Seconds for an engine's process to take a frame; a thread of its own reads there.
_SEND_S = 60.0
#: Seconds between two looks at whether the process is there, and whether it is stopped.
_LOOK_S, _STOPPED_LOOK_S = 0.2, 1.0
#: Seconds for which it may be stopped while somebody waits for it.
_STOPPED_S = 2.5
_LONGEST = 50


class EngineProcess:
    """One process that runs :mod:`rl_hosting._engine_host`; it ends with this one, however that ends.

    Any thread may call. Everything the engine prints goes to a file without a name, whose end is
    in ``details["log"]`` of every error.

    Args:
        name: How errors call it.
        engine: ``"module:Class"``, an :class:`~rl_hosting.engine.Engine` that is importable there;
            or whatever the host takes.
        environment: All of its variables.
        python: Its interpreter, in which rl-hosting and the engine are installed.
        verbose: Print what the engine prints.
        preload: Modules that are imported before the process is forked, and once for all engines
            with this environment. None of them may start threads or use a GPU.
        sockets: A variable that tells the engine where its own sockets go, if there is one.
        host: ``"module:Class"``, what answers the calls there.
        patient: Wait for a process that is stopped until the deadline, instead of ending it soon.

    Raises:
        ConfigError: The interpreter does not run.
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
        patient: bool = False,
    ) -> None:
        if not hasattr(os, "pidfd_open"):
            raise CapabilityError("rl-hosting needs Linux", fix="run it there", capability="host")
        self.name = name
        self._python = python
        self._owner = os.getpid()
        self._numbers = itertools.count(1)
        self._patient = patient
        self._stopped_since: float | None = None
        self._looked = 0.0
        self._ending = threading.Lock()
        self._why = ""
        directory = _directory(environment.get(sockets) or tempfile.gettempdir())
        own = {sockets: directory, SOCKETS: directory}
        shared = {name: value for name, value in environment.items() if name not in own}
        self._log = Log(show=verbose)
        ours, theirs = socketpair()
        server: ForkServer | None = None
        try:
            with theirs:
                server = ForkServer.obtain(shared, self._log.fileno(), python, preload)
                ends = theirs.fileno(), self._log.fileno()
                process = server.fork(*ends, per_process(environment) | own, engine, host)
        except BaseException as error:
            ours.close()
            if server is not None:
                server.release()
            shutil.rmtree(directory, ignore_errors=True)
            if isinstance(error, RLError):
                self.logged(error)
            self._log.close()
            raise
        self._process = process
        self._channel = Channel(ours)
        self._inbox = Inbox()
        self._owned = (process, self._channel, server, directory, self._owner)
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
        """Has the engine load a model, and notes what must be removed if it is killed.

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
            self._process.begin(timeout_s)
            self._check(self._wait(self._inbox.hello, "start", end - time.monotonic()))
            return self.call("start", end - time.monotonic(), config=dict(config))
        except PluginError as error:  # of which the log may know more
            self.logged(error).message += self._last_words()
            raise
        except RLError as error:
            self.logged(error)
            raise

    def _check(self, hello: Hello) -> None:
        """What one release writes, another may read otherwise."""
        for name, theirs in (("rl-hosting", hello.hosting), ("rl-core", hello.core)):
            if theirs != (ours := version(name)):
                raise IncompatiblePluginError(
                    f"{self.name}: {hello.python} has {name} {theirs}, this process {ours}",
                    fix=f"install {name} {ours} there, or {theirs} here",
                    version=theirs,
                )

    def call(self, method: str, timeout_s: float, **arguments: Any) -> Any:
        """Calls a method of the host.

        Args:
            method: Its name.
            timeout_s: Seconds.
            **arguments: Plain values.

        Raises:
            WorkerError: It raised; an instance of the class that it raised, too.
            WorkerDiedError: The process is gone.
            DeadlineError: It did not answer in time.
            LifecycleError: This process was forked from the one whose engine it is.
        """
        number, end = next(self._numbers), time.monotonic() + timeout_s
        with self._inbox.expecting(number) as answer:
            self._send(Request(method, arguments, number), timeout_s)
            reply = self._wait(answer, method, end - time.monotonic())
        if (error := raised(reply)) is not None:
            raise self.logged(error)
        return reply.value

    def tell(self, method: str, **arguments: Any) -> None:
        """Calls a method of the host and waits for nothing.

        Raises:
            WorkerDiedError: The process is gone.
            DeadlineError: It takes nothing.
        """
        self._send(Request(method, arguments), _SEND_S)

    def submit(self, prompts: Sequence[Prompt]) -> None:
        """Gives rows to the engine; what becomes of them is said by :meth:`progress`."""
        self.tell("submit", rows=prompts)

    def cancel(self, keys: Collection[int]) -> None:
        """Takes rows back, of which nothing more is said."""
        self.tell("cancel", keys=list(keys))

    def progress(self, timeout_s: float) -> Progress | None:
        """What ended since the last time; None after the timeout, or if interrupted.

        Raises:
            WorkerDiedError: The process is gone.
            WorkerError: The engine failed, and lost all rows in it.
        """
        found = self._inbox.next_progress(min(timeout_s, _LOOK_S))
        if found is None and not self._alive():
            raise self._died()
        if found is not None and (error := raised(found)) is not None:
            raise self.logged(error)
        return found

    def interrupt(self) -> None:
        """Makes :meth:`progress` return."""
        self._inbox.wake()

    def close(self) -> None:
        """Ends the process and everything it started. Idempotent."""
        grace_s = _LATE_S if self._inbox.owed else _GRACE_S
        self._end(grace_s, lambda: "was closed")
        self._log.close()

    def _end(self, grace_s: float, why: Callable[[], str]) -> None:
        with self._ending:  # whoever comes second waits until it is over
            self._why = self._why or why()
            if self._finish.detach():
                _end(*self._owned, grace_s)

    @property
    def owned(self) -> bool:
        """Whether this is the process whose engine it is, and not a forked child."""
        return os.getpid() == self._owner

    def check_owner(self) -> None:
        """Makes sure that this is not a forked child, in which nobody reads what the engine says.

        Raises:
            LifecycleError: It is.
        """
        if not self.owned:
            raise LifecycleError(
                f"{self.name}: this process was forked from {self._owner}, whose engine it is",
                fix="call it there, or build an engine after the fork",
            )

    def _send(self, request: Request, timeout_s: float) -> None:
        self.check_owner()
        try:
            self._channel.send(encode(request), timeout_s)
        except DeadlineError as error:
            raise self._late(request.method, timeout_s) from error
        except OSError as error:
            raise self._died() from error

    def _wait(self, answer: concurrent.futures.Future[Any], method: str, timeout_s: float) -> Any:
        end = time.monotonic() + timeout_s
        while True:
            left = end - time.monotonic()
            try:
                return answer.result(min(_LOOK_S, max(0.0, left)))
            except TimeoutError:
                if not self._alive() and not answer.done():
                    raise self._died() from None
                if left <= 0:
                    raise self._late(method, timeout_s) from None
            except EOFError:
                raise self._died() from None

    def _alive(self) -> bool:
        if self._inbox.ended or self._process.poll() is not None:
            return False
        if self._patient:
            return True
        now, before = time.monotonic(), self._looked
        if now - before > _STOPPED_LOOK_S:
            self._looked = now
            since = self._stopped_since if now - before < _STOPPED_S else None
            self._stopped_since = (since or now) if stopped(self.pid) else None
        # One that is continued together with this process has time to do so.
        since = self._stopped_since
        return since is None or now - since < _STOPPED_S

    def _died(self) -> RLError:
        """Of what the process ended, or why it is ended now: it is of no use any more."""
        self._end(0.0, self._cause)
        if self._inbox.nonsense is None:
            error: RLError = self._lost(self._why)
        else:
            error = copy(self._inbox.nonsense)  # raising it changes it
            error.message = f"{self.name}: {error.message}; the process was killed"
        self.logged(error)
        return error

    def _cause(self) -> str:
        code = self._process.poll()
        if code is None and self._stopped_since is not None:
            return f"is stopped ({', '.join(map(str, stopped(self.pid)))}), and was killed"
        if code is None and self._inbox.nonsense is None:
            try:
                code = self._process.wait(_STATUS_S)
            except subprocess.TimeoutExpired:
                return "closed its socket, and was killed"
        return f"ended, exit status {code}"

    def given_up(self, why: str) -> RLError:
        """Ends an engine that is of no use any more; the error for whoever waits for it.

        Args:
            why: What it did.
        """
        self._end(0.0, lambda: f"{why}, and was killed")
        error: RLError = self.logged(self._lost(self._why))
        return error

    def _lost(self, why: str) -> WorkerDiedError:
        return WorkerDiedError(
            f"{self.name}: the engine's process {self.pid} {why}{self._last_words()}",
            fix="build a new backend; with verbose the engine's log is shown",
            worker=self.name,
        )

    def _late(self, method: str, seconds: float) -> RLError:
        error: RLError = self.logged(
            DeadlineError(
                f"{self.name}: {method} was not answered within {seconds:.0f} s"
                f"{self._last_words()}",
                fix="look at the engine's log (verbose), or give it more time",
                seconds=seconds,
            )
        )
        return error

    def logged(self, error: Any) -> Any:
        """An error, with the last log lines of the engine in its details."""
        error.details.setdefault("log", self._log.tail())
        return error

    @contextmanager
    def logging(self) -> Generator[None]:
        """Has the errors of a call, whoever raised them, carry the last log lines."""
        try:
            yield
        except (DeadlineError, RemoteError, RefitError, PluginError) as error:
            self.logged(error)
            raise

    def _last_words(self) -> str:
        text = self._log.tail()
        return f"; its last words:\n{text}" if text else ""


def _directory(parent: str) -> str:
    """A private directory for sockets, whose names have 36 more characters of the 107 there may be.

    The parent is left where it is too long.
    """
    short = parent if len(parent) < _LONGEST and os.path.isdir(parent) else "/tmp"  # noqa: S108
    return tempfile.mkdtemp(prefix="rl-engine-", dir=short)


def _end(
    process: Forked,
    channel: Channel,
    server: ForkServer,
    sockets: str,
    owner: int,
    grace_s: float,
) -> None:
    """Closes the socket, which the engine takes for the end, and kills what does not follow."""
    if os.getpid() != owner:  # a forked child ends, not the one whose engine this is
        return
    channel.close()
    try:
        if process.pid:
            process.wait(grace_s)
    except subprocess.TimeoutExpired:
        process.kill()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_KILLED_S)
    finally:
        if process.pid and (process.lost or process.poll() is None):
            end_session(process.pid, sockets)  # the server, which would do it, is gone or hangs
        server.release()
        process.close()
        shutil.rmtree(sockets, ignore_errors=True)
