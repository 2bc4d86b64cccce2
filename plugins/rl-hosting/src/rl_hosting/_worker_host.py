"""The process of one worker of a :class:`~rl_hosting.LocalCluster`: a backend behind calls.

Calls of the group ``work`` are made by the main thread, one after the other; those of other groups
by separate threads, so that the worker answers questions while it works.
"""

from __future__ import annotations

import queue
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from rl_hosting._messages import Hello, Reply, Request, encode, error_reply
from rl_hosting._timing import ENGINE_SEND_S
from rl_hosting._values import decode_arguments, encode_result
from rl_hosting.cluster.worker import CONCURRENCY_GROUPS, Worker

if TYPE_CHECKING:
    from collections.abc import Generator

    from rl_hosting._messages import Channel

__all__ = ["HostedWorker", "WorkerHost"]


class HostedWorker(Worker):
    """A worker that gives its streams row by row."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._rows: dict[str, Generator[Any]] = {}

    def next_row(self, stream_id: str, data: Any, greedy: bool) -> Any:
        """The next ``(row, output)`` of a stream, which begins with its first; None at its end.

        Args:
            stream_id: Identifies the stream.
            data: The batch, for the first row.
            greedy: Likewise.
        """
        if data is not None:
            self._rows[stream_id] = self.stream(stream_id, data, greedy)
        row = next(self._rows[stream_id], None)
        if row is None:
            del self._rows[stream_id]
        return row


class WorkerHost:
    """Answers the calls of a driver.

    Args:
        channel: To the driver.
        name: Of the worker, for errors.
    """

    def __init__(self, channel: Channel, name: str) -> None:
        self.name = name
        self._channel = channel
        self._worker = HostedWorker(name)
        self._work: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._threads = {
            group: ThreadPoolExecutor(count, thread_name_prefix=group)
            for group, count in CONCURRENCY_GROUPS.items()
            if group != "work"
        }

    def serve(self) -> None:
        """Answers until the socket is closed."""
        self._channel.send(encode(Hello.here()), ENGINE_SEND_S)
        threading.Thread(target=self._read, name="requests", daemon=True).start()
        while (request := self._work.get()) is not None:
            self._answer(request)

    def _read(self) -> None:
        try:
            while True:
                message = self._channel.receive()
                if isinstance(message, Request):
                    group = self._threads.get(message.arguments.get("group", "work"))
                    if group is None:
                        self._work.put(message)
                    else:
                        group.submit(self._answer, message)
        except EOFError:
            pass
        except Exception:  # no message: the driver sees that the process ends, and reads why
            traceback.print_exc()
        finally:
            self._work.put(None)

    def _answer(self, request: Request) -> None:
        try:
            if request.method == "start":
                value = encode_result(self._worker.place())
            else:
                method = getattr(self._worker, request.method)
                value = encode_result(method(*decode_arguments(request.arguments["call"])))
            reply = encode(Reply(request.number, value))
        except Exception as error:
            reply = encode(error_reply(error, self.name, request.number))
        try:
            self._channel.send(reply, ENGINE_SEND_S)
        except OSError:  # the driver has ended
            self._work.put(None)
