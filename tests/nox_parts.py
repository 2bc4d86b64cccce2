"""What a run of nox is doing, part by part, said as it goes on, with a table at its end.

Each part is also recorded in a file, so that a run in parts can be joined in one report.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ET
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["FullReport", "Part", "Parts", "join_parts"]


@dataclass(frozen=True)
class Part:
    """One thing that was done.

    Attributes:
        session: Whose it is.
        what: Was done.
        seconds: How long it took.
        done: Whether it succeeded.
        failures: What failed in it, a line each, where its program wrote a report.
        tests: How many tests or checks ran in it, by the same report.
        commit: The commit that was checked out, with "+" where files differed from it.
    """

    session: str
    what: str
    seconds: float
    done: bool
    failures: list[str] = field(default_factory=list)
    tests: int = 0
    commit: str = ""

    @property
    def name(self) -> str:
        """As it is shown, and as the usual durations have it."""
        return f"{self.session}: {self.what}"


class Parts:
    """The parts of a run.

    Args:
        usual: Seconds that parts usually take, by name; or by what is done, whosoever does it.
        every_s: Seconds between lines that say that a part goes on, where nobody sees a terminal.
        stream: Where this is said; nox, too, writes to ``stderr``.
        record: A file to which every part is added, as a line of JSON.
    """

    def __init__(
        self,
        usual: Mapping[str, int],
        every_s: float = 30.0,
        stream: TextIO | None = None,
        record: Path | None = None,
    ) -> None:
        self._usual = usual
        self._every_s = every_s
        self._stream = stream or sys.stderr
        self._record = record
        self._began = time.monotonic()
        self._unchanged: list[str] = []
        self.done: list[Part] = []

    def leave_out(self, session: str, why: str) -> None:
        """Notes that a session does not run, or a part of it, for :meth:`table`."""
        self._unchanged.append(f"Left out: {session}: {why}")

    @contextmanager
    def part(self, session: str, what: str, report: Path | None = None) -> Iterator[None]:
        """Says that a part begins, how long it usually takes, and now and then that it goes on.

        Args:
            session: Whose it is.
            what: Is done.
            report: Where its program writes, in JUnit's format, what failed.
        """
        if report is not None:
            report.unlink(missing_ok=True)
        name, started, ended = f"{session}: {what}", time.monotonic(), threading.Event()
        usual = self._usual.get(name, self._usual.get(what))
        self._say(f"{name}" + (f" (usually {_clock(usual)} on 2 cores)" if usual else ""))

        def go_on() -> None:
            while not ended.wait(self._every_s):
                self._say(f"{name}: for {_clock(time.monotonic() - started)} so far")

        watched = sys.stdout.isatty() and self._stream.isatty()
        if not watched:
            threading.Thread(target=go_on, daemon=True).start()
        succeeded = False
        try:
            yield
            succeeded = True
        finally:
            ended.set()
            failures, tests = _read_report(report)
            seconds = time.monotonic() - started
            failures = [] if succeeded else failures
            part = Part(session, what, seconds, succeeded, failures, tests, _commit())
            self.done.append(part)
            if self._record is not None:
                self._record.parent.mkdir(parents=True, exist_ok=True)
                with self._record.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(part)) + "\n")

    def print_table(self, wanted: Sequence[str], left_out: Mapping[str, str]) -> None:
        """Says what :meth:`table` has."""
        print("", *self.table(wanted, left_out), sep="\n", file=self._stream, flush=True)

    def table(self, wanted: Sequence[str], left_out: Mapping[str, str]) -> list[str]:
        """Seconds of each part, what failed in it, and what did not run.

        Args:
            wanted: Sessions that make a whole short run.
            left_out: What others would have done, by session. Of these it is said that they did
                not run only where the short run was whole, or meant to be.
        """
        width = max(len(part.name) for part in self.done)
        lines = [f"{'part':{width}} {'seconds':>8} {'usually':>8}"]
        for part in self.done:
            usual = self._usual.get(part.name, self._usual.get(part.what, ""))
            failed = "" if part.done else "  FAILED"
            lines.append(f"{part.name:{width}} {part.seconds:8.0f} {usual:>8}{failed}")
        total = time.monotonic() - self._began  # some parts are side by side
        lines.append(f"{'all':{width}} {total:8.0f}")
        for part in self.done:
            lines += [f"{part.name}: {failure}" for failure in part.failures]
        lines += self._unchanged
        ran = {part.session for part in self.done}
        others = {session: what for session, what in left_out.items() if session not in ran}
        if len(ran & set(wanted)) > 1:
            missing = [session for session in wanted if session not in ran]
            lines += [f"Not run: {', '.join(missing)}"] * bool(missing)
            lines += [f"Left out: {what} ({session})" for session, what in others.items()]
            lines += ["`nox -s full` runs everything."] * bool(others)
        return lines

    def _say(self, text: str) -> None:
        # A line of its own, also where a program has just written dots.
        now = _clock(time.monotonic() - self._began)
        print(f"\n[{now}] {text}", file=self._stream, flush=True)


@dataclass(frozen=True)
class FullReport:
    """The parts of one commit, joined.

    Attributes:
        text: The report, in Markdown.
        whole: Whether every session ran and every part of it passed in the end.
    """

    text: str
    whole: bool


def join_parts(record: Path, sessions: Sequence[str]) -> FullReport:
    """Joins the parts that ran at the commit that is checked out; the last run of a part counts.

    Args:
        record: The file that :class:`Parts` wrote.
        sessions: Those that a whole run has.
    """
    commit = _commit()
    lines = record.read_text(encoding="utf-8").splitlines() if record.exists() else []
    every = [Part(**json.loads(line)) for line in lines]
    parts = [part for part in every if part.commit == commit]
    last = {part.name: part for part in parts}
    missing = [name for name in sessions if name not in {part.session for part in parts}]
    whole = not missing and all(part.done for part in last.values())
    minutes = sum(part.seconds for part in last.values()) / 60
    verdict = "Every part passed" if whole else "NOT whole"
    tests = sum(part.tests for part in last.values())
    text = [
        f"# Everything, at {commit[:12]}",
        "",
        f"{verdict}: {len(last)} parts, {tests:,} tests and checks, {minutes:.0f} minutes.",
        *(f"- did not run: {name}" for name in missing),
        "",
        "| part | seconds | tests | result |",
        "|---|---|---|---|",
    ]
    for part in last.values():
        result = "passed" if part.done else "**failed**"
        text.append(f"| {part.name} | {part.seconds:.0f} | {part.tests or ''} | {result} |")
    text += ["", "## Failed", ""]
    text += [f"- {part.name}: {each}" for part in last.values() for each in part.failures]
    text += ["", "## Failed once, and passed when the part ran again", ""]
    text += [
        f"- {part.name}: {failure}"
        for part in parts
        for failure in part.failures or [""] * (not part.done)
        if part is not last[part.name] and failure not in last[part.name].failures
    ]
    return FullReport("\n".join(text) + "\n", whole)


def _commit() -> str:
    """Returns the commit that is checked out, with "+" where files differ; "" without git."""

    def git(*command: str) -> str:
        done = subprocess.run(
            ["git", *command], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=60
        )
        return done.stdout.strip()

    return git("rev-parse", "HEAD") + "+" * bool(git("status", "--porcelain"))


def _read_report(report: Path | None) -> tuple[list[str], int]:
    """Returns a line for each case of a report that failed, and how many cases ran."""
    if report is None or not report.exists():
        return [], 0
    failures = []
    try:
        cases = list(ET.parse(report).iter("testcase"))
    except ET.ParseError as error:  # its program was killed while it wrote
        return [f"{report} cannot be read: {error}"], 0
    for case in cases:
        for bad in (*case.iterfind("failure"), *case.iterfind("error")):
            why = (bad.get("message") or bad.text or "").strip().partition("\n")[0]
            failures.append(f"{case.get('classname')}::{case.get('name')}: {why[:200]}")
    return failures, sum(case.find("skipped") is None for case in cases)


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
