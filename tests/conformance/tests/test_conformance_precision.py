"""Runs in lower precision: what rounding decides is let pass, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mutants import all_mutants, examine, target

from rl_conformance.continuations import find_certain
from rl_conformance.expect import NotRun
from rl_conformance.oracle import Oracle, Truncated, truncated_distribution
from rl_conformance.outcome import Verdict
from rl_conformance.run import run, select
from rl_conformance.settings import Settings

_TOKENS = "G4 or G7 or G8 or G10 and (top_p or all_three) or G11 or G12 and not many or G17"


def test_the_dtype_follows_the_device() -> None:
    assert Settings.of("cpu").dtype == "float32"
    assert Settings.of("cuda").dtype == "bfloat16"
    assert Settings.of("cuda", "float32").dtype == "float32"


@pytest.mark.full
@pytest.mark.parametrize("checks", [_TOKENS, "P1 or P4 or P5 and mbs or P6 or P13", "R1 or R15"])
def test_the_reference_passes_in_bfloat16(checks: str) -> None:
    report = run(target(), Settings(dtype="bfloat16"), select([], checks), selection=checks)
    bad = [(o.check, o.message) for o in report.outcomes if o.status.bad]
    assert report.verdict is Verdict.PASSED, bad


@pytest.mark.full
@pytest.mark.parametrize(
    "name",
    [
        "TopKIsOffByOne",
        "LogprobsOffByOne",
        "LogprobsOfAnotherTemperature",
        "ScoresTheNextToken",
        "MicrobatchesAreAveraged",
    ],
)
def test_wider_tolerances_still_see(name: str) -> None:
    [mutant] = [m for m in all_mutants() if m.name == name]
    assert examine(mutant, "bfloat16").failed


def test_the_oracle_has_the_weights_of_the_dtype(model: Path) -> None:
    exact, rounded = Oracle(model), Oracle(model, "bfloat16")
    weights = dict(rounded.model.named_parameters())
    for name, weight in exact.model.named_parameters():
        assert weights[name].dtype == torch.float32
        assert torch.equal(weights[name], weight.bfloat16().float()), name
    tied = rounded.model.get_output_embeddings().weight, rounded.model.get_input_embeddings().weight
    assert tied[0] is tied[1]


def test_certain_tokens_are_those_of_bfloat16_too(model: Path) -> None:
    oracle = Oracle(model, "bfloat16")
    found = find_certain(oracle, [5, 1, 5, 33], steps=4, lead=0.4)
    assert [len(each.prompt) for each in found] == [5, 1, 5, 33]
    assert found[0].prompt != found[2].prompt
    model = oracle.model.bfloat16()
    for each in found:
        ids = torch.tensor([each.prompt])
        for _ in range(4):
            with torch.no_grad():
                ids = torch.cat([ids, model(ids).logits[:, -1].argmax(-1, keepdim=True)], 1)
        assert ids[0, len(each.prompt) :].tolist() == each.tokens


def test_a_model_without_a_certain_token_is_said(model: Path) -> None:
    with pytest.raises(NotRun, match="4 greedy tokens that lead all others by 50"):
        find_certain(Oracle(model), [5], steps=4, lead=50.0)


@given(
    st.lists(st.floats(-5, 5, width=32), min_size=8, max_size=40, unique=True),
    st.integers(1, 7),
    st.floats(0, 0.3),
    st.integers(0, 2**31),
)
def test_no_error_within_the_slack_lets_another_token_in(
    values: list[float], top_k: int, largest: float, seed: int
) -> None:
    logits = torch.tensor(values, dtype=torch.float64)
    found = Truncated.of(logits, top_k=top_k, top_p=1.0, slack=(0.0, largest))
    noise = torch.rand(len(values), generator=torch.Generator().manual_seed(seed)).double()
    moved = logits + (2 * noise - 1) * largest
    drawn = truncated_distribution(moved, top_k=top_k, top_p=1.0) > 0
    assert not (drawn & ~found.possible).any()
    surely = (found.probabilities > 0) & ~found.edge
    assert not (surely & ~drawn).any()


def test_without_slack_only_the_set_itself_is_possible() -> None:
    logits = torch.tensor([3.0, 2.0, 1.0, 0.0], dtype=torch.float64)
    found = Truncated.of(logits, top_k=0, top_p=0.8, slack=(0.0, 0.0))
    assert found.possible.tolist() == [True, True, False, False]
    torch.testing.assert_close(found.logprobs[:2].exp(), found.probabilities[:2])


def test_a_mass_that_nearly_suffices_may_take_one_more() -> None:
    logits = torch.tensor([0.50, 0.301, 0.10, 0.099], dtype=torch.float64).log()
    exact = Truncated.of(logits, top_k=0, top_p=0.8, slack=(0.0, 0.0))
    rounded = Truncated.of(logits, top_k=0, top_p=0.8, slack=(0.03, 0.01))
    assert exact.possible.tolist() == [True, True, False, False]
    assert rounded.possible.tolist() == [True, True, True, True]
