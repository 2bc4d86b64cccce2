"""What a run came to, as a table."""

from __future__ import annotations

import math
from statistics import median
from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import Console

__all__ = ["print_summary"]


def print_summary(
    console: Console,
    rows: Sequence[Mapping[str, float]],
    tolerance: float | None,
    places: Mapping[str, str],
) -> None:
    """Shows the first, last and best figures, the log-prob error, times, and where things are.

    Args:
        console: Where it is shown.
        rows: As :func:`rl_train.lines.read_metrics` returns them.
        tolerance: How large ``logprob_error/max`` may be; None for a run without one.
        places: By what lies there.
    """
    steps = [row for row in rows if not any(name.startswith("eval_") for name in row)]
    table = Table("", "first", "last", "best", title=f"{len(steps)} steps")
    for name in ("reward", "loss", "rewards/margins", "eval_reward", "eval_loss"):
        of_name = [(row[name], int(row["step"])) for row in rows if name in row]
        numbers = [pair for pair in of_name if math.isfinite(pair[0])]
        if numbers:
            best, at = (min if name.endswith("loss") else max)(numbers, key=lambda pair: pair[0])
            ends = (f"{of_name[0][0]:.4g}", f"{of_name[-1][0]:.4g}")
            table.add_row(name, *ends, f"{best:.4g} (step {at})")
    facts = Table.grid(padding=(0, 2))
    errors = [row["logprob_error/max"] for row in steps if "logprob_error/max" in row]
    if errors:
        # NaN is what JSON has for an infinite error.
        worst = max(math.inf if math.isnan(error) else error for error in errors)
        text = f"{worst:.1e}"
        if tolerance is not None:
            held = "within" if worst <= tolerance else "ABOVE"
            text += f", {held} the tolerance of {tolerance:.1e}"
        facts.add_row("largest log-prob error", text)
    seconds_of: dict[str, list[float]] = {}
    for row in steps:
        for name in row:
            if name.startswith("time/") or name in ("refit/seconds", "step_time"):
                short = name.removeprefix("time/").removesuffix("/seconds")
                seconds_of.setdefault(short, []).append(row[name])
    if seconds_of:
        medians = (f"{name} {median(seconds):.3g}" for name, seconds in seconds_of.items())
        facts.add_row("median seconds", ", ".join(medians))
    seconds = sum(row.get("step_time", 0.0) for row in steps)
    if seconds and "num_tokens" in steps[-1]:
        facts.add_row("tokens per second", f"{steps[-1]['num_tokens'] / seconds:,.0f}")
    for name, place in places.items():
        facts.add_row(name, place)
    console.print(table)
    console.print(facts, soft_wrap=True, highlight=False)
