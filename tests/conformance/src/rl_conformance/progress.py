"""How far a run has come: each failure at once, and an estimate of the time that is left."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rl_conformance.outcome import Outcome
    from rl_conformance.registry import Check
    from rl_conformance.target import Target

__all__ = ["RunProgress"]

#: Seconds between two lines where there is no terminal.
_PAUSE_S = 30.0


class RunProgress:
    """Prints the progress of a run: a bar in a terminal, elsewhere a line now and then.

    Args:
        target: The backend under test.
        checks: What runs.
    """

    def __init__(self, target: Target, checks: Sequence[Check]) -> None:
        offered = {"core", "pair", *target.manifest.kinds}
        # Checks that may take longer usually do. Nobody needs an exact forecast.
        self._costs = {c.id: c.timeout_s**2 for c in checks if offered.issuperset(c.needs)}
        self._left = self._all = sum(self._costs.values())
        self._started = self._printed = time.monotonic()
        self._done, self._bad, self._checks = 0, 0, len(checks)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        self._bar = Progress(*columns, TextColumn("{task.fields[left]}"), transient=True)
        self._bar.disable = not self._bar.console.is_terminal
        self._task = self._bar.add_task(target.name, total=len(checks), left="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def begin(self, check: Check) -> None:
        """Shows which check runs now."""
        self._bar.update(self._task, description=check.id)

    def advance(self, outcome: Outcome) -> None:
        """Counts a check that has ended, and prints why it failed."""
        self._done += 1
        self._bad += outcome.status.bad
        self._left -= self._costs.get(outcome.check, 0.0)
        left = self._time_left()
        self._bar.update(self._task, advance=1, left=left)
        if outcome.status.bad:
            status = (f"{outcome.status} ", "red")
            text = Text.assemble(status, f"{outcome.check}\n{outcome.story}\n")
            self._bar.console.print(text, soft_wrap=True)
        elif self._bar.disable and time.monotonic() - self._printed > _PAUSE_S:
            self._printed = time.monotonic()
            print(f"{self._done} of {self._checks} checks, {self._bad} failed; {left}", flush=True)

    def _time_left(self) -> str:
        if self._left >= self._all:
            return ""
        elapsed = time.monotonic() - self._started
        minutes = elapsed * self._left / (self._all - self._left) / 60
        return f"about {minutes:.0f} min left" if minutes >= 1.5 else "about a minute left"
