"""Runs with a checkpoint of the user's."""

from __future__ import annotations

from pathlib import Path

import pytest
from mutants import target

from rl_conformance.models import make_tiny_model
from rl_conformance.outcome import Verdict
from rl_conformance.run import run, select
from rl_conformance.settings import Settings
from rl_core.errors import ConfigError

pytest_plugins = ["pytester"]
_CHECKS = [
    "G1 or G4 or G8 or G13 or G16",
    *(
        pytest.param(checks, marks=pytest.mark.full)
        for checks in (
            "P1 or P3 or P5",
            "R1 or R11",
            "R2 or R4 and not processes or R7 or R10 or R13 or R15",
        )
    ),
]


@pytest.mark.parametrize("checks", _CHECKS)
def test_another_architecture_passes(checks: str, tmp_path: Path) -> None:
    model = str(make_tiny_model(tmp_path / "llama", "llama", seed=3))
    report = run(target(), Settings(model=model), select([], checks), selection=checks)
    bad = [(o.check, o.message) for o in report.outcomes if o.status.bad]
    assert report.verdict is Verdict.PASSED, bad
    assert report.environment["model"] == model


def test_what_is_no_checkpoint_is_refused_before_anything_runs(pytester: pytest.Pytester) -> None:
    with pytest.raises(ConfigError, match=r"nowhere holds no config\.json"):
        Settings.of("cpu", model="/nowhere")
    done = pytester.runpytest_subprocess("--rl-backend", "reference", "--rl-model", "/nowhere")
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    done.stderr.fnmatch_lines(["*--rl-model: /nowhere holds no config.json*"])
