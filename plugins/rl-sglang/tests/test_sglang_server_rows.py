"""Rows at a server that are given up while they end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from rl_backends import Completion, FailedRow
from rl_core.errors import WorkerDiedError
from rl_hosting.server.rows import ServerRows


def test_a_row_that_was_given_up_ends_no_more() -> None:
    """The server's thread may have ended it before it hears of that."""
    later: list[Any] = []
    loop = SimpleNamespace(call_soon_threadsafe=lambda *call: later.append(call))
    server: Any = SimpleNamespace(client=SimpleNamespace(loop=loop, url="http://here"))
    rows = ServerRows(server, room=4, silence_s=1.0)
    rows._tasks = dict.fromkeys((1, 2, 3), Any)  # type: ignore[arg-type] # nothing is decoded
    error = WorkerDiedError("the server is gone")
    rows._end(FailedRow(1, error))
    assert [done.row for done in rows.collect()] == [1]
    rows.cancel([2])
    rows._end(FailedRow(2, error))
    rows._end(Completion(3, (5,), (-1.0,), False))
    assert [done.row for done in rows.collect()] == [3]
    for call, *arguments in later:
        call(*arguments)
    assert rows.collect() == []
    assert rows._given_up == set()
