"""Rows at a server: each is a request of its own, whose tokens come back as a stream."""

from __future__ import annotations

import asyncio
import queue
import secrets
import time
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, TypeAlias

from rl_backends import Completion, FailedRow, RowEngine
from rl_core.errors import DeadlineError, PluginError, RLError
from rl_hosting.server.row_stream import RowStream

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from rl_backends.generation.rows import Row
    from rl_hosting.server.server import Server

__all__ = ["ServerRows"]

#: Seconds that collecting waits for a row to end; news of any kind wakes it.
_WAIT_S = 0.5
#: Seconds between words to the server that a row is given up, until it let go: the first may come
#: before the row itself.
_AGAIN_S = 0.25
#: How often in the time that it may be silent a server is asked whether it decodes.
_LOOKS = 10
#: Seconds after which a row that was given up is forgotten here, and its connection closed.
_FORGET_S = 10.0


#: Ends of rows, keys of rows that were given up, and None for nothing.
_News: TypeAlias = Completion | FailedRow | frozenset[int] | None


class ServerRows(RowEngine):
    """Decodes rows with a running server.

    Args:
        server: The server.
        room: Rows that it is given at a time.
        silence_s: Seconds without a token of any client after which it counts as hung.
    """

    def __init__(self, server: Server, *, room: int, silence_s: float) -> None:
        self.room = room
        self._server = server
        self._client = server.client
        self._silence_s = silence_s
        # SGLang aborts every row whose name begins with the one that it is given: names are of
        # one length, and no other client's begin like these.
        self._names = secrets.token_hex(8)
        self._news: queue.SimpleQueue[_News] = queue.SimpleQueue()
        self._given_up: set[int] = set()  # of which an end may be on its way
        # All below is of the client's thread.
        self._tasks: dict[int, asyncio.Task[None]] = {}  # of rows that a call waits for
        self._leaving: set[asyncio.Task[None]] = set()  # of rows that the server is to let go
        self._confirmed: asyncio.Task[None] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._heard = 0.0

    def submit(self, rows: Sequence[Row]) -> None:
        """See :meth:`RowEngine.submit`."""
        self._client.loop.call_soon_threadsafe(self._start, list(rows))

    def collect(self) -> Sequence[Completion | FailedRow]:
        """See :meth:`RowEngine.collect`; the server decodes meanwhile."""
        news = []
        with suppress(queue.Empty):
            news.append(self._news.get(timeout=_WAIT_S))
            while True:
                news.append(self._news.get_nowait())
        ended = []
        for one in news:
            if isinstance(one, frozenset):
                self._given_up -= one
            elif one is not None and one.row not in self._given_up:
                ended.append(one)
        return ended

    def cancel(self, keys: Collection[int]) -> None:
        """See :meth:`RowEngine.cancel`: the server gives the rows up at once."""
        given_up = frozenset(keys)
        self._given_up |= given_up
        self._client.loop.call_soon_threadsafe(self._cancel, given_up)

    def interrupt(self) -> None:
        """See :meth:`RowEngine.interrupt`."""
        self._news.put(None)

    def drain(self, timeout_s: float) -> None:
        """Waits until the server has let go of all rows that were given up.

        Raises:
            DeadlineError: It has not.
        """

        async def all_gone() -> None:
            while self._leaving:
                await asyncio.wait(set(self._leaving))

        self._client.run(all_gone(), timeout_s, "whether aborted rows have ended")

    # -- the client's thread ----------------------------------------------------------------------

    def _start(self, rows: list[Row]) -> None:
        loop = self._client.loop
        if not self._tasks:  # the server may have changed since the last row
            self._confirmed = loop.create_task(self._server.confirm())
            self._heard = time.monotonic()
        if self._watch is None or self._watch.done():
            self._watch = loop.create_task(self._watch_silence())
        assert self._confirmed is not None
        for row in rows:
            self._tasks[row.key] = loop.create_task(self._serve(row, self._confirmed))

    def _cancel(self, keys: frozenset[int]) -> None:
        for key in keys:
            if (task := self._tasks.pop(key, None)) is not None:
                self._let_go(key, task)
        self._news.put(keys)  # none of them ends after this

    async def _serve(self, row: Row, confirmed: asyncio.Task[None]) -> None:
        """Completes a row or fails it, and sees to it that the server lets go of it."""
        try:
            await asyncio.shield(confirmed)
            facts = self._server.facts
            if len(row.token_ids) > facts.longest_prompt:  # an engine may reserve some tokens
                self._end(Completion(row.key, (), (), True))
                return
            decoded = RowStream(row, self._server)
            if row.key not in self._tasks:  # it was given up while the server was looked at
                return
            path, request = self._server.generate_path, decoded.request(self._name(row.key))
            async with aclosing(self._client.events(path, request)) as events:
                async for event in events:
                    self._heard = time.monotonic()
                    if row.key not in self._tasks:
                        continue  # until the server lets go
                    done, labels = decoded.take(event)
                    if others := labels - {self._server.counted_on.label}:
                        raise self._server.lost(min(others))
                    if done is None:
                        continue
                    task = self._tasks[row.key]
                    self._end(done)
                    if not decoded.ended:
                        self._let_go(row.key, task)
            if row.key in self._tasks:
                raise self._client.gone(None)
        except RLError as error:
            self._end(FailedRow(row.key, error))
        except Exception as error:
            failure = PluginError(
                f"a row could not be decoded by {self._client.who}: "
                f"{type(error).__name__}: {error}",
                fix="report it to the author of the backend",
            )
            failure.__cause__ = error
            self._end(FailedRow(row.key, failure))

    def _end(self, done: Completion | FailedRow) -> None:
        if self._tasks.pop(done.row, None) is not None:
            self._news.put(done)

    def _let_go(self, key: int, task: asyncio.Task[None]) -> None:
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)
        leaving = self._client.loop.create_task(self._abort(key, task))
        self._leaving.add(leaving)
        leaving.add_done_callback(self._leaving.discard)

    async def _abort(self, key: int, task: asyncio.Task[None]) -> None:
        """Tells the server to give a row up, until its stream has ended."""
        end = time.monotonic() + _FORGET_S
        while not task.done() and time.monotonic() < end:
            with suppress(RLError):  # it is gone, and the row with it
                await self._server.abort(self._name(key), _FORGET_S)
            await asyncio.wait({task}, timeout=_AGAIN_S)
        task.cancel()

    async def _watch_silence(self) -> None:
        """Fails all rows if the server decodes nothing, neither for this client nor for others.

        Rows may wait long behind those of others, or because somebody paused the server. That it
        answers is no sign of life.
        """
        progress, often_s = None, self._silence_s / _LOOKS
        while self._tasks:
            await asyncio.sleep(often_s)
            with suppress(RLError):
                before, progress = progress, await self._server.progress(often_s)
                if progress != before or await self._server.paused(often_s):
                    self._heard = time.monotonic()
            if time.monotonic() < self._heard + self._silence_s:
                continue
            for key in list(self._tasks):
                error = DeadlineError(
                    f"{self._client.who} decoded no token for {self._silence_s:g} s, for no "
                    f"client, while it had rows to decode ({len(self._tasks)})",
                    fix="look at its log, or raise request_timeout_s",
                    url=self._client.url,
                    seconds=self._silence_s,
                )
                task = self._tasks[key]
                self._end(FailedRow(key, error))
                self._let_go(key, task)

    def _name(self, key: int) -> str:
        return f"{self._names}-{key:020d}"
