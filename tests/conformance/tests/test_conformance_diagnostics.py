"""The diagnostics: what they measure, and that they fail where they must."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from cluster_doubles import DoubleGeneration
from installed import Install

from rl_cli import main
from rl_conformance.diagnostics import engine
from rl_conformance.diagnostics.agreement import (
    Agreement,
    measure_log_probability_consistency,
    validate_log_probability_consistency,
)
from rl_conformance.diagnostics.engine import (
    random_prompts,
    test_generation_consistency,
    test_max_model_len_respected,
)
from rl_core.batch import BatchedDataDict
from rl_core.errors import ConfigError


class ShiftedScores:
    """A test double of a policy: scores every token ``-1 + shift``; the engine's are -1."""

    def __init__(self, shift: float = 0.0, **config: Any) -> None:
        self.shift, self.config = shift, config

    def get_logprobs(self, data: BatchedDataDict[Any]) -> BatchedDataDict[Any]:
        return BatchedDataDict({"logprobs": torch.full(data["input_ids"].shape, -1.0 + self.shift)})


def policy(shift: float = 0.0, **config: Any) -> Any:
    return ShiftedScores(shift, **config)


def double_engine(**config: Any) -> DoubleGeneration:
    return DoubleGeneration("none", max_new_tokens=4, **config)


PROMPTS = random_prompts(900, [1, 5, 3])


# -- log-probs -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"temperature": 0.5}, "of temperature 0.5, the policy's of 1"),
        ({"top_k": 3}, "top_k=3"),
        ({"top_p": 0.9}, "top_p=0.9"),
        ({"repetition_penalty": 1.1}, "repetition_penalty=1.1"),
    ],
)
def test_an_engine_of_another_distribution_is_refused(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        validate_log_probability_consistency(policy(), double_engine(**config), PROMPTS)


def test_an_engine_that_never_samples_is_compared_on_greedy_rows() -> None:
    result = measure_log_probability_consistency(policy(), double_engine(do_sample=False), PROMPTS)
    assert result.sampled is None
    assert result.greedy is not None


def test_only_counted_tokens_matter_and_the_worst_row_is_named() -> None:
    one = torch.tensor([[5.0, -1.0, 0.0], [0.0, -1.0, -1.0], [9.0, 9.0, 9.0]])
    other = torch.tensor([[0.0, -1.0, 0.0], [0.0, -1.5, -1.0], [0.0, 0.0, 0.0]])
    counted = torch.tensor([[False, True, False], [False, True, True], [False] * 3])
    found = Agreement.between(one, other, counted)
    assert found.row_errors == pytest.approx((1.0, (math.exp(0.5) + 1) / 2, 1.0))
    assert (found.worst_row, found.tokens, found.max) == (1, 3, 0.5)


# -- the engine alone ------------------------------------------------------------------------------


@pytest.fixture
def double(install: Install) -> str:
    install("rl-double", {"rl_core.backends": {"double": "cluster_doubles:BACKEND"}})
    return "double"


def test_the_checks_are_not_collected_as_tests() -> None:
    for check in (test_max_model_len_respected, test_generation_consistency):
        assert vars(check)["__test__"] is False


# -- rl check --------------------------------------------------------------------------------------


def test_the_command_prints_figures_and_exits_with_zero(
    double: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "max-model-len", "none", "--generation", double]) == 0
    printed = capsys.readouterr().out
    assert "32 -> 32" in printed
    assert "passed" in printed


def test_the_command_exits_with_one_and_prints_json(
    double: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--generation", double, "--generation-config", '{"fault": "drift"}', "--json"]
    assert main(["check", "generation-consistency", "none", *arguments]) == 1
    printed = json.loads(capsys.readouterr().out)
    assert printed["passed"] is False
    assert printed["agreement"]["error"] > 2.0


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_the_command_refuses_what_is_no_json_object(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["check", "max-model-len", "m", "--generation-config", text])
    assert f"not a JSON object: {text}" in capsys.readouterr().err


@pytest.mark.parametrize("check", ["max-model-len", "generation-consistency"])
def test_configuration_as_json_has_the_last_word(
    install: Install, check: str, capsys: pytest.CaptureFixture[str]
) -> None:
    install.toy()
    given = {"max_model_len": 8, "max_new_tokens": 8, "model_name": "m", "toy_sise": 1}
    config = json.dumps({**given, "backend": "toy"})
    assert main(["check", check, "other", "--generation-config", config]) == 1
    assert "unknown key 'toy_sise'" in capsys.readouterr().err


def test_the_command_that_finds_no_number_still_prints_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nan = float("nan")
    agreement = Agreement(nan, nan, nan, 1, (nan,))
    found = engine.GenerationConsistency(agreement, 1.0, 1, 1.05, 0.95)
    monkeypatch.setattr(engine, "test_generation_consistency", lambda **_: found)
    assert main(["check", "generation-consistency", "m", "--json"]) == 1
    printed = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert printed["agreement"]["error"] is None
