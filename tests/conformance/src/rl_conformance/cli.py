"""``rl conformance``: the suite as a command. Imports nothing heavy until it runs."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rl_cli.command import Command
from rl_conformance.catalogue import KINDS

if TYPE_CHECKING:
    import argparse

    from rl_conformance.outcome import RunReport
    from rl_conformance.reports import Matrix

__all__ = ["app"]

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


def list_checks(options: argparse.Namespace) -> None:
    """Lists every clause with its checks: the catalogue."""
    from rl_conformance.catalogue import CLAUSES
    from rl_conformance.registry import all_checks

    own = {c: [each for each in all_checks() if each.clause is c] for c in CLAUSES.values()}
    if options.json:
        from json import dumps

        clauses = [{**c.as_dict(), "checks": [e.as_dict() for e in own[c]]} for c in own]
        print(dumps(clauses, indent=1))
        return
    for clause, checks in own.items():
        binds = "every backend" if clause.level == "must" else f"backends with {clause.capability}"
        print(f"{clause.id}: {clause.title} ({'rl-core' if clause.core else binds})")
        for check in checks:
            print(f"  {check.id}")


def run(options: argparse.Namespace) -> int:
    """Runs the suite; exit code 0 only if it is complete and nothing failed."""
    from rl_conformance.fast import FAST
    from rl_conformance.ledger import read_ledger
    from rl_conformance.parallel import run_in_processes
    from rl_conformance.progress import RunProgress
    from rl_conformance.registry import profile
    from rl_conformance.reports import ReportFiles
    from rl_conformance.run import find_target, select
    from rl_conformance.run import run as run_suite
    from rl_conformance.settings import Settings
    from rl_core.errors import ConfigError

    names = ("json", "junit", "markdown", "html", "badge")
    files = ReportFiles(*(getattr(options, name) for name in names))
    name, kind, k, processes = options.name, options.kind, options.k, options.processes
    target = find_target(name)
    settings = Settings.of(
        options.device,
        options.dtype,
        options.model,
        options.timeout,
        options.url,
        options.layouts,
    )
    if options.url is not None and "url" not in target.config_keys.get("generation", ()):
        raise ConfigError(
            f"{name} has no url: it starts its engine itself",
            fix="leave --url out, or name a backend for servers, such as vllm-server",
            key="url",
        )
    if settings.dtype not in target.manifest.tolerances:
        raise ConfigError(
            f"{name} declares no tolerance for {settings.dtype!r}",
            fix=f"use one of {', '.join(target.manifest.tolerances)}",
            key="dtype",
        )
    known = read_ledger(options.known_failures) if options.known_failures else {}
    among = [each for each in profile(target.name) if not options.fast or each.id in FAST]
    checks = select(kind, k, among)
    fast = ["--fast"] if options.fast else []
    selection = " and ".join([*fast, *kind, *([k] if k else [])])
    if processes > 1 and (selection or options.device == "cuda" or options.url):
        raise ConfigError(
            "-n runs everything, on a CPU, and not with one server",
            fix="leave out -n, or --fast, --kind, -k and --url",
            key="-n",
        )
    with RunProgress(target, checks) as progress:
        if processes > 1:
            ledger = options.known_failures
            report = run_in_processes(name, settings, ledger, processes, progress.ended)
        else:
            report = run_suite(
                target,
                settings,
                checks if selection else None,
                selection=selection,
                known=known,
                on_start=progress.began,
                on_outcome=progress.ended,
            )
    parts = ["rl", "conformance", "run", name, *settings.options(), *fast]
    parts += [part for each in kind for part in ("--kind", each)]
    parts += ["-k", k] if k else []
    parts += ["-n", str(processes)] if processes > 1 else []
    environment = {**report.environment, "command": shlex.join(parts)}
    report = replace(report, environment=environment)
    files.write(report)
    _print_summary(report)
    return _EXIT_CODES[report.verdict]


def merge(options: argparse.Namespace) -> None:
    """Makes one matrix of several runs, of one backend or of many."""
    from rl_conformance.reports import Matrix, matrix_to_markdown, to_html
    from rl_conformance.reports.files import write_text

    matrix = Matrix.read(options.reports)
    if options.html:
        write_text(options.html, to_html(matrix))
    if options.markdown:
        write_text(options.markdown, matrix_to_markdown(matrix))
    _print_matrix(matrix)


def _print_matrix(matrix: Matrix) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None)
    table.add_column("clause")
    for column in matrix.columns:
        table.add_column(escape("\n".join([column.name, *column.where])))
    table.add_column("demands", no_wrap=True, overflow="ellipsis")
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

    from rl_conformance.reports import reason, status_text, worst_measure

    table = Table(box=None, expand=True)
    for column in ("clause", "status", "checks", "worst figure", "at most"):
        table.add_column(column, no_wrap=True)
    table.add_column("demands", no_wrap=True, overflow="ellipsis", ratio=1)
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
    messages = {o.message for o in report.outcomes if o.status == "not_run" and not o.excused}
    for message in sorted(messages):
        console.print(f"[red]not run:[/] {escape(message)}")
    counts = ", ".join(f"{n} {status}" for status, n in report.counts().items())
    if report.selection:
        print(f"Only a part of the suite was run: {report.selection}")
    if report.cites:
        console.print(report.cites, markup=False)
    if report.missing:
        console.print(f"Without a result: {', '.join(report.missing)}")
    for outcome in report.outcomes:
        if outcome.status.bad:
            print(f"{outcome.status} {outcome.check}: {reason(outcome)}\n  {outcome.command}")
    built = f"{report.engines} engines and {report.policies} policies were built"
    console.print(f"{counts}; {report.seconds:.0f} s; {built}", markup=False)
    console.print(f"{report.backend}: {report.headline}", markup=False)


app = Command("rl conformance", "Test a backend against the contract, clause by clause")
_listing = app.command(
    "list",
    "List all clauses of the contract with their checks",
    "rl conformance list\nrl conformance list --json",
    run=list_checks,
)
_listing.add_argument("--json", action="store_true", help="print JSON")
_running = app.command(
    "run",
    "Run the checks against one backend",
    'rl conformance run hf\nrl conformance run hf -k "G3 or (G8 and order)" --html report.html',
    details="Exits with 0 if the run is complete and nothing failed, with 1 if a check failed, and "
    "with 3 if the run is incomplete.",
    run=run,
)
_running.add_argument("name", metavar="NAME", help="a name of `rl backends list`; or core")
_running.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
_running.add_argument("--dtype", help="dtype of the weights; default: float32, on cuda bfloat16")
_running.add_argument(
    "--model", metavar="PATH", help="use this checkpoint instead of the suite's main tiny model"
)
_running.add_argument(
    "--url",
    help="of a server that already runs and serves the checkpoint of --model, for vllm-server and "
    "sglang-server; the variable RL_SERVER_API_KEY has its key, if it needs one",
)
_running.add_argument(
    "--kind",
    action="append",
    default=[],
    choices=KINDS,
    help="only this chapter; can be repeated",
)
_running.add_argument(
    "-k", default="", metavar="CHECKS", help="only the check with this id, or those that match"
)
_running.add_argument(
    "--fast",
    action="store_true",
    help="only the quickest checks that find most mistakes",
)
_running.add_argument(
    "--timeout", type=float, metavar="SECONDS", help="limit for each check; default: 120 for most"
)
_running.add_argument(
    "--layouts",
    default="few",
    choices=("few", "all"),
    help="layouts over ranks: all that the plugin names, or few of them (default)",
)
_running.add_argument(
    "-n",
    dest="processes",
    type=int,
    default=1,
    metavar="N",
    help="run the whole suite in N processes",
)
_running.add_argument(
    "--known-failures", type=Path, metavar="FILE", help="the ledger of known failures (TOML)"
)
_merging = app.command(
    "merge",
    "Make one matrix of the reports of several runs",
    "rl conformance merge hf.json vllm.json --html matrix.html",
    run=merge,
)
_merging.add_argument(
    "reports", type=Path, nargs="+", metavar="REPORT", help="files that `run --json` wrote"
)
for _command, _formats in (
    (_running, {"json": "JSON", "junit": "JUnit XML", "badge": "a badge (.svg, or .json)"}),
    (_merging, {}),
):
    for _name, _what in (_formats | {"markdown": "Markdown", "html": "one HTML page"}).items():
        _command.add_argument(f"--{_name}", type=Path, metavar="FILE", help=f"write {_what}")
