"""verl's checkpoint engine by its registry: one trainer, several rollout workers, and faults."""

from __future__ import annotations

import asyncio
import importlib.util
import multiprocessing
import os
import signal
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch

from rl_conformance.faults import at_the_first_bucket
from rl_core.errors import ConfigError, DeadlineError, RefitCorrupted, RefitPeerError, RLError
from rl_core.weights.sending.share import Share

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


def same(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return list(got) == list(wanted) and all(torch.equal(got[n], wanted[n]) for n in wanted)


def test_all_rollouts_get_all_weights_update_after_update(group):
    actors, rollouts = group
    for seed in range(3):
        found = update(actors, rollouts, lambda seed=seed: iter(tensors(seed).items()))
        assert found[:2] == [None, None]
        assert all(same(got, tensors(seed)) for got in found[2:])
        for one in [*actors, *rollouts]:
            one.finalize()
        connect(actors, rollouts)


def test_memory_that_the_trainer_uses_again_is_not_sent(group):
    actors, rollouts = group
    buffer = torch.empty(40, 9)

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(6):
            yield f"layer.{number}", buffer.fill_(number)

    found = update(actors[:1], rollouts, weights)
    assert [float(t.mean()) for t in found[1].values()] == [0, 1, 2, 3, 4, 5]


def test_a_byte_that_changes_is_found_by_all(group):
    actors, rollouts = group
    buckets: list[Any] = []
    prepare = Share.prepare

    def remember(*args: Any, **options: Any) -> Any:
        buckets.append(prepare(*args, **options))
        return buckets[-1]

    def damage() -> None:
        buckets[-1].lane.data[5] ^= 64

    with mock.patch.object(Share, "prepare", remember), at_the_first_bucket(damage):
        found = update(actors[:1], rollouts, lambda: iter(tensors(0).items()))
    assert all(isinstance(one, RLError) for one in found)
    assert any(isinstance(one, RefitCorrupted) for one in found)


def test_weights_that_cannot_be_made_end_the_update_everywhere(group):
    actors, rollouts = group

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(tensors(0).items())[:9]
        raise ValueError("no more")

    error, *found = update(actors[:1], rollouts, weights)
    assert isinstance(error, ValueError)
    assert all(isinstance(one, RefitPeerError) for one in found)


def test_a_rollout_that_leaves_ends_the_update_everywhere(group):
    actors, rollouts = group
    rollouts[1].finalize()
    found = update(actors[:1], [rollouts[0], rollouts[2]], lambda: iter(tensors(0).items()))
    assert all(isinstance(one, RLError) for one in found)


def killed(pipe: Any) -> None:
    one = engine(master=True)
    pipe.send(one.prepare())
    one.init_process_group(0, 2, {})

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(tensors(0).items())[:9]
        os.kill(os.getpid(), signal.SIGKILL)

    asyncio.run(one.send_weights(weights()))


def test_a_killed_trainer_is_noticed():
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    trainer = context.Process(target=killed, args=(theirs,))
    trainer.start()
    rollout = engine()
    rollout.init_process_group(1, 2, ours.recv())
    [found] = update([], [rollout], None)
    trainer.join()
    assert trainer.exitcode == -signal.SIGKILL
    assert isinstance(found, RefitPeerError)
    rollout.finalize()


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
