"""What a person sees of a run: progress, a table, a plot."""

from __future__ import annotations

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
    """A bar for GRPO and a line for the warm-up, on stderr."""
    with Progress(
        TextColumn("{task.description:>8}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[figure]}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
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


def print_summary(runs: list[Run]) -> None:
    """One row for each seed, and the mean of the seeds."""
    table = Table(title="GRPO on additions")
    table.add_column("seed")
    for heading in ("reward before", "after", "max log-prob error", "agree", "refit GB/s"):
        table.add_column(heading, justify="right")
    table.add_column("median step: generate / score / train / refit / check", justify="right")
    table.add_column("total", justify="right")
    for one in runs:
        table.add_row(
            str(one.settings.seed),
            f"{one.reward_before:.3f}",
            f"{one.reward_after:.3f}",
            f"{max(step.logprob_error for step in one.steps):.1e}",
            f"{sum(step.consistent for step in one.steps)}/{len(one.steps)}",
            f"{median(step.refit_gb_per_s for step in one.steps):.2f}",
            " / ".join(
                f"{median(step.seconds[phase] for step in one.steps) * 1e3:.0f}"
                for phase in one.steps[0].seconds
            )
            + " ms",
            f"{one.seconds:.0f} s",
        )
    if len(runs) > 1:
        before, after = (mean(getattr(r, f"reward_{w}") for r in runs) for w in ("before", "after"))
        table.add_section()
        table.add_row("mean", f"{before:.3f}", f"{after:.3f}")
    Console().print(table)


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
