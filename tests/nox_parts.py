"""What a run of nox is doing, part by part, said as it goes on, with a table at its end."""

from __future__ import annotations

import sys
import threading
import time
import xml.etree.ElementTree as ET
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

__all__ = ["Part", "Parts"]


@dataclass(frozen=True)
class Part:
    """One thing that was done.

    Attributes:
        session: Whose it is.
        what: Was done.
        seconds: How long it took.
        done: Whether it succeeded.
        failures: What failed in it, a line each, where its program wrote a report.
    """

    session: str
    what: str
    seconds: float
    done: bool
    failures: list[str] = field(default_factory=list)

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
    """

    def __init__(
        self, usual: Mapping[str, int], every_s: float = 30.0, stream: TextIO | None = None
    ) -> None:
        self._usual, self._every_s, self._stream = usual, every_s, stream or sys.stderr
        self._began = time.monotonic()
        self.done: list[Part] = []

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
        try:
            yield
        except BaseException:
            seconds = time.monotonic() - started
            self.done.append(Part(session, what, seconds, done=False, failures=_failures(report)))
            raise
        else:
            self.done.append(Part(session, what, time.monotonic() - started, done=True))
        finally:
            ended.set()

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


def _failures(report: Path | None) -> list[str]:
    """The cases of a report that failed, each with the first line of why; none without a report."""
    if report is None or not report.exists():
        return []
    failures = []
    try:
        cases = ET.parse(report).iter("testcase")
    except ET.ParseError as error:  # its program was killed while it wrote
        return [f"{report} cannot be read: {error}"]
    for case in cases:
        for bad in (*case.iterfind("failure"), *case.iterfind("error")):
            why = (bad.get("message") or bad.text or "").strip().partition("\n")[0]
            failures.append(f"{case.get('classname')}::{case.get('name')}: {why[:200]}")
    return failures


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
