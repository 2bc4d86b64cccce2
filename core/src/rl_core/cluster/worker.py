"""What runs in a worker process: one embedded backend behind a few remote methods."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from typing import TYPE_CHECKING, Any

from rl_core.cluster.remote_error import as_text, worker_error
from rl_core.futures import wait

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

    from rl_core.interfaces import WorkerContext
    from rl_core.plugins.manifest import Kind

__all__ = ["CONCURRENCY_GROUPS", "Worker"]

#: Threads of a worker. Work is done one call at a time and always by the same thread; many calls
#: of generate share the engine, and refits and questions get through meanwhile.
CONCURRENCY_GROUPS = {"work": 1, "generate": 256, "refit": 2, "control": 2}


class Worker:
    """Hosts a backend, from :meth:`build` on."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._backend: Any = None
        self._guard = threading.Lock()  # of both below
        self._abandoned: set[str] = set()
        self._streams: dict[str, tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = {}

    @as_text
    def place(self) -> dict[str, Any]:
        """Where this process is: ``node``, ``address``, a free TCP ``port`` and ``pid``."""
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        return {
            "node": socket.gethostname(),
            "address": "127.0.0.1",
            "port": port,
            "pid": os.getpid(),
        }

    @as_text
    def build(self, kind: Kind, config: Mapping[str, Any], context: WorkerContext) -> None:
        """Loads the backend from what is installed in this process's environment."""
        from rl_core.plugins.discovery import load_object
        from rl_core.plugins.registry import resolve

        manifest = resolve(config["backend"], kind, engine=True)
        build = load_object(f"{manifest.factories[kind]}.from_config")
        self._backend = build(config, worker=context)

    @as_text
    def attribute(self, name: str) -> Any:
        """An attribute of the backend."""
        return getattr(self._backend, name)

    @as_text
    def call(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Calls a method of the backend."""
        return getattr(self._backend, method)(*args, **kwargs)

    @as_text
    def call_and_wait(
        self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any], timeout_s: float
    ) -> Any:
        """Calls a method that returns futures and waits for them; the first one's result."""
        results = wait(getattr(self._backend, method)(*args, **kwargs), timeout_s)
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
        """Ends a stream whose reader is gone, and frees its rows."""
        with self._guard:
            self._abandoned.add(stream_id)
            if stream_id in self._streams:
                loop, task = self._streams[stream_id]
                loop.call_soon_threadsafe(task.cancel)
