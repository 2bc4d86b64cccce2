"""Mutants that mix many calls up."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import TYPE_CHECKING, Any
from unittest import mock

from msgspec.structs import replace

from mutants.mutant import breaks
from rl_backends.generation.serving import RowService
from rl_conformance.reference.generation import ReferenceGeneration, ReferenceRows

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection, Sequence
    from contextlib import AbstractContextManager

    from rl_backends import Completion, Row, RowEngine


@breaks("G18", checks="G18 and do_not_mix")
class RowsOfTwoCallsAreSwapped(ReferenceRows):
    """Rows of two calls that end with one step are each other's."""

    def collect(self) -> list[Completion]:
        calls = {key: row.call for key, row in self.rows.items()}
        done = super().collect()
        for one, other in pairwise(range(len(done))):
            first, second = done[one], done[other]
            if calls[first.row] != calls[second.row]:
                done[one] = replace(first, row=second.row)
                done[other] = replace(second, row=first.row)
                break
        return done


@breaks("G18", checks="G18 and freed")
class ACancelledRowKeepsItsSlot(ReferenceRows):
    """Rows that nobody wants any more are decoded to their end."""

    def cancel(self, keys: Collection[int]) -> None:
        done = {key for key, row in self.rows.items() if row.done is not None}
        super().cancel(done.intersection(keys))


@breaks("G18", checks="G18 and do_not_mix")
class WhoComesLastSaysHow(ReferenceRows):
    """All rows are sampled as the call that came last wants its own to be."""

    def submit(self, rows: Sequence[Row]) -> None:
        super().submit(rows)
        for row in self.rows.values():
            row.sampling = rows[-1].sampling


@breaks("G18", checks="G18 and do_not_mix")
class StopStringsAreKeptByTheNumberOfTheRow(ReferenceRows):
    """Row 0 of the call that came last says what ends row 0 of every call."""

    def submit(self, rows: Sequence[Row]) -> None:
        super().submit(rows)
        own = {row.index: row.stop_strings for row in rows}
        numbers = self._numbers = vars(self).get("_numbers", {}) | {r.key: r.index for r in rows}
        for key, row in self.rows.items():
            row.stop_strings = own.get(numbers[key], row.stop_strings)


@breaks("G18", checks="G18 and version")
class ACallSaysWhatServesNow(ReferenceGeneration):
    """The version is asked for once the rows are done."""

    def generate(self, data: Any, greedy: bool = False) -> Any:
        output = super().generate(data, greedy)
        time.sleep(0.02)
        output["weights_version"].fill_(self.weights_version)
        return output


@breaks("G18", checks="G18 and waits_forever")
def who_comes_last_is_served_first() -> AbstractContextManager[Any]:
    """A stack of calls, of which one is served at a time."""
    honest = RowService._begin_calls

    def begin(service: Any, owed: int) -> int:
        arrived = service._arrived
        if service._running or service._begun or not arrived:
            return owed
        newest = arrived.pop()
        others = list(arrived)
        arrived.clear()
        arrived.append(newest)
        owed = honest(service, owed)
        arrived.extendleft(reversed(others))
        return owed

    return mock.patch.object(RowService, "_begin_calls", begin)


@breaks("G18", checks="G18 and short_call")
class CallsWaitForEachOther(ReferenceGeneration):
    """One batch after the other, whatever the manifest says."""

    def row_engine(self) -> RowEngine:
        return super(ReferenceGeneration, self).row_engine()


@breaks("G18", checks="G18 and deadline")
class ADeadlineIsAWish(ReferenceGeneration):
    """call_deadline_s is accepted and ignored."""

    def __init__(self, *args: Any, call_deadline_s: float | None = None, **config: Any) -> None:
        super().__init__(*args, **config)


@breaks("G18", checks="G18 and deadline")
class StreamsHaveNoDeadline(ReferenceGeneration):
    """Only generate looks at the clock."""

    async def generate_async(self, data: Any, greedy: bool = False) -> AsyncIterator[Any]:
        self.config["call_deadline_s"] = None
        async for row in super().generate_async(data, greedy):
            yield row
