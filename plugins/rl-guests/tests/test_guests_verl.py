"""verl's checkpoint engine by its registry: one trainer, several rollout workers, and faults."""

from __future__ import annotations

import asyncio
import importlib.util
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch

from rl_core.errors import ConfigError, DeadlineError, RefitPeerError

if TYPE_CHECKING:
    from collections.abc import Iterator

if importlib.util.find_spec("verl") is None:
    pytest.skip("verl is not installed here", allow_module_level=True)

from verl.checkpoint_engine import base

BUCKET = 4096


def tensors(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    dtypes = [torch.float32, torch.bfloat16, torch.int64]
    made = {f"layer.{i}": torch.randn(40, 9).to(dtypes[i % 3]) for i in range(12)}
    return {**made, "large": torch.randn(100, 100), "none": torch.empty(0, 3)}


def engine(master: bool = False, **options: Any) -> Any:
    how = {"bucket_size": BUCKET, "deadline_s": 10.0, **options}
    return base.CheckpointEngineRegistry.new("rl_core", is_master=master, **how)


def connect(actors: list[Any], rollouts: list[Any]) -> None:
    """As verl's manager does, which calls all workers at once."""
    metadata = [one.prepare() for one in [*actors, *rollouts]]
    topology = type(actors[0]).build_topology(len(actors), len(rollouts), metadata)
    calls = []
    for group, given in zip((actors, rollouts), topology, strict=True):
        for index, one in enumerate(group):
            kwargs = {key: values[index] for key, values in given.items()}
            calls.append(asyncio.to_thread(one.init_process_group, **kwargs))

    async def all_of_them() -> None:
        await asyncio.gather(*calls)

    asyncio.run(all_of_them())


def update(actors: list[Any], rollouts: list[Any], weights: Any) -> list[Any]:
    """What each rollout worker got or raised, after what each actor raised."""

    async def take(one: Any) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() async for name, tensor in one.receive_weights()}

    async def all_of_them() -> list[Any]:
        sent = [one.send_weights(weights()) for one in actors]
        taken = [take(one) for one in rollouts]
        return await asyncio.gather(*sent, *taken, return_exceptions=True)

    return asyncio.run(all_of_them())


@pytest.fixture
def group() -> Iterator[tuple[list[Any], list[Any]]]:
    """Two ranks of an actor, and three rollout workers."""
    actors, rollouts = [engine(master=True), engine()], [engine() for _ in range(3)]
    connect(actors, rollouts)
    yield actors, rollouts
    for one in [*actors, *rollouts]:
        one.finalize()


def test_memory_that_the_trainer_uses_again_is_not_sent(group):
    actors, rollouts = group
    buffer = torch.empty(40, 9)

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(6):
            yield f"layer.{number}", buffer.fill_(number)

    found = update(actors[:1], rollouts, weights)
    assert [float(t.mean()) for t in found[1].values()] == [0, 1, 2, 3, 4, 5]


def test_weights_that_cannot_be_made_end_the_update_everywhere(group):
    actors, rollouts = group

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(tensors(0).items())[:9]
        raise ValueError("no more")

    error, *found = update(actors[:1], rollouts, weights)
    assert isinstance(error, ValueError)
    assert all(isinstance(one, RefitPeerError) for one in found)


def test_who_does_not_come_or_send_is_named_in_time():
    actor, rollout = engine(master=True, deadline_s=0.5), engine(deadline_s=0.5)
    with pytest.raises(DeadlineError, match="one of 2 rollout workers"):
        connect([actor], [rollout, mock.Mock()])
    [found] = update([], [rollout], None)
    assert isinstance(found, DeadlineError)
    assert "the trainer did not answer" in str(found)
    for one in (actor, rollout):
        one.finalize()


def test_what_cannot_be_meant_is_refused():
    with pytest.raises(ConfigError):
        engine(verify="often")
    with pytest.raises(ConfigError) as caught:
        engine().init_process_group(1, 2, {"address": "/nowhere/at/all", "key": b"k"})
    assert caught.value.details["key"] == "checkpoint_engine.backend"
