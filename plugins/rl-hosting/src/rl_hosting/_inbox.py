"""What an engine's process says, sorted for those who wait for it in the driver."""

from __future__ import annotations

import concurrent.futures
import queue
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from rl_core.errors import PluginError, RLError
from rl_hosting._messages import Hello, Progress, Reply

if TYPE_CHECKING:
    from collections.abc import Generator

    from rl_hosting._messages import Channel, Message

__all__ = ["Inbox"]


class Inbox:
    """What came.

    It knows no :class:`EngineProcess`, so that an engine that is dropped ends.

    Attributes:
        hello: The first message.
        ended: Nothing comes any more.
        owed: Numbers of replies that did not come in time.
        nonsense: Why nothing is read any more, if what came was no message.
    """

    def __init__(self) -> None:
        self.hello: concurrent.futures.Future[Hello] = concurrent.futures.Future()
        self.ended = False
        self.owed: set[int] = set()
        self.nonsense: RLError | None = None
        self._guard = threading.Lock()
        self._answers: dict[int, concurrent.futures.Future[Reply]] = {}
        self._progress: queue.SimpleQueue[Progress | None] = queue.SimpleQueue()

    @contextmanager
    def expecting(self, number: int) -> Generator[concurrent.futures.Future[Reply]]:
        """A future for the reply with a number, forgotten with the context."""
        answer: concurrent.futures.Future[Reply] = concurrent.futures.Future()
        with self._guard:
            self._answers[number] = answer
            if self.ended:
                answer.set_exception(EOFError())
        try:
            yield answer
        finally:
            with self._guard:
                del self._answers[number]
                if not answer.done():
                    self.owed.add(number)

    def next_progress(self, timeout_s: float) -> Progress | None:
        """What came of rows; None after the timeout, or if :meth:`wake` was called."""
        with suppress(queue.Empty):
            return self._progress.get(timeout=timeout_s)
        return None

    def wake(self) -> None:
        """Makes :meth:`next_progress` return."""
        self._progress.put(None)

    def read(self, channel: Channel) -> None:
        """Until the process is gone."""
        try:
            while True:
                self._sort(channel.receive())
        except EOFError:
            pass
        except RLError as error:
            self.nonsense = error
        except Exception as error:
            self.nonsense = PluginError(
                f"the engine's process said what is no message: {error}",
                fix="nothing but rl-hosting may write to its socket; report it",
            )
        finally:
            with self._guard:
                self.ended = True
                lost: list[concurrent.futures.Future[Any]] = [self.hello, *self._answers.values()]
            for answer in lost:
                if not answer.done():
                    answer.set_exception(EOFError())
            self.wake()

    def _sort(self, message: Message) -> None:
        if isinstance(message, Progress):
            self._progress.put(message)
        elif isinstance(message, Hello):
            self.hello.set_result(message)
        elif isinstance(message, Reply):
            with self._guard:
                answer = self._answers.get(message.number)
                self.owed.discard(message.number)
            if answer is not None and not answer.done():  # otherwise nobody waits any more
                answer.set_result(message)
        else:
            raise TypeError("an engine calls nobody")
