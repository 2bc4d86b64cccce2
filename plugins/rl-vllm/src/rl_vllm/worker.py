"""What runs in vLLM's workers: an end of every refit beside each part of the model.

``RefitExtension`` is mixed into vLLM's worker class (``worker_extension_cls``); its one method is
called by name in every worker. vLLM's own weight-transfer engines would be the other way: they
load tensors as they come, without versions, digests, a way back or several receivers that commit
together, so that all of the refit protocol would have to live beside them anyway, and their
interface changed with every release so far. The worker extension did not.
"""

from __future__ import annotations

import concurrent.futures
import os
import threading
from typing import TYPE_CHECKING, Any

import msgspec

from rl_core.errors import LifecycleError
from rl_core.refit import RefitReceiver
from rl_vllm.cpu_weights import keep_plain_weights
from rl_vllm.sink import ModelSink
from rl_vllm.weights import EngineWeights
from rl_vllm.wire import Reply, Request, decode, encode, failure

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["RefitExtension", "WorkerRefits"]

keep_plain_weights()  # before a model is loaded: vLLM imports this first


class RefitExtension:
    """Mixed into vLLM's worker; see the module."""

    def rl_refit(self, frame: bytes) -> bytes:
        """Answers one call of a :class:`WorkerRefits` method."""
        refits = self.__dict__.setdefault("rl_refits", None)
        if refits is None:
            refits = self.__dict__["rl_refits"] = WorkerRefits(self)
        return bytes(encode(refits.answer(decode(frame, type=Request))))


class WorkerRefits:
    """The refits of one worker.

    Args:
        worker: vLLM's.
    """

    def __init__(self, worker: Any) -> None:
        self.name = f"vLLM worker {worker.rank} (pid {os.getpid()})"
        self._weights = EngineWeights(worker)
        self._receiver = RefitReceiver(
            lambda: ModelSink(self._weights), name=self.name, lock=threading.RLock()
        )
        self._future: concurrent.futures.Future[Any] | None = None

    def answer(self, request: Request) -> Reply:
        """Calls one of the methods below."""
        methods: dict[str, Callable[..., Any]] = {
            "prepare": self.prepare,
            "receive": self.receive,
            "open": self.open,
            "done": self.done,
            "state": self.state,
            "load_handles": self.load_handles,
            "let_go_of_weights": self._receiver.let_go_of_weights,
            "dropped": self.dropped,
            "close": self._receiver.close,
        }
        try:
            return Reply(methods[request.method](**request.arguments))
        except Exception as error:
            return failure(error, self.name)

    def prepare(self, info: bytes) -> None:
        """See :meth:`RefitReceiver.prepare`."""
        self._receiver.prepare(msgspec.msgpack.decode(info))

    def receive(self, transport: str, deadline_s: float) -> None:
        """Begins a refit; :meth:`done` tells of its end."""
        self._future = self._receiver.receive(transport=transport, deadline_s=deadline_s)

    def open(self, transport: str, deadline_s: float, address: dict[str, Any]) -> None:
        """Begins to look for the sender; :meth:`done` tells of the end."""
        self._future = self._receiver.open(transport, deadline_s, address)

    def done(self, wait_s: float) -> dict[str, Any] | None:
        """What :meth:`receive` or :meth:`open` came to, or None if that takes longer."""
        if self._future is None:
            raise LifecycleError(f"{self.name}: nothing was begun", fix="call receive first")
        if not concurrent.futures.wait([self._future], wait_s).done:
            return None
        return {"result": self._future.result(), **self.state()}

    def load_handles(self, handles: bytes) -> dict[str, Any]:
        """See :meth:`RefitReceiver.load_handles`."""
        self._receiver.load_handles(msgspec.msgpack.decode(handles))
        return self.state()

    def dropped(self) -> dict[str, Any]:
        """The engine dropped its weights: nothing is right until all of them are sent."""
        self._receiver.forget()
        self._receiver.torn = True
        return self.state()

    def state(self) -> dict[str, Any]:
        """The version that the worker has, and whether its weights are torn."""
        return {"version": self._receiver.version, "torn": self._receiver.torn}
