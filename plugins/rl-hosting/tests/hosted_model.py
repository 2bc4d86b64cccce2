"""An engine in a process of its own, for the search of ``refit_model``.

Driver and worker run the product's code; what is between them is here: calls that the engine's
process answers one after the other.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

from refit_model.parties import Engine, Sink
from refit_model.people import overtaken, reach
from refit_model.tasks import WORLD, running, world
from refit_model.threads import threads_in_hand

from rl_core.weights import RefitReceiver
from rl_hosting import _remote_receiver, worker_refits
from rl_hosting._messages import Request, decode, encode
from rl_hosting._remote_receiver import RemoteReceiver
from rl_hosting.worker_refits import WorkerRefits

#: Calls right after a stop at which others may have gone first, by what looks as closely as this.
_GRAIN = {"prepare": 3, "receive": 1}


class Process:
    """What a driver has of the engine's process."""

    def __init__(self, engine: HostedEngine) -> None:
        self.name = f"process of {engine.name}"
        self._engine = engine
        self._last: dict[str, object] = {}

    @contextmanager
    def logs_in_errors(self) -> Iterator[None]:
        yield

    def with_log(self, error: Exception) -> Exception:
        return error

    def call(self, method: str, timeout_s: float, *, call: bytes) -> list[bytes]:
        request = decode(call, type=Request)
        if request.method == "done":
            call = self._once_there_is_news(request)
        else:
            overtaken(f"call {request.method}", _GRAIN.get(request.method, 0))
        reach(self._engine)
        return [self._engine.worker.answer_frame(call)]

    def _once_there_is_news(self, request: Request) -> bytes:
        """Waits until the answer differs from the one before: others change nothing."""
        key, task, here = request.arguments["key"], running(), world()
        worker, begun = self._engine.worker, here.now

        def answer() -> object:
            future = worker._futures[key]
            return future.done(), worker._receiver.awaits_generation(future)

        if task is not None:
            task.hears = lambda: answer() != self._last.get(key, (False, False))
            task.stop(
                "call done",
                lambda: task.has_news() or here.now != begun or not here.has(self._engine),
            )
        self._last[key] = answer()
        request.arguments["wait_s"] = 0
        return encode(request)


class HostedEngine(Engine):
    """An engine whose weights are in a worker, and whose calls are made by a driver."""

    def new_receiver(self) -> RefitReceiver:
        self.worker = WorkerRefits(lambda: Sink(self), self.name)
        self._remote = RemoteReceiver(
            Process(self),  # type: ignore[arg-type]
            count=1,
            answer_s=1.0,
            lock=self.lock,
            busy=lambda: self.rows > 0,
            on_commit=lambda version: None,
            wake=lambda: None,
        )
        receiver = self.worker._receiver
        receiver._on_commit = self.commits
        return receiver

    @property
    def front(self) -> Any:
        return self._remote

    def check_label(self) -> None:
        state = self.worker.state()
        expected = self._world.offered.get(state["version"]) if self.own is None else self.own
        if not state["torn"] and self.weights != expected:
            self._world.fails(f"{self.name} labels {self.weights} as {state['label']}")


def _spawn(
    name: str, function: Callable[[], Any], stop: Callable[[], None] | None = None
) -> concurrent.futures.Future[Any]:
    return world().begin_task("H", function, asks=True).future


def hosting_in_hand() -> ExitStack:
    """Puts the plugin's threads and clock into the hands of a world."""
    stack = threads_in_hand(
        ["rl_hosting.worker_refits"], with_clock=["rl_hosting._remote_receiver"]
    )
    receiver = partial(RefitReceiver, runtime=WORLD)
    stack.enter_context(patch.object(worker_refits, "RefitReceiver", receiver))
    stack.enter_context(patch.object(_remote_receiver, "spawn", _spawn))
    return stack
