"""Each test runs for every engine; those that start one are skipped where it is not installed."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from engines.kinds import KINDS, Kind, imported, skip_without_engine, start

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["imported", "start"]


@pytest.fixture(scope="session", params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> Kind:
    """The engine."""
    return KINDS[request.param]


@pytest.fixture(autouse=True)
def same_environment() -> Iterator[None]:
    """Takes back what Ray and megatron-core export: engines of other environments share nothing."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    assert isinstance(item, pytest.Function)
    skip_without_engine(item, KINDS[item.callspec.params["kind"]])
