"""Markdown: tables for a release page or a pull request."""

from __future__ import annotations

from textwrap import indent
from typing import TYPE_CHECKING

from rl_conformance.reports.summary import reason, status_text, tally, worst_measure

if TYPE_CHECKING:
    from rl_conformance.outcome import ClauseResult, RunReport
    from rl_conformance.reports.matrix import Matrix

__all__ = ["matrix_to_markdown", "to_markdown"]


def to_markdown(report: RunReport) -> str:
    """One table, a row for each clause, and the reasons of what did not pass."""
    scale = f"of {len(report.clauses)} clauses in {report.seconds:.0f} s"
    lines = [
        f"# Conformance of `{report.backend}`: {report.headline}",
        "",
        f"{_counts(report)} {scale}. {_facts(report)}.",
        *([f"Only a part of the suite: {report.selection}."] if report.selection else []),
        *([f"{report.cites}."] if report.cites else []),
        "",
        "| clause | | status | checks | worst figure | tolerance |",
        "|---|---|---|---|---|---|",
    ]
    for result in report.results():
        worst = worst_measure(result)
        figures = f"{worst.name} {worst.value:.3g} | {worst.tolerance:.3g}" if worst else "|"
        lines.append(
            f"| {result.clause.id} | {result.clause.title} | {status_text(result)} | "
            f"{result.ran}/{len(result.outcomes)} | {figures} |"
        )
    notes = []
    for o in report.outcomes:
        if o.status.bad and o.where:
            story = indent(f"```text\n{o.story}\n```", "  ")
            notes.append(f"- {o.check}: {o.status}\n\n{story}\n")
        elif o.message:
            notes.append(f"- {o.check}: {o.status}: {reason(o)}")
    if notes:
        lines += ["", "## Not passed, and why", "", *notes]
    return "\n".join(lines) + "\n"


def matrix_to_markdown(matrix: Matrix) -> str:
    """One table with a column for each run, and the reasons of what did not pass."""
    labels = [column.label for column in matrix.columns]
    lines = ["# Conformance", ""]
    for column in matrix.columns:
        report = column.report
        part = f" Only a part of the suite: {report.selection}." if report.selection else ""
        lines.append(
            f"- **{column.label}**: {report.headline}. {_counts(report)}.{part} {_facts(report)}."
        )
    if matrix.disagreements:
        lines += ["", "> **These runs cannot be compared in full.** They differ in:"]
        lines += [f"> - {fact}" for fact in matrix.disagreements]
    lines += ["", f"| clause | | {' | '.join(labels)} |", "|---" * (len(labels) + 2) + "|"]
    for row in matrix.rows:
        cells = " | ".join(_cell(cell) for cell in row.cells)
        lines.append(f"| {row.clause.id} | {row.clause.title} | {cells} |")
    for column in matrix.columns:
        clauses: dict[str, dict[str, None]] = {}  # many checks share a reason
        for outcome in column.report.outcomes:
            if outcome.message:
                text = f"{outcome.status}: {reason(outcome)}"
                clauses.setdefault(text, {})[outcome.clause] = None
        if clauses:
            lines += ["", f"## Not passed by {column.label}, and why", ""]
            lines += [f"- {', '.join(ids)}: {text}" for text, ids in clauses.items()]
    return "\n".join(lines) + "\n"


def _cell(result: ClauseResult | None) -> str:
    if result is None:
        return "not in this run"
    text = f"{status_text(result)} {tally(result)}"
    worst = worst_measure(result)
    return f"{text}, {worst.name} {worst.value:.2g} ≤ {worst.tolerance:.2g}" if worst else text


def _counts(report: RunReport) -> str:
    return ", ".join(f"{n} {status}" for status, n in report.counts().items())


def _facts(report: RunReport) -> str:
    return ", ".join(f"{k} {v}" for k, v in report.environment.items() if v)
