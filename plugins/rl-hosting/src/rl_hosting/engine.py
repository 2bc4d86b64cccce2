"""What an author writes of an engine that runs in a process of its own."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from rl_hosting._messages import Done, Prompt

__all__ = ["Engine"]


class Engine(ABC):
    """An engine, in the process that it is alone in. All methods are called by its main thread.

    Attributes:
        facts: Plain values that the driver gets: the fields of
            :class:`rl_core.backends.ModelFacts`, and whatever else a backend wants to know.
    """

    facts: dict[str, Any]

    @classmethod
    @abstractmethod
    def start(cls, config: Mapping[str, Any]) -> Self:
        """Loads a model.

        Args:
            config: The checked configuration of the backend.
        """

    @abstractmethod
    def submit(self, prompts: Sequence[Prompt]) -> None:
        """Takes rows; they are decoded from the next :meth:`step` on."""

    @abstractmethod
    def step(self) -> Sequence[Done]:
        """Works on the rows it has for a moment, such as by one token; those that ended."""

    @abstractmethod
    def cancel(self, keys: Collection[int]) -> None:
        """Forgets rows, some of which may have ended."""

    def tokens_made(self) -> int:
        """A number that moves while the engine works on rows, as a sign of life.

        By default a step that returns is one.
        """
        return time.monotonic_ns()

    @abstractmethod
    def call_workers(self, frame: bytes) -> list[bytes]:
        """Hands a frame to :meth:`rl_hosting.worker_refits.WorkerRefits.answer` in every worker.

        Returns:
            An answer from each.
        """

    def wake(self, tags: Sequence[str]) -> None:
        """Takes memory again, where it sleeps."""

    def sleep(self, tags: Sequence[str], level: int) -> None:
        """Gives memory back, as far as the manifest says so."""

    def reset_caches(self) -> bool:
        """Forgets keys and values of earlier prompts; whether it did."""
        return True

    @abstractmethod
    def shutdown(self) -> None:
        """Ends all that the engine started."""
