"""The harness, its three entrances and its reports."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from importlib.metadata import distribution
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mutants
import pytest
import torch

from rl_backends.tensors import NamedTensorSink, NamedTensorSource
from rl_cli import main
from rl_conformance import GenerationConformance, deadline, harness, progress
from rl_conformance.catalogue import CLAUSES
from rl_conformance.context import Context
from rl_conformance.expect import CheckFailed, fail, raises, require, same, same_tensor
from rl_conformance.explain import explain
from rl_conformance.fast import FAST
from rl_conformance.harness import Harness
from rl_conformance.outcome import Measure, Outcome, RunReport, Status, Verdict
from rl_conformance.reference import MANIFEST, reference_target
from rl_conformance.reference.generation import ReferenceGeneration
from rl_conformance.refits import odd_tensors, whole_tensors
from rl_conformance.registry import Check, all_checks, clauses_of, profile, refusal_for
from rl_conformance.reports import from_json
from rl_conformance.run import find_target, run, select
from rl_conformance.settings import Settings
from rl_conformance.statistics import chi_square_p_value
from rl_conformance.target import Target
from rl_core.errors import ConfigError, MissingEngineError
from rl_core.plugins.manifest import (
    GENERATION_CAPABILITIES,
    POLICY_CAPABILITIES,
    EngineRequirement,
)

pytest_plugins = ["pytester"]


def _check(function: Any, **changes: Any) -> Check:
    parts: dict[str, Any] = {
        "clause": CLAUSES["B1"],
        "name": function.__name__,
        "title": "A check of the tests",
        "function": function,
        "needs": (),
        "capability": None,
        "device": "any",
        "modules": (),
        "gpus": 1,
        "timeout_s": 10.0,
    }
    return Check(**(parts | changes))


def _outcome(function: Any, known: dict[str, str] | None = None, **changes: Any) -> Outcome:
    with Harness(reference_target(), Settings(), known) as harness:
        return harness.outcome(_check(function, **changes))


def passes(ctx: Context) -> None:
    pass


def fails(ctx: Context) -> None:
    fail("the contract", "kept", "broken")


def raises_something(ctx: Context) -> None:
    raise KeyError("not a verdict")


# -- the catalogue ---------------------------------------------------------------------------------


def test_every_clause_has_a_check() -> None:
    assert {check.clause.id for check in all_checks()} == set(CLAUSES)


def test_a_run_against_a_backend_leaves_out_what_core_alone_keeps() -> None:
    core, backend = profile("core"), profile("mine")
    assert sorted(map(id, core + backend)) == sorted(map(id, all_checks()))
    alone = set(CLAUSES) - set(clauses_of(backend))
    assert alone == {id_ for id_, clause in CLAUSES.items() if clause.core}
    with pytest.raises(ConfigError, match="B7") as refused:
        select([], "B7", backend)
    assert "rl conformance run core" in str(refused.value.fix)


def test_a_report_names_the_run_that_has_the_clauses_of_core() -> None:
    whole = RunReport("mine", (), {"core": "7.1"}, clauses_of(profile("mine")))
    assert whole.cites.startswith("B1, B2, ")
    assert whole.cites.endswith("see `rl conformance run core` for rl-core 7.1")
    assert not replace(whole, selection="G1").cites
    assert not replace(whole, clauses=clauses_of(profile("core"))).cites


def test_the_catalogue_has_every_clause_of_the_contract() -> None:
    chapters = {"B": 7, "D": 5, "G": 18, "P": 14, "R": 17, "A": 3, "S": 3}
    expected = [f"{letter}{n}" for letter, last in chapters.items() for n in range(1, last + 1)]
    assert list(CLAUSES) == expected


@pytest.mark.parametrize(
    ("kind", "capability"),
    [("generation", name) for name in GENERATION_CAPABILITIES]
    + [("policy", name) for name in POLICY_CAPABILITIES],
)
def test_every_capability_has_checks_and_a_refusal(kind: str, capability: str) -> None:
    assert any(check.capability == capability for check in all_checks())
    assert callable(refusal_for(kind, capability))


@pytest.mark.parametrize("make", [odd_tensors, whole_tensors])
def test_tensors_of_the_refit_checks_are_on_the_device_that_is_asked(make: Any) -> None:
    tensors = make(1, "meta")
    assert {tensor.device.type for tensor in tensors.values()} == {"meta"}
    assert NamedTensorSource(tensors).device == NamedTensorSink(tensors).device == "meta"


# -- statuses --------------------------------------------------------------------------------------


def test_a_check_that_returns_has_passed() -> None:
    assert _outcome(passes).status is Status.PASSED


def test_a_check_that_fails_says_why() -> None:
    outcome = _outcome(fails)
    assert outcome.status is Status.FAILED
    assert outcome.message.splitlines() == [
        "did:       the contract",
        "expected:  kept",
        "got:       broken",
    ]


def test_a_failure_tells_where_its_check_is_and_the_command_that_runs_it_alone() -> None:
    check = next(c for c in all_checks() if c.case)
    assert select([], check.id) == [check]
    file, _, line = check.where.rpartition(":")
    source = Path(harness.__file__).parent.parent.joinpath(file).read_text().splitlines()
    assert "@check" in source[int(line) - 1]
    outcome = _outcome(fails)
    assert outcome.command == "rl conformance run reference -k B1/fails"
    assert outcome.story.splitlines() == [
        "checked:   A check of the tests",
        *outcome.message.splitlines(),
        f"clause:    {CLAUSES['B1'].title} (rl explain B1)",
        f"run alone: {outcome.command}",
        f"source:    {outcome.where}",
    ]
    read = Outcome.from_dict(outcome.as_dict())
    assert (read.where, read.command) == (outcome.where, outcome.command)


def test_an_unexpected_exception_is_an_error_with_its_traceback() -> None:
    outcome = _outcome(raises_something)
    assert outcome.status is Status.ERROR
    assert "not a verdict" in outcome.message


def test_a_check_that_is_too_slow_is_an_error_and_names_the_option_for_slow_hosts() -> None:
    def hangs(ctx: Context) -> None:
        time.sleep(60)

    settings = Settings.of("cpu", timeout_s=0.2)
    with Harness(reference_target(), settings) as harness:
        outcome = harness.outcome(_check(hangs))
    assert outcome.status is Status.ERROR
    assert re.match(r"timed out after 0.2 s( \(.* on a busy machine\))?, in hangs", outcome.message)
    assert "this host is slow" in outcome.message
    assert "--timeout SECONDS" in outcome.message
    assert "--timeout 0.2" in outcome.command


def test_a_deadline_is_longer_on_a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadline, "stretched", lambda seconds: 100 * seconds)
    settings = Settings.of("cpu", timeout_s=0.2)
    with Harness(reference_target(), settings) as harness:
        outcome = harness.outcome(_check(lambda ctx: time.sleep(0.6), name="slow"))
    assert outcome.status is Status.PASSED


def test_a_busy_processor_stretches_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = count()
    monkeypatch.setattr(deadline, "_measured", -math.inf)
    monkeypatch.setattr(deadline, "_busy", 1.0)
    monkeypatch.setattr(time, "thread_time", lambda: next(clock) / 100)
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock) / 10)
    assert deadline.stretched(2.0) > 10.0


def test_every_clause_of_a_backend_says_where_its_author_looks() -> None:
    assert {id_ for id_, clause in CLAUSES.items() if not clause.look and not clause.core} == {"S2"}


def test_a_known_failure_is_no_failure() -> None:
    outcome = _outcome(fails, {"B1/fails": "see the tracker"})
    assert outcome.status is Status.KNOWN_FAILURE
    assert "see the tracker" in outcome.message


def test_a_known_failure_that_passes_is_bad() -> None:
    outcome = _outcome(passes, {"B1/passes": "see the tracker"})
    assert outcome.status is Status.UNEXPECTED_PASS
    assert "see the tracker" in outcome.message


def test_a_known_failure_of_one_check_does_not_excuse_another() -> None:
    assert _outcome(fails, {"B1/another": "see the tracker"}).status is Status.FAILED


def test_a_missing_module_blocks_the_run() -> None:
    outcome = _outcome(passes, modules=("no_such_module_of_the_suite",))
    assert (outcome.status, outcome.excused) == (Status.NOT_RUN, False)


def test_without_ray_its_checks_are_not_run_and_the_command_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(harness.importlib.util, "find_spec", lambda name: None)
    outcome = _outcome(fails, modules=("rl_ray",))
    assert (outcome.status, outcome.excused) == (Status.NOT_RUN, False)
    fix = "pip install ./plugins/rl-backends ./plugins/rl-hosting ./plugins/rl-ray"
    assert outcome.message == f"rl_ray is not installed: {fix}"


def test_what_needs_more_gpus_than_there_are_is_excused_whatever_else_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(harness, "_gpus", lambda: 1)
    target = reference_target(manifest=replace(MANIFEST, devices=("cpu", "cuda")))
    with Harness(target, Settings(device="cuda")) as one:
        for gpus, ran in ((1, Status.PASSED), (2, Status.NOT_RUN)):
            check = _check(passes, gpus=gpus, title=f"{gpus} GPUs", name=f"needs_{gpus}")
            assert one.outcome(check).status is ran
        lacking = ("no_such_module_of_the_suite",)
        outcome = one.outcome(_check(passes, gpus=2, modules=lacking, name="and_a_module"))
    assert (outcome.excused, outcome.message) == (True, "it needs 2 GPUs, and this machine has 1")


def test_a_contract_without_a_minor_number_excuses_nothing() -> None:
    target = reference_target(manifest=replace(MANIFEST, contract="1"))
    with Harness(target, Settings()) as harness:
        assert harness.outcome(_check(fails)).status is Status.FAILED


def test_a_check_for_another_device_is_excused() -> None:
    outcome = _outcome(passes, device="cuda")
    assert (outcome.status, outcome.excused) == (Status.NOT_RUN, True)


def test_a_kind_that_is_not_offered_is_excused() -> None:
    manifest = replace(MANIFEST, factories={"generation": MANIFEST.factories["generation"]})
    with Harness(reference_target(manifest=manifest)) as harness:
        outcome = harness.outcome(_check(passes, needs=("policy",)))
    assert (outcome.status, outcome.excused) == (Status.NOT_RUN, True)


def test_an_unsupported_capability_runs_its_refusal() -> None:
    with Harness(reference_target()) as harness:
        outcomes = [harness.outcome(check) for check in select(["policy"], "P13")]
    assert {outcome.status for outcome in outcomes} == {Status.UNSUPPORTED}


def test_a_capability_that_is_not_refused_fails() -> None:
    (check,) = select(["generation"], "G16 and equal")
    capabilities = MANIFEST.capabilities["generation"]
    declared = {**capabilities, "async_generation": capabilities["sleep"]}
    manifest = replace(MANIFEST, capabilities={**MANIFEST.capabilities, "generation": declared})
    with Harness(reference_target(manifest=manifest)) as harness:
        outcome = harness.outcome(check)
    assert outcome.status is Status.FAILED
    assert outcome.message.endswith("got:       no exception")


def test_a_measure_above_its_tolerance_fails() -> None:
    def measures(ctx: Context) -> None:
        ctx.measure("error", 2.0, 1.0)

    outcome = _outcome(measures)
    assert outcome.status is Status.FAILED
    assert outcome.measures == (Measure("error", 2.0, 1.0),)


def test_a_measure_that_is_not_a_number_fails() -> None:
    def measures(ctx: Context) -> None:
        ctx.measure("error", float("nan"), 1.0)

    assert _outcome(measures).status is Status.FAILED


def test_a_check_runs_once() -> None:
    calls = []
    with Harness(reference_target()) as harness:
        check = _check(lambda ctx: calls.append(ctx), name="counted")  # noqa: PLW0108 - has a line
        assert harness.outcome(check) is harness.outcome(check)
    assert len(calls) == 1


# -- verdicts --------------------------------------------------------------------------------------


def _report(*outcomes: Outcome, clauses: tuple[str, ...] = ("B1", "B2")) -> RunReport:
    return RunReport("mine", outcomes, {"torch": "1"}, clauses, seconds=1.0)


GOOD = Outcome("B1/good", "Good", Status.PASSED, 0.1, "", (Measure("error", 0.5, 1.0),))
BAD = Outcome("B2/bad", "Bad", Status.FAILED, 0.1, "<broken> & sad")
SKIPPED = Outcome("B2/skipped", "Skipped", Status.NOT_RUN, message="no GPU")


def test_a_clause_without_a_status_makes_the_run_incomplete() -> None:
    report = _report(GOOD)
    assert (report.verdict, report.missing) == (Verdict.INCOMPLETE, ["B2"])


def test_a_needed_check_that_did_not_run_makes_it_incomplete() -> None:
    assert _report(GOOD, SKIPPED).verdict is Verdict.INCOMPLETE


def test_an_excused_check_does_not() -> None:
    assert _report(GOOD, replace(SKIPPED, excused=True)).verdict is Verdict.CONFORMANT


def test_nothing_passed_is_not_conformant() -> None:
    assert _report(replace(SKIPPED, excused=True), clauses=("B2",)).verdict is Verdict.INCOMPLETE


def test_one_failure_fails_the_run() -> None:
    assert _report(GOOD, BAD).verdict is Verdict.FAILED


def test_a_needed_check_that_did_not_run_takes_the_pass_away() -> None:
    (result,) = _report(replace(GOOD, check="B2/good"), SKIPPED, clauses=("B2",)).results()
    assert result.status is Status.NOT_RUN


def test_a_part_of_the_suite_is_never_conformant() -> None:
    part = replace(_report(GOOD, replace(SKIPPED, excused=True)), selection="B1", total=240)
    assert (part.verdict, part.headline) == (Verdict.PASSED, "passed (part: 1 of 240 checks)")
    assert replace(part, outcomes=(GOOD, BAD)).headline == "failed (part: 2 of 240 checks)"
    assert replace(part, outcomes=(GOOD, SKIPPED)).verdict is Verdict.INCOMPLETE


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_is_not_run_and_not_conformant() -> None:
    report = run(mutants.target(), Settings(device="cuda"))
    assert {r.status for r in report.results()} == {Status.NOT_RUN}
    assert report.verdict is Verdict.INCOMPLETE
    assert {o.message for o in report.outcomes} == {"this machine has no CUDA device"}


# -- selection -------------------------------------------------------------------------------------


def test_a_clause_number_selects_its_own_checks_only() -> None:
    assert {check.clause.id for check in select([], "G1 or R1")} == {"G1", "R1"}


def test_words_select_by_name() -> None:
    assert [c.name for c in select([], "G8 and deterministic and not order")] == [
        "greedy_is_deterministic"
    ]


def test_the_fast_checks_are_checks_of_a_backend_and_of_most_clauses() -> None:
    ids = {check.id for check in profile("mine")}
    assert ids >= FAST
    assert len({id_.partition("/")[0] for id_ in FAST}) > 40


@pytest.mark.parametrize("expression", ["G1 +", "G1 + G2", "f()", "nothing_is_called_so"])
def test_an_expression_that_selects_nothing_is_refused(expression: str) -> None:
    with pytest.raises(ConfigError):
        select([], expression)


# -- expectations and statistics -------------------------------------------------------------------


def test_raises_fails_when_nothing_is_raised() -> None:
    with (
        pytest.raises(CheckFailed, match="expected ValueError, got no exception"),
        raises(ValueError),
    ):
        pass


def test_raises_fails_when_the_message_names_nothing() -> None:
    with (
        pytest.raises(CheckFailed, match="that has 'row 1', got ValueError: something is wrong"),
        raises(ValueError, "row 1"),
    ):
        raise ValueError("something is wrong")


def test_require_shows_what_was_expected_and_got() -> None:
    with pytest.raises(CheckFailed, match="loss: expected 1, got 2"):
        require(False, "loss", 1, 2)


@pytest.mark.parametrize(
    ("got", "expected", "message"),
    [
        (1, True, "x: expected True, got 1"),
        ([1, 2], [1, 3], r"x: expected \[1, 3\], got \[1, 2\]"),
        ([[1], [2], [4]], [[1], [3], [4]], r"x, row 1 of 3: expected \[3\], got \[2\]"),
    ],
)
def test_values_that_differ_are_shown(got: object, expected: object, message: str) -> None:
    with pytest.raises(CheckFailed, match=message):
        same(got, expected, "x")


def test_a_failure_lists_the_calls_before_it() -> None:
    def looks(ctx: Context) -> None:
        engine = ctx.generation(max_new_tokens=4)
        with raises(ValueError, "row 7"):
            engine.generate(ctx.prompts(3, 5, label=["a", "b"]), greedy=True)

    lines = _outcome(looks).message.splitlines()
    call = "generate(2 rows of 3, 5 tokens with label=['a', 'b'], greedy=True)"
    assert lines == [
        f"did:       engine(max_new_tokens=4): prepare_for_generation(), then {call}",
        "expected:  ValueError with a message that has 'row 7'",
        "got:       no exception",
    ]


def test_an_exception_is_shown_with_the_line_of_the_backend() -> None:
    class Broken(ReferenceGeneration):
        def complete(self, *_: Any) -> Any:
            raise ZeroDivisionError("no tokens")

    target = reference_target(make_generation=Broken.from_config)
    with Harness(target, Settings()) as harness:
        message = harness.outcome(
            _check(lambda ctx: ctx.generation().generate(ctx.prompts(3), greedy=True))
        ).message
    assert (
        "expected:  no exception\ngot:       ZeroDivisionError: no tokens\nraised at: " in message
    )
    assert "generate(1 rows of 3 tokens, greedy=True)" in message.splitlines()[0]


@pytest.mark.parametrize(
    "other", [torch.zeros(2, 1), torch.zeros(2).double(), torch.tensor([0.0, 1.0])]
)
def test_same_tensor_wants_shape_dtype_and_bits(other: torch.Tensor) -> None:
    with pytest.raises(CheckFailed):
        same_tensor(torch.zeros(2), other, "it")


def test_chi_square_knows_the_quantiles() -> None:
    # 3.841 is the 95 % quantile with one degree of freedom: (10 + d)^2 ... of 100 fair throws.
    deviation = (3.841 * 25) ** 0.5
    counts = torch.tensor([50 + deviation, 50 - deviation])
    assert chi_square_p_value(counts, torch.tensor([0.5, 0.5])) == pytest.approx(0.05, abs=1e-3)


def test_chi_square_rejects_another_distribution() -> None:
    counts = torch.tensor([600, 400])
    assert chi_square_p_value(counts, torch.tensor([0.5, 0.5])) < 1e-4


# -- the entrances ---------------------------------------------------------------------------------


def test_overriding_a_check_is_refused() -> None:
    name = next(name for name in vars(GenerationConformance) if name.startswith("test_G8"))
    with pytest.raises(TypeError, match=name):
        type("TestMine", (GenerationConformance,), {"backend": "mine", name: lambda self: None})


def test_deleting_a_check_by_none_is_refused() -> None:
    name = next(name for name in vars(GenerationConformance) if name.startswith("test_G8"))
    with pytest.raises(TypeError, match=name):
        type("TestMine", (GenerationConformance,), {"backend": "mine", name: None})


def test_the_plugin_imports_nothing_heavy() -> None:
    script = (
        "import sys; import rl_conformance.plugin; "
        "print([m for m in ('torch', 'rl_core', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


# Runs inside this process leave no new module behind, and torch cannot be imported twice.
mutants.all_mutants()

PROJECT = """
import mutants
from mutants import engines

from rl_conformance import GenerationConformance

class TestMine(GenerationConformance):
    backend = "mine"

    @classmethod
    def target(cls):
        return mutants.target({mutant}name="mine")
"""

#: A stop token that is kept, and three checks of stop strings.
FOUR = "G7 and (and_is_kept or string_ends or stay_in_their_row or are_merged)"


def _pytest(pytester: pytest.Pytester, mutant: str, *args: str) -> pytest.RunResult:
    pytester.makepyfile(PROJECT.format(mutant=mutant))
    here = f"pythonpath={Path(__file__).parent}"
    return pytester.runpytest_subprocess("-p", "no:cacheprovider", "-o", here, *args)


def test_a_derived_class_runs_the_checks(pytester: pytest.Pytester) -> None:
    result = _pytest(pytester, "", "-k", FOUR, "--rl-report", "out/report.json")
    result.assert_outcomes(passed=4, deselected=len(_methods()) - 4)
    report = from_json((pytester.path / "out" / "report.json").read_text())
    assert (report.backend, report.clauses) == ("mine", ("G7",))
    assert report.headline == f"passed (part: 4 of {len(profile('mine'))} checks)"


def test_a_derived_class_fails_where_the_backend_does(pytester: pytest.Pytester) -> None:
    result = _pytest(pytester, "engines.StopTokenIsDropped, ", "-k", FOUR)
    result.assert_outcomes(passed=3, failed=1, deselected=len(_methods()) - 4)
    result.stdout.fnmatch_lines(["*stop_token_ends_the_row_and_is_kept*failed*"])


def _methods() -> list[str]:
    return [name for name in vars(GenerationConformance) if name.startswith("test_")]


def test_an_unrelated_run_is_left_alone(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_something(): pass")
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["collected 1 item"])
    result.stdout.no_fnmatch_line("*incomplete*")


def test_the_option_adds_the_suite(pytester: pytest.Pytester) -> None:
    pytest.importorskip("rl_hf")
    result = pytester.runpytest_subprocess(
        "-p", "no:cacheprovider", "--rl-backend", "hf", "-k", "left_padd", "--rl-report", "r.json"
    )
    result.assert_outcomes(passed=2, deselected=len(profile("hf")) - 2)
    assert from_json((pytester.path / "r.json").read_text()).clauses == ("G1",)


def test_a_whole_run_that_lacks_a_status_fails_the_session(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        "import rl_conformance.pytest_items as items\n"
        "honest = items.suite_items\n"
        "items.suite_items = lambda *a: [i for i in honest(*a) if i.check.clause.id == 'B7']\n"
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "--rl-backend", "core")
    result.assert_outcomes(passed=len(select([], "B7")))
    result.stdout.fnmatch_lines(["*core: incomplete, without a result: B1, *"])
    assert result.ret == pytest.ExitCode.TESTS_FAILED


def test_a_check_that_takes_its_process_along_leaves_the_run_incomplete(
    pytester: pytest.Pytester,
) -> None:
    pytester.makeconftest(
        "import dataclasses, os\n"
        "import rl_conformance.pytest_items as items\n"
        "honest = items.suite_items\n"
        "def fatal(*a):\n"
        "    found = [i for i in honest(*a) if i.check.clause.id == 'B7']\n"
        "    end = lambda ctx: os._exit(3)\n"
        "    found[1].check = dataclasses.replace(found[1].check, function=end)\n"
        "    return found\n"
        "items.suite_items = fatal\n"
    )
    options = ["--rl-backend", "core", "-n", "2", "--rl-report", "r.json"]
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", *options)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    report = from_json((pytester.path / "r.json").read_text())
    assert report.verdict is Verdict.INCOMPLETE
    assert "B7" in report.missing
    [b7] = [result for result in report.results() if result.clause.id == "B7"]
    [lost] = [outcome for outcome in b7.outcomes if outcome.status is Status.NOT_RUN]
    assert "its process ended" in lost.message


def test_what_a_summary_reads_ran_in_its_process(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        "import dataclasses, os\n"
        "import rl_conformance.pytest_items as items\n"
        "honest = items.suite_items\n"
        "def note(ctx, **_):\n"
        "    with open('ran', 'a') as file:\n"
        "        print(os.getpid(), file=file)\n"
        "def noting(*a):\n"
        "    found = honest(*a)\n"
        "    for item in found:\n"
        "        if not item.check.summary:\n"
        "            item.check = dataclasses.replace(item.check, function=note)\n"
        "    return [i for i in found if i.check.summary or i.check.capability]\n"
        "items.suite_items = noting\n"
    )
    options = ["--rl-backend", "reference", "-n", "2", "--rl-report", "r.json"]
    pytester.runpytest_subprocess("-p", "no:cacheprovider", *options)
    report = from_json((pytester.path / "r.json").read_text())
    [summary] = [o for r in report.results() for o in r.outcomes if o.clause == "D3"]
    assert summary.status is Status.PASSED
    ran = (pytester.path / "ran").read_text().split()
    assert len(ran) > 20
    assert len(set(ran)) == 1


def _rl(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rl_cli", "conformance", *args],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "COLUMNS": "200"},
    )


def test_the_command_writes_every_report(tmp_path: Path) -> None:
    names = {"json": "json", "junit": "xml", "markdown": "md", "html": "html", "badge": "svg"}
    files = {name: tmp_path / f"report.{end}" for name, end in names.items()}
    options = [part for name, file in files.items() for part in (f"--{name}", str(file))]
    done = _rl("run", "core", "-k", "B7 or impossible_length", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"core: passed (part: 4 of {len(profile('core'))} checks)" in done.stdout
    assert re.search(r"B7 +passed +(\d+)/\1\b", done.stdout)
    assert "Only a part" in done.stdout
    assert all(file.stat().st_size for file in files.values())


def test_progress_is_a_line_now_and_then_and_failures_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "_PAUSE_S", 0.0)
    checks = select([], "B7 or G6")
    with progress.RunProgress(reference_target(), checks) as shown:
        for check in checks[:3]:
            shown.ended(Outcome(check.id, check.title, Status.PASSED))
        bad = checks[3]
        shown.ended(Outcome(bad.id, bad.title, Status.FAILED, 0.1, "did: it", where="x:1"))
    printed = capsys.readouterr().out
    assert re.search(rf"3 of {len(checks)} checks, 0 failed, about \d+ min left\n", printed)
    assert f"failed {bad.id}\nchecked:   {bad.title}\n" in printed


def test_backends_that_are_asked_for_the_least_make_room_unless_they_are_in_use() -> None:
    built = []
    with Harness(reference_target()) as harness:

        def ask(name: str) -> None:
            shut = SimpleNamespace(shutdown=bool)
            harness.workshop.keep("kind", name, lambda: built.append(name) or shut, most=2)

        for name in ("often", "often", "once", "another", "often", "once"):
            harness.workshop.in_use.clear()
            ask(name)
        assert built == ["often", "once", "another", "once"]
        for name in ("a", "b", "c", "a"):
            ask(name)
        assert built[4:] == ["a", "b", "c"]


def test_an_outcome_counts_the_backends_that_were_built_for_it() -> None:
    (check,) = select(["refit"], "R10 and given")
    with Harness(reference_target()) as harness:
        outcome = harness.outcome(check)
    assert (outcome.engines, outcome.policies) == (1, 1)
    read = Outcome.from_dict(outcome.as_dict())
    report = RunReport("mine", (read, read))
    assert (report.engines, report.policies) == (2, 2)


def test_the_command_lists_the_catalogue() -> None:
    [one] = [c for c in json.loads(_rl("list", "--json").stdout) if c["id"] == "R11"]
    assert (one["level"], one["capability"]) == ("if_declared", "staged")
    shown = _rl("list").stdout
    assert "R11" in shown
    assert all(check["id"] in shown.replace("\n", "") for check in one["checks"])


def test_a_part_is_not_run_in_several_processes() -> None:
    done = _rl("run", "core", "-n", "2", "-k", "B7")
    assert done.returncode == 1
    assert "-n runs everything" in done.stderr


def test_a_backend_without_its_engine_is_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = EngineRequirement(("no-such-engine",), ">=1", extra="engine")
    target = reference_target(manifest=replace(MANIFEST, engine=engine))
    monkeypatch.setattr(Target, "find", lambda name: target)
    with pytest.raises(MissingEngineError, match="no-such-engine >=1, which is not installed"):
        find_target("reference")


def test_the_command_names_a_backend_that_is_not_there() -> None:
    done = _rl("run", "no-such-backend")
    assert done.returncode == 1
    assert "no-such-backend" in done.stderr


def test_core_names_the_commands_of_this_distribution(capsys, monkeypatch):
    points = distribution("rl-conformance").entry_points.select(group="rl_core.commands")
    monkeypatch.setattr("rl_cli.providers", lambda _: [])
    for point in points:
        assert main([point.name]) == 1
        assert f"'rl {point.name}' is a command of rl-conformance" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("g7", "G7 `stop_token_ids` end a row"),
        ("D5/a_workers_exception", "It binds rl-core alone."),
        ("RefitCorrupted", "RefitCorrupted (RefitError, RLError, Exception)"),
        *((clause, f"{clause} ") for clause in CLAUSES),
    ],
)
def test_a_clause_is_explained(name: str, shown: str) -> None:
    text = explain(name)
    assert shown in text
    assert len(text) > len(name) + 30


def test_an_unknown_clause_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="no clause or error 'RefitCorupted'") as caught:
        explain("RefitCorupted")
    assert caught.value.fix == "write RefitCorrupted"
