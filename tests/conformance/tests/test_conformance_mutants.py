"""The suite against mutants: it must fail where they are broken, and nowhere else."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from rl_conformance.catalogue import CLAUSES
from rl_conformance.cli import app
from rl_conformance.context import Settings
from rl_conformance.mutants import Mutant, all_mutants, examine, quick, target
from rl_conformance.outcome import Status
from rl_conformance.run import run, select

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.mark.parametrize("chapter", ["generation", "policy", "refit", "agreement"])
def test_the_reference_passes(chapter: str) -> None:
    checks = quick(chapter)
    report = run(target(), Settings(), checks, selection=chapter)
    assert {outcome.check for outcome in report.outcomes} == {check.id for check in checks}
    bad = [outcome for outcome in report.outcomes if outcome.status.bad]
    assert not bad, [(outcome.check, outcome.message[-400:]) for outcome in bad]
    assert report.counts()[Status.PASSED] > 0


def test_the_reference_passes_call_after_call() -> None:
    plain = {check.id for check in quick("generation")}
    checks = [c for c in select(["generation"], "not first_tokens") if c.id not in plain]
    report = run(target(), Settings(), checks, selection="call after call")
    bad = [outcome for outcome in report.outcomes if outcome.status.bad]
    assert not bad, [(outcome.check, outcome.message[-400:]) for outcome in bad]


def by_clause() -> Iterator[Any]:
    """Two mutants of each clause, and all others where there is time for them."""
    seen = Counter[str]()
    for mutant in all_mutants():
        seen[mutant.breaks[0]] += 1
        later = mutant.slow or seen[mutant.breaks[0]] > 2
        yield pytest.param(mutant, id=mutant.name, marks=[pytest.mark.full] * later)


@pytest.mark.parametrize("mutant", list(by_clause()))
def test_a_mutant_is_killed_where_it_is_broken(mutant: Mutant) -> None:
    autopsy = examine(mutant)
    assert autopsy.verdict == "killed", (autopsy.failed, autopsy.messages)


def test_every_clause_has_a_mutant() -> None:
    assert {mutant.breaks[0] for mutant in all_mutants()} == set(CLAUSES)


def test_a_mutant_with_another_bug_than_it_says_is_not_killed() -> None:
    honest = Mutant("Honest", "It has none.", ("B1",), target)
    assert examine(honest).verdict == "survived"
    [counts] = [m for m in all_mutants() if m.name == "the_first_column_counts"]
    other = Mutant("Other", "It breaks B1, and says B7.", ("B7",), target, counts.patch)
    assert examine(other).verdict == "strayed"


def test_the_command_writes_the_kill_table(tmp_path: Path) -> None:
    files = {"--json": tmp_path / "kills.json", "--markdown": tmp_path / "kills.md"}
    options = [part for flag, path in files.items() for part in (flag, str(path))]
    result = CliRunner().invoke(app, ["mutants", "-k", "pad_value", *options])
    assert result.exit_code == 0, result.output
    [row] = json.loads(files["--json"].read_text())
    assert (row["mutant"], row["verdict"]) == ("any_pad_value_will_do", "killed")
    assert "| B7 | `any_pad_value_will_do` |" in files["--markdown"].read_text()
