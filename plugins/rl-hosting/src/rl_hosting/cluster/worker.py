"""What runs in a worker process: one embedded backend behind a few remote methods."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

from rl_core.errors import DeadlineError
from rl_core.futures import wait
from rl_core.ports import free_port
from rl_hosting.cluster.remote_error import as_text, worker_error

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

    from rl_core.interfaces import Future, WorkerContext
    from rl_core.plugins.manifest import Kind

__all__ = ["CONCURRENCY_GROUPS", "Worker"]

#: Threads of a worker. Work is done one call at a time and always by the same thread; many calls
#: of generate share the engine, and refits and questions get through meanwhile. Refits begin in the
#: order of the calls, and other threads wait for them: one for each that goes on, or else one that
#: has ended would seem to go on as long as those before it.
CONCURRENCY_GROUPS = {"work": 1, "generate": 256, "begin": 1, "refit": 16, "control": 2}


class Worker:
    """Hosts a backend, from :meth:`build` on."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._backend: Any = None
        self._begins = threading.Condition()
        self._begun: dict[str, list[Future]] = {}
        self._guard = threading.Lock()  # of both below
        self._abandoned: set[str] = set()
        self._streams: dict[str, tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = {}

    @as_text
    def place(self) -> dict[str, Any]:
        """Where this process is: ``node``, ``address``, a free TCP ``port`` and ``pid``."""
        return {
            "node": socket.gethostname(),
            "address": "127.0.0.1",
            "port": free_port(),
            "pid": os.getpid(),
        }

    @as_text
    def build(self, kind: Kind, config: Mapping[str, Any], context: WorkerContext) -> None:
        """Loads the backend from what is installed in this process's environment."""
        from rl_core.plugins.discovery import load_object
        from rl_core.plugins.registry import resolve

        manifest = resolve(config["backend"], kind, config=config)
        build = load_object(f"{manifest.factories[kind]}.from_config")
        self._backend = build(config, worker=context)
        if getattr(self._backend, "worker", context) is None:  # its author left it out
            self._backend.worker = context

    @as_text
    def attribute(self, name: str) -> Any:
        """An attribute of the backend."""
        return getattr(self._backend, name)

    @as_text
    def call(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Calls a method of the backend."""
        return getattr(self._backend, method)(*args, **kwargs)

    @as_text
    def begin(self, name: str, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Calls a method that returns futures, for which :meth:`finish` waits under this name."""
        try:
            futures = getattr(self._backend, method)(*args, **kwargs)
        except BaseException as error:
            futures = [concurrent.futures.Future[Any]()]
            futures[0].set_exception(error)
            raise
        finally:
            with self._begins:
                self._begun[name] = futures
                self._begins.notify_all()

    @as_text
    def finish(self, name: str, timeout_s: float) -> Any:
        """Waits for the futures of :meth:`begin`, which may come later; the first one's result."""
        end = time.monotonic() + timeout_s
        with self._begins:
            if not self._begins.wait_for(lambda: name in self._begun, timeout_s):
                raise DeadlineError(
                    f"a refit did not begin within {timeout_s:g} s",
                    fix="look at what the call before it does (the worker's log, py-spy dump)",
                    seconds=timeout_s,
                )
            futures = self._begun.pop(name)
        results = wait(futures, max(0.0, end - time.monotonic()))
        return results[0] if results else None

    def stream(self, stream_id: str, data: Any, greedy: bool) -> Generator[Any]:
        """Yields ``(row, output)`` from the backend's ``generate_async`` until abandoned."""
        rows = None
        loop = asyncio.new_event_loop()
        try:
            rows = self._backend.generate_async(data, greedy)
            while True:
                with self._guard:
                    if stream_id in self._abandoned:
                        return
                    task = loop.create_task(anext(rows))
                    self._streams[stream_id] = loop, task
                try:
                    yield loop.run_until_complete(task)
                except (StopAsyncIteration, asyncio.CancelledError):
                    return
        except Exception as error:
            raise worker_error(error, self.name) from None
        finally:
            with self._guard:
                self._abandoned.discard(stream_id)
                self._streams.pop(stream_id, None)
            if rows is not None:
                loop.run_until_complete(rows.aclose())
            loop.close()

    def abandon(self, stream_id: str) -> None:
        """Ends a stream that nobody reads any more, and frees its rows."""
        with self._guard:
            self._abandoned.add(stream_id)
            if stream_id in self._streams:
                loop, task = self._streams[stream_id]
                loop.call_soon_threadsafe(task.cancel)
