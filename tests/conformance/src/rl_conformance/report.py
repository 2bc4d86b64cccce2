"""Writes a run as JSON, JUnit, Markdown and one self-contained HTML page."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from typing import TYPE_CHECKING, Any

from rl_conformance.outcome import Outcome, RunReport, Status

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from rl_conformance.outcome import ClauseResult, Measure

__all__ = ["from_json", "to_html", "to_json", "to_junit", "to_markdown", "write_reports"]

SCHEMA = 1


def to_json(report: RunReport) -> str:
    """Everything there is to know of a run; :func:`from_json` reads it back."""
    clauses = [
        {
            "id": r.clause.id,
            "title": r.clause.title,
            "kind": r.clause.kind,
            "capability": r.clause.capability,
            "since": r.clause.since,
            "scope": r.clause.scope,
            "status": str(r.status) if r.status else None,
            "checks": [o.as_dict() for o in r.outcomes],
        }
        for r in report.results()
    ]
    whole = {
        "schema": SCHEMA,
        "backend": report.backend,
        "verdict": str(report.verdict),
        "missing": report.missing,
        "selection": report.selection,
        "seconds": round(report.seconds, 3),
        "environment": dict(report.environment),
        "counts": {str(k): v for k, v in report.counts().items()},
        "clauses": clauses,
    }
    return json.dumps(whole, indent=2) + "\n"


def from_json(text: str) -> RunReport:
    """Reads what :func:`to_json` wrote.

    Raises:
        ValueError: It was written by another version of the format.
    """
    data: dict[str, Any] = json.loads(text)
    if data.get("schema") != SCHEMA:
        raise ValueError(f"a report of schema {data.get('schema')}; this suite reads {SCHEMA}")
    return RunReport(
        backend=data["backend"],
        outcomes=tuple(Outcome.from_dict(o) for c in data["clauses"] for o in c["checks"]),
        environment=data["environment"],
        clauses=tuple(c["id"] for c in data["clauses"]),
        selection=data["selection"],
        seconds=data["seconds"],
    )


def to_junit(report: RunReport) -> str:
    """A test suite with one case per check; what is not bad and not passed is skipped."""
    suite = ET.Element("testsuite", name=f"rl-conformance {report.backend}")
    counts = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
    for outcome in report.outcomes:
        counts["tests"] += 1
        case = ET.SubElement(
            suite,
            "testcase",
            classname=f"{report.backend}.{outcome.clause}",
            name=outcome.check,
            time=f"{outcome.seconds:.4f}",
        )
        if outcome.status is Status.PASSED:
            continue
        tag = {Status.ERROR: "error"}.get(
            outcome.status, "failure" if outcome.status.bad else "skipped"
        )
        counts[{"error": "errors", "failure": "failures", "skipped": "skipped"}[tag]] += 1
        text = f"{outcome.status}: {outcome.message}"
        ET.SubElement(case, tag, message=text.splitlines()[0]).text = text
    for missing in report.missing:
        counts["tests"] += 1
        counts["errors"] += 1
        case = ET.SubElement(suite, "testcase", classname=report.backend, name=f"{missing} ran")
        ET.SubElement(case, "error", message=f"incomplete: {missing} has no result")
    suite.attrib |= {key: str(value) for key, value in counts.items()}
    suite.set("time", f"{report.seconds:.3f}")
    root = ET.Element("testsuites")
    root.append(suite)
    ET.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def to_markdown(report: RunReport) -> str:
    """One table, a row for each clause, and the reasons of what did not pass."""
    facts = ", ".join(f"{k} {v}" for k, v in report.environment.items() if v)
    counts = ", ".join(f"{n} {status}" for status, n in report.counts().items())
    lines = [
        f"# Conformance of `{report.backend}`: {report.verdict}",
        "",
        f"{counts} of {len(report.clauses)} clauses in {report.seconds:.0f} s. {facts}.",
        *([f"Only a part of the suite: {report.selection}."] if report.selection else []),
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
    notes = [f"- {o.check}: {o.status}: {_first_line(o)}" for o in report.outcomes if o.message]
    if notes:
        lines += ["", "## Not passed, and why", "", *notes]
    return "\n".join(lines) + "\n"


def to_html(reports: Sequence[RunReport]) -> str:
    """The matrix of backends and clauses, with every figure, as a page without references."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("rl_conformance"), autoescape=True, undefined=StrictUndefined
    )
    environment.globals.update(worst=worst_measure, status=status_text)
    return environment.get_template("report.html.j2").render(
        reports=reports, matrix=[{r.clause.id: r for r in report.results()} for report in reports]
    )


def status_text(result: ClauseResult) -> str:
    """The status of a clause in one word; ``incomplete`` if it has none."""
    return str(result.status) if result.status else "incomplete"


def worst_measure(result: ClauseResult) -> Measure | None:
    """The measure of a clause that comes nearest to its tolerance."""
    measures = [m for o in result.outcomes for m in o.measures if m.tolerance > 0]
    return max(measures, key=lambda m: m.value / m.tolerance, default=None)


def write_reports(report: RunReport, files: dict[str, Path | None]) -> None:
    """Writes the formats that have a file: ``json``, ``junit``, ``markdown``, ``html``."""
    texts: dict[str, Callable[[RunReport], str]] = {
        "json": to_json,
        "junit": to_junit,
        "markdown": to_markdown,
        "html": lambda r: to_html([r]),
    }
    for name, path in files.items():
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(texts[name](report), encoding="utf-8")


def _first_line(outcome: Outcome) -> str:
    lines = outcome.message.strip().splitlines()
    return lines[-1] if outcome.status is Status.ERROR else lines[0]
