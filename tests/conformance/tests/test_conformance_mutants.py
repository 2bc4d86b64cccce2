"""The suite against mutants: it must fail where they are broken, and nowhere else."""

from __future__ import annotations

import json
from pathlib import Path

import kill_table
import pytest
import typer
from mutants import Mutant, all_mutants, examine, quick, several_ranks, target
from selection import SAMPLES, changed_since, sampled, touched
from typer.testing import CliRunner

from rl_conformance.catalogue import CLAUSES
from rl_conformance.outcome import Status
from rl_conformance.run import run, select
from rl_conformance.settings import Settings


@pytest.mark.parametrize("chapter", ["generation", "policy", "refit", "agreement"])
def test_the_reference_passes(chapter: str) -> None:
    checks = quick(chapter)
    report = run(target(), Settings(), checks, selection=chapter)
    assert {outcome.check for outcome in report.outcomes} == {check.id for check in checks}
    bad = [outcome for outcome in report.outcomes if outcome.status.bad]
    assert not bad, [(outcome.check, outcome.message[-400:]) for outcome in bad]
    assert report.counts()[Status.PASSED] > 0


@pytest.mark.full
def test_the_reference_passes_call_after_call() -> None:
    plain = {check.id for check in quick("generation")}
    checks = [c for c in select(["generation"], "not first_tokens") if c.id not in plain]
    report = run(target(), Settings(), checks, selection="call after call")
    bad = [outcome for outcome in report.outcomes if outcome.status.bad]
    assert not bad, [(outcome.check, outcome.message[-400:]) for outcome in bad]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """All mutants; those that are not in the sample are left to ``-m full``."""
    if "mutant" in metafunc.fixturenames:
        now = sampled(all_mutants(), metafunc.config.getoption("mutants"))
        commit = metafunc.config.getoption("changed_since")
        changed = changed_since(metafunc.config.rootpath, commit) if commit else []
        now += touched(all_mutants(), changed)
        names = {mutant.name for mutant in now}
        each = [
            pytest.param(m, id=m.name, marks=[] if m.name in names else [pytest.mark.full])
            for m in all_mutants()
        ]
        metafunc.parametrize("mutant", each)


def test_a_mutant_is_killed_where_it_is_broken(mutant: Mutant) -> None:
    autopsy = examine(mutant)
    assert autopsy.verdict == "killed", (autopsy.failed, autopsy.messages)


def test_every_mutant_is_in_exactly_one_sample() -> None:
    names = [m.name for number in range(SAMPLES) for m in sampled(all_mutants(), number)]
    assert sorted(names) == sorted({mutant.name for mutant in all_mutants()})
    assert len(sampled(all_mutants(), SAMPLES + 1)) == len(sampled(all_mutants(), 1))


def test_a_clause_with_many_mutants_is_in_every_sample() -> None:
    for number in range(SAMPLES):
        assert {"G9", "P5", "R1"} <= {m.breaks[0] for m in sampled(all_mutants(), number)}


def test_mutants_that_a_change_may_concern_are_always_looked_at() -> None:
    src = "tests/conformance/src/rl_conformance"
    module = select([], "G14")[0].function.__module__.rpartition(".")[2]
    changed = [f"{src}/checks/{module}.py", "README.md"]
    names = {mutant.name for mutant in touched(all_mutants(), changed)}
    assert names >= {m.name for m in all_mutants() if m.breaks[0] == "G14"}
    written = touched(all_mutants(), ["tests/conformance/tests/mutants/scorers.py"])
    assert {mutant.module for mutant in written} == {"mutants.scorers"}
    assert {m.module.rpartition(".")[0] for m in all_mutants()} == {"mutants"}
    assert not touched(all_mutants(), ["README.md", "core/src/rl_core/batch/_columns.py"])


def test_every_clause_has_a_mutant() -> None:
    assert {mutant.breaks[0] for mutant in all_mutants()} == set(CLAUSES)


def test_a_mutant_with_another_bug_than_it_says_is_not_killed() -> None:
    honest = Mutant("Honest", "It has none.", ("B1",), target)
    for each in (honest, several_ranks.HONEST):
        assert examine(each).verdict == "survived"
    [counts] = [m for m in all_mutants() if m.name == "the_first_column_counts"]
    other = Mutant("Other", "It breaks B1, and says B7.", ("B7",), target, counts.patch)
    assert examine(other).verdict == "strayed"


def test_the_command_writes_the_kill_table(tmp_path: Path) -> None:
    files = {"--json": tmp_path / "kills.json", "--markdown": tmp_path / "kills.md"}
    options = [part for flag, path in files.items() for part in (flag, str(path))]
    app = typer.Typer()
    app.command()(kill_table.main)
    result = CliRunner().invoke(app, ["-k", "pad_value", *options])
    assert result.exit_code == 0, result.output
    [row] = json.loads(files["--json"].read_text())
    assert (row["mutant"], row["verdict"]) == ("any_pad_value_will_do", "killed")
    markdown = files["--markdown"].read_text()
    assert "| B7 | `any_pad_value_will_do` |" in markdown
    part = f"1 of 1 mutants are killed in float32. A part only: there are {len(all_mutants())}."
    assert part in markdown
