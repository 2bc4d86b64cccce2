"""A1 to A3: whether trainer and engine agree, and whether we would notice if not."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from rl_conformance.diagnostics.agreement import (
    measure_log_probability_consistency,
    validate_log_probability_consistency,
)
from rl_conformance.diagnostics.engine import (
    test_generation_consistency,
    test_max_model_len_respected,
)
from rl_conformance.expect import raises, require
from rl_conformance.refits import run_refit, scores_of_both
from rl_conformance.registry import CORE, check
from rl_conformance.training import AdvantageLoss, training_batch
from rl_core.errors import DataError

if TYPE_CHECKING:
    from rl_conformance.context import Context

_PROMPTS = (5, 9, 3, 14)
#: Of the plots: greedy tokens, each once.
_ERRORS = "Log-prob error of the engine against the policy"


@check("A1")
def a_true_pair_passes(ctx: Context) -> None:
    """The same weights on both sides pass, greedy and sampled."""
    policy, generation = ctx.fresh_pair(seed=1)
    data = ctx.prompts(*_PROMPTS)
    require(validate_log_probability_consistency(policy, generation, data) is True, "not True")
    found = measure_log_probability_consistency(policy, generation, data)
    ctx.record_errors(_ERRORS, "equal weights", *scores_of_both(policy, generation, data))
    require(found.greedy and found.sampled, "greedy or sampled was left out")


@check("A1")
def other_weights_do_not_pass(ctx: Context) -> None:
    """A pair with different weights gives False."""
    policy = ctx.fresh_policy(model_name=str(ctx.model("qwen2", seed=1)))
    generation = ctx.fresh_generation(model_name=str(ctx.model("qwen2", seed=0)))
    data = ctx.prompts(*_PROMPTS)
    require(
        validate_log_probability_consistency(policy, generation, data) is False,
        "a policy and an engine with different weights are called consistent",
    )


@check("A1")
def an_empty_mask_is_an_error(ctx: Context) -> None:
    """Without one generated token there is nothing to agree on: DataError, not True."""
    policy, generation = ctx.fresh_pair(max_model_len=16)
    with raises(DataError):
        validate_log_probability_consistency(policy, generation, ctx.prompts(16, 16))


def _diagnosed(ctx: Context) -> dict[str, Any]:
    """Configuration of the backend under test for the library calls."""
    if not ctx.target.installed:
        ctx.not_run(
            "the diagnostics take a backend by name; this one is not installed", excused=True
        )
    return ctx.target.base_config("generation", ctx.settings)


@check("A2", needs=("generation",))
def the_context_length_is_respected(ctx: Context) -> None:
    """test_max_model_len_respected(model_name) passes."""
    found = test_max_model_len_respected(str(ctx.model()), **_diagnosed(ctx))
    require(found, f"{found}")


@check("A2", needs=("generation",))
def decoding_agrees_with_prefill(ctx: Context) -> None:
    """test_generation_consistency(model_name) passes over long outputs."""
    found = test_generation_consistency(str(ctx.model()), max_new_tokens=100, **_diagnosed(ctx))
    ctx.measure("mean_exp_difference", found.agreement.error, found.threshold)
    require(found, f"{found}")


@check("A2", needs=(CORE,), device="cpu", timeout_s=180.0)
def the_diagnostics_are_commands(ctx: Context) -> None:
    """rl check runs them, and says by its exit code what came of them."""
    command = [sys.executable, "-m", "rl_core.cli", "check", "max-model-len", str(ctx.model())]
    done = subprocess.run(
        [*command, "--generation", "reference"],
        capture_output=True,
        text=True,
        timeout=600,  # the deadline of the check is shorter, and depends on the device
        env={**os.environ, "TERM": "dumb"},
    )
    require(done.returncode == 0, f"exit code {done.returncode}: {done.stdout}{done.stderr}")


_DTYPES: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32", "threshold": 1.001},
    "bfloat16": {"dtype": "bfloat16", "threshold": 1.05},
}


@check("A3", cases=_DTYPES)
def the_pair_agrees_before_and_after_training(ctx: Context, dtype: str, threshold: float) -> None:
    """Mean of exp(|difference|) below the threshold, at first and after three steps and a refit."""
    policy, generation = ctx.fresh_pair(dtype=dtype, seed=1, max_new_tokens=16)
    data = ctx.prompts(*_PROMPTS)
    training = training_batch((12, 7, 20, 9))
    training["advantages"] = training["sample_mask"].clone()
    for moment in ("before", "after"):
        both = scores_of_both(policy, generation, data)
        ctx.record_errors(_ERRORS, f"{dtype}, {moment} training", *both)
        found = measure_log_probability_consistency(policy, generation, data, threshold)
        ctx.measure(f"mean_exp_difference_{moment}", found.error, threshold)
        policy.prepare_for_training()
        for _ in range(3):
            policy.train(training, AdvantageLoss())
        policy.offload_before_refit()
        run_refit(policy, generation)
