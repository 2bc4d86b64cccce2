"""Which architectures the engines of backends can be refit with; see benchmarks/README.md."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from architectures.outcome import Run, Trial

    from rl_conformance.target import Target

_COLOURS = {
    "exact": "green",
    "wrong": "red",
    "fails": "red",
    "refused": "blue",
    "does not start": "bright_black",
    "trainer cannot": "bright_black",
}


def main(
    backends: Annotated[
        list[str] | None,
        typer.Argument(help="To be tried, by name; none only merges.", show_default=False),
    ] = None,
    k: Annotated[
        list[str] | None,
        typer.Option("-k", metavar="NAME", help="Only this architecture; several times for more."),
    ] = None,
    deadline: Annotated[
        float, typer.Option(min=1, metavar="SECONDS", help="For each architecture.")
    ] = 180.0,
    merge: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE", help="What --json wrote, perhaps elsewhere; several times for more."
        ),
    ] = None,
    known: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="An older --json: what is wrong there does not fail this run, and what is exact "
            "there must be exact.",
        ),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write everything as JSON.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write one table as Markdown.")] = None,
) -> None:
    """Finds out which architectures a backend's engine can be refit with.

    Makes a tiny random checkpoint of each, starts it on the CPU, refits it and compares weights and
    log-probs with a policy of rl-hf. The exit code is 1 if anything is wrong or fails, or if a
    backend has nothing that is exact.
    """
    from architectures.report import merge_runs, read_runs, to_json, to_markdown
    from architectures.table import choose

    from rl_conformance.reports.files import write_text
    from rl_conformance.target import Target
    from rl_core.errors import ConfigError

    names = choose(k or [])
    targets = [Target.find(name) for name in backends or []]
    for target in targets:
        if "generation" not in target.manifest.kinds:
            raise ConfigError(
                f"{target.name} does not generate",
                fix="name a backend with the kind generation; rl backends list shows them",
                key="backends",
            )
    older = {run.backend: run for run in merge_runs(read_runs(known))} if known else {}
    runs = [run for path in merge or [] for run in read_runs(path)]
    if not runs and not targets:
        raise ConfigError(
            "there is nothing to try and nothing to merge",
            fix="name a backend, or give --merge FILE",
            key="backends",
        )
    runs = merge_runs([*runs, *(_run_with_progress(each, names, deadline) for each in targets)])
    if json:
        write_text(json, to_json(runs))
    if markdown:
        write_text(markdown, to_markdown(runs))
    _print_table(runs)
    problems = [text for run in runs for text in run.problems(older.get(run.backend))]
    for problem in problems:
        typer.secho(problem, fg="red", err=True)
    raise typer.Exit(int(bool(problems)))


def _run_with_progress(target: Target, names: list[str], deadline: float) -> Run:
    from architectures.trial import try_architectures
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, transient=True) as progress:
        task = progress.add_task(target.name, total=len(names))

        def begin(name: str) -> None:
            progress.update(task, description=f"{target.name}: {name}")

        def advance(trial: Trial) -> None:
            progress.update(task, advance=1)
            if not progress.console.is_terminal:  # a log: a line for each
                line = f"{trial.status:<15} {trial.architecture} ({trial.seconds:.1f} s)"
                print(f"{line} {trial.reason}".rstrip(), flush=True)
            elif trial.status.bad:
                progress.console.print(f"{trial.status}: {trial.architecture}: {trial.reason}")

        return try_architectures(
            target, names, deadline_s=deadline, on_start=begin, on_trial=advance
        )


def _print_table(runs: list[Run]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, expand=True)
    for column in ("architecture", "engine", "outcome", "differs by"):
        table.add_column(column, no_wrap=True)
    table.add_column("why", no_wrap=True, overflow="ellipsis", ratio=1)
    for run in runs:
        for trial in run.trials:
            largest = None if trial.after is None else trial.after.max
            differs = "" if largest is None else f"{largest:.1e}"
            outcome = Text(trial.status, style=_COLOURS[trial.status])
            why = Text(trial.reason)
            table.add_row(Text(trial.architecture), run.engine, outcome, differs, why)
    console = Console()
    console.print(table)
    for run in runs:
        counts = ", ".join(f"{count} {status}" for status, count in run.counts().items())
        console.print(f"{run.backend} ({run.engine}): {counts}; {run.seconds:.0f} s", markup=False)


if __name__ == "__main__":
    typer.run(main)
