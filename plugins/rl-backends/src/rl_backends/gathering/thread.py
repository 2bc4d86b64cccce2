"""The one thread of a rank that computes for refits."""

from __future__ import annotations

import concurrent.futures
import queue
import threading
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from rl_core.errors import RefitError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

#: Seconds for which the end of a refit waits for what hangs in a collective.
_FINISH_S = 0.1

T = TypeVar("T")


class Part(ABC):
    """One rank's part of a source that gathers its tensors from all ranks."""

    @property
    @abstractmethod
    def part_state(self) -> int:
        """Of this rank's weights now; see :class:`~rl_backends.gathering.WeightChanges`."""

    @property
    @abstractmethod
    def part_specs(self) -> str:
        """Digest of this rank's names, shapes and dtypes of the whole tensors."""

    @abstractmethod
    def gather(self, name: str) -> torch.Tensor | None:
        """Gathers one tensor; what ranks other than 0 return does not matter.

        If it raises on any rank, what the ranks exchange next may not belong together, so that all
        later refits are refused.
        """

    @abstractmethod
    def confirm_part(self) -> None:
        """As :meth:`WeightSource.confirm`, for this rank's part; called on every rank."""

    def close_part(self) -> None:
        """As :meth:`WeightSource.close`; called on every rank once nothing is gathered any more."""


class RefitThread:
    """Runs tasks in order, in a thread that never keeps the process alive.

    A caller can stop waiting while a collective hangs. The thread still ends that task before it
    begins another, so all ranks do the same things in the same order.

    Attributes:
        collectives_diverged: Why nothing more is gathered: it failed on some rank while others may
            have continued, so that their next collectives would not match.
    """

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.collectives_diverged: str | None = None
        self._last: concurrent.futures.Future[Any] | None = None
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
        threading.Thread(
            target=_work, args=(self._tasks, device), name="refit-ranks", daemon=True
        ).start()

    @property
    def idle(self) -> bool:
        """Whether all that it was given is done."""
        return self._last is None or self._last.done()

    def submit(self, function: Callable[[], T]) -> concurrent.futures.Future[T]:
        """Does something after all else; no gradients are recorded."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._last = future
        self._tasks.put((future, function))
        return future

    def gather(self, part: Part, name: str) -> torch.Tensor | None:
        """Gathers a tensor; for :meth:`submit`.

        Raises:
            RefitError: Collectives of the ranks may no longer match.
        """
        self.check_in_sync()
        try:
            return part.gather(name)
        except BaseException as error:
            self.collectives_diverged = f"{name}: {type(error).__name__}: {error}"
            raise

    def gather_all(self, part: Part, names: Iterable[str]) -> None:
        """Gathers tensors for the other ranks; for :meth:`submit`."""
        for name in names:
            self.gather(part, name)

    def check_in_sync(self) -> None:
        """Raises RefitError if collectives of the ranks may no longer match."""
        if self.collectives_diverged is not None:
            raise RefitError(
                f"a tensor could not be gathered ({self.collectives_diverged}), so the collectives "
                "of the ranks may no longer match",
                fix="build the policy again, or the sharded module on all of its ranks; a backend "
                "must raise for changed weights in confirm_part, not in gather",
            )

    def finish(self, function: Callable[[], object]) -> None:
        """Does something last, and waits for it unless a collective hangs.

        What a hanging collective reads cannot be freed before it ends, and nobody waits for it.
        """
        future = self.submit(function)
        if concurrent.futures.wait([future], _FINISH_S).done:
            future.result()

    def close(self) -> None:
        """Ends the thread, once it has nothing to do."""
        self._tasks.put(None)


def _work(tasks: queue.SimpleQueue[Any], device: int | None) -> None:
    if device is not None:
        torch.cuda.set_device(device)
    with torch.no_grad():
        while (task := tasks.get()) is not None:
            future, function = task
            try:
                result = function()
            except BaseException as error:  # the future raises it
                future.set_exception(error)
            else:
                future.set_result(result)
            del task, future, function
