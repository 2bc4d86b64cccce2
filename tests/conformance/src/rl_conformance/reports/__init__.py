"""Writes runs as JSON, JUnit, Markdown, a badge, and one self-contained HTML page."""

from __future__ import annotations

from rl_conformance.reports.badge import to_badge, to_endpoint
from rl_conformance.reports.files import ReportFiles
from rl_conformance.reports.json_report import from_json, read_report, to_json
from rl_conformance.reports.junit import to_junit
from rl_conformance.reports.markdown import matrix_to_markdown, to_markdown
from rl_conformance.reports.matrix import Matrix
from rl_conformance.reports.page import to_html
from rl_conformance.reports.summary import reason, status_text, worst_measure

__all__ = [
    "Matrix",
    "ReportFiles",
    "from_json",
    "matrix_to_markdown",
    "read_report",
    "reason",
    "status_text",
    "to_badge",
    "to_endpoint",
    "to_html",
    "to_json",
    "to_junit",
    "to_markdown",
    "worst_measure",
]
