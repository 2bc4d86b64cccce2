"""How far a run has come: each failure at once, and an estimate of the time that is left."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rl_conformance.outcome import Outcome
    from rl_conformance.registry import Check
    from rl_conformance.target import Target

__all__ = ["RunProgress"]

#: Seconds between two lines where there is no terminal.
_PAUSE_S = 30.0


class RunProgress(Progress):
    """Prints the progress of a run: a bar in a terminal, elsewhere a line now and then.

    Args:
        target: The backend under test.
        checks: What runs.
    """

    def __init__(self, target: Target, checks: Sequence[Check]) -> None:
        texts = (TextColumn("{task.fields[number]}"), TextColumn("{task.description}"))
        columns = (*texts, BarColumn(), TimeRemainingColumn())
        super().__init__(*columns, transient=True, speed_estimate_period=1e9)
        self.disable = not self.console.is_terminal
        offered = {"core", "pair", *target.manifest.kinds}
        # A check that is allowed more time usually takes more. That is enough for an estimate.
        self._costs = {c.id: c.timeout_s**2 for c in checks if offered.issuperset(c.needs)}
        self._checks, self._ended, self._bad = len(checks), 0, 0
        self.add_task(target.name, total=sum(self._costs.values()), number="")
        [self._task] = self.tasks
        self._printed = time.monotonic()

    def began(self, check: Check) -> None:
        """Shows which check runs now."""
        self.update(self._task.id, description=check.id)

    def ended(self, outcome: Outcome) -> None:
        """Counts a check that has ended, and prints why it failed."""
        self._ended += 1
        self._bad += outcome.status.bad
        number = f"{self._ended} of {self._checks} checks, {self._bad} failed"
        cost = self._costs.get(outcome.check, 0.0)
        self.update(self._task.id, advance=cost, number=number)
        if outcome.status.bad:
            status = (f"{outcome.status} ", "red")
            text = Text.assemble(status, f"{outcome.check}\n{outcome.story}\n")
            self.console.print(text, soft_wrap=True)
        elif self.disable and time.monotonic() - self._printed > _PAUSE_S:
            self._printed = time.monotonic()
            minutes = max(1.0, (self._task.time_remaining or 0) / 60)
            print(f"{number}, about {minutes:.0f} min left", flush=True)
