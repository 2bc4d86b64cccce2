"""Keeps transformers' progress bars out of the suite's output."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Generator

__all__ = ["no_progress_bars"]


@contextmanager
def no_progress_bars() -> Generator[None]:
    """Turns them off for a while; they are as before afterwards."""
    from transformers.utils import logging

    before = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if before:
            logging.enable_progress_bar()
