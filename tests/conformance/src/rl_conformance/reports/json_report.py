"""JSON: the one format that is read back."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

import msgspec

from rl_conformance.catalogue import CLAUSES
from rl_conformance.outcome import Outcome, RunReport, Status

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["SCHEMA", "from_json", "read_report", "to_json"]

#: Version of the format. A key that is added, and may be absent, does not change it.
SCHEMA = 2
#: The only one of another numbering: its R16 is what is R17 now.
_NUMBERED_OTHERWISE = 1


class _Measure(TypedDict):
    name: str
    value: float | str
    tolerance: float
    unit: str


class _Check(TypedDict):
    check: str
    title: str
    status: Status
    seconds: float
    message: str
    excused: bool
    measures: list[_Measure]
    figures: NotRequired[list[dict[str, Any]]]
    where: NotRequired[str]
    command: NotRequired[str]
    engines: NotRequired[int]
    policies: NotRequired[int]


class _Clause(TypedDict):
    id: str
    checks: list[_Check]


class _Report(TypedDict):
    """What is read back; the rest of the file is for others to read."""

    backend: str
    selection: str
    seconds: float
    total_checks: NotRequired[int]
    environment: dict[str, str | int | float | bool | None]
    clauses: list[_Clause]


def to_json(report: RunReport) -> str:
    """Everything there is to know of a run; :func:`from_json` reads it back."""
    clauses = [
        {
            **r.clause.as_dict(),
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
        "cites": report.cites,
        "seconds": round(report.seconds, 3),
        "total_checks": report.total,
        "engines": report.engines,
        "policies": report.policies,
        "environment": dict(report.environment),
        "counts": {str(k): v for k, v in report.counts().items()},
        "clauses": clauses,
    }
    return json.dumps(whole, indent=2) + "\n"


def from_json(text: str) -> RunReport:
    """Reads what :func:`to_json` wrote.

    Raises:
        ValueError: It is no report, or one of another version of the format or of the catalogue.
    """
    data: Any = json.loads(text)
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema == _NUMBERED_OTHERWISE:
        data, schema = json.loads(re.sub(r"\bR16\b", "R17", text)), SCHEMA
    if schema != SCHEMA:
        raise ValueError(f"a report of schema {schema}; this suite reads {SCHEMA}")
    try:
        report = _report(msgspec.convert(data, _Report))
    except (msgspec.ValidationError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"a damaged report: {error}") from error
    if unknown := [id_ for id_ in report.clauses if id_ not in CLAUSES]:
        raise ValueError(f"it has clauses that this suite does not know: {', '.join(unknown)}")
    return report


def _report(data: _Report) -> RunReport:
    return RunReport(
        backend=data["backend"],
        outcomes=tuple(Outcome.from_dict(o) for c in data["clauses"] for o in c["checks"]),
        environment=data["environment"],
        clauses=tuple(c["id"] for c in data["clauses"]),
        selection=data["selection"],
        seconds=data["seconds"],
        total=data.get("total_checks", 0),
    )


def read_report(path: Path) -> RunReport:
    """Reads a file that :func:`to_json` was written to.

    Raises:
        ConfigError: It cannot be read, or is no report of this suite.
    """
    from rl_core.errors import ConfigError

    try:
        return from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} is not a report that this suite can read: {error}",
            fix="give files written by `rl conformance run NAME --json FILE`, by this version of "
            "the suite or an older one",
            key="reports",
        ) from error
