"""The engine's own process: ``python -m rl_hosting.host FD PARENT ENGINE HOST``.

Answers the requests that come over a socket, between the steps of the engine, until the socket is
closed. It ends when its parent is gone, however that ended and whatever it is doing: a thread of
its own looks.
"""

from __future__ import annotations

import atexit
import os
import queue
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import msgspec

from rl_core.cluster.remote_error import as_plain
from rl_core.errors import LifecycleError
from rl_core.plugins.discovery import load_object
from rl_hosting.leftovers import SharedMemory
from rl_hosting.wire import Channel, Hello, Progress, Prompt, Reply, Request, failure

if TYPE_CHECKING:
    from collections.abc import Callable

    from rl_hosting.engine import Engine

__all__ = ["HOST", "PARENT_POLL_S", "SOCKETS", "Host", "end_with", "main", "run_host"]

#: What answers calls, where an engine is hosted.
HOST = "rl_hosting.host:Host"
#: Variable with a directory for the engine's sockets, which is removed with the process.
SOCKETS = "RL_HOSTING_SOCKETS"
#: Seconds between two looks at whether the parent is still there.
PARENT_POLL_S = 0.5
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
        self.shared_memory: SharedMemory | None = None
        self.name = f"{engine.partition(':')[2]} (pid {os.getpid()})"

    def serve(self) -> None:
        """Answers until the socket is closed."""
        hello = Hello(version("rl-core"), version("rl-hosting"), sys.version, os.getpid())
        self._channel.send(hello, _SEND_S)
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
        try:
            reply = Reply(request.number, methods[request.method](**request.arguments))
        except Exception as error:
            reply = failure(error, self.name, request.number)
        if request.number:
            self._channel.send(reply, _SEND_S)
        elif reply.error is not None:
            self._fail(reply.error)

    @property
    def engine(self) -> Engine:
        """The engine, once it is started."""
        if self._engine is None:
            raise LifecycleError(f"{self.name} was not started", fix="call start first")
        return self._engine

    def start(self, config: dict[str, Any]) -> dict[str, Any]:
        """Loads the model; the facts of it."""
        self._engine = load_object(self._reference).start(config)
        self.shared_memory = SharedMemory(os.getpid())
        return self.engine.facts

    # -- rows -------------------------------------------------------------------------------------

    def submit(self, rows: list[Any]) -> None:
        """Takes rows."""
        prompts = msgspec.convert(rows, list[Prompt])
        if not self._rows:
            self._spoke, self._made = time.monotonic(), -1
        self._rows |= {prompt.key for prompt in prompts}
        self.engine.submit(prompts)

    def cancel(self, keys: list[int]) -> None:
        """Forgets rows."""
        gone = self._rows.intersection(keys)
        self._rows -= gone
        self.engine.cancel(gone)

    def _step(self) -> None:
        try:
            done = [one for one in self.engine.step() if one.key in self._rows]
        except Exception as error:
            self._fail(as_plain(error, self.name))
            return
        self._rows -= {one.key for one in done}
        now = time.monotonic()
        if not done and now - self._spoke > _ALIVE_S:
            made, self._made = self._made, self.engine.tokens_made()
            if made == self._made:
                return
        elif not done:
            return
        self._channel.send(Progress(done), _SEND_S)
        self._spoke = now

    def _fail(self, error: list[Any]) -> None:
        """The rows in the engine are lost; it may do for others."""
        lost, self._rows = self._rows, set()
        try:
            self.engine.cancel(lost)
        except Exception:  # it is as broken as it was; whoever calls next is told
            traceback.print_exc()
        self._channel.send(Progress(error=error), _SEND_S)

    # -- all else ---------------------------------------------------------------------------------

    def refit(self, call: bytes) -> list[bytes]:
        """Calls every worker's :class:`rl_hosting.worker.WorkerRefits`; an answer from each."""
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


def _remove_sockets() -> None:
    if SOCKETS in os.environ:
        shutil.rmtree(os.environ[SOCKETS], ignore_errors=True)


def end_with(parent: int, host: Any) -> None:
    """Ends this process, and all that it started, at once when the parent is gone.

    The process leads a session of its own, so that its group has no other processes in it.
    """

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_POLL_S)
        try:
            _remove_sockets()
            # An engine that has not even started has nothing from others.
            (host.shared_memory or SharedMemory(os.getpid())).remove()
        finally:
            os.killpg(os.getpid(), signal.SIGKILL)

    threading.Thread(target=look, name="end-with-parent", daemon=True).start()


def run_host(descriptor: int, parent: int, engine: str, host_class: str) -> None:
    """Answers what comes over a socket, until it is closed or the parent is gone; then ends."""
    host = load_object(host_class)(Channel(socket.socket(fileno=descriptor)), engine)
    end_with(parent, host)
    status = 1
    try:
        host.serve()
        status = 0
    except BaseException:
        traceback.print_exc()
    atexit._run_exitfuncs()
    _remove_sockets()
    sys.stdout.flush()
    os._exit(status)  # with an engine imported, an interpreter takes seconds to clear its modules


def main() -> None:
    """The process."""
    descriptor, parent, engine, host = sys.argv[1:]
    run_host(int(descriptor), int(parent), engine, host)


if __name__ == "__main__":
    main()
