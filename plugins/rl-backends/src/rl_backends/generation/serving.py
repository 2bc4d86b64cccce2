"""Many calls at once: their rows share one engine, and refits wait until it is empty."""

from __future__ import annotations

import atexit
import itertools
import logging
import math
import threading
import time
import weakref
from collections import deque
from contextlib import suppress
from copy import copy
from typing import TYPE_CHECKING, Any

from rl_backends.generation.rows import Completion, FailedRow, Row
from rl_core.errors import DeadlineError, LifecycleError, PluginError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from rl_backends.generation.prompts import PromptBatch
    from rl_backends.generation.rows import RowEngine, SamplingParams
    from rl_core.weights.engine_lock import EngineLock

_log = logging.getLogger(__name__)

#: Seconds for a service to end the step in which the process ends.
_GOODBYE_S = 5.0
#: Seconds without another call, and at most, that streams are gathered for in an empty engine.
_PAUSE_S = 0.0003
_GATHER_S = 0.02
_services: weakref.WeakSet[RowService] = weakref.WeakSet()


class ServedCall:
    """One call of ``generate`` or ``generate_async``.

    Args:
        method: Which of them.
        prompts: Its rows; those with a budget of 0 are not completed.
        sampling: How.
        deliver: Takes each :class:`Completion`; its ``row`` is the index in ``prompts``, then
            None; or the error that ends the call. The service's thread calls it: it must not wait.

    Attributes:
        number: Of the call.
        weights: Version and origin of those that complete its rows, once it has begun.
        roomless: Indices of rows that are not completed.
        waiting: Indices of rows that are not in the engine yet.
        running: Indices of rows that are, by key.
    """

    def __init__(
        self,
        method: str,
        prompts: PromptBatch,
        sampling: SamplingParams,
        deliver: Callable[[Completion | BaseException | None], object],
    ) -> None:
        self.method = method
        self.prompts = prompts
        self.sampling = sampling
        self.deliver = deliver
        self.number = 0
        self.weights = 0, 0
        self._ids = prompts.input_ids.cpu().numpy()  # a row of it costs a tenth of a tensor's
        self._lengths: list[int] = prompts.lengths.tolist()
        self._budgets: list[int] = prompts.budgets.tolist()
        self._seeds: list[int] = prompts.seeds.tolist()
        self.roomless = [row for row, budget in enumerate(self._budgets) if budget <= 0]
        self.waiting = deque(row for row, budget in enumerate(self._budgets) if budget > 0)
        self.running: dict[int, int] = {}

    def next_row(self, key: int) -> Row:
        """The next row that waits, for the engine."""
        index = self.waiting.popleft()
        self.running[key] = index
        return Row(
            key=key,
            call=self.number,
            index=index,
            token_ids=self._ids[index, : self._lengths[index]].tolist(),
            budget=self._budgets[index],
            seed=self._seeds[index],
            seeded=self.prompts.seeded,
            stop_strings=self.prompts.stop_strings[index],
            sampling=self.sampling,
        )

    def check(self, done: Completion, index: int, name: str) -> PluginError | None:
        """What is wrong with a backend's completion of one of its rows, or None."""
        count, logprobs, budget = len(done.token_ids), len(done.logprobs), self._budgets[index]
        fix = "report it to the backend's author"
        if count != logprobs:
            wrong = f"gave row {index} {count} tokens and {logprobs} log-probs"
        elif count > budget:
            wrong = f"gave row {index} {count} tokens of {budget}"
        elif not all(map(math.isfinite, done.logprobs)):
            wrong = (
                f"gave row {index} a log-prob that is not finite, with weights of version "
                f"{self.weights[0]}"
            )
            fix = (
                'find the NaN in the trainer\'s weights of that version (check_finite="warn" of '
                "refit names the tensor), and refit finite ones: then rows are right again; if all "
                "weights are finite, use bfloat16 or float32, because float16 overflows earlier"
            )
        else:
            return None
        return PluginError(f"{name}.complete {wrong}", fix=fix, row=index)


class RowService:
    """Serves calls from any number of threads with one :class:`RowEngine`.

    Calls begin in the order in which they come. Those that have begun put rows into the engine in
    turn, a row each, as long as there is room, so that a long call keeps no short one waiting. All
    rows of a call are completed under one version of the weights: the engine's lock is held from
    the first row to the last, and while a refit waits no call begins but those that the last one
    kept waiting.

    A thread works while there are calls, and ends with them.

    Args:
        engine: Decodes.
        lock: Of the backend.
        name: Of the backend.
        check: Raises if a call of that method cannot be served now.
        weights: Version and origin of those that are installed.
    """

    def __init__(
        self,
        engine: RowEngine,
        lock: EngineLock,
        *,
        name: str,
        check: Callable[[str], None],
        weights: Callable[[], tuple[int, int]],
    ) -> None:
        self._engine = engine
        self._lock = lock
        self._name = name
        self._check = check
        self._weights = weights
        self._guard = threading.Lock()  # of all below
        self._thread: threading.Thread | None = None
        self._keys = itertools.count()
        self._numbers = itertools.count(1)
        self._arrived: deque[ServedCall] = deque()
        self._begun: deque[ServedCall] = deque()  # with rows that are not in the engine yet
        self._running: dict[int, ServedCall] = {}  # by the keys of rows in the engine
        self._cancelled: set[int] = set()  # keys that the engine is still to cancel
        _services.add(self)

    def submit(self, call: ServedCall) -> None:
        """Takes a call; returns at once.

        Raises:
            LifecycleError: The calling thread itself keeps all calls waiting.
        """
        if self._lock.held_by_this_thread:
            raise LifecycleError(
                f"{self._name}.{call.method} was called from within a call that changes the engine "
                "(a refit, waking, putting to sleep or shutdown)",
                fix="call it after that call has returned",
            )
        self._engine.release_threads()
        with self._guard:
            call.number = next(self._numbers)
            self._arrived.append(call)
            if self._thread is None:
                thread = threading.Thread(
                    target=self._serve, name=f"generate-{self._name}", daemon=True
                )
                try:
                    thread.start()
                except BaseException:  # the system has no more threads
                    self._arrived.remove(call)
                    raise
                self._thread = thread
        self._engine.interrupt()

    def cancel(self, call: ServedCall) -> None:
        """Frees the rows that are left of a call, of which nothing more is delivered."""
        with self._guard:
            self._drop(call)
            waits = bool(self._cancelled)
        if waits:
            self._engine.interrupt()

    def progress(self, call: ServedCall) -> str:
        """Where the rows of a call are, for an error."""
        with self._guard:
            state = "has not begun" if call in self._arrived else "runs"
            return (
                f"{state} (rows in the engine: {len(call.running)}, waiting: {len(call.waiting)}, "
                f"of other calls in the engine: {len(self._running) - len(call.running)})"
            )

    def end(self, timeout_s: float) -> None:
        """Cancels all calls, and waits for the thread."""
        with self._guard:
            calls, thread = [*self._arrived, *self._begun, *self._running.values()], self._thread
        for call in dict.fromkeys(calls):
            self.cancel(call)
        if thread is not None:
            thread.join(timeout_s)

    def _drop(self, call: ServedCall) -> None:
        for calls in (self._arrived, self._begun):
            with suppress(ValueError):
                calls.remove(call)
        self._cancelled |= call.running.keys()
        for key in call.running:
            del self._running[key]
        call.running.clear()
        call.waiting.clear()

    # -- the service's thread ---------------------------------------------------------------------

    def _serve(self) -> None:
        while True:
            with self._lock:
                self._serve_turn()
            with self._guard:
                if not self._arrived:
                    self._thread = None
                    return

    def _serve_turn(self) -> None:
        """Until nothing is in the engine, and nothing may begin."""
        with self._guard:
            kept_waiting = len(self._arrived)  # by the last refit: they go before the next one
        self._gather()
        while True:
            try:
                with self._guard:
                    cancelled, self._cancelled = self._cancelled, set()
                    kept_waiting = self._begin_calls(kept_waiting)
                    rows = []  # for which there is room, one of each call in turn
                    while self._begun and len(self._running) < self._engine.room:
                        call, key = self._begun.popleft(), next(self._keys)
                        self._running[key] = call
                        rows.append(call.next_row(key))
                        if call.waiting:
                            self._begun.append(call)
                    idle = not (rows or self._running)
                if cancelled:
                    self._engine.cancel(cancelled)
                if idle:
                    return
                if rows:
                    self._engine.submit(rows)
                for done in self._engine.collect():
                    self._end_row(done)
            except BaseException as error:  # the calls that wait raise it
                self._fail_all(error)

    def _gather(self) -> None:
        """Lets calls that come one by one begin together: each start is a separate prefill."""
        end = time.monotonic() + _GATHER_S
        seen = 0
        while not self._lock.refit_waiting and time.monotonic() < end:
            with self._guard:
                count = len(self._arrived)
                streams = count > seen and self._arrived[0].method == "generate_async"
            if not streams:
                return
            seen = count
            time.sleep(_PAUSE_S)

    def _begin_calls(self, kept_waiting: int) -> int:
        """Begins calls as long as each can have a row in the engine.

        ``kept_waiting`` of them begin although a refit waits; returns how many of these are left.
        """
        while self._arrived and len(self._running) + len(self._begun) < self._engine.room:
            if kept_waiting <= 0 and self._lock.refit_waiting:
                break
            call, kept_waiting = self._arrived.popleft(), kept_waiting - 1
            try:
                self._check(call.method)
                call.weights = self._weights()
            except Exception as error:
                self._tell(call, error)
                continue
            if call.waiting:
                self._begun.append(call)
            else:
                self._tell(call, None)
        return kept_waiting

    def _end_row(self, done: Completion | FailedRow) -> None:
        with self._guard:
            call = self._running.pop(done.row, None)
            if call is None:
                if done.row in self._cancelled:  # while the engine worked
                    return
                raise PluginError(
                    f"{self._name}.row_engine ended row {done.row}, which it was not given",
                    fix="report it to the backend's author: a completion's row is the row's key",
                )
            index = call.running.pop(done.row)
            error: BaseException | None
            if isinstance(done, FailedRow):
                error = done.error
            elif (error := call.check(done, index, self._name)) is None:
                self._tell(call, Completion(index, done.token_ids, done.logprobs, done.truncated))
            if error is not None:
                self._drop(call)
                self._tell(call, error)
            elif not (call.running or call.waiting):
                self._tell(call, None)

    def _fail_all(self, error: BaseException) -> None:
        """Ends all calls that have begun, and empties the engine."""
        with self._guard:
            calls = list(dict.fromkeys([*self._running.values(), *self._begun]))
            for call in calls:
                self._drop(call)
            cancelled, self._cancelled = self._cancelled, set()
        try:
            self._engine.cancel(cancelled)
        except Exception:  # it stays broken; the next call raises
            _log.exception("%s could not cancel its rows", self._name)
        if not calls:
            _log.error("%s failed while it served no call", self._name, exc_info=error)
        for number, call in enumerate(calls):
            self._tell(call, error if number == 0 else _copied(error))

    def _tell(self, call: ServedCall, what: Completion | BaseException | None) -> None:
        try:
            call.deliver(what)
        except RuntimeError:  # its event loop is closed: nobody reads
            self._drop(call)


class Mailbox:
    """Items from another thread for an event loop: one wake-up for all that is done at once.

    Args:
        loop: That reads.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._posted: deque[tuple[asyncio.Queue[Any], Any]] = deque()
        self._woken = False

    def post(self, inbox: asyncio.Queue[Any], item: object) -> None:
        """Puts an item into a queue of the loop.

        Raises:
            RuntimeError: The loop is closed.
        """
        if self.loop.is_closed():  # perhaps before it woke
            self._posted.clear()
            raise RuntimeError("the event loop is closed")
        self._posted.append((inbox, item))
        if not self._woken:
            self._woken = True
            self.loop.call_soon_threadsafe(self._hand_out)

    def _hand_out(self) -> None:
        self._woken = False  # first: what is posted from now on wakes the loop again
        while self._posted:
            inbox, item = self._posted.popleft()
            inbox.put_nowait(item)


class CallDeadline:
    """Until when a call may take.

    Args:
        seconds: From now, or None for as long as it takes.
        name: Of the backend.
    """

    def __init__(self, seconds: float | None, name: str) -> None:
        self._seconds = seconds
        self._name = name
        self._end = None if seconds is None else time.monotonic() + seconds

    def left(self) -> float | None:
        """Seconds, at least 0; None for as long as it takes."""
        if self._end is None:
            return None
        left = max(0.0, self._end - time.monotonic())
        return left if left < threading.TIMEOUT_MAX else None

    def passed(self, progress: str) -> DeadlineError:
        """The error of a call that took too long."""
        return DeadlineError(
            f"{self._name}: a call of generate did not finish within {self._seconds:g} s; it "
            f"{progress}",
            fix="raise call_deadline_s, generate fewer tokens, or make fewer calls at once",
            seconds=self._seconds,
        )


@atexit.register
def _end_all() -> None:
    """A thread that decodes while the interpreter ends would abort the process."""
    for service in list(_services):
        service.end(_GOODBYE_S)


def _copied(error: BaseException) -> BaseException:
    """The same error for another thread, since raising one changes it."""
    try:
        return copy(error)
    except Exception:
        return error
