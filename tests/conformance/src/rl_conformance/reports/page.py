"""One HTML page that needs nothing else: no style sheet, script, font or picture from elsewhere."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from typing import TYPE_CHECKING, Any

from rl_conformance.outcome import Status
from rl_conformance.reports.plots import LEFT, RIGHT, WIDTH, charts
from rl_conformance.reports.summary import (
    checks_passed,
    not_run_because,
    reason,
    scope,
    settings_lines,
    status_text,
    tally,
    worst_measure,
)

if TYPE_CHECKING:
    from jinja2 import Environment

    from rl_conformance.outcome import ClauseResult
    from rl_conformance.reports.matrix import Matrix

__all__ = ["to_html"]

#: A mark for each status, so that colour is not the only difference between them.
_MARKS = {
    "passed": "✓",
    "part": "✓",
    "conformant": "✓",
    "failed": "✗",
    "error": "✗",
    "unexpected_pass": "✗",
    "incomplete": "?",
    "known_failure": "!",
    "unsupported": "-",
    "not_implemented": "-",
    "not_run": "○",
}
#: What a mark of a clause means, for readers who see such a page for the first time.
_MEANINGS = {
    "passed": "Every check of the clause ran and passed.",
    "part": "The checks that ran passed. Others did not run: open the clause for the reasons.",
    "failed": "The backend breaks the clause: a check got something else than it expected.",
    "error": "An exception stopped a check, or it timed out. This is no verdict about the clause.",
    "unexpected_pass": "A check is in the list of known failures, but passes. The entry must go.",
    "incomplete": "The run has no result for the clause.",
    "known_failure": "A check fails, and the author listed it, with a reason and a date.",
    "unsupported": "The backend declares that it does not offer this, and refuses it cleanly.",
    "not_implemented": "As unsupported, but the author plans to offer it.",
    "not_run": "No check of the clause ran: it does not apply to this backend or device, or this "
    "machine lacks something. The reasons are listed with the run.",
}


def to_html(matrix: Matrix) -> str:
    """The matrix of runs and clauses, with every figure."""
    template = _environment().get_template("report.html.j2")
    seen = {status for row in matrix.rows for status in row.statuses}
    looks = [Counter(map(_look, column.report.results())) for column in matrix.columns]
    return template.render(
        matrix=matrix,
        charts=charts(matrix),
        statuses=[status for status in [*map(str, Status), "incomplete"] if status in seen],
        shares=[[(look, counts[look]) for look in _MARKS if counts[look]] for counts in looks],
        size={"width": WIDTH, "left": LEFT, "right": RIGHT},
        scope=scope([column.report for column in matrix.columns]),
        legend={look: text for look, text in _MEANINGS.items() if any(n[look] for n in looks)},
    )


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("rl_conformance"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        number=_number,
        words=lambda identifier: str(identifier).replace("_", " "),
        seconds=_seconds,
        fact=_fact,
        settings=settings_lines,
    )
    environment.globals.update(
        worst=worst_measure,
        tally=tally,
        look=_look,
        reason=reason,
        marks=_MARKS,
        checks_passed=checks_passed,
        not_run_because=not_run_because,
    )
    return environment


def _look(result: ClauseResult) -> str:
    """The status that a cell shows; ``part`` if it passed but not all of its checks ran."""
    status = status_text(result)
    return "part" if status == "passed" and result.ran < len(result.outcomes) else status


def _number(value: float) -> str:
    text = f"{value:,.0f}" if 1e3 <= abs(value) < 1e15 else f"{value:.3g}"
    return text.translate({ord(","): "\N{NARROW NO-BREAK SPACE}", ord("-"): "\N{MINUS SIGN}"})


def _fact(value: Any) -> str:
    """As people write it: a time without letters between its parts."""
    return re.sub(r"^([\d-]+)T([\d:]+)\+00:00$", r"\1 \2 UTC", str(value))


def _seconds(value: float) -> str:
    scaled, unit = (value, "s") if value >= 1 else (value * 1e3, "ms")
    return f"{scaled:.0f} {unit}" if scaled >= 10 else f"{scaled:.2g} {unit}"
