"""A clause and a check in a few words, the same in every format."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_conformance.outcome import Status

if TYPE_CHECKING:
    from rl_conformance.outcome import ClauseResult, Measure, Outcome

__all__ = ["reason", "status_text", "tally", "worst_measure"]


def status_text(result: ClauseResult) -> str:
    """The status of a clause in one word; ``incomplete`` if it has none."""
    return str(result.status) if result.status else "incomplete"


def tally(result: ClauseResult) -> str:
    """Of its checks, how many ran if it passed, and else how many have its status."""
    passed = result.status is Status.PASSED
    same = result.ran if passed else sum(o.status is result.status for o in result.outcomes)
    return f"{same}/{len(result.outcomes)}"


def worst_measure(result: ClauseResult) -> Measure | None:
    """The measure of a clause that comes nearest to its tolerance."""
    measures = [m for o in result.outcomes for m in o.measures if m.tolerance > 0]
    return max(measures, key=lambda m: m.value / m.tolerance, default=None)


def reason(outcome: Outcome) -> str:
    """The line of a message that says most: of a traceback, the last."""
    lines = outcome.message.strip().splitlines() or [""]
    return lines[-1] if outcome.status is Status.ERROR else lines[0]
