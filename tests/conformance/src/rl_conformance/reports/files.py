"""Which file gets which format."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rl_conformance.reports.badge import to_badge, to_endpoint
from rl_conformance.reports.json_report import to_json
from rl_conformance.reports.junit import to_junit
from rl_conformance.reports.markdown import to_markdown
from rl_conformance.reports.matrix import Matrix
from rl_conformance.reports.page import to_html

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from rl_conformance.outcome import RunReport

__all__ = ["ReportFiles", "write_text"]

_BADGES: dict[str, Callable[[RunReport], str]] = {".svg": to_badge, ".json": to_endpoint}


@dataclass(frozen=True, slots=True)
class ReportFiles:
    """The files that a run is written to; None leaves a format out.

    Attributes:
        json: Everything, to be read back.
        junit: XML for CI systems.
        markdown: One table.
        html: One page.
        badge: A picture if it ends in ``.svg``, a shields.io endpoint if in ``.json``.

    Raises:
        ConfigError: The badge ends in something else.
    """

    json: Path | None = None
    junit: Path | None = None
    markdown: Path | None = None
    html: Path | None = None
    badge: Path | None = None

    def __post_init__(self) -> None:
        from rl_core.errors import ConfigError

        if self.badge is not None and self.badge.suffix not in _BADGES:
            raise ConfigError(
                f"a badge cannot be written as {self.badge.name!r}",
                fix="end the name in .svg, or in .json for shields.io",
                key="badge",
            )

    def write(self, report: RunReport) -> None:
        """Writes every format that has a file.

        Raises:
            ConfigError: One cannot be written; those before it are.
        """
        makers: list[tuple[Path | None, Callable[[RunReport], str]]] = [
            (self.json, to_json),
            (self.junit, to_junit),
            (self.markdown, to_markdown),
            (self.html, lambda each: to_html(Matrix.of([each]))),
            (self.badge, _BADGES[self.badge.suffix] if self.badge else to_badge),
        ]
        for path, make in makers:
            if path is not None:
                write_text(path, make(report))


def write_text(path: Path, text: str) -> None:
    """Writes a file, as a whole or not at all, and the directories it lies in.

    Raises:
        ConfigError: It cannot be written; one that stood there stays.
    """
    from rl_core.errors import ConfigError

    unfinished = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(text, encoding="utf-8", errors="backslashreplace")
        unfinished.replace(path)
    except OSError as error:
        with suppress(OSError):
            unfinished.unlink()
        raise ConfigError(
            f"{path} cannot be written: {error}",
            fix="make room on its disk, or name a file in a directory where this process may write",
            key=str(path),
        ) from error
