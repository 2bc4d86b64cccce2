"""Generation and refits of a hosted engine, in every order: no reader decodes what is half written.

Driver and worker run the product's code, which ``refit_model`` of the core's tests moves; see
``hosted_model`` for what is between them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
from hosted_model import HostedEngine, hosting_in_hand
from refit_model.search import explore, follow, nothing_goes_wrong
from refit_model.world import Refit, Scenario

from rl_core.weights.engine_lock import EngineLock
from rl_hosting import worker_refits
from rl_hosting._remote_receiver import RemoteReceiver
from rl_hosting.worker_refits import WorkerRefits

GIVEN_UP = ("quit T", "quit E0")
ONE, TWO = (Refit(),), (Refit(), Refit())
CRASH, PAUSE = ("crash T", "crash E0"), ("pause T", "pause E0")


def hosted(drivers: tuple[Refit, ...], **given: Any) -> Scenario:
    return Scenario(drivers=drivers, grain=0, engine=HostedEngine, **given)


SCENARIOS = {
    "a refit and two readers": hosted(ONE, readers=2, tokens=3),
    "a refit that ends early": hosted(ONE, faults=GIVEN_UP),
    "a refit that is given up from outside": hosted(ONE, given_up=(0,)),
    "a crash": hosted(ONE, faults=CRASH),
    "a pause": hosted(ONE, faults=PAUSE),
}
FULL = {
    "two refits at once": hosted(TWO),
    "two refits of two processes at once": hosted(TWO, apart=True),
    "a refit that ends early, and a reader": hosted(ONE, readers=1, tokens=3, faults=GIVEN_UP),
    "a crash, and a reader": hosted(ONE, readers=1, tokens=3, faults=CRASH),
    "a pause, and a reader": hosted(ONE, readers=1, tokens=3, faults=PAUSE),
}
_adopt, _state = RemoteReceiver._adopt, WorkerRefits.state


def _labels_once_it_has_answered(self: WorkerRefits) -> dict[str, Any]:
    answered = all(future.done() for future in self._futures.values())
    return _state(self) if answered else {**_state(self), "torn": False, "version": 0}


def _adopts_what_is_done(self: RemoteReceiver, states: list[dict[str, Any]]) -> None:
    if "done" in states[0]:
        _adopt(self, states)


#: Without each of these the search must find something in a scenario.
MUTANTS: dict[str, tuple[type, dict[str, Any], Scenario]] = {
    "a worker writes before the driver has the lock": (
        worker_refits._Lease,
        {"acquire": lambda self, timeout=-1: True},
        SCENARIOS["a refit and two readers"],
    ),
    "a driver does not ask what a failure left": (
        RemoteReceiver,
        {"_adopt": _adopts_what_is_done},
        SCENARIOS["a refit that ends early"],
    ),
    "a worker has the label of before until it has answered": (
        WorkerRefits,
        {"state": _labels_once_it_has_answered},
        SCENARIOS["a crash"],
    ),
    "a driver keeps the lock": (
        EngineLock,
        {"release": lambda self: None},
        SCENARIOS["a refit that ends early"],
    ),
    "a driver stays in line": (
        EngineLock,
        {"cancel_acquire": lambda self: None},
        hosted(ONE, readers=1, faults=("quit T",)),
    ),
}
#: What was granted to a refit that is over reached the next one, and was taken back while that one
#: wrote.
ANOTHER_ONES_GRANT = (
    "T-1: start",
    "H-1: start",
    "E0-1: start",
    "T reads E0#1",
    "T reads E0#1",
    "H-1: call done",
    "D-2: start",
    "T-2: start",
    "H-2: start",
    "D-1: wait",
    "H-1: call grant",
    "H-1: call done",
    "H-1: call state",
    "E0-2: start",
    "T reads E0#2",
    "T reads E0#2",
    "T reads E0#2",
)


@pytest.fixture(autouse=True)
def in_hand() -> Iterator[None]:
    with hosting_in_hand():
        yield


@pytest.mark.parametrize("name", SCENARIOS)
def test_nothing_goes_wrong(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    nothing_goes_wrong(name, SCENARIOS[name], capsys)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", FULL)
def test_nothing_goes_wrong_in_all_of_it(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    nothing_goes_wrong(name, FULL[name], capsys)


def test_what_is_granted_to_one_refit_is_of_no_use_to_another() -> None:
    assert follow(hosted(TWO, apart=True), ANOTHER_ONES_GRANT) == (None, [])


def test_one_lease_for_all_refits_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = worker_refits._Lease
    leases: dict[Any, Any] = {}
    monkeypatch.setattr(
        worker_refits, "_Lease", lambda news: leases.setdefault(id(news), honest(news))
    )
    found = explore(hosted(TWO, apart=True), most=3000)
    assert found.broken is not None, f"{found} without it"


@pytest.mark.parametrize("name", MUTANTS)
def test_a_defence_that_is_taken_back_is_missed(name: str) -> None:
    owner, replaced, scene = MUTANTS[name]
    with patch.multiple(owner, **replaced):
        found = explore(scene, most=3000)
    assert found.broken is not None, f"{found} without it"
