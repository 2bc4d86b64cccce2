"""What a check, a clause and a run come to. Imports nothing heavy."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rl_conformance.catalogue import CLAUSES, Clause
from rl_conformance.figures import figure_as_dict, figures_from

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rl_conformance.figures import Figure

__all__ = ["ClauseResult", "Measure", "Outcome", "RunReport", "Status", "Verdict", "labelled"]


class Status(enum.StrEnum):
    """What came of a check or a clause."""

    PASSED = "passed"
    FAILED = "failed"
    UNSUPPORTED = "unsupported"
    NOT_IMPLEMENTED = "not_implemented"
    KNOWN_FAILURE = "known_failure"
    UNEXPECTED_PASS = "unexpected_pass"
    NOT_RUN = "not_run"
    ERROR = "error"

    @property
    def bad(self) -> bool:
        """Whether it makes the run fail."""
        return self in (Status.FAILED, Status.ERROR, Status.UNEXPECTED_PASS)


#: Of the checks of a clause, the first of these that occurs is the clause's status.
_PRECEDENCE = (
    Status.ERROR,
    Status.FAILED,
    Status.UNEXPECTED_PASS,
    Status.KNOWN_FAILURE,
    Status.PASSED,
    Status.NOT_IMPLEMENTED,
    Status.UNSUPPORTED,
    Status.NOT_RUN,
)


class Verdict(enum.StrEnum):
    """The result of a run. Only a run of the whole suite is conformant; a part of it is passed."""

    CONFORMANT = "conformant"
    PASSED = "passed"
    FAILED = "failed"
    INCOMPLETE = "incomplete"


def labelled(**texts: str) -> str:
    """Texts that are not empty, each in lines of its own after its label."""
    return "\n".join(
        f"{name.replace('_', ' ')}:".ljust(11) + text.strip().replace("\n", "\n" + 11 * " ")
        for name, text in texts.items()
        if text
    )


@dataclass(frozen=True, slots=True)
class Measure:
    """A measured value beside the bound it must keep.

    Attributes:
        name: What was measured.
        value: The figure.
        tolerance: The largest that passes.
        unit: Such as ``"bytes"``; "" for a pure number.
    """

    name: str
    value: float
    tolerance: float
    unit: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For JSON, which has no word for what is not a number: that is text."""
        value = self.value if math.isfinite(self.value) else str(self.value)
        return {"name": self.name, "value": value, "tolerance": self.tolerance, "unit": self.unit}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Measure:
        """Reads what :meth:`as_dict` wrote."""
        return cls(data["name"], float(data["value"]), data["tolerance"], data["unit"])


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one check.

    Attributes:
        check: Its id, ``clause/name``.
        title: What it looks at.
        status: What came of it.
        seconds: How long it took.
        message: Why it did not pass, "" if it did.
        measures: What it measured.
        excused: For ``not_run``: True if the profile does not need it, so that the run is
            complete without it.
        figures: What it recorded for the plots of the report.
        where: File and line of the check.
        command: Runs it alone.
        engines: How many engines were built for it; those that another check built do not count.
        policies: How many policies, likewise.
    """

    check: str
    title: str
    status: Status
    seconds: float = 0.0
    message: str = ""
    measures: tuple[Measure, ...] = ()
    excused: bool = False
    figures: tuple[Figure, ...] = ()
    where: str = ""
    command: str = ""
    engines: int = 0
    policies: int = 0

    @property
    def story(self) -> str:
        """Why it did not pass; for a failure also what to read, where to look and what to run."""
        if not self.status.bad or not self.where:
            return self.message
        clause, message = CLAUSES[self.clause], self.message.strip()
        return "\n".join(
            [
                labelled(checked=self.title),
                message if message.startswith("did:") else labelled(result=message),
                labelled(
                    look_at=clause.look,
                    clause=f"{clause.title} (rl explain {self.clause})",
                    run_alone=self.command,
                    source=self.where,
                ),
            ]
        )

    @property
    def clause(self) -> str:
        """Number of the clause."""
        return self.check.partition("/")[0]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "check": self.check,
            "title": self.title,
            "status": str(self.status),
            "seconds": round(self.seconds, 4),
            "message": self.message,
            "excused": self.excused,
            "measures": [m.as_dict() for m in self.measures],
            "figures": [figure_as_dict(figure) for figure in self.figures],
            "where": self.where,
            "command": self.command,
            "engines": self.engines,
            "policies": self.policies,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Outcome:
        """Reads what :meth:`as_dict` wrote."""
        return cls(
            check=data["check"],
            title=data["title"],
            status=Status(data["status"]),
            seconds=data["seconds"],
            message=data["message"],
            excused=data["excused"],
            measures=tuple(Measure.from_dict(m) for m in data["measures"]),
            figures=figures_from(data.get("figures", ())),
            where=data.get("where", ""),
            command=data.get("command", ""),
            engines=data.get("engines", 0),
            policies=data.get("policies", 0),
        )


@dataclass(frozen=True, slots=True)
class ClauseResult:
    """What came of one clause.

    Attributes:
        clause: The clause.
        outcomes: Of its checks.
    """

    clause: Clause
    outcomes: tuple[Outcome, ...]

    @property
    def status(self) -> Status | None:
        """The gravest status among its checks, or None if it has no outcome.

        A check that did not run although the run needs it takes a pass away.
        """
        if not self.outcomes:
            return None
        seen = {o.status for o in self.outcomes}
        gravest = next(status for status in _PRECEDENCE if status in seen)
        return Status.NOT_RUN if self.blocked and not gravest.bad else gravest

    @property
    def blocked(self) -> bool:
        """Whether a check that the run needs did not run."""
        return any(o.status is Status.NOT_RUN and not o.excused for o in self.outcomes)

    @property
    def ran(self) -> int:
        """How many of its checks ran."""
        return sum(o.status is not Status.NOT_RUN for o in self.outcomes)


@dataclass(frozen=True, slots=True)
class RunReport:
    """One run of the suite against one backend.

    Attributes:
        backend: Its name.
        outcomes: Of every check that was reached.
        environment: Versions, device, model and time.
        clauses: The clauses of the run; all of the catalogue by default.
        selection: Which part of the suite the user chose, "" if the run is of all of it.
        seconds: Wall time.
        total: How many checks the whole suite has for this backend; 0 if the report, written by an
            older suite, does not have the number.
    """

    backend: str
    outcomes: tuple[Outcome, ...]
    environment: Mapping[str, Any] = field(default_factory=dict)
    clauses: tuple[str, ...] = tuple(CLAUSES)
    selection: str = ""
    seconds: float = 0.0
    total: int = 0

    def results(self) -> list[ClauseResult]:
        """One entry for each clause of the run, in the order of the catalogue."""
        return [
            ClauseResult(CLAUSES[id_], tuple(o for o in self.outcomes if o.clause == id_))
            for id_ in self.clauses
        ]

    @property
    def engines(self) -> int:
        """How many engines were built, over all processes."""
        return sum(outcome.engines for outcome in self.outcomes)

    @property
    def policies(self) -> int:
        """How many policies were built, over all processes."""
        return sum(outcome.policies for outcome in self.outcomes)

    @property
    def missing(self) -> list[str]:
        """Clauses without an outcome, or without one that the run needs: it is incomplete."""
        return [r.clause.id for r in self.results() if r.status is None or r.blocked]

    @property
    def verdict(self) -> Verdict:
        """Failed if any check is bad; incomplete if anything is missing or nothing passed."""
        if any(o.status.bad for o in self.outcomes):
            return Verdict.FAILED
        if self.missing or not any(o.status is Status.PASSED for o in self.outcomes):
            return Verdict.INCOMPLETE
        return Verdict.PASSED if self.selection else Verdict.CONFORMANT

    @property
    def headline(self) -> str:
        """The verdict; for a part of the suite also how large the part is."""
        if not self.selection:
            return str(self.verdict)
        ran = sum(result.ran for result in self.results())
        size = f"{ran} of {self.total}" if self.total else f"{ran}"
        return f"{self.verdict} (part: {size} checks)"

    @property
    def cites(self) -> str:
        """The run that has the clauses which core alone keeps; "" if it is this one."""
        kept = [id_ for id_, clause in CLAUSES.items() if clause.core]
        if self.selection or set(kept) & set(self.clauses):
            return ""
        version = self.environment.get("core", "of the same version")
        return f"{', '.join(kept)}: see `rl conformance run core` for rl-core {version}"

    def counts(self) -> dict[Status, int]:
        """Number of clauses of each status."""
        statuses = [r.status or Status.NOT_RUN for r in self.results()]
        return {status: statuses.count(status) for status in Status if status in statuses}
