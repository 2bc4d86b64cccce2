"""No order of events, fault or replay breaks a promise: every one of small refits is tried.

The code is the product's own; ``refit_model`` has the doubles around it. ``pytest -m full`` tries
the whole product of options and faults, which takes many minutes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from refit_model import scenarios
from refit_model.mutants import MUTANTS
from refit_model.scenarios import FULL
from refit_model.search import explore, follow, nothing_goes_wrong
from refit_model.world import Scenario

#: What once went wrong, by scenario (or with it): the shortest way there.
TRACES: dict[str, dict[str, Any]] = json.loads(
    (Path(scenarios.__file__).parent / "traces.json").read_text(encoding="utf-8")
)
#: What is explored, but for what takes long in every run of the tests.
EXPLORED = [
    "STALE_DIRECT",
    "DROPPED",
    "DROPPED_DELTA",
    "LOADED_DELTA",
    "STAGED_CRASH",
    "REPLAYED",
    "REPEATED",
    "POSED_ONCE",
    "LATE",
    "LATE_COUNTED",
    "CRASHED",
    "FLOODED",
    "BACKLOG",
    "GIVEN_UP",
    "TWO_AT_ONCE",
    "TWO_APART",
    "TWO_TRAINERS",
    "READERS",
    "READERS_STAGED",
    "READER_BETWEEN",
    "GIVEN_UP_FROM_OUTSIDE",
    "ONE_OF_TWO_GIVEN_UP",
    "TWO_STAGED",
    "TWO_ENGINES_CRASH",
    "TWO_ENGINES_PAUSE",
    "DRIVER_PAUSE",
    "GROUP",
    "GROUP_OF_TWO",
    "LOST_RANK",
    "LOST_RANK_OF_TWO",
    "RANKS",
    "RANKS_CRASH",
    "RANKS_STEP",
    "RANKS_DRIFT",
    "RANKS_PAUSE",
    "TWO_AND_CRASH",
    "TWO_TRAINERS_READER",
    "TWO_TRAINERS_QUIT",
]
#: Scenarios that take ten seconds and more each; ``nox -s full`` explores them, too.
LONG = {
    "TWO_ENGINES_PAUSE",
    "TWO_ENGINES_CRASH",
    "GROUP_OF_TWO",
    "RANKS",
    "RANKS_PAUSE",
    "RANKS_STEP",
    "TWO_APART",
    "LOST_RANK",
}
#: States after which a search for a mutant gives up; the slowest one takes some 300.
_PATIENCE = 3000


def scenario(name: str) -> Scenario:
    found = getattr(scenarios, name)
    assert isinstance(found, Scenario)
    return found


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.full] if n in LONG else []) for n in EXPLORED]
)
def test_nothing_goes_wrong(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    nothing_goes_wrong(name, scenario(name), capsys)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", FULL)
def test_nothing_goes_wrong_in_all_of_it(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    nothing_goes_wrong(name, FULL[name], capsys)


@pytest.mark.parametrize("name", TRACES)
def test_what_once_went_wrong_does_not_any_more(name: str) -> None:
    known = TRACES[name]
    broken, missed = follow(scenario(known.get("scenario", name)), tuple(known["trace"]))
    assert broken is None
    assert not missed, "the fault of this trace did not happen"


@pytest.mark.parametrize("name", MUTANTS)
def test_a_defence_that_is_taken_back_is_missed(name: str) -> None:
    taken_back, where = MUTANTS[name]
    with taken_back():
        found = explore(scenario(where), most=_PATIENCE)
    assert found.broken is not None, f"{found} without it"
