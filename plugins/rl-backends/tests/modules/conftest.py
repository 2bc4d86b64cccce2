"""Tiny checkpoints, made once per session."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from rl_conformance.models import make_tiny_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``tiny(family="qwen2", **overrides)`` is the directory of such a model."""

    @cache
    def make(family: str = "qwen2", **overrides: Any) -> Path:
        return make_tiny_model(tmp_path_factory.mktemp("models") / family, family, **overrides)

    return make
