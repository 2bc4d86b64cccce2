"""The engine's own process, which :mod:`rl_hosting._fork_server` forks.

Answers the requests that come over a socket, between the steps of the engine, until the socket is
closed. It ends when its driver is gone, however that ended and whatever it is doing: a thread of
its own looks.
"""

from __future__ import annotations

import atexit
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from contextlib import suppress
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import msgspec
import psutil

from rl_core.cluster.remote_error import as_plain
from rl_core.errors import LifecycleError, PluginError
from rl_core.plugins.discovery import load_object
from rl_hosting._leftovers import SharedMemory, end_session
from rl_hosting._messages import Channel, Done, Hello, Progress, Prompt, Reply, Request, encode
from rl_hosting.engine import Engine

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["HOST", "PARENT_POLL_S", "SOCKETS", "Host", "run_host"]

#: What answers calls, where an engine is hosted.
HOST = "rl_hosting._engine_host:Host"
#: Variable with a directory for the engine's sockets, which is removed with the process.
SOCKETS = "RL_HOSTING_SOCKETS"
#: Seconds between two looks at whether the parent is still there.
PARENT_POLL_S = 0.5
#: Seconds for the parent to do what it does when the driver is gone.
_PARENT_S = 2.0
#: Seconds between a driver's last socket and its end.
_SETTLE_S = 0.05
#: Seconds between two signs of life while rows are decoded.
_ALIVE_S = 1.0
#: Seconds for a driver to take a frame.
_SEND_S = 600.0


class Host:
    """What can be called.

    Args:
        channel: To the driver.
        engine: ``"module:Class"``, an :class:`~rl_hosting.engine.Engine`.
    """

    def __init__(self, channel: Channel, engine: str) -> None:
        self._channel = channel
        self._reference = engine
        self._engine: Engine | None = None
        self._inbox: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._rows: set[int] = set()  # keys of those in the engine
        self._spoke, self._made = 0.0, -1
        self._newest = -1  # of all keys
        self.name = f"{engine.partition(':')[2]} (pid {os.getpid()})"

    def serve(self) -> None:
        """Answers until the socket is closed."""
        hello = Hello(version("rl-core"), version("rl-hosting"), sys.executable)
        self._channel.send(encode(hello), _SEND_S)
        threading.Thread(target=self._read, name="requests", daemon=True).start()
        try:
            while (request := self._next()) is not None:
                if request.method:
                    self._answer(request)
                if self._rows and self._inbox.empty():
                    self._step()
        except OSError:  # the driver is gone
            return
        finally:
            if self._engine is not None:
                self._engine.shutdown()

    def _read(self) -> None:
        try:
            while True:
                message = self._channel.receive()
                if isinstance(message, Request):
                    self._inbox.put(message)
        except EOFError:
            pass
        except Exception:  # nonsense: the driver sees that the process ends, and reads why
            traceback.print_exc()
        finally:
            self._inbox.put(None)

    def _next(self) -> Request | None:
        try:
            return self._inbox.get(block=not self._rows)
        except queue.Empty:
            return Request("")

    def _answer(self, request: Request) -> None:
        methods: dict[str, Callable[..., Any]] = {
            "start": self.start,
            "submit": self.submit,
            "cancel": self.cancel,
            "refit": self.refit,
            "wake": self.wake,
            "sleep": self.sleep,
            "reset_caches": self.reset_caches,
        }
        error = None
        try:
            frame = encode(Reply(request.number, methods[request.method](**request.arguments)))
        except Exception as caught:
            error = as_plain(caught, self.name)
            frame = encode(Reply(request.number, error=error))
        if request.number:
            self._channel.send(frame, _SEND_S)
        elif error is not None:
            self._fail(error)

    @property
    def engine(self) -> Engine:
        """The engine, once it is started."""
        if self._engine is None:
            raise LifecycleError(f"{self.name} was not started", fix="call start first")
        return self._engine

    def start(self, config: dict[str, Any]) -> dict[str, Any]:
        """Loads the model; the facts of it."""
        engine = load_object(self._reference).start(config)
        if not isinstance(engine, Engine):
            raise PluginError(
                f"{self._reference}.start returned {type(engine).__name__}, no rl_hosting.Engine",
                fix="report it to the backend's author",
            )
        self._engine = engine
        # The server looks now and then: an engine that is killed at once may be faster.
        memory = SharedMemory(os.getpid())
        memory.look()
        memory.write(os.environ[SOCKETS])
        return engine.facts

    # -- rows -------------------------------------------------------------------------------------

    def submit(self, rows: list[Any]) -> None:
        """Takes rows."""
        prompts = msgspec.convert(rows, list[Prompt])
        if not self._rows:
            self._spoke, self._made = time.monotonic(), -1
        self._rows |= {prompt.key for prompt in prompts}
        self._newest = max({self._newest} | self._rows)
        self.engine.submit(prompts)

    def cancel(self, keys: list[int]) -> None:
        """Forgets rows."""
        gone = self._rows.intersection(keys)
        self._rows -= gone
        self.engine.cancel(gone)
        self._channel.send(encode(Progress()), _SEND_S)  # it has not hung

    def _step(self) -> None:
        now = time.monotonic()
        try:
            done = [one for one in self.engine.step() if self._is_ours(one)]
            if not done:
                if now - self._spoke < _ALIVE_S:
                    return
                made, self._made = self._made, self.engine.tokens_made()
                if made == self._made:
                    return
            frame = encode(Progress(done))
        except Exception as error:
            self._fail(as_plain(error, self.name))
            return
        self._rows -= {one.key for one in done}
        self._channel.send(frame, _SEND_S)
        self._spoke = now

    def _is_ours(self, done: Any) -> bool:
        """Whether it is of a row that is in the engine; others were taken back."""
        if not isinstance(done, Done) or done.key not in range(self._newest + 1):
            raise PluginError(
                f"{self.name}: step ended {done!r:.200}, which is of no row that it was given",
                fix="report it to the backend's author: a Done's key is the row's",
            )
        return done.key in self._rows

    def _fail(self, error: list[Any]) -> None:
        """The rows in the engine are lost; it may do for others."""
        lost, self._rows = self._rows, set()
        try:
            self.engine.cancel(lost)
        except Exception:  # it is as broken as it was; whoever calls next is told
            traceback.print_exc()
        self._channel.send(encode(Progress(error=error)), _SEND_S)

    # -- all else ---------------------------------------------------------------------------------

    def refit(self, call: bytes) -> list[bytes]:
        """Calls every worker's :class:`rl_hosting.worker_refits.WorkerRefits`; an answer from each."""
        return self.engine.call_workers(call)

    def wake(self, tags: list[str]) -> None:
        """Takes memory again."""
        self.engine.wake(tags)

    def sleep(self, tags: list[str], level: int) -> None:
        """Gives memory back."""
        self.engine.sleep(tags, level)

    def reset_caches(self) -> bool:
        """Forgets the keys and values of prompts seen so far."""
        return self.engine.reset_caches()


def _is_gone(driver: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return not driver.is_running() or driver.status() == psutil.STATUS_ZOMBIE
    return True


def _end_with(driver: psutil.Process, sockets: str) -> threading.Thread:
    """Ends this process, and all that it started, when its driver or its parent is gone.

    The parent does so, too, unless it is stopped or was killed.
    """
    parent = os.getppid()

    def look() -> None:
        while os.getppid() == parent and not _is_gone(driver):
            time.sleep(PARENT_POLL_S)
        try:
            if os.getppid() == parent:
                time.sleep(_PARENT_S)
                os.kill(parent, signal.SIGKILL)
            end_session(os.getpid(), sockets)
        finally:
            os.kill(os.getpid(), signal.SIGKILL)

    thread = threading.Thread(target=look, name="end-with-driver", daemon=True)
    thread.start()
    return thread


def run_host(descriptor: int, driver: psutil.Process, engine: str, host_class: str) -> None:
    """Answers what comes over a socket, until it is closed or the driver is gone; then ends."""
    host = load_object(host_class)(Channel(socket.socket(fileno=descriptor)), engine)
    end = _end_with(driver, os.environ[SOCKETS])
    status = 1
    try:
        host.serve()
        status = 0
    except BaseException:
        traceback.print_exc()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    time.sleep(_SETTLE_S)
    if _is_gone(driver):
        end.join()
    os._exit(status)  # with an engine imported, an interpreter takes seconds to clear its modules
