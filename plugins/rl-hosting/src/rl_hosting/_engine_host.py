"""The engine's own process, which :mod:`rl_hosting._fork_server` forks.

The main thread answers requests and steps the engine in turn, until the socket is closed. One
thread reads the socket; another ends the process when its driver is gone, however that ended and
whatever the main thread is doing.
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
from typing import TYPE_CHECKING, Any

import msgspec
import psutil

from rl_backends import Completion, FailedRow, Row
from rl_core.errors import DataError, LifecycleError, PluginError
from rl_core.plugins.discovery import load_object
from rl_hosting._leftovers import end_session, lock_directory
from rl_hosting._messages import Channel, Hello, Progress, Reply, Request, encode
from rl_hosting._shared_memory import MemoryWatch, save_made
from rl_hosting._timing import (
    ENGINE_SEND_S,
    HEARTBEAT_S,
    PARENT_ACTS_S,
    PARENT_POLL_S,
    SOCKET_SETTLE_S,
)
from rl_hosting.cluster.remote_error import encode_error
from rl_hosting.engine import Engine

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["HOST", "SOCKETS", "EngineHost", "run_host"]

#: Answers calls in the process of an engine.
HOST = "rl_hosting._engine_host:EngineHost"
#: Variable with a directory for the engine's sockets, which is removed with the process.
SOCKETS = "RL_HOSTING_SOCKETS"


class EngineHost:
    """Calls an engine's methods as the driver asks for it.

    Args:
        channel: To the driver.
        engine: ``"module:Class"``, an :class:`~rl_hosting.engine.Engine`.
    """

    def __init__(self, channel: Channel, engine: str) -> None:
        self._channel = channel
        self._watch = MemoryWatch()
        self._reference = engine
        self._engine: Engine | None = None
        self._inbox: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._rows: set[int] = set()  # keys of those in the engine
        self._sent_at, self._tokens = 0.0, -1  # of the last progress
        self._newest = -1  # of all keys
        self.name = f"{engine.partition(':')[2]} (pid {os.getpid()})"

    def serve(self) -> None:
        """Answers until the socket is closed."""
        self._channel.send(encode(Hello.here()), ENGINE_SEND_S)
        threading.Thread(target=self._read, name="requests", daemon=True).start()
        try:
            while True:
                with suppress(queue.Empty):
                    request = self._inbox.get(block=not self._rows)
                    if request is None:
                        return
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
        except Exception:  # no message: the driver sees that the process ends, and reads why
            traceback.print_exc()
        finally:
            self._inbox.put(None)

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
            error = encode_error(caught, self.name)
            frame = encode(Reply(request.number, error=error))
        if request.number:
            self._channel.send(frame, ENGINE_SEND_S)
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
                f"{self._reference}.start returned {type(engine).__name__}, not rl_hosting.Engine",
                fix="report it to the backend's author",
            )
        self._engine = engine
        # The fork server sees it too, perhaps not before an engine is killed that just started.
        for made in self._watch.look({os.getpid()}).values():
            save_made(os.environ[SOCKETS], made)
        self._watch.close()
        return engine.facts

    # -- rows -------------------------------------------------------------------------------------

    def submit(self, rows: list[Any]) -> None:
        """Gives rows to the engine."""
        taken = msgspec.convert(rows, list[Row])
        if not self.engine.facts.get("has_tokenizer", True):
            failed = {}
            for row in [row for row in taken if row.stop_strings]:
                error = DataError(
                    f"row {row.index} has stop strings, but the model has no tokenizer",
                    fix="save the tokenizer beside the model, or use stop_token_ids",
                    row=row.index,
                    key="stop_strings",
                )
                failed[row.key] = encode_error(error, self.name)
                taken.remove(row)
            if failed:
                self._channel.send(encode(Progress(failed=failed)), ENGINE_SEND_S)
        if not taken:
            return
        if not self._rows:
            self._sent_at, self._tokens = time.monotonic(), -1
        self._rows |= {row.key for row in taken}
        self._newest = max({self._newest} | self._rows)
        self.engine.submit(taken)

    def cancel(self, keys: list[int]) -> None:
        """Takes rows back from the engine."""
        gone = self._rows.intersection(keys)
        self._rows -= gone
        self.engine.cancel(gone)
        self._channel.send(encode(Progress()), ENGINE_SEND_S)  # it has not hung

    def _step(self) -> None:
        now = time.monotonic()
        try:
            ended: list[Any] = list(self.engine.step())
            for one in ended:
                known = isinstance(one, Completion | FailedRow)
                if not known or one.row not in range(self._newest + 1):
                    raise PluginError(
                        f"{self.name}: step returned {one!r:.200}, which belongs to no row that it "
                        "was given",
                        fix="report it to the backend's author: row is the row's key",
                    )
            done = [one for one in ended if one.row in self._rows]  # others were taken back
            if not done:
                if now - self._sent_at < HEARTBEAT_S:
                    return
                before, self._tokens = self._tokens, self.engine.tokens_made()
                if before == self._tokens:
                    return
            failed = [one for one in done if isinstance(one, FailedRow)]
            frame = encode(
                Progress(
                    [one for one in done if isinstance(one, Completion)],
                    {one.row: encode_error(one.error, self.name) for one in failed},
                )
            )
        except Exception as error:
            self._fail(encode_error(error, self.name))
            return
        self._rows -= {one.row for one in done}
        self._channel.send(frame, ENGINE_SEND_S)
        self._sent_at = now

    def _fail(self, error: list[Any]) -> None:
        """Fails all rows in the engine, which may still decode others."""
        lost, self._rows = self._rows, set()
        try:
            self.engine.cancel(lost)
        except Exception:  # it is as broken as before; the next call to it fails, too
            traceback.print_exc()
        self._channel.send(encode(Progress(error=error)), ENGINE_SEND_S)

    # -- all else ---------------------------------------------------------------------------------

    def refit(self, call: bytes) -> list[bytes]:
        """Hands a frame to every worker's :class:`rl_hosting.WorkerRefits`."""
        return self.engine.call_workers(call)

    def wake(self, tags: list[str]) -> None:
        """See :meth:`Engine.wake`."""
        self.engine.wake(tags)

    def sleep(self, tags: list[str], level: int) -> None:
        """See :meth:`Engine.sleep`."""
        self.engine.sleep(tags, level)

    def reset_caches(self) -> bool:
        """See :meth:`Engine.reset_caches`."""
        return self.engine.reset_caches()


def _is_gone(driver: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return not driver.is_running() or driver.status() == psutil.STATUS_ZOMBIE
    return True


def _end_with_driver(driver: psutil.Process, sockets: str) -> threading.Thread:
    """Starts a thread that ends this process, and all that it started, when its driver is gone.

    So does its parent, the fork server, unless that is stopped or was killed.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent and not _is_gone(driver):
            time.sleep(PARENT_POLL_S)
        try:
            if os.getppid() == parent:
                time.sleep(PARENT_ACTS_S)
                os.kill(parent, signal.SIGKILL)
            end_session(os.getpid(), sockets)
        finally:
            os.kill(os.getpid(), signal.SIGKILL)

    thread = threading.Thread(target=watch, name="end-with-driver", daemon=True)
    thread.start()
    return thread


def run_host(descriptor: int, driver: psutil.Process, engine: str, host_class: str) -> None:
    """Answers what comes over a socket, until it is closed or the driver is gone; then ends."""
    end = socket.socket(fileno=descriptor)
    # Or else a process that the engine forks would keep it open when the engine is gone.
    os.register_at_fork(after_in_child=end.close)
    host = load_object(host_class)(Channel(end), engine)
    with suppress(OSError):  # the driver has ended, and so will this process
        lock = lock_directory(os.environ[SOCKETS])  # noqa: F841 - as long as this process
    ending = _end_with_driver(driver, os.environ[SOCKETS])
    status = 1
    try:
        host.serve()
        status = 0
    except BaseException:
        traceback.print_exc()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    time.sleep(SOCKET_SETTLE_S)
    if _is_gone(driver):
        ending.join()
    os._exit(status)  # with an engine imported, an interpreter takes seconds to clear its modules
