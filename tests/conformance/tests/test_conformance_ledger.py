"""Known failures: one check each, with a reason, a link and an end."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import pytest
from mutants import all_mutants

from rl_conformance.harness import Harness
from rl_conformance.ledger import read_ledger
from rl_conformance.outcome import Status, Verdict
from rl_conformance.reference import reference_target
from rl_conformance.run import run, select
from rl_conformance.settings import Settings
from rl_core.errors import ConfigError

_CHECK = "G7/stop_token_ends_the_row_and_is_kept"
_TODAY = dt.date(2029, 1, 1)


def _entry(**changes: str) -> str:
    parts = {"check": f'"{_CHECK}"', "reason": '"why"', "link": '"where"', "expires": "2030-01-01"}
    lines = [f"{key} = {value}" for key, value in (parts | changes).items() if value]
    return "\n".join(["[[failure]]", *lines, ""])


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    return tmp_path / "known.toml"


def test_it_gives_reasons(ledger: Path) -> None:
    ledger.write_text(_entry())
    assert read_ledger(ledger, _TODAY) == {_CHECK: "why (where)"}


def test_an_empty_one_is_one(ledger: Path) -> None:
    ledger.write_text("")
    assert read_ledger(ledger, _TODAY) == {}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (_entry(link=""), "link"),
        (_entry(check=""), "check"),
        (_entry(link='" "'), "no reason or no link"),
        (_entry(owner='"me"'), "owner"),
        (_entry(check='"G99/nothing"'), "names no check"),
        (_entry(check='"G7"'), "names no check"),
        (_entry(check=f'"{_CHECK[:-1]}"'), f"did you mean '{_CHECK}'"),
        (_entry(expires="2028-12-31"), "expired on 2028-12-31"),
        (_entry(expires='"soon"'), "expires"),
        (_entry() + _entry(), "listed twice"),
        ("[[failures]]\n", "failures"),
        ("[[failure]]\ncheck=", "cannot be read"),
    ],
)
def test_what_is_stale_or_not_whole_is_refused(ledger: Path, text: str, problem: str) -> None:
    ledger.write_text(text)
    with pytest.raises(ConfigError, match=problem):
        read_ledger(ledger, _TODAY)


def test_one_that_is_not_there_is_refused(ledger: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_ledger(ledger, _TODAY)


def test_a_known_failure_does_not_fail_the_run_and_hides_no_other() -> None:
    [mutant] = [m for m in all_mutants() if m.name == "StopTokenIsDropped"]
    checks = select([], "G7 and (stop_token_ends or stop_string)")
    honest = run(mutant.target(), Settings(), checks, selection="G7")
    bad = [outcome.check for outcome in honest.outcomes if outcome.status.bad]
    assert bad == [_CHECK]
    excused = run(mutant.target(), Settings(), checks, selection="G7", known={_CHECK: "why"})
    assert excused.verdict is Verdict.PASSED
    [result] = excused.results()
    assert result.status is Status.KNOWN_FAILURE
    other = next(check.id for check in checks if check.id != _CHECK)
    missed = run(mutant.target(), Settings(), checks, selection="G7", known={other: "why"})
    assert missed.verdict is Verdict.FAILED
    assert {o.check for o in missed.outcomes if o.status.bad} == {_CHECK, other}


def test_a_known_failure_that_is_declared_as_unsupported_is_stale() -> None:
    check = next(check for check in select([], "P13") if check.capability == "score")
    with Harness(reference_target(), Settings(), {check.id: "why"}) as harness:
        outcome = harness.outcome(check)
    assert outcome.status is Status.UNEXPECTED_PASS
    assert "unsupported" in outcome.message
