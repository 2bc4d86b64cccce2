"""Refits that end at a server, and weights that are not those that were meant."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
import torch
from sglang_server_calls import in_background, prompts, until

from rl_core import create_policy, refit
from rl_core.errors import (
    CapabilityError,
    ConfigError,
    DeadlineError,
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


def saved(fake: FakeSglangServer) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(f"{fake.weight_path}/model.safetensors")


def test_refit_ends_in_a_file_that_the_server_loads(
    connect: Any, fake: FakeSglangServer, policy: Any, tmp_path: Path
) -> None:
    generation = connect(weights_dir=str(tmp_path), max_new_tokens=2)
    for version in (1, 2):
        with torch.no_grad():
            for tensor in policy.model.parameters():
                tensor.add_(version)
        refit(policy, generation)
        assert generation.weights_version == version
        assert fake.weight_version.endswith(f"-{version}")
        found, wanted = saved(fake), dict(policy.model.named_parameters())
        assert all(torch.equal(found[name], wanted[name]) for name in found)
        rows = generation.generate(prompts([5]))
        assert rows["weights_version"].tolist() == [version]
        assert rows["weights_origin"].tolist() == [policy.weights_origin]
    [private] = tmp_path.iterdir()
    assert private.stat().st_mode & 0o077 == 0
    assert all(one["flush_cache"] for one in fake.loads)
    generation.shutdown()
    assert not list(tmp_path.iterdir())


def test_delta_sends_less_and_the_server_loads_all(
    connect: Any, fake: FakeSglangServer, policy: Any
) -> None:
    generation = connect()
    refit(policy, generation)
    first = next(policy.model.parameters())
    with torch.no_grad():
        first.add_(1)
    report = refit(policy, generation, delta=True)
    assert report.tensors == 1
    found, wanted = saved(fake), dict(policy.model.named_parameters())
    assert all(torch.equal(found[name], wanted[name]) for name in found)


@pytest.mark.parametrize(
    "options",
    [{"verify": "installed"}, {"isolation": "staged"}, {"kv_scales": {"layer_0.k_scale": 1.0}}],
)
def test_what_cannot_be_promised_is_refused_before_anything_is_touched(
    connect: Any, fake: FakeSglangServer, policy: Any, options: dict[str, Any]
) -> None:
    generation = connect(max_new_tokens=2)
    refit(policy, generation)
    with pytest.raises(CapabilityError):
        refit(policy, generation, **options)
    assert generation.generate(prompts([5]))["weights_version"].tolist() == [1]
    assert len(fake.loads) == 1


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
    assert not fake.loads
    generation.generate(prompts([5]))
    other.shutdown()


@pytest.mark.parametrize("fault", ["refuse", "hang", "hang up", "lie"])
def test_load_that_fails_leaves_the_engine_torn_until_a_full_refit(
    connect: Any, fake: FakeSglangServer, policy: Any, fault: str
) -> None:
    generation = connect(load_timeout_s=1.0, max_new_tokens=2)
    refit(policy, generation)
    fake.load_fault = fault
    with pytest.raises((RefitError, WorkerDiedError, DeadlineError)):
        refit(policy, generation)
    assert generation.weights_version == 1
    with pytest.raises(WeightsTornError):
        generation.generate(prompts([5]))
    fake.load_fault = ""
    refit(policy, generation)
    assert generation.generate(prompts([5]))["weights_version"].tolist() == [2]


def test_restart_loses_the_weights_of_a_refit_until_the_next(
    connect: Any, fake: FakeSglangServer, policy: Any
) -> None:
    generation = connect(max_new_tokens=2)
    refit(policy, generation)
    fake.stop()
    fake.start()
    for _ in range(2):
        with pytest.raises(WeightsTornError):
            generation.generate(prompts([5]))
    assert not fake.requests
    refit(policy, generation)
    assert generation.generate(prompts([5]))["weights_version"].tolist() == [2]


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


def test_server_with_weights_of_an_earlier_refit_generates_only_after_one(
    connect: Any, fake: FakeSglangServer, policy: Any
) -> None:
    fake.weight_version, fake.weight_path = "rl-0123-7", "/gone"
    generation = connect(max_new_tokens=2)
    with pytest.raises(WeightsTornError):
        generation.generate(prompts([5]))
    refit(policy, generation)
    generation.generate(prompts([5]))


def test_directory_without_room_is_refused_before_the_engine_is_torn(
    connect: Any, fake: FakeSglangServer, policy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserve = os.posix_fallocate

    def full(file: int, *rest: int) -> None:
        if "rl-sglang-" in os.readlink(f"/proc/self/fd/{file}"):
            raise OSError(28, "No space left on device")
        reserve(file, *rest)

    generation = connect(max_new_tokens=2)
    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(ConfigError, match="No space left"):
        refit(policy, generation)
    assert generation.generate(prompts([5]))["weights_version"].tolist() == [0]


def test_cache_is_flushed_when_asked_for(connect: Any, fake: FakeSglangServer) -> None:
    assert connect().invalidate_kv_cache()
    assert fake.flushes == 1
