"""No order of events, fault or replay breaks a promise: every one of small refits is tried."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from refit_model import scenarios
from refit_model.search import explore, follow
from refit_model.world import Scenario

TRACES: dict[str, dict[str, Any]] = json.loads(
    (Path(scenarios.__file__).parent / "traces.json").read_text(encoding="utf-8")
)
#: What is explored in every run of the tests.
ALWAYS = [
    "STALE_DIRECT",
    "STALE_PACKED",
    "DROPPED",
    "DROPPED_DELTA",
    "LOADED_DELTA",
    "REPLAYED",
    "LATE",
]


def scenario(name: str) -> Scenario:
    found = getattr(scenarios, name)
    assert isinstance(found, Scenario)
    return found


@pytest.mark.xfail(raises=AssertionError, reason="the protocol still has this hole")
@pytest.mark.parametrize("name", TRACES)
def test_what_once_went_wrong_does_not_any_more(name: str) -> None:
    broken, _ = follow(scenario(name), tuple(TRACES[name]["trace"]))
    assert broken is None


@pytest.mark.xfail(raises=AssertionError, reason="the protocol still has this hole")
@pytest.mark.parametrize("name", ALWAYS)
def test_nothing_goes_wrong(name: str) -> None:
    found = explore(scenario(name))
    assert found.broken is None, "\n".join([found.broken or "", *found.trace])
    assert found.complete
