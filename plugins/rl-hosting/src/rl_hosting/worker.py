"""What runs beside each part of a model: an end of every refit, in the engine's worker."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from rl_core.cluster.remote_error import as_plain
from rl_core.plugins.discovery import load_object
from rl_core.refit import RefitReceiver
from rl_hosting.wire import Reply, Request, decode, encode, failure

if TYPE_CHECKING:
    import concurrent.futures
    from collections.abc import Callable

    from rl_core.interfaces import WeightSink

__all__ = ["GrantedLock", "WorkerRefits"]

#: Refits that are over and of which it was not told.
_KEPT = 64


class GrantedLock:
    """A lock that the backend holds for a worker: it keeps the engine from generating.

    Args:
        news: Set when the lock is asked for.
    """

    def __init__(self, news: threading.Event) -> None:
        self._news = news
        self._granted = threading.Event()

    def acquire(self, timeout: float = -1) -> bool:
        """Asks for it; whether it was granted in time."""
        if not self._granted.is_set():
            self._news.set()
        return self._granted.wait(None if timeout < 0 else timeout)

    def release(self) -> None:
        """Gives it up: the refit after this one has to ask again."""
        self._granted.clear()

    def grant(self, granted: bool) -> None:
        """The backend holds it, or does so no more."""
        (self._granted.set if granted else self._granted.clear)()


class WorkerRefits:
    """The refits of one worker.

    Args:
        sink: Makes the sink of a refit, over this worker's part of the model.
        name: Of the worker, for errors.
    """

    def __init__(self, sink: Callable[[], WeightSink], name: str) -> None:
        self.name = name
        self._sink = sink
        self._news = threading.Event()
        self._lock = GrantedLock(self._news)
        self._receiver = RefitReceiver(sink, name=name, lock=self._lock)
        self._futures: dict[str, concurrent.futures.Future[Any]] = {}

    def answer_frame(self, frame: bytes) -> bytes:
        """Answers what :class:`rl_hosting.receivers.WorkerReceivers` asks."""
        return bytes(encode(self.answer(decode(frame, type=Request))))

    def answer(self, request: Request) -> Reply:
        """Calls one of the methods below."""
        methods: dict[str, Callable[..., Any]] = {
            "check": self.check,
            "prepare": self.prepare,
            "receive": self.receive,
            "open": self.open,
            "done": self.done,
            "grant": self._lock.grant,
            "state": self.state,
            "load_handles": self.load_handles,
            "release_weights": self._receiver.release_weights,
            "dropped": self.dropped,
            "close": self._receiver.close,
            "specs": self.specs,
            "read": self.read,
            "write": self.write,
            "call": self.call,
        }
        try:
            return Reply(value=methods[request.method](**request.arguments))
        except Exception as error:
            return failure(error, self.name)

    # -- refits -----------------------------------------------------------------------------------

    def check(self) -> None:
        """Makes sure that refits can reach all that this worker computes with."""
        self._sink().begin(self._receiver.version)

    def prepare(self, info: bytes) -> None:
        """See :meth:`RefitReceiver.prepare`."""
        self._receiver.prepare(msgspec.msgpack.decode(info))

    def receive(self, key: str, **how: Any) -> None:
        """Begins a refit; :meth:`done` tells of its end."""
        self._begin(key, self._receiver.receive(**how))

    def open(self, key: str, transport: str, deadline_s: float, address: dict[str, Any]) -> None:
        """Begins to look for the sender; :meth:`done` tells of the end."""
        self._begin(key, self._receiver.open(transport, deadline_s, address))

    def _begin(self, key: str, future: concurrent.futures.Future[Any]) -> None:
        self._futures[key] = future
        future.add_done_callback(lambda _: self._news.set())

    def done(self, key: str, wait_s: float) -> dict[str, Any]:
        """How far :meth:`receive` or :meth:`open` is; waits for news."""
        future = self._futures[key]
        if not (future.done() or self._waits_for_generation(future)):
            self._news.wait(wait_s)
        self._news.clear()
        if not future.done():
            return {"done": False, "wants_lock": self._waits_for_generation(future)}
        for old in [k for k in self._futures if k != key and self._futures[k].done()][:-_KEPT]:
            del self._futures[old]  # nobody asked
        error = future.exception()
        if error is not None:  # told when all workers are done, with what they are then
            return {"done": True, "error": as_plain(error, self.name), **self.state()}
        return {"done": True, "result": future.result(), **self.state()}

    def _waits_for_generation(self, future: concurrent.futures.Future[Any]) -> bool:
        """Whether it is this refit, and no other one, that generation keeps waiting."""
        return self._receiver.held_up(future)

    def load_handles(self, handles: bytes) -> dict[str, Any]:
        """See :meth:`RefitReceiver.load_handles`."""
        self._receiver.load_handles(msgspec.msgpack.decode(handles))
        return self.state()

    def dropped(self) -> dict[str, Any]:
        """The engine dropped its weights: nothing is right until all of them are sent."""
        self._receiver.dropped()
        return self.state()

    def state(self) -> dict[str, Any]:
        """The version that the worker has, and whether its weights are torn."""
        return {"version": self._receiver.version, "torn": self._receiver.torn}

    # -- the weights themselves -------------------------------------------------------------------

    def specs(self) -> list[Any]:
        """See :meth:`WeightSink.specs`."""
        return [msgspec.to_builtins(spec) for spec in self._sink().specs()]

    def call(self, function: str, arguments: dict[str, Any]) -> Any:
        """See :meth:`GenerationBackend.beside_weights`."""
        return load_object(function)(self._sink, **arguments)

    def read(self, name: str) -> bytes:
        """The bytes of a tensor; all workers of an engine at the same time."""
        [(_, tensor)] = self._sink().read([name])
        return bytes(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())

    def write(self, name: str, offset: int, data: bytes) -> None:
        """Writes elements of a tensor, past all refits."""
        sink = self._sink()
        [spec] = [one for one in sink.specs() if one.name == name]
        run = torch.frombuffer(bytearray(data), dtype=getattr(torch, spec.dtype))
        sink.write(name, offset, run, of=spec)
        sink.finish(self._receiver.version)
