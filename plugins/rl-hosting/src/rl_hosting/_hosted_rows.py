"""The rows in an engine's process, as a service of rows in the driver sees them."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING

from rl_backends import Completion, FailedRow, RowEngine
from rl_core.errors import WorkerDiedError
from rl_hosting._timing import COLLECT_S
from rl_hosting.cluster.remote_error import decode_error

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from rl_backends import Row
    from rl_hosting._process import HostedProcess

__all__ = ["HostedRows"]


class HostedRows(RowEngine):
    """Gives the rows of all calls to the engine's process, and collects those that ended.

    Args:
        process: Of the engine.
        silence_s: Returns the seconds without a sign of life after which the engine counts as hung.
    """

    def __init__(self, process: HostedProcess, silence_s: Callable[[], float]) -> None:
        self._process = process
        self._silence_s = silence_s
        self._rows: set[int] = set()
        self._newest = -1
        self._silent: float | None = None  # time of its last sign of life, while it has rows

    @property
    def busy(self) -> bool:
        """Whether the engine decodes."""
        return bool(self._rows)

    def submit(self, rows: Sequence[Row]) -> None:
        """See :meth:`RowEngine.submit`."""
        if self._silent is None:
            self._silent = time.monotonic()
        self._rows |= {row.key for row in rows}
        self._newest = max({self._newest} | self._rows)
        self._process.submit(rows)

    def collect(self) -> list[Completion | FailedRow]:
        """Waits for rows that ended.

        Raises:
            WorkerDiedError: Its process is gone, or gave no sign of life and was ended.
            WorkerError: It failed, and lost all rows in it.
            PluginError: It ended a row that it was never given; it was ended.
        """
        progress = self._process.progress(COLLECT_S)
        now = time.monotonic()
        if progress is None:
            if self._silent is not None and now - self._silent > self._silence_s():
                raise self._process.give_up(
                    f"has rows to decode, gave no sign of life for {now - self._silent:.0f} s"
                )
            return []
        found: list[Completion | FailedRow] = [*progress.rows]
        for key, error in progress.failed.items():
            found.append(FailedRow(key, self._process.with_log(decode_error(error))))
        ended = []
        for done in found:
            if done.row > self._newest:
                raise self._process.give_up(f"ended row {done.row}, which it was never given")
            if done.row in self._rows:  # otherwise it was taken back
                self._rows.discard(done.row)
                ended.append(done)
        self._silent = now if self._rows else None
        return ended

    def cancel(self, keys: Collection[int]) -> None:
        """See :meth:`RowEngine.cancel`."""
        self._rows.difference_update(keys)
        with suppress(WorkerDiedError):  # with all rows
            self._process.cancel(keys)

    def interrupt(self) -> None:
        """See :meth:`RowEngine.interrupt`."""
        self._process.interrupt()
