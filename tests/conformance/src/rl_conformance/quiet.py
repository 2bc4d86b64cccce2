"""Keeps progress bars of other libraries out of the suite's output."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING
from unittest.mock import patch

if TYPE_CHECKING:
    from collections.abc import Generator

__all__ = ["no_progress_bars"]

#: For processes that are started meanwhile; tqdm reads its own when it is imported.
_OFF = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TQDM_DISABLE": "1"}


@contextmanager
def no_progress_bars() -> Generator[None]:
    """Turns them off, also in processes that are started meanwhile; then they are as before."""
    from transformers.utils import logging

    before = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with patch.dict(os.environ, _OFF):
            yield
    finally:
        if before:
            logging.enable_progress_bar()
