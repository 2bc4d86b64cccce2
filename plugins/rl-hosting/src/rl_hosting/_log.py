"""What an engine prints: kept for errors, and shown where that is wanted."""

from __future__ import annotations

import os
import tempfile
import threading
from contextlib import suppress

from rl_hosting._timing import SHOW_LOG_S

__all__ = ["Log"]

#: Bytes of the end of a log that go into an error.
_TAIL = 4000
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

    def tail(self) -> str:
        """The last lines."""
        with self._reading:
            if self._file.closed:
                return ""
            end = os.fstat(self.fileno()).st_size
            tail = os.pread(self.fileno(), _TAIL, max(0, end - _TAIL))
        return tail.replace(b"\0", b"").decode(errors="replace").strip()

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
