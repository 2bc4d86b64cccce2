"""P14 and R16 against the sharded reference, and against what contradicts itself about it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rl_conformance.harness import Harness
from rl_conformance.outcome import Status
from rl_conformance.reference import LAYOUTS, reference_target
from rl_conformance.run import run, select
from rl_conformance.settings import Settings
from rl_conformance.target import Target

_NAMED = LAYOUTS["cpu"]["sharded"]


@pytest.mark.full
@pytest.mark.parametrize("clause", ["P14", "R16"])
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["vocabulary"], id="vocabulary"),
        pytest.param(list(_NAMED), id="all", marks=pytest.mark.full),
    ],
)
def test_the_sharded_reference_keeps_the_clause(names: list[str], clause: str) -> None:
    layouts = {name: _NAMED[name] for name in names}
    target = replace(Target.find("reference-sharded"), tiny={"cpu": {"sharded": layouts}})
    report = run(target, Settings(), select([], clause), selection=clause)
    found = [(o.check, o.message) for o in report.outcomes if o.status is not Status.PASSED]
    assert not found


@pytest.mark.full
def test_the_reference_has_whole_copies_on_two_ranks() -> None:
    checks = select([], "P14 or R16")
    report = run(Target.find("reference"), Settings(), checks, selection="P14 or R16")
    assert {o.status for o in report.outcomes} == {Status.UNSUPPORTED}


def _outcome(target: Target) -> Any:
    [check] = select([], "P14 and scores_are")
    with Harness(target, Settings()) as harness:
        return harness.outcome(check)


def test_a_backend_that_names_no_layout_is_told_where_to() -> None:
    outcome = _outcome(replace(Target.find("reference-sharded"), tiny={}))
    assert outcome.status is Status.FAILED
    for part in ("'reference-sharded'", "rl_core.conformance", '{"cpu": {"sharded": {"tp2":'):
        assert part in outcome.message


def test_layouts_of_a_backend_that_declares_none_contradict_it() -> None:
    outcome = _outcome(reference_target(tiny=LAYOUTS))
    assert outcome.status is Status.FAILED
    assert "layouts are named" in outcome.message


def test_few_layouts_set_every_key_and_have_the_least_and_the_most_ranks() -> None:
    tiny = {"cpu": {"sharded": dict(_NAMED)}}
    target = replace(Target.find("reference-sharded"), tiny=tiny)
    assert list(target.layouts(Settings())) == ["vocabulary", "copies"]
    assert target.layouts(Settings(layouts="all")) == _NAMED
