"""What an engine prints: kept for errors, and shown where that is wanted."""

from __future__ import annotations

import os
import re
import tempfile
import threading
from contextlib import suppress

from rl_hosting._timing import SHOW_LOG_S

__all__ = ["Log", "find_cause"]

#: Bytes of the end of a log: for the details of an error, and those that are searched for a cause.
_TAIL, _SEARCHED = 4000, 1 << 16
#: How many errors, and lines of each, are quoted, and how much of a line.
_FEW, _LONGEST = 3, 300
#: What engines write before a line: a process, a level with a date and a place.
_SAID_BY = re.compile(
    r"^(\([^()]*pid=\d+\) )?((DEBUG|INFO|WARNING|ERROR|CRITICAL) [\d-]+ [\d:.,]+ \[[^\]]*\] ?)?"
)
_FRAME = re.compile(r'^\s+File ".*", line \d+')
_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(: |:?$)")
#: Exceptions that follow when another process of the engine has ended.
_FOLLOWS = re.compile(
    r"^(EOFError|BrokenPipeError|ConnectionResetError|KeyboardInterrupt|SystemExit)"
)
#: Errors without a traceback.
_ERROR = re.compile(
    r"\b(ERROR|CRITICAL|FATAL|Fatal|Segmentation fault|terminate called|[Oo]ut of memory|Killed)\b"
    r"|^[\w.]*(Error|Exception): |^\s*what\(\): "
)
_CHUNK = 1 << 16
_STDERR = 2


class Log:
    """A file without a name that an engine's processes print to.

    It is no pipe: an engine never waits for its reader, and what it printed before it was killed is
    kept.

    Args:
        show: Print it here, too.
    """

    def __init__(self, *, show: bool) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._reading = threading.Lock()
        self._over = threading.Event()
        self._shown = threading.Thread(target=self._show, name="engine-log", daemon=True)
        if show:
            self._shown.start()

    def fileno(self) -> int:
        """Its descriptor."""
        return self._file.fileno()

    def tail(self, size: int = _TAIL) -> str:
        """The last lines, of so many bytes."""
        with self._reading:
            if self._file.closed:
                return ""
            end = os.fstat(self.fileno()).st_size
            tail = os.pread(self.fileno(), size, max(0, end - size))
        return tail.replace(b"\0", b"").decode(errors="replace").strip()

    def cause(self) -> str:
        """The lines that show why an engine ended; its last ones if none does."""
        return find_cause(self.tail(_SEARCHED))

    def close(self) -> None:
        """Shows the rest and closes it. Idempotent."""
        self._over.set()
        if self._shown.is_alive():
            self._shown.join()
        with self._reading:
            self._file.close()

    def _show(self) -> None:
        shown = 0
        while True:
            over = self._over.wait(SHOW_LOG_S)
            while chunk := os.pread(self.fileno(), _CHUNK, shown):
                shown += len(chunk)
                with suppress(OSError):  # nobody reads it
                    os.write(_STDERR, chunk.replace(b"\0", b""))
                if over and len(chunk) < _CHUNK:
                    break
            if over:
                return


def find_cause(text: str) -> str:
    """The error at the end of a log: the exceptions of its last tracebacks, in order.

    If there is no traceback, the last lines about errors; without any the last lines. What engines
    print when they start, such as warnings, would hide it.
    """
    lines = [_SAID_BY.sub("", line) for line in text.splitlines()]
    raised: dict[str, None] = {}
    framed = False
    for place, line in enumerate(lines):
        framed = framed or _FRAME.match(line) is not None
        if framed and _EXCEPTION.match(line):
            framed = False
            more = lines[place + 1 : place + _FEW]
            end = next((i for i, one in enumerate(more) if not one.startswith(" ")), len(more))
            shown = "\n".join(one[:_LONGEST] for one in (line, *more[:end]))
            raised.pop(shown, None)
            raised[shown] = None
    causes = [shown for shown in raised if not _FOLLOWS.match(shown)] or list(raised)
    errors = [line for line in text.splitlines() if _ERROR.search(line)]
    found = causes or errors or [line for line in text.splitlines() if line.strip()]
    return "\n".join(one if one in raised else one[:_LONGEST] for one in found[-_FEW:])
