"""What a person sees of a run: progress, a table, a plot."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean, median

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from examples.grpo.loop import Run, Show


@contextmanager
def progress_for(steps: int) -> Iterator[Show]:
    """A bar for GRPO and a line for the warm-up, on stderr; in a log, a line now and then."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lines_for(steps)
        return
    with Progress(
        TextColumn("{task.description:>8}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[figure]}"),
        TimeElapsedColumn(),
        console=console,
    ) as bars:
        warm = bars.add_task("warm-up", total=None, figure="")
        grpo = bars.add_task("GRPO", total=steps, figure="", start=False)

        def show(phase: str, step: int, figure: float) -> None:
            if phase == "warm-up":
                bars.update(warm, completed=step, figure=f"loss {figure:.3f}")
                return
            if step == 1:
                bars.update(warm, total=bars.tasks[warm].completed)
                bars.stop_task(warm)
                bars.start_task(grpo)
            bars.update(grpo, completed=step, figure=f"reward {figure:.2f}")

        yield show


def lines_for(steps: int, every_s: float = 10.0) -> Show:
    """Prints the first step of each phase, the last, and one every so many seconds between."""
    last = ("", 0.0)

    def show(phase: str, step: int, figure: float) -> None:
        nonlocal last
        now = time.monotonic()
        if phase == last[0] and now - last[1] < every_s and (phase, step) != ("GRPO", steps):
            return
        last = (phase, now)
        what = f"of {steps}, reward" if phase == "GRPO" else "loss"
        print(f"{phase} step {step} {what} {figure:.2f}", file=sys.stderr, flush=True)

    return show


def print_summary(runs: list[Run]) -> None:
    """What was learned, and where the time went: a row for each seed, and the mean of rewards."""
    learned = Table("seed", title="GRPO on additions")
    for heading in ("reward before", "after", "max log-prob error", "steps that agree"):
        learned.add_column(heading, justify="right")
    times = Table("seed", title="Median step, milliseconds")
    phases = list(runs[0].steps[0].seconds)
    for heading in (*phases, "refit GB/s", "whole run"):
        times.add_column(heading, justify="right")
    for one in runs:
        seed = str(one.settings.seed)
        learned.add_row(
            seed,
            f"{one.reward_before:.3f}",
            f"{one.reward_after:.3f}",
            f"{max(step.logprob_error for step in one.steps):.1e}",
            f"{sum(step.consistent for step in one.steps)} of {len(one.steps)}",
        )
        middle = [median(step.seconds[phase] for step in one.steps) for phase in phases]
        speed = median(step.refit_gb_per_s for step in one.steps)
        shown = [f"{seconds * 1e3:.0f}" for seconds in middle]
        times.add_row(seed, *shown, f"{speed:.2f}", f"{one.seconds:.0f} s")
    if len(runs) > 1:
        before, after = (mean(getattr(r, f"reward_{w}") for r in runs) for w in ("before", "after"))
        learned.add_section()
        learned.add_row("mean", f"{before:.3f}", f"{after:.3f}")
    console = Console()
    console.print(learned)
    console.print(times)


def plot(runs: list[Run], path: Path) -> None:
    """Reward and log-prob error over the steps, as a PNG at ``path``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (rewards, errors) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for one in runs:
        steps = range(1, len(one.steps) + 1)
        label = f"seed {one.settings.seed}"
        rewards.plot(steps, [step.reward for step in one.steps], label=label)
        errors.plot(steps, [step.logprob_error for step in one.steps], label=label)
    rewards.set(title="Mean reward", xlabel="GRPO step", ylim=(0, 1))
    errors.set(title="Largest |engine - trainer| log-prob", xlabel="GRPO step", yscale="log")
    for axes in (rewards, errors):
        axes.grid(alpha=0.3)
        axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
