"""Refits that end at a server, and weights that are not those that were meant."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from engines.calls import in_background, prompts, until

from rl_conformance.faults import failing_write, in_the_engine
from rl_core import create_policy, refit
from rl_core.errors import (
    CapabilityError,
    ManifestMismatchError,
    RefitError,
    WeightsTornError,
    WorkerDiedError,
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


def assert_same(fake: FakeSglangServer, policy: Any) -> None:
    wanted = dict(policy.model.named_parameters())
    assert all(torch.equal(fake.tensors[name], tensor) for name, tensor in wanted.items())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mode": "packed"},
        {"delta": True},
        {"verify": "installed"},
        {"isolation": "staged"},
        {"retries": 1},
    ],
    ids=str,
)
def test_refit_reaches_the_workers_of_the_server(
    connect: Any, fake: FakeSglangServer, policy: Any, options: dict[str, Any]
) -> None:
    generation = connect(max_new_tokens=2)
    for version in (1, 2):
        with torch.no_grad():
            for tensor in policy.model.parameters():
                tensor.add_(version)
        refit(policy, generation, **options)
        assert generation.weights_version == version
        assert fake.weight_version == f"{policy.weights_origin:x}-{version}"
        assert_same(fake, policy)
        rows = generation.generate(prompts([5]))
        assert rows["weights_version"].tolist() == [version]
        assert rows["weights_origin"].tolist() == [policy.weights_origin]


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


@pytest.mark.parametrize(
    ("fault", "error"),
    [("refuse", CapabilityError), ("hang up", WorkerDiedError), ("lie", WeightsTornError)],
)
def test_refit_that_fails_is_typed_and_the_next_one_works(
    connect: Any, fake: FakeSglangServer, policy: Any, fault: str, error: type[Exception]
) -> None:
    generation = connect(max_new_tokens=2)
    refit(policy, generation)
    fake.refit_fault = fault
    with pytest.raises(error):
        refit(policy, generation)
    if fault == "lie":
        with pytest.raises(WeightsTornError):
            generation.generate(prompts([5]))
    fake.refit_fault = ""
    refit(policy, generation)
    assert_same(fake, policy)
    generation.generate(prompts([5]))


def test_refit_that_fails_while_it_writes_is_torn_until_the_next(
    connect: Any, fake: FakeSglangServer, policy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RL_SERVER_FAULTS", "1")
    generation = connect(max_new_tokens=2)
    refit(policy, generation)
    with in_the_engine(generation, failing_write, after=3), pytest.raises(RefitError):
        refit(policy, generation)
    with pytest.raises(WeightsTornError):
        generation.generate(prompts([5]))
    refit(policy, generation)
    generation.generate(prompts([5]))


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
