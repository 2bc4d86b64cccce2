"""Rows, as an engine that serves many calls at once sees them: they come, are decoded, and go."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from rl_backends.generation.prompts import Completion, PromptBatch
from rl_core.errors import PluginError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from rl_backends.generation.prompts import SamplingParams

__all__ = ["BatchEngine", "FailedRow", "Row", "RowEngine"]


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt to complete.

    Attributes:
        key: Tells it from every other row of the engine, of this call and of all others.
        call: Number of the call that it belongs to.
        index: Of the row in its call, for messages.
        token_ids: The prompt, at least one token.
        budget: Tokens that it may generate, at least 1.
        seed: Of its own random stream.
        seeded: The seed was asked for; otherwise an engine may as well draw from a stream of its
            own.
        stop_strings: Each of them ends it.
        sampling: How it is sampled; all rows of an engine share everything but ``greedy`` and
            what goes with that.
    """

    key: int
    call: int
    index: int
    token_ids: Sequence[int]
    budget: int
    seed: int
    seeded: bool
    stop_strings: tuple[str, ...]
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class FailedRow:
    """A row that cannot be completed; its call fails with it, and no other call does.

    Attributes:
        key: Of the row.
        error: What to raise where the call was made.
    """

    key: int
    error: BaseException


class RowEngine(ABC):
    """An engine that decodes rows of many calls together.

    One thread at a time, of the service that all calls share, calls its methods; others call
    :meth:`interrupt` and :meth:`release_threads`. Whatever one of them raises fails every call
    with rows in the engine, which is told to :meth:`cancel` them all.
    """

    #: Rows that it takes at a time, those that wait inside it included; others wait outside.
    room = 1024

    @abstractmethod
    def submit(self, rows: Sequence[Row]) -> None:
        """Takes rows; they may wait for room, and start in any order."""

    @abstractmethod
    def collect(self) -> Sequence[Completion | FailedRow]:
        """Works on the rows it has, such as by one token each, and returns those that ended.

        Nothing may have ended. It returns soon: what came meanwhile waits for that. ``row`` of a
        completion is the row's key.
        """

    @abstractmethod
    def cancel(self, keys: Collection[int]) -> None:
        """Forgets rows, and frees what they hold; some may be unknown."""

    def interrupt(self) -> None:
        """Makes a :meth:`collect` that only waits return at once. From any thread."""

    def release_threads(self) -> None:
        """Releases the calling thread's helper threads: from here on it waits for rows."""


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
        """Completes one row; before the last one of a batch is told, its iterator has ended."""
        try:
            if self._iterator is None:
                if not self._waiting:
                    return []
                self._begin()
            assert self._iterator is not None
            done = next(self._iterator, None)
            if done is None:
                raise self._fault(f"did not complete rows {sorted(self._batch)[:5]}")
            if done.row not in self._batch:
                raise self._fault(f"gave row {done.row}, which it has not, or twice")
            if len(self._batch) == 1 and (more := next(self._iterator, None)) is not None:
                raise self._fault(f"gave row {more.row}, which it has not, or twice")
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
        self._iterator = iter(self._complete(_batch_of(taken, self._pad), first.sampling))

    def _end(self) -> None:
        close = getattr(self._iterator, "close", None)
        self._iterator = None
        self._batch, self._dropped = {}, set()
        if close is not None:
            close()

    def _fault(self, what: str) -> PluginError:
        return PluginError(f"{self._name}.complete {what}", fix="report it to the backend's author")


def _batch_of(rows: Sequence[Row], pad_token_id: int) -> PromptBatch:
    lengths = torch.tensor([len(row.token_ids) for row in rows])
    ids = torch.full((len(rows), int(lengths.max())), pad_token_id)
    ids[torch.arange(ids.shape[1]) < lengths[:, None]] = torch.tensor(
        [token for row in rows for token in row.token_ids]
    )
    return PromptBatch(
        ids,
        lengths,
        torch.tensor([row.budget for row in rows]),
        [row.stop_strings for row in rows],
        torch.tensor([row.seed for row in rows]),
        all(row.seeded for row in rows),
    )
