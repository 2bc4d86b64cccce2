"""A1, A2 and A3: trainer and engine agree."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import torch

from rl_conformance.diagnostics.agreement import (
    measure_log_probability_consistency,
    validate_log_probability_consistency,
)
from rl_conformance.diagnostics.engine import (
    test_generation_consistency,
    test_max_model_len_respected,
)
from rl_conformance.expect import raises, require, same
from rl_conformance.models import families_of
from rl_conformance.refits import run_refit, scores_of_both, unequal_pair
from rl_conformance.registry import CORE, check
from rl_conformance.training import AdvantageLoss, training_batch
from rl_core.batch import BatchedDataDict
from rl_core.errors import DataError

if TYPE_CHECKING:
    from rl_conformance.context import Context


_PROMPTS = (5, 9, 3, 14)


#: Of the plots: greedy tokens, each once.
_ERRORS = "Log-prob error of the engine against the policy"


@check("A1")
def a_true_pair_passes(ctx: Context) -> None:
    """The same weights on both sides pass, greedy and sampled."""
    policy, generation = ctx.policy(), ctx.generation()
    data = ctx.prompts(*_PROMPTS)
    same(
        validate_log_probability_consistency(policy, generation, data),
        True,
        "validate_log_probability_consistency with equal weights",
    )
    found = measure_log_probability_consistency(policy, generation, data)
    ctx.record_errors(_ERRORS, "equal weights", *scores_of_both(policy, generation, data))
    require(found.greedy and found.sampled, "the errors", "one of greedy, one of sampled", found)


@check("A1")
def other_weights_do_not_pass(ctx: Context) -> None:
    """A pair with different weights gives False."""
    policy, generation = unequal_pair(ctx)
    data = ctx.prompts(*_PROMPTS)
    same(
        validate_log_probability_consistency(policy, generation, data),
        False,
        "validate_log_probability_consistency with different weights",
    )


@check("A1")
def an_empty_mask_is_an_error(ctx: Context) -> None:
    """Without one generated token there is nothing to agree on: DataError, not True."""
    policy, generation = ctx.policy(), ctx.generation(max_model_len=16, max_new_tokens=4)
    with raises(DataError):
        validate_log_probability_consistency(policy, generation, ctx.prompts(16, 16))


def _diagnosed(ctx: Context) -> dict[str, Any]:
    """Configuration of the backend under test for the library calls."""
    if not ctx.target.installed:
        ctx.not_run(
            "the diagnostics take a backend by name; this one is not installed", excused=True
        )
    if ctx.settings.url is not None:
        ctx.not_run(
            "an earlier check refitted the server, and this one needs its first weights",
            excused=True,
        )
    return ctx.target.base_config("generation", ctx.settings)


@check("A2", needs=("generation",))
def the_context_length_is_respected(ctx: Context) -> None:
    """test_max_model_len_respected(model_name) passes."""
    found = test_max_model_len_respected(str(ctx.model()), **_diagnosed(ctx))
    require(found, "test_max_model_len_respected", "it passes", found)


@check("A2", needs=("generation",))
def decoding_agrees_with_prefill(ctx: Context) -> None:
    """test_generation_consistency(model_name) passes over long outputs."""
    found = test_generation_consistency(str(ctx.model()), max_new_tokens=100, **_diagnosed(ctx))
    ctx.measure("mean_exp_difference", found.agreement.error, found.threshold)
    require(found, "test_generation_consistency", "it passes", found)


@check("A2", needs=(CORE,), device="cpu", timeout_s=180.0)
def the_diagnostics_are_commands(ctx: Context) -> None:
    """rl check runs them, and its exit code is their result."""
    command = [sys.executable, "-m", "rl_cli", "check", "max-model-len", str(ctx.model())]
    done = subprocess.run(
        [*command, "--generation", "reference"],
        capture_output=True,
        text=True,
        timeout=600,  # the deadline of the check is shorter, and depends on the device
        env={**os.environ, "TERM": "dumb"},
    )
    printed = f"{done.returncode}: {done.stdout}{done.stderr}"
    require(done.returncode == 0, "rl check max-model-len", "exit code 0", printed)


_DTYPES: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32", "threshold": 1.001},
    "bfloat16": {"dtype": "bfloat16", "threshold": 1.05},
}


_FAMILIES = {name: {**_DTYPES["float32"], **case} for name, case in families_of("A3").items()}


@check("A3", cases=_DTYPES | _FAMILIES)
def the_pair_agrees_before_and_after_training(
    ctx: Context, dtype: str, threshold: float, family: str = "qwen2"
) -> None:
    """Mean of exp(|difference|) below the threshold, at first and after three steps and a refit."""
    path = str(ctx.model(family))
    with ctx.refusable(family):
        policy = ctx.fresh_policy(dtype=dtype, model_name=path)
        generation = ctx.fresh_generation(dtype=dtype, model_name=path, seed=1, max_new_tokens=16)
    generation.prepare_for_generation()
    data = ctx.prompts(*_PROMPTS)
    training = training_batch((12, 7, 20, 9))
    training["advantages"] = training["sample_mask"].clone()
    for moment in ("before", "after"):
        both = scores_of_both(policy, generation, data)
        ctx.record_errors(_ERRORS, f"{family} in {dtype}, {moment} training", *both)
        found = measure_log_probability_consistency(policy, generation, data, threshold)
        ctx.measure(f"mean_exp_difference_{moment}", found.error, threshold)
        policy.prepare_for_training()
        for _ in range(3):
            policy.train(training, AdvantageLoss())
        policy.offload_before_refit()
        run_refit(policy, generation)


#: By row: tokens of the prompt, then how far each generated token is off.
Off = list[tuple[int, list[float]]]


_GOOD: Off = [(3, [0.0] * 5), (1, [0.0, 0.0])]


class _Pair:
    """Test double: log-probs of engine and policy that differ as given, and widely off the mask."""

    def __init__(self, greedy: Off, sampled: Off) -> None:
        self.off = {True: greedy, False: sampled}
        self.last: torch.Tensor | None = None

    def prepare_for_generation(self) -> bool:
        """See :class:`rl_core.interfaces.GenerationInterface`."""
        return True

    def generate(self, data: Any, greedy: bool = False) -> BatchedDataDict[Any]:
        """See :class:`rl_core.interfaces.GenerationInterface`."""
        rows = self.off[greedy]
        width = max(prompt + len(off) for prompt, off in rows) + 2
        ours = torch.full((len(rows), width), -1.0)
        theirs = torch.full((len(rows), width), -30.0)
        for row, (prompt, off) in enumerate(rows):
            for place, value in enumerate(off, prompt):
                theirs[row, place] = -1.0 + (value if place % 2 else -value)
        self.last = theirs
        lengths = torch.tensor([len(off) for _, off in rows])
        ends = torch.tensor([prompt for prompt, _ in rows]) + lengths
        return BatchedDataDict(
            {
                "output_ids": torch.ones(len(rows), width, dtype=torch.int64),
                "logprobs": ours,
                "generation_lengths": lengths,
                "unpadded_sequence_lengths": ends,
            }
        )

    def get_logprobs(self, data: Any, **_: Any) -> BatchedDataDict[Any]:
        """See :class:`rl_core.interfaces.PolicyInterface`."""
        return BatchedDataDict({"logprobs": self.last})


def _by_hand(rows: Off) -> float:
    off = [abs(value) for _, values in rows for value in values]
    return sum(math.exp(value) for value in off) / len(off)


_CASES: dict[str, tuple[Off, Off]] = {
    "nothing is off": (_GOOD, _GOOD),
    "one token of many": ([(2, [0.0] * 39 + [1.0])], _GOOD),
    "a short row is off": ([(2, [0.5]), (4, [0.0] * 30)], _GOOD),
    "a long row is off": ([(2, [0.0]), (4, [0.06] * 30)], _GOOD),
    "greedy alone": ([(1, [0.08] * 9)], [(1, [0.0] * 9)]),
    "sampled alone": ([(1, [0.0] * 9)], [(1, [0.12] * 9)]),
    "both, by turns": ([(1, [0.3, 0.0] * 3)], [(2, [0.0, 0.1] * 4)]),
    "rare and large": ([(1, [0.0] * 99 + [3.0])], [(1, [0.0] * 99 + [1.5])]),
    "a row without tokens": ([(4, []), (3, [0.02] * 4)], [(4, []), (3, [0.03] * 2)]),
}


@check("A1", needs=(CORE,))
def the_error_is_the_mean_of_the_exponentials(ctx: Context) -> None:
    """Over generated tokens, whatever their rows; then the mean of greedy and sampled."""
    for name, (greedy, sampled) in _CASES.items():
        pair: Any = _Pair(greedy, sampled)
        expected = (_by_hand(greedy) + _by_hand(sampled)) / 2
        for threshold in (1.05, expected + 1e-4, max(expected - 1e-4, 1e-9)):
            found = measure_log_probability_consistency(pair, pair, BatchedDataDict(), threshold)
            near = abs(found.error - expected) < 1e-6
            require(near, f"{name}: the error, within 1e-6", expected, found.error)
            passes = validate_log_probability_consistency(pair, pair, BatchedDataDict(), threshold)
            what = f"{name}: consistent, with an error of {expected} and a threshold of {threshold}"
            same(passes, expected < threshold, what)
        default = validate_log_probability_consistency(pair, pair, BatchedDataDict())
        same(default, expected < 1.05, f"{name}: consistent, with an error of {expected}")


@check("A1", needs=(CORE,))
def nan_and_infinity_do_not_agree(ctx: Context) -> None:
    """NaN and infinity on one token, greedy or sampled, give False."""
    for value in (math.nan, math.inf):
        for bad in (0, 1):
            modes: list[Off] = [_GOOD, _GOOD]
            modes[bad] = [(2, [0.0, value, 0.0])]
            pair: Any = _Pair(*modes)
            passes = validate_log_probability_consistency(pair, pair, BatchedDataDict())
            same(passes, False, f"consistent, with log-probs that differ by {value}")


@check("A1", needs=(CORE,))
def each_mode_needs_a_token(ctx: Context) -> None:
    """Nothing generated in one of the modes is an error, also where the other is right."""
    nothing: Off = [(3, []), (2, [])]
    for modes in ((nothing, _GOOD), (_GOOD, nothing)):
        pair: Any = _Pair(*modes)
        with raises(DataError):
            validate_log_probability_consistency(pair, pair, BatchedDataDict())
