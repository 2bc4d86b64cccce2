"""The engine's process, seen from the driver: started, called, and never left behind."""

from __future__ import annotations

import concurrent.futures
import itertools
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING, Any

from rl_core.errors import DeadlineError, LifecycleError, PluginError, RLError, WorkerDiedError
from rl_hosting.forkserver import Forked, ForkServer
from rl_hosting.host import HOST, SOCKETS
from rl_hosting.leftovers import SharedMemory
from rl_hosting.wire import Channel, Hello, Progress, Reply, Request, raised

if TYPE_CHECKING:
    from collections.abc import Collection, Generator, Mapping, Sequence

    from rl_hosting.wire import Message, Prompt

__all__ = ["EngineProcess"]

#: Seconds for an engine to end by itself.
_GRACE_S = 20.0
#: Seconds for an engine's process to take a frame; a thread of its own reads there.
_SEND_S = 60.0
#: Seconds between two looks at whether the process is there.
_LOOK_S = 0.2
_TAIL = 4000
_LONGEST = 50


class EngineProcess:
    """One process that runs :mod:`rl_hosting.host`; it ends with this one, however that ends.

    Any thread may call. Everything the engine prints goes to a file without a name, whose end is
    in ``details["log"]`` of every error, or to this process's output.

    Args:
        name: How errors call it.
        engine: ``"module:Class"``, an :class:`~rl_hosting.engine.Engine` that is importable there;
            or whatever the host takes.
        environment: All of its variables.
        python: Its interpreter, in which rl-hosting and the engine are installed.
        verbose: Print what the engine prints.
        preload: Modules that a :class:`~rl_hosting.forkserver.ForkServer` imports, from which the
            process is then forked. None starts an interpreter for it.
        sockets: A variable that tells the engine where its own sockets go, if there is one.
        host: ``"module:Class"``, what answers the calls there.
    """

    def __init__(
        self,
        name: str,
        engine: str,
        environment: Mapping[str, str],
        *,
        python: str = sys.executable,
        verbose: bool = False,
        preload: Sequence[str] | None = None,
        sockets: str = SOCKETS,
        host: str = HOST,
    ) -> None:
        self.name = name
        self._owner = os.getpid()
        self._numbers = itertools.count(1)
        self._log: IO[bytes] | None = None
        if not verbose:
            self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        log = None if self._log is None else self._log.fileno()
        ours, theirs = socket.socketpair()
        directory = _directory(environment.get(sockets) or tempfile.gettempdir())
        environment = {**environment, sockets: directory, SOCKETS: directory}
        server: ForkServer | None = None
        try:
            with theirs:
                if preload is not None and hasattr(os, "pidfd_open"):
                    server = ForkServer.obtain(environment, log, python, preload)
                    process: subprocess.Popen[bytes] | Forked = server.fork(
                        theirs.fileno(), log, environment, engine, host
                    )
                else:
                    process = _started(python, [engine, host], theirs.fileno(), log, environment)
        except BaseException:
            ours.close()
            if server is not None:
                server.release()
            shutil.rmtree(directory, ignore_errors=True)
            raise
        self._process = process
        self._channel = Channel(ours)
        self._inbox = _Inbox()
        self._left: list[SharedMemory] = []
        self._owned = (process, self._channel, server, directory, self._left, self._owner)
        self._finish = weakref.finalize(self, _end, *self._owned, 0.0)
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
            self._wait(self._inbox.hello, "start", timeout_s)
            return self.call("start", end - time.monotonic(), config=dict(config))
        except PluginError as error:  # of which the log may know more
            error.message += self._tail()
            raise
        finally:
            self._left.append(SharedMemory(self.pid))

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

    def submit(self, prompts: Sequence[Prompt]) -> None:
        """Gives rows to the engine; what becomes of them is said by :meth:`progress`."""
        self._send(Request("submit", {"rows": prompts}), _SEND_S)

    def cancel(self, keys: Collection[int]) -> None:
        """Takes rows back, of which nothing more is said."""
        self._send(Request("cancel", {"keys": list(keys)}), _SEND_S)

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
        if self._finish.detach():
            _end(*self._owned, _GRACE_S)
            if self._log is not None:
                self._log.close()

    def _send(self, request: Request, timeout_s: float) -> None:
        if os.getpid() != self._owner:
            raise LifecycleError(
                f"{self.name}: this process was forked from {self._owner}, whose engine it is",
                fix="call it there, or build an engine after the fork",
            )
        try:
            self._channel.send(request, timeout_s)
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
        return not self._inbox.ended and self._process.poll() is None

    def _died(self) -> RLError:
        """Of what the process ended, or why nobody listens to it any more."""
        if self._inbox.nonsense is not None:
            self._process.kill()
            return self._inbox.nonsense
        code = None
        if self._finish.alive:
            try:
                code = self._process.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
        for memory in self._left:  # now, not when somebody closes what is of no use any more
            memory.remove()
        error: RLError = self.logged(
            WorkerDiedError(
                f"{self.name}: the engine's process {self.pid} ended, exit status {code}"
                f"{self._tail()}",
                fix="build a new backend; with verbose the engine's log is shown",
                worker=self.name,
            )
        )
        return error

    def _late(self, method: str, seconds: float) -> RLError:
        error: RLError = self.logged(
            DeadlineError(
                f"{self.name}: {method} was not answered within {seconds:.0f} s{self._tail()}",
                fix="look at the engine's log (verbose), or give it more time",
                seconds=seconds,
            )
        )
        return error

    def logged(self, error: Any) -> Any:
        """An error, with the last log lines of the engine in its details."""
        error.details.setdefault("log", self._tail())
        return error

    def _tail(self) -> str:
        if self._log is None or self._log.closed:
            return ""
        size = os.fstat(self._log.fileno()).st_size
        tail = os.pread(self._log.fileno(), _TAIL, max(0, size - _TAIL))
        text = tail.decode(errors="replace").strip()
        return f"; its last words:\n{text}" if text else ""


class _Inbox:
    """What came from the engine's process.

    It knows no :class:`EngineProcess`, so that one that is dropped ends.

    Attributes:
        hello: The first message.
        ended: Nothing comes any more.
        nonsense: Why nothing is read any more, if what came was no message.
    """

    def __init__(self) -> None:
        self.hello: concurrent.futures.Future[Hello] = concurrent.futures.Future()
        self.ended = False
        self.nonsense: RLError | None = None
        self._guard = threading.Lock()
        self._answers: dict[int, concurrent.futures.Future[Reply]] = {}
        self._progress: queue.SimpleQueue[Progress | None] = queue.SimpleQueue()

    @contextmanager
    def expecting(self, number: int) -> Generator[concurrent.futures.Future[Reply]]:
        """A future for the reply with a number, forgotten with the context."""
        answer: concurrent.futures.Future[Reply] = concurrent.futures.Future()
        with self._guard:
            self._answers[number] = answer
            if self.ended:
                answer.set_exception(EOFError())
        try:
            yield answer
        finally:
            with self._guard:
                del self._answers[number]

    def next_progress(self, timeout_s: float) -> Progress | None:
        with suppress(queue.Empty):
            return self._progress.get(timeout=timeout_s)
        return None

    def wake(self) -> None:
        self._progress.put(None)

    def read(self, channel: Channel) -> None:
        """Until the process is gone."""
        try:
            while True:
                self._sort(channel.receive())
        except EOFError:
            pass
        except RLError as error:
            self.nonsense = error
        except Exception as error:
            self.nonsense = PluginError(
                f"the engine's process said what is no message: {error}",
                fix="nothing but rl-hosting may write to its socket; report it",
            )
        finally:
            with self._guard:
                self.ended = True
                lost: list[concurrent.futures.Future[Any]] = [self.hello, *self._answers.values()]
            for answer in lost:
                if not answer.done():
                    answer.set_exception(EOFError())
            self.wake()

    def _sort(self, message: Message) -> None:
        if isinstance(message, Progress):
            self._progress.put(message)
        elif isinstance(message, Hello):
            self.hello.set_result(message)
        elif isinstance(message, Reply):
            with self._guard:
                answer = self._answers.get(message.number)
            if answer is not None and not answer.done():  # otherwise nobody waits any more
                answer.set_result(message)


def _started(
    python: str, what: list[str], end: int, log: int | None, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(  # noqa: S603 - our own module
        [python, "-m", "rl_hosting.host", str(end), str(os.getpid()), *what],
        env=dict(environment),
        pass_fds=[end],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,  # an interrupt is for this process, which tells the engine
    )


def _directory(parent: str) -> str:
    """A private directory for sockets, whose names have 36 more characters of the 107 there may be.

    The parent is left where it is too long.
    """
    short = parent if len(parent) < _LONGEST and os.path.isdir(parent) else "/tmp"  # noqa: S108
    return tempfile.mkdtemp(prefix="rl-engine-", dir=short)


def _end(
    process: subprocess.Popen[bytes] | Forked,
    channel: Channel,
    server: ForkServer | None,
    sockets: str,
    left: list[SharedMemory],
    owner: int,
    grace_s: float,
) -> None:
    """Closes the socket, which the engine takes for the end, and kills what does not follow."""
    if os.getpid() != owner:  # a forked child ends, not the one whose engine this is
        return
    channel.close()
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
