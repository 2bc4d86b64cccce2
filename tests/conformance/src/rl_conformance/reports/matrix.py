"""Clauses by runs: what the page and the Markdown of several runs are made from."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Self

from rl_conformance.catalogue import CLAUSES
from rl_conformance.reports.json_report import read_report
from rl_conformance.reports.summary import status_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from rl_conformance.catalogue import Clause, Kind
    from rl_conformance.outcome import ClauseResult, Outcome, RunReport

__all__ = ["Column", "Matrix", "Row"]

#: Facts that should be the same in all columns of a matrix.
_COMMON = ("suite", "contract", "core")


@dataclass(frozen=True, slots=True)
class Column:
    """One run.

    Attributes:
        report: The run.
        where: Device, dtype and date, as far as other columns have the same.
        results: Of each clause, by its number.
    """

    report: RunReport
    where: tuple[str, ...]
    results: Mapping[str, ClauseResult]

    @property
    def label(self) -> str:
        """The heading in one line."""
        return f"{self.report.backend} ({', '.join(self.where)})" if self.where else self.name

    @property
    def name(self) -> str:
        """Of the backend."""
        return self.report.backend


@dataclass(frozen=True, slots=True)
class Row:
    """One clause in all runs.

    Attributes:
        clause: The clause.
        cells: What came of it in each column; None where it was not part of the run.
    """

    clause: Clause
    cells: tuple[ClauseResult | None, ...]

    @property
    def statuses(self) -> tuple[str, ...]:
        """In each column; ``absent`` where it was not part of the run."""
        return tuple(status_text(cell) if cell else "absent" for cell in self.cells)

    @property
    def differs(self) -> bool:
        """Whether the columns have different statuses."""
        return len(set(self.statuses)) > 1

    @property
    def bad(self) -> bool:
        """Whether a column fails or lacks a result."""
        return any(c and (c.status is None or c.status.bad or c.blocked) for c in self.cells)

    def checks(self) -> list[tuple[str, str, tuple[Outcome | None, ...]]]:
        """Id and title of each check, with what came of it in each column."""
        found = [{o.check: o for o in cell.outcomes} if cell else {} for cell in self.cells]
        titles = {id_: o.title for column in found for id_, o in column.items()}
        return [
            (id_, title, tuple(column.get(id_) for column in found))
            for id_, title in titles.items()
        ]


@dataclass(frozen=True, slots=True)
class Matrix:
    """Clauses by runs.

    Attributes:
        columns: The runs.
        rows: Every clause of any of the runs, in the order of the catalogue.
    """

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]

    @classmethod
    def of(cls, reports: Sequence[RunReport]) -> Self:
        """From runs with different headings."""
        days = Counter(_heading(report, 10) for report in reports)
        columns = []
        for report in reports:
            heading = _heading(report, 10)
            where = heading if days[heading] == 1 else _heading(report)
            results = {result.clause.id: result for result in report.results()}
            columns.append(Column(report, tuple(filter(None, where[1:])), results))
        rows = [
            Row(clause, tuple(column.results.get(id_) for column in columns))
            for id_, clause in CLAUSES.items()
            if any(id_ in column.results for column in columns)
        ]
        return cls(tuple(columns), tuple(rows))

    @classmethod
    def read(cls, paths: Sequence[Path]) -> Self:
        """From files that runs were written to as JSON.

        Raises:
            ConfigError: A file is no report, or two of them would have the same heading.
        """
        from rl_core.errors import ConfigError

        seen: dict[tuple[str, ...], Path] = {}
        reports = [read_report(path) for path in paths]
        for path, report in zip(paths, reports, strict=True):
            heading = _heading(report)
            if heading in seen:
                raise ConfigError(
                    f"{path} and {seen[heading]} are the same run: "
                    f"{', '.join(filter(None, heading))}",
                    fix="leave one of them out",
                    key="reports",
                )
            seen[heading] = path
        return cls.of(reports)

    def chapters(self) -> Iterator[tuple[Kind, list[Row]]]:
        """The rows of each chapter."""
        for kind, rows in groupby(self.rows, key=lambda row: row.clause.kind):
            yield kind, list(rows)

    @property
    def disagreements(self) -> list[str]:
        """What the runs should have in common and do not: versions of suite, contract and core."""
        found = []
        for fact in _COMMON:
            labels: dict[str, list[str]] = {}
            for column in self.columns:
                value = str(column.report.environment.get(fact, "unknown"))
                labels.setdefault(value, []).append(column.label)
            if len(labels) > 1:
                each = [f"{value} for {' and '.join(of)}" for value, of in labels.items()]
                found.append(f"{fact}: {'; '.join(each)}")
        return found


def _heading(report: RunReport, date_chars: int | None = None) -> tuple[str, ...]:
    """Backend, device, dtype and date."""
    device, dtype, date = (str(report.environment.get(k, "")) for k in ("device", "dtype", "date"))
    return report.backend, device, dtype, date[:date_chars]
