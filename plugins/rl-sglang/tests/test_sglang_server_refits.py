"""Refits that end at a server, and weights that are not those that were meant."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from engines.calls import in_background, prompts, until

from rl_core import create_policy, refit
from rl_core.errors import (
    CapabilityError,
    ManifestMismatchError,
    WeightsTornError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from fake_sglang_server import FakeSglangServer


# -- refits ---------------------------------------------------------------------------------------


@pytest.fixture
def policy(fake: FakeSglangServer) -> Iterator[Any]:
    made = create_policy({"backend": "hf", "model_name": str(fake.model)})
    yield made
    made.shutdown()


def test_client_names_no_functions_to_call(connect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    generation = connect()
    with pytest.raises(CapabilityError, match="RL_SERVER_FAULTS"):
        generation.call_in_workers("builtins:id")
    with pytest.raises(CapabilityError, match="RL_SERVER_FAULTS"):
        generation.weight_sink().write(
            "x", 0, torch.ones(1), of=generation.weight_sink().specs()[0]
        )
    monkeypatch.setenv("RL_SERVER_FAULTS", "1")
    assert len(generation.call_in_workers("builtins:id")) == 1


@pytest.mark.parametrize(
    "info",
    [{"quantization": "fp8"}, {"weight_cache_mode": "shared"}],
    ids=lambda one: next(iter(one)),
)
def test_server_that_takes_no_refits_says_so(
    connect: Any, fake: FakeSglangServer, policy: Any, info: dict[str, Any]
) -> None:
    fake.server_info.update(info)
    generation = connect(max_new_tokens=2)
    with pytest.raises(CapabilityError, match="takes no refit"):
        refit(policy, generation)
    generation.generate(prompts([5]))


def test_tensors_of_another_model_never_reach_the_server(
    connect: Any, fake: FakeSglangServer, tiny: Callable[..., Path]
) -> None:
    generation = connect(max_new_tokens=2)
    other = create_policy({"backend": "hf", "model_name": str(tiny("llama"))})
    with pytest.raises(ManifestMismatchError):
        refit(other, generation)
    generation.generate(prompts([5]))
    other.shutdown()


@pytest.mark.filterwarnings("ignore::rl_core.errors.LoopWarning")  # of the temperature
def test_client_of_a_server_with_torn_weights_is_checked_after_its_refit(
    connect: Any, fake: FakeSglangServer, policy: Any
) -> None:
    fake.fault, fake.raw = "torn", True
    generation = connect(temperature=0.5)
    fake.fault = ""
    with pytest.raises(CapabilityError, match="SGLANG_RETURN_ORIGINAL_LOGPROB"):
        refit(policy, generation)


def test_weights_that_somebody_else_changed_in_the_middle_of_a_row_fail_it(
    connect: Any, fake: FakeSglangServer
) -> None:
    fake.token_s = 0.05
    generation = connect(max_new_tokens=40)
    call = in_background(lambda: generation.generate(prompts([5])))
    until(lambda: fake.running)
    fake.weight_version = "of somebody else"
    error = call()
    assert isinstance(error, WeightsTornError)
    assert "of somebody else" in str(error)
