"""Rows of many calls, completed by an author's ``complete``, a batch at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from msgspec.structs import replace

from rl_backends.generation.prompts import PromptBatch
from rl_backends.generation.rows import FailedRow, RowEngine
from rl_core.errors import PluginError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from rl_backends.generation.rows import Completion, Row, SamplingParams

__all__ = ["BatchEngine"]


class BatchEngine(RowEngine):
    """Serves rows by an author's ``complete``, which takes one batch after the other.

    All rows that wait when a batch begins are in it, whatever calls they are of. If it fails with
    rows of several calls, their rows are completed again, call by call, so that only the call fails
    that is to blame.

    Args:
        complete: See :meth:`rl_backends.GenerationBackend.complete`.
        pad_token_id: Fills prompts on the right.
        name: How errors call the backend.
    """

    room = 1 << 30

    def __init__(
        self,
        complete: Callable[[PromptBatch, SamplingParams], Iterator[Completion]],
        *,
        pad_token_id: int,
        name: str,
    ) -> None:
        self._complete = complete
        self._pad = pad_token_id
        self._name = name
        self._waiting: list[Row] = []
        self._alone: set[int] = set()  # calls that get a batch of their own
        self._batch: dict[int, Row] = {}  # by place, those that are not done
        self._iterator: Iterator[Completion] | None = None
        self._dropped: set[int] = set()  # keys of rows of the batch that nobody wants any more

    def submit(self, rows: Sequence[Row]) -> None:
        """See :meth:`RowEngine.submit`."""
        self._waiting += rows

    def collect(self) -> Sequence[Completion | FailedRow]:
        """Completes one row; before it returns the last one of a batch, its iterator has ended."""
        try:
            if self._iterator is None:
                if not self._waiting:
                    return []
                self._begin()
            assert self._iterator is not None
            done = next(self._iterator, None)
            if done is None:
                raise self._fault(f"did not complete these rows: {sorted(self._batch)[:5]}")
            if done.row not in self._batch:
                raise self._fault(f"completed row {done.row}, which it was not given, or twice")
            if len(self._batch) == 1 and (more := next(self._iterator, None)) is not None:
                raise self._fault(f"gave tokens of row {more.row}, which it was not given")
        except Exception as error:
            left = [row for row in self._batch.values() if row.key not in self._dropped]
            calls = {row.call for row in left}
            self._end()
            if len(calls) == 1:
                return [FailedRow(row.key, error) for row in left]
            # Whose fault it is shows when each call is completed alone.
            self._alone |= calls
            self._waiting = left + self._waiting
            return []
        row = self._batch.pop(done.row)
        wanted = row.key not in self._dropped
        if not self._batch:
            self._end()
        return [replace(done, row=row.key)] if wanted else []

    def cancel(self, keys: Collection[int]) -> None:
        """Drops rows; those of a batch that is being completed run on if others of it do."""
        self._waiting = [row for row in self._waiting if row.key not in keys]
        running = {row.key for row in self._batch.values()}
        self._dropped |= running & set(keys)
        if self._iterator is not None and running <= self._dropped:
            self._end()

    def _begin(self) -> None:
        first = self._waiting[0]
        if first.call in self._alone:
            taken = [row for row in self._waiting if row.call == first.call]
            self._alone.discard(first.call)
        else:
            taken = [
                row
                for row in self._waiting
                if row.sampling == first.sampling
                and row.seeded == first.seeded
                and row.call not in self._alone
            ]
        keys = {row.key for row in taken}
        self._waiting = [row for row in self._waiting if row.key not in keys]
        self._batch = dict(enumerate(taken))
        lengths = torch.tensor([len(row.token_ids) for row in taken])
        ids = torch.full((len(taken), int(lengths.max())), self._pad)
        ids[torch.arange(ids.shape[1]) < lengths[:, None]] = torch.tensor(
            [token for row in taken for token in row.token_ids]
        )
        prompts = PromptBatch(
            ids,
            lengths,
            torch.tensor([row.budget for row in taken]),
            [row.stop_strings for row in taken],
            torch.tensor([row.seed for row in taken]),
            all(row.seeded for row in taken),
        )
        self._iterator = iter(self._complete(prompts, first.sampling))

    def _end(self) -> None:
        close = getattr(self._iterator, "close", None)
        self._iterator = None
        self._batch, self._dropped = {}, set()
        if close is not None:
            close()

    def _fault(self, what: str) -> PluginError:
        return PluginError(f"{self._name}.complete {what}", fix="report it to the backend's author")
