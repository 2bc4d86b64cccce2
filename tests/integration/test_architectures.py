"""What comes of an architecture, and the table of several runs."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import typer
from architectures.outcome import Run, Status, Trial
from architectures.report import to_json
from architectures.trial import try_architectures
from click.testing import Result
from patience import enough_for
from try_architectures import main
from typer.testing import CliRunner

from rl_backends.tensors import NamedTensorSink
from rl_conformance.reference import reference_target
from rl_conformance.reference.generation import ReferenceGeneration
from rl_core.errors import CapabilityError, ConfigError


def tried(engine: type[ReferenceGeneration], name: str = "llama", **options: Any) -> Trial:
    """What comes of one architecture with an engine of the reference's kind."""

    def make(config: dict[str, Any]) -> ReferenceGeneration:
        return engine(**{key: value for key, value in config.items() if key not in _OUTSIDE})

    run = try_architectures(reference_target(make_generation=make), [name], **options)
    return run.trials[0]


_OUTSIDE = {"backend", "device"}


class StaleCopy(ReferenceGeneration):
    """Takes a refit into a copy of its weights, and computes with others."""

    def weight_sink(self) -> NamedTensorSink:
        if not hasattr(self, "copy"):
            tensors: dict[str, torch.Tensor] = self.model.state_dict()
            self.copy = {name: tensor.clone() for name, tensor in tensors.items()}
        return NamedTensorSink(self.copy)


class ComputesOtherwise(ReferenceGeneration):
    """Divides logits by a number of its own."""

    def __init__(self, **config: Any) -> None:
        super().__init__(**config)
        head, forward = self.model.lm_head, self.model.lm_head.forward
        head.forward = lambda hidden: forward(hidden) / 1.1


class ForgetsOne(ReferenceGeneration):
    """Leaves one tensor of a refit out."""

    def weight_sink(self) -> NamedTensorSink:
        class Sink(NamedTensorSink):
            def pieces(self) -> None:
                return None

            def write(self, name: str, *args: Any, **kwargs: Any) -> None:
                if not name.endswith("lm_head.weight"):
                    super().write(name, *args, **kwargs)

        return Sink(self.model.state_dict(keep_vars=True))


class ReadsOtherBits(ReferenceGeneration):
    """Shows other weights than it took, once the refit is over."""

    def weight_sink(self) -> NamedTensorSink:
        tensors = self.model.state_dict(keep_vars=True)
        if self.weights_version > 0:
            tensors = {name: tensor * 1.5 for name, tensor in tensors.items()}
        return NamedTensorSink(tensors)


class Refuses(ReferenceGeneration):
    def __init__(self, **config: Any) -> None:
        raise CapabilityError(
            "it rearranges weights. More is said here\nand here", fix="use another"
        )


class Unknown(ReferenceGeneration):
    def __init__(self, model_name: str, **config: Any) -> None:
        raise ConfigError(f"it has no {model_name}:\nKeyError: 'llama'\nsome log", key="model_name")


class Exits(ReferenceGeneration):
    def __init__(self, **config: Any) -> None:
        sys.exit(3)


class Hangs(ReferenceGeneration):
    def __init__(self, **config: Any) -> None:
        Hangs.child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
        time.sleep(300)


class LeavesAProcess(ReferenceGeneration):
    def __init__(self, **config: Any) -> None:
        super().__init__(**config)
        LeavesAProcess.child = subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(300)"]
        )
        raise ConfigError("it does not have that", key="model_name")


@pytest.mark.parametrize("name", ["llama", "qwen2_moe", "gemma3_text"])
def test_what_a_refit_brings_whole_is_exact(name: str) -> None:
    trial = tried(ReferenceGeneration, name)
    assert (trial.status, trial.reason) == (Status.EXACT, "")
    assert trial.before is not None
    assert trial.after is not None
    assert trial.after.tokens > 20
    assert trial.after.max is not None
    assert trial.after.max < 1e-3


@pytest.mark.parametrize(
    ("engine", "status", "says"),
    [
        (StaleCopy, Status.WRONG, "agree before the refit, and after it they differ"),
        (ComputesOtherwise, Status.WRONG, "before any refit, the engine's log-probs differ"),
        (ReadsOtherBits, Status.WRONG, "values differ"),
        (ForgetsOne, Status.FAILS, "the refit: "),
        (Refuses, Status.REFUSED, "it rearranges weights"),
        (Unknown, Status.NOT_STARTED, "starting the engine: it has no llama-0: KeyError: 'llama'"),
        (Exits, Status.NOT_STARTED, "SystemExit: 3"),
    ],
)
def test_what_is_not_exact_is_named(
    engine: type[ReferenceGeneration], status: Status, says: str
) -> None:
    trial = tried(engine)
    assert trial.status is status
    assert says in trial.reason
    assert "More is said" not in trial.reason
    assert status.bad == (status in (Status.WRONG, Status.FAILS))


def test_what_the_trainer_cannot_load_is_no_fault_of_the_engine() -> None:
    trial = tried(ReferenceGeneration, "dbrx")
    assert trial.status is Status.NO_TRAINER
    assert "running the model with transformers" in trial.reason


def test_what_hangs_has_a_deadline_and_is_ended() -> None:
    seconds = round(enough_for(lambda: tried(Refuses), least=5.0))
    trial = tried(Hangs, deadline_s=seconds)
    assert trial.status is Status.NOT_STARTED
    assert f"timed out after {seconds} s" in trial.reason
    assert not psutil.pid_exists(Hangs.child.pid) or Hangs.child.poll() is not None


def test_processes_that_an_engine_leaves_are_ended() -> None:
    assert tried(LeavesAProcess).status is Status.NOT_STARTED
    assert (
        not psutil.pid_exists(LeavesAProcess.child.pid) or LeavesAProcess.child.poll() is not None
    )


def run_of(*trials: Trial, backend: str = "mine", engine: str = "mine 1", date: str = "1") -> Run:
    return Run(backend, {"engine": engine, "date": date}, trials, 2.0)


def test_what_was_wrong_already_does_not_fail_a_run_and_what_was_exact_must_be() -> None:
    exact, wrong = Trial("llama", Status.EXACT), Trial("gemma", Status.WRONG, "by 4")
    assert not run_of(exact).problems()
    assert run_of(exact, wrong).problems() == ["mine: gemma: wrong: by 4"]
    assert not run_of(exact, wrong).problems(run_of(wrong))
    assert run_of(wrong).problems(run_of(wrong)) == ["mine: nothing is exact"]
    refused = Trial("opt", Status.REFUSED, "why")
    [problem] = run_of(exact, refused).problems(run_of(Trial("opt", Status.EXACT)))
    assert problem == "mine: opt: refused: why (it was exact)"


def command(*words: str) -> Result:
    app = typer.Typer()
    app.command()(main)
    return CliRunner().invoke(app, words)


def test_the_command_tries_backends_and_merges(tmp_path: Path) -> None:
    whole, page = tmp_path / "a.json", tmp_path / "a.md"
    done = command("reference", "hf", "-k", "llama", "--json", str(whole))
    assert done.exit_code == 0, done.output
    assert "exact           llama" in done.output
    assert {run["backend"] for run in json.loads(whole.read_text())["runs"]} == {"reference", "hf"}
    bad = run_of(Trial("llama", Status.EXACT), Trial("gemma", Status.WRONG, "by 4"))
    (tmp_path / "b.json").write_text(to_json([bad]))
    merge = ["--merge", str(whole), "--merge", str(tmp_path / "b.json")]
    done = command(*merge, "--markdown", str(page))
    assert done.exit_code == 1
    assert "mine: gemma: wrong: by 4" in done.output
    assert "| llama | exact | exact | exact |" in page.read_text()
    assert command(*merge, "--known", str(tmp_path / "b.json")).exit_code == 0
