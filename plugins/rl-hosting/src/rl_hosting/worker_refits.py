"""The receiver of refits in one worker of an engine, beside its part of the model."""

from __future__ import annotations

import concurrent.futures
import os
import threading
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from rl_backends.base_weights import BASE
from rl_backends.engine.nan_watch import NAN_WATCH
from rl_core.errors import CapabilityError
from rl_core.plugins.discovery import load_object
from rl_core.weights import DEFAULT_DEADLINE_S, RefitReceiver
from rl_core.weights.data.runs import flat
from rl_hosting._messages import Reply, Request, decode, encode, error_reply
from rl_hosting._timing import REFIT_REPORT_S
from rl_hosting.cluster.remote_error import encode_error

if TYPE_CHECKING:
    from collections.abc import Callable

    from rl_core.interfaces import WeightSink

__all__ = ["TORN", "WorkerRefits"]

#: How the reason begins with which a shared engine ends rows while its weights are torn: clients
#: raise a WeightsTornError for it.
TORN = "WeightsTornError: "

#: Variable which, set to 1 where a shared engine runs, lets its clients call functions beside the
#: weights, and write weights without a refit: so the conformance suite puts faults into engines.
FAULTS = "RL_SERVER_FAULTS"
#: How many refits that are over are kept for a driver that has not fetched their results.
_KEPT = 64


class _Lease:
    """The engine's lock for one refit: the driver, which calls the engine to generate, holds it.

    Each refit has its own lease, so that what is granted to one is of no use to another.

    Args:
        news: Set when a refit needs the lock.
    """

    def __init__(self, news: threading.Event) -> None:
        self._news = news
        self._granted = threading.Event()

    def acquire(self, timeout: float = -1) -> bool:
        """Requests it from the driver; whether it was granted in time."""
        if not self._granted.is_set():
            self._news.set()
        return self._granted.wait(None if timeout < 0 else timeout)

    def release(self) -> None:
        """Ends the lease; the driver frees the lock once it hears that the refit has ended."""
        self._granted.clear()

    def grant(self) -> None:
        """Notes that the driver holds the lock for this refit."""
        self._granted.set()


class WorkerRefits:
    """Receives refits in one worker, which the driver controls by frames.

    Make one for each worker, in its process, and give :meth:`answer_frame` every frame that the
    engine's ``call_workers`` gets. A frame names one of the other methods.

    Args:
        sink: Makes the sink of a refit, over this worker's part of the model.
        name: Of the worker, for errors.
        shared: The engine has clients that hold no lock of the driver's: :meth:`grant` keeps the
            worker until the refit has ended, so that it computes nothing meanwhile.
    """

    def __init__(self, sink: Callable[[], WeightSink], name: str, *, shared: bool = False) -> None:
        self.name = name
        self._shared = shared
        self._sink = sink
        self._news = threading.Event()
        lock, committed = threading.Lock(), NAN_WATCH.committed
        self._receiver = RefitReceiver(sink, name=name, lock=lock, on_commit=committed)
        self._leases: dict[str, _Lease] = {}
        self._futures: dict[str, concurrent.futures.Future[Any]] = {}
        self._deadline_s = DEFAULT_DEADLINE_S  # of the refit that began last
        self._writes: concurrent.futures.Future[Any] | None = None  # the refit granted last

    def answer_frame(self, frame: bytes) -> bytes:
        """Calls the method that a frame names.

        Args:
            frame: Of the driver.

        Returns:
            The answer, which ``call_workers`` returns. Errors are part of it.
        """
        return bytes(encode(self._answer(decode(frame, type=Request))))

    def _answer(self, request: Request) -> Reply:
        methods: dict[str, Callable[..., Any]] = {
            "check": self.check,
            "prepare": self.prepare,
            "receive": self.receive,
            "open": self.open,
            "done": self.done,
            "grant": self.grant,
            "cancel": self._receiver.cancel,
            "state": self.state,
            "release_weights": self._receiver.release_weights,
            "dropped": self.dropped,
            "specs": self.specs,
            "read": self.read,
            "write": self.write,
            "call": self.call,
        }
        try:
            if self._shared and request.method in ("call", "write") and not os.environ.get(FAULTS):
                raise CapabilityError(
                    f"{self.name} takes refits from clients, and no other calls that change it",
                    fix=f"to test its backend with faults, start the server with {FAULTS}=1",
                    capability=request.method,
                )
            return Reply(value=methods[request.method](**request.arguments))
        except Exception as error:
            return error_reply(error, self.name)

    # -- refits -----------------------------------------------------------------------------------

    def check(self) -> None:
        """Has a sink begin: it makes sure that refits reach all that the worker computes with."""
        self._sink().begin(self._receiver.version)

    def prepare(self, info: bytes) -> None:
        """See :meth:`RefitReceiver.prepare`."""
        trainer = msgspec.msgpack.decode(info)
        self._receiver.prepare(trainer)
        if base := trainer.get(BASE):  # of one that sends adapters alone
            self._sink().expect_base(base)  # type: ignore[attr-defined]

    def receive(self, key: str, **how: Any) -> None:
        """Begins a refit, of which :meth:`done` returns the result."""
        lease = self._leases[key] = _Lease(self._news)
        self._deadline_s = how.get("deadline_s", DEFAULT_DEADLINE_S)
        self._begin(key, self._receiver.receive(lock=lease, **how))

    def grant(self, key: str) -> None:
        """The driver holds the engine's lock for this refit, until :meth:`done` reports its end."""
        self._writes = self._futures[key]
        self._leases[key].grant()
        if self._shared:
            concurrent.futures.wait([self._writes], self._deadline_s + REFIT_REPORT_S)

    def open(self, key: str, transport: str, deadline_s: float, address: dict[str, Any]) -> None:
        """Begins to connect to the sender; :meth:`done` returns whether it did."""
        self._begin(key, self._receiver.open(transport, deadline_s, address))

    def _begin(self, key: str, future: concurrent.futures.Future[Any]) -> None:
        self._futures[key] = future
        future.add_done_callback(lambda _: self._news.set())

    def done(self, key: str, wait_s: float) -> dict[str, Any]:
        """The state of what :meth:`receive` or :meth:`open` began.

        Args:
            key: What that was given.
            wait_s: Seconds for it to end, or to ask for the lock.
        """
        future = self._futures[key]
        if not (future.done() or self._receiver.awaits_generation(future)):
            self._news.wait(wait_s)
        self._news.clear()
        if not future.done():
            return {"done": False, "wants_lock": self._receiver.awaits_generation(future)}
        for old in [k for k in self._futures if k != key and self._futures[k].done()][:-_KEPT]:
            del self._futures[old]  # the driver has not fetched it
            self._leases.pop(old, None)
        error = future.exception()
        if error is not None:  # the driver raises it when all workers are done
            return {"done": True, "error": encode_error(error, self.name), **self.state()}
        return {"done": True, "result": future.result(), **self.state()}

    def dropped(self) -> dict[str, Any]:
        """The engine freed its weights: it is torn until all of them are sent."""
        self._receiver.dropped()
        return self.state()

    def state(self) -> dict[str, Any]:
        """The version and origin that the worker has, and whether its weights are torn.

        They count as torn while a refit may write. A server gives rows the ``label`` of both, which
        is empty before the first refit.
        """
        writes = self._writes is not None and not self._writes.done()
        version, origin = self._receiver.version, self._receiver.origin
        return {
            "version": version,
            "origin": origin,
            "label": f"{origin:x}-{version}" if origin else "",
            "torn": self._receiver.torn or writes,
        }

    # -- the weights themselves -------------------------------------------------------------------

    def specs(self) -> list[Any]:
        """See :meth:`WeightSink.specs`."""
        return [msgspec.to_builtins(spec) for spec in self._sink().specs()]

    def call(self, function: str, arguments: dict[str, Any]) -> Any:
        """See :meth:`GenerationBackend.call_in_workers`."""
        return load_object(function)(self._sink, **arguments)

    def read(self, name: str) -> list[Any]:
        """The boxes and bytes of a tensor's pieces; all workers must read at the same time.

        The bytes are None where the engine has only what it computed of the tensor.
        """
        sink = self._sink()
        [spec] = [one for one in sink.specs() if one.name == name]
        pieces = sink.pieces()
        boxes = [tuple((0, size) for size in spec.shape)]
        if pieces is not None and spec.numel:
            boxes = [piece.box for piece in pieces if piece.name == (spec.alias_of or name)]
        answer: list[Any] = []
        for box, (_, tensor) in zip(boxes, sink.read([name]), strict=True):
            if tensor is not None:
                run = flat(tensor.cpu().contiguous()).view(torch.uint8)
            answer.append((box, None if tensor is None else bytes(run.numpy())))
        return answer

    def write(self, name: str, offset: int, data: bytes) -> None:
        """Writes elements of a tensor, without a refit."""
        sink = self._sink()
        [spec] = [one for one in sink.specs() if one.name == name]
        run = torch.frombuffer(bytearray(data), dtype=getattr(torch, spec.dtype))
        sink.write(name, offset, run, of=spec)
        sink.finish(self._receiver.version)
