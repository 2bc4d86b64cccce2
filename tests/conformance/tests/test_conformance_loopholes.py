"""Ways to look conformant without being it, which must not work."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from rl_conformance import GenerationConformance
from rl_conformance.checks import d01_discovery as d_checks
from rl_conformance.context import Context
from rl_conformance.deadline import NoVerdict
from rl_conformance.faults import dropping, in_the_engine
from rl_conformance.harness import Harness
from rl_conformance.outcome import Measure, Outcome, RunReport, Status, Verdict
from rl_conformance.reference import MANIFEST, reference_target
from rl_conformance.reference.generation import ReferenceGeneration
from rl_conformance.refits import run_refit, unequal_pair
from rl_conformance.registry import all_checks
from rl_conformance.reports import Matrix, from_json, to_json
from rl_conformance.run import run, select
from rl_conformance.settings import Settings
from rl_conformance.target import Target
from rl_conformance.training import without_finite_gradient
from rl_core.errors import BrokenPluginError
from rl_core.interfaces import WeightSink
from rl_core.plugins import discovery
from rl_core.plugins.manifest import Capability


def _outcome_of(function: Callable[[Context], None]) -> Outcome:
    check = replace(select([], "B7")[0], function=function)
    with Harness(reference_target(), Settings()) as harness:
        return harness.outcome(check)


@pytest.mark.parametrize("leave", [lambda: sys.exit(0), lambda: pytest.skip("no")])
def test_a_backend_that_ends_the_program_or_skips_its_check_errs(leave: Callable[[], Any]) -> None:
    def leaves(ctx: Context) -> None:
        leave()

    assert _outcome_of(leaves).status is Status.ERROR


def _refuse_to_end() -> None:
    raise OSError("it does not let go")


@pytest.mark.parametrize(
    ("end", "said"),
    [(_refuse_to_end, "does not let go"), (lambda: sys.exit(0), "shutdown called sys.exit")],
)
def test_a_shutdown_that_raises_is_an_error_and_the_run_goes_on(
    end: Callable[[], None], said: str
) -> None:
    class Clinging(ReferenceGeneration):
        def on_shutdown(self) -> None:
            end()

    target = reference_target(make_generation=Clinging.from_config)
    check = select([], "G15")[0]

    def fails(ctx: Context) -> None:
        ctx.generation()
        raise ValueError("the check's own")

    broken = replace(check, function=fails)
    with Harness(target, Settings()) as harness:
        outcome = harness.outcome(broken)
        assert outcome.status is Status.ERROR
        assert "the check's own" in outcome.message
        assert said in outcome.message
        assert harness.outcome(select([], "B7")[0]).status is Status.PASSED


def test_a_shutdown_that_raises_at_the_very_end_is_in_the_report(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Clinging(ReferenceGeneration):
        def on_shutdown(self) -> None:
            _refuse_to_end()

    monkeypatch.setattr(d_checks, "checks_of", list)  # the last check alone
    target = reference_target(make_generation=Clinging.from_config)
    checks = [*select([], "lengths_add_up"), *select([], "D3")]
    report = run(target, Settings(), checks, selection="both")
    first, last = report.outcomes
    assert first.status is Status.PASSED
    assert last.status is Status.ERROR
    assert "does not let go" in last.message


@pytest.mark.parametrize(
    "changes",
    [
        {"tolerances": {}},
        {"tolerances": {"float32": (1e-4, 1e-2)}},
        {"tolerances": {"float16": (0.5, 0.5)}},
        {"refit_constant_bytes": 1 << 40},
        {"released_fraction": 0.0},
        {"contract": "1.x"},
    ],
    ids="-".join,
)
def test_a_manifest_cannot_declare_the_contract_away(changes: dict[str, Any]) -> None:
    checks = select([], "D2")
    report = run(reference_target(manifest=replace(MANIFEST, **changes)), Settings(), checks)
    assert report.verdict is Verdict.FAILED


def test_a_capability_for_no_device_is_no_declaration() -> None:
    generation = {**MANIFEST.capabilities["generation"], "staged": Capability("full", devices=())}
    capabilities = {**MANIFEST.capabilities, "generation": generation}
    target = reference_target(manifest=replace(MANIFEST, capabilities=capabilities))
    assert run(target, Settings(), select([], "D2")).verdict is Verdict.FAILED


def test_a_refusal_is_looked_at_on_every_device() -> None:
    refused = Capability("unsupported", devices=("cuda",), reason="so it says")
    policy = {**MANIFEST.capabilities["policy"], "score": refused}
    target = reference_target(
        manifest=replace(MANIFEST, capabilities={**MANIFEST.capabilities, "policy": policy})
    )
    check = next(check for check in all_checks() if check.capability == "score")
    with Harness(target, Settings()) as harness:
        assert harness.outcome(check).status is Status.UNSUPPORTED


def test_a_dtype_without_a_tolerance_leaves_the_run_incomplete() -> None:
    manifest = replace(MANIFEST, tolerances={"bfloat16": (1e-2, 1e-1)})
    [check] = [c for c in select([], "G11") if "argmax" not in c.name][:1]
    report = run(reference_target(manifest=manifest), Settings(), [check], selection="G11")
    assert report.verdict is Verdict.INCOMPLETE


@pytest.mark.parametrize(
    "tiny",
    [
        {"cpu": {"generation": {"backend": "reference"}}},
        {"cpu": {"policy": {"model_name": "another"}}},
        {"cpu": {"generation": "fast"}},
        ["cpu"],
        {"cpu": {"sharded": {"tp2": {"ranks": 2}}}},
        {"cpu": {"sharded": {"tp1": {"ranks": 1, "config": {}}}}},
        {"cpu": {"sharded": {"tp2": {"ranks": 2, "config": {"backend": "reference"}}}}},
    ],
)
def test_settings_for_tiny_models_cannot_put_another_in_its_place(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider = next(p for p in discovery.providers(discovery.BACKENDS) if p.name == "reference")
    settings = replace(provider, group=discovery.CONFORMANCE, value="rl_conformance_tiny:TINY")
    real = discovery.providers
    monkeypatch.setattr(
        discovery, "providers", lambda group: [settings] if group == settings.group else real(group)
    )
    module = type(sys)("rl_conformance_tiny")
    module.TINY = tiny  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with pytest.raises(BrokenPluginError, match="by device and kind"):
        Target.find("reference")


def _with_a_fault(ctx: Context, tensor: str) -> None:
    policy, engine = unequal_pair(ctx)
    with in_the_engine(engine, dropping, tensor=tensor):
        run_refit(policy, engine)


@pytest.mark.parametrize("tensor", ["model.norm.weight", "of another model"])
def test_a_fault_that_changes_nothing_is_an_error(tensor: str) -> None:
    outcome = _outcome_of(lambda ctx: _with_a_fault(ctx, tensor))
    if tensor == "model.norm.weight":
        assert outcome.status is Status.PASSED, outcome.message
    else:
        assert outcome.status is Status.ERROR
        assert "the suite's own fault did not take place: dropping" in outcome.message


class _NewClassForEachSink(ReferenceGeneration):
    def weight_sink(self) -> WeightSink:
        sink = super().weight_sink()
        sink.__class__ = type("Sink", (type(sink),), {})
        return sink


def test_a_fault_is_put_into_sinks_of_new_classes() -> None:
    target = reference_target(make_generation=_NewClassForEachSink.from_config)
    with Harness(target) as harness:
        for check in select(["refit"], "R11 and write or R15 and dropping or R10 and failed"):
            outcome = harness.outcome(check)
            assert outcome.status is Status.PASSED, outcome.message


def test_a_fault_of_a_gradient_is_looked_for() -> None:
    """A root whose gradient torch makes finite, as it did that of a clamp at its bound."""
    inputs = torch.zeros(2, 3, requires_grad=True)
    assert without_finite_gradient(inputs.sum(), inputs) == 0
    finite = mock.patch.object(torch.Tensor, "sqrt", lambda self: self.clamp(min=0) * 0)
    with finite, pytest.raises(NoVerdict, match="a gradient with NaN"):
        without_finite_gradient(inputs.sum(), inputs)


def test_settings_for_tiny_models_are_in_the_report() -> None:
    tiny = {"cpu": {"generation": {"max_new_tokens": 9}}}
    report = run(reference_target(tiny=tiny), Settings(), select([], "B7"), selection="B7")
    assert json.loads(report.environment["settings"]) == tiny["cpu"]
    with_a_model = Settings(model="somewhere")
    assert not reference_target(tiny=tiny).own_settings(with_a_model)


def test_a_mixin_cannot_override_a_check() -> None:
    name = next(name for name in vars(GenerationConformance) if name.startswith("test_G8"))
    mixin = type("Mixin", (), {name: lambda self: None})
    with pytest.raises(TypeError, match=name):
        type("TestMine", (mixin, GenerationConformance), {"backend": "mine"})


def test_a_clause_that_could_not_run_counts_as_a_failure_on_the_page() -> None:
    outcome = Outcome("B7/x", "x", Status.NOT_RUN, message="Ray is missing")
    report = RunReport("mine", (outcome,), clauses=("B7",), selection="B7")
    assert report.verdict is Verdict.INCOMPLETE
    assert Matrix.of([report]).rows[0].bad


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_a_number_is_legal_json(value: float) -> None:
    measure = Measure("error", value, 1.0)
    outcome = Outcome("B7/x", "x", Status.FAILED, measures=(measure,))
    text = to_json(RunReport("mine", (outcome,), clauses=("B7",)))
    json.loads(text, parse_constant=pytest.fail)
    [read] = from_json(text).outcomes[0].measures
    assert repr(read.value) == repr(value)
