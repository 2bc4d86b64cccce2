"""The diagnostics on real engines: they pass where all is well, and only there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rl_cli import main
from rl_conformance.diagnostics.agreement import measure_log_probability_consistency
from rl_conformance.diagnostics.engine import (
    random_prompts,
    test_generation_consistency,
    test_max_model_len_respected,
)
from rl_conformance.models import make_tiny_model
from rl_core import create_generation, create_policy

PROMPTS = random_prompts(269, [1, 5, 12, 30], seed=2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", "llama")


@pytest.fixture(scope="module")
def policy(model: Path) -> Iterator[Any]:
    policy = create_policy({"backend": "hf", "model_name": str(model)})
    yield policy
    policy.shutdown()


def measure(policy: Any, model: Path, **config: Any) -> Any:
    engine = create_generation(
        {"backend": "hf", "model_name": str(model), "max_new_tokens": 32, "seed": 0, **config}
    )
    try:
        return measure_log_probability_consistency(policy, engine, PROMPTS, threshold=1.001)
    finally:
        engine.shutdown()


def test_one_checkpoint_in_trainer_and_engine_agrees(policy: Any, model: Path) -> None:
    found = measure(policy, model)
    assert found.passed, found


def test_other_weights_in_the_engine_do_not_agree(policy: Any, tmp_path: Path) -> None:
    other = make_tiny_model(tmp_path / "other", "llama", seed=1)
    found = measure(policy, other)
    assert found.error > 1.05
    assert not found.passed


def test_a_tempered_pair_agrees_on_sampled_rows(model: Path) -> None:
    policy = create_policy({"backend": "hf", "model_name": str(model), "temperature": 0.7})
    found = measure(policy, model, temperature=0.7)
    policy.shutdown()
    assert found.greedy is None
    assert found.passed, found


def test_the_context_is_respected(model: Path) -> None:
    assert test_max_model_len_respected(str(model), max_model_len=24)


def test_long_outputs_are_what_prefill_says(model: Path) -> None:
    found = test_generation_consistency(str(model), max_new_tokens=200, threshold=1.001)
    assert found.tokens_generated == 200
    assert found.passed, found


def test_the_command_checks_log_probs(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "logprobs", str(model), "--max-new-tokens", "16", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["greedy"]["tokens"] > 0
    assert printed["sampled"]["error"] < 1.001
