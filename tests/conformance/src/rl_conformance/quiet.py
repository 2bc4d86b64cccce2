"""Keeps transformers' progress bars out of the suite's output."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING
from unittest.mock import patch

if TYPE_CHECKING:
    from collections.abc import Generator

__all__ = ["no_progress_bars"]


@contextmanager
def no_progress_bars() -> Generator[None]:
    """Turns them off, also in processes that are started meanwhile; then they are as before."""
    from transformers.utils import logging

    before = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with patch.dict(os.environ, {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}):
            yield
    finally:
        if before:
            logging.enable_progress_bar()
