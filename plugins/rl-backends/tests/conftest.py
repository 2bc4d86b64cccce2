"""Plugins that are installed for one test, and what is closed after it: parties and engines."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from counting_engine import CountingEngine
from party_fixtures import either_device, gpu, install, keep, pair

__all__ = ["either_device", "gpu", "install", "keep", "pair"]


@pytest.fixture
def make() -> Iterator[Callable[..., CountingEngine]]:
    """``make(**config)`` is an engine that is awake."""
    engines = []

    def build(**config: Any) -> CountingEngine:
        engines.append(CountingEngine(**config))
        engines[-1].prepare_for_generation()
        return engines[-1]

    yield build
    for engine in engines:
        engine.before_row = lambda row: None
        engine.shutdown()
