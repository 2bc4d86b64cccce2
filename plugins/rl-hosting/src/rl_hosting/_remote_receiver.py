"""The receivers in a hosted engine's workers, which the driver uses as one."""

from __future__ import annotations

import secrets
import threading
import time
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from rl_core.errors import (
    DeadlineError,
    LifecycleError,
    PluginError,
    RefitAborted,
    RLError,
    WeightsTornError,
    WorkerDiedError,
    WorkerError,
)
from rl_core.futures import spawn
from rl_core.interfaces import Box, TensorSpec
from rl_core.weights import DEFAULT_DEADLINE_S
from rl_core.weights.options import check_deadline
from rl_hosting._messages import Reply, Request, decode, encode, error_of
from rl_hosting._timing import REFIT_BUSY_POLL_S, REFIT_POLL_S, REFIT_REPORT_S
from rl_hosting.cluster.remote_error import decode_error

if TYPE_CHECKING:
    import concurrent.futures
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from rl_core.weights.engine_lock import EngineLock

__all__ = ["RemoteReceiver"]


class Workers(Protocol):
    """The way to an engine's workers: its process, or a server that runs it."""

    @property
    def name(self) -> str:
        """Of the engine, for errors."""

    def call(self, method: str, timeout_s: float, *, call: bytes) -> Any:
        """The answers of all workers to a frame, each as bytes."""

    def logs_in_errors(self) -> AbstractContextManager[None]:
        """Adds the end of the engine's log to errors, if it is known here."""

    def with_log(self, error: WorkerError) -> RLError:
        """The error, with the end of the engine's log if it is known here."""


class RemoteReceiver:
    """Has the methods of a :class:`rl_core.weights.RefitReceiver`, and calls one in every worker.

    It sends frames to the :class:`rl_hosting.WorkerRefits` of each.

    Args:
        process: The way to them.
        count: How many workers there are.
        answer_s: Seconds for an answer to calls that wait for nothing.
        lock: Held while the engine generates.
        busy: Whether the engine has rows.
        on_commit: Called with a new version before it serves; drops caches.
        wake: Called before weights are read or written; loads them if they sleep.
    """

    def __init__(
        self,
        process: Workers,
        *,
        count: int,
        answer_s: float,
        lock: EngineLock,
        busy: Callable[[], bool],
        on_commit: Callable[[int], None],
        wake: Callable[[], None],
    ) -> None:
        self.version = self.origin = 0
        self.label = ""
        self.torn = False
        self.name = process.name
        self._process = process
        self._count = count
        self._answer_s = answer_s
        self._lock = lock
        self._busy = busy
        self._on_commit = on_commit
        self._wake = wake
        self._prepared = False
        self._number = 0  # of the refit that was requested last, of all workers
        self._closed = threading.Event()

    def check(self) -> None:
        """See :meth:`RefitReceiver.check`."""
        if self.torn:
            raise WeightsTornError(
                f"{self.name}: the weights are partly of version {self.version} and partly newer, "
                "were dropped, or are of another client of the engine",
                fix="call refit again; the engine needs no restart",
                version=self.version,
            )

    def prepare(self, info: dict[str, Any]) -> None:
        """See :meth:`RefitReceiver.prepare`."""
        self._ask("prepare", DEFAULT_DEADLINE_S, info=msgspec.msgpack.encode(info))
        self._number, self._prepared = info["number"] - 1, True

    def receive(
        self,
        *,
        transport: str = "ipc",
        deadline_s: float = DEFAULT_DEADLINE_S,
        number: int | None = None,
    ) -> concurrent.futures.Future[dict[str, Any]]:
        """See :meth:`RefitReceiver.receive`."""
        if not self._prepared:
            raise LifecycleError(
                f"{self.name} does not know its trainer yet",
                fix="call prepare_refit_info(policy.prepare_refit_info()) first",
            )
        check_deadline(deadline_s)
        number = number or self._number + 1
        self._number = max(self._number, number)
        how = {"transport": transport, "deadline_s": deadline_s, "number": number}
        return spawn(f"refit-{self.name}", lambda: self._receive(how))

    def open(
        self, transport: str, deadline_s: float, address: dict[str, Any]
    ) -> concurrent.futures.Future[None]:
        """See :meth:`RefitReceiver.open`."""

        def connect() -> None:
            key = secrets.token_hex(8)
            arguments: dict[str, Any] = {"transport": transport, "address": address}
            end = time.monotonic() + deadline_s
            with self._process.logs_in_errors():
                self._ask(
                    "open", deadline_s + REFIT_REPORT_S, key=key, deadline_s=deadline_s, **arguments
                )
                self._until_done(key, end)

        return spawn(f"{transport}-{self.name}", connect)

    def release_weights(self) -> None:
        """See :meth:`RefitReceiver.release_weights`."""
        self._ask("release_weights")

    def specs(self) -> list[TensorSpec]:
        """The tensors that the engine expects."""
        return msgspec.convert(self._ask("specs")[0], list[TensorSpec])

    def read(self, name: str) -> list[tuple[Box, bytes | None]]:
        """The boxes and bytes of a tensor as it is installed, those of all workers."""
        self._wake()
        answers = self._ask("read", name=name)
        return msgspec.convert(
            [piece for answer in answers for piece in answer], list[tuple[Box, bytes | None]]
        )

    def write(self, name: str, offset: int, data: bytes) -> None:
        """Writes elements of a tensor, without a refit."""
        self._wake()
        self._ask("write", name=name, offset=offset, data=data)

    def call(self, function: str, arguments: dict[str, Any]) -> list[Any]:
        """Calls a function beside the weights in every worker."""
        return self._ask("call", function=function, arguments=arguments)

    def dropped(self) -> None:
        """Notes that the engine freed its weights for good: it is torn until a refit."""
        self._adopt(self._ask("dropped"))

    def cancel(self, number: int) -> None:
        """See :meth:`RefitReceiver.cancel`."""
        self._number = max(self._number, number)
        self._ask("cancel", REFIT_REPORT_S, number=number)

    def close(self) -> None:
        """Ends a refit that waits. Idempotent."""
        self._closed.set()

    def _receive(self, how: dict[str, Any]) -> dict[str, Any]:
        end, key = time.monotonic() + how["deadline_s"], secrets.token_hex(8)
        with self._process.logs_in_errors(), ExitStack() as held:
            held.callback(self._lock.cancel_acquire)
            try:
                self._ask("receive", how["deadline_s"] + REFIT_REPORT_S, key=key, **how)
                states = self._until_done(key, end, held)
                self._adopt(states)
                self.check()
                self.torn = True  # the caches are those of the old weights
                self._on_commit(self.version)
                self.torn = False
            except BaseException as error:
                with suppress(RLError):  # workers that began wait for the others
                    self.cancel(how["number"])
                if self._lock.held_by_this_thread:  # or else it has written nothing
                    self.torn = True  # unless the engine answers otherwise
                    with suppress(WorkerDiedError, DeadlineError):
                        self._adopt(self._ask("state", REFIT_REPORT_S))
                if self._closed.is_set() and isinstance(error, WorkerDiedError):
                    raise self._aborted() from None
                raise
        return {**states[0]["result"], "name": self.name}

    def _until_done(
        self, key: str, end: float, held: ExitStack | None = None
    ) -> list[dict[str, Any]]:
        """Waits until all workers are done; they keep the deadline themselves.

        One thread of the engine's process makes all calls: one that waited there for the end of a
        refit would keep the engine from decoding. So the workers are polled.

        Args:
            key: What :meth:`WorkerRefits.receive` or ``open`` was given.
            end: When the deadline ends, by the monotonic clock.
            held: Frees the engine's lock, which a worker may need: generation waits from then
                until this context ends.

        Returns:
            The workers' states.

        Raises:
            DeadlineError: A worker did not keep it.
            RefitAborted: The engine is shut down.
        """
        while not self._closed.is_set():
            left, busy = max(0.0, end - time.monotonic()), self._busy()
            states = self._ask(
                "done", left + REFIT_REPORT_S, key=key, wait_s=0 if busy else REFIT_POLL_S
            )
            if all(state["done"] for state in states):
                if errors := [decode_error(s["error"]) for s in states if s.get("error")]:
                    raise min(errors, key=_is_effect)
                return states
            if time.monotonic() > end + REFIT_REPORT_S:
                late = [rank for rank, state in enumerate(states) if not state["done"]]
                raise DeadlineError(
                    f"{self.name}: the refit did not end within its deadline in these workers: "
                    f"{', '.join(map(str, late))}",
                    fix="look at what these workers do (the engine's log, py-spy dump); if they "
                    "hang, build the engine again",
                    workers=late,
                )
            wanted = held is not None and any(state.get("wants_lock") for state in states)
            if held is not None and wanted and not self._lock.held_by_this_thread:
                if self._lock.acquire_keeping_place(REFIT_BUSY_POLL_S):
                    held.callback(self._lock.release)
                    self._wake()  # what sleeps cannot be written to
                    self._ask("grant", left + REFIT_REPORT_S, key=key)
            elif busy:
                time.sleep(REFIT_BUSY_POLL_S)
        raise self._aborted()

    def _aborted(self) -> RefitAborted:
        return RefitAborted(f"{self.name}: it was shut down", fix="build a new backend")

    def _adopt(self, states: list[dict[str, Any]]) -> None:
        weights = {(state["version"], state["origin"], state["label"]) for state in states}
        self.torn = any(state["torn"] for state in states) or len(weights) > 1
        self.version, self.origin, self.label = min(weights)

    def _ask(self, method: str, /, timeout_s: float | None = None, **arguments: Any) -> list[Any]:
        """Every worker's answer.

        Raises:
            WorkerError: One failed; of several failures, one that is a cause of the others.
            PluginError: There are not as many answers as workers, or one is no reply.
        """
        frame = encode(Request(method, arguments))
        try:
            found = self._process.call("refit", timeout_s or self._answer_s, call=frame)
            answers = [decode(answer, type=Reply) for answer in found]
            if len(answers) != self._count:
                raise ValueError(f"{len(answers)} answers, expected {self._count}")
        except (TypeError, ValueError) as wrong:
            if isinstance(wrong, WorkerError):
                raise
            raise PluginError(
                f"{self.name}: call_workers did not return one answer of each worker: {wrong}",
                fix="report it to the backend's author: the answers are those of WorkerRefits",
            ) from wrong
        errors = [error for answer in answers if (error := error_of(answer)) is not None]
        if errors:
            raise self._process.with_log(min(errors, key=_is_effect))
        return [answer.value for answer in answers]


def _is_effect(error: WorkerError) -> bool:
    """Whether another worker's failure is why this one failed."""
    return isinstance(error, RefitAborted | WeightsTornError)
