"""The receivers in an engine's workers, as one: what the backend needs of refits."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import msgspec

from rl_core.errors import LifecycleError, RefitAborted, WeightsTornError
from rl_core.futures import spawn
from rl_core.refit import DEFAULT_DEADLINE_S
from rl_core.refit.jobs import exclusively
from rl_vllm.wire import Reply, Request, decode, encode, raised

if TYPE_CHECKING:
    import concurrent.futures
    import threading
    from collections.abc import Callable

    from rl_core.errors import WorkerError

__all__ = ["WorkerReceivers"]

#: Seconds for which an engine is asked to wait at a time, so that others get a word in.
_SLICE_S = 0.25
#: Seconds that a call may take beyond what it waits for.
_GRACE_S = 60.0


class WorkerReceivers:
    """A :class:`rl_core.refit.RefitReceiver` in every worker of one engine.

    Args:
        call: Calls the method ``refit`` of the engine's process, with a deadline.
        name: How errors call the engine.
        lock: Held while the engine generates.
        on_commit: Called with a new version before it serves; drops caches.
    """

    def __init__(
        self,
        call: Callable[..., list[bytes]],
        *,
        name: str,
        lock: threading.RLock,
        on_commit: Callable[[int], None],
    ) -> None:
        self.version = 0
        self.torn = False
        self.name = name
        self._call = call
        self._lock = lock
        self._on_commit = on_commit
        self._channels: frozenset[str] | None = None
        self._closed = False

    def check(self) -> None:
        """See :meth:`RefitReceiver.check`."""
        if self.torn:
            raise WeightsTornError(
                f"{self.name}: the weights are partly of version {self.version} and partly newer, "
                "or were dropped",
                fix="refit again; the engine needs no restart",
                version=self.version,
            )

    def prepare(self, info: dict[str, Any]) -> None:
        """See :meth:`RefitReceiver.prepare`."""
        self._ask("prepare", info=msgspec.msgpack.encode(info))
        self._channels = frozenset(info["channels"])

    def receive(
        self, *, transport: str = "ipc", deadline_s: float = DEFAULT_DEADLINE_S
    ) -> concurrent.futures.Future[dict[str, Any]]:
        """See :meth:`RefitReceiver.receive`."""
        if self._channels is None:
            raise LifecycleError(
                f"{self.name}: no trainer is known",
                fix="call prepare_refit_info(policy.prepare_refit_info()) first",
            )
        if transport not in self._channels:
            raise LifecycleError(
                f"{self.name}: the trainer offers {', '.join(self._channels)}, not {transport}",
                fix="open it on both sides (init_collective), then prepare_refit_info again",
            )
        return spawn(f"refit-{self.name}", lambda: self._receive(transport, deadline_s))

    def open(
        self, transport: str, deadline_s: float, address: dict[str, Any]
    ) -> concurrent.futures.Future[None]:
        """See :meth:`RefitReceiver.open`."""

        def meet() -> None:
            self._ask("open", transport=transport, deadline_s=deadline_s, address=address)
            self._until_done(deadline_s)

        return spawn(f"{transport}-{self.name}", meet)

    def load_handles(self, handles: dict[str, Any]) -> bool:
        """See :meth:`RefitReceiver.load_handles`."""
        with exclusively(self._lock, DEFAULT_DEADLINE_S, f"{self.name}: generation"):
            before = self.version
            try:
                self._take(self._ask("load_handles", handles=msgspec.msgpack.encode(handles)))
            except BaseException:
                self._look()
                raise
            if self.version != before:
                self._commit()
        return True

    def let_go_of_weights(self) -> None:
        """See :meth:`RefitReceiver.let_go_of_weights`."""
        self._ask("let_go_of_weights")

    def dropped(self) -> None:
        """The engine dropped its weights; only a refit brings it back."""
        self._take(self._ask("dropped"))

    def close(self) -> None:
        """Ends a refit that waits. Idempotent."""
        self._closed = True

    def _receive(self, transport: str, deadline_s: float) -> dict[str, Any]:
        end = time.monotonic() + deadline_s
        with exclusively(self._lock, deadline_s, f"{self.name}: generation or a refit before this"):
            left = max(0.1, end - time.monotonic())
            try:
                self._ask("receive", transport=transport, deadline_s=left)
                states = self._until_done(left)
            except BaseException:
                self._look()
                raise
            self._take(states)
            self._commit()
        return {**states[0]["result"], "name": self.name}

    def _until_done(self, deadline_s: float) -> list[dict[str, Any]]:
        """The workers' states when all are done; the deadline is theirs to keep."""
        while not self._closed:
            states = self._ask("done", _SLICE_S, wait_s=_SLICE_S)
            if all(state is not None for state in states):
                return states
        self._ask("close")
        raise RefitAborted(f"{self.name}: closed", fix="refit again")

    def _commit(self) -> None:
        self.torn = True  # until the caches of the old weights are gone
        self._on_commit(self.version)
        self.torn = False

    def _look(self) -> None:
        """What a failure left, if the engine can still say so."""
        self.torn = True
        self._take(self._ask("state"))

    def _take(self, states: list[dict[str, Any]]) -> None:
        versions = {state["version"] for state in states}
        self.torn = any(state["torn"] for state in states) or len(versions) > 1
        self.version = min(versions)

    def _ask(self, method: str, /, patience_s: float = 0.0, **arguments: Any) -> list[Any]:
        """Every worker's answer.

        Raises:
            WorkerError: One failed; of several failures, one that is a cause of the others.
        """
        frame = encode(Request(method, arguments))
        answers = [decode(a, type=Reply) for a in self._call(patience_s + _GRACE_S, frame)]
        errors = [error for answer in answers if (error := raised(answer)) is not None]
        if errors:
            raise min(errors, key=_is_consequence)
        return [answer.value for answer in answers]


def _is_consequence(error: WorkerError) -> bool:
    """Whether another worker's failure is why this one failed."""
    return isinstance(error, RefitAborted | WeightsTornError)
