"""The suite against backends that carry one bug each: it must fail there and nowhere else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from rl_conformance import mutants
from rl_conformance.context import Settings
from rl_conformance.outcome import Status
from rl_conformance.run import run, select
from rl_core.errors import DataError

if TYPE_CHECKING:
    from rl_conformance.outcome import RunReport
    from rl_conformance.target import Target

#: What is left out here: a process of its own, thousands of draws, many models or refits, and
#: what the suite does with its own doubles alone.
_GENERATION = "not (G10 and not top_k) and not many_rows"
_POLICY = "not P9"
_REFIT = "not killed and not crosses and not R6 and not odd_tensors and not R9 or meanwhile"


def _fails_in(report: RunReport, clauses: set[str]) -> None:
    """Fails unless something is bad in each of these clauses, and in no other."""
    bad = [outcome for outcome in report.outcomes if outcome.status.bad]
    assert {o.clause for o in bad} == clauses, [(o.check, o.message[-400:]) for o in bad]


def _run(target: Target, kind: str, expression: str) -> RunReport:
    checks = select([kind], expression)
    report = run(target, Settings(), checks, selection=expression)
    assert {outcome.check for outcome in report.outcomes} == {check.id for check in checks}
    return report


@pytest.mark.parametrize(
    ("kind", "expression"),
    [("generation", _GENERATION), ("policy", _POLICY), ("refit", _REFIT), ("agreement", "A1")],
)
def test_the_reference_passes(kind: str, expression: str) -> None:
    report = _run(mutants.target(), kind, expression)
    _fails_in(report, set())
    assert report.counts()[Status.PASSED] > 0


@pytest.mark.parametrize(
    ("mutant", "clauses"),
    [
        (mutants.LogprobsOffByOne, {"G4", "G11"}),
        (mutants.LogprobsOfAnotherTemperature, {"G4"}),
        (mutants.LostLogprobsAreZero, {"G3", "G4", "G11"}),
        (mutants.SeedIsIgnored, {"G9", "G17"}),
        (mutants.PaddingShows, {"G8", "G11"}),
        (mutants.StopStringsAreMerged, {"G7"}),
        (mutants.TopKIsOffByOne, {"G4", "G10"}),
        (mutants.StopTokenIsDropped, {"G7"}),
    ],
)
def test_generation_mutants_fail_where_they_are_broken(mutant: Any, clauses: set[str]) -> None:
    _fails_in(_run(mutants.target(mutant), "generation", _GENERATION), clauses)


@pytest.mark.parametrize(
    ("mutant", "clauses"),
    [
        (mutants.ReferenceTrainsAlong, {"P3"}),
        (mutants.EvalModeTrains, {"P6"}),
        (mutants.MicrobatchesAreAveraged, {"P5", "P6"}),
        (mutants.NanReachesTheWeights, {"P5", "P7"}),
        (mutants.ScoresTheNextToken, {"P1", "P5", "P6", "P7"}),
    ],
)
def test_policy_mutants_fail_where_they_are_broken(mutant: Any, clauses: set[str]) -> None:
    _fails_in(_run(mutants.target(policy=mutant), "policy", _POLICY), clauses)


@pytest.mark.parametrize(
    ("mutant", "clauses"),
    [
        (mutants.VersionMovesAlthoughTheRefitFailed, {"R9", "R10", "R11", "R15"}),
        (mutants.TornWeightsAreServed, {"R8", "R15"}),
        (mutants.PrefixCacheOutlivesTheRefit, {"R1", "R4", "R10", "R11", "R14"}),
        (mutants.InfoOfTheOlderSpellingIsLost, {"R4"}),
        (mutants.OldWeightsAreNotGivenBack, {"R11"}),
        (mutants.ScalesAreDropped, {"R14"}),
    ],
)
def test_engine_mutants_fail_where_they_are_broken(mutant: Any, clauses: set[str]) -> None:
    _fails_in(_run(mutants.target(mutant), "refit", _REFIT), clauses)


@pytest.mark.parametrize(
    ("mutant", "clauses"),
    [(mutants.EnginesReadACopy, {"R1", "R9"}), (mutants.TwoStatesAreOneVersion, {"R9"})],
)
def test_trainer_mutants_fail_where_they_are_broken(mutant: Any, clauses: set[str]) -> None:
    _fails_in(_run(mutants.target(policy=mutant), "refit", _REFIT), clauses)


def test_a_consistency_check_that_passes_on_nothing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    from rl_conformance.checks import agreement

    honest = agreement.validate_log_probability_consistency

    def empty_mask_passes(*args: Any) -> bool:
        try:
            return honest(*args)
        except DataError:
            return True

    monkeypatch.setattr(agreement, "validate_log_probability_consistency", empty_mask_passes)
    report = _run(mutants.target(), "agreement", "A1")
    failed = {outcome.check for outcome in report.outcomes if outcome.status.bad}
    assert failed == {"A1/an_empty_mask_is_an_error"}
