"""What belongs on standard output, and what does not."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Generator

    from rich.console import Console

__all__ = ["chatter_to_stderr", "console_for_result"]


@contextmanager
def chatter_to_stderr() -> Generator[None]:
    """What plugins and engines print goes to standard error, also from their own processes.

    The result, printed afterwards, is then all that a reader of standard output gets.
    """
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)


def console_for_result() -> Console:
    """Where results are shown; in a pipe they are not folded, because a pipe has no width."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 1000
    return console
