"""The messages of a hosted process, sorted for the threads of the driver that wait for them."""

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

    from rl_hosting._messages import Channel

__all__ = ["Inbox"]


class Inbox:
    """The messages that came, and those that are awaited.

    The thread that reads refers to this object alone: a reference to :class:`HostedProcess` would
    keep the process alive after its backend was dropped.

    Attributes:
        hello: The first message.
        ended: True when no message will come any more.
        owed: Numbers of requests without a reply in time.
        broken: Why nothing more is read, if something came that is no message.
    """

    def __init__(self) -> None:
        self.hello: concurrent.futures.Future[Hello] = concurrent.futures.Future()
        self.ended = False
        self.owed: set[int] = set()
        self.broken: RLError | None = None
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
        """The next message about rows; None after the timeout, or if :meth:`wake` was called."""
        with suppress(queue.Empty):
            return self._progress.get(timeout=timeout_s)
        return None

    def wake(self) -> None:
        """Makes :meth:`next_progress` return."""
        self._progress.put(None)

    def read(self, channel: Channel) -> None:
        """Reads messages until the process closes its socket; for a separate thread."""
        try:
            while True:
                message = channel.receive()
                if isinstance(message, Progress):
                    self._progress.put(message)
                elif isinstance(message, Hello):
                    self.hello.set_result(message)
                elif isinstance(message, Reply):
                    with self._guard:
                        answer = self._answers.get(message.number)
                        self.owed.discard(message.number)
                    if answer is not None and not answer.done():  # otherwise no call waits for it
                        answer.set_result(message)
                else:
                    raise TypeError("an engine sends no requests")
        except EOFError:
            pass
        except RLError as error:
            self.broken = error
        except Exception as error:
            self.broken = PluginError(
                f"its process sent a malformed message: {error}",
                fix="report it to rl-hosting",
            )
        finally:
            with self._guard:
                self.ended = True
                lost: list[concurrent.futures.Future[Any]] = [self.hello, *self._answers.values()]
            for answer in lost:
                if not answer.done():
                    answer.set_exception(EOFError())
            self.wake()
