"""``rl conformance``: the suite as a command. Imports nothing heavy until it runs."""

from __future__ import annotations

import shlex
from dataclasses import replace
from enum import StrEnum
from pathlib import Path  # noqa: TC003 - typer resolves it
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rl_conformance.outcome import Outcome, RunReport
    from rl_conformance.registry import Check
    from rl_conformance.reports import Matrix
    from rl_conformance.settings import Settings
    from rl_conformance.target import Target

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="Prove that a backend keeps the contract.")

_COLOURS = {
    "passed": "green",
    "failed": "red",
    "error": "red",
    "unexpected_pass": "red",
    "incomplete": "red",
    "known_failure": "yellow",
    "unsupported": "blue",
    "not_implemented": "blue",
    "not_run": "bright_black",
}
_EXIT_CODES = {"conformant": 0, "passed": 0, "failed": 1, "incomplete": 3}


class Device(StrEnum):
    """Where the backend under test runs."""

    CPU = "cpu"
    CUDA = "cuda"


@app.callback()
def main() -> None:
    """Prove that a backend keeps the contract."""


@app.command("list")
def list_checks(
    json: Annotated[bool, typer.Option("--json", help="Everything, as JSON.")] = False,
) -> None:
    """Lists every clause with its checks: the catalogue."""
    from rl_conformance.catalogue import CLAUSES
    from rl_conformance.registry import all_checks

    own = {c: [each for each in all_checks() if each.clause is c] for c in CLAUSES.values()}
    if json:
        from json import dumps

        clauses = [{**c.as_dict(), "checks": [e.as_dict() for e in own[c]]} for c in own]
        print(dumps(clauses, indent=1))
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("clause", "binds", "asks for", "checks", box=None)
    for clause, checks in own.items():
        binds = "everyone" if clause.level == "must" else f"with {clause.capability}"
        binds = "core" if clause.core else binds
        names = escape("\n".join(check.id for check in checks))
        table.add_row(clause.id, binds, clause.title, names)
    Console().print(table)


@app.command()
def run(
    name: Annotated[
        str, typer.Argument(help="The backend, as `rl backends list` shows it; or core.")
    ],
    device: Annotated[Device, typer.Option(help="Where it runs.")] = Device.CPU,
    dtype: Annotated[
        str | None,
        typer.Option(help="Of its weights.", show_default="float32; bfloat16 on cuda"),
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="A checkpoint in place of the suite's main tiny model.")
    ] = None,
    kind: Annotated[
        list[str] | None, typer.Option(help="Only this chapter; may be given several times.")
    ] = None,
    k: Annotated[
        str,
        typer.Option(
            "-k", help='Only this check, by its id, or matching ones: "G3 or (G8 and order)".'
        ),
    ] = "",
    fast: Annotated[
        bool, typer.Option(help="Only the quickest checks that find most mistakes; no report.")
    ] = False,
    timeout: Annotated[
        float | None,
        typer.Option(min=1, help="Seconds for each check.", show_default="120 for most"),
    ] = None,
    processes: Annotated[
        int, typer.Option("-n", min=1, help="Run everything in so many processes.")
    ] = 1,
    known_failures: Annotated[
        Path | None, typer.Option(help="The ledger of known failures (TOML).")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write the report as JSON.")] = None,
    junit: Annotated[Path | None, typer.Option(help="Write it as JUnit XML.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write it as Markdown.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write it as one HTML page.")] = None,
    badge: Annotated[
        Path | None, typer.Option(help="Write a badge: .svg, or .json for shields.io.")
    ] = None,
) -> None:
    """Runs the suite; exit code 0 only if it is complete and nothing failed."""
    from rl_conformance.fast import FAST
    from rl_conformance.ledger import read_ledger
    from rl_conformance.parallel import run_in_processes
    from rl_conformance.registry import profile
    from rl_conformance.reports import ReportFiles
    from rl_conformance.run import find_target, select
    from rl_conformance.settings import Settings
    from rl_core.errors import ConfigError

    files = ReportFiles(json, junit, markdown, html, badge)
    target = find_target(name)
    settings = Settings.of(device.value, dtype, str(model) if model else None, timeout)
    if settings.dtype not in target.manifest.tolerances:
        raise ConfigError(
            f"{name} declares no tolerance for {settings.dtype!r}",
            fix=f"use one of {', '.join(target.manifest.tolerances)}",
            key="dtype",
        )
    known = read_ledger(known_failures) if known_failures else {}
    among = [each for each in profile(target.name) if not fast or each.id in FAST]
    checks = select(kind or [], k, among)
    selection = " and ".join([*(["--fast"] if fast else []), *(kind or []), *([k] if k else [])])
    if processes > 1:
        if selection or device is Device.CUDA:
            raise ConfigError(
                "-n runs everything, on a CPU",
                fix="leave out -n, or --fast, --kind and -k",
                key="-n",
            )
        report = run_in_processes(name, settings, known_failures, processes)
    else:
        report = _run_with_progress(target, settings, checks, selection, known)
    parts = ["rl", "conformance", "run", name, *settings.options(), *["--fast"] * fast]
    parts += [part for each in kind or [] for part in ("--kind", each)]
    parts += ["-k", k] if k else []
    parts += ["-n", str(processes)] if processes > 1 else []
    environment = {**report.environment, "command": shlex.join(parts)}
    report = replace(report, environment=environment)
    files.write(report)
    _print_summary(report)
    raise typer.Exit(_EXIT_CODES[report.verdict])


@app.command()
def merge(
    reports: Annotated[list[Path], typer.Argument(help="Files that `run --json` wrote.")],
    html: Annotated[Path | None, typer.Option(help="Write the matrix as one HTML page.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write it as Markdown.")] = None,
) -> None:
    """Makes one matrix of several runs, of one backend or of many."""
    from rl_conformance.reports import Matrix, matrix_to_markdown, to_html
    from rl_conformance.reports.files import write_text

    matrix = Matrix.read(reports)
    if html:
        write_text(html, to_html(matrix))
    if markdown:
        write_text(markdown, matrix_to_markdown(matrix))
    _print_matrix(matrix)


def _run_with_progress(
    target: Target, settings: Settings, checks: list[Check], selection: str, known: dict[str, str]
) -> RunReport:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.text import Text

    from rl_conformance.run import run as run_suite

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, transient=True) as progress:
        task = progress.add_task(target.name, total=len(checks))

        def begin(check: Check) -> None:
            progress.update(task, description=check.id)

        def advance(outcome: Outcome) -> None:
            progress.update(task, advance=1)
            if not progress.console.is_terminal:  # a log: a line for each check
                print(f"{outcome.status:<16} {outcome.check} ({outcome.seconds:.1f} s)", flush=True)
            if outcome.status.bad:
                text = Text.assemble((f"{outcome.status} ", "red"), f"{outcome.check}\n")
                progress.console.print(text.append(outcome.story.rstrip()))

        return run_suite(
            target,
            settings,
            checks if selection else None,
            selection=selection,
            known=known,
            on_start=begin,
            on_outcome=advance,
        )


def _print_matrix(matrix: Matrix) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None)
    table.add_column("clause")
    for column in matrix.columns:
        table.add_column(escape("\n".join([column.name, *column.where])))
    table.add_column("asks for", no_wrap=True, overflow="ellipsis")
    for row in matrix.rows:
        statuses = [f"[{_COLOURS.get(s, 'default')}]{s}[/]" for s in row.statuses]
        table.add_row(row.clause.id, *statuses, row.clause.title)
    console = Console()
    console.print(table)
    for column in matrix.columns:
        console.print(f"{column.label}: {column.report.headline}", markup=False)
    for fact in matrix.disagreements:
        console.print(f"[yellow]The runs differ:[/] {escape(fact)}")


def _print_summary(report: RunReport) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from rl_conformance.reports import status_text, worst_measure

    table = Table(box=None, expand=True)
    for column in ("clause", "status", "checks", "worst figure", "at most"):
        table.add_column(column, no_wrap=True)
    table.add_column("asks for", no_wrap=True, overflow="ellipsis", ratio=1)
    for result in report.results():
        worst, status = worst_measure(result), status_text(result)
        table.add_row(
            result.clause.id,
            f"[{_COLOURS[status]}]{status}[/]",
            f"{result.ran}/{len(result.outcomes)}",
            f"{worst.name} {worst.value:.3g}" if worst else "",
            f"{worst.tolerance:.3g}" if worst else "",
            result.clause.title,
        )
    console = Console()
    console.print(table)
    reasons = {o.message for o in report.outcomes if o.status == "not_run" and not o.excused}
    for reason in sorted(reasons):
        console.print(f"[red]not run:[/] {escape(reason)}")
    counts = ", ".join(f"{n} {status}" for status, n in report.counts().items())
    if report.selection:
        console.print(f"Only a part of the suite was run: {report.selection}", markup=False)
    if report.cites:
        console.print(report.cites, markup=False)
    if report.missing:
        console.print(f"Without a result: {', '.join(report.missing)}")
    console.print(f"{counts}; {report.seconds:.0f} s", markup=False)
    console.print(f"{report.backend}: {report.headline}", markup=False)
