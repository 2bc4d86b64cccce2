"""Tiny checkpoints and engines, made once per session."""

from __future__ import annotations

import pytest
from engines.kinds import KINDS, Kind, imported, skip_without_engine, start

__all__ = ["imported", "start"]


@pytest.fixture(scope="session")
def kind() -> Kind:
    """The engine."""
    return KINDS["vllm"]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    skip_without_engine(item, KINDS["vllm"])
