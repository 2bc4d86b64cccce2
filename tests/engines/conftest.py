"""Each test runs for every engine; those that start one are skipped where it is not installed."""

from __future__ import annotations

import pytest
from engines.kinds import KINDS, Kind, imported, skip_without_engine, start

__all__ = ["imported", "start"]


@pytest.fixture(scope="session", params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> Kind:
    """The engine."""
    return KINDS[request.param]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    assert isinstance(item, pytest.Function)
    skip_without_engine(item, KINDS[item.callspec.params["kind"]])
