"""Generation and refits of a hosted engine, in every order: no reader decodes what is half written.

Driver and worker run the product's code, which ``refit_model`` of the core's tests moves; see
``hosted_model`` for what is between them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hosted_model import HostedEngine, hosting_in_hand
from refit_model.search import explore, follow
from refit_model.world import Refit, Scenario

from rl_hosting import worker_refits

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.concerns("core/", "plugins/rl-hosting/")

GIVEN_UP = ("quit T", "quit E0")
ONE, TWO = (Refit(),), (Refit(), Refit())


def hosted(drivers: tuple[Refit, ...], readers: int, faults: tuple[str, ...] = ()) -> Scenario:
    return Scenario(drivers=drivers, readers=readers, faults=faults, grain=0, engine=HostedEngine)


SCENARIOS = {
    "a refit and two readers": hosted(ONE, 2),
    "a refit that is given up": hosted(ONE, 0, GIVEN_UP),
}
FULL = {
    "two refits at once": hosted(TWO, 0),
    "a refit that is given up, and a reader": hosted(ONE, 1, GIVEN_UP),
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


def nothing_goes_wrong(name: str, scene: Scenario, capsys: pytest.CaptureFixture[str]) -> None:
    found = explore(scene)
    with capsys.disabled():
        print(f"\n{name}: {found}", end=" ")
    assert found.broken is None, "\n".join([found.broken or "", *found.trace])
    assert found.complete


@pytest.mark.parametrize("name", SCENARIOS)
def test_nothing_goes_wrong(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    nothing_goes_wrong(name, SCENARIOS[name], capsys)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", FULL)
def test_nothing_goes_wrong_in_all_of_it(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    nothing_goes_wrong(name, FULL[name], capsys)


def test_what_is_granted_to_one_refit_is_of_no_use_to_another() -> None:
    assert follow(hosted(TWO, 0), ANOTHER_ONES_GRANT) == (None, [])


def test_one_lease_for_all_refits_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = worker_refits._Lease
    leases: dict[Any, Any] = {}
    monkeypatch.setattr(
        worker_refits, "_Lease", lambda news: leases.setdefault(id(news), honest(news))
    )
    found = explore(hosted(TWO, 0), most=3000)
    assert found.broken is not None, f"{found} without it"
