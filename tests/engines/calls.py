"""What the tests of the server backend call, and wait for."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from prompt_rows import prompts

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["in_background", "prompts", "tokens", "until"]


def tokens(prompt: list[int], count: int) -> list[int]:
    return [(sum(prompt) + place) % 200 + 10 for place in range(count)]


def in_background(call: Callable[[], Any]) -> Callable[[], Any]:
    """Starts a call; what is returned waits for it, and gives what it returned or raised."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(call())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def wait() -> Any:
        thread.join(30)
        assert found
        return found[0]

    return wait


def until(true: Callable[[], Any], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)
